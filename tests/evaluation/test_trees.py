"""Trees from counts of acceptance: what is counted, which rounds, what is left out, and the file that holds it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.decoding.shapes import Tree, expected_tau
from spectrain.evaluation.trees import (
    FREE,
    WIDTH,
    begins,
    best_of,
    counted,
    fitted,
    joined,
    left_out,
    of_lines,
    rising,
    rounds_of,
    sentence,
)
from spectrain.training.simulate import Ranks, accepted_tree, walk
from spectrain.yields import Costs, check_table

DEAR = Costs(seconds=1.0, v=tuple(1.0 + 0.9 * n for n in range(80)), c=0.9)
SMALL = Costs(seconds=1.0, v=tuple(1.0 + 0.02 * n for n in range(80)), c=0.05)


def ranks_by_answer(answers: Sequence[Sequence[Sequence[int]]], width: int) -> Ranks:
    """answers[a][r] = ranks at each depth of row r of answer a; the last rows of an answer see its end."""
    rank, counts, row, line, at = [], [], [], [], 0
    for a, rows in enumerate(answers):
        for r, ranks in enumerate(rows):
            rank.append(list(ranks))
            counts.append([r + k < len(rows) for k in range(len(ranks))])
            row.append(at + r)
            line.append(a)
        at += len(rows) + 3
    return Ranks(width, torch.tensor(rank).T, torch.tensor(counts).T, torch.tensor(row), torch.tensor(line))


def drawn(number: int, length: int, *, depths: int = 4, width: int = 3, hard: float = 0.5, seed: int = 0) -> Ranks:
    """Answers of easy stretches, in which the first choice is nearly always right, and hard ones, in which it seldom is."""
    generator = torch.Generator().manual_seed(seed)
    answers = []
    for _ in range(number):
        level, easy = [], True
        for _ in range(length + depths):
            if torch.rand((), generator=generator) < 0.15:
                easy = bool(torch.rand((), generator=generator) > hard)
            chances = torch.tensor([0.9, 0.05, 0.03, 0.02] if easy else [0.2, 0.1, 0.1, 0.6])
            level.append(int(torch.multinomial(chances, 1, generator=generator)))
        answers.append([level[r : r + depths] for r in range(length)])
    return ranks_by_answer(answers, width)


def by_hand(ranks: Ranks, accepted: list[int]) -> list[bool]:
    found, row, line = [False] * len(accepted), ranks.row_R.tolist(), ranks.line_R.tolist()
    for a in set(line):
        mine = [r for r in range(len(row)) if line[r] == a]
        at = mine[0]
        while at <= mine[-1]:
            found[at] = True
            at += 1 + accepted[at]
    return found


@pytest.mark.parametrize("seed", range(4))
def test_round_begins_elsewhere_than_in_the_walk(seed: int) -> None:
    ranks = joined([drawn(3, 9, seed=seed), drawn(1, 1, seed=seed), drawn(2, 14, seed=seed + 1)])
    for paths in ([(0,), (0, 0), (1,)], [], [(2,)]):
        accepted_R = accepted_tree(ranks.rank_KR, ranks.counts_KR, paths)
        begins_R = begins(accepted_R, ranks.row_R)
        assert begins_R.tolist() == by_hand(ranks, accepted_R.tolist())
        rounds = [int(begins_R[ranks.line_R == a].sum()) for a in range(6)]
        assert rounds == walk(accepted_R, ranks.row_R).rounds_A.tolist() and (paths or begins_R.all())


def test_share_is_of_other_rounds() -> None:
    """Counted by hand: depth 2 counts only rounds whose first token was a choice and whose answer goes on."""
    ranks = ranks_by_answer([[[0, 1, 0], [1, 2, 0], [2, 0, 0], [0, 0, 0]], [[0, 0, 1], [3, 0, 0]]], width=3)
    counts = counted(ranks, torch.ones(6, dtype=torch.bool))
    assert counts.denominator == [6, 4, 2]  # without the last rows; then without row 1 (choice 2 is one, but row 2's is the end)
    assert counts.numerator == [[3, 1, 1], [2, 1, 1], [2, 0, 0]]
    some = counted(ranks, torch.tensor([True, False, False, False, True, False]))
    assert some.denominator == [2, 2, 1] and some.numerator == [[2, 0, 0], [1, 1, 0], [1, 0, 0]]
    assert counted(ranks, torch.zeros(6, dtype=torch.bool)).table == []
    check_table(counts.table)


def test_parts_run_into_each_other() -> None:
    parts = [drawn(2, 8, seed=s) for s in range(3)]
    whole = joined(parts)
    assert sorted(set(whole.line_R.tolist())) == list(range(6)) and (whole.row_R.diff() > 0).all()
    every = [counted(part, rounds_of(whole, nodes=6)[whole.line_R // 2 == i]) for i, part in enumerate(parts)]
    together = counted(whole, rounds_of(whole, nodes=6))
    assert together.denominator == [sum(column) for column in zip(*(part.denominator for part in every), strict=True)]
    tree = [(0,), (0, 0), (0, 0, 0)]
    rounds = [walk(accepted_tree(p.rank_KR, p.counts_KR, tree), p.row_R).rounds_A.tolist() for p in parts]
    assert walk(accepted_tree(whole.rank_KR, whole.counts_KR, tree), whole.row_R).rounds_A.tolist() == sum(rounds, [])
    only = of_lines(whole, [2, 3])
    assert torch.equal(only.rank_KR, parts[1].rank_KR) and set(only.line_R.tolist()) == {2, 3}
    with pytest.raises(ValueError, match="no answers"):
        joined([])


def test_easy_rows_make_the_rounds() -> None:
    """What the counts of rounds say of a tree is what its walk gives; shares of all rows promise too much."""
    ranks = drawn(40, 120, seed=3)
    rounds, every = (counted(ranks, r) for r in (rounds_of(ranks, nodes=8), torch.ones_like(ranks.row_R, dtype=torch.bool)))
    tree = Tree.optimised(rounds.table, FREE, max_budget=8)
    walked = walk(accepted_tree(ranks.rank_KR, ranks.counts_KR, tree.paths), ranks.row_R)
    tau = int(walked.tokens_A.sum()) / int(walked.rounds_A.sum())
    assert expected_tau(tree, rounds.table) == pytest.approx(tau, abs=0.12)
    assert expected_tau(tree, every.table) > tau + 0.3


def test_tree_has_seen_what_it_is_judged_on() -> None:
    """One answer wants a chain, the other a wide tree: each is walked by the tree of the other."""
    ranks = ranks_by_answer([[[0, 0, 0]] * 12, [[2, 2, 2]] * 12], width=3)
    tree = Tree.static([(0,), (1,), (2,), (0, 0), (0, 0, 0), (0, 1)])
    pairs = left_out(ranks, tree, nodes=6)
    assert len(pairs) == 2 and [tokens for tokens, _ in pairs] == [12, 12]
    alone = [of_lines(ranks, [1 - a]) for a in range(2)]
    for (_, rounds), other, a in zip(pairs, alone, range(2), strict=True):
        theirs = Tree.optimised(counted(other, rounds_of(other, nodes=6)).table, FREE, max_budget=6)
        mine = of_lines(ranks, [a])
        assert rounds == int(walk(accepted_tree(mine.rank_KR, mine.counts_KR, theirs.paths), mine.row_R).rounds_A)
    both = Tree.optimised(counted(ranks, rounds_of(ranks, nodes=6)).table, FREE, max_budget=6)
    seen = walk(accepted_tree(ranks.rank_KR, ranks.counts_KR, both.paths), ranks.row_R).rounds_A
    assert sum(rounds for _, rounds in pairs) > int(seen.sum())
    assert left_out(of_lines(ranks, [0]), tree, nodes=6) == []


def test_every_answer_is_left_out_once() -> None:
    ranks = drawn(10, 20)
    pairs = left_out(ranks, Tree.static([(0,), (0, 0)]), nodes=4)
    assert [tokens for tokens, _ in pairs] == [20] * 10
    alike = ranks_by_answer([[[0, 0, 0]] * 12, [[0, 0, 0]] * 12], width=3)
    assert left_out(alike, Tree.static([(0,), (1,)]), nodes=4) == [(12, 6), (12, 6)], "a deeper tree stood in for it"


def test_best_of_a_size_is_another_size_or_too_deep() -> None:
    table = counted(ranks := drawn(20, 60), rounds_of(ranks, nodes=8)).table
    for nodes in (1, 3, 8):
        tree = best_of(table, SMALL, nodes=nodes)
        assert tree.budget == nodes and not tree.has_gaps
        gains = {}
        for depth in range(1, 5):
            other = Tree.optimised(table[:depth], FREE, max_budget=nodes)
            if other.budget == nodes:
                gains[depth] = expected_tau(other, table) / SMALL.break_even(other.depth, other.budget)
        assert max(gains.values()) == expected_tau(tree, table) / SMALL.break_even(tree.depth, tree.budget)
    deep, flat = Costs(1.0, (1.0, 1.0), 0.0), Costs(1.0, (1.0, 1.0), 5.0)
    assert best_of(table, deep, nodes=3).depth > best_of(table, flat, nodes=3).depth == 1
    assert best_of(table, flat, nodes=4).budget == 4, "three ranks at the first depth are no tree of four nodes"


def test_loss_is_offered_as_a_tree() -> None:
    domains = ["a"] * 4 + ["b"] * 6
    ranks = drawn(10, 40)
    dear, cheap = fitted(ranks, domains, DEAR, nodes=8), fitted(ranks, domains, SMALL, nodes=8)
    assert dear["tree"]["paths"] == [] and dear["tree"]["tau"] is None and dear["budgets"]
    assert "No tree is predicted to pay" in sentence(dear)
    tree = cheap["tree"]
    assert tree["nodes"] == len(tree["paths"]) > 1 and tree["speedup"] == tree["tau"] / tree["break_even"] > 1
    assert tree["break_even"] == SMALL.break_even(tree["depth"], tree["nodes"]) and tree["lo"] <= tree["tau"] <= tree["hi"]
    assert f"depth {tree['depth']}, width {tree['width']}: expected tau {tree['tau']:.2f} [" in sentence(cheap)
    assert [e["nodes"] for e in cheap["budgets"]][:2] == [4, 8]
    all_, parts = cheap["counts"]["all"], cheap["counts"]["by_domain"]
    assert list(parts) == ["a", "b"]
    for d in range(4):
        assert all_["denominator"][d] == sum(p["denominator"][d] for p in parts.values()) > 0
        assert all_["numerator"][d] == [sum(p["numerator"][d][m] for p in parts.values()) for m in range(3)]
    assert parts["a"] == vars(counted(ranks, rounds_of(ranks, nodes=8) & (ranks.line_R < 4)))


def test_noise_makes_large_passes_cheap() -> None:
    costs, warning = rising(Costs(1.0, (1.0, 0.95, 1.3, 1.2, 1.4), 0.1))
    assert costs.v == (1.0, 1.0, 1.3, 1.3, 1.4) and costs.c == 0.1 and warning == ""
    costs, warning = rising(Costs(1.0, (1.0, 0.6, 0.5), 0.1))
    assert costs.v == (1.0, 1.0, 1.0) and "over 3 positions was timed at 0.50 of one over 1" in warning


def test_one_prompt_is_an_interval() -> None:
    found = fitted(drawn(1, 60), ["a"], SMALL, nodes=8)
    assert found["tree"]["tau"] is None and "by its own table (too few prompts" in sentence(found)
    assert sentence({**found, "tree": {"paths": []}}) == "No tree is predicted to pay at batch 1."


def test_head_that_knows_nothing_gets_a_tree() -> None:
    with pytest.raises(ValueError, match="never hold the target's next token"):
        fitted(ranks_by_answer([[[3, 3]] * 5, [[3, 3]] * 4], width=3), ["a", "a"], SMALL, nodes=4)
    assert WIDTH == 10


def tree_of(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_file_gives_another_tree(tmp_path: Path) -> None:
    content = {"tree": {"paths": [[0], [0, 0], [1]]}, "budgets": [{"paths": [[0]]}, {"paths": [[0], [1]]}]}
    path = tree_of(tmp_path / "t.json", content)
    assert Tree.load(path) == Tree.static([[0], [1], [0, 0]])
    assert Tree.load(str(path), nodes=2, law="point_mass") == Tree.static([[0], [1]], "point_mass")
    assert Tree.load(tree_of(tmp_path / "l.json", [[0], [2]])).has_gaps
    assert Tree.load(tree_of(tmp_path / "e.json", {"tree": {"paths": []}, "budgets": []})).depth == 0


@pytest.mark.parametrize(
    ("content", "nodes", "said"),
    [
        (None, None, "no file .*--write-tree"), ("{", None, "is no file of a tree"), ('{"a": 1}', None, "is no file of a tree"),
        ("[[1, 0]]", None, "has no parent"), ("[1]", None, "is no file of a tree"), ("3", None, "is no file of a tree"),
        ("[[0]]", 2, "no tree of 2 nodes; there are only one"), ("[" * 100_000, None, "is no file of a tree .RecursionError"),
        ("[[" + "9" * 5000 + "]]", None, "is no file of a tree"), ("[[1e3]]", None, r"t.json: StaticTree: path 0 is \(1000.0,\)"),
        ("[[0, 1024]]", None, "1,025 nodes or ranks, at most 1,024 are drafted"), ('{"tree": {"paths": "ab"}}', None, "KeyError"),
        (json.dumps([[i] for i in range(1025)]), None, "holds a tree of 1,025 nodes or ranks"),
        ('{"tree": {"paths": []}, "budgets": [{"paths": [[0]]}, {"paths": [[0], [1]]}]}', 3, "no tree of 3 nodes; there are 1, 2"),
    ],
)  # fmt: skip
def test_bad_file_is_a_tree(tmp_path: Path, content: str | None, nodes: int | None, said: str) -> None:
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=said):
        Tree.load(path, nodes)
