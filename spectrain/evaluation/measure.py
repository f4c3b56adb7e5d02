"""Run the arms of a comparison over the same prompts: tau in batches, speed one prompt at a time, exactness against plain decoding.

Every answer is a line of `records.jsonl`, written when it is done; a second call makes only what is missing, and every table can be
recomputed from the file. Several processes write a file each.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tqdm import tqdm

from spectrain.data.formats import Prompt
from spectrain.data.rows import Row
from spectrain.decoding.audit import first_difference
from spectrain.decoding.drafter import Drafter
from spectrain.decoding.generate import generate, law_and_rule
from spectrain.decoding.shapes import Shape
from spectrain.evaluation.records import Record, Records
from spectrain.target.model import Target

PLAIN, BASELINE = "plain", "transformers"
THINK = ("<think>", "</think>")  # what reasoning models write around their thinking


@dataclass(frozen=True)
class Arm:
    """One way to decode: drafter, shape and temperature. `drafter=None` is plain decoding.

    label: the drafter's kind; by: its name, the same for all its arms; plain: the arm that this one is compared with.
    """

    name: str
    drafter: Drafter | None = None
    shape: Shape | None = None
    label: str = "none"
    temperature: float = 0.0
    plain: str = PLAIN
    by: str = "none"

    def describe(self) -> dict[str, Any]:
        """What a report says of it; law and rule are those that `auto` stands for."""
        s = self.shape
        law, rule = "none", "greedy" if self.temperature == 0 else "none"
        if s is not None:
            law, rule = law_and_rule("auto", s, temperature=self.temperature, drafter=self.drafter)
        return {
            "name": self.name, "drafter": self.label, "by": self.by, "shape": str(s) if s else "–", "depth": s.depth if s else 0,
            "width": s.width if s else 1, "budget": s.budget if s else 0, "rule": rule, "law": law, "temperature": self.temperature,
            "plain": self.plain,
        }  # fmt: skip


@dataclass(frozen=True)
class Draws:
    """How answers are drawn: greedily at temperature 0, else by a seed for each prompt and turn, made from `seed` and the prompt's id."""

    temperature: float = 0.0
    seed: int = 0

    def of(self, prompts: Sequence[Prompt], turn: int = 0) -> dict[str, Any]:
        """The arguments of `generate`; the same prompt has the same seed in every arm, batch and mode."""
        if self.temperature == 0:
            return {}
        return {"temperature": self.temperature, "seed": [self.seed_of(p, turn) for p in prompts]}

    def seed_of(self, prompt: Prompt, turn: int = 0) -> int:
        text = f"{self.seed}:{prompt.id}" + (f":{turn}" if turn else "")
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


GREEDY = Draws()


def context_of(
    target: Target, prompt: Prompt, answers: Sequence[Sequence[int]] = (), template: Mapping[str, Any] | None = None
) -> list[int]:
    """Ids of a prompt's turn after `answers` to the turns before it. template: switches of the chat template."""
    said: list[dict[str, Any]] = []
    for asked, tokens in zip(prompt.turns, answers, strict=False):
        text = target.tokenizer.decode(list(tokens), skip_special_tokens=True)
        said += [{"role": "user", "content": asked}, {"role": "assistant", "content": text}]
    said.append({"role": "user", "content": prompt.turns[len(answers)]})
    return target.encode(said, **(template or {}))


def think_tokens(tokenizer: Any, prompt_ids: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens of an answer are thinking, its end included; 0 for a model that does not mark it, or has not begun to think."""
    begin, end = (tokenizer.convert_tokens_to_ids(word) for word in THINK)
    if end is None or end == tokenizer.unk_token_id:
        return 0
    if end in tokens:
        return tokens.index(end) + 1
    opened = begin in tokens or begin in list(prompt_ids)[-3:]  # a template that has the answer begin with it
    return len(tokens) if opened else 0


def measure_tau(
    target: Target, arm: Arm, prompts: Sequence[Prompt], records: Records, *, max_new_tokens: int, batch_size: int, draws: Draws = GREEDY,
    template: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Answer the prompts in batches of similar length, turn by turn; adds what is missing to the records. Several processes share them.

    Later turns are asked after the answers that the arm `arm.plain` gave to those before, so that arms answer the same; a turn that no
    longer fits into the target is left out for every arm.
    """
    total, quiet = Counter(p.domain for p in prompts), None if records.processes.leads else True
    for turn in range(max((len(p.turns) for p in prompts), default=0)):
        asked = []
        for p in prompts:
            if len(p.turns) <= turn or records.has(arm.name, "tau", p.id, turn):
                continue
            if turn and not records.has(arm.plain, "tau", p.id, turn - 1):
                continue
            before = [r.tokens for r in records.of(arm.plain, "tau", [p])[:turn]] if turn else []
            ids = context_of(target, p, before, template)
            if not turn or len(ids) + max_new_tokens <= target.max_length:
                asked.append((p, ids))
        asked.sort(key=lambda pair: len(pair[1]))
        todo, done = records.processes.share(asked), total - Counter(p.domain for p, _ in asked)
        with tqdm(total=len(todo), desc=f"tau: {arm.name}" + (f", turn {turn + 1}" if turn else ""), unit="prompt", disable=quiet) as bar:
            for start in range(0, len(todo), batch_size):
                batch = todo[start : start + batch_size]
                how = draws.of([p for p, _ in batch], turn)
                result = generate(
                    target, [ids for _, ids in batch], drafter=arm.drafter, shape=arm.shape, max_new_tokens=max_new_tokens, **how
                )
                records.add(_records_of(target, arm, turn, batch, result))
                now = Counter(p.domain for p, _ in batch)
                done += now
                bar.set_postfix_str(", ".join(f"{domain} {done[domain]}/{total[domain]}" for domain in now), refresh=False)
                bar.update(len(batch))
        records.exchange()


def _records_of(target: Target, arm: Arm, turn: int, batch: Sequence[tuple[Prompt, list[int]]], result: Any) -> list[Record]:
    share = result.seconds / len(batch)
    return [
        Record(
            arm.name, "tau", p.id, p.domain, r.tokens, share, share, r.rounds, turn=turn, prompt_tokens=len(ids),
            think_tokens=think_tokens(target.tokenizer, ids, r.tokens), passes=result.mode,
        )
        for (p, ids), r in zip(batch, result.rows, strict=True)
    ]  # fmt: skip


def measure_speed(
    target: Target, arms: Sequence[Arm], prompts: Sequence[Prompt], records: Records, *, max_new_tokens: int, baseline: bool,
    compile: bool | Literal["auto"] = "auto", draws: Draws = GREEDY, repeats: int = 1, template: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Time the arms one prompt at a time, interleaved prompt by prompt in rotating order, after a warm-up outside the clock.

    baseline: also time `generate()` of transformers on the same prompts (the arm "transformers"). compile: for every arm of ours.
    repeats: so often all arms go over a prompt (A B A B …). Only first turns are timed. Of several processes the main one times while the
    others wait (where the target is sharded they make the same passes).
    """
    names = [arm.name for arm in arms] + ([BASELINE] if baseline else [])
    runs = [
        (p, n, repeat)
        for i, p in enumerate(prompts)
        for repeat in range(repeats)
        for n in names[i % len(names) :] + names[: i % len(names)]
    ]
    todo = [(p, n, repeat) for p, n, repeat in runs if not records.has(n, "speed", p.id, 0, repeat)]
    if not todo:
        return
    by_name = {arm.name: arm for arm in arms}

    def run(name: str, prompt: Prompt, tokens: int, repeat: int = 0) -> Record:
        ids = context_of(target, prompt, template=template)
        if name == BASELINE:
            return _with_transformers(target, prompt, ids, tokens, draws, repeat)
        arm, how = by_name[name], draws.of([prompt])
        result = generate(target, [ids], drafter=arm.drafter, shape=arm.shape, max_new_tokens=tokens, compile=compile, **how)
        row, seconds = result.rows[0], result.seconds
        return Record(
            name, "speed", prompt.id, prompt.domain, row.tokens, seconds, seconds - row.prefill_seconds, row.rounds, repeat=repeat,
            prompt_tokens=len(ids), think_tokens=think_tokens(target.tokenizer, ids, row.tokens), passes=result.mode,
        )  # fmt: skip

    def run_all() -> None:
        begin = time.perf_counter()
        for name in names:
            run(name, prompts[0], 8)
        records.warm_up += time.perf_counter() - begin
        with tqdm(total=len(todo), desc="speed", unit="run", disable=None if records.processes.leads else True) as bar:
            for prompt, name, repeat in todo:
                bar.set_postfix_str(prompt.domain, refresh=False)
                records.add([run(name, prompt, max_new_tokens, repeat)])
                bar.update()

    records.processes.alike(run_all)
    records.exchange()


def _with_transformers(target: Target, prompt: Prompt, ids: Sequence[int], max_new_tokens: int, draws: Draws, repeat: int) -> Record:
    """An answer by transformers' own `generate()` with its default attention: at temperature 0 the same one."""
    how: dict[str, Any] = {"do_sample": False}
    if draws.temperature:
        how = {"do_sample": True, "temperature": draws.temperature, "top_k": 0, "top_p": 1.0}
    ids_1L = torch.tensor([list(ids)], device=target.device)
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
    return Record(BASELINE, "speed", prompt.id, prompt.domain, tokens, seconds, seconds, repeat=repeat, prompt_tokens=len(ids))


@dataclass
class Exactness:
    """How an arm's answers compare with plain decoding's. failed: ids of prompts that differ by more than rounding."""

    prompts: int = 0
    equal: int = 0
    ties: int = 0
    failed: list[str] = field(default_factory=list)


def compare(
    target: Target, records: Sequence[Record], plain: Sequence[Record], prompts: Sequence[Prompt], template: Mapping[str, Any] | None = None
) -> Exactness:
    """Classify each answer: equal to plain decoding, a numeric tie at the first difference, or a failure.

    An answer that only ends earlier or later is a failure: rounding changes a token, never the end alone. template: of the chats.
    """
    found, asked = Exactness(), {p.id: p for p in prompts}
    said = {(r.id, r.turn): r.tokens for r in plain}
    for record, reference in zip(records, plain, strict=True):
        found.prompts += 1
        if record.tokens == reference.tokens:
            found.equal += 1
            continue
        ids = context_of(target, asked[record.id], [said[record.id, turn] for turn in range(record.turn)], template)
        difference = first_difference(target, ids, record.tokens, reference.tokens)
        if difference is not None and difference.kind == "tie":
            found.ties += 1
        else:
            found.failed.append(record.id)
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
