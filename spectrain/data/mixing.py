"""Mixing domains by weight: how many rows of each an epoch draws, and which.

Each domain has one fixed shuffled ring of its rows; every epoch goes on along it where the one before stopped. So within an epoch two
rows of a domain never differ by more than one draw, and over the epochs all come up equally often.

Legend: N rows, D domains.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def shuffled(num: int, *key: object) -> Ints:
    """A permutation of 0 ... num - 1 that depends on the key alone (numpy keeps the raw bits of a generator the same for ever)."""
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:16], "little")
    return np.argsort(np.random.PCG64(seed).random_raw(num), kind="stable")


def shares(rows: Mapping[str, int], weights: Mapping[str, float] | None, total: int | None) -> dict[str, int]:
    """Rows that an epoch draws of each domain: `total` (default: as many as there are) split by weight, by the largest remainder.

    rows: number of rows by domain; without weights they are the weights. A domain with a weight above 0 gets at least one row.
    Raises ValueError that names the domains without a weight, the weights without a domain, or says that all are 0.
    """
    total = total or sum(rows.values())
    if weights is None:
        weights = rows
    missing, unknown = sorted(rows.keys() - weights.keys()), sorted(weights.keys() - rows.keys())
    if missing or unknown:
        there = f"the rows' domains are {', '.join(sorted(rows))}"
        faults = [*(["no weight for " + ", ".join(missing)] if missing else []), *(["no rows of " + ", ".join(unknown)] if unknown else [])]
        raise ValueError(f"training.domain_weights: {'; '.join(faults)}; {there}; give each a weight (0 leaves one out)")
    whole = sum(weights.values())
    if not math.isfinite(whole):
        raise ValueError(f"training.domain_weights adds up to {whole} ({', '.join(sorted(rows))}); needed finite shares (0.7, 0.3)")
    if not whole > 0:
        raise ValueError(f"training.domain_weights gives every domain 0 ({', '.join(sorted(rows))}); needed one above 0")
    exact = {d: total * weights[d] / whole for d in sorted(rows)}
    given = {d: int(x) for d, x in exact.items()}
    by_rest = sorted(exact, key=lambda d: given[d] - exact[d])  # the sort is stable: ties in order of name
    for d in by_rest[: total - sum(given.values())]:
        given[d] += 1
    return {d: max(n, 1) if weights[d] > 0 else 0 for d, n in given.items()}


def draw(domain_N: Ints, domains: Sequence[str], quota: Mapping[str, int], *, seed: int, epoch: int) -> Ints:
    """Row numbers of an epoch, domain after domain. domain_N: each row's place in `domains`; -1 is never drawn."""
    order_N = np.argsort(domain_N, kind="stable")
    first_D = np.searchsorted(domain_N[order_N], np.arange(len(domains) + 1))
    parts = []
    for d, name in enumerate(domains):
        own = order_N[first_D[d] : first_D[d + 1]]
        if n := quota.get(name, 0):
            ring = own[shuffled(len(own), seed, "domain", name)]
            parts.append(ring[(epoch * n + np.arange(n)) % len(ring)])
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
