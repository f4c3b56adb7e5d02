"""A head as a drafter: its cache after verification, its chains and trees against slow twins."""

import pytest
import torch

from spectrain.decoding.generate import generate
from spectrain.decoding.policies import Adaptive
from spectrain.decoding.shapes import Chain, Tree
from spectrain.drafters.from_head import LATER, HeadDrafter, _HeadSession, joined
from spectrain.heads.eagle3 import Eagle3
from spectrain.target.cache import SlabCache
from spectrain.target.model import Target

PROMPTS = [[9, 55, 31], [7], [50, 51, 52, 7, 50, 51, 52, 7]]


def states(target: Target, head: Eagle3, ids: list[int]) -> torch.Tensor:
    L = len(ids)
    mask = torch.ones(1, 1, L, L, dtype=torch.bool).tril()
    out = target.forward(torch.tensor([ids]), positions_BN=torch.arange(L)[None], mask=mask, cache=None, layer_ids=head.layer_ids)
    assert out.states_BNF is not None
    return out.states_BNF


def fresh_state(target: Target, head: Eagle3, ids: list[int]):
    """Logits, state and cache of a head that has just read all of `ids` with the target's own states."""
    layers, kv_heads, head_dim = head.cache_layers
    cache = SlabCache(
        layers=layers, rows=1, kv_heads=kv_heads, head_dim=head_dim, max_length=99, dtype=torch.float32, device=torch.device("cpu")
    )  # fmt: skip
    N = len(ids) - 1
    logits, state = head.begin(
        states(target, head, ids)[:, :N], torch.tensor([ids[1:]]), torch.tensor([N]), target.embedding_VW, cache, None
    )
    return logits, state, cache


@torch.no_grad()
def follow(target: Target, head: Eagle3, ids: list[int], drafts: list[int]) -> torch.Tensor:
    """log q after `ids` and a line of drafts, one draft after another."""
    logits, state, cache = fresh_state(target, head, ids)
    for depth, token in enumerate(drafts):
        after, state = head.extend(state, torch.tensor([[token]]), torch.tensor([[depth]]), target.embedding_VW, cache)
        logits = after[:, 0]
    return logits[0].log_softmax(-1)


def slow_chain(target: Target, head: Eagle3, ids: list[int], depth: int) -> list[int]:
    drafts: list[int] = []
    for _ in range(depth):
        drafts.append(int(head.target_ids[follow(target, head, ids, drafts).argmax()]))
    return drafts


def slow_tree(target: Target, head: Eagle3, ids: list[int], top_k: int, depth: int, budget: int) -> set[tuple[int, ...]]:
    """EAGLE-2 by the book: every line of drafts by itself."""
    scores: dict[tuple[int, ...], float] = {(): 0.0}
    beam: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        grown = []
        for line in beam:
            best = follow(target, head, ids, list(line)).topk(top_k)
            for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                grown.append((*line, int(head.target_ids[index])))
                scores[grown[-1]] = scores[line] + value
        beam = sorted(grown, key=lambda line: -scores[line])[:top_k]
    del scores[()]
    return set(sorted(scores, key=lambda line: (-scores[line], len(line)))[:budget])


@pytest.fixture
def seen(monkeypatch):
    """All that the generator and a head's session say to each other: (committed ids, session, tree)."""
    talk = []
    propose = _HeadSession.propose

    def spy(self, round):
        committed = round.committed
        self._settle()
        logits, lengths = self._logits_BV.clone(), self._cache.lengths_B.clone()
        tree = propose(self, round)
        talk.append(([list(ids) for ids in committed], logits, lengths, tree))
        return tree

    monkeypatch.setattr(_HeadSession, "propose", spy)
    return talk


SEVERAL = {"num_hidden_layers": 2, "sliding_window": 4, "norm_output": True, "hidden_size": 16}


@pytest.mark.parametrize(("shape", "changes"), [(Chain(3), {}), (Tree.dynamic(3, 3, 7), {}), (Tree.dynamic(3, 3, 7), SEVERAL)], ids=str)
def test_cache_keeps_the_heads_own_guesses(target: Target, make_head, seen, shape, changes: dict) -> None:
    """CA1: before every round the logits are those of a fresh head over the whole sequence with the target's true states."""
    head = make_head(target, **changes)
    generate(target, PROMPTS, drafter=HeadDrafter(head), shape=shape, eos=None, max_new_tokens=14)
    assert len(seen) > 5
    for committed, logits, lengths, tree in seen:
        going = [b for b, ids in enumerate(committed) if len(ids) < 14 + min(len(p) for p in PROMPTS if ids[: len(p)] == p)]
        for b in going:
            ids = committed[b]
            torch.testing.assert_close(logits[b], fresh_state(target, head, ids)[0][0], atol=1e-4, rtol=1e-4)
            assert lengths[b] == len(ids) - 1 and tree.tokens_BN[b, 0] == ids[-1]


def test_rounds_without_a_draft_confuse_the_head(target: Target, make_head, seen) -> None:
    """Settled tokens wait while nothing is drafted, by different numbers in each row and for longer than they may."""
    head, policy = make_head(target), Adaptive("ema", off_below=9.0, probe_after=5, probe_most=40)
    generate(target, PROMPTS, drafter=HeadDrafter(head), shape=Chain(3), policy=policy, eos=None, max_new_tokens=100)
    longest = [max(map(len, committed)) for committed, *_ in seen]
    assert len(seen) > 3 and max(after - before for before, after in zip(longest, longest[1:], strict=False)) > LATER
    for committed, logits, lengths, tree in seen:
        for b, ids in enumerate(committed):
            if lengths[b] == len(ids) - 1:  # others have ended
                torch.testing.assert_close(logits[b], fresh_state(target, head, ids)[0][0], atol=1e-4, rtol=1e-4)
                assert tree.tokens_BN[b, 0] == ids[-1]
        assert any(lengths[b] == len(ids) - 1 for b, ids in enumerate(committed))


def test_settled_tokens_change_places() -> None:
    """Two rounds of a row with 2 and 1 tokens, of one with none and 2, of one with 1 and none."""
    states_BNF = torch.arange(6.0).view(3, 2, 1)
    first = (states_BNF, torch.arange(6).view(3, 2), torch.tensor([2, 0, 1]))
    second = (states_BNF + 10, torch.arange(6).view(3, 2) + 10, torch.tensor([1, 2, 0]))
    states, tokens, count = joined([first, second])
    assert count.tolist() == [3, 2, 1] and tokens[0].tolist() == [0, 1, 10] and tokens[1, :2].tolist() == [12, 13] and tokens[2, 0] == 4
    assert states[..., 0].long().tolist() == tokens.tolist()
    none = joined([(states_BNF, tokens[:, :2], torch.zeros(3, dtype=torch.long))] * 2)
    assert none[2].tolist() == [0, 0, 0] and none[1].shape == (3, 1)


def test_accepted_drafts_leave_their_guesses_behind(make_table_target, seen) -> None:
    """CA1 where drafts are accepted: a head that is always right."""
    V = 12
    target = make_table_target(10 * torch.eye(V).roll(1, dims=1))
    head = always_right_head(target)
    result = generate(target, [[3, 4], [8]], drafter=HeadDrafter(head), shape=Tree.dynamic(2, 4, 6), eos=None, max_new_tokens=30)
    assert [row.tokens[:3] for row in result.rows] == [[5, 6, 7], [9, 10, 11]]
    assert all(r.accepted == 4 for row in result.rows for r in row.rounds[:-1])
    for committed, logits, lengths, _ in seen:
        for b, ids in enumerate(committed):
            torch.testing.assert_close(logits[b], fresh_state(target, head, ids)[0][0], atol=1e-4, rtol=1e-4)
            assert lengths[b] == len(ids) - 1


def always_right_head(target: Target) -> Eagle3:
    """A head that answers token t with t + 1, by attention: queries and keys are one constant vector, so that the rotary positions
    make a node look mostly at itself; values are the embedding in hand minus the feature, which the residual adds again."""
    V = target.vocab_size
    config = Eagle3.Config(
        hidden_size=V, target_hidden_size=V, intermediate_size=4, num_attention_heads=1, num_key_value_heads=1, head_dim=V,
        rms_norm_eps=1e-9, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, max_position_embeddings=256, vocab_size=V,
        draft_vocab_size=V, layer_ids=(0,), target_layers=1,
    )  # fmt: skip
    head = Eagle3(config)
    attention, eye = head.midlayer.self_attn, torch.eye(V)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.dim() == 2:
                weight.zero_()
        attention.q_proj.weight[:, :V] = 1
        attention.k_proj.weight[:, :V] = 1
        attention.v_proj.weight.copy_(torch.cat([eye, -eye], dim=1))
        attention.o_proj.weight.copy_(eye)
        head.lm_head.weight.copy_(5 * eye.roll(1, dims=0))
        head.t2d.fill_(True)
    return head.eval()


@pytest.mark.parametrize(("top_k", "depth", "budget"), [(3, 3, 7), (3, 4, 28), (2, 5, 18), (4, 2, 20), (1, 3, 2), (3, 1, 2), (12, 2, 9)])
def test_tree_is_not_eagle2s(target: Target, make_head, seen, top_k: int, depth: int, budget: int) -> None:
    head = make_head(target)
    generate(target, PROMPTS, drafter=HeadDrafter(head), shape=Tree.dynamic(top_k, depth, budget), eos=None, max_new_tokens=4)
    for committed, _, _, tree in seen[:2]:
        for b, ids in enumerate(committed):
            tokens, parents, lines = tree.tokens_BN[b].tolist(), tree.parents_BN[b].tolist(), [()]
            for n in range(1, int(tree.num_B[b])):
                lines.append((*lines[parents[n]], tokens[n]))
            assert set(lines[1:]) == slow_tree(target, head, ids, top_k, depth, budget)
            assert len(set(lines)) == len(lines) and len(lines) - 1 <= budget


def test_chain_is_not_the_most_likely_line(target: Target, make_head, seen) -> None:
    head = make_head(target)
    generate(target, PROMPTS, drafter=HeadDrafter(head), shape=Chain(4), eos=None, max_new_tokens=6)
    for committed, _, _, tree in seen[:3]:
        for b, ids in enumerate(committed):
            assert tree.tokens_BN[b].tolist() == [ids[-1], *slow_chain(target, head, ids, 4)]


def test_ids_off_the_draft_vocabulary_are_drafted(target: Target, make_head, seen) -> None:
    head = make_head(target, draft_vocab=20)
    generate(target, PROMPTS, drafter=HeadDrafter(head), shape=Tree.dynamic(5, 2, 20), eos=None, max_new_tokens=6)
    allowed = set(head.target_ids.tolist())
    assert allowed == set(range(0, 100, 5))
    assert all(set(tree.tokens_BN[:, 1:].flatten().tolist()) <= allowed for *_, tree in seen)


def test_head_of_another_target_drafts(target: Target, make_target, make_head) -> None:
    head = make_head(target)
    head.made_with = {"target": "elsewhere", **make_target(seed=5).fingerprints}
    with pytest.raises(ValueError, match="trained for elsewhere .its embedding differs.*load that target, or train"):
        generate(target, PROMPTS, drafter=HeadDrafter(head))
    head.made_with = {"target": "elsewhere", **target.fingerprints}
    assert generate(target, PROMPTS, drafter=HeadDrafter(head), max_new_tokens=2).rows


def test_head_on_another_device_is_a_traceback(target: Target, make_head) -> None:
    with pytest.raises(ValueError, match="the head is on meta, tiny on cpu; load the head with device='cpu'"):
        generate(target, PROMPTS, drafter=HeadDrafter(make_head(target).to("meta")))


@pytest.mark.parametrize("shape", [Chain(3), Tree.dynamic(3, 3, 7)], ids=str)
def test_head_of_another_precision_is_a_traceback(target: Target, make_head, fresh_greedy, shape) -> None:
    drafter = HeadDrafter(make_head(target).to(torch.bfloat16))
    result = generate(target, PROMPTS, drafter=drafter, shape=shape, eos=None, max_new_tokens=6)
    assert [row.tokens for row in result.rows] == [fresh_greedy(target, p, 6) for p in PROMPTS]
    assert {r.drafted for row in result.rows for r in row.rounds} == {shape.budget}
    drawn = generate(target, PROMPTS, drafter=drafter, shape=shape, eos=None, max_new_tokens=6, temperature=1.0)
    assert all(len(row.tokens) == 6 for row in drawn.rows)


def test_rewound_session_drafts_something_else(target: Target, make_head, monkeypatch) -> None:
    head = make_head(target)
    propose = _HeadSession.propose

    def twice(self, round):
        first = propose(self, round)
        self.rewind()
        second = propose(self, round)
        assert torch.equal(first.tokens_BN, second.tokens_BN)
        return second

    monkeypatch.setattr(_HeadSession, "propose", twice)
    generate(target, PROMPTS, drafter=HeadDrafter(head), shape=Chain(3), eos=None, max_new_tokens=6)


def test_records_are_not_what_happened(target: Target, make_head) -> None:
    result = generate(target, PROMPTS, drafter=HeadDrafter(make_head(target)), shape=Chain(3), eos=None, max_new_tokens=9)
    for row in result.rows:
        assert 1 + sum(r.committed for r in row.rounds) == len(row.tokens) == 9
        assert all(set(r.seconds) == {"draft", "verify", "accept", "commit"} and min(r.seconds.values()) >= 0 for r in row.rounds)
        assert [r.drafted for r in row.rounds] == [3] * len(row.rounds)
        assert all(0 <= r.accepted <= 3 for r in row.rounds)
    assert result.seconds >= sum(sum(r.seconds.values()) for row in result.rows for r in row.rounds)
