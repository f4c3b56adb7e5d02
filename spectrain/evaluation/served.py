"""Acceptance in a running engine: its Prometheus counters before and after each domain, beside our own measurement of the same prompts.

Everything is counted by the engine's rule. vLLM (v1/spec_decode/metrics.py of 0.32): a round is a row's pass over at least one draft, and
its drafts are accepted before a stop cuts the answer. SGLang (srt/observability/metrics_collector.py of 0.5): rounds and tokens of the
finished answers, so only tokens that were kept are known, and none by position.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import httpx2

from spectrain.data.answers import Answer, AnswerFile, Dialogue
from spectrain.data.endpoint import Endpoint, answer_through
from spectrain.data.formats import Message, Prompt
from spectrain.data.questions import Question
from spectrain.decoding.drafter import Drafter
from spectrain.decoding.generate import generate
from spectrain.decoding.rows import StepRecord
from spectrain.decoding.shapes import Chain
from spectrain.evaluation.measure import Draws
from spectrain.evaluation.metrics import acceptance
from spectrain.target.model import Target

ALL = "all"
PATIENCE = 5.0  # seconds that counters may lag behind the answers
START = "process_start_time_seconds"
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Engine:
    """What an engine calls its counters, and the option that it needs for them; "" where it has no such counter."""

    name: str
    option: str
    rounds: str
    tokens: str
    requests: str
    drafted: str = ""
    accepted: str = ""
    positions: str = ""

    @property
    def rule(self) -> str:
        """Which tokens count."""
        return "accepted before stops" if self.accepted else "kept after stops"


ENGINES = {
    "vllm": Engine(
        "vllm", "--speculative-config", rounds="vllm:spec_decode_num_drafts_total", tokens="vllm:generation_tokens_total",
        requests="vllm:request_success_total", drafted="vllm:spec_decode_num_draft_tokens_total",
        accepted="vllm:spec_decode_num_accepted_tokens_total", positions="vllm:spec_decode_num_accepted_tokens_per_pos_total",
    ),
    "sglang": Engine(
        "sglang", "--speculative-algorithm and --enable-metrics", rounds="sglang:spec_verify_calls_total",
        tokens="sglang:generation_tokens_total", requests="sglang:num_requests_total",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Counts:
    """rounds: passes over drafts; drafted, accepted: tokens in them; tokens, requests: of answers; positions: rounds whose first i drafts
    were accepted. Where an engine does not count accepted drafts they are the kept ones: tokens without each answer's first and without
    the target's own of each round."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    requests: int = 0
    positions: tuple[int, ...] = ()

    def since(self, before: "Counts") -> "Counts":
        """What was added; ValueError where a counter went back."""
        found = {f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self) if f.name != "positions"}
        if min(found.values()) < 0:
            raise ValueError("the engine's counters went back while it was asked: it was started anew; run the same command again")
        return Counts(**found, positions=tuple(a - b for a, b in zip(self.positions, before.positions, strict=True)))

    def __add__(self, other: "Counts") -> "Counts":
        found = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "positions"}
        width = max(len(self.positions), len(other.positions))
        padded = ((*c.positions, *[0] * (width - len(c.positions))) for c in (self, other))
        return Counts(**found, positions=tuple(a + b for a, b in zip(*padded, strict=True)))

    @property
    def tau(self) -> float:
        """Tokens a round, the target's own included."""
        return 1 + self.accepted / self.rounds if self.rounds else 0.0

    @property
    def shares(self) -> list[float]:
        """Acceptance by position, unconditional."""
        return [n / max(1, self.rounds) for n in self.positions]


def metrics_url(endpoint: Endpoint) -> str:
    """Where the engine of an endpoint has its counters: beside the API, not in it."""
    return f"{endpoint.base.removesuffix('/v1')}/metrics"


def read_metrics(endpoint: Endpoint) -> str:
    """The engine's counters in Prometheus' text format; ValueError where there are none to read."""
    url = metrics_url(endpoint)
    headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    try:
        response = httpx2.get(url, headers=headers, timeout=min(30.0, endpoint.timeout))
    except httpx2.RequestError as error:
        raise ValueError(f"no counters from {url} ({type(error).__name__} {error}); is the engine up?") from error
    if response.status_code != 200:
        raise ValueError(
            f"{url} answers {response.status_code}, and without the engine's counters nothing is known of its drafts; give the address of "
            "the engine itself rather than a gateway's (SGLang has counters when started with --enable-metrics)"
        )
    return response.text


def samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of each line of Prometheus' text format."""
    for line in text.splitlines():
        if found := _SAMPLE.match(line):
            yield found[1], dict(_LABEL.findall(found[2] or "")), float(found[3])


def counts_of(text: str, engine: Engine) -> Counts:
    """An engine's counters, summed over its workers; ValueError for another engine's, or for one that does not speculate."""
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for name, labels, value in samples(text):
        sums[name] = sums.get(name, 0.0) + value
        if name == engine.positions:
            positions[int(labels["position"])] = positions.get(int(labels["position"]), 0.0) + value
    if not any(name.startswith(f"{engine.name}:") for name in sums):
        other = next((e for e in ENGINES if any(name.startswith(f"{e}:") for name in sums)), "")
        way = f"they are those of {other}: give --engine {other}" if other else f"is this an address of {engine.name}?"
        raise ValueError(f"no counter here is {engine.name}'s; {way}")
    if engine.positions and engine.rounds not in sums:
        raise ValueError(f"this {engine.name} drafts nothing (it has no counter {engine.rounds}); start it with {engine.option}")
    keys = ("rounds", "tokens", "requests", "drafted", "accepted")
    told = {key: int(sums.get(name, 0)) for key in keys if (name := getattr(engine, key))}
    if not engine.accepted:
        told["accepted"] = max(0, told["tokens"] - told["requests"] - told["rounds"])
    return Counts(**told, positions=tuple(int(positions[i]) for i in sorted(positions)))


def start_of(text: str) -> str:
    """When the engine's process was started, "" where it does not say."""
    return next((repr(value) for name, _, value in samples(text) if name == START), "")


@dataclass(frozen=True)
class Asked:
    """One turn that was answered. chat: what it answers, the engine's own earlier answers included."""

    prompt: Prompt
    chat: list[Message]
    answer: Answer


@dataclass
class Answers:
    """What an engine said to a domain. seconds: from the first request to the last answer; refused: turns without an answer, by reason."""

    turns: list[Asked] = field(default_factory=list)
    seconds: float = 0.0
    refused: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(turn.answer.tokens for turn in self.turns)


def ask(prompts: Sequence[Prompt], endpoint: Endpoint, folder: Path, settings: Mapping[str, Any]) -> Answers:
    """Let an engine answer prompts turn by turn: all first turns, then all second ones after the engine's own answers, and so on.

    settings: as of `data.questions.settings_of`. The answers are kept in the folder, a file a turn; what stood there is replaced.
    """
    found, history = Answers(), {p.id: list[Message]() for p in prompts}
    for turn in range(max(len(p.turns) for p in prompts)):
        asked = [p for p in prompts if turn < len(p.turns) and p.id in history]
        dialogues = [
            Dialogue(Question(p.id, p.domain, (({"role": "user", "content": p.turns[turn]},),)), f"{p.id}:{turn}", settings, history[p.id])
            for p in asked
        ]
        path = folder / f"turn-{turn}.jsonl"
        path.unlink(missing_ok=True)
        with AnswerFile(path) as file:
            tally = answer_through(dialogues, endpoint, file, total=len(dialogues))
        found.seconds += tally.seconds
        for reason, number in tally.reasons.items():
            found.refused[reason] = found.refused.get(reason, 0) + number
        for prompt, dialogue in zip(asked, dialogues, strict=True):
            if dialogue.answers:
                found.turns.append(Asked(prompt, dialogue.messages[:-1], dialogue.answers[0]))
                history[prompt.id] = dialogue.messages
            else:
                del history[prompt.id]
    return found


def counts_after(endpoint: Endpoint, engine: Engine, before: Counts, answers: Answers) -> Counts:
    """What the answers added to the counters, as soon as they are all counted."""
    end = time.monotonic() + PATIENCE
    while True:
        found = counts_of(read_metrics(endpoint), engine).since(before)
        if (found.tokens >= answers.tokens and found.requests >= len(answers.turns)) or time.monotonic() > end:
            return found
        time.sleep(0.1)


@dataclass(frozen=True)
class Own:
    """Our own answers to the same turns. equal: of `answers`, those that are the engine's, token by token (of text where it tells no ids);
    longer: turns whose prompt the engine counts as other tokens than the target's template makes."""

    counts: Counts
    answers: int
    equal: int
    longer: int


def measure_own(
    target: Target, answers: Answers, drafter: Drafter, engine: Engine, *, depth: int, max_new_tokens: int, batch_size: int, draws: Draws,
    template: Mapping[str, Any],
) -> Own:  # fmt: skip
    """Answer the same turns here with a chain as deep as the engine's. template: switches of the chat template.

    Above temperature 0 the draft is a point mass, as both engines draft by default: the drafter's best token, never a draw.
    """
    prompts = [(target.encode(turn.chat, **template), turn) for turn in answers.turns]
    prompts.sort(key=lambda pair: len(pair[0]))
    rounds: list[StepRecord] = []
    tokens = equal = longer = 0
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        result = generate(
            target, [ids for ids, _ in batch], drafter=drafter, shape=Chain(depth, law="point_mass"), max_new_tokens=max_new_tokens,
            **draws.of([turn.prompt for _, turn in batch]),
        )  # fmt: skip
        for (_, turn), row in zip(batch, result.rows, strict=True):
            said = turn.answer
            rounds += row.rounds
            tokens += len(row.tokens)
            equal += said.ids == tuple(row.tokens) if said.ids else said.message["content"] == row.text.lstrip("\n")
            longer += said.prompt_tokens not in (0, row.prompt_tokens)
    return Own(own_counts(rounds, engine, depth=depth, tokens=tokens, answers=len(prompts)), len(prompts), equal, longer)


def own_counts(rounds: Sequence[StepRecord], engine: Engine, *, depth: int, tokens: int, answers: int) -> Counts:
    """Our rounds by the engine's rule."""
    if not engine.accepted:
        kept = sum(r.committed for r in rounds) - len(rounds)
        return Counts(len(rounds), sum(r.drafted for r in rounds), kept, tokens, answers)
    drafted = [(r.drafted, r.accepted) for r in rounds if r.drafted]
    positions = tuple(round(share * len(drafted)) for share in acceptance(drafted, depth)[0])
    return Counts(len(drafted), sum(d for d, _ in drafted), sum(a for _, a in drafted), tokens, answers, positions)


def table(records: Sequence[Mapping[str, Any]], engine: Engine) -> list[dict[str, Any]]:
    """Rows of a report from what was recorded a domain and temperature, and one of all domains a temperature."""
    rows = []
    for temperature in dict.fromkeys(record["temperature"] for record in records):
        own = [record for record in records if record["temperature"] == temperature]
        rows += [_row(record["domain"], temperature, [record], engine) for record in own]
        if len(own) > 1:
            rows.append(_row(ALL, temperature, own, engine))
    return rows


def _row(domain: str, temperature: float, records: Sequence[Mapping[str, Any]], engine: Engine) -> dict[str, Any]:
    counts = sum((_counts(record["counts"]) for record in records), Counts())
    seconds = sum(record["seconds"] for record in records)
    row = {
        "domain": domain, "temperature": temperature, "answers": sum(record["answers"] for record in records), "drafts": counts.rounds,
        "tau": counts.tau, "acceptance": counts.shares, "tokens": counts.tokens, "tokens_per_s": counts.tokens / max(seconds, 1e-9),
        "alone": all(record["alone"] for record in records),
    }  # fmt: skip
    if engine.drafted:
        row["drafted_per_round"] = counts.drafted / max(1, counts.rounds)
    owns = [record["own"] for record in records if record.get("own")]
    if len(owns) == len(records):
        ours = sum((_counts(own["counts"]) for own in owns), Counts())
        row |= {
            "own_drafts": ours.rounds, "own_tau": ours.tau, "own_acceptance": ours.shares, "difference": counts.tau - ours.tau,
            "points": [100 * (a - b) for a, b in zip(counts.shares, ours.shares, strict=False)],
        }  # fmt: skip
        if not temperature:  # draws are not compared
            row |= {"equal": sum(own["equal"] for own in owns), "compared": sum(own["answers"] for own in owns)}
    return row


def _counts(told: Mapping[str, Any]) -> Counts:
    return Counts(**{**told, "positions": tuple(told["positions"])})


def notes(records: Sequence[Mapping[str, Any]], depth: int | None) -> list[str]:
    """What a reader must know of these figures."""
    found = []
    for r in records:
        where, counts = f"{r['domain']} at temperature {r['temperature']:g}", _counts(r["counts"])
        if not r["alone"]:
            found.append(
                f"{where}: the engine counted {counts.tokens} tokens of {counts.requests} answers, ours were {r['tokens']} of "
                f"{r['answers']}: others asked it, too, or requests were made again. These figures are not those of the suite alone."
            )
        if r["refused"]:
            found.append(f"{where}: {sum(r['refused'].values())} turns without an answer ({max(r['refused'], key=r['refused'].get)}).")
        if depth and counts.drafted and counts.drafted != depth * counts.rounds:
            found.append(
                f"{where}: the engine drafted {counts.drafted / max(1, counts.rounds):.2f} tokens a round rather than {depth} (a table of "
                "depths by batch, or the model's length limit), so positions compare less well."
            )
        if (own := r.get("own")) and own["longer"]:
            found.append(
                f"{where}: the engine read {own['longer']} of {own['answers']} prompts as another number of tokens than the target's "
                "chat template makes here: it has another template or system prompt."
            )
    return found
