"""What a report and the file of a tree hold, and how they are checked when they are read back, by this or a later version."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

ALL, MACRO, MICRO = "all", "all (macro)", "all (micro)"
NUMBER = float | None  # None: not measured, shown as a dash


class _Part(BaseModel):
    """A piece of the report: frozen, finite numbers only; further keys are kept, since a later version may write them."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, protected_namespaces=(), extra="allow")


def _record(name: str, fields: dict[Any, str]) -> Any:
    """A part with fields given as type → names."""
    found: dict[str, Any] = {key: (kind, ...) for kind, keys in fields.items() for key in keys.split()}
    return create_model(name, __base__=_Part, **found)


Suite: Any = _record("Suite", {str: "name sha256"})
Settings: Any = _record("Settings", {str: "dtype machine", int: "max_new_tokens speed_max_new_tokens threads", float: "temperature"})
Arm: Any = _record("Arm", {str: "name drafter shape rule", int: "depth width budget"})
Tau: Any = _record("Tau", {NUMBER: "tau lo hi", int: "tokens rounds prompts", list[NUMBER]: "acceptance conditional"})
Speed: Any = _record("Speed", {NUMBER: "seconds tokens_per_s speedup lo hi tau v draft other break_even", int: "tokens prompts"})
Exactness: Any = _record("Exactness", {int: "prompts equal ties failed"})
Baseline: Any = _record("Baseline", {str: "name", NUMBER: "tokens_per_s plain_tokens_per_s ratio lo hi"})
Step: Any = _record("Step", {int: "step", NUMBER: "minutes loss measured_tau", list[NUMBER]: "alpha"})
Training: Any = _record("Training", {list[Step]: "steps"})


Entry: Any = _record("Entry", {list[list[int]]: "paths", int: "nodes", NUMBER: "tau"})
Head: Any = _record("Head", {str: "kind sha256"})
TreeSuite: Any = _record("TreeSuite", {str: "name"})
TreeFile: Any = _record("TreeFile", {Literal[1]: "format", Entry: "tree", list[Entry]: "budgets", Head: "head", TreeSuite: "suite",
                                     list[str]: "prompts"})  # fmt: skip


class Report(_Part):
    """What an evaluation found; `coverage` and `training` may be absent, `baseline` may be null."""

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

    @property
    def sampled(self) -> bool:
        """Whether the answers are draws; then every τ is shown with its rule and temperature."""
        return bool(self.settings.temperature)

    def label(self, arm: Arm) -> str:
        """An arm's name; where answers are draws, with the temperature and the rule that verified them."""
        if not self.sampled:
            return arm.name  # type: ignore[no-any-return]
        rule = "" if arm == self.arms[0] else f"{arm.rule}, "
        return f"{arm.name} ({rule}T={self.settings.temperature:g})"

    @property
    def rows(self) -> list[str]:
        """The domains, then all together."""
        return [*self.domains, ALL]

    @property
    def drafted(self) -> list[Arm]:
        """The arms that speculate: all but the first."""
        return self.arms[1:]

    def tau_of(self, arm: str, domain: str) -> Tau | None:
        """The τ of an arm; `all` is micro where there is one, as the speed of `all` is, else macro."""
        cells = self.tau.get(arm, {})
        return next((cells[key] for key in ((MICRO, MACRO) if domain == ALL else (domain,)) if key in cells), None)

    def speed_of(self, arm: str, domain: str) -> Speed | None:
        """The speed of an arm, None where it was not measured."""
        return self.speed.get(arm, {}).get(domain)


def parse_report(report: dict[str, Any]) -> Report:
    """Check a report; ValueError naming each key that is missing or unfit."""
    faults: list[str] = []
    try:
        parsed = Report.model_validate(report)
        faults += [] if parsed.arms else ["'arms' is empty"]
        wanted = [(part, arm.name) for arm in parsed.drafted for part in ("tau", "speed")]
        faults += [f"'{part}.{name}' is missing" for part, name in wanted if name not in getattr(parsed, part)]
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
