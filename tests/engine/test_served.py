"""Exported heads served by a real engine: its text stays the target's, and it accepts what the generator here accepts, domain by domain.

The figures are those of `spectrain evaluate --engine`. The heads have seen the target's answers to these very prompts, so that a good part
of the drafts is accepted: what is compared is two programs, not a head with others.
"""

import json
import runpy
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.cli.served import evaluate_engine
from spectrain.config import EvaluationConfig, HeadConfig
from spectrain.data.endpoint import Endpoint
from spectrain.decoding.audit import first_difference
from spectrain.evaluation import served
from spectrain.evaluation.suites import suite_of, suite_prompts
from spectrain.export.engines import export_head
from spectrain.heads.base import save_head
from spectrain.target.model import Target
from spectrain.training.setup import made_with, new_head

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]  # reading GGUF warns inside third-party code
MODEL, ROOT = "small", Path(__file__).resolve().parents[2]
train_a_moment = runpy.run_path(str(Path(__file__).with_name("served_heads.py")))["train_a_moment"]
POINTS = 2.0  # of acceptance by position, in a domain
DEPTHS = (3, 5)
CONCURRENCY, NEW = 12, 64
# short prompts of the evaluation's own domains; of chat also second turns, whose first ones the engine has in its prefix cache
SUITE = f"""
name: served
folder: {ROOT / "eval/prompts"}
prompts: {{code: 4, math: 4, chat: 4, rag: 4, structured: 4}}
sources: {{chat: [mt_bench]}}
max_prompt_tokens: 150
max_new_tokens: {NEW}
turns: 2
"""
HEADS: dict[str, tuple[dict[str, Any], int, int]] = {  # settings of the recipe's head, passes over the answers, steps unrolled in them
    "eagle3": ({"kind": "eagle3", "layer_ids": (2, 15, 27)}, 14, 3),
    "medusa": ({"kind": "medusa", "num_heads": max(DEPTHS)}, 6, max(DEPTHS)),
}
SERVED = {"eagle3 flat": ("eagle3", "vllm"), "eagle3 of speculators": ("eagle3", "speculators"), "medusa": ("medusa", "vllm")}
Serving = Callable[..., AbstractContextManager[str]]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "eval/suites/served.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(SUITE)
    return path


@pytest.fixture(scope="module")
def plain(engine: str, small: Target, suite: Path) -> dict[str, served.Answers]:
    """What the engine says without drafts, by domain."""
    chosen = suite_of(EvaluationConfig(suite=str(suite)), suite.parents[2])
    settings = {"temperature": 0.0, "top_p": 1.0, "max_new_tokens": NEW}
    endpoint = Endpoint(engine, MODEL, concurrency=CONCURRENCY)
    prompts = suite_prompts(chosen, small, suite.parents[2])
    return {domain: served.ask(rows, endpoint, suite.parent / "plain" / domain, settings) for domain, rows in prompts.items()}


@pytest.fixture(scope="module")
def heads(small: Target, plain: dict[str, served.Answers], suite: Path) -> dict[str, Path]:
    """Head directories."""
    first = [turn for answers in plain.values() for turn in answers.turns if len(turn.chat) == 1]
    prompts, said = [small.encode(turn.chat) for turn in first], [list(turn.answer.ids) for turn in first]
    counts_V = torch.bincount(torch.tensor(sum(said, [])), minlength=small.vocab_size)
    found = {}
    for name, (settings, passes, steps) in HEADS.items():
        head = new_head(HeadConfig(draft_vocab_size=int((counts_V > 0).sum()), **settings), small, [], seed=0, counts_V=counts_V)
        trained = train_a_moment(small, head, prompts, said, passes=passes, depth=steps)
        found[name] = suite.parent / f"{name} head"
        save_head(trained, found[name], run_yaml="", made_with=made_with(small, {}))
    return found


@pytest.fixture(scope="module")
def folders(small: Target, heads: dict[str, Path], suite: Path) -> dict[str, Path]:
    """What the engine loads."""
    rows = {"embed_VW": small.embedding_VW, "output_VW": small.output_VW}
    return {as_: export_head(heads[name], to, suite.parent / as_.replace(" ", "_"), **rows) for as_, (name, to) in SERVED.items()}


def texts(folder: Path) -> dict[tuple[str, str], list[int]]:
    """Answer ids by domain and turn, and prompt."""
    lines = [(path, json.loads(line)) for path in folder.glob("*/turn-*.jsonl") for line in path.read_text().splitlines()]
    return {(f"{path.parent.name.removesuffix('-0')} {path.stem}", row["id"]): row["answer_ids"][0] for path, row in lines}


def check_text(small: Target, plain: dict[str, served.Answers], found: dict[tuple[str, str], list[int]]) -> None:
    """Every answer is plain decoding's, or parts from it where the best tokens are level; what follows a tie is not compared."""
    ties: list[Any] = []
    for domain, answers in plain.items():
        for turn in answers.turns:
            key = (f"{domain} turn-{len(turn.chat) // 2}", turn.prompt.id)
            said, own = found[key], list(turn.answer.ids)
            if said != own and turn.prompt.id not in ties:
                difference = first_difference(small, small.encode(turn.chat), said, own)
                assert difference is not None and difference.kind == "tie", (key, difference)
                ties.append(turn.prompt.id)
    assert len(ties) <= 2, ties


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("served_as", SERVED)
def test_served_head_accepts_other_drafts_than_were_measured(
    serving: Serving, small: Target, plain: dict[str, served.Answers], heads: dict[str, Path], folders: dict[str, Path], suite: Path,
    served_as: str, depth: int,
) -> None:  # fmt: skip
    kind = SERVED[served_as][0]
    speculation = {"method": kind, "model": str(folders[served_as]), "num_speculative_tokens": depth}
    out = suite.parent / f"out {served_as} {depth}"
    with serving(suite.parent / f"{out.name}.log", "--speculative-config", json.dumps(speculation)) as url:
        config = EvaluationConfig(suite=str(suite), batch_size=CONCURRENCY)
        evaluate_engine(
            small.name, heads[kind], config, suite.parents[2], out, kind="vllm", endpoint=Endpoint(url, MODEL), dtype="float32", where={},
            as_json=False,
        )  # fmt: skip
    check_text(small, plain, texts(out / "served"))
    found = json.loads((out / "served.json").read_text())
    assert found["depth"] == depth and not found["notes"]
    *domains, every = found["rows"]
    assert len(domains) == len(plain) and every["compared"] == sum(len(answers.turns) for answers in plain.values())
    apart = {row["domain"]: max(map(abs, row["points"])) for row in domains}
    assert max(apart.values()) <= POINTS, apart
    assert every["acceptance"][0] > 0.35 and every["acceptance"][2] > 0.05, "too few are accepted to tell heads apart"
