"""A real answer, token by token: which were drafted, which the target corrected, and the tree of one round.

The drafter is wrapped so that what it proposes is kept; the generator is the same as everywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spectrain.data.formats import Prompt
from spectrain.decoding.drafter import Drafter, DraftSession, Round
from spectrain.decoding.generate import RowResult, generate
from spectrain.decoding.tree import DraftTree
from spectrain.target.model import Target

SHOWN = 60  # of a prompt's text: several of these characters
Nodes = list[tuple[int, int]]  # token and parent of each node, the root first


@dataclass
class _Recording:
    """A drafter whose proposals for row 0 are kept, one a round."""

    drafter: Drafter
    trees: list[Nodes] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def start(self, target: Target, rows: int, max_length: int) -> "_RecordingSession":
        return _RecordingSession(self.drafter.start(target, rows, max_length), self.trees)


class _RecordingSession:
    def __init__(self, session: DraftSession, trees: list[Nodes]) -> None:
        self._session, self._trees = session, trees

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def propose(self, round: Round) -> DraftTree | None:
        tree = self._session.propose(round)
        self._trees.append([(round.committed[0][-1], -1)] if tree is None else _nodes(tree))
        return tree


def _nodes(tree: DraftTree) -> Nodes:
    used = int(tree.num_B[0])
    return list(zip(tree.tokens_BN[0, :used].tolist(), tree.parents_BN[0, :used].tolist(), strict=True))


def example(target: Target, arm: Any, prompt: Prompt, *, max_new_tokens: int, draws: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """An answer to the prompt's first turn by one arm of an evaluation, as a report shows it.

    arm: has `name`, `drafter` (not None) and `shape`. draws: further arguments of `generate` (temperature, seed). The round whose tree is
    shown is the one that accepted most among those that did not accept all. ValueError for plain decoding, which drafts nothing.
    """
    if arm.drafter is None:
        raise ValueError(f"{arm.name} drafts nothing, so there is nothing to show; choose an arm with a drafter")
    recording = _Recording(arm.drafter)
    result = generate(
        target, [prompt.chat], drafter=recording, shape=arm.shape, max_new_tokens=max_new_tokens, compile=False, **(draws or {})
    )
    row = result.rows[0]
    kinds = _kinds(row, recording.trees)
    pieces = _pieces(target.tokenizer.decode, row.tokens)
    shown = _shown_round(row)
    return {
        "arm": arm.name, "domain": prompt.domain, "id": prompt.id, "prompt": _shortened(prompt.turns[0]),
        "tokens": [{"text": text, "kind": kind, "round": number} for text, (kind, number) in zip(pieces, kinds, strict=True)],
        "round": None if shown is None else _drawn(target, row, recording.trees, shown),
    }  # fmt: skip


def _kinds(row: RowResult, trees: Sequence[Nodes]) -> list[tuple[str, int]]:
    """(kind, round) of each token: the prompt's pass is round 0."""
    found, at = [("prefill", 0)], 1
    for number, (record, nodes) in enumerate(zip(row.rounds, trees, strict=True), start=1):
        drafted = min(record.accepted, record.committed)
        found += [("drafted", number)] * drafted
        if record.committed > drafted:
            path = _path(nodes, row.tokens[at : at + record.accepted])
            followed = any(parent == path[-1] for _, parent in nodes)
            found.append(("corrected" if followed else "own", number))
        at += record.committed
    return found


def _path(nodes: Nodes, accepted: Sequence[int]) -> list[int]:
    """Numbers of the nodes that these tokens lie on, the root first."""
    path = [0]
    for token in accepted:
        below = [i for i, (child, parent) in enumerate(nodes) if parent == path[-1] and child == token]
        if not below:
            break
        path.append(below[0])
    return path


def _shown_round(row: RowResult) -> int | None:
    """Index of the most telling round, None where nothing was ever drafted."""
    drafted = [i for i, record in enumerate(row.rounds) if record.drafted]
    return max(drafted, key=lambda i: (row.rounds[i].accepted < row.rounds[i].depth, row.rounds[i].accepted), default=None)


def _drawn(target: Target, row: RowResult, trees: Sequence[Nodes], shown: int) -> dict[str, Any]:
    """The tree of a round, each node with its text after the path before it."""
    nodes = trees[shown]
    before = 1 + sum(record.committed for record in row.rounds[:shown])
    path = _path(nodes, row.tokens[before : before + row.rounds[shown].accepted])
    depth, siblings, found = [0] * len(nodes), [0] * len(nodes), []
    for i, (token, parent) in enumerate(nodes):
        rank = 0
        if parent >= 0:
            depth[i], rank = depth[parent] + 1, siblings[parent]
            siblings[parent] += 1
        text = target.tokenizer.decode([token]) if parent < 0 else _after(target, nodes[parent][0], token)
        found.append({"text": text, "parent": parent, "depth": depth[i], "rank": rank, "accepted": i in path})
    return {"index": shown + 1, "nodes": found}


def _after(target: Target, before: int, token: int) -> str:
    """A token's text behind another one: some tokenizers drop the space that a text begins with."""
    first, both = (target.tokenizer.decode(ids) for ids in ([before], [before, token]))
    return both[len(first) :] if both.startswith(first) else target.tokenizer.decode([token])


def _pieces(decode: Any, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text; a character of several tokens is added by its last one."""
    pieces, shown = [], ""
    for end in range(1, len(tokens) + 1):
        so_far = decode(tokens[:end])
        whole = so_far.rstrip("\ufffd") if end < len(tokens) else so_far
        whole = whole if whole.startswith(shown) else shown
        pieces.append(whole[len(shown) :])
        shown = whole
    return pieces


def _shortened(text: str) -> str:
    most = 12 * SHOWN
    return text if len(text) <= most else text[:most] + " …"
