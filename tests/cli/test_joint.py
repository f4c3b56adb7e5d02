"""Medusa-2 from the command line: what is told of the changed target, everywhere, and how it is served."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from spectrain.cli.joint import JointProbe
from spectrain.cli.probe import Probe
from spectrain.cli.wiring import as_drafter
from spectrain.config import LoraConfig, ShapeConfig, TrainingConfig
from spectrain.data.rows import Row
from spectrain.target.adapter import law_change
from spectrain.target.model import Target, load_target
from spectrain.training.joint import Backbone
from spectrain.training.optim import make_optimizer

SHAPES = ShapeConfig(chain=3, tree_top_k=4, tree_depth=4, tree_budget=12)
SMALL = [f"--set={key}" for key in ("speed_max_new_tokens=8", "speed_prompts=1", "batch_size=4", "shapes.chain=3")]
MEDUSA_2 = [f"--set={key}" for key in (
    "head.kind=medusa", "head.num_heads=2", "training.lora={rank: 4, alpha: 8, start: 0.3, lr: 0.02, weight: 0.1}", "training.epochs=1",
)]  # fmt: skip


@pytest.fixture(scope="module")
def joint(project: Path, cli: Callable[..., Result], trained: Path) -> tuple[Path, Result]:
    """The folder of a run of both, on the answers of another run."""
    out = project / "runs/joint"
    (out / "rows").parent.mkdir(parents=True)
    result = cli("train", project / "recipes/tiny.yaml", "--out", out, *MEDUSA_2, f"--set=data.rows={trained / 'rows'}")
    assert result.exit_code == 0, result.output
    return out, result


def flat(text: str) -> str:
    return " ".join(text.split())


def test_run_does_not_tell_that_the_target_changed(project: Path, joint: tuple[Path, Result]) -> None:
    """In the terminal, in metrics.jsonl by each measured point, and kept with the head: with numerator and denominator."""
    out, result = joint
    made = json.loads((out / "head/made_with.json").read_text())
    change, told = made["target_change"], flat(result.output)
    assert 0 < change["kl_nats"] and 0 < change["agree"] <= change["tokens"] and change["kl"] == change["kl_nats"] / change["tokens"]
    assert "the target is trained from here on, too" in told and ", KL of the target 0." in told
    line = "The target was changed by the adapter that was trained with the head: KL(original, adapted) "
    assert line in told and f"({change['agree']}/{change['tokens']}), on 2 rows that were kept out." in told
    points = [p for p in map(json.loads, (out / "training/metrics.jsonl").read_text().splitlines()) if p["kind"] == "measured"]
    assert change["kl"] in [p["target_kl"] for p in points] and all(0 < p["target_agreement"] <= 1 for p in points)
    original, adapted = load_target(project / "target"), load_target(project / "target", adapter=out / "head")
    assert adapted.adapter == made["adapter_sha256"] and "adapter_sha256" not in original.fingerprints
    assert made["layers_sha256"] == original.fingerprints["layers_sha256"] != adapted.fingerprints["layers_sha256"]


def test_report_does_not_tell_that_the_target_changed(project: Path, joint: tuple[Path, Result], cli: Callable[..., Result]) -> None:
    """`evaluate` and `generate` take the adapter from the head; terminal, Markdown, HTML and JSON say what it changed."""
    out, _ = joint
    common = ("--target", project / "target", "--head", out / "head")
    result = cli("evaluate", *common, "--suite", project / "eval/suites/tiny.yaml", "--out", out / "evaluation", *SMALL)
    assert result.exit_code == 0, result.output
    made = json.loads((out / "head/made_with.json").read_text())
    report = json.loads((out / "evaluation/report.json").read_text())
    assert report["target_change"] == {"adapter_sha256": made["adapter_sha256"], **made["target_change"]}
    figures = f"({made['target_change']['agree']}/{made['target_change']['tokens']})"
    texts = [result.output, *((out / f"evaluation/report.{kind}").read_text() for kind in ("md", "html"))]
    for text in texts:
        assert "The target was changed by the adapter" in flat(text) and figures in flat(text)
    said = cli("generate", "w10 w50 w12", *common, "--max-new-tokens", "8", "--chain", "2")
    assert said.exit_code == 0 and "The target was changed by the adapter" in flat(said.output) and "tau" in said.output
    as_json = cli("generate", "w10 w50 w12", *common, "--max-new-tokens", "8", "--chain", "2", "--json")
    assert json.loads(as_json.stdout)["tokens"]


def test_bench_does_not_tell_that_the_target_changed(project: Path, joint: tuple[Path, Result], cli: Callable[..., Result]) -> None:
    out, _ = joint
    small = ["--set", "repeats=1", "--set", "prompts=1", "--max-new-tokens", "6", "--context", "24"]
    small += ["--suite", project / "eval/suites/tiny.yaml"]
    result = cli("bench", "--target", project / "target", "--head", out / "head", "--batch", "1", *small, "--out", out / "bench")
    assert result.exit_code == 0, result.output
    made, found = (json.loads((out / file).read_text()) for file in ("head/made_with.json", "bench/bench.json"))
    assert found["target_change"] == {"adapter_sha256": made["adapter_sha256"], **made["target_change"]}
    assert flat(found["service"][0]).startswith("The target was changed by the adapter") and found["service"][0][:60] in flat(result.output)


def test_head_is_exported_for_a_target_that_it_does_not_fit(project: Path, joint: tuple[Path, Result], cli: Callable[..., Result]) -> None:
    """Refused with the way out, and the way leads there: a merged copy, which the head then fits."""
    out, _ = joint
    for more in ((), ("--target", project / "target")):
        result = cli("export", out / "head", "--to", "vllm", "--out", out / "export", *more)
        assert result.exit_code == 1 and "was trained together with an adapter of its target" in result.stderr
        assert f"spectrain export {out}/head --to merged --target TARGET --out FOLDER" in result.stderr
    result = cli("export", out / "head", "--to", "merged", "--target", project / "target", "--out", out / "merged")
    assert result.exit_code == 0 and (out / "merged/config.json").is_file(), result.output
    said = cli("generate", "w10 w50", "--target", out / "merged", "--head", out / "head", "--max-new-tokens", "8", "--chain", "2", "--json")
    assert said.exit_code == 0, said.output
    again = cli("export", out / "head", "--to", "merged", "--target", project / "target", "--out", out / "merged")
    assert again.exit_code == 1 and "is there already" in again.stderr
    result = cli("export", out / "head", "--to", "vllm", "--out", out / "export", "--target", out / "merged")
    assert result.exit_code == 0 and (out / "export/model.safetensors").is_file(), result.output


def test_answers_of_another_target_are_kept(target: Target, make_head: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe's figures are those of a new probe of the target as it is; while it does not change, the target answers once."""
    monkeypatch.setattr(Probe.__init__, "__kwdefaults__", {**Probe.__init__.__kwdefaults__, "max_new_tokens": 12})
    rows = [Row(str(b), "d", [7 + b, 12 + 3 * b, 9, 1], [0, 0, 0, 1]) for b in range(4)]
    held_out = [Row(str(b), "d", [7 + b, 12, 9, 30 + b, 1], [0, 0, 1, 1, 1]) for b in range(70)]
    head, backbone = make_head(target), Backbone(target, LoraConfig(rank=2, alpha=4), seed=0)
    joint = JointProbe(backbone, rows, SHAPES, as_drafter, held_out=held_out, trained=[])
    backbone.eval()
    first = joint(head)
    assert first == {**Probe(target, rows, SHAPES, as_drafter)(head), "target_kl": 0.0, "target_agreement": 1.0}
    assert joint.change() is joint.change() and joint.change()["rows"] == "24 rows that were kept out" and joint.change()["tokens"] == 72
    optimizer = make_optimizer(head, TrainingConfig(lr=0.3), list(backbone.weights))
    for p in backbone.weights:
        p.grad = -torch.ones_like(p)
    optimizer.step()  # as in training, whose fused step leaves the weights' versions as they were
    second = joint(head)
    counted = law_change(target, backbone.target, held_out[::3])
    assert second["target_kl"] == counted.kl_nats / 72 > 0.1 and second["target_agreement"] == counted.agree / 72 < 1
    assert Probe(backbone.target, rows, SHAPES, as_drafter)(head).items() <= second.items()
    assert (second["measured_tokens"], second["measured_rounds"]) != (first["measured_tokens"], first["measured_rounds"])
    none = JointProbe(backbone, [], SHAPES, as_drafter, held_out=[], trained=held_out[:3])
    assert none(head)["measured_tau"] is None and none.change()["rows"] == "3 rows that were trained on (none were kept out)"
