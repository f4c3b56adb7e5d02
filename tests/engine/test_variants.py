"""Variants of EAGLE-3 in a real engine: the text stays the target's, and the engine accepts what our own generator accepts.

The heads are trained for a moment on the target's own answers, so that a good part of their drafts is accepted. Each variant is also
drafted here with one option ignored: what the engine accepted must not be that.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from spectrain.config import HeadConfig
from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain
from spectrain.drafters.from_head import HeadDrafter
from spectrain.export.engines import export_eagle3
from spectrain.heads.base import save_head
from spectrain.target.model import Target
from spectrain.training.setup import made_with, new_head

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]  # reading GGUF warns inside third-party code
DEPTH, NEW, PASSES, VOCABULARY = 3, 40, 12, 512
MOVED = 2  # rounds that rounding may move: float32 sums in another order, and how the end of an answer is counted
SECONDS = 3600
ASKED = [
    "What is the capital of France?", "Write a Python function that adds two numbers.", "Explain gravity to a child.",
    "List the days of the week.", "What is a prime number?", "Write a short poem about rain.",
]  # fmt: skip


@dataclass
class Variant:
    """settings: of the recipe's head. ignored: fields of the head's config as an engine has them that knows nothing of the option."""

    settings: dict[str, Any]
    ignored: list[dict[str, Any]] = field(default_factory=list)


FLAGS = ("norm_before_residual", "fc_norm", "norm_output")
VARIANTS = {
    "flags": Variant(dict.fromkeys(FLAGS, True), [{flag: False} for flag in FLAGS]),
    "two layers behind a window": Variant(
        {"num_layers": 2, "sliding_window": 4}, [{"sliding_window": None}, {"sliding_window": 3}, {"num_hidden_layers": 1}]
    ),
    "another width": Variant({"hidden_size": 384, "norm_before_fc": True}, [{"norm_before_fc": False}]),
}


@pytest.fixture(scope="module")
def prompts(small: Target) -> list[list[int]]:
    return [small.encode([{"role": "user", "content": text}]) for text in ASKED]


def answers_of(small: Target, prompts: Sequence[list[int]], head: Any = None) -> Any:
    drafting: dict[str, Any] = {} if head is None else {"drafter": HeadDrafter(head), "shape": Chain(DEPTH)}
    return generate(small, list(prompts), max_new_tokens=NEW, ignore_eos=True, compile=False, **drafting).rows


@pytest.fixture(scope="module")
def plain(small: Target, prompts: list[list[int]]) -> list[list[int]]:
    return [row.tokens for row in answers_of(small, prompts)]


@torch.no_grad()
def states(small: Target, ids_BL: Tensor, layer_ids: Sequence[int]) -> Tensor:
    positions_BN = torch.arange(ids_BL.shape[1])[None]
    found = small.forward(ids_BL, positions_BN=positions_BN, mask=None, cache=None, layer_ids=layer_ids, logits_to_keep=1).states_BNF
    assert found is not None
    return found


def trained(small: Target, prompts: list[list[int]], plain: list[list[int]], settings: dict[str, Any]) -> Any:
    """A head that has seen the target's answers a few times, in every step of its unrolling."""
    counts_V = torch.bincount(torch.tensor(sum(plain, [])), minlength=small.vocab_size)
    config = HeadConfig(draft_vocab_size=VOCABULARY, layer_ids=(2, 15, 27), **settings)
    head = new_head(config, small, [], seed=0, counts_V=counts_V)
    with torch.no_grad():
        first = dict(head.midlayer.named_parameters())
        for name, parameter in head.above.named_parameters():  # further layers start faint, and would hardly be missed
            parameter.copy_(first[name.partition(".")[2]][..., -parameter.shape[-1] :])
        for name, parameter in head.named_parameters():
            if "norm" in name:  # a started head has even factors, which hide where a norm is applied
                parameter.mul_((0.6 * torch.randn_like(parameter)).exp())
    draft_V = torch.full((small.vocab_size,), -1).index_put_((head.target_ids,), torch.arange(VOCABULARY))
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-4)
    lines = []
    for prompt, answer in zip(prompts, plain, strict=True):
        ids_BL = torch.tensor([[*prompt, *answer]])
        line = {"ids_BL": ids_BL, "mask_BL": torch.ones_like(ids_BL, dtype=torch.bool), "states_BLF": states(small, ids_BL, head.layer_ids)}
        lines.append((SimpleNamespace(**line, doc_BL=None, position_BL=None), torch.arange(len(prompt) - 1, ids_BL.shape[1] - DEPTH - 1)))
    for _ in range(PASSES):
        for batch, row_R in lines:
            optimizer.zero_grad()
            steps = head.rows(batch, row_R, small.embedding_VW, DEPTH)
            sum(cross_entropy(logits, draft_V[batch.ids_BL[0, row_R + ahead]]) for ahead, logits in steps).backward()
            optimizer.step()
    return head.eval().requires_grad_(False)


def drafted(small: Target, prompts: list[list[int]], head: Any) -> list[int]:
    """Rounds, and how many of them accepted the draft at each position, with our own generator."""
    rounds = [r.accepted for row in answers_of(small, prompts, head) for r in row.rounds]
    return [len(rounds), *(sum(accepted > k for accepted in rounds) for k in range(DEPTH))]


def without(head: Any, changes: dict[str, Any]) -> Any:
    """The same weights computed otherwise."""
    other = type(head)(head.config.model_copy(update=changes))
    other.load_state_dict(head.state_dict(), strict=False)
    return other.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def heads(small: Target, prompts: list[list[int]], plain: list[list[int]]) -> dict[str, Any]:
    found = {}
    for name, variant in VARIANTS.items():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            found[name] = trained(small, prompts, plain, variant.settings)
    return found


@pytest.fixture(scope="module")
def served(
    engine_python: str, small_folder: Path, small: Target, heads: dict[str, Any], prompts: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:  # fmt: skip
    """What the engine made of every head, in one process."""
    folder = tmp_path_factory.mktemp("variants")
    folders = []
    for name, head in heads.items():
        save_head(head, folder / f"{name} head", run_yaml="", made_with=made_with(small, {}))
        folders.append(str(export_eagle3(folder / f"{name} head", folder / name.replace(" ", "_"), embed_VW=small.embedding_VW)))
    job = {"target": str(small_folder), "heads": folders, "prompts": prompts, "depth": DEPTH, "new": NEW}
    (folder / "job.json").write_text(json.dumps(job))
    cores = os.environ.get("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": cores,
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{int(cores) - 1}", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | settings
    script = Path(__file__).with_name("draft_in_engine.py")
    with (folder / "engine.log").open("wb") as log:
        command = [engine_python, str(script), str(folder / "job.json"), str(folder / "found.json")]
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, timeout=SECONDS, check=False).returncode
    assert code == 0, (folder / "engine.log").read_text(errors="replace")[-3000:]
    found = json.loads((folder / "found.json").read_text())
    return {"plain": found["plain"], **dict(zip(heads, found["heads"], strict=True))}


@pytest.mark.parametrize("name", VARIANTS)
def test_engine_computes_another_head_than_the_generator(
    served: dict[str, Any], small: Target, heads: dict[str, Any], prompts: list[list[int]], name: str
) -> None:
    assert served[name]["answers"] == served["plain"], "drafting changed the text"
    found, own = [served[name]["rounds"], *served[name]["accepted"]], drafted(small, prompts, heads[name])
    print(f"{name}: rounds and accepted drafts by position: {found} in the engine, {own} here")
    assert apart(found, own) <= MOVED
    assert found[1] > found[0] / 3 and found[-1] > MOVED, "too few are accepted to tell heads apart"
    for changes in VARIANTS[name].ignored:
        other = drafted(small, prompts, without(heads[name], changes))
        print(f"  {other} with {changes}")
        assert apart(found, other) > 2 * MOVED, f"accepted drafts do not show {changes}"


def apart(a: list[int], b: list[int]) -> int:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))
