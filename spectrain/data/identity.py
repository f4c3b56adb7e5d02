"""Which tokenizer and chat template something was made with, as hashes that artifacts carry and are compared by."""

import hashlib
import json
from typing import Any


def fingerprints(tokenizer: Any) -> dict[str, str]:
    """Hashes of a target's vocabulary and chat template, as rows, stores, heads and answers record them."""
    vocab = json.dumps(sorted(tokenizer.get_vocab().items()))
    parts = {"tokenizer_sha256": vocab, "template_sha256": str(tokenizer.chat_template or "")}
    return {key: hashlib.sha256(value.encode(errors="surrogatepass")).hexdigest() for key, value in parts.items()}
