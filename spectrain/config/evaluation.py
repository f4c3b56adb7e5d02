"""Settings of an evaluation: shapes of the drafts, and suites of prompts by domain."""

from typing import Literal

from pydantic import model_validator

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

    compile: how the timed passes are made, the same for every arm (true, false, or "auto": compiled where the whole run repays it).
    """

    suite: str = "eval/suites/quick.yaml"
    shapes: ShapeConfig = ShapeConfig()
    batch_size: Positive = 36
    speed_prompts: Positive = 2
    speed_prompt_tokens: Positive = 300
    speed_max_new_tokens: Positive = 64
    compile: bool | Literal["auto"] = "auto"
    seed: int = 0


class Suite(Stage):
    """Evaluation prompts by domain: `prompts[domain]` = prompts to take; files are `<folder>/<domain>.jsonl`."""

    name: str
    version: Positive
    folder: str
    prompts: dict[str, Positive]
    max_prompt_tokens: Positive
    max_new_tokens: Positive
    seed: int = 0

    @model_validator(mode="after")
    def _has_domains(self) -> "Suite":
        if not self.prompts:
            raise ValueError("a suite needs at least one domain under `prompts`")
        return self
