"""Chat template + messages -> token ids and the loss mask.

One rule: a token is supervised if and only if the model itself would have generated it. For an assistant turn that is what stands
between the text of its generation prompt and the end-of-answer token, that token included.

Legend: L tokens.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError


@dataclass(frozen=True)
class Row:
    """Token ids and mask (1 = supervised) of one conversation; equal lengths."""

    id: str
    domain: str
    ids_L: tuple[int, ...]
    mask_L: tuple[int, ...]

    @property
    def supervised(self) -> int:
        return sum(self.mask_L)


def encode_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, max_length: int | None = None
) -> tuple[list[int], list[int]]:
    """Render once and return (ids_L, mask_L).

    An assistant turn is masked in only if it reads here exactly as it did when it was the last turn. ids and mask are cut at
    `max_length` together. Raises ValueError when no assistant turn can be supervised, or when the template does not continue the
    generation prompt with the answer.
    """
    text = _render(tokenizer, messages, tools)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    mask = [0] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        whole = _render(tokenizer, messages[: turn + 1], tools)
        prompt = _render(tokenizer, messages[:turn], tools, generate=True) if turn else _opening(tokenizer, message, whole, tools)
        if not whole.startswith(prompt):
            raise ValueError(
                f"turn {turn + 1}: the chat template does not continue its generation prompt with the answer; this template needs a "
                "rendering of its own (one row a turn)"
            )
        if text.startswith(whole):
            for i in _said(tokenizer, text, ids, offsets, begin=len(prompt), end=len(whole)):
                mask[i] = 1
    if not any(mask[:max_length]):
        raise ValueError("no token of an assistant turn to learn from; is there an assistant turn, and does it start before max_length?")
    return ids[:max_length], mask[:max_length]


def _said(
    tokenizer: Any, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]], *, begin: int, end: int
) -> Sequence[int]:
    """Numbers of the tokens of the turn text[begin:end], up to and with its end-of-answer token.

    That is the tokenizer's own end, or else a special token with nothing but space behind it, or else the tokenizer's end right
    behind the turn: some templates write it as part of the next message.
    """
    # Some tokenizers leave spaces out of the offsets: a token of spaces alone then has width 0 and stands at its last character.
    inside = [i for i, (first, last) in enumerate(offsets) if (begin <= first < end if last > first else begin < last <= end)]
    ends = _end_ids(tokenizer)
    own = [i for i in inside if ids[i] == tokenizer.eos_token_id]
    closing = [i for i in inside if ids[i] in ends and not text[offsets[i][1] : end].strip()]
    if own or closing:
        return [i for i in inside if i <= (own or closing)[-1]]
    behind = inside[-1] + 1 if inside else len(ids)
    return [*inside, behind] if ids[behind : behind + 1] == [tokenizer.eos_token_id] else inside


def _end_ids(tokenizer: Any) -> set[int]:
    """Ids that may close an answer: the tokenizer's end and its other special tokens."""
    return {tokenizer.eos_token_id, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}


def _opening(tokenizer: Any, message: Mapping[str, Any], whole: str, tools: Sequence[Any] | None) -> str:
    """What stands before the content of a first turn, where no template can render the prompt of nothing."""
    return os.path.commonprefix([whole, _render(tokenizer, [{**message, "content": "\0"}], tools)])


def encode_conversation(tokenizer: Any, conversation: Any, max_length: int | None = None) -> Row:
    """A `Conversation` as a row. An answer that was cut off by its length limit loses the end-of-answer token that the template
    put behind it: the model never said it."""
    ids, mask = encode_chat(tokenizer, conversation.messages)
    if conversation.finish_reason == "length":
        last = max(i for i, m in enumerate(mask) if m)
        keep = last if ids[last] in _end_ids(tokenizer) else last + 1
        ids, mask = ids[:keep], mask[:keep]
    if not any(mask[:max_length]):
        raise ValueError(f"the answer starts after max_length {max_length}")
    return Row(id=conversation.id, domain=conversation.domain, ids_L=tuple(ids[:max_length]), mask_L=tuple(mask[:max_length]))


def _render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, generate: bool = False) -> str:
    try:
        return str(tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False, add_generation_prompt=generate))
    except TemplateError as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise ValueError(f"the chat template refuses the turns {roles}: {error}") from error
