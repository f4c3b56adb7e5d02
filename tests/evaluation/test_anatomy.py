"""What a pass over answers tells: against laws taken one by one from transformers' own model and from the drafters' own sessions."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spectrain.cli.probe import Probe
from spectrain.config import ShapeConfig
from spectrain.data.rows import Row
from spectrain.decoding.drafter import Round
from spectrain.decoding.generate import generate
from spectrain.decoding.sampling import Coins, Sampling, probabilities
from spectrain.decoding.shapes import Chain
from spectrain.drafters.from_head import HeadDrafter
from spectrain.drafters.lookup import NGram, lookup
from spectrain.drafters.small_model import SmallModel
from spectrain.drafters.suffix import Suffix
from spectrain.evaluation import anatomy
from spectrain.evaluation.anatomy import Anatomy, Answer, alpha_table, entropies, examine, rank_table
from spectrain.evaluation.trees import counted, rounds_of
from spectrain.target.model import Target

CONTEXTS = [[7, 12, 9], [33], [8, 77, 20, 64, 9], [91, 5, 17, 40]]


def answers_of(target: Target, *, n: int = 12, temperature: float = 0.0) -> list[Answer]:
    found = generate(target, CONTEXTS, max_new_tokens=n, temperature=temperature, ignore_eos=True).rows
    return [Answer(str(b), 0, "xy"[b % 2], c, row.tokens) for b, (c, row) in enumerate(zip(CONTEXTS, found, strict=True))]


def of(target: Target, answers: Sequence[Answer], **settings: Any) -> list[Anatomy]:
    settings = {"heads": {}, "drafters": {}, "temperature": 0.0, "depth": 3, **settings}
    return list(examine(target, answers, **settings))


def p_after(eager: Any, target: Target, ids: Sequence[int], sampling: Sampling) -> Tensor:
    logits = eager(target)(input_ids=torch.tensor([list(ids)])).logits[0, -1]
    return probabilities(logits[None, : target.num_ids], sampling)[0]


def session_after(drafter: Any, target: Target, ids: Sequence[int]) -> Any:
    """A session of the drafter that has read the target's states of ids."""
    ids_1L, place_1L = torch.tensor([list(ids)]), torch.arange(len(ids) - 1)[None]
    session = drafter.start(target, 1, 64)
    out = target.forward(ids_1L[:, :-1], positions_BN=place_1L, mask=None, cache=None, layer_ids=drafter.layer_ids)
    session.observe(out.states_BNF, ids_1L[:, 1:], torch.tensor([len(ids) - 1]))
    return session


@torch.no_grad()
def q_after(drafter: Any, target: Target, ids: Sequence[int], sampling: Sampling) -> Tensor:
    """The drafter's law of its first draft, as the session would draw it."""
    session = session_after(drafter, target, ids)
    coins = Coins(torch.zeros(1, dtype=torch.long), torch.tensor([len(ids)]))
    tree = session.propose(Round([list(ids)], Chain(1, "iid"), "iid", sampling=sampling, coins=coins, vocab_size=target.vocab_size))
    return tree.q_BNV[0, 0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_alpha_of_a_head_is_of_other_laws(target: Target, make_head: Any, eager: Any, temperature: float) -> None:
    """Every token of an answer but the last in hand: p from a model of its own, q as the drafter would draw it there."""
    head, sampling = make_head(target), Sampling(temperature=temperature)
    answers = answers_of(target, n=6, temperature=temperature)[:2]
    found = of(target, answers, heads={"h": head}, temperature=temperature)
    for a, answer in zip(found, answers, strict=True):
        p_and_q = [
            (p_after(eager, target, ids, sampling), q_after(HeadDrafter(head), target, ids, sampling))
            for ids in ([*answer.context, *answer.tokens[: j + 1]] for j in range(len(answer.tokens) - 1))
        ]
        expected = sum(float(torch.minimum(p, q).sum()) for p, q in p_and_q)
        assert a.alpha["h"][0] == (pytest.approx(expected, abs=1e-4), 5)
        assert [count for _, count in a.alpha["h"]] == [5, 4, 3]


@torch.no_grad()
def test_deeper_draft_answers_to_the_law_of_another_depth(target: Target, make_head: Any, eager: Any) -> None:
    """Depth 2: the head's second law, given the true token before it, with the target's law after that token."""
    head, sampling = make_head(target), Sampling(temperature=1.0)
    answer = answers_of(target, n=5, temperature=1.0)[2]
    (found,) = of(target, [answer], heads={"h": head}, temperature=1.0)
    expected = 0.0
    for j in range(3):
        ids = [*answer.context, *answer.tokens[: j + 1]]
        session, next_11 = session_after(HeadDrafter(head), target, ids), torch.tensor([[answer.tokens[j + 1]]])
        session._settle()  # settled tokens wait until a draft is asked for
        logits_11V, _ = head.extend(session._state, next_11, torch.zeros_like(next_11), target.embedding_VW, session._cache)
        q_V = torch.zeros(target.num_ids).index_copy(0, head.target_ids, probabilities(logits_11V[0], sampling)[0])
        expected += float(torch.minimum(q_V, p_after(eager, target, [*ids, answer.tokens[j + 1]], sampling)).sum())
    assert found.alpha["h"][1] == (pytest.approx(expected, abs=1e-4), 3)


def test_heads_read_each_others_states(target: Target, make_head: Any) -> None:
    heads = {"a": make_head(target), "b": make_head(target, seed=1, layer_ids=(0, 3)), "c": make_head(target, seed=2, layer_ids=(1, 3))}
    answers = answers_of(target)
    together = of(target, answers, heads=heads, temperature=0.7)
    for name, head in heads.items():
        alone = of(target, answers, heads={name: head}, temperature=0.7)
        assert [a.alpha[name] for a in together] == [[(pytest.approx(s, abs=1e-5), n) for s, n in a.alpha[name]] for a in alone]


def test_pieces_lose_or_repeat_rows(target: Target, make_head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"heads": {"h": make_head(target)}, "drafters": {"n": NGram(shortest=1)}, "temperature": 0.7, "width": 3}
    answers = answers_of(target, temperature=0.7)
    whole = of(target, answers, **settings)
    for at_once, piece in ((3, 200), (4, 300), (100, 100)):
        monkeypatch.setattr(anatomy, "AT_ONCE", at_once)
        monkeypatch.setattr(anatomy, "PIECE", piece)
        for a, b in zip(of(target, answers, **settings), whole, strict=True):
            assert a.entropy == pytest.approx(b.entropy, abs=1e-5) and a.ranks == b.ranks
            assert all(a.alpha[n] == [(pytest.approx(s, abs=1e-5), c) for s, c in b.alpha[n]] for n in ("h", "n"))


def test_entropy_is_that_of_another_law(target: Target, eager: Any) -> None:
    """After token j of the answer, at temperature 1, in nats, whatever temperature the answer was drawn at."""
    answers = answers_of(target, n=5)
    found = of(target, answers)
    for a, answer in zip(found, answers, strict=True):
        assert len(a.entropy) == 4 and a.alpha == {} and a.ranks == {}
        for j in range(4):
            p_V = p_after(eager, target, [*answer.context, *answer.tokens[: j + 1]], Sampling(temperature=1.0)).double()
            assert a.entropy[j] == pytest.approx(float(-(p_V * p_V.clamp(min=1e-300).log()).sum()), abs=1e-4)
    assert entropies(found)["2", 0] == (answers[2].tokens, found[2].entropy)


def test_answer_of_one_token_has_rows(target: Target, make_head: Any) -> None:
    answers = [Answer("1", 0, "x", [7, 12], [5]), Answer("2", 0, "x", [7, 12], [5, 9])]
    (found,) = of(target, answers, heads={"h": make_head(target)}, width=2)
    assert found.id == "2" and [n for _, n in found.alpha["h"]] == [1] and len(found.entropy) == 1


def test_lookup_is_paid_for_drafts_that_no_round_makes(make_table_target: Callable[[Tensor], Target]) -> None:
    """Token a follows a, b follows b with chance 0.8. By hand: at each place the chance of the copied token; deeper ones where the text
    bears the drafts before it out; 0 where nothing was seen before."""
    V = 12
    table_VV = torch.full((V, V), 0.2 / (V - 1)).fill_diagonal_(0.8).log()
    target, context, tokens = make_table_target(table_VV), [6, 7, 8, 9], [6, 7, 8, 8, 9, 9]
    ngram = NGram(longest=2, shortest=1)
    (found,) = of(target, [Answer("1", 0, "x", context, tokens)], drafters={"n": ngram}, temperature=1.0, depth=3)
    ids, sums, counts = [*context, *tokens], [0.0] * 3, [0] * 3
    for j in range(5):
        drafts = lookup(ids[: 5 + j], 3, ngram)
        for k in range(min(3, 5 - j)):
            if drafts[:k] != tokens[j + 1 : j + 1 + k] or len(drafts) < k:
                break
            counts[k] += 1
            sums[k] += (0.8 if drafts[k] == tokens[j + k] else 0.2 / (V - 1)) if k < len(drafts) else 0.0
    assert found.alpha["n"] == [(pytest.approx(s, abs=1e-4), c) for s, c in zip(sums, counts, strict=True)]
    assert counts[0] == 5 > counts[1] > 0


@pytest.mark.parametrize("drafter", [NGram(longest=3, shortest=1), Suffix()], ids=["ngram", "suffix"])
def test_alpha_of_a_copy_is_not_its_acceptance(target: Target, drafter: Any) -> None:
    """At temperature 0 a draft is accepted or not: alpha is the share of places whose copied token comes next."""
    answers = answers_of(target, n=40)
    found = of(target, answers, drafters={"d": drafter})
    for a, answer in zip(found, answers, strict=True):
        hits = 0
        for j in range(len(answer.tokens) - 1):
            ids = [*answer.context, *answer.tokens[: j + 1]]
            tree = drafter.start(target, 1, 99).propose(Round([ids], Chain(1), vocab_size=target.vocab_size))
            hits += tree is not None and int(tree.tokens_BN[0, 1]) == answer.tokens[j + 1]
        assert a.alpha["d"][0] == (hits, 39)
    assert sum(a.alpha["d"][0][0] for a in found) > 0


def test_small_model_is_not_itself(target: Target, make_target: Any) -> None:
    """A target that drafts for itself is always accepted; another model's alpha is that of its own law."""
    answers = answers_of(target, n=8, temperature=1.0)
    drafters = {"self": SmallModel(target), "other": SmallModel(make_target(seed=5))}
    found = of(target, answers, drafters=drafters, temperature=1.0, depth=2)
    assert all(a.alpha["self"] == [(pytest.approx(7.0, abs=1e-3), 7)] for a in found)
    assert all(0 < a.alpha["other"][0][0] < 6 for a in found)
    greedy = of(target, answers_of(target, n=8), drafters={"self": SmallModel(target)}, depth=2)
    assert all(a.alpha["self"] == [(7.0, 7), (6.0, 6)] for a in greedy)


def test_drafter_that_reads_states_is_measured_without_them(target: Target, make_head: Any) -> None:
    with pytest.raises(ValueError, match="h reads states: leave it out"):
        of(target, answers_of(target), drafters={"h": HeadDrafter(make_head(target))})


def test_ranks_are_not_those_that_trees_are_made_of(target: Target, make_head: Any) -> None:
    """The same counts as those that `--write-tree` takes of the same prompts."""
    head, shapes = make_head(target), ShapeConfig(chain=4, tree_top_k=10, tree_depth=4, tree_budget=8)
    prompts = [[*CONTEXTS[i % 4], 10 + i] for i in range(12)]
    rows = [Row(str(i), "d", np.array([*ids, 0]), np.array([0] * len(ids) + [1])) for i, ids in enumerate(prompts)]
    ranks = Probe(target, rows, shapes, HeadDrafter, max_new_tokens=24).ranks(head)
    counts = counted(ranks, rounds_of(ranks, nodes=8))
    said = generate(target, prompts, max_new_tokens=24).rows
    answers = [Answer(str(i), 0, "d", ids, r.tokens) for i, (ids, r) in enumerate(zip(prompts, said, strict=True))]
    found = of(target, answers, heads={"h": head}, depth=4, width=10)
    assert rank_table(found, "h", nodes=8) == {"table": counts.table, "denominator": [n for n in counts.denominator if n]}
    first = sum(sum(rank == 0 for rank in a.ranks["h"][0]) for a in found)
    assert first == sum(a.alpha["h"][0][0] for a in found), "at temperature 0 alpha is the share of first choices"


def test_table_is_a_mean_of_prompts() -> None:
    """(1 + 3) / (4 + 4) in x, over both domains (1 + 3 + 0) / 16; turns of a prompt are one sample; deeper rows have their own number."""
    def made(id: str, domain: str, sums: list[tuple[float, int]], turn: int = 0) -> Anatomy:
        return Anatomy(id, turn, domain, [1, 2], [0.0], {"h": sums}, {}, 0)

    found = [made("1", "x", [(1.0, 4), (1.0, 2)]), made("2", "x", [(3.0, 4)]), made("3", "y", [(0.0, 8), (2.0, 2)])]
    table = alpha_table(found, "h")
    assert list(table) == ["x", "y", "all"] and [table[d]["value"] for d in table] == [0.5, 0.0, 0.25]
    assert table["x"]["by_depth"] == [0.5, 0.5] and table["all"]["by_depth"] == [0.25, 0.75]
    assert (table["x"]["lo"], table["x"]["hi"]) == (0.25, 0.75) and table["y"]["lo"] is None
    assert alpha_table([*found[:1], made("1", "x", [(3.0, 4)], turn=1)], "h")["x"]["lo"] is None
    assert json.loads(json.dumps(asdict(found[0])))["alpha"] == {"h": [[1.0, 4], [1.0, 2]]}
