"""A tiny project on disk (target, recipe, suite, prompts) and the real command line on it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from transformers.utils.logging import disable_progress_bar
from typer.testing import CliRunner

from spectrain.cli import app
from spectrain.evaluation import speed
from spectrain.target.model import Target

Ended = tuple[int, str, str]
RECIPE = """
name: tiny
target: {name: TARGET}
data:
  answers:
    prompts: recipes/data/prompts.jsonl
    file: recipes/data/answers.jsonl
    mix: {red: 6, blue: 5}
    max_new_tokens: 14
    batch_size: 4
  prepare: {validation_per_domain: 1}
head: {draft_vocab_size: 60}
training: {epochs: 2, ttt_steps: 2, tokens_per_step: 24, lr: 2e-3}
evaluation:
  suite: eval/suites/tiny.yaml
"""
SUITE = """
name: tiny
version: 1
folder: eval/prompts
prompts: {red: 2, blue: 3}
max_prompt_tokens: 20
max_new_tokens: 16
"""


@pytest.fixture(scope="session", autouse=True)
def brief_costs() -> Iterator[None]:
    """What rounds of a tiny model cost is looked at by no test here, and takes most of an evaluation: four tokens of each will do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "ROUND_TOKENS", 4)
        yield


def write_prompts(path: Path, domains: Sequence[str], number: int, *, first: int) -> None:
    rows = [
        {"id": f"{domain}-{first + i}", "domain": domain, "prompt": f"w{10 + 25 * j + i} w{40 + first + i} w{12 + 7 * i}"}
        for j, domain in enumerate(domains)
        for i in range(number)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="session")
def save_target() -> Callable[[Target, Path], Path]:
    """save_target(target, folder): a normal model folder."""

    def save(target: Target, folder: Path) -> Path:
        target.model.save_pretrained(folder)
        target.tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory, make_target: Callable[..., Target], save_target: Callable[..., Path]) -> Path:
    """A folder with target/, recipes/tiny.yaml and eval/suites/tiny.yaml, all small; tests only add to runs/."""
    root = tmp_path_factory.mktemp("project")
    folder = save_target(make_target(num_hidden_layers=7), root / "target")  # 7: the fewest layers with default layer ids
    write_prompts(root / "recipes/data/prompts.jsonl", ("red", "blue"), 8, first=0)
    (root / "recipes/tiny.yaml").write_text(RECIPE.replace("TARGET", str(folder)))
    for domain in ("red", "blue"):
        write_prompts(root / f"eval/prompts/{domain}.jsonl", (domain,), 4, first=8)
    (root / "eval/suites").mkdir()
    (root / "eval/suites/tiny.yaml").write_text(SUITE)
    return root


@pytest.fixture(scope="session")
def cli() -> Callable[..., Result]:
    """cli(*arguments): a command in this process, with exit code, stdout and stderr; an error that is no exit is raised."""

    def invoke(*arguments: Any) -> Result:
        disable_progress_bar()  # as main() does where stderr is no terminal
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture(scope="session")
def start(project: Path) -> Callable[..., Ended]:
    """start(*arguments of python): exit code, stdout and stderr of a process in the project's folder, as a person starts it."""

    def run(*command: Any) -> Ended:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        pipe = subprocess.PIPE
        process = subprocess.Popen([sys.executable, *map(str, command)], cwd=project, env=env, stdout=pipe, stderr=pipe, text=True)
        try:
            out, err = process.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher ends its processes, too
            process.communicate(timeout=60)
            raise
        return process.returncode, out, err

    return run


@pytest.fixture(scope="session")
def trained(project: Path, start: Callable[..., Ended]) -> Path:
    """The folder of a whole run of `spectrain train`, from fresh answers to the head."""
    code, out, err = start("-m", "spectrain", "train", "recipes/tiny.yaml", "--fresh-answers", "--out", "runs/one")
    assert code == 0 and "18 steps, best measured tau" in out, out + err
    assert "9 rows to train on, 2 kept out, 0 rejected\nstates in runs/one/states: 9 rows, 243 tokens, 126 supervised: at most " in out
    assert "\nstates checked: 4 rows, " in out and "coverage of training rows 100.00% (126/126): blue " in out
    assert "%|" not in err and "Warning" not in err, err  # no bars where stderr is no terminal
    return project / "runs/one"


@pytest.fixture(scope="session")
def evaluated(project: Path, trained: Path, cli: Callable[..., Result]) -> Path:
    """The folder of an evaluation of the trained head."""
    out = project / "runs/one/evaluation"
    small = [f"--set={key}" for key in ("speed_max_new_tokens=12", "speed_prompts=1", "batch_size=4", "shapes.chain=3")]
    result = cli("evaluate", "--target", project / "target", "--head", trained / "head", "--suite", project / "eval/suites/tiny.yaml",
                 "--out", out, *small)  # fmt: skip
    assert result.exit_code == 0, result.output
    return out
