"""Rows of a generation: prompts checked and turned into ids, seeds, end ids, and what has been committed so far."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from spectrain.decoding.sampling import Coins, row_seed
from spectrain.decoding.stops import FinishReason, StopRule, TextStream
from spectrain.target.model import Target

Stream = Callable[[int, list[int], str], None]


@dataclass(frozen=True)
class StepRecord:
    """One round of one row. accepted: by the rule; committed: kept after stops, the target's own token included.

    `seconds` by phase (draft, verify, and the rest as accept and commit); in a batch, the row's equal share of the round.
    depth: of the row's deepest draft; nodes: positions of the verification pass, the root and padding included.
    """

    drafted: int
    accepted: int
    committed: int
    seconds: dict[str, float]
    depth: int = 0
    nodes: int = 1


@dataclass
class Row:
    """A row at work: `ids` are the prompt and the committed tokens. settled: entries of the cache, all that were accepted."""

    index: int
    ids: list[int]
    prompt_length: int
    seed: int
    stop: StopRule
    stream: TextStream
    rounds: list[StepRecord] = field(default_factory=list)
    reason: FinishReason | None = None
    prefill_seconds: float = 0.0
    settled: int = 0

    def __post_init__(self) -> None:
        self.settled = self.prompt_length

    @property
    def tokens(self) -> list[int]:
        return self.ids[self.prompt_length :]

    def keep(self, new: Sequence[int], stream: Stream | None) -> list[int]:
        """Commit new tokens up to a stop; returns those that were kept."""
        kept, self.reason = self.stop.cut(self.tokens, new)
        self.ids.extend(kept)
        if stream is not None:
            stream(self.index, kept, self.stream.push(self.tokens, final=self.reason is not None))
        return kept


def coins_of(rows: Sequence[Row], device: torch.device) -> Coins:
    """The coins of a round that starts now."""
    return Coins(
        seed_B=torch.tensor([row.seed for row in rows], device=device), length_B=torch.tensor([len(row.ids) for row in rows], device=device)
    )


def root_tokens(rows: Sequence[Row], device: torch.device) -> Tensor:
    """Each row's last committed token [B, 1]."""
    return torch.tensor([[row.ids[-1]] for row in rows], device=device)


def end_ids(eos: str | int | Iterable[int] | None, target: Target) -> frozenset[int]:
    """Ids that end an answer; "auto": those of the target. ValueError for what is no id of the target."""
    if eos is None:
        return frozenset()
    if eos == "auto":
        return frozenset(target.eos_ids)
    listed = list(eos) if isinstance(eos, Iterable) and not isinstance(eos, str) else [eos]
    wrong = [i for i in listed if not _is_id(i, target.vocab_size)]
    if wrong:
        needed = f"'auto', None (no end), an id or a list of ids in 0..{target.vocab_size - 1}"
        raise ValueError(f"eos must be {needed}, found {wrong[0]!r}")
    return frozenset(int(i) for i in listed)


def _is_id(value: Any, size: int) -> bool:
    return isinstance(value, SupportsIndex) and not isinstance(value, bool) and 0 <= int(value) < size


def stop_strings(stop: Sequence[str]) -> tuple[str, ...]:
    """Stop strings as a tuple; an empty one is refused."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(isinstance(s, str) for s in strings):
        raise ValueError(f"stop must be a string or a list of strings, found {stop!r}")
    if not all(strings):
        raise ValueError("a stop string is empty: it would end every answer at once; leave it out")
    return strings


def seeds_of(seed: int | Sequence[int], rows: int) -> list[int]:
    """A seed for each row: derived from an int, or as given."""
    listed = list(seed) if isinstance(seed, Iterable) else [seed]
    if not all(isinstance(s, SupportsIndex) and -(2**63) <= int(s) < 2**63 for s in listed):
        raise ValueError(f"seeds must be integers that fit into 64 bits with sign, found {seed!r}")
    seeds = [int(s) for s in listed]
    if not isinstance(seed, Iterable):
        return [row_seed(seeds[0], b) for b in range(rows)]
    if len(seeds) != rows:
        raise ValueError(f"{len(seeds)} seeds for {rows} prompts; pass one seed, or one a prompt")
    return seeds


def rows_of(
    target: Target, prompts: Sequence[Any], *, ends: frozenset[int], stop: tuple[str, ...], max_new_tokens: int, seed: int | Sequence[int]
) -> list[Row]:
    """A row for each prompt; ValueError for a prompt that cannot be answered."""
    prompts = _listed(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], (int, float, dict))):
        raise ValueError("prompts must be a list of prompts (texts, chats or lists of ids); for one prompt pass [prompt]")
    if not isinstance(max_new_tokens, SupportsIndex) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be an integer of at least 1, found {max_new_tokens!r}")
    seeds = seeds_of(seed, len(prompts))
    rows = []
    for b, prompt in enumerate(map(_listed, prompts)):
        if not isinstance(prompt, str) and not all(isinstance(i, (SupportsIndex, dict)) for i in prompt):
            raise ValueError(f"prompt {b} must be a text, a chat (list of messages) or a list of ids, found {str(prompt)[:80]}")
        ids = target.encode(prompt)
        if not ids:
            raise ValueError(f"prompt {b} has no tokens; a prompt needs at least one")
        if len(ids) >= target.max_length:
            raise ValueError(
                f"prompt {b} has {len(ids)} tokens, {target.name} takes {target.max_length} with its answer; shorten or split it"
            )
        if not 0 <= min(ids) <= max(ids) < target.vocab_size:
            raise ValueError(f"prompt {b} holds ids outside 0..{target.vocab_size - 1}; was it made by another tokenizer?")
        limit = min(max_new_tokens, target.max_length - len(ids))
        rule = StopRule(eos_ids=ends, stop=stop, max_new_tokens=limit, decode=target.tokenizer.decode, byte_ids=target.byte_ids)
        rows.append(Row(index=b, ids=ids, prompt_length=len(ids), seed=seeds[b], stop=rule, stream=TextStream(rule)))
    return rows


def _listed(value: Any) -> Any:
    """Tensors and arrays as lists, everything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value
