"""Suffix decoding: drafts from counts of what followed the last tokens, in this text and in earlier ones (arXiv 2411.04975).

Each row has a trie over its own prompt and answer; the drafter has one over a corpus. For every length m at which the last m tokens
are found in a trie, the most frequent continuation is followed; the chance of a path is the product of the count ratios along it,
and the score of a draft, the sum of its nodes' chances, is the number of drafts it expects to be accepted. The best score wins.

A trie holds every stretch of up to `max_depth` tokens, but a stretch seen once is not written out: its leaf points into the text.
That takes about half a kilobyte a token. A new token costs at most `max_depth` steps and a proposal at most `max_depth`² look-ups,
whatever the length of the text.
"""

import heapq
import itertools
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field, replace

from torch import Tensor

from spectrain.decoding.drafter import Round
from spectrain.decoding.tree import DraftTree
from spectrain.drafters.packing import RowDraft, pack
from spectrain.target.model import Target


class _Node:
    """A stretch of tokens. `text[at]` is its last token while it was seen only once and `children` is None."""

    __slots__ = ("at", "children", "count", "order", "rank", "text", "token")

    def __init__(self, token: int, text: list[int] | None, at: int) -> None:
        self.token, self.text, self.at = token, text, at
        self.count, self.rank = 1, 0  # occurrences; place in the parent's `order`
        self.children: dict[int, _Node] | None = None
        self.order: list[_Node] = _EMPTY  # children by falling count; the one that reached the highest count last comes first


_EMPTY: list[_Node] = []  # shared by all leaves, never written to
Cursor = tuple[_Node, int]  # a node, and how many tokens further into the text of a leaf


class SuffixTrie:
    """Counts of every stretch of up to `max_depth` tokens of the texts."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.root = _Node(-1, None, 0)
        self.root.children, self.root.order = {}, []

    def append(self, text: list[int], at: int, ends: list[_Node]) -> list[_Node]:
        """Count token `text[at]`. ends: the nodes of the text's last 1, 2, ... tokens before it, as far as they were seen elsewhere too;
        returns those after it."""
        moved = (self._count(node, text, at, depth) for depth, node in enumerate([self.root, *ends][: self.max_depth], 1))
        return [node for node in moved if node is not None]

    def _count(self, node: _Node, text: list[int], at: int, depth: int) -> _Node | None:
        """Count `text[at]` as a child at `depth`; the child, or None when it is new."""
        assert node.children is not None
        child = node.children.get(text[at])
        if child is None:
            _add(node, _Node(text[at], text, at))
            return None
        _swap(node.order, child.rank, bisect_left(node.order, -child.count, key=_falling))
        child.count += 1
        _swap(node.order, child.rank, bisect_left(node.order, -child.count, hi=child.rank, key=_falling))
        if child.text is not None:  # seen once so far
            old_text, after, child.text = child.text, child.at + 1, None
            if depth < self.max_depth:
                child.children, child.order = {}, []
                if after < len(old_text):
                    _add(child, _Node(old_text[after], old_text, after))
        return child

    def forget(self, text: list[int]) -> None:
        """Take a text out again."""
        for start in range(len(text)):
            node = self.root
            for token in text[start : start + self.max_depth]:
                if node.children is None:
                    break
                child = node.children[token]
                _swap(node.order, child.rank, bisect_right(node.order, -child.count, key=_falling) - 1)
                child.count -= 1
                if child.count == 0:
                    node.order.pop()
                    del node.children[token]
                    break
                node = child

    def find(self, tokens: Sequence[int]) -> Cursor | None:
        """Where a stretch ends in the trie."""
        cursor: Cursor = (self.root, 0)
        for token in tokens:
            node, walked = cursor
            if node.children is not None:
                child = node.children.get(token)
                if child is None:
                    return None
                cursor = (child, 0)
            elif node.text is not None and node.at + walked + 1 < len(node.text) and node.text[node.at + walked + 1] == token:
                cursor = (node, walked + 1)
            else:
                return None
        return cursor


def _falling(node: _Node) -> int:
    return -node.count


def _swap(order: list[_Node], i: int, j: int) -> None:
    a, b = order[i], order[j]
    order[i], order[j] = b, a
    a.rank, b.rank = j, i


def _add(node: _Node, child: _Node) -> None:
    assert node.children is not None
    node.children[child.token] = child
    child.rank = len(node.order)
    node.order.append(child)
    _swap(node.order, child.rank, bisect_left(node.order, -1, key=_falling))


def child_of(cursor: Cursor, rank: int) -> tuple[int, float, Cursor] | None:
    """Token, count ratio and place of the child of this rank (0: the most frequent)."""
    node, walked = cursor
    if rank < len(node.order):
        child = node.order[rank]
        return child.token, child.count / node.count, (child, 0)
    after = node.at + walked + 1
    if rank == 0 and node.text is not None and after < len(node.text):
        return node.text[after], 1.0, (node, walked + 1)
    return None


@dataclass(frozen=True)
class Limits:
    """Bounds of one draft: levels, nodes, the chance a path must keep, the chance of a token below which nothing is drafted, and the
    target's number of ids: the corpus may hold higher ones, which end a chain and have no place in a tree."""

    depth: int
    budget: int
    min_probability: float
    stop_below: float
    vocab_size: int


def chain_from(cursor: Cursor, limits: Limits) -> tuple[RowDraft, float]:
    """The most frequent continuation, and its score."""
    tokens: list[int] = []
    chance, score = 1.0, 0.0
    while len(tokens) < min(limits.depth, limits.budget):
        child = child_of(cursor, 0)
        if child is None or child[0] >= limits.vocab_size or chance * child[1] < limits.min_probability:
            break
        token, ratio, cursor = child
        chance *= ratio
        tokens.append(token)
        score += chance
        if ratio < limits.stop_below:
            break
    return RowDraft.chain(tokens), score


@dataclass
class _Offer:
    """A token that may join a tree: the child of this rank of the place `above`, which is node `parent` of the draft."""

    above: Cursor
    above_chance: float
    parent: int
    depth: int
    rank: int


def tree_from(cursor: Cursor, limits: Limits) -> tuple[RowDraft, float]:
    """The nodes with the highest chances below the cursor, best first, and their score."""
    draft, score = RowDraft([], []), 0.0
    heap: list[tuple[float, int, _Offer, tuple[int, float, Cursor]]] = []
    serial = itertools.count()  # ties go to the older offer

    def push(offer: _Offer) -> None:
        child = child_of(offer.above, offer.rank) if offer.depth <= limits.depth else None
        while child is not None and child[0] >= limits.vocab_size:
            offer = replace(offer, rank=offer.rank + 1)
            child = child_of(offer.above, offer.rank)
        if child is not None and offer.above_chance * child[1] >= limits.min_probability:
            heapq.heappush(heap, (-offer.above_chance * child[1], next(serial), offer, child))

    push(_Offer(cursor, 1.0, 0, 1, 0))
    while heap and len(draft.tokens) < limits.budget:
        minus, _, offer, (token, ratio, place) = heapq.heappop(heap)
        draft.tokens.append(token)
        draft.parents.append(offer.parent)
        score -= minus
        if ratio >= limits.stop_below:
            push(_Offer(place, -minus, len(draft.tokens), offer.depth + 1, 0))
        push(replace(offer, rank=offer.rank + 1))
    return draft, score


@dataclass(eq=False)
class Suffix:
    """Drafts what most often followed the last tokens. A point mass; needs no training.

    Of a shape it reads depth and budget: a chain for a chain, for every tree the likeliest nodes of its counts.
    corpus: earlier texts as token ids, the `max_cached` last of them are kept; ids that the target lacks are not drafted. learn: the
    answers of each call join the corpus when the call ends (the oldest texts leave); within a call the corpus is frozen, so that a
    row's drafts do not depend on its batch. A match of m tokens gives at most factor * m + offset levels, m and levels together at
    most max_depth; paths less likely than min_probability are not drafted.
    """

    corpus: InitVar[Iterable[Sequence[int]] | None] = None
    max_depth: int = 24
    factor: float = 1.0
    offset: int = 0
    min_probability: float = 0.1
    max_cached: int = 10000
    learn: bool = False
    layer_ids: tuple[int, ...] = field(default=(), init=False)
    has_q: bool = field(default=False, init=False)

    def __post_init__(self, corpus: Iterable[Sequence[int]] | None) -> None:
        if self.max_depth < 2 or self.max_cached < 0 or not 0 <= self.min_probability <= 1 or self.factor < 0:
            raise ValueError(f"needed max_depth >= 2, max_cached >= 0, factor >= 0 and 0 <= min_probability <= 1, found {self}")
        self._texts: deque[list[int]] = deque()
        self._trie = SuffixTrie(self.max_depth)
        for number, text in enumerate(corpus or ()):
            if isinstance(text, (str, int)):
                raise ValueError(f"text {number} of the corpus is {text!r}; it must be a list of token ids (target.encode makes one)")
            self.add(text)

    def add(self, ids: Sequence[int]) -> None:
        """Add a text to the corpus; the oldest one leaves when it is full. ValueError for negative ids."""
        text = [int(i) for i in ids]
        if text and min(text) < 0:
            raise ValueError(f"a text of the corpus holds {min(text)}; token ids start at 0: leave masked places out")
        if not text or self.max_cached == 0:
            return
        if len(self._texts) == self.max_cached:
            self._trie.forget(self._texts.popleft())
        self._texts.append(text)
        ends: list[_Node] = []
        for at in range(len(text)):
            ends = self._trie.append(text, at, ends)

    def start(self, target: Target, rows: int, max_length: int) -> "_SuffixSession":
        """A session; any target will do."""
        return _SuffixSession(self, self._trie, target, [_Row(self.max_depth) for _ in range(rows)])


class _Row:
    """One row's own trie."""

    def __init__(self, max_depth: int) -> None:
        self.text: list[int] = []
        self.ends: list[_Node] = []
        self._trie = SuffixTrie(max_depth)

    def read(self, ids: Sequence[int]) -> None:
        """Take in what was committed since the last call."""
        for token in ids[len(self.text) :]:
            self.text.append(token)
            self.ends = self._trie.append(self.text, len(self.text) - 1, self.ends)


@dataclass
class _SuffixSession:
    settings: Suffix
    trie: SuffixTrie
    target: Target
    rows: list[_Row]

    def observe(self, states_BNF: Tensor | None, next_BN: Tensor, count_B: Tensor) -> None:
        """Nothing to learn: `propose` reads the committed tokens."""

    def select(self, rows_R: Tensor) -> None:
        self.rows = [self.rows[b] for b in rows_R.tolist()]

    def rewind(self) -> None:
        """Nothing to drop."""

    def finish(self, answers: Sequence[tuple[Sequence[int], int]]) -> None:
        """The call has ended with these rows (prompt and answer, prompt length)."""
        if self.settings.learn:
            for ids, prompt_length in answers:
                self.settings.add(ids[prompt_length:])

    def propose(self, round: Round) -> DraftTree | None:
        """A chain for a chain, a tree for every other shape. Estimate: the score."""
        found = []
        for ids, limit, row in zip(round.committed, round.limits(), self.rows, strict=True):
            row.read(ids)
            found.append(self._best(row, round, limit))
        return pack(round.committed, [d for d, _ in found], self.target.device, [s for _, s in found] if round.estimate else None)

    def _best(self, row: _Row, round: Round, limit: int) -> tuple[RowDraft, float]:
        """The draft with the highest score; of equals the longest match, and the row's own text before the corpus."""
        s, V = self.settings, self.target.vocab_size
        draw = chain_from if round.shape.is_chain else tree_from
        best, best_score = RowDraft([], []), 0.0
        for m, cursor in self._matches(row):
            depth = min(limit, int(s.factor * m + s.offset), s.max_depth - m)
            if depth > best_score:  # the chances of a level add up to 1 at most
                draft, score = draw(cursor, Limits(depth, round.shape.budget, s.min_probability, round.stop_below, V))
                if score > best_score:
                    best, best_score = draft, score
        return best, best_score

    def _matches(self, row: _Row) -> Iterator[tuple[int, Cursor]]:
        """Where the last m tokens stand, from the longest m down."""
        own = dict(enumerate(row.ends, 1))
        found: dict[int, Cursor] = {}
        for m in range(1, min(self.settings.max_depth, len(row.text) + 1)):
            cursor = self.trie.find(row.text[-m:])
            if cursor is None:
                break
            found[m] = cursor
        for m in range(max([0, *own, *found]), 0, -1):
            if m in own:
                yield m, (own[m], 0)
            if m in found:
                yield m, found[m]
