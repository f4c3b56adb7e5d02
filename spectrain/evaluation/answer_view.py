"""The token view of a report in words: a summary, a table of rounds, the tree of one round. `tokens_view.py` makes what is shown."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from spectrain.evaluation.schema import Example

KINDS = {
    "drafted": "drafted and accepted (underlined)",
    "corrected": "corrected: the target's token where a draft was refused (dashed)",
    "own": "the target's own, where no draft stood (dotted)",
    "prefill": "from the prompt's pass (italic)",
}
Branch = list[tuple[Any, Any]]  # nodes, each with its own branch


@dataclass(frozen=True)
class AnswerView:
    """What the page says of an example. rounds: (number, drafted text, own text); children: the nodes below the root."""

    summary: str
    kinds: list[tuple[str, str]]
    rounds: list[tuple[str, str, str]]
    tree: str = ""
    index: int = 0
    root: Any = None
    children: Branch = None  # type: ignore[assignment]


def view_of(example: Example) -> AnswerView:
    """An example as words."""
    counts = Counter(token.kind for token in example.tokens)
    told = [(kind, f"{counts[kind]} {meaning}") for kind, meaning in KINDS.items() if counts[kind]]
    rounds = 1 + max((token.round for token in example.tokens), default=0)
    summary = f"{len(example.tokens)} tokens in {rounds} passes of the target, the prompt's among them."
    table = [_round(example, number) for number in range(rounds)]
    if example.round is None or not example.round.nodes:
        return AnswerView(summary, told, table)
    nodes = example.round.nodes
    accepted = sum(node.accepted for node in nodes[1:])
    deepest = max(node.depth for node in nodes)
    tree = f"{len(nodes) - 1} drafted nodes, at most {deepest} in a row; {accepted} accepted (✓). Rank 1 is the drafter's first choice."
    return AnswerView(summary, told, table, tree, example.round.index, nodes[0], _below(nodes, 0))


def _round(example: Example, number: int) -> tuple[str, str, str]:
    tokens = [token for token in example.tokens if token.round == number]
    drafted = "".join(visible(token.text) for token in tokens if token.kind == "drafted")
    own = "".join(visible(token.text) for token in tokens if token.kind != "drafted")
    return (str(number) if number else "prompt"), drafted or "–", own or "–"


def _below(nodes: list[Any], at: int) -> Branch:
    return [(node, _below(nodes, i)) for i, node in enumerate(nodes) if i and node.parent == at]


def visible(text: str) -> str:
    """Text with line ends and blanks at its ends shown as signs."""
    if not text.strip(" \n\t"):
        return text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣") or "∅"
    return text.replace("\n", "⏎").replace("\t", "⇥")
