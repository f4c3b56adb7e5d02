"""Settings of `spectrain bench`."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from spectrain.config.evaluation import ShapeConfig
from spectrain.config.files import Positive, Stage


class BenchConfig(Stage):
    """batches: numbers of rows. context: tokens behind which passes are timed, and the most that a prompt may have. shapes: `chain` and
    `ngram` are the depths that are drafted always, which no policy exceeds. prompts: how many at least are answered at each batch, each
    set of rows `repeats` times. compile: as of an evaluation.
    """

    batches: tuple[Positive, ...] = (1, 2, 4, 8, 16, 32)
    suite: str = "quick"
    shapes: ShapeConfig = ShapeConfig()
    context: Positive = 256
    max_new_tokens: Annotated[int, Field(ge=3)] = 32
    prompts: Positive = 8
    repeats: Positive = 3
    compile: bool | Literal["auto"] = "auto"

    @field_validator("batches")
    @classmethod
    def _rising(cls, batches: tuple[int, ...]) -> tuple[int, ...]:
        if not batches:
            raise ValueError("at least one batch is needed, such as 1,8,32")
        return tuple(sorted(set(batches)))
