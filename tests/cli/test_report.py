"""`spectrain report`: one report again, with what the bench wrote beside it, and several put into one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spectrain.data.formats import Prompt
from spectrain.decoding.shapes import Chain
from spectrain.drafters.lookup import NGram
from spectrain.drafters.scripted import Scripted
from spectrain.evaluation.comparison import compared, labels_of
from spectrain.evaluation.measure import Arm, measure_tau
from spectrain.evaluation.metrics import tau_table
from spectrain.evaluation.records import Records, records_of
from spectrain.evaluation.render import write_report
from spectrain.target.model import Target

PROMPTS = [Prompt(f"p{i}", "even" if i % 2 == 0 else "odd", (f"w{20 + i} " * (i + 2),), "") for i in range(6)]
DOMAINS = {domain: [p for p in PROMPTS if p.domain == domain] for domain in ("even", "odd")}


def guesses(target: Target, plain: dict[str, list[int]], right: int) -> Scripted:
    """A drafter whose first `right` drafts are the answer's own tokens."""
    starts = {tuple(target.encode(p.chat)): plain[p.id] for p in PROMPTS}

    def draft(ids: list[int]) -> list[int]:
        start = next(start for start in starts if tuple(ids[: len(start)]) == start)
        at = len(ids) - len(start)
        return [*starts[start][at : at + right], 7, 7][:3]

    return Scripted(draft)


def folder_with_report(target: Target, out: Path, right: int) -> Path:
    """Counts of plain decoding, n-gram lookup and a "head" of a kind, as an evaluation keeps them."""
    arms = [Arm("plain"), Arm("ngram chain:2", NGram(), Chain(2), "n-gram", by="ngram")]
    keys = {(name, "tau"): name for name in ("plain", "ngram chain:2", "head chain:3")}
    records = Records(out / "records.jsonl", keys)
    measure_tau(target, arms[0], PROMPTS, records, max_new_tokens=10, batch_size=6)
    answers = {r.id: r.tokens for r in records.of("plain", "tau", PROMPTS)}
    arms.append(Arm("head chain:3", guesses(target, answers, right), Chain(3), "EAGLE3", by="head"))
    for arm in arms[1:]:
        measure_tau(target, arm, PROMPTS, records, max_new_tokens=10, batch_size=6)
    report = {
        "format": 2, "title": "a head", "made": "2001-02-03", "target": "tiny", "suite": {"name": "s v1", "sha256": "ab" * 32},
        "settings": {"max_new_tokens": 10, "temperature": 0.0, "dtype": "float32", "threads": 1, "machine": "here",
                     "speed_max_new_tokens": 8},
        "versions": {"torch": "1"}, "arms": [arm.describe() for arm in arms], "domains": list(DOMAINS), "baseline": None,
        "tau": {a.name: tau_table({d: records.of(a.name, "tau", rows) for d, rows in DOMAINS.items()}, a.shape.depth if a.shape else 0)
                for a in arms},
        "speed": {}, "exactness": {}, "advice": [], "notes": [], "keys": {name: key for (name, _), key in keys.items()},
    }  # fmt: skip
    write_report(report, out)
    return out


@pytest.fixture(scope="module")
def folders(target: Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("reports")
    return tuple(folder_with_report(target, root / name / "evaluation", right) for name, right in (("young", 1), ("old", 2)))  # type: ignore[return-value]


def test_heads_are_mixed_up_side_by_side(folders: tuple[Path, Path], cli: Callable[..., Any], tmp_path: Path) -> None:
    result = cli("report", *folders, "--out", tmp_path, "--no-pictures")
    assert result.exit_code == 0, result.output
    merged = json.loads((tmp_path / "report.json").read_text())
    assert [arm["name"] for arm in merged["arms"]] == ["plain", "ngram chain:2", "young chain:3", "old chain:3"]
    own = [json.loads((folder / "report.json").read_text())["tau"]["head chain:3"] for folder in folders]
    assert [merged["tau"]["young chain:3"], merged["tau"]["old chain:3"]] == own
    pair = next(p for p in merged["pairs"] if {p["a"], p["b"]} == {"young chain:3", "old chain:3"})
    assert pair["a"] == "old chain:3" and pair["prompts"] == 6
    taus = [cells["all (micro)"]["tau"] for cells in own]
    assert pair["difference"] == pytest.approx(taus[1] - taus[0])
    assert "old chain:3" in (tmp_path / "report.html").read_text() and "old chain:3" in result.stdout


def test_reports_of_other_prompts_are_compared(folders: tuple[Path, Path], cli: Callable[..., Any], tmp_path: Path) -> None:
    report = json.loads((folders[1] / "report.json").read_text())
    for key, value, named in (("suite", {"name": "t v1", "sha256": "cd" * 32}, "suite cdcdcdcdcdcd"), ("target", "other", "target other")):
        other = tmp_path / key
        other.mkdir()
        (other / "report.json").write_text(json.dumps({**report, key: value}))
        result = cli("report", folders[0], other, "--out", tmp_path / "out")
        assert result.exit_code == 1 and named in " ".join(result.stderr.split())
    result = cli("report", *folders)
    assert result.exit_code == 1 and "add --out FOLDER" in " ".join(result.stderr.split())
    assert labels_of([Path("a/x"), Path("b/x")]) == ["a", "b"] and labels_of([Path("a/x"), Path("b/y")]) == ["x", "y"]
    with pytest.raises(ValueError, match="named twice"):
        labels_of([Path("a"), Path("a")])


def test_bench_of_the_folder_is_left_out(folders: tuple[Path, Path], cli: Callable[..., Any], tmp_path: Path) -> None:
    rates = {"plain": 10.0, "speculative": 12.0, "table": 12.0, "adaptive": 11.9}
    rows = [{"batch": b, **{arm: rate * b for arm, rate in rates.items()}, "speedup": 1.2, "k": 3, "tau": 2.0, "break_even": 1.7}
            for b in (1, 2)]  # fmt: skip
    (folders[0] / "bench.json").write_text(json.dumps({"drafters": {"head": {"rows": rows, "flips_at": None, "policy": {}}}}))
    result = cli("report", folders[0], "--out", tmp_path, "--no-pictures", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["batch"]["drafters"]["head"]["rows"] == rows
    assert "Throughput (batch 2): 20 tokens/s plainly, 24 with head" in json.loads(result.stdout)["service"][0]
    page = (tmp_path / "report.html").read_text()
    assert "tokens/s of the whole batch" in page and "By batch" in (tmp_path / "report.md").read_text()


def test_heads_of_one_report_are_put_under_one_name(folders: tuple[Path, Path]) -> None:
    """Two heads of one report stay two; arms that lose are told of; comparisons are within a temperature."""
    reports = {}
    for label, folder in zip(("a", "b"), folders, strict=True):
        report = json.loads((folder / "report.json").read_text())
        arm = report["arms"][2]
        second = {**arm, "name": "two/head chain:3", "by": "two/head"}
        warm = [{**report["arms"][1], "name": "ngram chain:2 T=1", "temperature": 1.0, "plain": "plain T=1"}]
        report["arms"] += [second, *warm]
        report["tau"] |= {"two/head chain:3": report["tau"]["head chain:3"], "ngram chain:2 T=1": report["tau"]["ngram chain:2"]}
        cell = {key: 0.5 for key in ("seconds", "tokens_per_s", "speedup", "lo", "hi", "tau", "v", "draft", "other", "break_even")}
        cells = {d: {**cell, "tokens": 1, "prompts": 2} for d in (*DOMAINS, "all")}
        report["speed"] = {arm["name"]: cells for arm in report["arms"] if not arm["temperature"]}
        report["alpha"] = {name: {"all": {"value": value}} for name, value in (("head", 0.1), ("two/head", 0.2), ("two/head T=1", 0.3))}
        reports[label] = report
    records = {label: dict(records_of(folder, reports[label])) for label, folder in zip(reports, folders, strict=True)}
    for found in records.values():
        found |= {"two/head chain:3": found["head chain:3"], "ngram chain:2 T=1": found["ngram chain:2"][:3]}
    merged = compared(reports, records)
    assert {key: cells["all"]["value"] for key, cells in merged["alpha"].items()} == {
        "a": 0.1, "a two/head": 0.2, "a two/head T=1": 0.3, "b": 0.1, "b two/head": 0.2, "b two/head T=1": 0.3,
    }  # fmt: skip
    assert {arm["by"] for arm in merged["arms"]} == {"none", "ngram", "a", "a two/head", "b", "b two/head"}
    assert any("With b two/head chain:3 speculation loses here: 0.50×, because" in sentence for sentence in merged["advice"])
    assert len(merged["pairs"]) == 5 * 4 // 2
    for report, texts in zip(reports.values(), ("1" * 64, "2" * 64), strict=True):
        report["suite"]["prompts_sha256"] = texts
    with pytest.raises(ValueError, match="prompts 222222222222 instead of 111111111111"):
        compared(reports, records)


def test_reading_records_cuts_them(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """An evaluation may be in the middle of a line: who only reads leaves that line out and the file as it is."""
    report, content = json.loads((folders[0] / "report.json").read_text()), (folders[0] / "records.jsonl").read_bytes()
    (tmp_path / "records.jsonl").write_bytes(content + b'{"key": "half')
    assert records_of(tmp_path, report) == records_of(folders[0], report) != {}
    assert (tmp_path / "records.jsonl").read_bytes() == content + b'{"key": "half'
    Records(tmp_path / "records.jsonl", "k")
    assert (tmp_path / "records.jsonl").read_bytes() == content
