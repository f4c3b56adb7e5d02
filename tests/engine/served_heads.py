"""Heads in a real engine and in our own generator: asked alike, counted alike. Read by the tests of this folder.

Legend: B rows, L tokens, N positions, F width of the states read.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain
from spectrain.drafters.from_head import HeadDrafter
from spectrain.target.model import Target

DEPTH, NEW, VOCABULARY = 3, 40, 512
MOVED = 2  # rounds that rounding may move: float32 sums in another order, and how the end of an answer is counted
SECONDS = 3600
ASKED = [
    "What is the capital of France?", "Write a Python function that adds two numbers.", "Explain gravity to a child.",
    "List the days of the week.", "What is a prime number?", "Write a short poem about rain.",
]  # fmt: skip


def prompts_of(small: Target) -> list[list[int]]:
    return [small.encode([{"role": "user", "content": text}]) for text in ASKED]


def answers_of(small: Target, prompts: Sequence[list[int]], head: Any = None) -> Any:
    drafting: dict[str, Any] = {} if head is None else {"drafter": HeadDrafter(head), "shape": Chain(DEPTH)}
    return generate(small, list(prompts), max_new_tokens=NEW, ignore_eos=True, compile=False, **drafting).rows


@torch.no_grad()
def states(small: Target, ids_BL: Tensor, layer_ids: Sequence[int]) -> Tensor:
    positions_BN = torch.arange(ids_BL.shape[1])[None]
    found = small.forward(ids_BL, positions_BN=positions_BN, mask=None, cache=None, layer_ids=layer_ids, logits_to_keep=1).states_BNF
    assert found is not None
    return found


def train_a_moment(small: Target, head: Any, prompts: list[list[int]], plain: list[list[int]], *, passes: int, depth: int = DEPTH) -> Any:
    """The head after it has seen the target's answers a few times, in every step of its unrolling."""
    draft_V = torch.full((small.vocab_size,), -1).index_put_((head.target_ids,), torch.arange(len(head.target_ids)))
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=5e-4)
    lines = []
    for prompt, answer in zip(prompts, plain, strict=True):
        ids_BL = torch.tensor([[*prompt, *answer]])
        line = {"ids_BL": ids_BL, "mask_BL": torch.ones_like(ids_BL, dtype=torch.bool), "states_BLF": states(small, ids_BL, head.layer_ids)}
        lines.append((SimpleNamespace(**line, doc_BL=None, position_BL=None), torch.arange(len(prompt) - 1, ids_BL.shape[1] - depth - 1)))
    for _ in range(passes):
        for batch, row_R in lines:
            optimizer.zero_grad()
            steps = head.rows(batch, row_R, small.embedding_VW, depth)
            sum(cross_entropy(logits, draft_V[batch.ids_BL[0, row_R + ahead]]) for ahead, logits in steps).backward()
            optimizer.step()
    return head.eval().requires_grad_(False)


def drafted(small: Target, prompts: list[list[int]], head: Any) -> list[int]:
    """Rounds, and how many of them accepted the draft at each position, with our own generator."""
    rounds = [r.accepted for row in answers_of(small, prompts, head) for r in row.rounds]
    return [len(rounds), *(sum(accepted > k for accepted in rounds) for k in range(DEPTH))]


def apart(a: list[int], b: list[int]) -> int:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def serve(python: str, target: Path, heads: dict[str, tuple[str, Path]], prompts: list[list[int]], folder: Path) -> dict[str, Any]:
    """What the engine made of each head (method and folder), in one process, and its plain answers."""
    speculations = [{"method": method, "model": str(path), "num_speculative_tokens": DEPTH} for method, path in heads.values()]
    job = {"target": str(target), "heads": speculations, "prompts": prompts, "new": NEW}
    (folder / "job.json").write_text(json.dumps(job))
    cores = os.environ.get("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": cores,
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{int(cores) - 1}", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | settings
    script = Path(__file__).with_name("draft_in_engine.py")
    with (folder / "engine.log").open("wb") as log:
        command = [python, str(script), str(folder / "job.json"), str(folder / "found.json")]
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, timeout=SECONDS, check=False).returncode
    assert code == 0, (folder / "engine.log").read_text(errors="replace")[-3000:]
    found = json.loads((folder / "found.json").read_text())
    return {"plain": found["plain"], **dict(zip(heads, found["heads"], strict=True))}
