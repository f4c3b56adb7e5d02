"""How much to draft at which batch: by measured survival and costs, in the words of engines and of this generator; advice in sentences.

vLLM 0.32 reads `num_speculative_tokens_per_batch_size`: [first batch, last batch, drafts], from 1 on, the last range holding beyond its
end. SGLang 0.5.23 reads a file of `--speculative-adaptive-config`: from each batch on, the depths among which it chooses by what is
accepted; 0 drafts nothing.
"""

import json
import os
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from spectrain.decoding.policies import Adaptive
from spectrain.yields import Costs

SLACK = 0.05  # a policy may be slower than the better of drafting always and never by this share
PRIOR_ROUNDS = 24.0  # of the measured acceptance: a few unlucky rounds do not end the drafting
PROBE_AFTER = 32  # rounds without a draft: where none pays, trying again costs
VLLM_TABLE = "num_speculative_tokens_per_batch_size"


def depths_by_batch(conditional: Sequence[float], share: float, costs: Costs, batches: Sequence[int]) -> dict[int, tuple[int, float]]:
    """The chain depth with the highest predicted speed-up at each batch, and that speed-up; (0, 1.0) where none gains.

    conditional: chance by depth that a draft is accepted, given the one above and that there is one; share: of the rounds in which a row
    drafts. A round in which no row does costs what plain decoding does, any other one pass over the full depth of every row.
    """
    found: dict[int, tuple[int, float]] = {}
    for batch in batches:
        some, tau, gains = 1 - (1 - share) ** batch, 1.0, {0: 1.0}
        for depth, survival in enumerate(accumulate(conditional, mul), 1):
            tau += share * survival
            gains[depth] = tau / (1 - some + some * costs.break_even(depth, depth, batch))
        found[batch] = max(gains.items(), key=lambda gain: (gain[1], -gain[0]))
    return found


def ranges(depths: Mapping[int, int]) -> list[list[int]]:
    """[first batch, last batch, depth] from batch 1 on; between two measured batches that of the larger one, where drafting pays less."""
    found: list[list[int]] = []
    start = 1
    for batch in sorted(depths):
        if found and found[-1][2] == depths[batch]:
            found[-1][1] = batch
        else:
            found.append([start, batch, depths[batch]])
        start = batch + 1
    return found


def for_engines(depths: Mapping[int, int], conditional: Sequence[float], share: float, costs: Costs) -> dict[str, Any]:
    """The policy as vLLM, SGLang and this generator read it; vLLM's and SGLang's are None where nothing is ever drafted.

    depths: of each measured batch. conditional, share: of the drafts in calibration, by depth given the depth above, and of the rounds
    in which a row drafted at all; this generator's own policy starts from them.
    """
    table, most = ranges(depths), max(depths.values(), default=0)
    own = {
        "kind": "marginal", "prior": [min(max(chance, 0.01), 0.99) for chance in conditional], "prior_rounds": PRIOR_ROUNDS,
        "prior_share": max(share, 0.01), "probe_after": PROBE_AFTER, "depth": most,
    }  # fmt: skip
    found: dict[str, Any] = {"vllm": None, "sglang": None, "spectrain": {**own, "costs": costs_as_dict(costs)}}
    if most:
        found["vllm"] = {"num_speculative_tokens": most, VLLM_TABLE: table}
        found["sglang"] = {str(first): {"candidate_steps": sorted({depth, (depth + 1) // 2})} for first, _, depth in table}
    return found


def costs_as_dict(costs: Costs) -> dict[str, Any]:
    """Costs as JSON keeps them; `Costs(**found)` reads them back."""
    return {name: value for name, value in vars(costs).items() if value is not None}


def own_policy(settings: Mapping[str, Any]) -> Adaptive:
    """The policy of `for_engines`' entry `spectrain`."""
    known = {name: value for name, value in settings.items() if name not in ("costs", "depth")}
    return Adaptive(**known, costs=Costs(**settings["costs"]))


def load_policy(path: str | os.PathLike[str], drafter: str | None = None) -> Adaptive:
    """The policy of a `bench.json` (or of the folder that `spectrain bench` wrote), or of a table by batch, for `generate(policy=…)`.

    A table is a JSON object of drafts by batch, such as {"1": 5, "8": 3, "32": 0}, or one with vLLM's
    `num_speculative_tokens_per_batch_size`. drafter: its name in a bench.json, where there are several. ValueError for a file that is
    none of these, or without such a drafter.
    """
    file = Path(path) / "bench.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ValueError(f"no file {file}; `spectrain bench --out FOLDER` writes FOLDER/bench.json")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if (table := _table(content)) is not None:
            return Adaptive("table", drafts=table)
        found = content["drafters"]
        name = next(iter(found)) if drafter is None and len(found) == 1 else drafter
        if name not in found:
            raise ValueError(f"{file} has policies of {', '.join(found)}, asked for {name!r}; name one of them")
        return own_policy(found[name]["policy"]["spectrain"])
    except (KeyError, TypeError, IndexError, json.JSONDecodeError) as error:
        found = f"{file} is no whole bench.json and no table by batch ({type(error).__name__}: {error})"
        raise ValueError(f"{found}; make it anew with spectrain bench") from error


def _table(content: Any) -> dict[int, int] | None:
    """Drafts by batch, where a file holds no more than these."""
    if not isinstance(content, Mapping):
        return None
    if VLLM_TABLE in content:
        return {entry[1]: entry[2] for entry in content[VLLM_TABLE]}
    return {int(rows): drafts for rows, drafts in content.items()} if content and all(rows.isdecimal() for rows in content) else None


def verified(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whether no policy was slower anywhere than the better of plain and always drafting by more than `SLACK`, and where it was.

    rows: tokens a second of a batch by arm: `plain`, `speculative`, and the policies `table` and `adaptive`.
    """
    found = []
    for row in rows:
        better = max(row["plain"], row["speculative"])
        for arm in ("table", "adaptive"):
            found.append({"batch": row["batch"], "policy": arm, "ratio": row[arm] / better, "met": row[arm] >= (1 - SLACK) * better})
    return {"slack": SLACK, "met": all(entry["met"] for entry in found), "rows": found}


def flips_at(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The first measured batch from which on drafting always no longer pays; None where it still pays at the largest."""
    losing: int | None = None
    for row in rows:
        losing = None if row["speedup"] > 1 else losing or row["batch"]
    return losing


def advice_by_service(speed: Mapping[str, Mapping[str, Any]], batch: Mapping[str, Any] | None = None) -> list[str]:
    """A sentence for each level of service: latency of one answer, tokens a second of a full batch, and the region between.

    speed: cells of timed prompts over all domains by arm (`report["speed"][arm]["all"]`), plain decoding's first; batch: the content of
    bench.json, None where batches were not measured.
    """
    told = _latency(speed)
    if batch is None:
        return [*told, "Throughput: batches were not measured here; the command spectrain bench says from which batch on drafting loses."]
    for name, found in batch["drafters"].items():
        told += _throughput(name, found)
    return told


def _latency(speed: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if not speed:
        return []
    plain, *drafted = speed
    if not drafted or not speed[plain]["tokens_per_s"]:
        return []
    best = max(drafted, key=lambda arm: speed[arm]["speedup"])
    own, gain = 1000 / speed[plain]["tokens_per_s"], speed[best]["speedup"]
    if gain > 1:
        return [f"Latency (batch 1): {best} gives a token in {own / gain:.1f} ms instead of {own:.1f} ms ({gain:.2f}×)."]
    return [f"Latency (batch 1): decode plainly, {own:.1f} ms a token; speculation loses here: {best}, the best drafter, has {gain:.2f}×."]


def _throughput(name: str, found: Mapping[str, Any]) -> list[str]:
    rows, flip = found["rows"], found["flips_at"]
    last, pays = rows[-1], [row["batch"] for row in rows if row["k"]]
    told = f"Throughput (batch {last['batch']}): {last['plain']:.0f} tokens/s plainly, {last['speculative']:.0f} with {name}"
    told += "." if last["speedup"] > 1 else f"; speculation loses here: {last['speedup']:.2f}×, because {_reason(last)}."
    if not pays:
        return [told, f"Between: {name} pays at no batch that was measured; serve without it."]
    depths = ", ".join(f"{k} up to batch {end}" for _, end, k in ranges({row["batch"]: row["k"] for row in rows}) if k)
    always = "" if flip is None else f" Drafting {found['depth']} always loses from batch {flip} on."
    return [told, f"Between: with {name} draft {depths}{', then nothing' if max(pays) < last['batch'] else ''}.{always}"]


def _reason(row: Mapping[str, Any]) -> str:
    return f"a round costs {row['break_even']:.2f} rounds of plain decoding and commits {row['tau']:.2f} tokens a row"
