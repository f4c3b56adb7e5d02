"""Settings of an evaluation: drafters, shapes of the drafts, temperatures, and suites of prompts by domain."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from spectrain.config.files import Positive, Stage

Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]


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
    """suite: a file of eval/suites; prompts: a file of prompts instead, all of which are asked. speed_prompts: prompts by domain that are
    timed one by one, of at most speed_prompt_tokens tokens, their first turns, `speed_repeats` times each in turns (of several runs the
    one of median time counts).

    forms: shapes that are measured with every drafter: chain:DEPTH, tree:TOP_KxDEPTHxBUDGET, or auto, which is what `shapes` says and the
    depth of the head's chain that is predicted to be best. tree: a file of `spectrain evaluate --write-tree`, whose tree is measured too;
    tree_nodes: its tree of so many nodes instead of the one that is best at batch 1. temperature: one or several; above 0 every answer is
    a draw by the rule and law that `auto` stands for; `seed` and the prompt's id give its seed. speed_temperatures: those at which arms
    are timed; null: 0 where it is measured, else the first. compile: how the timed passes are made, the same for every arm (true, false,
    or "auto": compiled where the whole run repays it). anatomy: whether the target is asked, in a pass of its own over its answers, for
    its entropy, for alpha and for the ranks of what heads draft.
    """

    suite: str = "eval/suites/quick.yaml"
    prompts: str | None = None
    shapes: ShapeConfig = ShapeConfig()
    forms: tuple[str, ...] = ("auto",)
    tree: str | None = None
    tree_nodes: Positive | None = None
    temperature: Temperature | tuple[Temperature, ...] = 0.0
    speed_temperatures: tuple[Temperature, ...] | None = None
    batch_size: Positive = 36
    speed_prompts: Positive = 2
    speed_prompt_tokens: Positive = 300
    speed_max_new_tokens: Positive = 64
    speed_repeats: Positive = 1
    compile: bool | Literal["auto"] = "auto"
    anatomy: bool = True
    seed: int = 0

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Every temperature that is measured, the first one that of the first arm."""
        return self.temperature if isinstance(self.temperature, tuple) else (self.temperature,)

    @property
    def timed_temperatures(self) -> tuple[float, ...]:
        if self.speed_temperatures is not None:
            return self.speed_temperatures
        return (0.0,) if 0.0 in self.temperatures else self.temperatures[:1]

    @model_validator(mode="after")
    def _fits(self) -> "EvaluationConfig":
        found = self.temperatures
        if not found or len({f"{t:g}" for t in found}) != len(found):  # as they are in the arms' names
            raise ValueError(f"temperature needs one or several values, each once, found {list(found)}")
        if odd := sorted(set(self.timed_temperatures) - set(found)):
            raise ValueError(f"speed_temperatures names {odd[0]:g}, which is not among the temperatures {list(found)}; name one of those")
        return self


class Suite(Stage):
    """Evaluation prompts by domain: `prompts[domain]` = how many are taken, or `all` that fit; files are `<folder>/<domain>.jsonl`.

    domains: files of a domain that lie elsewhere or are called otherwise; of a file with prompts of several domains its own are taken,
    all of it where none is. sources: of a domain only prompts of these sources. turns: how many turns of a prompt are asked, in order;
    later ones after plain decoding's answers to those before them. template_kwargs: what the chat template is given besides the messages,
    such as `enable_thinking`. min_prompt_tokens, max_prompt_tokens: of the first turn. skip: prompts of each domain that are passed over
    first: with the same seed and lengths, a suite that takes no more than these shares none with this one.
    """

    name: str
    version: Positive = 1
    folder: str = "eval/prompts"
    prompts: dict[str, Positive | Literal["all"]]
    domains: dict[str, str | tuple[str, ...]] = {}
    sources: dict[str, tuple[str, ...]] = {}
    min_prompt_tokens: Positive = 1
    max_prompt_tokens: Positive = 2048
    max_new_tokens: Positive = 128
    turns: Positive = 1
    template_kwargs: dict[str, Any] = {}
    seed: int = 0
    skip: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _has_domains(self) -> "Suite":
        if not self.prompts:
            raise ValueError("a suite needs at least one domain under `prompts`")
        if taken := sorted({"all", "all (macro)", "all (micro)"} & set(self.prompts)):
            raise ValueError(f"no domain can be called {taken[0]!r}: reports have the figures of all domains under it; call it otherwise")
        if odd := sorted({*self.domains, *self.sources} - set(self.prompts)):
            raise ValueError(f"`domains` and `sources` name {odd[0]}, and `prompts` takes none of it; say there how many")
        return self
