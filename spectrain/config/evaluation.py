"""Settings of an evaluation: shapes of the drafts, and suites of prompts by domain."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from spectrain.config.files import Positive, Stage


class ShapeConfig(Stage):
    """chain: depth of the head's chain. ngram: depth of n-gram drafts, which cost nothing to make. tree: top_k, depth and budget."""

    chain: Positive = 4
    ngram: Positive = 8
    tree_top_k: Positive = 4
    tree_depth: Positive = 5
    tree_budget: Positive = 15

    def within(self, most: int | None) -> "ShapeConfig":
        """No deeper than `most` drafts on a path (None: as it is)."""
        if most is None:
            return self
        return self.model_copy(update={"chain": min(self.chain, most), "tree_depth": min(self.tree_depth, most)})


class EvaluationConfig(Stage):
    """suite: a file of eval/suites. speed_prompts: prompts by domain timed one by one, of at most speed_prompt_tokens tokens.

    tree: a file of `spectrain evaluate --write-tree`, whose tree is measured too; tree_nodes: its tree of so many nodes instead of the
    one that is best at batch 1. temperature: above 0 every answer is a draw by the rule and law that `auto` stands for; `seed` and the
    prompt's id give its seed. compile: how the timed passes are made, the same for every arm (true, false, or "auto": compiled where
    the whole run repays it).
    """

    suite: str = "eval/suites/quick.yaml"
    shapes: ShapeConfig = ShapeConfig()
    tree: str | None = None
    tree_nodes: Positive | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    batch_size: Positive = 36
    speed_prompts: Positive = 2
    speed_prompt_tokens: Positive = 300
    speed_max_new_tokens: Positive = 64
    compile: bool | Literal["auto"] = "auto"
    seed: int = 0


class Suite(Stage):
    """Evaluation prompts by domain: `prompts[domain]` = prompts to take; files are `<folder>/<domain>.jsonl`.

    skip: prompts of each domain that are passed over first: with the same seed and max_prompt_tokens, a suite that takes no more than
    these shares none with this one.
    """

    name: str
    version: Positive
    folder: str
    prompts: dict[str, Positive]
    max_prompt_tokens: Positive
    max_new_tokens: Positive
    seed: int = 0
    skip: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _has_domains(self) -> "Suite":
        if not self.prompts:
            raise ValueError("a suite needs at least one domain under `prompts`")
        return self
