"""Run the arms of a comparison over the same prompts: tau in batches, speed one prompt at a time, exactness against plain decoding.

Every answer is a line of `records.jsonl`, written when it is done; a second call makes only what is missing, and every table can be
recomputed from the file. Several processes write a file each.
"""

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from spectrain.config import Suite
from spectrain.data.formats import Prompt, read_jsonl, read_prompts
from spectrain.data.rows import Row
from spectrain.decoding.audit import first_difference
from spectrain.decoding.drafter import Drafter
from spectrain.decoding.generate import generate, law_and_rule
from spectrain.decoding.rows import StepRecord
from spectrain.decoding.shapes import Shape
from spectrain.evaluation.processes import ALONE, Processes
from spectrain.target.model import Target


@dataclass(frozen=True)
class Arm:
    """One way to decode. `drafter=None` is plain decoding."""

    name: str
    drafter: Drafter | None = None
    shape: Shape | None = None
    label: str = "none"

    def describe(self, temperature: float = 0.0) -> dict[str, Any]:
        """What a report says of it; law and rule are those that `auto` stands for at this temperature."""
        s = self.shape
        law, rule = "none", "greedy" if temperature == 0 else "none"
        if s is not None:
            law, rule = law_and_rule("auto", s, temperature=temperature, drafter=self.drafter)
        return {
            "name": self.name, "drafter": self.label, "shape": str(s) if s else "–", "depth": s.depth if s else 0,
            "width": s.width if s else 1, "budget": s.budget if s else 0, "rule": rule, "law": law,
        }  # fmt: skip


@dataclass(frozen=True)
class Draws:
    """How answers are drawn: greedily at temperature 0, else by a seed for each prompt, made from `seed` and the prompt's id."""

    temperature: float = 0.0
    seed: int = 0

    def of(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """The arguments of `generate`; the same prompt has the same seed in every arm, batch and mode."""
        if self.temperature == 0:
            return {}
        return {"temperature": self.temperature, "seed": [self.seed_of(p) for p in prompts]}

    def seed_of(self, prompt: Prompt) -> int:
        digest = hashlib.sha256(f"{self.seed}:{prompt.id}".encode()).digest()
        return int.from_bytes(digest[:6], "big")


GREEDY = Draws()


@dataclass(frozen=True)
class Record:
    """One answer: `mode` is "tau" (batched) or "speed" (alone). seconds: whole call; decode_seconds: without the prompt's pass."""

    arm: str
    mode: str
    id: str
    domain: str
    tokens: list[int]
    seconds: float
    decode_seconds: float
    rounds: list[StepRecord] = field(default_factory=list)


class Records:
    """`records.jsonl`: what has been measured under one key (hash of all that the figures depend on).

    Of several processes each writes a file of its own (`records-1.jsonl`, …); all of them are read, whatever number there is now. `found`
    is the same for every process to begin with and after each `exchange`.
    """

    def __init__(self, path: Path, key: str, processes: Processes = ALONE) -> None:
        self._key, self.processes = key, processes
        self._path = path if processes.leads else path.with_stem(f"{path.stem}-{processes.index}")
        self._fresh: list[dict[str, Any]] = []
        self.found: dict[tuple[str, str, str], Record] = {}
        self.found = processes.on_main(lambda: self._read(path))

    def _read(self, path: Path) -> dict[tuple[str, str, str], Record]:
        others = path.parent.glob(f"{path.stem}-[0-9]*{path.suffix}")
        for file in [*([path] if path.exists() else []), *sorted(others)]:
            content = file.read_bytes()
            if not content.endswith(b"\n"):  # the last write was cut short
                os.truncate(file, content.rfind(b"\n") + 1)
            for _, row in read_jsonl(file):
                if row.pop("key") == self._key:
                    self._keep(row)
        return self.found

    def _keep(self, row: Mapping[str, Any]) -> None:
        record = Record(**{**row, "rounds": [StepRecord(*r) for r in row["rounds"]]})
        self.found[record.arm, record.mode, record.id] = record

    def add(self, records: Sequence[Record]) -> None:
        """Write them (where all make the same passes, only the main process does)."""
        rows = [{**asdict(record), "rounds": [_row_of(r) for r in record.rounds]} for record in records]
        if self.processes.leads or self.processes.splits:
            self._write(rows)
        for row in rows:
            self._keep(row)  # as it was written, so that tables from the file are the same
        self._fresh += rows

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"key": self._key, **row}) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())

    def exchange(self) -> None:
        """Learn what the other processes have added; where all made the same passes, the main one's answers are everyone's."""
        for row in self.processes.gathered(self._fresh):
            self._keep(row)
        self._fresh = []

    def of(self, arm: str, mode: str, prompts: Sequence[Prompt]) -> list[Record]:
        """Records of these prompts, in their order."""
        return [self.found[arm, mode, p.id] for p in prompts]


def _row_of(r: StepRecord) -> list[Any]:
    return [r.drafted, r.accepted, r.committed, {phase: round(s, 6) for phase, s in r.seconds.items()}, r.depth, r.nodes]


def suite_prompts(suite: Suite, target: Target, root: Path) -> dict[str, list[Prompt]]:
    """The suite's prompts by domain: first turns that fit, chosen by a hash of id and seed.

    ValueError if a domain has no file or too few, or if two prompts have one id: records are found by it.
    """
    chosen: dict[str, list[Prompt]] = {}
    for domain, number in suite.prompts.items():
        file = root / suite.folder / f"{domain}.jsonl"
        if not file.is_file():
            found = f"suite {suite.name} names the domain {domain}, and there is no {file}"
            raise ValueError(f"{found}; its folder {suite.folder} is looked for in {root}, two folders above that of the suite")
        fits = [p for p in read_prompts(file) if len(target.encode(p.chat)) <= suite.max_prompt_tokens]
        if len(fits) < suite.skip + number:
            after = f" after the first {suite.skip}" if suite.skip else ""
            raise ValueError(
                f"suite {suite.name} wants {number} {domain} prompts{after} of at most {suite.max_prompt_tokens} tokens, {len(fits)} fit"
            )
        ordered = sorted(fits, key=lambda p: hashlib.sha256(f"{suite.seed}:{p.id}".encode()).digest())
        chosen[domain] = ordered[suite.skip : suite.skip + number]
    numbers = Counter(p.id for rows in chosen.values() for p in rows)
    if twice := sorted(str(i) for i, number in numbers.items() if number > 1):
        raise ValueError(f"suite {suite.name}: several prompts have the id {', '.join(twice[:5])}; give each prompt an id of its own")
    return chosen


def speed_subset(prompts: dict[str, list[Prompt]], target: Target, *, number: int, max_tokens: int) -> dict[str, list[Prompt]]:
    """Of each domain the first `number` prompts of at most `max_tokens` tokens, or its shortest one when none is that short."""
    lengths = {p.id: len(target.encode(p.chat)) for rows in prompts.values() for p in rows}
    fits = {domain: [p for p in rows if lengths[p.id] <= max_tokens][:number] for domain, rows in prompts.items()}
    return {domain: rows or [min(prompts[domain], key=lambda p: lengths[p.id])] for domain, rows in fits.items()}


def measure_tau(
    target: Target, arm: Arm, prompts: Sequence[Prompt], records: Records, *, max_new_tokens: int, batch_size: int, draws: Draws = GREEDY
) -> None:
    """Answer the prompts in batches of similar length; adds what is missing to the records. Several processes share the prompts."""
    missing = sorted((p for p in prompts if (arm.name, "tau", p.id) not in records.found), key=lambda p: len(p.turns[0]))
    todo, quiet = records.processes.share(missing), None if records.processes.leads else True
    with tqdm(total=len(todo), desc=f"tau: {arm.name}", unit="prompt", disable=quiet) as bar:
        for start in range(0, len(todo), batch_size):
            batch = todo[start : start + batch_size]
            result = generate(
                target, [p.chat for p in batch], drafter=arm.drafter, shape=arm.shape, max_new_tokens=max_new_tokens, **draws.of(batch)
            )
            share = result.seconds / len(batch)
            records.add(
                [Record(arm.name, "tau", p.id, p.domain, r.tokens, share, share, r.rounds) for p, r in zip(batch, result.rows, strict=True)]
            )
            bar.update(len(batch))
    records.exchange()


def measure_speed(
    target: Target, arms: Sequence[Arm], prompts: Sequence[Prompt], records: Records, *, max_new_tokens: int, baseline: bool,
    compile: bool | Literal["auto"] = "auto", draws: Draws = GREEDY,
) -> None:  # fmt: skip
    """Time the arms one prompt at a time, interleaved prompt by prompt in rotating order, after a warm-up outside the clock.

    baseline: also time `generate()` of transformers on the same prompts (the arm "transformers"). compile: for every arm of ours. Of
    several processes the main one times while the others wait (where the target is sharded they make the same passes).
    """
    names = [arm.name for arm in arms] + (["transformers"] if baseline else [])
    todo = [(p, n) for p in prompts for n in names if (n, "speed", p.id) not in records.found]
    if not todo:
        return
    by_name = {arm.name: arm for arm in arms}

    def run(name: str, prompt: Prompt, tokens: int) -> Record:
        if name == "transformers":
            return _with_transformers(target, prompt, tokens, draws)
        arm, how = by_name[name], draws.of([prompt])
        result = generate(target, [prompt.chat], drafter=arm.drafter, shape=arm.shape, max_new_tokens=tokens, compile=compile, **how)
        row = result.rows[0]
        return Record(name, "speed", prompt.id, prompt.domain, row.tokens, result.seconds, result.seconds - row.prefill_seconds, row.rounds)

    def run_all() -> None:
        for name in names:
            run(name, prompts[0], 8)
        with tqdm(total=len(todo), desc="speed", unit="run", disable=None if records.processes.leads else True) as bar:
            for i, prompt in enumerate(prompts):
                for name in names[i % len(names) :] + names[: i % len(names)]:
                    if (name, "speed", prompt.id) not in records.found:
                        records.add([run(name, prompt, max_new_tokens)])
                        bar.update()

    records.processes.alike(run_all)
    records.exchange()


def _with_transformers(target: Target, prompt: Prompt, max_new_tokens: int, draws: Draws) -> Record:
    """An answer by transformers' own `generate()` with its default attention: at temperature 0 the same one."""
    how: dict[str, Any] = {"do_sample": False}
    if draws.temperature:
        how = {"do_sample": True, "temperature": draws.temperature, "top_k": 0, "top_p": 1.0}
    ids_1L = torch.tensor([target.encode(prompt.chat)], device=target.device)
    ours = target.model.config._attn_implementation
    target.model.set_attn_implementation("sdpa")
    devices = [target.device] if target.device.type == "cuda" else []
    try:
        # It draws from the global generator; gathered weights want the mode, and others are timed as everybody calls it.
        with torch.random.fork_rng(devices=devices), torch.inference_mode(target.placement.gathers):
            torch.manual_seed(draws.seed_of(prompt))
            begin = time.perf_counter()
            out = target.model.generate(ids_1L, attention_mask=torch.ones_like(ids_1L), max_new_tokens=max_new_tokens, **how)
            tokens = out[0, ids_1L.shape[1] :].tolist()
            seconds = time.perf_counter() - begin
    finally:
        target.model.set_attn_implementation(ours)
    return Record("transformers", "speed", prompt.id, prompt.domain, tokens, seconds, seconds)


@dataclass
class Exactness:
    """How an arm's answers compare with plain decoding's. failed: ids of prompts that differ by more than rounding."""

    prompts: int = 0
    equal: int = 0
    ties: int = 0
    failed: list[str] = field(default_factory=list)


def compare(target: Target, records: Sequence[Record], plain: Sequence[Record], prompts: Sequence[Prompt]) -> Exactness:
    """Classify each answer: equal to plain decoding, a numeric tie at the first difference, or a failure.

    An answer that only ends earlier or later is a failure: rounding changes a token, never the end alone.
    """
    found = Exactness()
    for record, reference, prompt in zip(records, plain, prompts, strict=True):
        found.prompts += 1
        if record.tokens == reference.tokens:
            found.equal += 1
            continue
        difference = first_difference(target, target.encode(prompt.chat), record.tokens, reference.tokens)
        if difference is not None and difference.kind == "tie":
            found.ties += 1
        else:
            found.failed.append(prompt.id)
    return found


@dataclass(frozen=True)
class Acceptance:
    """What rounds committed. by_domain: (committed tokens, rounds) of each domain. steps: (drafted, accepted) of each round, if known."""

    by_domain: dict[str, tuple[int, int]]
    steps: list[tuple[int, int]] = field(default_factory=list)

    @property
    def taus(self) -> dict[str, float]:
        """tau of each domain that had a round."""
        return {domain: tokens / rounds for domain, (tokens, rounds) in self.by_domain.items() if rounds}

    @property
    def tau(self) -> float:
        """Macro over domains; 0 without a round."""
        return sum(self.taus.values()) / max(1, len(self.taus))

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.by_domain.values())

    @property
    def rounds(self) -> int:
        return sum(rounds for _, rounds in self.by_domain.values())


def measured_acceptance(target: Target, rows: Sequence[Row], drafter: Drafter, shape: Shape, *, max_new_tokens: int) -> Acceptance:
    """Answer the prompts of these rows greedily in one batch, and count what the rounds commit."""
    result = generate(target, [row.prompt_ids for row in rows], drafter=drafter, shape=shape, max_new_tokens=max_new_tokens)
    sums = {row.domain: (0, 0) for row in rows}
    for row, found in zip(rows, result.rows, strict=True):
        tokens, rounds = sums[row.domain]
        sums[row.domain] = tokens + sum(r.committed for r in found.rounds), rounds + len(found.rounds)
    return Acceptance(sums, [(r.drafted, r.accepted) for found in result.rows for r in found.rounds])
