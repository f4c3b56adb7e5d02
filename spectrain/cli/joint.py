"""Heads that were trained together with their target: what is measured while they are, what reports say of it, and how it is served."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spectrain.cli.probe import Probe, for_all
from spectrain.config import ShapeConfig
from spectrain.data.rows import Row
from spectrain.decoding.drafter import Drafter
from spectrain.evaluation.processes import ALONE, Processes
from spectrain.heads.base import ADAPTER
from spectrain.target.adapter import LawChange, change_text, law_change
from spectrain.target.model import Target, load_target
from spectrain.training.joint import Backbone

MERGED = "merged"  # as `export --to`: no format of heads
CHANGE_ROWS = 32  # rows on which the change of a target's law is counted


class JointProbe:
    """`Probe` of a target that is trained: it answers anew once it has changed, and how far its law has moved is counted.

    asked: rows to measure acceptance on, may be none. held_out, trained: rows that were kept out, of which CHANGE_ROWS at most serve to
    count the change of the law, and those to take where none were. processes: as of `Probe`.
    """

    def __init__(
        self, backbone: Backbone, asked: Sequence[Row], shapes: ShapeConfig, as_drafter: Callable[[Any], Drafter], *,
        held_out: Sequence[Row], trained: Sequence[Row], processes: Processes = ALONE,
    ) -> None:  # fmt: skip
        self._backbone, self._asked, self._shapes, self._as_drafter = backbone, asked, shapes, as_drafter
        self._processes = processes
        rows = held_out if len(held_out) else trained
        self._rows = [rows[i] for i in range(0, len(rows), -(-len(rows) // CHANGE_ROWS))]
        self._called = f"{len(self._rows)} rows that were {'kept out' if len(held_out) else 'trained on (none were kept out)'}"
        self._probed: tuple[Any, Probe] | None = None
        self._counted: tuple[Any, dict[str, Any]] | None = None

    def __call__(self, head: Any) -> dict[str, Any]:
        """The figures of `Probe`, and `target_kl` and `target_agreement` as of now."""
        found = self.probe(head) if self._asked else {"measured_tau": None}
        change = self.change()
        return {**found, "target_kl": change["kl"], "target_agreement": change["agreement"]}

    def probe(self, head: Any) -> dict[str, Any]:
        """Of the target as it is now."""
        now = self._backbone.state()
        if self._probed is None or self._probed[0] != now:
            self._probed = now, Probe(self._backbone.target, self._asked, self._shapes, self._as_drafter, processes=self._processes)
        return self._probed[1](head)

    def change(self) -> dict[str, Any]:
        """`LawChange.record` of the target as it is now; all processes together, unless it was asked for since the last change."""
        now = self._backbone.state()
        if self._counted is None or self._counted[0] != now:
            found = for_all(self._processes, self._rows, lambda rows: [self._change_on(row) for row in rows])
            self._counted = now, sum(found, start=LawChange()).record(self._called)
        return self._counted[1]

    def _change_on(self, row: Row) -> LawChange:
        return law_change(self._backbone.original, self._backbone.target, [row])


def change_of(head: Path) -> dict[str, Any] | None:
    """`LawChange.record` of the target of a head directory, and its adapter's hash; None for a head that was trained alone."""
    return _change_in(json.loads((head / "made_with.json").read_text()))


def _change_in(made: dict[str, Any]) -> dict[str, Any] | None:
    return {"adapter_sha256": made["adapter_sha256"], **made["target_change"]} if made.get("target_change") else None


def changed_line(change: dict[str, Any]) -> str:
    """That a target was changed, and by how much."""
    return f"The target was changed by the adapter that was trained with the head: {change_text(change)}."


def open_for(name: str, head: Path | None, dtype: str, say: Any, **where: Any) -> Target:
    """A target, with the adapter of the head where it was trained together with one, which is told. where: as for `load_target`."""
    if head is None or not (head / ADAPTER).is_dir():
        return load_target(name, dtype=dtype, **where)
    if change := change_of(head):
        say(changed_line(change))
    return load_target(name, dtype=dtype, adapter=head, **where)


def tell_change(report: dict[str, Any], head: Any, told: str = "advice") -> None:
    """Put into a report that the head's target is another one than it was, and by how much; nothing for a head that was trained alone.
    told: its list of sentences."""
    if change := _change_in(getattr(head, "made_with", {})):
        report["target_change"] = change
        also = "Its answers are exact for the target as it is now."
        report[told] = [f"{changed_line(change)} {also}", *report[told]]


def check_merged(head: Path, target: str | None) -> None:
    """ValueError for a head with an adapter that is to be served, unless the target has the adapter in it: engines load it as it is."""
    adapter = json.loads((head / "made_with.json").read_text()).get("adapter_sha256")
    if adapter is None:
        return
    if target is None or load_target(target).adapter != adapter:
        found = f"{head} was trained together with an adapter of its target, and engines serve the target as it is"
        first = f"spectrain export {head} --to {MERGED} --target TARGET --out FOLDER"
        raise ValueError(f"{found}; first write a merged copy: {first}; then export with --target FOLDER")


def write_merged(head: Path, target: str | None, out: Path) -> Path:
    """Write the target with the head's adapter merged into it as a model folder, whole or not at all, in the precision that it has."""
    from transformers import AutoConfig

    if not (head / ADAPTER).is_dir():
        raise ValueError(f"{head} was trained alone, there is no adapter to merge")
    if target is None or target.endswith(".gguf"):
        raise ValueError(f"--to {MERGED} needs the target, as a folder or a Hub name: add --target NAME")
    if out.exists():
        raise ValueError(f"{out} is there already; choose another folder for the merged target")
    found = load_target(target, adapter=head)  # merged in float32
    kept = AutoConfig.from_pretrained(target).dtype
    part = out.with_name(out.name + ".part")
    found.model.to(kept or found.model.dtype).save_pretrained(part)
    found.tokenizer.save_pretrained(part)
    return part.replace(out)
