"""Which conversations become rows, and on which side of the split: duplicates, evaluation prompts, the draw, the split.

Every choice hangs on content and seed, never on the order of the input. Legend: C conversations, R rows; part_R: UNUSED, TRAIN,
VALIDATION.
"""

import hashlib
import json
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

SHINGLE = 8  # words
DISJOINT_RULE = 2  # raised whenever `Questions` finds other prompts: what was prepared before is then made anew
UNUSED, TRAIN, VALIDATION = 0, 1, 2
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: spreads keys over a table (Knuth, vol. 3, 6.4)
_WORD = re.compile(r"[^\W_]+")

Keys = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


def key64(data: bytes) -> int:
    """8-byte hash; among ten million contents the chance of any collision is 3e-6."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1


def content_key(item: Any) -> int:
    """Hash of what was said, whoever filed it under which id and domain."""
    if hasattr(item, "messages"):
        if not item.tools and all(message.keys() == {"role", "content"} for message in item.messages):  # most, and in a third of the time
            parts = [f"{message['role']} {len(message['content'])} {message['content']}" for message in item.messages]
            return key64("\n".join(parts).encode())
        content: Any = ["chat", item.messages, item.tools]
    elif hasattr(item, "turns"):
        content = ["prompt", item.turns]
    elif hasattr(item, "text"):
        content = ["text", item.text]
    else:
        content = ["tokens", list(map(int, item.ids)), list(map(int, item.mask))]
    return key64(json.dumps(content, sort_keys=True).encode())


class Seen:
    """A set of 8-byte keys in 13 to 27 bytes each (a Python set takes about 70); key 0 marks an empty place."""

    def __init__(self, keys: Iterable[int] = ()) -> None:
        self._table, self._count = array("Q", bytes(8 * 1024)), 0
        for key in keys:
            self.add(key)

    def __len__(self) -> int:
        return self._count

    def add(self, key: int) -> bool:
        """Put the key in; True when it was not there."""
        table, last = self._table, len(self._table) - 1
        place = (key * _GOLDEN >> 20) & last
        while found := table[place]:
            if found == key:
                return False
            place = (place + 1) & last
        table[place] = key
        self._count += 1
        if 5 * self._count > 3 * len(table):
            self._grow()
        return True

    def _grow(self) -> None:
        old, self._table, self._count = self._table, array("Q", bytes(16 * len(self._table))), 0
        for key in old:
            if key:
                self.add(key)


def words(text: str) -> list[str]:
    """Lower-case runs of letters and digits."""
    return _WORD.findall(text.lower())


def shingles(text: str) -> set[str]:
    """Runs of eight words; empty for a shorter text."""
    found = words(text)
    whole, ends = " ".join(found), list(accumulate(len(word) + 1 for word in found))
    begins = [0, *ends]
    return {whole[begin : end - 1] for begin, end in zip(begins, ends[SHINGLE - 1 :], strict=False)}


class Questions:
    """Evaluation prompts that no training prompt may repeat. questions: the turns of each."""

    def __init__(self, questions: Iterable[Sequence[str]], *, near: float) -> None:
        self._near = near
        self._asked: set[str] = set()
        self._where: dict[str, list[int]] = {}
        self._turns: list[list[str]] = []  # by question, those long enough to have a shingle
        for number, turns in enumerate(questions):
            spelt = [words(turn) for turn in turns]
            self._asked.update(map(" ".join, spelt))
            self._turns.append([f" {' '.join(turn)} " for turn in spelt if len(turn) >= SHINGLE])
            for shingle in set().union(*map(shingles, turns)):
                self._where.setdefault(shingle, []).append(number)
        self._asked.discard("")

    def __len__(self) -> int:
        return len(self._asked)

    def fault(self, turns: Iterable[str]) -> str:
        """Why a prompt of these turns must not be trained on: `exact`, its words are those of one turn of a question, `near`, a
        share of a turn's shingles stands in one question, all its turns together, or a turn quotes one of a question's (of eight words or
        more) from end to end; "" when it may."""
        if not self._asked:
            return ""
        for turn in turns:
            spelt = " ".join(words(turn))
            if spelt in self._asked:
                return "exact"
            own = shingles(turn)
            shared = Counter(number for shingle in own for number in self._where.get(shingle, ()))
            if own and max(shared.values(), default=0) / len(own) >= self._near:
                return "near"
            if any(asked in f" {spelt} " for number in shared for asked in self._turns[number]):
                return "near"
        return ""


def asked_texts(item: Any) -> list[str]:
    """The texts of an item that a question could be found in: its user turns, or all of a plain text."""
    if hasattr(item, "messages"):
        return [m["content"] for m in item.messages if m["role"] == "user" and isinstance(m.get("content"), str)]
    return list(item.turns) if hasattr(item, "turns") else [item.text] if hasattr(item, "text") else []


def rank(key_C: Keys, *, seed: int) -> Keys:
    """A place in the draw for every key: SplitMix64 (Steele, Lea, Flood 2014) of key and seed."""
    z = key_C.astype(np.uint64) + np.uint64(key64(f"draw:{seed}".encode()))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return z ^ (z >> np.uint64(31))


def quotas(counts: Mapping[str, int], limit: int) -> dict[str, int]:
    """`limit` places shared out in the proportion of counts (largest remainders); all of it when there is less."""
    total = sum(counts.values())
    if limit >= total:
        return dict(counts)
    shares = {name: divmod(count * limit, total) for name, count in counts.items()}
    given = {name: whole for name, (whole, _) in shares.items()}
    for name in sorted(shares, key=lambda name: (-shares[name][1], name))[: limit - sum(given.values())]:
        given[name] += 1
    return given


def split_size(count: int, share: float) -> int:
    """How many of `count` are kept out at this share: what is left when floor(count * (1 - share)), in exact decimals, is trained on."""
    train = 1 - Fraction(str(share))
    return count - count * train.numerator // train.denominator


def clusters(conversation_R: Numbers, key_R: Keys, count: int) -> Numbers:
    """cluster_C: the smallest number among the conversations joined to this one by equal rows."""
    order = np.argsort(key_R, kind="stable")
    equal = np.flatnonzero(key_R[order][1:] == key_R[order][:-1])
    if not len(equal):
        return np.arange(count)
    cluster = list(range(count))

    def root(c: int) -> int:
        while cluster[c] != c:
            cluster[c] = cluster[cluster[c]]
            c = cluster[c]
        return c

    for i in equal:
        a, b = sorted((root(int(conversation_R[order[i]])), root(int(conversation_R[order[i + 1]]))))
        cluster[b] = a
    return np.fromiter((root(c) for c in range(count)), np.int64, count)


def choose(
    conversation_R: Numbers, key_R: Keys, key_C: Keys, domain_C: Numbers, prompt_C: Numbers, *, max_rows: int | None, validation: float,
    per_domain: int, prompt_tokens: int | None, seed: int,
) -> npt.NDArray[np.uint8]:  # fmt: skip
    """part_R of rows that stand in the order of their conversations.

    Conversations are ranked by hash. `per_domain` of each domain, with a prompt of at most `prompt_tokens`, are kept out; of the
    others `max_rows` rows are drawn, every domain in its share; of the conversations drawn the share `validation` is kept out.
    Conversations that share a row always stand on one side.
    """
    cluster_C = clusters(conversation_R, key_R, len(key_C))
    place_C = np.full(len(key_C), np.iinfo(np.uint64).max, dtype=np.uint64)
    np.minimum.at(place_C, cluster_C, rank(key_C, seed=seed))
    order_C = np.lexsort((np.arange(len(key_C)), cluster_C, place_C[cluster_C]))
    out_C = np.zeros(len(key_C), dtype=bool)
    for domain in np.unique(domain_C) if per_domain else ():
        fits = (domain_C[order_C] == domain) & ((prompt_C[order_C] <= prompt_tokens) if prompt_tokens else True)
        out_C[order_C[fits][:per_domain]] = True
    out_C = np.isin(cluster_C, cluster_C[out_C])
    rows_C = np.bincount(conversation_R, minlength=len(key_C))
    taken_C = np.where(out_C, 0, _draw(order_C[~out_C[order_C]], rows_C, domain_C, max_rows))
    drawn_C = order_C[taken_C[order_C] > 0]
    size = split_size(len(drawn_C), validation)
    while 0 < size < len(drawn_C) and cluster_C[drawn_C[size - 1]] == cluster_C[drawn_C[size]]:
        size -= 1
    out_C[drawn_C[:size]] = True
    taken_C[out_C & (taken_C == 0)] = rows_C[out_C & (taken_C == 0)]
    first_C = np.searchsorted(conversation_R, np.arange(len(key_C)))
    inside_R = np.arange(len(conversation_R)) - first_C[conversation_R] < taken_C[conversation_R]
    return np.where(inside_R, np.where(out_C[conversation_R], VALIDATION, TRAIN), UNUSED).astype(np.uint8)


def _draw(order: Numbers, rows_C: Numbers, domain_C: Numbers, max_rows: int | None) -> Numbers:
    """Rows taken of every conversation, in `order` until each domain has its quota; the last one may be cut."""
    taken_C = np.zeros(len(rows_C), dtype=np.int64)
    if max_rows is None:
        taken_C[order] = rows_C[order]
        return taken_C
    names = {str(d): int(rows_C[order][domain_C[order] == d].sum()) for d in np.unique(domain_C[order])}
    for name, quota in quotas(names, max_rows).items():
        mine = order[domain_C[order] == int(name)]
        before = np.cumsum(rows_C[mine]) - rows_C[mine]
        taken_C[mine] = np.clip(quota - before, 0, rows_C[mine])
    return taken_C
