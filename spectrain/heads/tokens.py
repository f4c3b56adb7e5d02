"""The tokenizer that a head belongs to, kept with it token by token, so that a refusal can name what differs."""

import gzip
import json
from collections.abc import Mapping


def pack_tokens(vocab: Mapping[str, int]) -> bytes:
    """A tokenizer's vocabulary (token -> id) as compressed JSON: token by id, null where an id has none; equal for equal input."""
    by_id = {i: token for token, i in sorted(vocab.items(), reverse=True)}
    tokens = [by_id.get(i) for i in range(max(by_id, default=-1) + 1)]
    return gzip.compress(json.dumps(tokens).encode(), mtime=0)


def first_difference(packed: bytes, vocab: Mapping[str, int]) -> tuple[int, str | None, str | None] | None:
    """The lowest id that the two vocabularies read otherwise, with both tokens (None: no such id); None when there is none."""
    kept, found = (json.loads(gzip.decompress(data)) for data in (packed, pack_tokens(vocab)))
    for i in range(max(len(kept), len(found))):
        pair = [tokens[i] if i < len(tokens) else None for tokens in (kept, found)]
        if pair[0] != pair[1]:
            return i, pair[0], pair[1]
    return None
