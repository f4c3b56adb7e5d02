"""Policies against simulated acceptance: each does what it says, within the shape's limits, and forgets nothing it was told to keep."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from operator import mul

import pytest

from spectrain.decoding.generate import generate
from spectrain.decoding.policies import KINDS, Adaptive, Plan, PolicySession
from spectrain.decoding.shapes import Chain, DynamicTree, Shape, Tree, trimmed
from spectrain.drafters.scripted import Scripted
from spectrain.target.model import Target
from spectrain.yields import Costs

COSTS = Costs(seconds=1.0, v=(1.0, 1.05), c=0.1)
TABLE = Adaptive("table", drafts={1: 5, 8: 3, 32: 0})
POLICIES = {kind: TABLE if kind == "table" else Adaptive(kind, COSTS) for kind in KINDS}
Conditional = Callable[[int, int], Sequence[float]]  # row, round -> chance of each draft given those before it


def simulate(
    session: PolicySession, conditional: Conditional, rounds: int, *, rows: Sequence[int] = (0,), live: Sequence[bool] | None = None
) -> list[Plan]:
    """Chains drafted as planned and accepted by chance, rows with coins of their own; returns the plans."""
    coins = {row: random.Random(row) for row in rows}
    plans = []
    for t in range(rounds):
        plans.append(session.plan(live))
        accepted = []
        for row, depth in zip(rows, plans[-1].depth_B, strict=True):
            chances = conditional(row, t)
            drawn = [coins[row].random() < chances[i] for i in range(10)]  # as many coins at any depth
            accepted.append([*drawn[:depth], False].index(False))
        session.observe(plans[-1].depth_B, accepted, plans[-1].depth_B)
    return plans


def always(*chances: float) -> Conditional:
    return lambda row, t: [*chances, *[chances[-1]] * 10]


def rates(chances: Sequence[float], costs: Costs, batch: int, depth: int = 10) -> list[float]:
    """Expected tokens per plain pass at each depth, by the sum over all outcomes."""
    found = []
    for d in range(depth + 1):
        reach = [1.0, *accumulate(chances[:d], mul)]
        tokens = sum((k + 1) * (reach[k] - (reach[k + 1] if k < d else 0.0)) for k in range(d + 1))
        found.append(tokens * costs.verify(1, batch) / (costs.c * d + costs.verify(1 + d, batch)))
    return found


@pytest.mark.parametrize(
    ("chances", "slope", "c"),
    [
        ((0.1,), 0.05, 0.1), ((0.3,), 0.05, 0.1), ((0.6,), 0.05, 0.1), ((0.8,), 0.05, 0.1), ((0.9,), 0.02, 0.05), ((0.9,), 0.4, 0.2),
        ((0.9, 0.8, 0.2, 0.1), 0.05, 0.1), ((0.5, 0.9), 0.05, 0.05),
    ],
)  # fmt: skip
def test_marginal_settles_on_a_worse_depth(chances: tuple[float, ...], slope: float, c: float) -> None:
    """In a batch of 16 and alone, after 100 rounds: the commonest depth earns what the best does, the mean of rounds nearly so."""
    for rows, enough in ((16, 0.99), (1, 0.96)):
        costs = Costs(1.0, (1.0, 1.0 + slope), c, by_batch={rows: (1.0, 1.0 + slope)})
        session = Adaptive("marginal", costs).start(Chain(10), rows)
        depths = [plan.depth_B[0] for plan in simulate(session, always(*chances), 500, rows=range(rows))[100:]]
        rate = rates(always(*chances)(0, 0), costs, rows)
        assert rate[Counter(depths).most_common(1)[0][0]] >= 0.985 * max(rate)
        assert sum(rate[d] for d in depths) / len(depths) >= enough * max(rate)
    assert max(rate) > 1 or Counter(depths)[0] > 0.9 * len(depths)


def test_rows_of_one_batch_are_planned_apart() -> None:
    """Half of the rows accept 0.95, half nothing: the one depth for both is that of their mean survival."""
    costs = Costs(1.0, (1.0, 1.06), 0.06, by_batch={8: (1.0, 1.06)})
    mixed: Conditional = lambda row, t: [0.95 if row % 2 else 0.0] * 10  # noqa: E731
    plans = simulate(Adaptive("marginal", costs).start(Chain(10), 8), mixed, 300, rows=range(8))[100:]
    mean = [(good + bad) / 2 for good, bad in zip(rates([0.95] * 10, costs, 8), rates([0.0] * 10, costs, 8), strict=True)]
    assert all(len(set(plan.depth_B)) == 1 for plan in plans) and max(mean) > 1.1
    assert mean[Counter(plan.depth_B[0] for plan in plans).most_common(1)[0][0]] >= 0.99 * max(mean)


def test_batch_occupancy_is_overlooked() -> None:
    """A pass over 2 positions of 32 rows costs twice one; of 4 rows little more. Rows that finish bring speculation back at once."""
    costs = Costs(1.0, (1.0, 1.05), 0.1, by_batch={4: (1.1, 1.15), 32: (2.0, 4.0)})
    session = Adaptive("marginal", costs).start(Chain(6), 32)
    plans = simulate(session, always(0.8), 200, rows=range(32))
    assert Counter(max(plan.depth_B) for plan in plans[20:])[0] > 160
    few = [b < 4 for b in range(32)]
    plan = session.plan(few)
    assert plan.depth_B[:4] == [plan.depth_B[0]] * 4 and plan.depth_B[0] >= 3 and not any(plan.depth_B[4:])
    session.select([0, 1, 2, 3])
    assert session.plan().depth_B == plan.depth_B[:4]


def test_table_is_read_for_other_rows() -> None:
    """Rows at work count, whatever is accepted: between two batches of the table the larger one's drafts, beyond it the last one's."""
    session = TABLE.start(Chain(4), 40)
    assert {rows: max(session.plan([b < rows for b in range(40)]).depth_B) for rows in (0, 1, 2, 7, 8, 9, 32, 33, 40)} == {
        0: 0, 1: 4, 2: 3, 7: 3, 8: 3, 9: 0, 32: 0, 33: 0, 40: 0,
    }  # fmt: skip
    assert session.plan([b == 7 for b in range(40)]).depth_B == [4 * (b == 7) for b in range(40)]
    session.select(range(8))
    session.observe([3] * 8, [0] * 8, [3] * 8)
    assert session.plan() == Plan([3] * 8)
    bushy = Tree.static([[0], [1], [0, 0], [0, 1], [0, 0, 0]])
    for shape, depth, nodes in ((bushy, 2, 3), (Tree.dynamic(4, 5, 15), 3, 3)):
        plan = TABLE.start(shape, 8).plan()
        cut = trimmed(shape, max(plan.depth_B), plan.budget)
        assert (plan, cut and cut.budget) == (Plan([depth] * 8, nodes), nodes)


def test_drafts_do_not_follow_the_batch_as_rows_leave(target: Target, fresh_greedy: Callable[..., list[int]]) -> None:
    """Row 0's drafts are all right and it leaves first; then the other row may draft more, and every answer stays plain decoding's."""
    prompts = [[6, 7, 8], [20, 21, 22, 23]]
    answers = [fresh_greedy(target, ids, 24) for ids in prompts]

    def script(ids: list[int]) -> list[int]:
        if ids[:3] == prompts[0]:
            return answers[0][len(ids) - 3 :]
        return [(answers[1] + [6])[len(ids) - 4] ^ 1] * 9

    policy = Adaptive("table", drafts={1: 5, 2: 2, 3: 0})
    result = generate(target, prompts, drafter=Scripted(script), shape=Chain(8), policy=policy, max_new_tokens=24, ignore_eos=True)
    assert [row.tokens for row in result.rows] == answers
    drafted = [[r.drafted for r in row.rounds] for row in result.rows]
    both = len(drafted[0])
    assert both == 8 and drafted[1][:both] == [2] * both and set(drafted[1][both:-5]) == {5}


def runs(depths: Sequence[int]) -> list[int]:
    """Lengths of the stretches of rounds without a draft."""
    return [len(list(stretch)) for off, stretch in groupby(depths, key=lambda depth: depth == 0) if off]


@pytest.mark.parametrize("kind", ["ema", "marginal"])
def test_speculation_stays_off_or_on(kind: str) -> None:
    """Acceptance 0.8, then none for 300 rounds, then 0.8: off with ever rarer probes of one round, and on again."""
    session = Adaptive(kind, COSTS, probe_after=2, probe_most=16).start(Chain(8), 1)
    depths = [plan.depth_B[0] for plan in simulate(session, lambda row, t: [0.8 if not 100 <= t < 400 else 0.0] * 10, 600)]
    assert min(depths[:100]) >= 1 and 3 <= depths[99]
    first = depths.index(0)
    assert 105 < first < 200
    gaps = runs(depths[first:400])
    assert gaps[:4] == [2, 4, 8, 16] and set(gaps[4:-1]) == {16}
    assert max(runs(depths[400:]), default=0) <= 16 and min(depths[500:]) >= 1 and max(depths[500:]) >= 3


def test_probe_that_paid_is_not_followed_up() -> None:
    """After a long time off one accepted probe is not enough to be on again, but the next round probes too; a miss waits from the start."""
    session = Adaptive("marginal", Costs(1.0, (1.0, 1.3), 0.2), probe_after=4).start(Chain(4), 1)
    simulate(session, always(0.0), 300)
    while not session.plan().depth_B[0]:
        session.observe([0], [0], [0])
    session.observe([1], [1], [1])
    assert session.plan().depth_B == [1]
    session.observe([1], [0], [1])
    assert [plan.depth_B[0] for plan in simulate(session, always(0.0), 5)] == [0, 0, 0, 0, 1]


def test_drafter_without_a_draft_counts_as_a_miss() -> None:
    """Rounds in which the drafter finds nothing say nothing of its drafts, and a probe waits for a round with a draft."""
    for kind in ("heuristic", "ema", "marginal"):
        session = Adaptive(kind, COSTS).start(Chain(4), 1)
        (before,) = session.plan().depth_B
        for _ in range(50):
            session.plan()
            session.observe([0], [0], [0])
        (after,) = session.plan().depth_B
        assert after >= before > 0 and (kind == "marginal" or after == before)  # rare drafts may be longer: others pay nothing for them
    session = Adaptive("ema", off_below=3.0, probe_after=1).start(Chain(4), 1)
    session.observe([4], [0], [4])
    session.observe([4], [0], [4])
    assert session.plan().depth_B == [0]
    session.observe([0], [0], [0])
    for _ in range(3):
        assert session.plan().depth_B == [1]
        session.observe([0], [0], [0])
    session.observe([1], [0], [1])
    assert session.plan().depth_B == [0]


def test_rare_drafts_are_given_up_or_kept_in_a_batch_that_waits_for_them() -> None:
    """Drafts in a fifth of the rounds, of which three quarters of each depth are right: worth a pass of 1.6 for one row; of 16 rows nearly
    always one drafts, and all pay for it. Begun from what was measured, or learnt."""
    costs = Costs(1.0, (1.0, 1.2, 1.3, 1.4, 1.6), 0.0, by_batch={16: (2.0, 2.8, 3.6, 4.4, 5.2)})
    for known in ({"prior": (0.75,) * 4, "prior_share": 0.2, "prior_rounds": 24.0}, {"prior": 0.6}):
        for rows, on in ((1, True), (16, False)):
            draws, session, depths = random.Random(0), Adaptive("marginal", costs, **known).start(Chain(4), rows), []
            for _ in range(300):
                depth_B = session.plan().depth_B
                drafted_B = [depth if draws.random() < 0.2 else 0 for depth in depth_B]
                hits_B = [next((k for k in range(n) if draws.random() > 0.75), n) for n in drafted_B]
                session.observe(drafted_B, hits_B, drafted_B)
                depths.append(max(depth_B))
            assert (min(depths[50:]) > 0) if on else (sum(map(bool, depths[50:])) < 50), (known, rows, depths)


def test_heuristic_steps_otherwise() -> None:
    session = Adaptive("heuristic").start(Chain(5), 2)
    outcomes = [([4, 0], [5, 1]), ([3, 5], [4, 5]), ([3, 0], [3, 1]), ([5, 0], [5, 0]), ([0, 0], [5, 4]), ([0, 3], [4, 3])]
    depths = []
    for accepted, depth in outcomes:
        session.observe(depth, accepted, depth)
        depths.append(session.plan().depth_B)
    assert depths == [[4, 4], [3, 5], [5, 4], [5, 4], [4, 3], [3, 5]]
    for _ in range(9):
        session.observe([3, 3], [0, 0], [3, 3])
    assert session.plan() == Plan([1, 1])


def test_average_weighs_rounds_otherwise() -> None:
    """Depth is one more than the average of accepted drafts, in which the newest round weighs 0.2."""
    session = Adaptive("ema").start(Chain(5), 1)
    average, seen = 5.0, []
    for accepted in [5, 2, 0, 0, 0, 1, 1, 0, 0, 0, 3, 3, 3]:
        depth = session.plan().depth_B[0]
        assert depth == min(5, 1 + int(average + 0.5))
        session.observe([depth], [min(accepted, depth)], [depth])
        average = 0.8 * average + 0.2 * min(accepted, depth)
        seen.append(depth)
    assert len(set(seen)) >= 4


def test_doubt_ends_a_chain_at_another_token() -> None:
    session = Adaptive("confidence").start(Chain(5), 2)
    assert session.plan() == Plan([5, 5], stop_below=0.4)
    session.observe([5, 2], [0, 2], [5, 2])
    assert session.plan([True, False]) == Plan([5, 0], stop_below=0.4)
    assert Adaptive("confidence", threshold=0.7).start(Tree.static([[0], [0, 0]]), 1).plan() == Plan([2], stop_below=0.7)
    with pytest.raises(ValueError, match="use a Chain, or policy 'marginal'"):
        Adaptive("confidence").start(Tree.dynamic(), 1)


@pytest.mark.parametrize("kind", ["heuristic", "confidence", "ema"])
def test_row_is_planned_otherwise_alone(kind: str) -> None:
    """Plans of these kinds look at their row only; other rows, their number and their leaving change nothing."""
    mixed: Conditional = lambda row, t: [0.1 + 0.3 * row] * 10  # noqa: E731
    alone = [[plan.depth_B[0] for plan in simulate(Adaptive(kind).start(Chain(7), 1), mixed, 80, rows=[row])] for row in range(3)]
    session = Adaptive(kind).start(Chain(7), 3)
    assert [list(depths) for depths in zip(*(p.depth_B for p in simulate(session, mixed, 80, rows=range(3))), strict=True)] == alone
    left = session.plan().depth_B
    session.select([2, 0])
    assert session.plan().depth_B == [left[2], left[0]] and (kind == "confidence" or alone[0] != alone[2])


@pytest.mark.parametrize("kind", KINDS)
def test_sessions_share_state(kind: str) -> None:
    """Two interleaved batches of one policy plan as each would alone; asking twice changes nothing."""
    policy = POLICIES[kind]
    kept = hash(policy)
    pair = [policy.start(Chain(6), 1), policy.start(Chain(6), 1)]
    good, bad = ([0.9] * 10, [0.05] * 10)
    together: list[list[Plan]] = [[], []]
    for t in range(40):
        for i, chances in enumerate((good, bad)):
            pair[i].plan()
            together[i] += simulate(pair[i], lambda row, _, c=chances: c, 1, rows=[t])
    for i, chances in enumerate((good, bad)):
        session = policy.start(Chain(6), 1)
        assert [simulate(session, lambda row, _, c=chances: c, 1, rows=[t])[0] for t in range(40)] == together[i]
    assert hash(policy) == kept and policy == POLICIES[kind]
    assert kind in ("confidence", "table") or together[0] != together[1]


SHAPES = [Chain(1), Chain(6), Tree.dynamic(4, 5, 21), Tree.static([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]), Tree.static([])]


@pytest.mark.parametrize(("kind", "shape"), [(kind, s) for kind in KINDS for s in SHAPES if kind != "confidence" or s.is_chain], ids=str)
def test_plan_exceeds_the_shape(kind: str, shape: Shape) -> None:
    """Whatever happened, a plan lies within the shape and a tree's rows share one depth."""
    generator = random.Random(0)
    session, rows = (TABLE if kind == "table" else Adaptive(kind, COSTS, probe_after=1)).start(shape, 3), 3
    for t in range(200):
        live = [generator.random() < 0.8 for _ in range(rows)]
        plan = session.plan(live)
        assert len(plan.depth_B) == rows and all(0 <= depth <= shape.depth * on for depth, on in zip(plan.depth_B, live, strict=True))
        assert shape.is_chain or len({depth for depth, on in zip(plan.depth_B, live, strict=True) if on}) <= 1
        cut = trimmed(shape, max(plan.depth_B), plan.budget)
        assert (cut is None) == (max(plan.depth_B) == 0) and (cut is None or cut.depth == max(plan.depth_B))
        depth_B = [generator.randint(0, depth) for depth in plan.depth_B]
        session.observe([2 * depth for depth in depth_B], [generator.randint(0, depth) for depth in depth_B], depth_B)
        if t == 100:
            session.select([0, 2])
            rows = 2


def best_tree(misses: Sequence[float], costs: Costs, shape: DynamicTree, spread: float) -> tuple[float, int, int]:
    """Gain, depth and budget of the best cut, budgets halved, for misses that grow as budget^-spread.

    A level has at most top_k^2 candidates, the first one top_k: a shallow tree may hold fewer nodes than its budget.
    """
    found = []
    for halvings in range(8):
        budget = shape.budget >> halvings
        for depth in range(1, min(shape.depth, budget) + 1):
            nodes = min(budget, shape.top_k + (depth - 1) * shape.top_k**2)
            reach = list(accumulate([1 - min(1.0, miss * (shape.budget / budget) ** spread) for miss in misses[:depth]], mul))
            found.append(((1 + sum(reach)) / (costs.c * depth + costs.verify(1 + nodes)), depth, budget))
    return max(found)


def simulate_tree(session: PolicySession, misses: Sequence[float], rounds: int) -> list[tuple[int, int | None]]:
    """Depth and budget of each plan for 12 rows and a full budget of 48 nodes."""
    generator, plans = random.Random(0), []
    for _ in range(rounds):
        plan = session.plan()
        plans.append((plan.depth_B[0], plan.budget))
        scale = (48 / (plan.budget or 48)) ** 0.5
        hits = [[generator.random() >= min(1.0, miss * scale) for miss in misses[: plan.depth_B[0]]] for _ in range(12)]
        session.observe([plan.budget or 0] * 12, [[*hit, False].index(False) for hit in hits], plan.depth_B)
    return plans


SURE, UNSURE = [0.1, 0.15, 0.2, 0.2, 0.3, 0.3], [0.5, 0.9, 0.9, 0.9, 0.9, 0.9]


@pytest.mark.parametrize(
    ("misses", "slope", "c"),
    [
        (SURE, 0.001, 0.02), (SURE, 0.02, 0.05), (SURE, 0.05, 0.2), (SURE, 0.3, 0.3), (UNSURE, 0.001, 0.02), (UNSURE, 0.04, 0.05),
        (UNSURE, 0.2, 0.05),
    ],
)  # fmt: skip
def test_tree_is_cut_to_a_worse_size(misses: list[float], slope: float, c: float) -> None:
    """Misses by level follow Sequoia's power law in the budget; brute force over depth and budget says what pays."""
    shape, costs = Tree.dynamic(8, 6, 48), Costs(1.0, (1.0, 1.0 + slope), c, by_batch={12: (1.0, 1.0 + slope)})
    gain, depth, budget = best_tree(misses, costs, shape, 0.5)
    plans = simulate_tree(Adaptive("marginal", costs).start(shape, 12), misses, 250)
    common, times = Counter(plans[100:]).most_common(1)[0]
    if gain <= 1:
        assert common[0] == 0 and times > 120
    else:
        assert common[1] == budget and abs(common[0] - depth) <= 1


def test_probe_of_a_small_tree_promises_a_large_one() -> None:
    """One node of 48 misses surely where all miss half of the time: its misses say nothing about the full tree's."""
    costs = Costs(1.0, (1.0, 1.12), 0.05, by_batch={12: (1.0, 1.12)})
    session = Adaptive("marginal", costs, probe_after=1, probe_most=1).start(Tree.dynamic(8, 6, 48), 12)
    assert set(simulate_tree(session, UNSURE, 300)) == {(0, None), (1, 1)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "bandit"}, "choose one of heuristic, confidence, ema, marginal, table"),
        ({"kind": "table"}, "drafts by batch and policy 'table' go together"),
        ({"drafts": {1: 5}}, "found policy 'ema', drafts {1: 5}"),
        ({"kind": "table", "drafts": {0: 5}}, "by batches of 1 row or more"),
        ({"kind": "table", "drafts": {1: -1}}, "drafted tokens, 0 or more"),
        ({"kind": "marginal"}, "st.measure_costs"),
        ({"threshold": 1.0}, "threshold must lie between"),
        ({"weight": 0.0}, "weight must lie between"),
        ({"memory": float("nan")}, "memory must lie between"),
        ({"prior": -0.1}, "prior must lie between"),
        ({"probe_after": 65}, "probe_after <= probe_most"),
        ({"spread": -1.0}, "spread >= 0"),
    ],
)
def test_settings_without_meaning_are_taken(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Adaptive(**{"kind": "ema", **settings})


def test_outcome_of_other_rows_is_taken() -> None:
    for kind in ("ema", "marginal"):
        session = Adaptive(kind, COSTS).start(Chain(3), 2)
        for outcome in (([3], [1], [3]), ([3, 3], [1, 4], [3, 3]), ([3, 3], [1, -1], [3, 3]), ([1, 1], [1, 1], [1, 2])):
            with pytest.raises(ValueError, match="needed 0 <= accepted|call select"):
                session.observe(*outcome)
        with pytest.raises(ValueError, match="call select"):
            session.plan([True])
        session.select([1])
        assert len(session.plan([True]).depth_B) == 1
    with pytest.raises(ValueError, match="at least one row"):
        Adaptive("ema").start(Chain(3), 0)
