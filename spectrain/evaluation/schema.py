"""What a report and the file of a tree hold, and how they are checked when they are read back, by this or a later version."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from spectrain.decoding.accept import LOSSY

ALL, MACRO, MICRO = "all", "all (macro)", "all (micro)"
NUMBER = float | None  # None: not measured, shown as a dash


class _Part(BaseModel):
    """A piece of the report: frozen, finite numbers only; further keys are kept, since a later version may write them."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, protected_namespaces=(), extra="allow")


def _record(name: str, fields: dict[Any, str], optional: dict[Any, str] | None = None) -> Any:
    """A part with fields given as type → names; optional ones are None where they are absent."""
    found: dict[str, Any] = {key: (kind, ...) for kind, keys in fields.items() for key in keys.split()}
    found |= {key: (kind | None, None) for kind, keys in (optional or {}).items() for key in keys.split()}
    return create_model(name, __base__=_Part, **found)


Suite: Any = _record("Suite", {str: "name sha256"})
Settings: Any = _record("Settings", {str: "dtype machine", int: "max_new_tokens speed_max_new_tokens threads", float: "temperature"},
                        {str: "passes"})  # fmt: skip
Arm: Any = _record("Arm", {str: "name drafter shape rule", int: "depth width budget"}, {float: "temperature", str: "plain"})
Tau: Any = _record("Tau", {NUMBER: "tau lo hi", int: "tokens rounds prompts", list[NUMBER]: "acceptance conditional"},
                   {float: "draft_acceptance", list[float]: "lengths"})  # fmt: skip
Speed: Any = _record("Speed", {NUMBER: "seconds tokens_per_s speedup lo hi tau v draft other break_even", int: "tokens prompts"})
Exactness: Any = _record("Exactness", {int: "prompts equal ties failed"})
Baseline: Any = _record("Baseline", {str: "name", NUMBER: "tokens_per_s plain_tokens_per_s ratio lo hi"})
Step: Any = _record("Step", {int: "step", NUMBER: "minutes loss measured_tau", list[NUMBER]: "alpha"})
Training: Any = _record("Training", {list[Step]: "steps"})
Slice: Any = _record("Slice", {str: "label", NUMBER: "tau lo hi"}, {int: "tokens rounds prompts", float: "first first_lo first_hi"})
Alpha: Any = _record("Alpha", {NUMBER: "value"}, {float: "lo hi", list[NUMBER]: "by_depth"})
Ranks: Any = _record("Ranks", {list[list[float]]: "table"}, {list[int]: "denominator"})
Pair: Any = _record("Pair", {str: "a b", NUMBER: "difference lo hi p"}, {float: "p_adjusted smallest temperature", int: "prompts"})
Split: Any = _record("Split", {}, {float: "tau draft verify other"})
Gap: Any = _record("Gap", {NUMBER: "predicted measured"}, {Split: "by"})
Price: Any = _record("Price", {}, {float: "flops_ratio positions_per_token wasted_positions_per_token drafter_bytes kv_tokens_displaced"})
Piece: Any = _record("Piece", {str: "text", Literal["drafted", "own", "corrected", "prefill"]: "kind", int: "round"})
Node: Any = _record("Node", {str: "text", int: "parent depth rank", bool: "accepted"})
Drawn: Any = _record("Drawn", {int: "index", list[Node]: "nodes"})
Example: Any = _record("Example", {str: "arm prompt", list[Piece]: "tokens"}, {str: "domain id", Drawn: "round"})
Change: Any = _record("Change", {str: "arm domain", NUMBER: "then now"}, {float: "difference lo hi p"})
Against: Any = _record("Against", {str: "file", list[Change]: "rows"}, {str: "note"})
ServedRow: Any = _record("ServedRow", {str: "domain", NUMBER: "tau", list[float]: "acceptance"},
                         {float: "temperature own_tau difference tokens_per_s", int: "drafts equal compared",
                          list[float]: "own_acceptance"})  # fmt: skip
Served: Any = _record("Served", {str: "engine", list[ServedRow]: "rows"}, {str: "model rule head", int: "depth", list[str]: "notes"})
Gate: Any = _record("Gate", {str: "expression", NUMBER: "value", bool: "met"}, {str: "arm"})


Entry: Any = _record("Entry", {list[list[int]]: "paths", int: "nodes", NUMBER: "tau"})
Head: Any = _record("Head", {str: "kind sha256"})
TreeSuite: Any = _record("TreeSuite", {str: "name"})
TreeFile: Any = _record("TreeFile", {Literal[1]: "format", Entry: "tree", list[Entry]: "budgets", Head: "head", TreeSuite: "suite",
                                     list[str]: "prompts"})  # fmt: skip


class Report(_Part):
    """What an evaluation found; parts with a default may be absent, `baseline` may be null.

    Arms come by temperature, each group led by its plain decoding; the keys of `tau`, `speed`, `slices`, `gap` and `price` are arms'
    names, those of `alpha` and `ranks` drafters'.
    """

    title: str
    made: str
    target: str
    suite: Suite
    settings: Settings
    versions: dict[str, str | None]
    arms: list[Arm]
    domains: list[str]
    tau: dict[str, dict[str, Tau]]
    speed: dict[str, dict[str, Speed]]
    exactness: dict[str, Exactness]
    baseline: Baseline | None
    coverage: dict[str, NUMBER] | None = None
    training: Training | None = None
    advice: list[str]
    notes: list[str]
    service: list[str] | None = None
    slices: dict[str, dict[str, list[Slice]]] | None = None
    alpha: dict[str, dict[str, Alpha]] | None = None
    ranks: dict[str, Ranks] | None = None
    pairs: list[Pair] | None = None
    gap: dict[str, dict[str, Gap]] | None = None
    price: dict[str, Price] | None = None
    example: Example | None = None
    against: Against | None = None
    gates: list[Gate] | None = None
    served: Served | None = None
    roofline: dict[str, Any] | None = None
    batch: dict[str, Any] | None = None
    costs: dict[str, Any] | None = None
    licences: dict[str, str] | None = None

    def temperature_of(self, arm: Arm) -> float:
        """Of an arm; of the whole run where arms have none of their own."""
        return float(self.settings.temperature if arm.temperature is None else arm.temperature)

    @property
    def temperatures(self) -> list[float]:
        """Those measured, in the arms' order."""
        return list(dict.fromkeys(map(self.temperature_of, self.arms)))

    @property
    def plains(self) -> set[str]:
        """Names of the arms of plain decoding, one a temperature."""
        return {self.arms[0].name, *(arm.plain for arm in self.arms if arm.plain is not None)}

    @property
    def sampled(self) -> bool:
        """Whether any answers are draws; their τ is shown with rule and temperature."""
        return any(self.temperatures)

    def label(self, arm: Arm) -> str:
        """An arm's name; where answers are draws, with the temperature and the rule that verified them."""
        temperature = self.temperature_of(arm)
        if not temperature:
            return arm.name  # type: ignore[no-any-return]
        rule = "" if arm.name in self.plains else f"{arm.rule}, "
        return f"{self.short(arm)} ({rule}T={temperature:g})"

    def short(self, arm: Arm) -> str:
        """An arm's name without its temperature, for tables of one temperature."""
        return str(arm.name).removesuffix(f" T={self.temperature_of(arm):g}")

    @property
    def rows(self) -> list[str]:
        """The domains, then all together."""
        return [*self.domains, ALL]

    @property
    def drafted(self) -> list[Arm]:
        """The arms that speculate."""
        return [arm for arm in self.arms if arm.name not in self.plains]

    def at(self, temperature: float) -> list[Arm]:
        """The arms of one temperature that speculate."""
        return [arm for arm in self.drafted if self.temperature_of(arm) == temperature]

    def tau_of(self, arm: str, domain: str) -> Tau | None:
        """The τ of an arm; `all` is micro where there is one, as the speed of `all` is, else macro."""
        cells = self.tau.get(arm, {})
        return next((cells[key] for key in ((MICRO, MACRO) if domain == ALL else (domain,)) if key in cells), None)

    def speed_of(self, arm: str, domain: str) -> Speed | None:
        """The speed of an arm, None where it was not measured."""
        return self.speed.get(arm, {}).get(domain)


def parse_report(report: dict[str, Any]) -> Report:
    """Check a report; ValueError naming each key that is missing or unfit, and each arm of a lossy rule: its tokens are not the target's,
    so its figures do not stand beside those of arms that keep the law."""
    faults: list[str] = []
    try:
        parsed = Report.model_validate(report)
        faults += [] if parsed.arms else ["'arms' is empty"]
        faults += [f"the rule of {arm.name!r} is {arm.rule}, which is lossy; leave the arm out" for arm in parsed.arms if arm.rule in LOSSY]
        faults += [f"'tau.{arm.name}' is missing" for arm in parsed.drafted if arm.name not in parsed.tau]
        timed = {parsed.temperature_of(arm) for arm in parsed.arms if parsed.speed.get(arm.name)}
        wanted = [arm.name for arm in parsed.drafted if parsed.temperature_of(arm) in timed]
        faults += [f"'speed.{name}' is missing" for name in wanted if name not in parsed.speed]
    except ValidationError as error:
        faults = _faults(error)
    if faults:
        raise ValueError(f"bad report: {_told(faults)}; `spectrain evaluate` writes a whole one")
    return parsed


def check_tree_file(content: object, path: str) -> None:
    """ValueError naming each key of a tree's file (of `spectrain evaluate --write-tree`) that is missing or unfit."""
    try:
        parsed = TreeFile.model_validate(content, strict=True)
        entries = {"tree": parsed.tree, **{f"budgets.{i}": entry for i, entry in enumerate(parsed.budgets)}}
        faults = [f"'{name}' has {len(e.paths)} paths and says {e.nodes} nodes" for name, e in entries.items() if len(e.paths) != e.nodes]
    except ValidationError as error:
        faults = _faults(error)
    if faults:
        raise ValueError(f"{path} is no whole file of a tree: {_told(faults)}; make it anew with --write-tree")


def _faults(error: ValidationError) -> list[str]:
    found = []
    for e in error.errors():
        what = "is missing" if e["type"] == "missing" else f"is unfit: {e['msg']}"
        found.append(f"'{'.'.join(map(str, e['loc']))}' {what}")
    return found


def _told(faults: list[str]) -> str:
    return "; ".join(faults[:5]) + (f" and {len(faults) - 5} more" if len(faults) > 5 else "")
