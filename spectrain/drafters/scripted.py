"""Drafts from a function: for tests, notebooks, and ideas that are not a drafter yet."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from spectrain.decoding.drafter import Round
from spectrain.decoding.tree import DraftTree, check_tree
from spectrain.drafters.packing import Record, RowDraft, pack
from spectrain.target.model import Target

Answer = Sequence[int] | DraftTree | None


@dataclass(frozen=True)
class Scripted:
    """`fn(ids)` for the committed ids of one row -> drafted ids, or a `DraftTree` of that row alone ([1, N], point mass); [] or None: none.

    Drafts beyond the shape's depth or budget are cut off, of a tree the nodes of higher number first.
    """

    fn: Callable[[list[int]], Answer]
    layer_ids: tuple[int, ...] = ()
    has_q: bool = field(default=False, init=False)

    def start(self, target: Target, rows: int, max_length: int) -> "_Script":
        """A session; its `propose` raises ValueError for ids that the target lacks and for a tree of another row."""
        return _Script(self.fn, target, [Record() for _ in range(rows)])


@dataclass
class _Script:
    fn: Callable[[list[int]], Answer]
    target: Target
    records: list[Record]

    def observe(self, states_BNF: Tensor | None, next_BN: Tensor, count_B: Tensor) -> None:
        """Nothing to learn."""

    def select(self, rows_R: Tensor) -> None:
        self.records = [self.records[b] for b in rows_R.tolist()]

    def rewind(self) -> None:
        """Nothing to drop."""

    def propose(self, round: Round) -> DraftTree | None:
        drafts, expected = [], []
        for ids, limit, record in zip(round.committed, round.limits(), self.records, strict=True):
            draft = cut(self._row(list(ids)), depth=limit, budget=round.shape.budget)
            line = _first_line(draft)
            record.settle(ids)
            record.note(0, len(ids), line)
            drafts.append(draft)
            expected.append(record.expected(0, len(line)))
        return pack(round.committed, drafts, self.target.device, expected if round.estimate else None)

    def _row(self, ids: list[int]) -> RowDraft:
        answer = self.fn(ids)
        draft = _of_tree(answer, ids[-1]) if isinstance(answer, DraftTree) else RowDraft.chain([int(t) for t in answer or ()])
        V = self.target.vocab_size
        wrong = [token for token in draft.tokens if not 0 <= token < V]
        if wrong:
            raise ValueError(f"the script drafted the id {wrong[0]}; {self.target.name} has ids 0..{V - 1}")
        return draft


def _of_tree(tree: DraftTree, root: int) -> RowDraft:
    """The nodes of a tree of one row; ValueError for one that a script may not return."""
    if len(tree.tokens_BN) != 1 or tree.law != "point_mass":
        raise ValueError(
            f"the script returned a tree of {len(tree.tokens_BN)} rows and the law {tree.law!r}; a script answers for one row, "
            "with law='point_mass'"
        )
    check_tree(tree)
    N = int(tree.num_B[0])
    tokens, parents = tree.tokens_BN[0, :N].tolist(), tree.parents_BN[0, :N].tolist()
    if tokens[0] != root:
        raise ValueError(f"node 0 of the script's tree is the id {tokens[0]}; it must be the last committed id, {root}")
    return RowDraft(tokens[1:], parents[1:])


def cut(draft: RowDraft, *, depth: int, budget: int) -> RowDraft:
    """The draft without nodes below `depth`, and of the others the first `budget`."""
    number, level = {0: 0}, {0: 0}  # of the nodes that stay, by their old numbers
    kept = RowDraft([], [])
    for n, (token, parent) in enumerate(zip(*draft, strict=True), 1):
        if parent in number and level[parent] < depth and len(kept.tokens) < budget:
            kept.tokens.append(token)
            kept.parents.append(number[parent])
            number[n], level[n] = len(kept.tokens), level[parent] + 1
    return kept


def _first_line(draft: RowDraft) -> list[int]:
    """The path of first children: what the acceptance of a draft is estimated from."""
    line, node = [], 0
    while node in draft.parents:
        index = draft.parents.index(node)
        line.append(draft.tokens[index])
        node = index + 1
    return line
