"""Is a speculative answer the target's own? Each first difference from plain decoding is a numeric tie, with its gap, or a fault.

A pass over several positions rounds differently from a pass over one, so the order of two nearly equal logits can turn. Anything
else that differs is a fault of the program.

Legend: V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from spectrain.decoding.generate import Result, generate
from spectrain.decoding.processors import Histories, Processing
from spectrain.decoding.rows import end_ids
from spectrain.target.model import Target

TIE = 1e-3  # distance of a logit from the best one below which a difference is rounding
TIE_ROUNDINGS = 8  # the same in roundings of the best logit, which decides in formats of 16 bits


@dataclass(frozen=True)
class Difference:
    """The first token at which an answer leaves plain decoding's. tokens: the answer's and plain decoding's, None where one has ended.

    gap: how far the lower of the two logits lies below the best one; None when an answer only ends earlier or later.
    """

    row: int
    at: int
    tokens: tuple[int | None, int | None]
    gap: float | None
    kind: Literal["tie", "fault"]


@dataclass(frozen=True)
class Audit:
    """rows: answers compared; tokens: their total length; differences: one for each answer that is not plain decoding's."""

    rows: int
    tokens: int
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> int:
        return self.rows - len(self.differences)

    @property
    def ties(self) -> int:
        return sum(d.kind == "tie" for d in self.differences)

    @property
    def faults(self) -> int:
        return sum(d.kind == "fault" for d in self.differences)


def greedy_audit(
    target: Target, prompts: Sequence[Any], result: Result, *, plain: Result | None = None, tie: float = TIE, **settings: Any
) -> Audit:
    """Compare greedy answers with plain decoding of the same prompts.

    settings: those that `generate` was called with besides drafter, shape, policy and rule (max_new_tokens, penalties, ...). plain: an
    earlier plain run with them; made anew when absent. tie: largest gap, in logits, that rounding explains in float32.
    """
    odd = sorted(set(settings) & {"drafter", "shape", "policy", "rule", "seed", "top_p", "top_k", "min_p"})
    if odd or settings.get("temperature", 0.0) != 0:
        raise ValueError(f"plain greedy decoding has no {', '.join(odd) or 'temperature'}; leave it out")
    if plain is None:
        plain = generate(target, prompts, **settings)
    if not len(prompts) == len(result.rows) == len(plain.rows):
        raise ValueError(f"{len(prompts)} prompts, {len(result.rows)} answers and {len(plain.rows)} plain ones; pass those of one call")
    differences = []
    for row, (found, wanted) in enumerate(zip(result.rows, plain.rows, strict=True)):
        difference = first_difference(target, target.encode(prompts[row]), found.tokens, wanted.tokens, row=row, tie=tie, **settings)
        if difference is not None:
            differences.append(difference)
    return Audit(rows=len(result.rows), tokens=sum(len(r.tokens) for r in result.rows), differences=tuple(differences))


def first_difference(
    target: Target, prompt: Sequence[int], answer: Sequence[int], plain: Sequence[int], *, row: int = 0, tie: float = TIE, **settings: Any
) -> Difference | None:
    """Where two answers to a prompt part, and why; None when they are equal."""
    if list(answer) == list(plain):
        return None
    both = min(len(answer), len(plain))
    at = next((i for i in range(both) if answer[i] != plain[i]), both)
    if at == both:  # rounding changes a token, never the end alone
        tokens = (answer[at] if at < len(answer) else None, plain[at] if at < len(plain) else None)
        return Difference(row, at, tokens, None, "fault")
    gap, rounding = logit_gap(target, prompt, plain[:at], (answer[at], plain[at]), **settings)
    kind: Literal["tie", "fault"] = "tie" if gap < max(tie, rounding) else "fault"
    return Difference(row, at, (answer[at], plain[at]), gap, kind)


@torch.inference_mode()
def logit_gap(
    target: Target, prompt: Sequence[int], answer: Sequence[int], tokens: Sequence[int], **settings: Any
) -> tuple[float, float]:
    """How far the lowest logit of these tokens lies below the best one, after the processors; and what rounding can do to a logit."""
    ids_1L = torch.tensor([[*prompt, *answer]], device=target.device)
    positions_1L = torch.arange(ids_1L.shape[1], device=target.device)[None]
    out = target.forward(ids_1L, positions_BN=positions_1L, mask=None, cache=None, logits_to_keep=1)
    logits_11V = out.logits_BKV[..., : target.num_ids].float()
    names = {f.name for f in fields(Processing)}
    processing = Processing(**{name: value for name, value in settings.items() if name in names and value is not None})
    if processing.active:
        ends = frozenset() if settings.get("ignore_eos") else end_ids(settings.get("eos", "auto"), target)
        histories = Histories(processing, [list(prompt)], vocab_size=logits_11V.shape[-1], eos_ids=ends, device=target.device)
        histories.commit([list(answer)])
        logits_11V = histories.apply(logits_11V, ids_1L[:, -1:], torch.ones(1, 1, 1, dtype=torch.bool, device=target.device))
    logits_V = logits_11V[0, 0]
    best = float(logits_V.max())
    return best - float(logits_V[list(tokens)].min()), TIE_ROUNDINGS * torch.finfo(out.logits_BKV.dtype).eps * abs(best)
