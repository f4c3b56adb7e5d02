"""The view of one answer: every token has the right origin, and the tree of a round is the one that was drafted."""

from typing import Any

import pytest
import torch

from spectrain.data.formats import Prompt
from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain, Tree
from spectrain.decoding.tree import DraftTree
from spectrain.drafters.lookup import NGram
from spectrain.drafters.scripted import Scripted
from spectrain.evaluation.answer_view import view_of, visible
from spectrain.evaluation.measure import Arm
from spectrain.evaluation.schema import Example
from spectrain.evaluation.tokens_view import _pieces, example
from spectrain.target.model import Target

PROMPT = Prompt("chat:1", "chat", ("w20 w21 w22",), "")


@pytest.fixture(scope="module")
def plain(target: Target) -> list[int]:
    return generate(target, [PROMPT.chat], max_new_tokens=12, ignore_eos=True).rows[0].tokens


def test_a_token_is_told_of_another_origin(target: Target, plain: list[int]) -> None:
    """Two right drafts and a wrong one each round, then a round without a draft."""
    start = len(target.encode(PROMPT.chat))

    def drafts(ids: list[int]) -> list[int]:
        at = len(ids) - start
        if at > 6:
            return []
        return [*plain[at : at + 2], (plain[at + 2] + 1) % 90]

    arm = Arm("scripted chain:3", Scripted(drafts), Chain(3))
    found = example(target, arm, PROMPT, max_new_tokens=9)
    kinds = [token["kind"] for token in found["tokens"]]
    assert kinds == ["prefill", "drafted", "drafted", "corrected", "drafted", "drafted", "corrected", "own", "own"]
    assert [token["round"] for token in found["tokens"]] == [0, 1, 1, 1, 2, 2, 2, 3, 4]
    assert "".join(token["text"] for token in found["tokens"]) == target.tokenizer.decode(plain[:9])
    assert found["round"]["index"] == 1
    nodes = found["round"]["nodes"]
    assert [(n["parent"], n["depth"], n["rank"], n["accepted"]) for n in nodes] == [
        (-1, 0, 0, True), (0, 1, 0, True), (1, 2, 0, True), (2, 3, 0, False),
    ]  # fmt: skip
    assert [node["text"].strip() for node in nodes[:3]] == [f"w{token}" for token in plain[:3]]


def test_a_sibling_of_the_accepted_node_is_taken_for_it(target: Target, plain: list[int]) -> None:
    start = len(target.encode(PROMPT.chat))

    def drafts(ids: list[int]) -> Any:
        at = len(ids) - start
        other = (plain[at] + 1) % 90
        tokens = torch.tensor([[ids[-1], other, plain[at], plain[at + 1], other]])
        return DraftTree(tokens, torch.tensor([[-1, 0, 0, 2, 2]]), torch.tensor([5]), "point_mass")

    found = example(target, Arm("tree", Scripted(drafts), Tree.static([(0,), (1,), (1, 0), (1, 1)])), PROMPT, max_new_tokens=7)
    nodes = found["round"]["nodes"]
    assert [(n["parent"], n["rank"], n["accepted"]) for n in nodes] == [
        (-1, 0, True), (0, 0, False), (0, 1, True), (2, 0, True), (2, 1, False),
    ]  # fmt: skip
    view = view_of(Example.model_validate(found))
    assert [node.text for node, _ in view.children] == [nodes[1]["text"], nodes[2]["text"]] and len(view.children[1][1]) == 2
    assert view.rounds[1][1].split() == [f"w{token}" for token in plain[1:3]] and view.rounds[1][2].split() == [f"w{plain[3]}"]


def test_the_wrapped_drafter_is_another_one(target: Target) -> None:
    """What is recorded changes no token, and drafters with an end of their own are told of it."""
    arm = Arm("ngram chain:4", NGram(), Chain(4))
    found = example(target, arm, PROMPT, max_new_tokens=40)
    result = generate(target, [PROMPT.chat], drafter=NGram(), shape=Chain(4), max_new_tokens=40)
    assert "".join(token["text"] for token in found["tokens"]) == target.tokenizer.decode(result.rows[0].tokens)
    drafted = sum(token["kind"] == "drafted" for token in found["tokens"])
    assert drafted == sum(min(r.accepted, r.committed) for r in result.rows[0].rounds)
    with pytest.raises(ValueError, match="plain drafts nothing"):
        example(target, Arm("plain"), PROMPT, max_new_tokens=4)


def test_half_a_character_is_shown() -> None:
    text = "a€b".encode()

    def decode(ids: Any) -> str:
        return bytes(ids).decode(errors="replace")

    assert _pieces(decode, list(text)) == ["a", "", "", "€", "b"]
    assert _pieces(decode, list(text[:2])) == ["a", "\ufffd"]
    assert visible(" \n") == "␣⏎" and visible(" a b\n") == " a b⏎"
