"""The tokens that a head keeps of its target's tokenizer."""

import gzip

import pytest

from spectrain.heads.tokens import first_difference, pack_tokens

VOCAB = {"a": 0, "b": 1, "é\n": 2, "<end>": 4}


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (VOCAB, None),
        (dict(reversed(VOCAB.items())), None),
        ({**VOCAB, "é\n": 3}, (2, "é\n", None)),
        ({**VOCAB, "x": 3}, (3, None, "x")),
        ({"a": 0, "b": 1}, (2, "é\n", None)),
        ({**VOCAB, "z": 5}, (5, None, "z")),
        ({}, (0, "a", None)),
    ],
)
def test_first_differing_id_is_another(other: dict[str, int], expected: tuple[int, str | None, str | None] | None) -> None:
    assert first_difference(pack_tokens(VOCAB), other) == expected


def test_same_tokens_make_other_bytes() -> None:
    assert pack_tokens(VOCAB) == pack_tokens(dict(reversed(VOCAB.items())))
    large = {f"token{i}": i for i in range(50_000)}
    assert len(pack_tokens(large)) < 5 * len(large)


@pytest.mark.parametrize(
    "kept",
    [b"", b"text", pack_tokens(VOCAB)[:-9], gzip.compress(b'{"a": 0}', mtime=0), gzip.compress(b" " * (2**27 + 1), mtime=0)],
    ids=["empty", "no gzip", "cut", "no list", "too large"],
)
def test_kept_tokens_that_are_damaged_are_a_traceback(kept: bytes) -> None:
    assert first_difference(kept, VOCAB) is None
