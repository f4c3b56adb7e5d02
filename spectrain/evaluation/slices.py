"""tau of one arm by where its rounds stand: length of the context, place in the answer, thinking or answer, the target's entropy.

A round belongs to the slice in which it begins, with all the tokens that it commits. Definitions: docs/definitions.md.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from spectrain.decoding.rows import StepRecord
from spectrain.evaluation.metrics import bootstrap, bounds, by_prompt, ratio

FIRST_CONTEXT = 128  # tokens of the shortest bucket; each further one is twice as long
FIRST_POSITION = 16
NATS = (0.1, 0.5, 1.0, 2.0)  # borders of entropy: where they lie depends on no run, so that runs compare
PARTS = ("think", "answer")
Entropies = Mapping[tuple[str, int], tuple[Sequence[int], Sequence[float]]]  # by id and turn: tokens, entropy after each


@dataclass(frozen=True)
class _Place:
    """A round and where it begins. in_hand: tokens of the answer that are there, at least the one of the prompt's pass."""

    id: str
    step: StepRecord
    in_hand: int
    context: int
    thinks: bool
    entropy: float | None


def slices(records: Sequence[Any], *, entropies: Entropies | None = None) -> dict[str, list[dict[str, Any]]]:
    """tau with its interval by `context`, `position`, `part` (where some answer thinks) and `entropy` (where entropies are given).

    context: tokens before the round's first draft. position: which token of the answer is in hand (1 in the first round). part: of the
    token that is drafted first. entropies: of the target's law after each token of an answer (`anatomy.entropies`), by id and turn; rounds
    behind a token that is another one than there are left out. Cells of `entropy` also have `first`, the share of their rounds whose first
    draft was accepted, with its interval.
    """
    places = [place for record in records for place in _places(record, entropies or {})]
    found = {
        "context": _cells([p for p in places if p.context > p.in_hand], lambda p: _doubling(p.context, FIRST_CONTEXT)),
        "position": _cells(places, lambda p: _doubling(p.in_hand, FIRST_POSITION)),
    }
    if any(place.thinks for place in places):
        found["part"] = _cells(places, lambda p: (0, PARTS[0]) if p.thinks else (1, PARTS[1]))
    if entropies is not None:
        found["entropy"] = _cells([p for p in places if p.entropy is not None], lambda p: _nats(p.entropy or 0.0), first=True)
    return found


def _places(record: Any, entropies: Entropies) -> Iterator[_Place]:
    tokens, after = entropies.get((record.id, record.turn), ((), ()))
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(record.tokens, tokens, strict=False)))
    in_hand = 1
    for step in record.rounds:
        entropy = after[in_hand - 1] if in_hand <= min(same, len(after)) else None
        yield _Place(record.id, step, in_hand, record.prompt_tokens + in_hand, in_hand < record.think_tokens, entropy)
        in_hand += step.committed


def _doubling(tokens: int, first: int) -> tuple[int, str]:
    """Bucket number and label: 1-first, then up to each next power of two times it."""
    number = ((tokens - 1) // first).bit_length()
    low = 1 + (first << number - 1) if number else 1
    return number, f"{low}–{first << number}"


def _nats(entropy: float) -> tuple[int, str]:
    number = bisect_right(NATS, entropy)
    if number == len(NATS):
        return number, f"> {NATS[-1]:g}"
    return number, f"{(0.0, *NATS)[number]:g}–{NATS[number]:g}"


def _cells(places: Sequence[_Place], bucket: Callable[[_Place], tuple[int, str]], *, first: bool = False) -> list[dict[str, Any]]:
    groups: dict[tuple[int, str], list[_Place]] = {}
    for place in places:
        groups.setdefault(bucket(place), []).append(place)
    return [{"label": label, **_cell(groups[number, label], first=first)} for number, label in sorted(groups)]


def _cell(places: Sequence[_Place], *, first: bool) -> dict[str, Any]:
    samples = by_prompt(places, [(float(p.step.committed), 1.0) for p in places])
    tau = bootstrap(samples, ratio)
    cell = {
        "tau": tau.value, **bounds(tau, samples), "tokens": sum(p.step.committed for p in places), "rounds": len(places),
        "prompts": len(samples),
    }  # fmt: skip
    if first:
        hits = by_prompt(places, [(float(p.step.accepted > 0), 1.0) for p in places])
        share = bootstrap(hits, ratio)
        cell |= {"first": share.value, **{f"first_{end}": bound for end, bound in bounds(share, hits).items()}}
    return cell
