"""`evaluate` and `generate` on two processes: nothing is answered twice or left out, and every count is that of one process."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from spectrain.heads.base import save_head
from spectrain.target.model import Target
from spectrain.training.setup import made_with

Cli = Callable[..., Result]
Start = Callable[..., tuple[int, str, str]]
SCRIPT = Path(__file__).with_name("on_two_processes.py")
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
SUITE = "name: nine\nversion: 1\nfolder: eval\nprompts: {red: 5, blue: 4}\nmax_prompt_tokens: 30\nmax_new_tokens: 24\n"
SHAPES = ("chain=2", "ngram=2", "tree_top_k=3", "tree_depth=2", "tree_budget=4")
SMALL = [f"--set={key}" for key in ("speed_max_new_tokens=4", "speed_prompts=1", "batch_size=2", *(f"shapes.{s}" for s in SHAPES))]
COUNTS = ("target", "suite", "made_of", "arms", "domains", "tau", "exactness")  # of a report: what is not timed


@pytest.fixture(scope="module")
def ask(make_target: Callable[..., Target], make_head: Callable[..., Any], save_target: Callable[..., Path], tmp_path_factory) -> list[str]:
    """Options that name a target, a head that is often right, and a suite of nine prompts."""
    root = tmp_path_factory.mktemp("nine")
    target = make_target(vocab=12, seed=3)
    save_target(target, root / "target")
    save_head(make_head(target, draft_vocab=10), root / "head", run_yaml="", made_with=made_with(target, {}))
    (root / "eval/suites").mkdir(parents=True)
    for domain in ("red", "blue"):
        rows = [{"id": f"{domain}{i}", "domain": domain, "prompt": f"w{6 + i} w{11 - i} w{6 + len(domain)}"} for i in range(6)]
        (root / f"eval/{domain}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "eval/suites/nine.yaml").write_text(SUITE)
    return ["--target", str(root / "target"), "--head", str(root / "head"), "--suite", str(root / "eval/suites/nine.yaml")]


@pytest.fixture(scope="module")
def one(ask: list[str], cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an evaluation by one process, and a tree."""
    out = tmp_path_factory.mktemp("one")
    for more in (["--out", out], ["--write-tree", out / "t.json"]):
        result = cli("evaluate", *ask, *more, *SMALL)
        assert result.exit_code == 0, result.output
    return out


@pytest.fixture(scope="module")
def two(ask: list[str], one: Path, start: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the same by two processes, and all that was said."""
    out = tmp_path_factory.mktemp("two")
    shutil.copy(one / "costs.json", out)  # so that the same depth is advised
    commands = [
        ["evaluate", *ask, "--out", str(out), *SMALL],
        ["evaluate", *ask, "--write-tree", str(out / "t.json"), *SMALL],
        ["generate", "w7 w9", *ask[:4], "--json", "--max-new-tokens", "9", "--placement", "tp"],
        ["evaluate", *ask, "--out", str(out), *SMALL, "--temperature", "1"],
    ]
    code, said, err = start(*LAUNCH, SCRIPT, out, json.dumps(commands))
    assert code == 0, said + err
    return out, said + err


def answers(folder: Path) -> list[list[dict[str, Any]]]:
    """Records by file."""
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("records*.jsonl"))]


def counts(folder: Path) -> dict[str, Any]:
    report = json.loads((folder / "report.json").read_text())
    return {name: report[name] for name in COUNTS}


def test_padded_duplicates_are_counted(one: Path, two: tuple[Path, str]) -> None:
    """DI2: nine prompts on two processes: five and four of each arm, each once; all counts are those of one process."""
    (alone,), (second, first) = answers(one), answers(two[0])  # records-1.jsonl comes first
    arms = {row["arm"] for row in alone if row["mode"] == "tau"}
    assert len(arms) >= 4
    for arm in arms:
        shares = [[row["id"] for row in rows if (row["arm"], row["mode"]) == (arm, "tau")] for rows in (first, second)]
        assert [len(share) for share in shares] == [5, 4] and len({*shares[0], *shares[1]}) == 9
    assert counts(two[0]) == counts(one) and counts(one)["tau"]["plain"]["all (micro)"]["prompts"] == 9
    assert {row["mode"] for row in second} == {"tau"} and {row["key"] for row in first + second} == {row["key"] for row in alone}


def test_tree_of_two_processes_is_another(one: Path, two: tuple[Path, str]) -> None:
    by_one, by_two = (json.loads((folder / "t.json").read_text()) for folder in (one, two[0]))
    assert by_two["counts"] == by_one["counts"] and by_two["prompts"] == by_one["prompts"]


def test_every_process_talks_or_ends_otherwise(two: tuple[Path, str], cli: Cli, ask: list[str]) -> None:
    """What the main one refuses ends all, and is said once."""
    folder, said = two
    assert [json.loads((folder / f"codes-{rank}.json").read_text()) for rank in (0, 1)] == [[0, 0, 0, 1]] * 2
    assert said.count("Report: ") == said.count("Tree: ") == said.count('"finish_reason"') == said.count("error: ") == 1, said
    assert "is of another evaluation (temperature 0, now 1); choose another folder for --out" in " ".join(said.split())
    alone = json.loads(cli("generate", "w7 w9", *ask[:4], "--json", "--max-new-tokens", "9").stdout)
    assert json.dumps(alone["tokens"]) in said


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["tp", "fsdp2"])
def test_shared_target_is_measured_otherwise(placement: str, ask: list[str], one: Path, start: Start, tmp_path: Path) -> None:
    """All processes make the same passes and the main one writes: counts are those of one process, figures are told apart from its."""
    shutil.copytree(one, tmp_path / "out")
    costs = json.loads((one / "costs.json").read_text())
    command = ["evaluate", *ask, "--out", str(tmp_path / "out"), *SMALL, "--placement", placement]
    code, said, err = start(*LAUNCH, SCRIPT, tmp_path, json.dumps([command]))
    assert code == 0 and said.count("Report: ") == 1, said + err
    ((rows,), (before,)) = answers(tmp_path / "out"), answers(one)
    keys = [{row["key"] for row in part} for part in (before, rows[len(before) :])]
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["settings"]["placement"] == f"{placement} over 2 processes" and keys[1] and not keys[0] & keys[1]
    assert json.loads((tmp_path / "out/costs.json").read_text()).keys() > costs.keys()
    for arm in ("plain", "ngram chain:2", "head chain:2", "head tree:3x2x4"):
        assert report["tau"][arm] == counts(one)["tau"][arm]
    assert all(cell["equal"] == 11 for cell in report["exactness"].values())


@pytest.mark.slow
def test_failed_process_leaves_the_other_waiting(ask: list[str], start: Start, tmp_path: Path) -> None:
    """Process 1 fails in its share: all end, and what process 0 has answered is kept."""
    script = "import os\nfrom spectrain.cli import main\nfrom spectrain.evaluation import measure\n\ndef fails(*args, **settings):\n"
    script += "    raise ValueError('a fault of its own')\n\nif os.environ['RANK'] == '1':\n    measure.generate = fails\nmain()\n"
    (tmp_path / "fails.py").write_text(script)
    code, said, err = start(*LAUNCH, tmp_path / "fails.py", "evaluate", *ask, "--out", tmp_path / "out", *SMALL)
    assert code == 1 and err.count("error: a fault of its own") >= 1 and "Report" not in said
    assert not (tmp_path / "out/records-1.jsonl").exists() and not (tmp_path / "out/report.json").exists()


def test_run_of_two_processes_starts_over_on_one(ask: list[str], two: tuple[Path, str], cli: Cli, tmp_path: Path) -> None:
    """A process killed in mid-write loses its last line; one process makes that answer only, and the tables are the same."""
    out = tmp_path / "out"
    shutil.copytree(two[0], out)
    again = ["evaluate", *ask, "--out", out, *SMALL]
    assert cli(*again).exit_code == 0
    assert answers(out) == answers(two[0]) and counts(out) == counts(two[0])
    torn = out / "records-1.jsonl"
    torn.write_bytes(torn.read_bytes()[:-7])
    assert cli(*again).exit_code == 0
    (second, first), (last, before) = answers(out), answers(two[0])
    assert second == last[:-1] and len(first) == len(before) + 1 and first[-1]["id"] == last[-1]["id"]
    assert counts(out) == counts(two[0])
