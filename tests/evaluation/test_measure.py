"""Running the arms of a comparison: records that survive a stop, prompts that stay the same, answers compared exactly."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.config import Suite
from spectrain.data.formats import Prompt
from spectrain.data.rows import Row
from spectrain.decoding.generate import StepRecord, generate
from spectrain.decoding.shapes import Chain, Tree
from spectrain.evaluation import measure
from spectrain.evaluation.measure import (
    Arm,
    Draws,
    Exactness,
    Record,
    Records,
    compare,
    measure_speed,
    measure_tau,
    measured_acceptance,
)
from spectrain.evaluation.suites import speed_subset, suite_prompts
from spectrain.target.model import Target

PROMPTS = [Prompt(str(i), "even" if i % 2 == 0 else "odd", (f"w{20 + i} " * (i + 1),), "") for i in range(5)]
PLAIN = Arm("plain")


@dataclass
class Counter:
    """Counts the prompts of each call of generate."""

    prompts: list[int] = field(default_factory=list)

    def __call__(self, target: Target, prompts: Any, **settings: Any) -> Any:
        self.prompts.append(len(prompts))
        return generate(target, prompts, **settings)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter()
    monkeypatch.setattr(measure, "generate", counter)
    return counter


def tau(target: Target, prompts: list[Prompt], records: Records, arm: Arm = PLAIN) -> None:
    measure_tau(target, arm, prompts, records, max_new_tokens=4, batch_size=2)


def answers(records: Records, arm: str = "plain") -> list[tuple[str, list[int], int]]:
    return [(r.id, r.tokens, len(r.rounds)) for r in records.of(arm, "tau", PROMPTS)]


def test_resume_measures_again_or_too_little(target: Target, calls: Counter, tmp_path: Path) -> None:
    whole = Records(tmp_path / "whole.jsonl", "k")
    tau(target, PROMPTS, whole)
    assert calls.prompts == [2, 2, 1]
    tau(target, PROMPTS[:2], Records(tmp_path / "r.jsonl", "k"))
    calls.prompts.clear()
    records = Records(tmp_path / "r.jsonl", "k")
    tau(target, PROMPTS[::-1], records)
    assert calls.prompts == [2, 1] and answers(records) == answers(whole)
    tau(target, PROMPTS, Records(tmp_path / "r.jsonl", "k"))
    assert calls.prompts == [2, 1] and len((tmp_path / "r.jsonl").read_bytes().splitlines()) == 5


def test_one_arm_answers_for_another(target: Target, calls: Counter, scripted: Any, tmp_path: Path) -> None:
    records = Records(tmp_path / "r.jsonl", "k")
    tau(target, PROMPTS[:2], records)
    arm = Arm("guess", scripted(lambda ids: [(7, 0)]), Chain(1))
    tau(target, PROMPTS[:2], records, arm)
    assert calls.prompts == [2, 2]
    assert {r.drafted for r in records.of("guess", "tau", PROMPTS[:1])[0].rounds} == {1}
    with pytest.raises(KeyError):
        records.of("guess", "speed", PROMPTS[:1])


def test_torn_last_line_spoils_the_file(target: Target, calls: Counter, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    tau(target, PROMPTS, Records(path, "k"))
    before = path.read_bytes()
    for cut in (1, 5, len(before.splitlines()[-1])):  # the line feed alone, some of the line, all but one byte of it
        path.write_bytes(before[:-cut])
        calls.prompts.clear()
        records = Records(path, "k")
        assert len(records.found) == 4
        tau(target, PROMPTS, records)
        assert calls.prompts == [1] and [json.loads(line)["id"] for line in path.read_text().splitlines()] == [
            json.loads(line)["id"] for line in before.splitlines()
        ]
    for content in (b"", b'{"key": "k", "arm"'):
        path.write_bytes(content)
        assert Records(path, "k").found == {} and path.read_bytes() == b""


def test_records_of_other_settings_are_taken(target: Target, calls: Counter, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    first = Records(path, "k")
    tau(target, PROMPTS[:2], first)
    other = Records(path, "other")
    assert first.has("plain", "tau", "0") and not other.has("plain", "tau", "0")
    tau(target, PROMPTS[:2], other)
    assert calls.prompts == [2, 2] and Records(path, "k").found == other.found
    assert sorted((place[0], place[3]) for place in other.found) == [("k", "0"), ("k", "1"), ("other", "0"), ("other", "1")]


def test_new_arm_loses_what_others_had(target: Target, calls: Counter, tmp_path: Path) -> None:
    """Each arm's records stand under a key of its own: another key for one of them leaves the other's."""
    path, other = tmp_path / "r.jsonl", Arm("other")
    keys = {("plain", "tau"): "k1", ("other", "tau"): "k2"}
    for arm in (PLAIN, other):
        tau(target, PROMPTS[:2], Records(path, keys), arm)
    assert calls.prompts == [2, 2]
    again = Records(path, {**keys, ("other", "tau"): "k3"})
    for arm in (PLAIN, other):
        tau(target, PROMPTS[:2], again, arm)
    assert calls.prompts == [2, 2, 2] and again.of("other", "tau", PROMPTS[:2])


TURNS = [replace(PROMPTS[0], turns=("w20 w21", "w30")), PROMPTS[1], replace(PROMPTS[2], turns=("w22", "w31", "w32"))]


def test_later_turn_forgets_the_answers_before(target: Target, calls: Counter, scripted: Any, tmp_path: Path) -> None:
    """Turns are asked in order, behind plain decoding's answers; all arms answer the same, and a stop loses nothing."""
    path = tmp_path / "r.jsonl"
    records = Records(path, "k")
    tau(target, TURNS, records)
    assert calls.prompts == [2, 1, 2, 1]  # three first turns, two second ones, one third
    first, second = records.of("plain", "tau", TURNS[:1])
    said = target.tokenizer.decode(first.tokens, skip_special_tokens=True)
    asked = [("user", "w20 w21"), ("assistant", said), ("user", "w30")]
    chat = [{"role": role, "content": text} for role, text in asked]
    alone = generate(target, [target.encode(chat)], max_new_tokens=4).rows[0]
    assert (second.turn, second.tokens, second.prompt_tokens) == (1, alone.tokens, len(target.encode(chat)))
    assert [r.turn for r in records.of("plain", "tau", TURNS)] == [0, 1, 0, 0, 1, 2]
    arm = Arm("guess", scripted(lambda ids: [(7, 0)]), Chain(1))
    tau(target, TURNS, records, arm)
    both = [[(r.id, r.turn, r.tokens, r.prompt_tokens) for r in records.of(name, "tau", TURNS)] for name in ("plain", "guess")]
    assert both[0] == both[1]
    found = compare(target, records.of("guess", "tau", TURNS), records.of("plain", "tau", TURNS), TURNS)
    assert found == Exactness(prompts=6, equal=6)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    calls.prompts.clear()
    tau(target, TURNS, Records(path, "k"), arm)
    assert calls.prompts == [1]


def test_turn_that_does_not_fit_stops_the_run(make_target: Callable[..., Target], tmp_path: Path) -> None:
    target = make_target(max_position_embeddings=20)
    records = Records(tmp_path / "r.jsonl", "k")
    tau(target, TURNS, records)
    assert len(records.of("plain", "tau", TURNS)) < 6 and [r.id for r in records.of("plain", "tau", TURNS) if not r.turn] == ["0", "1", "2"]


def test_prompt_is_put_without_the_switches(make_tokenizer: Callable[..., Any], target: Target) -> None:
    switched = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if deep %}w50 {% endif %}"
    other = Target(model=target.model, tokenizer=make_tokenizer(100, switched), name="switched")
    assert [measure.context_of(other, PROMPTS[0], template=t)[-1] for t in ({}, {"deep": True})] == [20, 50]


def test_thinking_is_taken_for_the_answer(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(20)
    assert measure.think_tokens(tokenizer, [1, 2], [6, 7]) == 0
    tokenizer.add_tokens(["<think>", "</think>"])
    begin, end = (tokenizer.convert_tokens_to_ids(word) for word in ("<think>", "</think>"))
    found = [measure.think_tokens(tokenizer, *pair) for pair in (
        ([1], [begin, 6, end, 7]), ([1, begin, 6], [6, end]), ([1], [6, 7]), ([1], [begin, 6]), ([1, begin, 6], [6, 7]),
    )]  # fmt: skip
    assert found == [3, 2, 0, 2, 2]


def test_file_holds_other_figures_than_the_run(tmp_path: Path) -> None:
    rounds = [StepRecord(2, 1, 2, {"verify": 0.123456789, "draft": 1e-7}), StepRecord(0, 0, 1, {})]
    record = Record("a", "speed", "1", "d", [5, 6, 7, 8], 1 / 3, 0.1 + 0.2, rounds)
    records = Records(tmp_path / "below" / "r.jsonl", "k")
    records.add([record])
    assert Records(tmp_path / "below" / "r.jsonl", "k").found == records.found
    (kept,) = records.found["k", "a", "speed", "1"].values()
    assert replace(kept, rounds=[]) == replace(record, rounds=[])
    assert kept.rounds[0].seconds["verify"] == pytest.approx(0.123456789, abs=1e-6) and kept.rounds[1] == rounds[1]


def test_stop_loses_finished_batches(target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stops(target: Target, prompts: Any, **settings: Any) -> Any:
        if len(prompts) == 1:
            raise KeyboardInterrupt
        return generate(target, prompts, **settings)

    monkeypatch.setattr(measure, "generate", stops)
    with pytest.raises(KeyboardInterrupt):
        tau(target, PROMPTS, Records(tmp_path / "r.jsonl", "k"))
    assert len(Records(tmp_path / "r.jsonl", "k").found) == 4


def speed(target: Target, arms: list[Arm], prompts: list[Prompt], records: Records) -> None:
    measure_speed(target, arms, prompts, records, max_new_tokens=5, baseline=True)


def test_speed_is_measured_again_or_in_one_batch(target: Target, calls: Counter, scripted: Any, tmp_path: Path) -> None:
    path, arms = tmp_path / "r.jsonl", [PLAIN, Arm("guess", scripted(lambda ids: [(7, 0)]), Chain(1))]
    records = Records(path, "k")
    speed(target, arms, PROMPTS[:2], records)
    assert calls.prompts == [1] * 6  # two warm-ups, two prompts of two arms
    order = [json.loads(line)["arm"] for line in path.read_text().splitlines()]
    assert order == ["plain", "guess", "transformers", "guess", "transformers", "plain"]
    speed(target, arms, PROMPTS[:2], Records(path, "k"))
    assert len(calls.prompts) == 6
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))  # the last one, of "plain"
    speed(target, arms, PROMPTS[:2], Records(path, "k"))
    assert len(calls.prompts) == 6 + 3 and len(path.read_text().splitlines()) == 6
    for record in (record for runs in records.found.values() for record in runs.values()):
        assert record.mode == "speed" and 0 < record.decode_seconds <= record.seconds and len(record.tokens) <= 5


def test_record_does_not_tell_how_its_passes_were_made(target: Target, tmp_path: Path) -> None:
    """A run is long enough for packed products or is not; the file tells which it was."""
    for tokens, compile, mode in ((5, "auto", "eager"), (20, "auto", "packed"), (20, False, "eager")):
        path = tmp_path / f"{tokens}-{compile}.jsonl"
        measure_speed(target, [PLAIN], PROMPTS[:1], Records(path, "k"), max_new_tokens=tokens, baseline=False, compile=compile)
        (row,) = map(json.loads, path.read_text().splitlines())
        assert row["passes"] == mode


def test_slow_run_of_several_decides(target: Target, scripted: Any, tmp_path: Path) -> None:
    """A B A B: every arm goes over a prompt again before the next one, and the run of median time counts."""
    path, arms = tmp_path / "r.jsonl", [PLAIN, Arm("guess", scripted(lambda ids: [(7, 0)]), Chain(1))]
    records = Records(path, "k")
    measure_speed(target, arms, PROMPTS[:2], records, max_new_tokens=5, baseline=False, repeats=3)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["arm"], row["id"], row["repeat"]) for row in rows[:7]] == [
        ("plain", "0", 0), ("guess", "0", 0), ("plain", "0", 1), ("guess", "0", 1), ("plain", "0", 2), ("guess", "0", 2), ("guess", "1", 0),
    ]  # fmt: skip
    (chosen,) = records.of("plain", "speed", PROMPTS[:1])
    times = sorted(row["decode_seconds"] for row in rows if (row["arm"], row["id"]) == ("plain", "0"))
    assert len(times) == 3 and chosen.decode_seconds == times[1]


def test_baseline_answers_otherwise_or_leaves_the_target_changed(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CA2: transformers' own generate() gives the same tokens, and the target keeps its attention, after an error too."""
    config, records = target.model.config.to_dict(), Records(tmp_path / "r.jsonl", "k")
    attention = target.model.config._attn_implementation
    speed(target, [PLAIN], PROMPTS, records)
    ours, theirs = (records.of(name, "speed", PROMPTS) for name in ("plain", "transformers"))
    assert [r.tokens for r in ours] == [r.tokens for r in theirs] and any(len(r.tokens) == 5 for r in ours)
    assert target.model.config.to_dict() == config and target.model.config._attn_implementation == attention

    def fails(*args: Any, **kwargs: Any) -> None:
        assert target.model.config._attn_implementation == "sdpa"
        raise RuntimeError("out of memory")

    monkeypatch.setattr(target.model, "generate", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        speed(target, [PLAIN], PROMPTS, Records(tmp_path / "other.jsonl", "k"))
    assert target.model.config._attn_implementation == attention


def test_second_measurement_differs_from_the_first(target: Target, make_head: Callable[..., Any], tmp_path: Path) -> None:
    """CA2: A, B, A: the same tokens and the same accepted lengths."""
    from spectrain.drafters.from_head import HeadDrafter

    head = HeadDrafter(make_head(target))
    found = []
    for name, shape in (("chain", Chain(3)), ("tree", Tree.dynamic(top_k=3, depth=3, budget=6)), ("chain", Chain(3))):
        records = Records(tmp_path / f"{len(found)}.jsonl", "k")
        tau(target, PROMPTS, records, Arm(name, head, shape))
        found.append([(r.tokens, [x.accepted for x in r.rounds]) for r in records.of(name, "tau", PROMPTS)])
    assert found[0] == found[2] and [tokens for tokens, _ in found[0]] == [tokens for tokens, _ in found[1]]


def test_arm_is_described_as_another(scripted: Any) -> None:
    tree = Arm("t", scripted(lambda ids: []), Tree.dynamic(top_k=4, depth=5, budget=15), "Eagle3")
    described = tree.describe()
    assert described["shape"] == "tree k=4 d=5 n=15"
    assert [described[key] for key in ("name", "drafter", "depth", "width", "budget", "rule")] == ["t", "Eagle3", 5, 4, 15, "greedy"]
    assert [PLAIN.describe()[key] for key in ("drafter", "shape", "depth", "width", "budget")] == ["none", "–", 0, 1, 0]


# After "assistant" (5) the logits of 7 and 8 are level, and that of 9 is 2 below.
A, B, C = 7, 8, 9
PROMPT = Prompt("p", "d", ("w6",), "")


@pytest.fixture
def level(make_table_target: Callable[..., Target]) -> Callable[..., Target]:
    def make(apart: float, best: float = 5.0) -> Target:
        table = torch.zeros(12, 12)
        table[5, [A, B, C]] = torch.tensor([best, best - apart, best - 2])
        return make_table_target(table)

    return make


def answer(*tokens: int) -> Record:
    return Record("a", "tau", "p", "d", list(tokens), 0.0, 0.0)


def compared(target: Target, tokens: tuple[int, ...], reference: tuple[int, ...]) -> Exactness:
    return compare(target, [answer(*tokens)], [answer(*reference)], [PROMPT])


def test_equal_answers_are_a_fault(level: Callable[..., Target]) -> None:
    assert compared(level(1.0), (A, 11), (A, 11)) == Exactness(prompts=1, equal=1)


@pytest.mark.parametrize(("apart", "ties"), [(0.0, 1), (0.0009, 1), (0.0012, 0), (0.4, 0)])
def test_rounding_is_a_fault_or_a_fault_is_rounding(level: Callable[..., Target], apart: float, ties: int) -> None:
    """SA3: the first difference stands where the best two logits are level, or it does not."""
    expected = Exactness(prompts=1, ties=1) if ties else Exactness(prompts=1, failed=["p"])
    assert compared(level(apart), (B, 10), (A, 11)) == expected


def test_any_token_passes_where_two_others_are_level(level: Callable[..., Target]) -> None:
    """A and B are level, the answer says C: that is no rounding."""
    assert compared(level(0.0), (C, 10), (A, 11)).failed == ["p"]
    assert compared(level(0.0), (B, 10), (C, 11)).failed == ["p"]


def test_answer_that_ends_elsewhere_is_rounding(level: Callable[..., Target]) -> None:
    """One answer is the beginning of the other; after it stands a level choice."""
    for short, long in (((), (A, 11)), ((A, 5), (A, 5, B, 11))):
        assert compared(level(0.0), short, long).failed == ["p"] and compared(level(0.0), long, short).failed == ["p"]


def test_later_difference_hides_the_first(level: Callable[..., Target]) -> None:
    """Equal up to a fault; a level choice further on is no excuse."""
    target = level(0.0)
    assert compared(target, (11, 5, B), (10, 5, A)).failed == ["p"]
    assert compared(target, (5, B, 9), (5, A, 10)) == Exactness(prompts=1, ties=1)


def test_16_bits_are_held_to_32(level: Callable[..., Target]) -> None:
    """SA3: at 20 a bfloat16 step is 0.125; 8 roundings are rounding, 2.0 is not; in float32 0.2 is a fault."""
    assert compared(level(0.2, best=20.0), (B,), (A,)).failed == ["p"]
    coarse = level(0.2, best=20.0)
    coarse.model.bfloat16()
    assert compared(coarse, (B,), (A,)).ties == 1 and compared(coarse, (C,), (A,)).failed == ["p"]


def test_counts_over_prompts_are_mixed_up(level: Callable[..., Target]) -> None:
    target = level(0.0)
    prompts = [replace(PROMPT, id=i) for i in "xyz"]
    said, plain = ([replace(answer(token), id=i) for i, token in zip("xyz", tokens, strict=True)] for tokens in ((A, B, C), (A, A, A)))
    assert compare(target, said, plain, prompts) == Exactness(prompts=3, equal=1, ties=1, failed=["z"])
    with pytest.raises(ValueError):
        compare(target, said[:1], plain[:2], prompts[:2])


def suite(folder: Path, prompts: dict[str, int], rows: dict[str, list[dict[str, Any]]], **changes: Any) -> Suite:
    for domain, found in rows.items():
        (folder / f"{domain}.jsonl").write_text("".join(json.dumps({"domain": domain, **row}) + "\n" for row in found))
    settings = {"name": "s", "version": 1, "folder": ".", "prompts": prompts, "max_prompt_tokens": 12, "max_new_tokens": 4}
    return Suite(**{**settings, **changes})


def test_draw_depends_on_its_batch(target: Target, tmp_path: Path) -> None:
    """At temperature 1 a prompt's tokens are those of its id and the seed, in any batch and alone, for tau and for speed."""
    found = []
    for size, seed in ((5, 0), (2, 0), (2, 1)):
        records = Records(tmp_path / f"{size}{seed}.jsonl", "k")
        measure_tau(target, PLAIN, PROMPTS, records, max_new_tokens=5, batch_size=size, draws=Draws(1.0, seed))
        found.append(answers(records))
    assert found[0] == found[1] and all(a[1] != b[1] for a, b in zip(found[0], found[2], strict=True))
    speeds, state = Records(tmp_path / "s.jsonl", "k"), torch.random.get_rng_state()
    measure_speed(target, [PLAIN], PROMPTS[:2], speeds, max_new_tokens=5, baseline=True, draws=Draws(1.0))
    assert torch.equal(state, torch.random.get_rng_state()), "the baseline's draws moved the global generator"
    assert [r.tokens for r in speeds.of("plain", "speed", PROMPTS[:2])] == [tokens for _, tokens, _ in found[0][:2]]
    greedy = generate(target, [p.chat for p in PROMPTS[:2]], max_new_tokens=5).rows
    assert all(r.tokens != g.tokens for r, g in zip(speeds.of("transformers", "speed", PROMPTS[:2]), greedy, strict=True))
    assert Draws(0.0).of(PROMPTS) == {}


ROWS = [{"id": f"r{i}", "prompt": "w9 " * (1 + i % 2)} for i in range(12)] + [{"id": "long", "prompt": "w9 " * 30}]


def test_choice_of_prompts_moves(target: Target, tmp_path: Path) -> None:
    """The same prompts in the same order, whatever the order of the file; another seed takes others; long ones never."""
    chosen = suite_prompts(suite(tmp_path, {"a": 5}, {"a": ROWS}), target, tmp_path)
    again = suite_prompts(suite(tmp_path, {"a": 5}, {"a": ROWS[::-1]}), target, tmp_path)
    assert chosen == again and [p.id for p in chosen["a"]] != [row["id"] for row in ROWS[:5]]
    more = suite_prompts(suite(tmp_path, {"a": 12}, {"a": ROWS}), target, tmp_path)
    assert more["a"][:5] == chosen["a"] and "long" not in {p.id for p in more["a"]}
    other = suite_prompts(suite(tmp_path, {"a": 5}, {"a": ROWS}, seed=1), target, tmp_path)
    assert {p.id for p in other["a"]} != {p.id for p in chosen["a"]}


def test_suites_share_a_prompt(target: Target, tmp_path: Path) -> None:
    """One that passes over as many as the other takes."""
    first, rest = (suite_prompts(suite(tmp_path, {"a": 6}, {"a": ROWS}, skip=skip), target, tmp_path)["a"] for skip in (0, 6))
    assert len({p.id for p in first} | {p.id for p in rest}) == 12
    with pytest.raises(ValueError, match="wants 6 a prompts after the first 7 of at most 12 tokens, 12 fit"):
        suite_prompts(suite(tmp_path, {"a": 6}, {"a": ROWS}, skip=7), target, tmp_path)


def test_fewer_prompts_than_wanted_are_taken(target: Target, tmp_path: Path) -> None:
    """RB1."""
    with pytest.raises(ValueError, match="suite s wants 13 a prompts of at most 12 tokens, 12 fit"):
        suite_prompts(suite(tmp_path, {"a": 13}, {"a": ROWS}), target, tmp_path)
    with pytest.raises(ValueError, match=r"the domain b, and there is no .*b\.jsonl; its files are looked for in .*, two folders above"):
        suite_prompts(suite(tmp_path, {"a": 1, "b": 1}, {"a": ROWS}), target, tmp_path)


def test_prompts_of_one_id_share_a_record(target: Target, tmp_path: Path) -> None:
    """Ids that start at 1 in every file: the second domain would be given the first one's answers."""
    rows = [{"id": i, "prompt": f"w{9 + i}"} for i in range(3)]
    with pytest.raises(ValueError, match="several prompts have the id 0, 1, 2"):
        suite_prompts(suite(tmp_path, {"a": 3, "b": 3}, {"a": rows, "b": rows}), target, tmp_path)


def test_long_prompts_are_timed_or_a_domain_is_left_out(target: Target) -> None:
    prompts = {"a": [PROMPTS[4], PROMPTS[0], PROMPTS[1], PROMPTS[2]], "b": [PROMPTS[4], PROMPTS[3]]}
    base = len(target.encode(PROMPTS[0].chat))
    chosen = speed_subset(prompts, target, number=2, max_tokens=base + 2)
    assert [p.id for p in chosen["a"]] == ["0", "1"] and [p.id for p in chosen["b"]] == ["3"]
    assert {d: len(rows) for d, rows in speed_subset(prompts, target, number=9, max_tokens=999).items()} == {"a": 4, "b": 2}


def test_probe_weighs_domains_by_their_prompts(target: Target, scripted: Any) -> None:
    """Macro over domains: two prompts of one domain do not count twice."""
    greedy = {p.id: generate(target, [p.chat], max_new_tokens=9).rows[0] for p in PROMPTS}
    right = {tuple(target.encode(p.chat)): greedy[p.id].tokens for p in PROMPTS[:1]}

    def script(ids: list[int]) -> list[tuple[int, int]]:
        """Knows one prompt's answer, and nothing of the others."""
        for start, tokens in right.items():
            if tuple(ids[: len(start)]) == start:
                return [(t, n) for n, t in enumerate(tokens[len(ids) - len(start) :][:3])] or [(0, 0)]
        return [(0, 0)]

    asked = [target.encode(p.chat) for p in PROMPTS[:4]]
    masks = [[0] * len(ids) + [1, 1] for ids in asked]  # the answers of the rows play no part
    given = [Row(p.id, p.domain, [*ids, 9, 1], mask) for p, ids, mask in zip(PROMPTS, asked, masks, strict=False)]
    probe = lambda head: measured_acceptance(target, given, scripted(head), Chain(3), max_new_tokens=9).tau  # noqa: E731
    rows = generate(target, [p.chat for p in PROMPTS[:4]], drafter=scripted(script), shape=Chain(3), max_new_tokens=9).rows
    sums = {d: [0, 0] for d in ("even", "odd")}
    for prompt, row in zip(PROMPTS, rows, strict=False):
        sums[prompt.domain][0] += sum(r.committed for r in row.rounds)
        sums[prompt.domain][1] += len(row.rounds)
    expected = sum(tokens / rounds for tokens, rounds in sums.values()) / 2
    assert sums["odd"][0] == sums["odd"][1] and expected > 1.2  # "odd" is never guessed, prompt 0 always
    assert probe(script) == pytest.approx(expected) == probe(script)
