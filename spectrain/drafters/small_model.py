"""A second, smaller language model as drafter, with a key/value cache of its own (arXiv 2211.17192).

The cache holds the committed text in the small model's ids. Drafts are staged behind it; those that became committed text stay where
they are, and the rest of the new text (the last accepted draft among it, which the model never read) is run at the next proposal.
What the small model reads decides how good its drafts are, never whether the output is exact: q is the law that a draft was drawn from.

Legend: B rows, N nodes of one pass, M nodes of the draft (root included), L columns of a catch-up pass, V vocabulary, K ids that both
models have.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from spectrain.decoding.drafter import Round
from spectrain.decoding.shapes import Shape
from spectrain.decoding.tree import DraftTree, ancestors, extended
from spectrain.drafters.grow import Layouts, grow
from spectrain.drafters.packing import walk
from spectrain.target.lean import is_packed
from spectrain.target.model import Target
from spectrain.target.passes import quick

SLACK = 64  # cache entries beyond the longest row: a short row may have this much text to catch up with in one pass


@dataclass(frozen=True)
class SmallModel:
    """`target` (the small model, from `load_target`) drafts for a larger one.

    vocabulary: "same" demands the same tokenizer (the number of padding rows may differ). "intersection" takes any other: drafts are
    the tokens with the same string in both vocabularies, q renormalised over them; committed tokens without a counterpart are
    spelled with the small model's own tokens. A row beyond the small model's positions gets no more drafts.
    """

    target: Target
    vocabulary: Literal["same", "intersection"] = "same"
    layer_ids: tuple[int, ...] = field(default=(), init=False)
    has_q: bool = field(default=True, init=False)
    _words: "dict[str, _Words]" = field(default_factory=dict, init=False, repr=False, compare=False)  # made once for each target

    def __post_init__(self) -> None:
        if self.vocabulary not in ("same", "intersection"):
            raise ValueError(f"SmallModel: vocabulary must be 'same' or 'intersection', found {self.vocabulary!r}")

    def start(self, target: Target, rows: int, max_length: int) -> "_SmallSession":
        """A session; ValueError for a model on another device or, by `vocabulary`, of another tokenizer."""
        small = self.target
        if small.device.type != target.device.type:
            raise ValueError(f"{small.name} is on {small.device}, {target.name} on {target.device}; load both on {target.device.type!r}")
        key = f"{target.fingerprints['tokenizer_sha256']} {target.vocab_size} {target.device}"
        if key not in self._words:
            self._words[key] = _Words(target, small, intersection=self.vocabulary == "intersection")
        small = quick(small) if is_packed(target.model) else small  # its products are made as the target's
        return _SmallSession(small, self._words[key], rows, slots=max_length + SLACK)


class _Words:
    """Which ids of the small model stand for which of the target's."""

    def __init__(self, target: Target, small: Target, *, intersection: bool) -> None:
        self._target, self._small = target, small
        self.same = target.fingerprints["tokenizer_sha256"] == small.fingerprints["tokenizer_sha256"]
        if self.same:
            both = min(target.num_ids, target.vocab_size, small.vocab_size)
            self.small_ids_K = self.target_ids_K = torch.arange(both, device=target.device)
        elif intersection:
            self.target_ids_K, self.small_ids_K = torch.tensor(_shared(target, small), device=target.device).unbind(-1)
        else:
            raise ValueError(_difference(target, small) + '; take a small model of the same family, or SmallModel(m, "intersection")')
        self._all = self.same and len(self.small_ids_K) == target.vocab_size == small.vocab_size
        self.small_of_V = torch.zeros(target.vocab_size, dtype=torch.long, device=target.device)
        self.small_of_V[self.target_ids_K] = self.small_ids_K
        self._spelled = dict(zip(self.target_ids_K.tolist(), ([j] for j in self.small_ids_K.tolist()), strict=True))

    def spell(self, ids: Sequence[int]) -> list[int]:
        """The text in the small model's ids; the same tokens always give the same ids, whatever stands around them."""
        for i in set(ids) - self._spelled.keys():
            text = self._target.tokenizer.decode([i])
            found = self._small.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
            self._spelled[i] = [int(j) for j in found] or [0]  # something must be read: drafts need a law after every token
        return [j for i in ids for j in self._spelled[i]]

    def logits(self, logits_BNV: Tensor) -> Tensor:
        """The small model's logits over the target's vocabulary, -inf where it has no such token."""
        if self._all:
            return logits_BNV
        full_BNV = logits_BNV.new_full((*logits_BNV.shape[:-1], len(self.small_of_V)), float("-inf"))
        return full_BNV.index_copy(-1, self.target_ids_K, logits_BNV[..., self.small_ids_K])


def _shared(target: Target, small: Target) -> list[tuple[int, int]]:
    """(target id, small id) of the tokens with the same string in both vocabularies, rising."""
    theirs = small.tokenizer.get_vocab()
    vocab = target.tokenizer.get_vocab().items()
    pairs = sorted((i, theirs[word]) for word, i in vocab if word in theirs and i < target.vocab_size and theirs[word] < small.vocab_size)
    if not pairs:
        raise ValueError(f"{target.name} and {small.name} have no token in common; take a small model of the same family")
    return pairs


def _difference(target: Target, small: Target) -> str:
    """The first id at which two tokenizers differ."""
    mine, theirs = ({i: word for word, i in t.tokenizer.get_vocab().items()} for t in (target, small))
    differing = min(i for i in mine.keys() | theirs.keys() if mine.get(i) != theirs.get(i))
    return f"id {differing} is {mine.get(differing)!r} in {target.name} and {theirs.get(differing)!r} in {small.name}: another tokenizer"


class _SmallSession:
    """Texts and cache of one batch. texts: the committed text by row in the small model's ids; held: how much of it the cache holds."""

    sound = True

    def __init__(self, small: Target, words: _Words, rows: int, *, slots: int) -> None:
        self._small, self._words = small, words
        self._cache = small.new_cache(rows, slots)
        self._texts: list[list[int]] = [[] for _ in range(rows)]
        self._read, self._held = [0] * rows, [0] * rows  # committed tokens that are in the texts, ids that are in the cache
        self._logits_BV = torch.zeros(rows, len(words.small_of_V), device=small.device)
        self._layouts: Layouts = {}
        self._forget()

    def _forget(self) -> None:
        """No drafts are staged."""
        root_B1 = torch.full((len(self._texts), 1), -1, device=self._small.device)
        self._tokens_BM = self._parents_BM = root_B1  # the root's token is not asked for
        self._line_BMM = ancestors(root_B1)

    def observe(self, states_BNF: Tensor | None, next_BN: Tensor, count_B: Tensor) -> None:
        """Nothing to learn: `propose` reads the committed tokens."""

    def select(self, rows_R: Tensor) -> None:
        self._cache.select(rows_R)
        keep = rows_R.tolist()
        self._texts = [self._texts[b] for b in keep]
        self._read, self._held = ([counts[b] for b in keep] for counts in (self._read, self._held))
        self._logits_BV = self._logits_BV[rows_R]
        self._tokens_BM, self._parents_BM, self._line_BMM = (t[rows_R] for t in (self._tokens_BM, self._parents_BM, self._line_BMM))

    def rewind(self) -> None:
        """Drop the drafts, so that the same proposal can be made again (for timing)."""
        self._cache.discard()
        self._forget()

    def propose(self, round: Round) -> DraftTree | None:
        for b, ids in enumerate(round.committed):
            self._texts[b] += self._words.spell(ids[self._read[b] :])
            self._read[b] = len(ids)
        positions = self._small.max_length
        limits = [min(limit, positions - len(text)) for limit, text in zip(round.limits(), self._texts, strict=True)]
        if max(limits) <= 0:
            return None
        # Rows beyond the model's positions stay as they are.
        goals = [len(text) if len(text) <= positions else held for text, held in zip(self._texts, self._held, strict=True)]
        self._settle(goals)
        self._make_room(max(goals), round.shape)
        self._catch_up(goals)
        ask = replace(round, depth_B=[max(0, n) for n in limits])
        return grow(ask, round.root(self._small.device), self._logits_BV, self._extend, None, self._layouts)

    def _settle(self, goals: Sequence[int]) -> None:
        """Commit the staged drafts that became text where they stand; drop the others. A row's last token is always run again: the
        draft needs the logits after it."""
        drafts = list(zip(self._tokens_BM[:, 1:].tolist(), self._parents_BM[:, 1:].tolist(), strict=True))
        paths = [walk(*drafts[b], self._texts[b][self._held[b] : max(goal - 1, self._held[b])]) for b, goal in enumerate(goals)]
        longest = max(map(len, paths))
        count_B = torch.tensor([len(path) for path in paths], device=self._small.device)
        in_place = all(path == list(range(len(path))) for path in paths)
        path_BK = None if in_place else torch.tensor([path + [0] * (longest - len(path)) for path in paths], device=self._small.device)
        self._cache.commit(count_B, path_BK)
        self._held = [held + len(path) for held, path in zip(self._held, paths, strict=True)]
        self._forget()

    def _make_room(self, longest: int, shape: Shape) -> None:
        """A larger cache where a row and its drafts would not fit: spelling may take more of the small model's ids than the text has
        tokens, and how many is not known before."""
        needed = longest + shape.width * shape.depth + shape.budget + SLACK
        if needed <= self._cache.max_length:
            return
        old, held = self._cache, max(self._held)
        self._cache = self._small.new_cache(len(self._texts), max(needed, 2 * old.max_length))
        for new, copied in zip(self._cache.keys + self._cache.values, old.keys + old.values, strict=True):
            new[:, :, :held] = copied[:, :, :held]
        self._cache.stage(held)
        self._cache.commit(old.lengths_B)

    def _catch_up(self, goals: Sequence[int]) -> None:
        """Run the text that the cache does not hold yet, aligned right, and keep the logits after each row's last token."""
        while any(goal > held for goal, held in zip(goals, self._held, strict=True)):
            need = [goal - held for goal, held in zip(goals, self._held, strict=True)]
            L = min(max(need), self._cache.max_length - max(self._held))
            new = [self._texts[b][held : held + min(L, need[b])] for b, held in enumerate(self._held)]
            ids_BL = torch.tensor([[0] * (L - len(part)) + part for part in new], device=self._small.device)
            count_B = torch.tensor([len(part) for part in new], device=self._small.device)
            positions_BL = self._cache.stage(L, None if len(new) == 1 else L - count_B)
            mask = self._small.prompt_masks(self._cache, positions_BL)
            out = self._small.forward(ids_BL, positions_BN=positions_BL, mask=mask, cache=self._cache, logits_to_keep=1)
            self._cache.commit(count_B)
            self._held = [held + len(part) for held, part in zip(self._held, new, strict=True)]
            self._logits_BV = torch.where(count_B[:, None] > 0, self._words.logits(out.logits_BKV[:, -1]), self._logits_BV)

    def _extend(self, tokens_BN: Tensor, parents_BN: Tensor) -> Tensor:
        """Stage nodes below earlier ones (0: the last committed token) and return the logits after them [B, N, V]."""
        ids_BN = self._words.small_of_V[tokens_BN]
        self._line_BMM = extended(self._line_BMM, parents_BN)
        line_BNM = self._line_BMM[:, -tokens_BN.shape[1] :, 1:]  # the root is in the committed part
        self._cache.stage(tokens_BN.shape[1])
        positions_BN = (self._cache.lengths_B[:, None] + line_BNM.sum(-1) - 1).clamp(max=self._small.max_length - 1)
        mask = self._small.masks(self._cache, line_BNM)
        out = self._small.forward(ids_BN, positions_BN=positions_BN, mask=mask, cache=self._cache)
        self._tokens_BM = torch.cat([self._tokens_BM, ids_BN], dim=1)
        self._parents_BM = torch.cat([self._parents_BM, parents_BN], dim=1)
        return self._words.logits(out.logits_BKV)
