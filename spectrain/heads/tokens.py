"""The tokenizer that a head belongs to, kept with it token by token, so that a refusal can name what differs."""

import gzip
import io
import json
import zlib
from collections.abc import Mapping
from typing import Any

LARGEST = 2**27  # bytes of a vocabulary; one of a million tokens has a tenth of it


def pack_tokens(vocab: Mapping[str, int]) -> bytes:
    """A tokenizer's vocabulary (token -> id) as compressed JSON: token by id, null where an id has none; equal for equal input."""
    by_id = {i: token for token, i in sorted(vocab.items(), reverse=True)}
    tokens = [by_id.get(i) for i in range(max(by_id, default=-1) + 1)]
    return gzip.compress(json.dumps(tokens).encode(), mtime=0)


def first_difference(packed: bytes, vocab: Mapping[str, int]) -> tuple[int, str | None, str | None] | None:
    """The lowest id that the two vocabularies read otherwise, with both tokens (None: no such id); None when there is none, or
    what was kept is damaged."""
    kept, found = (_unpacked(data) for data in (packed, pack_tokens(vocab)))
    if not isinstance(kept, list):
        return None
    for i in range(max(len(kept), len(found))):
        pair = [tokens[i] if i < len(tokens) else None for tokens in (kept, found)]
        if pair[0] != pair[1]:
            return i, pair[0], pair[1]
    return None


def _unpacked(packed: bytes) -> Any:
    """What was packed; None where it is damaged or of a size that no vocabulary has."""
    try:
        text = gzip.GzipFile(fileobj=io.BytesIO(packed)).read(LARGEST + 1)
        return json.loads(text) if len(text) <= LARGEST else None
    except (OSError, EOFError, ValueError, RecursionError, zlib.error):
        return None
