"""The law of sampled tokens behind drafters other than heads, penalties and the marginal policy, against the law written out by hand.

Counts of the first three tokens of many rows on a target with a known table; seeds are fixed, so each test always says the same.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spectrain.decoding.generate import RowResult, generate
from spectrain.decoding.policies import Adaptive
from spectrain.decoding.shapes import Chain, Tree
from spectrain.drafters import from_head
from spectrain.drafters.from_head import HeadDrafter
from spectrain.drafters.grow import grow
from spectrain.drafters.hybrid import Hybrid
from spectrain.drafters.lookup import NGram
from spectrain.drafters.small_model import SmallModel
from spectrain.drafters.suffix import Suffix
from spectrain.heads.base import HEADS
from spectrain.target.model import Target
from spectrain.yields import Costs

TABLE = ((1.0, 0.2, -0.5, 0.4), (0.3, 0.9, 0.0, -0.4), (-0.2, 0.5, 0.8, 0.1), (0.0, -0.3, 0.6, 1.1))
V, ROWS, PROMPT = len(TABLE), 1500, (1, 2, 1)
LIMIT = 110.0  # chi-square of 63 degrees of freedom: above it once in 5000 right runs
BUSH = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
PENALTIES = {"repetition_penalty": 1.6, "frequency_penalty": 0.6, "presence_penalty": -0.8}


@pytest.fixture(scope="module")
def target(make_table_target) -> Target:
    return make_table_target(torch.tensor(TABLE))


def law_after(ids: tuple[int, ...], temperature: float, penalties: dict[str, float]) -> list[float]:
    """The target's law after these ids: CTRL's penalty (arXiv 1909.05858) over all of them, the others over the answer."""
    answer, logits = ids[len(PROMPT) :], list(TABLE[ids[-1]])
    for token in range(V):
        if token in ids:
            factor = penalties.get("repetition_penalty", 1.0)
            logits[token] *= factor if logits[token] < 0 else 1 / factor
        count = answer.count(token)
        logits[token] -= penalties.get("frequency_penalty", 0.0) * count + penalties.get("presence_penalty", 0.0) * (count > 0)
    weights = [math.exp(x / temperature) for x in logits]
    return [w / sum(weights) for w in weights]


def exact(temperature: float, penalties: dict[str, float]) -> torch.Tensor:
    """Chance of each of the V^3 first triples."""
    chances = []
    for triple in itertools.product(range(V), repeat=3):
        steps = (law_after((*PROMPT, *triple[:t]), temperature, penalties)[triple[t]] for t in range(3))
        chances.append(math.prod(steps))
    return torch.tensor(chances, dtype=torch.float64)


def sample(target: Target, drafter, shape, *, temperature: float = 1.0, **settings) -> list[RowResult]:
    """Rows of three tokens; demands that drafts were made, and some of them taken and others not."""
    settings = {"max_new_tokens": 3, "eos": None, "seed": 7, "temperature": temperature, **settings}
    rows = generate(target, [list(PROMPT)] * ROWS, drafter=drafter, shape=shape, **settings).rows
    rounds = [r for row in rows for r in row.rounds]
    assert sum(r.drafted for r in rounds) > ROWS / 2 and 0.1 * len(rounds) < sum(r.accepted > 0 for r in rounds) < 0.95 * len(rounds)
    return rows


def chi_square(rows: list[RowResult], *, temperature: float = 1.0, penalties: dict[str, float] | None = None) -> float:
    counts = torch.bincount(torch.tensor([(a * V + b) * V + c for a, b, c in (row.tokens for row in rows)]), minlength=V**3)
    wanted = exact(temperature, penalties or {}) * ROWS
    return float(((counts - wanted) ** 2 / wanted).sum())


HEAD_SHAPES = [
    ("block", Chain(3)), ("traversal", Tree.static(BUSH)), ("multidraft", Tree.static([[0], [1], [2]])),
    ("point_mass", Tree.dynamic(2, 3, 5)),
]  # fmt: skip


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("rule, shape", HEAD_SHAPES, ids=str)
def test_head_changes_the_law(target: Target, random_head, kind: str, rule: str, shape) -> None:
    """Every family, sampled children with their true law as well as top-k."""
    assert chi_square(sample(target, HeadDrafter(random_head(kind, target)), shape, rule=rule)) < LIMIT


@pytest.mark.parametrize("kind", HEADS)
def test_law_of_another_draft_passes_for_the_heads(target: Target, random_head, monkeypatch, kind: str) -> None:
    """Negative control: a head that draws from its law and tells another one is found out."""

    def another(*arguments):
        tree = grow(*arguments)
        return replace(tree, q_BNV=torch.full_like(tree.q_BNV, 1 / V))

    monkeypatch.setattr(from_head, "grow", another)
    rows = sample(target, HeadDrafter(random_head(kind, target)), Chain(2), rule="rejection")
    assert chi_square(rows) > 1.5 * LIMIT


@pytest.fixture(scope="module")
def other(make_table_target) -> Target:
    """Another table over other words: three of the target's four in another order, and two of its own."""
    model = make_table_target(torch.tensor(TABLE).flip(0).repeat(2, 2)[:5, :5])
    words = ["system", "w8", "<pad>", "w9", "<end>"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w9"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return replace(model, tokenizer=PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w9", eos_token="<end>"), name="other")


@pytest.mark.parametrize("rule, shape", [("block", Chain(3)), ("traversal", Tree.static(BUSH))], ids=str)
def test_small_model_of_other_words_changes_the_law(target: Target, other: Target, rule: str, shape) -> None:
    assert chi_square(sample(target, SmallModel(other, "intersection"), shape, rule=rule)) < LIMIT


CORPUS = [[1, 1, 2, 2], [1, 0, 3, 3], [2, 2, 1], [1, 1, 0], [3, 0, 0, 1], [0, 1, 500, 1]]


@pytest.mark.parametrize(
    "kind, shape",
    [("suffix", Chain(3)), ("suffix", Tree.dynamic(2, 3, 5)), ("hybrid", Chain(3)), ("hybrid that asks", Tree.dynamic(2, 3, 5))],
    ids=str,
)
def test_drafts_of_counts_change_the_law(target: Target, other: Target, kind: str, shape) -> None:
    suffix, small = Suffix(CORPUS, offset=2, min_probability=0.0), SmallModel(other, "intersection")
    drafter = {
        "suffix": suffix,
        "hybrid": Hybrid(suffix, small),
        "hybrid that asks": Hybrid(NGram(shortest=1), Hybrid(small, suffix, calibrate=False), ask_below=0.8),
    }[kind]
    assert chi_square(sample(target, drafter, shape, temperature=0.8), temperature=0.8) < LIMIT


@pytest.mark.parametrize(
    "rule, shape", [("block", Chain(3)), ("traversal", Tree.static(BUSH)), ("point_mass", Tree.dynamic(2, 3, 5))], ids=str
)
def test_marginal_policy_changes_the_law(target: Target, make_head, rule: str, shape) -> None:
    """Costs at which the batch drafts, and drafts otherwise once it has seen what the first round gave."""
    flat = tuple(1.0 + 0.04 * n for n in range(8))
    policy = Adaptive("marginal", costs=Costs(seconds=1.0, v=flat, c=0.3, by_batch={ROWS: flat}), memory=0.5, prior=0.8)
    drafter = HeadDrafter(make_head(target, draft_vocab=3, layer_ids=(0, 1)))
    rows = sample(target, drafter, shape, rule=rule, policy=policy)
    assert len({(r.drafted, r.depth) for row in rows for r in row.rounds}) > 1
    assert chi_square(rows) < LIMIT


@pytest.mark.parametrize(
    "kind, rule, shape",
    [("head", "traversal", Tree.static(BUSH)), ("small model", "traversal", Tree.static(BUSH)), ("small model", "block", Chain(3))],
    ids=str,
)
def test_penalties_at_the_nodes_give_another_law(target: Target, other: Target, make_head, kind: str, rule: str, shape) -> None:
    head = HeadDrafter(make_head(target, draft_vocab=3, layer_ids=(0, 1)))
    drafter = {"head": head, "small model": SmallModel(other, "intersection")}[kind]
    assert chi_square(sample(target, drafter, shape, rule=rule, **PENALTIES), penalties=PENALTIES) < LIMIT


def test_law_without_a_penalty_passes_for_that_with_it(target: Target, make_head) -> None:
    """Negative controls: each penalty moves the law by more than the test lets through."""
    drafter = HeadDrafter(make_head(target, draft_vocab=3, layer_ids=(0, 1)))
    rows = sample(target, drafter, Tree.static(BUSH), rule="traversal", **PENALTIES)
    for name in PENALTIES:
        assert chi_square(rows, penalties={key: value for key, value in PENALTIES.items() if key != name}) > 1.5 * LIMIT, name
