"""Where an answer ends: end-of-answer ids, stop strings, the length limit; and text that is safe to stream."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class StopRule:
    """eos_ids: ids that end an answer (the id itself is kept). stop: strings that end it (tokens up to the one that completes the
    string are kept, the text ends before the string). max_new_tokens: limit. byte_ids: tokens of single bytes, whose text may change with
    the next one."""

    eos_ids: frozenset[int]
    stop: tuple[str, ...]
    max_new_tokens: int
    decode: Decode
    byte_ids: frozenset[int] = frozenset()

    def cut(self, done: list[int], new: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """Of the `new` tokens after the `done` ones: those to keep, and why the answer ends with them (None: it goes on)."""
        watch = bool(self.stop) and self._may_stop(done, new)
        for k, token in enumerate(new):
            if token in self.eos_ids:
                return list(new[: k + 1]), "stop"
            if watch and self.find_stop([*done, *new[: k + 1]]) is not None:
                return list(new[: k + 1]), "stop"
            if len(done) + k + 1 >= self.max_new_tokens:
                return list(new[: k + 1]), "length"
        return list(new), None

    def _may_stop(self, done: list[int], new: Sequence[int]) -> bool:
        """Whether a stop string stands in the text's end; a token has at least one character, but for a few that have none."""
        tail = 2 * max(map(len, self.stop)) + 16
        text = self.decode([*done[-tail:], *new])
        return any(s in text for s in self.stop)

    def find_stop(self, tokens: Sequence[int]) -> int | None:
        """Character at which the first stop string begins in the text of `tokens`, or None."""
        text = self.decode(tokens)
        found = [at for at in (text.find(s) for s in self.stop) if at >= 0]
        return min(found, default=None)

    def text(self, tokens: Sequence[int]) -> str:
        """The answer's text: without end ids, cut before a stop string."""
        kept = list(tokens[:-1]) if tokens and tokens[-1] in self.eos_ids else list(tokens)
        text = self.decode(kept)
        at = self.find_stop(kept) if self.stop else None
        return text if at is None else text[:at]


class TextStream:
    """Turns growing token lists into text pieces that never change later (an unfinished character waits for its rest)."""

    def __init__(self, rule: StopRule) -> None:
        self._rule, self._sent = rule, ""

    def push(self, tokens: Sequence[int], *, final: bool) -> str:
        """The text that has become certain since the last call."""
        certain = len(tokens)
        while not final and certain and tokens[certain - 1] in self._rule.byte_ids:
            certain -= 1  # an unfinished character spoils a whole run of bytes
        text = self._rule.text(tokens[:certain])
        if not final:
            text = text.rstrip("\ufffd")
            held = max((n for s in self._rule.stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
            text = text[: len(text) - held]
        piece = text[len(self._sent) :]
        self._sent += piece
        return piece
