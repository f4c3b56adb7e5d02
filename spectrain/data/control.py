"""Which of a tokenizer's tokens steer the model, and where their strings stand in a text: there they would become the tokens."""

import re
from collections.abc import Collection, Iterable
from typing import Any

SPEECH = re.compile(r"think|tool")  # tokens of reasoning and tools are control tokens also where they are not called special
# So are those in the brackets of control tokens: <|fim_prefix|> of Qwen2.5, <｜User｜> of DeepSeek-R1's distilled models.
_BRACKETS = re.compile(r"<[|｜].*[|｜]>")


def steers(token: Any) -> bool:
    """Whether an added token is one that nobody may write in a text, the assistant neither; reasoning and tool calls it may write."""
    return bool(token.special or (_BRACKETS.fullmatch(token.content) and not SPEECH.search(token.content)))


class ControlTokens:
    """Finds the strings that a tokenizer turns into given added tokens."""

    def __init__(self, tokenizer: Any, ids: Collection[int]) -> None:
        tokens = [token for i, token in tokenizer.added_tokens_decoder.items() if i in ids]
        self.pattern = _any_of(token.content for token in tokens)
        # Tokens called normalized are looked for behind the normaliser, which may make them out of other characters.
        normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
        late = [token.content for token in tokens if token.normalized]
        self._normalize = normalizer.normalize_str if normalizer is not None and late else None
        self._late = _any_of(map(self._normalize, late)) if self._normalize else None

    def find(self, text: str) -> str | None:
        """The first of them in a text, or None."""
        found = self.pattern.search(text)
        if self._normalize and self._late and not found:
            found = self._late.search(self._normalize(text))
        return found.group() if found else None


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern of words, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(set(words) - {""}, key=lambda word: (-len(word), word)))) or "(?!)")
