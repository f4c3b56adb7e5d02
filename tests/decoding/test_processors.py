"""Penalties, bans, forced tokens and processors at every node: against Python over whole histories, and against transformers."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from spectrain.decoding.accept import accept
from spectrain.decoding.processors import Histories, Processing
from spectrain.decoding.sampling import Coins, Sampling, probabilities
from spectrain.decoding.tree import DraftTree, ancestors

V, END = 9, 1


@dataclass
class Case:
    """Rows with a prompt and an answer, a random tree, and its logits."""

    prompts: list[list[int]]
    answers: list[list[int]]
    tokens: Tensor
    parents: Tensor
    logits: Tensor

    @property
    def ancestors(self) -> Tensor:
        return ancestors(self.parents)

    def path(self, b: int, n: int) -> list[int]:
        """Drafted ids from the root's child down to node n."""
        ids: list[int] = []
        while n:
            ids, n = [int(self.tokens[b, n]), *ids], int(self.parents[b, n])
        return ids

    def histories(self, processing: Processing) -> Histories:
        """The state after the answers came in pieces."""
        state = fresh(processing, self.prompts)
        for t in range(max(map(len, self.answers))):
            state.commit([answer[t : t + 1] for answer in self.answers])
        return state


def fresh(processing: Processing, prompts: list[list[int]]) -> Histories:
    return Histories(processing, prompts, vocab_size=V, eos_ids=[END], device="cpu")


def make_case(seed: int, *, nodes: int = 9, answers: tuple[int, ...] = (3, 0, 5), dtype: torch.dtype = torch.float64) -> Case:
    g = torch.Generator().manual_seed(seed)

    def ids(n: int) -> list[int]:
        return torch.randint(2, V, (n,), generator=g).tolist()

    B = len(answers)
    tokens = torch.randint(2, V - 2, (B, nodes), generator=g)  # few ids: paths repeat them
    parents = torch.stack([(torch.rand(B, generator=g) * n).long() if n else torch.full((B,), -1) for n in range(nodes)], dim=1)
    parents[0] = torch.arange(nodes) - 1  # one row is a chain
    logits = 3 * torch.randn(B, nodes, V, generator=g, dtype=torch.float64)
    return Case([ids(2 + 2 * b) for b in range(B)], [ids(n) for n in answers], tokens, parents, logits.to(dtype))


def by_hand(processing: Processing, prompt: list[int], answer: list[int], logits: list[float]) -> list[float]:
    """The built-in settings from one whole history, a token at a time."""
    p, out = processing, []
    if len(answer) in p.forced_tokens:
        return [0.0 if v == p.forced_tokens[len(answer)] else -math.inf for v in range(len(logits))]
    for v, x in enumerate(logits):
        if v in prompt + answer:
            x = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
        x -= p.frequency_penalty * answer.count(v) + (p.presence_penalty if v in answer else 0.0)
        out.append(-math.inf if v in p.banned_tokens or (v == END and len(answer) < p.min_new_tokens) else x)
    return out


EVERY = {
    "repetition_penalty": 1.7, "frequency_penalty": 0.4, "presence_penalty": -0.9, "min_new_tokens": 5, "banned_tokens": (2, 7),
    "forced_tokens": {4: 7, 6: 0},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{name: value} for name, value in EVERY.items()] + [{"repetition_penalty": 0.6}, {}, EVERY])
def test_law_is_not_that_of_the_nodes_own_history(settings: dict[str, Any], dtype: torch.dtype) -> None:
    processing = Processing(**settings)
    for seed in range(3):
        case = make_case(seed, dtype=dtype)
        kept = [t.clone() for t in (case.logits, case.tokens, case.ancestors)]
        out = case.histories(processing).apply(case.logits, case.tokens, case.ancestors)
        rows = [
            [by_hand(processing, prompt, answer + case.path(b, n), case.logits[b, n].tolist()) for n in range(case.tokens.shape[1])]
            for b, (prompt, answer) in enumerate(zip(case.prompts, case.answers, strict=True))
        ]
        tolerance = 1e-12 if dtype == torch.float64 else 2e-6
        assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and out.data_ptr() != case.logits.data_ptr()
        torch.testing.assert_close(out.double(), torch.tensor(rows, dtype=torch.float64), atol=tolerance, rtol=tolerance)
        assert all(torch.equal(a, b) for a, b in zip(kept, (case.logits, case.tokens, case.ancestors), strict=True))


def test_a_few_laws_of_a_tree_differ_from_all() -> None:
    case = make_case(4)
    processing = Processing(**EVERY, logits_processors=[lambda ids, scores: scores - ids.sum(-1, keepdim=True)])  # type: ignore[arg-type]
    whole = case.histories(processing).apply(case.logits, case.tokens, case.ancestors)
    for at in ([8, 3, 0], [0], [7, 7, 2, 1]):
        some = case.histories(processing).apply(case.logits[:, at], case.tokens, case.ancestors[:, at])
        reached = reachable(case, whole)[:, at]
        assert reached.any()
        torch.testing.assert_close(some[reached], whole[:, at][reached])


def reachable(case: Case, laws: Tensor) -> Tensor:
    """Nodes whose path no law forbids and no end token cuts [B, N]."""
    out = torch.ones(case.tokens.shape, dtype=torch.bool)
    for b in range(out.shape[0]):
        for n in range(1, out.shape[1]):
            up, token = int(case.parents[b, n]), int(case.tokens[b, n])
            out[b, n] = out[b, up] and token != END and laws[b, up, token] > -math.inf
    return out


Theirs = Callable[[int], list[Any]]  # length of the prompt -> transformers' own processors
SHARED: dict[str, tuple[dict[str, Any], Theirs]] = {
    "repetition": ({"repetition_penalty": 1.3}, lambda L: [RepetitionPenaltyLogitsProcessor(1.3)]),
    "min_new": ({"min_new_tokens": 4}, lambda L: [MinNewTokensLengthLogitsProcessor(L, 4, END)]),
    "suppress": ({"banned_tokens": [2, 5]}, lambda L: [SuppressTokensLogitsProcessor([2, 5])]),
    "bad_words": ({"banned_tokens": [2, 5]}, lambda L: [NoBadWordsLogitsProcessor([[2], [5]])]),
    "forced": ({"forced_tokens": {4: END}}, lambda L: [ForcedEOSTokenLogitsProcessor(L + 5, END)]),
    "ngram": ({"logits_processors": [NoRepeatNGramLogitsProcessor(2)]}, lambda L: [NoRepeatNGramLogitsProcessor(2)]),
    "warper": ({"logits_processors": [TemperatureLogitsWarper(0.6)]}, lambda L: [TemperatureLogitsWarper(0.6)]),
    "all": (
        {
            "repetition_penalty": 1.3, "min_new_tokens": 4, "banned_tokens": [5], "forced_tokens": {6: END},
            "logits_processors": LogitsProcessorList([NoRepeatNGramLogitsProcessor(2), TemperatureLogitsWarper(0.6)]),
        },
        lambda L: [
            RepetitionPenaltyLogitsProcessor(1.3), MinNewTokensLengthLogitsProcessor(L, 4, END), SuppressTokensLogitsProcessor([5]),
            NoRepeatNGramLogitsProcessor(2), TemperatureLogitsWarper(0.6), ForcedEOSTokenLogitsProcessor(L + 7, END),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_law_differs_from_transformers(name: str) -> None:
    settings, theirs = SHARED[name]
    changed = 0
    for seed in range(3):
        case = make_case(seed, dtype=torch.float32)
        expected = case.logits.clone()
        for b, prompt in enumerate(case.prompts):
            for n in range(case.tokens.shape[1]):
                ids = torch.tensor([prompt + case.answers[b] + case.path(b, n)])
                expected[b, n] = LogitsProcessorList(theirs(len(prompt)))(ids, case.logits[b, n][None].clone())[0]
        out = case.histories(Processing(**settings)).apply(case.logits, case.tokens, case.ancestors)
        reached = reachable(case, expected)
        torch.testing.assert_close(out[reached], expected[reached], atol=1e-6, rtol=1e-6)
        changed += int((out[reached] != case.logits[reached]).any(-1).sum())
    assert changed >= 3


@dataclass
class Recorder:
    """A processor that spoils what it is given, after it took notes."""

    calls: list[list[list[int]]]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.dtype == torch.int64
        self.calls.append(input_ids.tolist())
        out = scores + 1
        scores.fill_(math.nan)
        return out


def test_processors_see_wrong_histories_or_too_many() -> None:
    case = make_case(5, answers=(3, 4, 5, 0, 1))
    case.parents[1] = case.parents[0]
    case.tokens[0, 6] = END  # in a chain: nodes 7 and 8 come after the end
    case.tokens[1, 3] = 8  # forbidden, in a chain
    needed = torch.ones(case.tokens.shape, dtype=torch.bool)
    needed[2, 5:], needed[4] = False, False
    recorder = Recorder([])
    settings = {"banned_tokens": (8,), "forced_tokens": {2: 4}, "frequency_penalty": 1.0}
    plain = case.histories(Processing(**settings)).apply(case.logits, case.tokens, case.ancestors)  # type: ignore[arg-type]
    processing = Processing(**settings, logits_processors=[recorder])  # type: ignore[arg-type]
    out = case.histories(processing).apply(case.logits, case.tokens, case.ancestors, needed_BX=needed)
    want, called = [], torch.zeros_like(needed)
    reached = reachable(case, plain)
    for b, n in needed.nonzero().tolist():
        if reached[b, n] and len(case.answers[b] + case.path(b, n)) not in processing.forced_tokens:
            want.append(case.prompts[b] + case.answers[b] + case.path(b, n))
            called[b, n] = True
    seen = [ids for call in recorder.calls for ids in call]
    assert sorted(seen) == sorted(want) and len({len(ids) for ids in seen}) == len(recorder.calls)
    assert called.any(1).tolist() == [True] * 4 + [False] and called[0].sum() == 6 and called[1].sum() == 3
    assert torch.equal(out, torch.where(called[..., None], plain + 1, plain))


@pytest.mark.parametrize("settings", [EVERY, {"logits_processors": [NoRepeatNGramLogitsProcessor(2)]}])
def test_rejected_drafts_or_dropped_rows_leave_a_trace(settings: dict[str, Any]) -> None:
    processing = Processing(**settings)
    case = make_case(6, answers=(0, 0, 0, 0))
    state, answers = fresh(processing, case.prompts), [list[int]() for _ in case.prompts]
    prompts = list(case.prompts)
    for step in range(8):
        draft = make_case(10 + step, answers=(0,) * len(prompts))
        out = state.apply(draft.logits, draft.tokens, draft.ancestors)
        renewed = fresh(processing, prompts)
        renewed.commit(answers)
        assert torch.equal(out, renewed.apply(draft.logits, draft.tokens, draft.ancestors)), step
        new = [draft.path(b, (step + 3 * b) % 9) for b in range(len(prompts))]  # none, one or many
        state.commit(new)
        answers = [old + more for old, more in zip(answers, new, strict=True)]
        if step in (2, 5):
            keep = [2, 0, 3] if step == 2 else [1]
            state.select(keep)
            prompts, answers = [prompts[b] for b in keep], [answers[b] for b in keep]


def speculate(processing: Processing, table: Tensor, prompt: list[int], draft: Callable[[list[int]], list[int]], length: int) -> list[int]:
    """A greedy answer of a model whose logits depend on the last token; `draft` guesses a chain."""
    state, ids = Histories(processing, [prompt], vocab_size=len(table), eos_ids=[], device="cpu"), list(prompt)
    while len(ids) < len(prompt) + length:
        tokens = torch.tensor([[ids[-1], *draft(ids)]])
        tree = DraftTree.chain(tokens, torch.tensor([tokens.shape[1]]))
        p = probabilities(state.apply(table[tokens], tokens, ancestors(tree.parents_BN)), Sampling())
        n = torch.zeros(1, dtype=torch.long)
        done = accept(p, tree, "greedy", Coins(n, n))
        new = tokens[0, 1 : 1 + int(done.length_B[0])].tolist() + done.next_B.tolist()
        state.commit([new])
        ids += new
    return ids[len(prompt) : len(prompt) + length]


@pytest.mark.parametrize("drafts", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("settings", [{"banned_tokens": [12]}, {"logits_processors": [SuppressTokensLogitsProcessor([12])]}])
def test_forbidden_token_appears_inside_a_block(drafts: int, settings: dict[str, Any]) -> None:
    table = torch.zeros(16, 16)
    for token, best, second in ((9, 10, 0), (10, 11, 0), (11, 12, 13), (12, 14, 0), (13, 9, 0)):
        table[token, best], table[token, second] = 2, 1

    def chain(ids: list[int]) -> list[int]:
        out = ids[-1:]
        for _ in range(drafts):
            out.append(int(table[out[-1]].argmax()))
        return out[1:]

    assert speculate(Processing(), table, [9], chain, 4) == [10, 11, 12, 14]
    assert speculate(Processing(**settings), table, [9], chain, 10) == [10, 11, 13, 9, 10, 11, 13, 9, 10, 11]


def test_speculation_changes_a_penalised_answer() -> None:
    table = 2 * torch.randn(16, 16, generator=torch.Generator().manual_seed(3))
    processing = Processing(
        repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, forced_tokens={9: 3, 20: 4},
        logits_processors=[NoRepeatNGramLogitsProcessor(2)],
    )  # fmt: skip
    plain = speculate(processing, table, [9, 4], lambda ids: [], 40)
    assert plain != speculate(Processing(), table, [9, 4], lambda ids: [], 40)
    for wrong_after in (1, 3, 6):
        answer = speculate(processing, table, [9, 4], lambda ids, k=wrong_after: [*plain[len(ids) - 2 :][:k], 5, 5, 5], 40)  # type: ignore[misc]
        assert answer == plain


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 0.0), ("repetition_penalty", math.inf), ("repetition_penalty", math.nan), ("frequency_penalty", math.inf),
        ("presence_penalty", math.nan), ("min_new_tokens", -1), ("min_new_tokens", 1.5), ("banned_tokens", [3, -1]), ("banned_tokens", 3),
        ("banned_tokens", ["a"]), ("banned_tokens", "12"), ("banned_tokens", np.array(3)), ("banned_tokens", b"12"),
        ("banned_tokens", [1.0]), ("banned_tokens", [True]),
        ("banned_tokens", {5: 1.0}), ("forced_tokens", {-1: 2}), ("forced_tokens", {1: -2}), ("forced_tokens", [1]), ("forced_tokens", 5),
        ("forced_tokens", {0: 1.5}), ("forced_tokens", {"0": 1}), ("forced_tokens", {True: 1}), ("forced_tokens", [(0, 1)]),
        ("repetition_penalty", "1.2"), ("repetition_penalty", None), ("repetition_penalty", True), ("repetition_penalty", 1e31),
        ("repetition_penalty", 1e-31), ("frequency_penalty", "0"), ("frequency_penalty", 1e31), ("presence_penalty", -1e31),
        ("presence_penalty", None), ("min_new_tokens", True), ("min_new_tokens", "3"), ("min_new_tokens", None), ("min_new_tokens", 2**63),
        ("logits_processors", lambda ids, scores: scores), ("logits_processors", "warp"), ("logits_processors", {"a": 1}),
        ("logits_processors", [TopKLogitsWarper]), ("logits_processors", ["warp"]),
        ("logits_processors", NoRepeatNGramLogitsProcessor(2)), ("logits_processors", [3]), ("logits_processors", [lambda ids: ids]),
        ("logits_processors", [object.__new__(SynthIDTextWatermarkLogitsProcessor)]),
        ("logits_processors", [LogitsProcessorList([object.__new__(SynthIDTextWatermarkLogitsProcessor)])]),
        ("logits_processors", [[LogitsProcessorList([object.__new__(SynthIDTextWatermarkLogitsProcessor)])]]),
    ],
)  # fmt: skip
def test_setting_out_of_range_is_taken(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        Processing(**{field: value})


def test_settings_follow_the_callers_objects() -> None:
    banned, forced = [2], {0: 3}
    processing = Processing(banned_tokens=banned, forced_tokens=forced)
    banned.append(5)
    forced[1] = 5
    assert processing == Processing(banned_tokens=(2,), forced_tokens={0: 3})
    given = iter([2])  # read once
    assert Processing(banned_tokens=given, forced_tokens={np.int64(0): np.int64(3)}) == processing  # type: ignore[arg-type]
    assert Processing(banned_tokens=np.array([2]), forced_tokens={0: 3}) == processing  # type: ignore[arg-type]
    assert Processing(banned_tokens=None, forced_tokens=None, logits_processors=None) == Processing()  # type: ignore[arg-type]
    assert Processing(logits_processors=(p for p in [min])).logits_processors == (min,)  # type: ignore[arg-type]
    assert not Processing().active and all(Processing(**{name: value}).active for name, value in EVERY.items())


@pytest.mark.parametrize(("field", "value"), [("banned_tokens", [V]), ("forced_tokens", {0: V})])
def test_id_outside_the_vocabulary_is_taken(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{field} holds \[{V}\]"):
        fresh(Processing(**{field: value}), [[3]])


def test_no_end_becomes_one_from_the_back() -> None:
    """eos -1 is no id: neither forbidden while the answer is short nor an end on a path."""
    case = make_case(9)
    state = Histories(Processing(min_new_tokens=9), case.prompts, vocab_size=V, eos_ids=[-1, V], device="cpu")
    assert torch.equal(state.apply(case.logits, case.tokens, case.ancestors), case.logits)


def test_largest_penalties_give_nan() -> None:
    case = make_case(9, dtype=torch.float32)
    processing = Processing(repetition_penalty=1e-30, frequency_penalty=-1e30, presence_penalty=1e30)
    assert not case.histories(processing).apply(case.logits, case.tokens, case.ancestors).isnan().any()


def test_bans_that_leave_nothing_are_taken() -> None:
    case = make_case(7)
    rest = [v for v in range(V) if v != END]
    with pytest.raises(ValueError, match="leave no token"):
        case.histories(Processing(banned_tokens=rest, min_new_tokens=4)).apply(case.logits, case.tokens, case.ancestors)
    case.logits[..., 0] = -math.inf  # an id that the tokenizer does not know
    with pytest.raises(ValueError, match="leave no token"):
        case.histories(Processing(banned_tokens=range(1, V))).apply(case.logits, case.tokens, case.ancestors)


class Broken:
    """A processor with a fault at histories of one length."""

    def __init__(self, fault: Callable[[Tensor], Any]) -> None:
        self.fault = fault

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        return self.fault(scores.clone()) if input_ids.shape[1] == 7 else scores


@pytest.mark.parametrize(
    "fault",
    [
        lambda scores: scores[0], lambda scores: scores[:, :-1], lambda scores: None, lambda scores: scores * math.nan,
        lambda scores: scores.fill_(-math.inf), lambda scores: scores.index_fill(1, torch.tensor([3]), math.inf),
        lambda scores: torch.cat([scores[:-1], scores[-1:] * math.nan]),
    ],
)  # fmt: skip
def test_broken_processor_goes_unnamed(fault: Callable[[Tensor], Any]) -> None:
    case = make_case(8)
    processing = Processing(logits_processors=[TemperatureLogitsWarper(0.7), Broken(fault)])
    with pytest.raises(ValueError, match="logits processor Broken returned"):
        case.histories(processing).apply(case.logits, case.tokens, case.ancestors)


def test_processor_is_blamed_for_the_models_nan() -> None:
    case = make_case(8)
    case.logits[0, 0] = math.nan
    out = case.histories(Processing(logits_processors=[TemperatureLogitsWarper(0.5)])).apply(case.logits, case.tokens, case.ancestors)
    assert out[0, 0].isnan().all() and torch.equal(out[1], case.logits[1] / 0.5)
