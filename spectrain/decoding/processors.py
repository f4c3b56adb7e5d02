"""Penalties, bans, forced tokens and outside logits processors, for each node of a draft tree with that node's own history.

A law stands after a node; its history is the prompt, the committed answer and the drafted path down to that node. Committed tokens
are counted once, when they are committed; a path is added on top for its own node only, so that a rejected draft leaves no trace.
Only `logits_processors` see whole histories.

Order: repetition penalty, frequency and presence penalties, min_new_tokens, banned_tokens, logits_processors, forced_tokens; then the
transforms of `sampling.probabilities`. It is the order of transformers' `generate` (`_get_logits_processor`, 5.23) for the settings
that both have, except that a forced token wins over every other setting.

Legend: B rows, X laws a row, M nodes of the tree (root included), E nodes on the longest path (root included), D = E - 1, V vocabulary,
K forced tokens, U ids said by any row, T new tokens, L ids of a history, G laws of one call.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.sampling import LARGEST, is_real, is_whole

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]

# Classes of transformers (5.23) that cannot follow the nodes of a tree, by what is in the way: a call holds several nodes of one prompt.
STATE, ROW = "keeps a state from call to call", "tells prompts apart by their row in the call"
REFUSED = {
    "ClassifierFreeGuidanceLogitsProcessor": ROW,
    "DiaClassifierFreeGuidanceLogitsProcessor": ROW,
    "DiaEOSChannelFilterLogitsProcessor": ROW,
    "DiaEOSDelayPatternLogitsProcessor": STATE,
    "EncoderNoRepeatNGramLogitsProcessor": ROW,
    "EncoderRepetitionPenaltyLogitsProcessor": ROW,
    "HiggsAudioV2DelayPatternLogitsProcessor": STATE,
    "PrefixConstrainedLogitsProcessor": "gives its function the row in the call as batch_id",
    "SynthIDTextWatermarkLogitsProcessor": STATE,
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": STATE,
    "WhisperNoSpeechDetection": STATE,
}


@dataclass(frozen=True)
class Processing:
    """Settings that depend on the history; one for a call. Raises ValueError for a field of another type or out of range.

    repetition_penalty: over prompt and answer; logits above 0 are divided by it, those below multiplied (arXiv 1909.05858).
    frequency_penalty, presence_penalty: over the answer only; subtract frequency * count and presence * (count > 0).
    min_new_tokens: end ids are forbidden until the answer has that many tokens. banned_tokens: ids that never appear.
    forced_tokens: place in the answer (from 0) -> id; the law there is one-hot.
    logits_processors: a list (transformers' LogitsProcessorList too) of functions (ids [n, L] int64, scores [n, V]) -> scores [n, V].
    The n histories of a call come from any nodes of any prompts: a processor must depend on its arguments alone, row by row.
    The last three take any list or dict as it comes from a user, None for none, and are held as tuples and a dict of ints.
    """

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_new_tokens: int = 0
    banned_tokens: Sequence[int] = ()
    forced_tokens: Mapping[int, int] = field(default_factory=dict)
    logits_processors: Sequence[LogitsProcessor] = ()

    def __post_init__(self) -> None:
        if not (is_real(self.repetition_penalty) and 1 / LARGEST <= self.repetition_penalty <= LARGEST):
            raise ValueError(f"repetition_penalty must be a number from {1 / LARGEST:g} to {LARGEST:g}, found {self.repetition_penalty!r}")
        for name in ("frequency_penalty", "presence_penalty"):
            penalty = getattr(self, name)
            if not (is_real(penalty) and abs(penalty) <= LARGEST):
                raise ValueError(f"{name} must be a number from -{LARGEST:g} to {LARGEST:g}, found {penalty!r}; 0 is none")
        if not is_whole(self.min_new_tokens):
            raise ValueError(f"min_new_tokens must be a whole number from 0, found {self.min_new_tokens!r}")
        object.__setattr__(self, "banned_tokens", _checked_ids(self.banned_tokens))
        object.__setattr__(self, "forced_tokens", _checked_places(self.forced_tokens))
        object.__setattr__(self, "logits_processors", _checked_processors(self.logits_processors))

    @property
    def active(self) -> bool:
        """Whether any setting changes any law."""
        return self.penalises or bool(self.min_new_tokens or self.banned_tokens or self.forced_tokens or self.logits_processors)

    @property
    def penalises(self) -> bool:
        """Whether tokens must be counted."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)


def _checked_ids(banned: Any) -> tuple[int, ...]:
    try:
        ids = None if isinstance(banned, (str, bytes, Mapping)) else tuple(() if banned is None else banned)
    except TypeError:  # a number, also one of numpy or torch
        ids = None
    if ids is None or not all(map(is_whole, ids)):
        raise ValueError(f"banned_tokens must be a list of token ids (whole numbers from 0), found {banned!r}")
    return tuple(map(int, ids))


def _checked_places(forced: Any) -> dict[int, int]:
    pairs = {} if forced is None else forced
    if not isinstance(pairs, Mapping) or not all(is_whole(number) for pair in pairs.items() for number in pair):
        raise ValueError(f"forced_tokens must map places in the answer (from 0) to token ids, found {forced!r}")
    return {int(place): int(token) for place, token in pairs.items()}


def _name(processor: Any) -> str:
    return getattr(processor, "__name__", type(processor).__name__)


def _flat(processors: Iterable[Any]) -> Iterator[Any]:
    for item in processors:
        yield from _flat(item) if isinstance(item, list) else [item]


def _checked_processors(processors: Any) -> tuple[LogitsProcessor, ...]:
    if processors is not None and (not isinstance(processors, Iterable) or isinstance(processors, (str, bytes, Mapping))):
        raise ValueError(f"logits_processors must be a list, found {_name(processors)}; for one processor pass [processor]")
    checked = tuple(_flat(() if processors is None else processors))
    for processor in checked:
        _check_processor(processor)
    return checked


def _check_processor(processor: Any) -> None:
    """Refuse what is no function of (input_ids, scores), and what depends on more than these."""
    reason = next((REFUSED[kind.__name__] for kind in type(processor).__mro__ if kind.__name__ in REFUSED), None)
    if reason is None and isinstance(getattr(processor, "prompt_ignore_length", None), Tensor):  # of RepetitionPenaltyLogitsProcessor
        reason = ROW
    if reason is not None:
        raise ValueError(
            f"logits_processors holds {_name(processor)}, which {reason}, so that it cannot follow the nodes of a draft tree; pass a "
            "function of (input_ids, scores) that depends on input_ids alone, or decode with transformers"
        )
    if isinstance(processor, type):
        raise ValueError(f"logits_processors holds the class {_name(processor)}; pass an instance of it")
    try:
        inspect.signature(processor).bind(None, None)
    except TypeError:
        found = f"{_name(processor)}, which is not a function of (input_ids, scores)"
        raise ValueError(f"logits_processors holds {found}; wrap it in one") from None
    except ValueError:  # a function without a signature: the call itself will tell
        pass


def penalise(x: Tensor, seen: Tensor, count: Tensor, *, repetition: float, frequency: float, presence: float) -> Tensor:
    """Logits after the penalties, entry by entry.

    seen: bool, in the prompt or the answer; count: how often in the answer. Repetition penalty: CTRL, arXiv 1909.05858, in the form
    for logits of either sign; frequency and presence penalties: OpenAI's API reference.
    """
    if repetition != 1:
        x = torch.where(seen, torch.where(x < 0, x * repetition, x / repetition), x)
    if frequency != 0 or presence != 0:
        x = x - (frequency * count.to(x.dtype) + presence * (count > 0).to(x.dtype))
    return x


@dataclass(frozen=True)
class _Paths:
    """Where each law stands. depth_BX: drafted tokens before it. nodes_BXE: the nodes from the root to its own, tokens_BXD: the ids
    after the root; both valid up to depth (valid_BXD)."""

    depth_BX: Tensor
    nodes_BXE: Tensor
    tokens_BXD: Tensor
    valid_BXD: Tensor

    def node(self, up: int) -> Tensor:
        """The law's own node (up 0) or its parent (up 1) [B, X]; never above the root."""
        return self.nodes_BXE.gather(2, (self.depth_BX - up).clamp(min=0)[..., None])[..., 0]


def _paths(tokens_BM: Tensor, ancestors_BXM: Tensor) -> _Paths:
    B, X, M = ancestors_BXM.shape
    depth_BX = ancestors_BXM.sum(-1) - 1
    D = int(depth_BX.max())
    nodes_BXE = (~ancestors_BXM).int().argsort(dim=-1, stable=True)[..., : D + 1]  # parents precede children
    tokens_BXE = tokens_BM[:, None].expand(B, X, M).gather(2, nodes_BXE)
    valid_BXD = torch.arange(D, device=depth_BX.device) < depth_BX[..., None]
    return _Paths(depth_BX, nodes_BXE, tokens_BXE[..., 1:], valid_BXD)


class Histories:
    """What the rows of one call have said so far, in the form that `Processing` needs.

    prompts: ids of each row. eos_ids: what ends an answer; empty when nothing does. Raises ValueError for ids outside the vocabulary.
    Counts are [B, V] tensors that change with new tokens only: a round reads the ids seen, at most the vocabulary, and never whole
    histories, unless `logits_processors` ask for them.
    """

    def __init__(
        self, processing: Processing, prompts: Sequence[Sequence[int]], *,
        vocab_size: int, eos_ids: Iterable[int], device: torch.device | str,
    ) -> None:  # fmt: skip
        assert all(map(len, prompts)), "a prompt without tokens has no root"
        B, self.processing, self._device = len(prompts), processing, torch.device(device)
        _check_ids(processing, vocab_size)
        self._ends_V, self._banned_V, self._early_V = (torch.zeros(vocab_size, dtype=torch.bool, device=device) for _ in range(3))
        self._ends_V[[i for i in eos_ids if 0 <= i < vocab_size]] = True  # -1 is a way to say none, and no id from the end
        self._banned_V[list(processing.banned_tokens)] = True
        self._early_V = self._banned_V | self._ends_V
        self._forced_at_K = torch.tensor(list(processing.forced_tokens), dtype=torch.long, device=device)
        self._forced_id_K = torch.tensor(list(processing.forced_tokens.values()), dtype=torch.long, device=device)
        counted = vocab_size if processing.penalises else 0
        self._seen_BV = torch.zeros(B, counted, dtype=torch.bool, device=device)
        self._count_BV = torch.zeros(B, counted, dtype=torch.int32, device=device)
        self._length_B, self._answer_B = (torch.zeros(B, dtype=torch.long, device=device) for _ in range(2))
        self._ids_BL = torch.zeros(B, 0, dtype=torch.long, device=device)
        self._append(prompts, answer=False)

    def commit(self, new: Sequence[Sequence[int]]) -> None:
        """Append committed tokens to the answer of each row, [] for none."""
        self._append(new, answer=True)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        rows_R = torch.tensor(rows, dtype=torch.long, device=self._device)
        self._seen_BV, self._count_BV = self._seen_BV[rows_R], self._count_BV[rows_R]
        self._length_B, self._answer_B, self._ids_BL = self._length_B[rows_R], self._answer_B[rows_R], self._ids_BL[rows_R]

    def apply(
        self, logits_BXV: Tensor, tokens_BM: Tensor, ancestors_BXM: Tensor, *, needed_BX: Tensor | None = None, draft: bool = False
    ) -> Tensor:
        """Logits after every setting, a new tensor [B, X, V] in float32, or float64 where they came so.

        Law x stands after a node of the tree tokens_BM (node 0: the last committed token; parents precede children); ancestors_BXM
        holds that node and its ancestors (bool; the root is always in). needed_BX: laws that will be read (default all); padding nodes
        and rows that have ended are not. `logits_processors` are called once for each length of history, and not for laws that nobody
        can reach: not needed, after an end token, or after a token that the law of its parent forbids. These keep the built-in settings
        only. draft: the logits are a drafter's, whose smaller vocabulary may be left without any token (-inf everywhere). Raises
        ValueError when bans leave no token, or a processor breaks a law.
        """
        assert logits_BXV.shape[:2] == ancestors_BXM.shape[:2] and len(logits_BXV) == len(self._length_B)
        paths = _paths(tokens_BM, ancestors_BXM)
        place_BX = self._answer_B[:, None] + paths.depth_BX
        x_BXV = logits_BXV if logits_BXV.dtype == torch.float64 else logits_BXV.float()
        x_BXV = self._forbid(self._penalise(x_BXV, paths), place_BX)
        x_BXV, forced_BX = self._force(x_BXV, place_BX)
        if not draft:
            self._check_choice(x_BXV)
        if self.processing.logits_processors:
            wanted_BX = ~forced_BX if needed_BX is None else needed_BX & ~forced_BX
            return self._process(x_BXV, paths, tokens_BM, wanted_BX, draft)
        return x_BXV.clone() if x_BXV is logits_BXV else x_BXV

    def _append(self, new: Sequence[Sequence[int]], *, answer: bool) -> None:
        """Write new ids into every state; the one place where it changes."""
        assert len(new) == len(self._length_B), f"ids for {len(new)} rows, {len(self._length_B)} rows held"
        flat = [(b, t, token) for b, ids in enumerate(new) for t, token in enumerate(ids)]
        row_T, place_T, token_T = torch.tensor(flat, dtype=torch.long, device=self._device).view(-1, 3).T
        if self.processing.penalises:
            self._seen_BV[row_T, token_T] = True
            if answer:
                self._count_BV.index_put_((row_T, token_T), torch.ones_like(token_T, dtype=torch.int32), accumulate=True)
        if self.processing.logits_processors and flat:
            at_T = self._length_B[row_T] + place_T
            missing = int(at_T.max()) + 1 - self._ids_BL.shape[1]
            if missing > 0:  # at least twice the room, so that appending stays cheap
                self._ids_BL = torch.nn.functional.pad(self._ids_BL, (0, max(missing, self._ids_BL.shape[1])))
            self._ids_BL[row_T, at_T] = token_T
        added_B = torch.tensor([len(ids) for ids in new], dtype=torch.long, device=self._device)
        self._length_B = self._length_B + added_B
        self._answer_B = self._answer_B + added_B * answer

    def _penalise(self, x_BXV: Tensor, paths: _Paths) -> Tensor:
        """The ids that any row has committed, then the few entries that a path changes again."""
        p = self.processing
        if not p.penalises:
            return x_BXV
        tokens_BXD = paths.tokens_BXD  # places past the end hold any id: it gets the value that it has anyway
        twice_BXDD = (tokens_BXD[..., :, None] == tokens_BXD[..., None, :]) & paths.valid_BXD[..., None, :]
        times_BXD = twice_BXDD.sum(-1)
        row_B11 = torch.arange(len(x_BXV), device=x_BXV.device)[:, None, None]
        numbers = {"repetition": p.repetition_penalty, "frequency": p.frequency_penalty, "presence": p.presence_penalty}
        seen_BXD, count_BXD = self._seen_BV[row_B11, tokens_BXD] | (times_BXD > 0), self._count_BV[row_B11, tokens_BXD] + times_BXD
        path_BXD = penalise(x_BXV.gather(2, tokens_BXD), seen_BXD, count_BXD, **numbers)
        said_U = self._seen_BV.any(0).nonzero()[:, 0]  # few of the vocabulary; a counted id is a seen one
        said_BXU = penalise(x_BXV[..., said_U], self._seen_BV[:, None, said_U], self._count_BV[:, None, said_U], **numbers)
        return x_BXV.index_copy(2, said_U, said_BXU).scatter_(2, tokens_BXD, path_BXD)

    def _forbid(self, x_BXV: Tensor, place_BX: Tensor) -> Tensor:
        if self.processing.min_new_tokens:
            early_BX1 = (place_BX < self.processing.min_new_tokens)[..., None]
            return x_BXV.masked_fill(torch.where(early_BX1, self._early_V, self._banned_V), -math.inf)
        return x_BXV.masked_fill(self._banned_V, -math.inf) if self.processing.banned_tokens else x_BXV

    def _force(self, x_BXV: Tensor, place_BX: Tensor) -> tuple[Tensor, Tensor]:
        """One-hot laws at the forced places, and which laws these are [B, X]."""
        hit_BXK = place_BX[..., None] == self._forced_at_K
        forced_BX = hit_BXK.any(-1)
        if self.processing.forced_tokens:
            id_BX1 = self._forced_id_K[hit_BXK.int().argmax(-1)][..., None]
            one_hot_BXV = torch.full_like(x_BXV, -math.inf).scatter_(2, id_BX1, 0.0)
            x_BXV = torch.where(forced_BX[..., None], one_hot_BXV, x_BXV)
        return x_BXV, forced_BX

    def _check_choice(self, x_BXV: Tensor) -> None:
        p = self.processing
        if (p.banned_tokens or p.min_new_tokens) and bool((x_BXV.amax(-1) == -math.inf).any()):
            found = f"banned_tokens ({len(p.banned_tokens)} ids) and min_new_tokens ({p.min_new_tokens})"
            raise ValueError(f"{found} leave no token to choose from; every step needs at least one allowed id")

    def _process(self, x_BXV: Tensor, paths: _Paths, tokens_BM: Tensor, wanted_BX: Tensor, draft: bool) -> Tensor:
        """Call the processors, shortest histories first: a law's parent is ready before it, and tells whether it can be reached."""
        x_BXV = x_BXV.clone()
        node_BX, X = paths.node(0), x_BXV.shape[1]
        token_BX = tokens_BM.gather(1, node_BX)
        law_X = torch.arange(X, device=x_BXV.device)
        law_BM = torch.full_like(tokens_BM, -1).scatter(1, node_BX, law_X.expand_as(node_BX))
        parent_BX = torch.where(paths.depth_BX > 0, law_BM.gather(1, paths.node(1)), -1)  # -1: none, or its law is not among these
        open_BX = ~(self._ends_V[paths.tokens_BXD] & paths.valid_BXD).any(-1)
        length_BX = self._length_B[:, None] + paths.depth_BX
        for length in sorted(set(length_BX.flatten().tolist())):
            row_G, at_G = (open_BX & (length_BX == length)).nonzero(as_tuple=True)
            parent_G = parent_BX[row_G, at_G]
            allowed_G = open_BX[row_G, parent_G] & (x_BXV[row_G, parent_G, token_BX[row_G, at_G]] > -math.inf)
            open_BX[row_G, at_G] = allowed_G | (parent_G < 0)
            row_G, at_G = (open_BX & wanted_BX & (length_BX == length)).nonzero(as_tuple=True)
            if len(row_G):
                x_BXV[row_G, at_G] = self._called(self._histories(row_G, at_G, length, paths), x_BXV[row_G, at_G], draft)
        return x_BXV

    def _histories(self, row_G: Tensor, at_G: Tensor, length: int, paths: _Paths) -> Tensor:
        """The ids [G, length] before each law."""
        column_L = torch.arange(length, device=row_G.device)
        ids_GL = self._ids_BL[row_G][:, column_L.clamp(max=self._ids_BL.shape[1] - 1)]
        tokens_GD = paths.tokens_BXD[row_G, at_G]
        if not tokens_GD.shape[1]:
            return ids_GL
        drafted_GL = column_L - self._length_B[row_G][:, None]
        path_GL = tokens_GD.gather(1, drafted_GL.clamp(min=0, max=tokens_GD.shape[1] - 1))
        return torch.where(drafted_GL >= 0, path_GL, ids_GL)

    def _called(self, ids_GL: Tensor, scores_GV: Tensor, draft: bool) -> Tensor:
        """Scores after every processor; each must keep the shape and leave something to choose."""
        shape, dtype, sound_G = scores_GV.shape, scores_GV.dtype, scores_GV.amax(-1).isfinite()
        for processor in self.processing.logits_processors:
            scores_GV = processor(ids_GL, scores_GV)
            if not isinstance(scores_GV, Tensor) or scores_GV.shape != shape:
                found = tuple(scores_GV.shape) if isinstance(scores_GV, Tensor) else type(scores_GV).__name__
                raise ValueError(f"logits processor {_name(processor)} returned {found}; it must return scores of shape {tuple(shape)}")
            best_G = scores_GV.amax(-1)
            left_G = best_G.isfinite() | (best_G == -math.inf) & draft  # false for NaN, for +inf, and for -inf everywhere
            if bool((sound_G & ~left_G).any()):
                ids = ids_GL[(sound_G & ~left_G).nonzero()[0, 0]].tolist()
                raise ValueError(
                    f"logits processor {_name(processor)} returned NaN, +inf or no allowed token after a history of {len(ids)} ids that "
                    f"ends with {ids[-8:]}; it must leave a finite score there"
                )
        return scores_GV.to(dtype)


def _check_ids(processing: Processing, vocab_size: int) -> None:
    for name, ids in (("banned_tokens", processing.banned_tokens), ("forced_tokens", processing.forced_tokens.values())):
        outside = [i for i in ids if i >= vocab_size]
        if outside:
            raise ValueError(f"{name} holds {outside[:8]}, outside the vocabulary 0..{vocab_size - 1}; was it made by another tokenizer?")
