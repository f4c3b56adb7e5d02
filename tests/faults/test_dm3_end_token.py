"""DM3: the end-of-answer token is never trained, or trained where the model never said it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from spectrain.data.batches import Sample, collate
from spectrain.data.codes import Codes
from spectrain.data.formats import Conversation
from spectrain.data.masking import ChatEncoder, encode_chat

WITH_THE_NEXT = (
    "{% for m in messages %}{% if not loop.first %}<end> {% endif %}<start> {{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<end> <start> assistant {% endif %}"
)
CHAT = tuple({"role": role, "content": f"w{7 + i}"} for i, role in enumerate(["user", "assistant"] * 2))


def sample(ids: list[int]) -> Sample:
    L = len(ids)
    return Sample(
        torch.tensor(ids), torch.ones(L, dtype=torch.int64), Codes(torch.zeros(L, 4)), Codes(torch.zeros(L, 2)),
        torch.zeros(L, dtype=torch.int64), torch.zeros(L),
    )  # fmt: skip


def test_pad_that_is_the_end_takes_the_end_with_it() -> None:
    """Pad id == end id == 2, rows [5,6,2] and [5,6,7,8,2] padded to 5: the real 2 counts, the two pads do not."""
    batch = collate([sample([5, 6, 2]), sample([5, 6, 7, 8, 2])])
    assert batch.mask_BL.tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert batch.ids_BL[0, 2] == 2


def test_end_written_with_the_next_turn_is_not_the_answers(make_tokenizer: Callable[..., Any]) -> None:
    """<start> user w7 <end> <start> assistant w8 <end> <start> user w9 ...: both ends are inside, the last one is added."""
    ids, mask = encode_chat(make_tokenizer(40, template=WITH_THE_NEXT), CHAT)
    assert ids == [2, 4, 7, 1, 2, 5, 8, 1, 2, 4, 9, 1, 2, 5, 10, 1]
    assert [i for i, m in enumerate(mask) if m] == [6, 7, 14, 15]


@pytest.mark.parametrize("plans", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize("template", [None, WITH_THE_NEXT])
def test_reply_cut_at_the_limit_has_an_end(make_tokenizer: Callable[..., Any], template: str | None, plans: bool) -> None:
    """finish_reason `length`: the last answer ends with its last word; the earlier ones have their ends."""
    tokenizer = make_tokenizer(40, **({"template": template} if template else {}))
    both = [Conversation("a", "d", CHAT, finish_reason="length"), Conversation("b", "d", CHAT)]
    _, _, cut, whole = ChatEncoder(tokenizer, max_length=None, plans=plans).encode([*both, *both])
    assert cut.rows[0].supervised_ids.tolist() == [8, 1, 10] and whole.rows[0].supervised_ids.tolist() == [8, 1, 10, 1]
    assert cut.rows[0].ids_L[-1] == 10
