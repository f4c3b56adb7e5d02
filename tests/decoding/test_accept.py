"""Acceptance on trees made by hand.

The tree of most tests (numbers are nodes, letters tokens):      0 r
                                                               /  |  \\
                                                            1 a  2 b  3 a
                                                            |   |  \\
                                                          4 c  5 a  6 d
                                                               |
                                                               7 e
"""

import pytest
import torch

from spectrain.decoding.accept import LOSSY, RULES, Accepted, accept, law_of_rule, resolve_rule
from spectrain.decoding.sampling import Coins, draw_children
from spectrain.decoding.tree import DraftTree, ancestors, drop_nodes

R, A, B, C, D, E = range(6)
TOKENS, PARENTS = [R, A, B, A, C, A, D, E], [-1, 0, 0, 0, 1, 2, 2, 5]


def tree(rows: int = 1, num: int = 8) -> DraftTree:
    return DraftTree(torch.tensor([TOKENS] * rows), torch.tensor([PARENTS] * rows), torch.full((rows,), num), "point_mass")


def one_hot(choices: list[list[int]]) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(choices), 6).float()


def greedy(choices: list[list[int]], drafts: DraftTree) -> Accepted:
    return accept(one_hot(choices), drafts, "greedy", None)


@pytest.mark.parametrize(
    ("choices", "path", "next_token"),
    [
        ([C, 0, 0, 0, 0, 0, 0, 0], [], C),
        ([A, D, 0, 0, 0, 0, 0, 0], [1], D),
        ([A, C, 0, 0, B, 0, 0, 0], [1, 4], B),
        ([B, 0, D, 0, 0, 0, E, 0], [2, 6], E),
        ([B, 0, A, 0, 0, E, 0, D], [2, 5, 7], D),
        ([A, B, 0, C, 0, 0, 0, 0], [1], B),  # of two equal siblings the first is followed
    ],
)
def test_wrong_path(choices: list[int], path: list[int], next_token: int) -> None:
    got = greedy([choices], tree())
    assert got.path_BK[0].tolist() == path + [-1] * (7 - len(path))
    assert got.length_B.tolist() == [len(path)] and got.next_B.tolist() == [next_token]


def test_rows_follow_each_others_path() -> None:
    got = greedy([[A, C, 0, 0, B, 0, 0, 0], [B, 0, A, 0, 0, E, 0, D], [C] * 8], tree(rows=3))
    assert got.length_B.tolist() == [2, 3, 0] and got.next_B.tolist() == [B, D, C]
    assert got.path_BK[:, :3].tolist() == [[1, 4, -1], [2, 5, 7], [-1, -1, -1]]


@pytest.mark.parametrize(("num", "length"), [(8, 3), (7, 2), (5, 1), (3, 1), (2, 0), (1, 0)])
def test_padding_is_accepted(num: int, length: int) -> None:
    got = greedy([[B, 0, A, 0, 0, E, 0, D]], tree(num=num))
    assert got.length_B.tolist() == [length]


def test_root_alone_has_no_next_token() -> None:
    root = DraftTree.chain(torch.tensor([[R], [A]]), torch.tensor([1, 1]))
    got = accept(one_hot([[D], [E]]), root, "greedy", None)
    assert got.path_BK.shape == (2, 0) and got.length_B.tolist() == [0, 0] and got.next_B.tolist() == [D, E]


def test_chain_is_not_a_tree_without_forks() -> None:
    tokens, num = torch.tensor([[R, A, B, C], [R, A, A, A]]), torch.tensor([4, 2])
    chain = DraftTree.chain(tokens, num)
    forks = DraftTree(tokens, torch.tensor([[-1, 0, 1, 2]] * 2), num, "point_mass")
    for choices in ([[A, B, C, D], [A, A, A, A]], [[A, A, A, A], [B, B, B, B]]):
        first, second = greedy(choices, chain), greedy(choices, forks)
        assert torch.equal(first.path_BK, second.path_BK) and torch.equal(first.next_B, second.next_B)
    assert greedy([[A, B, C, D], [A, A, A, A]], chain).length_B.tolist() == [3, 1]


def test_point_mass_is_not_the_targets_own_draw() -> None:
    """Whatever the tree, the committed tokens are the draws at the nodes passed; over many rows the first follows p."""
    rows = 20_000
    p = torch.tensor([0.1, 0.4, 0.2, 0.2, 0.05, 0.05]).expand(rows, 8, 6)
    coins = Coins(seed_B=torch.arange(rows), length_B=torch.full((rows,), 3))
    got = accept(p, tree(rows), "point_mass", coins)
    first = torch.where(got.length_B > 0, torch.tensor(TOKENS)[got.path_BK[:, 0].clamp(min=0)], got.next_B)
    frequency = torch.bincount(first, minlength=6) / rows
    torch.testing.assert_close(frequency, p[0, 0], atol=0.015, rtol=0)
    assert torch.equal(got.path_BK, accept(p, tree(rows), "point_mass", coins).path_BK)


@pytest.mark.parametrize("rule", ["auto", ""])
def test_unknown_rule_falls_back(rule: str) -> None:
    with pytest.raises(ValueError, match="choose one of greedy, point_mass"):
        accept(one_hot([[A] * 8]), tree(), rule, None)


def test_misuse_goes_through() -> None:
    with pytest.raises(ValueError, match="temperature 0"):
        accept(torch.full((1, 8, 6), 1 / 6), tree(), "greedy", None)
    with pytest.raises(ValueError, match="coins"):
        accept(one_hot([[A] * 8]), tree(), "point_mass", None)
    with pytest.raises(ValueError, match="rows and nodes"):
        accept(one_hot([[A] * 7]), tree(), "greedy", None)
    with pytest.raises(ValueError, match="num_B"):
        accept(one_hot([[A] * 8]), tree(num=9), "greedy", None)


@pytest.mark.parametrize(
    "parents", [[-1, 0, 2, 0, 1, 2, 2, 5], [-1, -1, 0, 0, 1, 2, 2, 5], [0, 0, 0, 0, 1, 2, 2, 5], [-1, 1, 0, 0, 1, 2, 2, 5]]
)
def test_parents_that_make_no_tree_are_followed(parents: list[int]) -> None:
    bad = DraftTree(torch.tensor([TOKENS]), torch.tensor([parents]), torch.tensor([8]), "point_mass")
    with pytest.raises(ValueError, match="parent"):
        accept(one_hot([[A] * 8]), bad, "greedy", None)


def test_typical_is_not_the_papers() -> None:
    """p is peaked at the root (limit 0.09) and flat below (limit 0.3 / 6): d of node 2 passes, and so does a; the likelier path wins."""
    p = torch.full((2, 8, 6), 1 / 6)
    p[0, 0] = torch.tensor([0.05, 0.05, 0.8, 0.05, 0.03, 0.02])
    p[1, 0] = torch.tensor([0.001, 0.8, 0.1, 0.05, 0.029, 0.02])
    p[:, 2] = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.5, 0.1])
    p[:, 5, E] = 0.04  # under 0.3 / 6
    p[:, 1, C] = 0.9
    got = accept(p, tree(2), "typical", Coins(torch.arange(2), torch.tensor([1, 1])))
    assert got.length_B.tolist() == [2, 2]
    assert got.path_BK[:, :3].tolist() == [[2, 6, -1], [1, 4, -1]]  # 0.8 * 0.5; 0.8 * 0.9 before 0.1 * 0.5
    assert {"typical"} == LOSSY


def law_of_each_node(seed: int, rows: int, nodes: int, vocab: int) -> torch.Tensor:
    return (2 * torch.randn(rows, nodes, vocab, generator=torch.Generator().manual_seed(seed))).softmax(-1)


def drawn_tree(coins: Coins, law: str, is_chain: bool) -> DraftTree:
    """Chains of 3, or root - 2 children - 2 children each, over 6 ids; rows end at node 2, 3 or 4 (chains) or keep all."""
    rows = len(coins.seed_B)
    parents = [-1, 0, 1, 2] if is_chain else [-1, 0, 0, 1, 1, 2, 2]
    q = law_of_each_node(5, rows, len(parents), 6)
    tokens = torch.zeros(rows, len(parents), dtype=torch.long)
    for n in range(len(parents)):
        children = [c for c, parent in enumerate(parents) if parent == n]
        if children:
            tokens[:, children] = draw_children(q[:, n : n + 1], torch.full((rows, 1), n), len(children), law, coins)[0][:, 0]
    num = 2 + torch.arange(rows) % 3 if is_chain else torch.full((rows,), 7)
    return DraftTree(tokens, torch.tensor([parents] * rows), num, law, q)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_row_alone_gets_other_tokens(rule: str) -> None:
    """Each row of a ragged batch equals that row alone, cut to its own nodes: path, length and last token."""
    rows, is_chain = 40, rule in ("rejection", "block")
    coins = Coins(seed_B=torch.arange(rows), length_B=torch.arange(rows) % 7)
    drafts = drawn_tree(coins, "iid" if is_chain else "without_replacement", is_chain)
    p = law_of_each_node(6, *drafts.tokens_BN.shape, 6)
    p = (0.5 * p + 0.5 * drafts.q_BNV) if rule != "greedy" else one_hot(p.argmax(-1).tolist())
    together = accept(p, drafts, rule, coins)
    assert len(set(together.length_B.tolist())) > 1
    for b in range(rows):
        n, row = int(drafts.num_B[b]), slice(b, b + 1)
        alone = DraftTree(drafts.tokens_BN[row, :n], drafts.parents_BN[row, :n], drafts.num_B[row], drafts.law, drafts.q_BNV[row, :n])
        got = accept(p[row, :n], alone, rule, Coins(coins.seed_B[row], coins.length_B[row]))
        assert torch.equal(got.path_BK, together.path_BK[row, : n - 1])
        assert (int(got.length_B), int(got.next_B)) == (int(together.length_B[b]), int(together.next_B[b]))


@pytest.mark.parametrize("rule", sorted(set(RULES) - {"greedy"}))
def test_row_without_drafts_depends_on_its_batch(rule: str) -> None:
    """A row with nothing drafted gets the same token beside drafting rows and as a tree of a root alone."""
    coins = Coins(seed_B=torch.arange(30), length_B=torch.full((30,), 4))
    drafts = drawn_tree(coins, "iid", is_chain=True)
    bare = DraftTree(drafts.tokens_BN, drafts.parents_BN, torch.where(torch.arange(30) < 15, 1, drafts.num_B), "iid", drafts.q_BNV)
    p = law_of_each_node(8, 30, 4, 6)
    beside = accept(p, bare, rule, coins).next_B[:15]
    root = DraftTree.chain(drafts.tokens_BN[:15, :1], torch.ones(15, dtype=torch.long))
    assert torch.equal(accept(p[:15, :1], root, rule, Coins(coins.seed_B[:15], coins.length_B[:15])).next_B, beside)


@pytest.mark.parametrize("rule", sorted(set(RULES) - LOSSY - {"greedy"}))
def test_law_of_a_wide_vocabulary_is_off(rule: str) -> None:
    """With the real coins, 4000 rows of one pair of laws: the first token follows p (chi-square, 49 degrees: 95 has a chance of 1e-4)."""
    rows, vocab = 4000, 50
    p, q = law_of_each_node(1, 1, 4, vocab).expand(rows, 4, vocab), law_of_each_node(2, 1, 4, vocab).expand(rows, 4, vocab)
    coins = Coins(seed_B=torch.arange(rows), length_B=torch.full((rows,), 9))
    if rule in ("rejection", "block"):
        tokens = torch.stack([draw_children(q[:, n : n + 1], torch.full((rows, 1), n), 1, "iid", coins)[0][:, 0, 0] for n in range(3)], 1)
        drafts = DraftTree.chain(torch.cat([tokens[:, :1], tokens], 1), torch.full((rows,), 4), "iid", q)
    else:
        tokens = draw_children(q[:, :1], torch.zeros(rows, 1, dtype=torch.long), 3, "without_replacement", coins)[0][:, 0]
        parents = torch.tensor([[-1, 0, 0, 0]] * rows)
        drafts = DraftTree(torch.cat([tokens[:, :1], tokens], 1), parents, torch.full((rows,), 4), "without_replacement", q)
    got = accept(p, drafts, rule, coins)
    first = torch.where(got.length_B > 0, drafts.tokens_BN.gather(1, got.path_BK[:, :1].clamp(min=0))[:, 0], got.next_B)
    wanted = p[0, 0].double() * rows
    assert ((torch.bincount(first, minlength=vocab) - wanted) ** 2 / wanted).sum() < 95


def test_equal_laws_refuse_or_give_nan() -> None:
    """p = q up to float32 rounding, whole chains and trees of them: everything is kept, the last token has a law."""
    coins = Coins(seed_B=torch.arange(50), length_B=torch.full((50,), 3))
    for law, rules in (("iid", ("rejection", "block")), ("without_replacement", ("multidraft", "traversal"))):
        drafts = drawn_tree(coins, law, is_chain=law == "iid")
        for rule in rules:
            got = accept(drafts.q_BNV.double() * 1.0000001, drafts, rule, coins)
            assert torch.equal(got.length_B, drafts.num_B - 1 if law == "iid" else torch.full((50,), 2))
            assert ((got.next_B >= 0) & (got.next_B < 6)).all()


class Refusal(Coins):
    """Coins that refuse every draft, as rounding may with p = q; the root is none."""

    def below(self, part_BX, whole_BX, node_BX, role, number=0):  # noqa: ANN001, ANN201
        return (node_BX == 0) & (part_BX >= whole_BX)


@pytest.mark.parametrize("rule", ["rejection", "block", "multidraft", "traversal"])
@pytest.mark.parametrize("law", ["iid", "without_replacement"])
def test_nothing_left_after_a_refusal_breaks_the_rule(rule: str, law: str) -> None:
    """Refused although p = q: the residual has no mass, and the last token is drawn from p itself."""
    is_chain = rule in ("rejection", "block")
    coins = Refusal(seed_B=torch.arange(2000), length_B=torch.full((2000,), 3))
    drafts = drawn_tree(coins, "iid" if is_chain else law, is_chain)
    q = drafts.q_BNV.double()
    q[:, 0] = torch.tensor([0.5, 0.0, 0.2, 0.2, 0.05, 0.05])
    tokens = draw_children(q[:, :1], torch.zeros(2000, 1, dtype=torch.long), 2, "without_replacement", coins)[0][:, 0]
    tokens = torch.cat([drafts.tokens_BN[:, :1], tokens[:, : 1 if is_chain else 2], drafts.tokens_BN[:, 2 if is_chain else 3 :]], dim=1)
    got = accept(q, DraftTree(tokens, drafts.parents_BN, drafts.num_B, drafts.law, q), rule, coins)
    assert (got.length_B == 0).all()
    if drafts.law == "iid":
        torch.testing.assert_close(torch.bincount(got.next_B, minlength=6) / 2000, q[0, 0].float(), atol=0.04, rtol=0)
    assert not (got.next_B == 1).any()


def test_rule_that_does_not_fit_is_taken() -> None:
    def resolve(rule: str, temperature: float = 0.7, law: str = "point_mass", is_chain: bool = True) -> str:
        return resolve_rule(rule, temperature=temperature, law=law, is_chain=is_chain)

    assert resolve("auto", 0.0) == resolve("auto", 0.0, "iid") == "greedy" and resolve("auto") == "point_mass"
    assert resolve("auto", law="iid") == "block" and resolve("auto", law="iid", is_chain=False) == "traversal"
    assert resolve("auto", law="without_replacement", is_chain=False) == "traversal"
    for rule in ("point_mass", "typical"):
        for law in ("point_mass", "iid", "without_replacement"):
            assert resolve(rule, 0.0, law) == rule
    for rule, law, is_chain, message in [
        ("block", "point_mass", True, "use rule='point_mass' or 'auto'"),
        ("traversal", "point_mass", False, "has none"),
        ("rejection", "without_replacement", False, "a tree with forks of law 'without_replacement'; use rule='traversal'"),
        ("block", "iid", False, "found a tree with forks of law 'iid'"),
        ("best", "iid", True, "choose one of auto, greedy"),
        ("block", "wor", True, "law 'wor' is unknown"),
    ]:
        with pytest.raises(ValueError, match=message):
            resolve(rule, law=law, is_chain=is_chain)
    with pytest.raises(ValueError, match="needs temperature 0"):
        resolve("greedy")


def test_draft_that_does_not_fit_its_rule_is_verified() -> None:
    coins = Coins(seed_B=torch.arange(3), length_B=torch.full((3,), 3))
    forks, chain = drawn_tree(coins, "iid", is_chain=False), drawn_tree(coins, "iid", is_chain=True)
    with pytest.raises(ValueError, match="a tree with forks of law 'iid'"):
        accept(forks.q_BNV, forks, "block", coins)
    with pytest.raises(ValueError, match="compares p with the q"):
        accept(one_hot([[A] * 8] * 3), tree(3), "traversal", coins)
    with pytest.raises(ValueError, match="needs coins"):
        accept(chain.q_BNV, chain, "block", None)
    q = chain.q_BNV.clone()
    q[2, 1, chain.tokens_BN[2, 2]] = 0
    token = int(chain.tokens_BN[2, 2])
    with pytest.raises(ValueError, match=f"row 2 drafts token {token} at node 2, to which q at its parent gives no chance"):
        accept(q, DraftTree(chain.tokens_BN, chain.parents_BN, chain.num_B, "iid", q), "block", coins)


def misfit(case: str) -> tuple[torch.Tensor, DraftTree, Coins]:
    """Two rows of 6 ids over the root, its children 1 and 2, their children 3 to 6; in the second row 5 and 6 are padding. One misfit."""
    coins = Coins(seed_B=torch.arange(2), length_B=torch.full((2,), 3))
    fit = drawn_tree(coins, "without_replacement", is_chain=False)
    tokens, parents, num, q = fit.tokens_BN.clone(), fit.parents_BN.clone(), torch.tensor([7, 5]), fit.q_BNV.clone()
    p = law_of_each_node(6, 2, 7, 6)
    tokens[1, 5:], p[1, 5:], q[1, 5:] = 77, torch.nan, torch.nan  # padding may hold anything
    if case in ("token above", "token below"):
        tokens[1, 4] = 6 if case == "token above" else -1
    elif case == "twins":
        tokens[1, 2] = tokens[1, 1]
    elif case in ("nan", "infinity", "no mass"):
        p[0, 4, (slice(None) if case == "no mass" else 3)] = {"nan": torch.nan, "infinity": torch.inf, "no mass": 0.0}[case]
    elif case in ("q of fewer ids", "q of fewer nodes"):
        q = q[..., :5] if case == "q of fewer ids" else q[:, :6]
    elif case == "p of one row":
        p = p[0]
    elif case == "num of one row":
        num = num[:1]
    elif case in ("coins of one row", "coins of three rows"):
        rows = 1 if case == "coins of one row" else 3
        coins = Coins(torch.arange(rows), torch.arange(rows))
    tokens, parents = (tokens.int() if case == "int tokens" else tokens), (parents.float() if case == "float parents" else parents)
    return p, DraftTree(tokens, parents, num.int() if case == "int num" else num, "without_replacement", q), coins


@pytest.mark.parametrize("rule", ["greedy", "point_mass", "typical", "multidraft", "traversal"])
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("", ""), ("token above", r"row 1 holds token 6 at node 4; p is a law over ids 0\.\.5"),
        ("token below", "row 1 holds token -1 at node 4"),
        ("twins", r"twice below one parent, at nodes 1 and 2"), ("nan", "p of row 0, node 4 has the sum nan"),
        ("infinity", "p of row 0, node 4 has the sum inf"), ("no mass", "p of row 0, node 4 has the sum 0"),
        ("q of fewer ids", r"q must have the shape of p, \(2, 7, 6\).*found \(2, 7, 5\)"), ("q of fewer nodes", r"found \(2, 6, 6\)"),
        ("p of one row", r"p must be \[rows, nodes, vocabulary\]"), ("num of one row", r"each of 2 rows, found shape \(1,\)"),
        ("coins of one row", r"each of 2 rows, found shapes seed_B \(1,\)"),
        ("coins of three rows", r"each of 2 rows, found shapes seed_B \(3,\)"),
        ("int tokens", "tokens_BN must hold int64 numbers, found int32"),
        ("float parents", "parents_BN must hold int64 numbers, found float32"),
        ("int num", "num_B must hold int64"),
    ],
)  # fmt: skip
def test_misfit_gets_through(rule: str, case: str, message: str) -> None:
    """Each is refused by its name, by every rule that it could mislead; what stands at padding troubles nobody."""
    p, drafts, coins = misfit(case)
    if rule == "greedy":
        best = p.nan_to_num(0).argmax(-1, keepdim=True)
        p = torch.where(p.isfinite(), torch.zeros_like(p).scatter(-1, best, 1.0), p)
        message = {"nan": "temperature 0.*chance of nan at row 0, node 4", "infinity": "temperature 0.*chance of inf"}.get(case, message)
        message = "" if case.startswith("coins") or case == "no mass" else message  # it takes no coins, and the zeros became a one-hot law
    if case == "twins" and rule not in ("multidraft", "traversal"):
        message = ""  # they go to the first of the two
    if not message:
        assert accept(p, drafts, rule, coins).next_B.shape == (2,)
        return
    with pytest.raises(ValueError, match=message):
        accept(p, drafts, rule, coins)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_promise_of_a_chain_is_believed(rule: str) -> None:
    coins = Coins(seed_B=torch.arange(3), length_B=torch.full((3,), 3))
    forks = drawn_tree(coins, "iid", is_chain=False)
    lie = DraftTree(forks.tokens_BN, forks.parents_BN, forks.num_B, "iid", forks.q_BNV, is_chain=True)
    with pytest.raises(ValueError, match="a tree with forks"):
        accept(forks.q_BNV, lie, rule, coins)


def test_rule_gets_a_law_that_it_refuses() -> None:
    wanted = {rule: (law_of_rule(rule, is_chain=True), law_of_rule(rule, is_chain=False)) for rule in (*RULES, "auto", "lottery")}
    assert wanted == {
        "rejection": ("iid", "iid"), "block": ("iid", "iid"), "multidraft": ("iid", "without_replacement"),
        "traversal": ("iid", "without_replacement"), "point_mass": ("point_mass",) * 2, "typical": ("point_mass",) * 2,
        "greedy": (None, None), "auto": (None, None), "lottery": (None, None),
    }  # fmt: skip
    for rule, laws in wanted.items():
        for law, is_chain in zip(laws, (True, False), strict=True):
            if law and (is_chain or rule not in ("rejection", "block")):
                assert resolve_rule(rule, temperature=1.0, law=law, is_chain=is_chain) == rule


def test_dropped_nodes_leave_something_behind() -> None:
    """Against a slow twin: random trees, random nodes dropped with everything below them."""
    g = torch.Generator().manual_seed(0)
    parents = torch.stack([torch.tensor([-1, *(int(torch.randint(0, n, (1,), generator=g)) for n in range(1, 9))]) for _ in range(60)])
    tokens = torch.randint(0, 50, (60, 9), generator=g)
    keep = torch.rand(60, 9, generator=g) < torch.linspace(0, 1, 60)[:, None]
    new_tokens, new_parents, num, kept = drop_nodes(tokens, parents, keep)
    seen = ancestors(parents)
    for b in range(60):
        stays = [n for n in range(9) if all(keep[b, m] for m in range(1, 9) if seen[b, n, m])]
        above = [-1] + [stays.index(int(parents[b, n])) for n in stays[1:]]
        assert kept[b, : num[b]].tolist() == stays and sorted(kept[b].tolist()) == list(range(9))
        assert new_parents[b].tolist() == above + [0] * (9 - len(above))
        assert torch.equal(new_tokens[b], tokens[b, kept[b]])
    assert num.min() == 1 and num.max() == 9
