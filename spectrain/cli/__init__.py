"""The commands. Each imports what it needs when it runs, so that `--help` answers at once."""

import errno
import functools
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from spectrain.cli import running
from spectrain.cli.options import Set

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Train, measure and ship draft heads.")
NOISE = {  # what libraries say wherever there is no GPU, by logger; DeepSpeed's goes to stdout, into what --json prints
    "DeepSpeed": "Setting accelerator to CPU", "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
}  # fmt: skip


def main() -> None:
    """Entry point of `spectrain` and `python -m spectrain`."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():  # as our own bars do
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for logger, start in NOISE.items():
        logging.getLogger(logger).addFilter(functools.partial(_other_than, start))
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # of how DeepSpeed calls torch, at each place
    try:
        app()
    except SystemExit as end:
        if not end.code:
            _leave_processes()
        raise


def _leave_processes() -> None:
    """Leave the process group of a launcher: threads of it that are still at work when Python ends would abort a process that is done."""
    if "torch" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def _other_than(start: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(start)


def guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turn errors that a person can act on into one message and exit code 1; Ctrl-C into a note and 130."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except Exception as error:
            if full := _full_disk(error):
                _fail(f"no space left on disk while writing {full}; free some and run the same command again")
            if isinstance(error, OSError) and error.strerror:
                _fail(f"{error.strerror}: {error.filename or ''}".rstrip(": "))
            if isinstance(error, (ValueError, OSError)):
                _fail(str(error))
            if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported for this
                told = str(error).split(". ")[0]
                _fail(f"{told}; ask for fewer rows or tokens, a smaller --dtype, --quantization, or a target spread over several devices")
            raise
        except KeyboardInterrupt as stop:
            print(f"\n{str(stop) or 'stopped'}; what is finished is kept, the same command goes on from there", file=sys.stderr)
            raise typer.Exit(130) from None

    return run


def _full_disk(error: BaseException | None) -> str:
    """What could not be written for want of space, "" for any other error; safetensors and torch hide the system's own error."""
    while error is not None:
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left on device" in str(error):
            return str(getattr(error, "filename", None) or "a file")
        error = error.__cause__ or error.__context__
    return ""


def _fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # started by torchrun or accelerate launch, whose report is what is seen last
        from spectrain.training.watch import tell_launcher

        tell_launcher(f"error: {message}")
    raise typer.Exit(1) from None


@app.command()
@guarded
def quickstart(
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/quickstart"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Do every stage anew (the unpacked target is kept).")] = False,
    fresh_answers: Annotated[bool, typer.Option("--fresh-answers", help="Let the target answer the training prompts anew.")] = False,
    short: Annotated[bool, typer.Option("--short", help="All stages in a few minutes, for a test; the figures mean little.")] = False,
    set_: Set = None,
) -> None:
    """Train, measure and export a first head on a small real model; a second call goes on where the first one stopped."""
    from spectrain.cli.quickstart import quickstart as run

    run(out=out, fresh=fresh, fresh_answers=fresh_answers, short=short, overrides=set_ or [])


@app.command()
@guarded
def prepare(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT…", help="Files, folders, globs, or Hub data sets.")],
    target: Annotated[str, typer.Option(help="Hub name, folder or .gguf file; only its tokenizer is loaded.")],
    out: Annotated[Path, typer.Option(help="Folder of the rows.")],
    format_: Annotated[
        list[str] | None,
        typer.Option("--format", help="messages, sharegpt, alpaca, pair, prompt, text or tokens: of all inputs, or as PATTERN=DIALECT."),
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Print some rows, supervised tokens in colour.")] = 0,
    disjoint_from: Annotated[
        list[str] | None, typer.Option(help="Evaluation prompts that must not be trained on (file or folder); may be repeated.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that tokenise.")] = 1,
    json_: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
    set_: Set = None,
) -> None:
    """Turn conversations into rows of token ids with their loss mask; every row that is not used is listed with its reason."""
    from spectrain.cli.prepare import formats
    from spectrain.cli.prepare import prepare_rows as run

    own = [f"workers={workers}", *([f"disjoint_from={json.dumps(disjoint_from)}"] if disjoint_from else [])]
    own += [f"format={json.dumps(formats(format_))}"] if format_ else []
    run(inputs, target=target, out=out, overrides=[*own, *(set_ or [])], show=show, as_json=json_)


@app.command()
@guarded
def regenerate(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT…", help="Prompts or conversations: files, folders, globs, Hub data sets.")],
    out: Annotated[Path, typer.Option(help="File of the answers (.jsonl).")],
    target: Annotated[str, typer.Option(help="Hub name, folder or .gguf file: answers in process.")] = "",
    endpoint: Annotated[str, typer.Option(help="Address of an OpenAI-compatible server instead, such as http://127.0.0.1:8000/v1.")] = "",
    model: Annotated[str, typer.Option(help="The server's name of the model (default: the only one it serves).")] = "",
    api_key_env: Annotated[str, typer.Option(help="Environment variable that holds the server's key.")] = "",
    api_key_file: Annotated[Path | None, typer.Option(help="File that holds the server's key.")] = None,
    dtype: str = "float32",
    revision: Annotated[str | None, typer.Option(help="Revision of the target on the Hub.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the counts as one JSON object.")] = False,
    set_: Set = None,
) -> None:
    """Let the target answer what the inputs ask, turn by turn; a second call makes what is missing."""
    from spectrain.cli.regenerate import regenerate as run

    run(
        inputs, out=out, target=target, endpoint=endpoint, model=model, api_key_env=api_key_env, api_key_file=api_key_file,
        dtype=dtype, revision=revision, overrides=set_ or [], as_json=json_,
    )  # fmt: skip


@app.command()
@guarded
def capture(
    rows: Annotated[Path, typer.Argument(help="Folder made by `spectrain prepare`.")],
    target: Annotated[str, typer.Option(help="Hub name, folder or .gguf file.")],
    head_config: Annotated[
        Path,
        typer.Option(help="A recipe: its head says which states are kept, its data.capture how, its target how it lies on the processes."),
    ],
    out: Annotated[str, typer.Option(help="Folder or URL (s3://…) of the store.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how many bytes and hours it takes.")] = False,
    ignore_space: Annotated[bool, typer.Option("--ignore-space", help="Begin even where the disk looks too small.")] = False,
    dtype: str = "float32",
    json_: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
    set_: Set = None,
) -> None:
    """Keep the target's hidden states of prepared rows; several processes (`accelerate launch -m spectrain capture …`) share the work."""
    from spectrain.cli.capture import capture_rows as run

    run(
        rows, target=target, recipe=head_config, out=out, dtype=dtype, dry_run=dry_run, ignore_space=ignore_space,
        overrides=set_ or [], as_json=json_,
    )  # fmt: skip


@app.command()
@guarded
def plan(
    recipe: Annotated[Path, typer.Argument(help="A file of recipes/.")],
    gpus: Annotated[int, typer.Option(help="Devices in all.")] = 1,
    device: Annotated[str, typer.Option(help="h100, h200, a100, l40s or cpu2; figures below replace its own.")] = "h100",
    gpu_memory: Annotated[float | None, typer.Option(help="GiB of a device.")] = None,
    gpu_flops: Annotated[float | None, typer.Option(help="16-bit products, 10^12 a second.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Of a device's memory, 10^9 bytes a second.")] = None,
    link: Annotated[float | None, typer.Option(help="Between devices, 10^9 bytes a second.")] = None,
    rows: Annotated[Path | None, typer.Option(help="Prepared rows, whose index says how much there is.")] = None,
    tokens: Annotated[float | None, typer.Option(min=1, help="Tokens of an epoch, where there are no rows yet (1e9 is a number).")] = None,
    row_length: Annotated[int | None, typer.Option(min=3, help="Tokens a row, with --tokens (default 1024).")] = None,
    supervised_share: Annotated[float | None, typer.Option(help="Of the tokens, with --tokens (default 0.5).")] = None,
    target: Annotated[str | None, typer.Option(help="Folder with a config.json, or Hub name, in place of the recipe's target.")] = None,
    placement: Annotated[str | None, typer.Option(help="Of the target, instead of the recipe's: rank, fsdp2, tp or zero3.")] = None,
    head_sharded: Annotated[bool, typer.Option("--head-sharded", help="The head is sharded, too, by FSDP2 or ZeRO-3.")] = False,
    decode_batch: Annotated[int | None, typer.Option(min=1, help="Rows that a copy of the target answers together.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the plan as one JSON object.")] = False,
    set_: Set = None,
) -> None:
    """Memory of a device, disk, hours and the served head's cost of a recipe, the arithmetic shown; only the target's config is read."""
    from spectrain.cli.plan import plan as run

    run(
        recipe, device=device, gpus=gpus, memory=gpu_memory, flops=gpu_flops, bandwidth=bandwidth, link=link, rows=rows, tokens=tokens,
        length=row_length, share=supervised_share, target=target, placement=placement, head_sharded=head_sharded,
        decode_batch=decode_batch, overrides=set_ or [], as_json=json_,
    )  # fmt: skip


@app.command()
@guarded
def train(
    recipe: Annotated[Path, typer.Argument(help="A file of recipes/.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the run (default runs/<name of the recipe>).")] = None,
    fresh_answers: Annotated[bool, typer.Option("--fresh-answers", help="Let the target answer the training prompts anew.")] = False,
    set_: Set = None,
) -> None:
    """Train a head by a recipe: answers, states, training; also under `accelerate launch -m spectrain train RECIPE`."""
    from spectrain.cli.train import train as run

    run(recipe, out=out, fresh_answers=fresh_answers, overrides=set_ or [])


for command in (running.generate, running.evaluate, running.bench):
    app.command()(guarded(command))


@app.command()
@guarded
def report(
    folder: Annotated[list[Path], typer.Argument(help="Folders with a report.json; several are put into one report.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write (default: that of the one report).")] = None,
    pictures: Annotated[bool, typer.Option(help="Also write the charts as PNG files (extra plots).")] = True,
    json_: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Show a report again and rewrite its Markdown and HTML from report.json, with the bench.json beside it; or compare the heads of
    several reports of one target and suite."""
    from spectrain.cli.report import report as run

    run(folder, out=out, pictures=pictures, as_json=json_)


@app.command()
@guarded
def export(
    head: Annotated[Path, typer.Argument(help="Head directory.")],
    to: Annotated[str, typer.Option(help="vllm, speculators, sglang; original: eagle3, eagle, medusa, hydra; merged: the target.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    target: Annotated[
        str | None, typer.Option(help="The head's target; needed for speculators, EAGLE-1 heads and those of another width.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the weights: float32, bfloat16 or float16 (default: as they were saved).")] = None,
) -> None:
    """Write a head for a serving engine and print the command that serves it."""
    from spectrain.cli.export import export as run

    run(head, to, out, target, dtype)


@app.command("import")
@guarded
def import_(
    folder: Annotated[Path, typer.Argument(help="Folder of a Medusa, Hydra, EAGLE-1 or EAGLE-3 head, of an engine or a trainer.")],
    target: Annotated[str, typer.Option(help="The head's target: Hub name, folder or .gguf file.")],
    out: Annotated[Path, typer.Option(help="Head directory to write.")],
    layer_id: Annotated[list[int] | None, typer.Option(help="States that an EAGLE-3 head fuses, where its folder does not say.")] = None,
    rows: Annotated[
        Path | None, typer.Option(help="Prepared rows: tell what layer ids count that can be read in two ways; both are tried on them.")
    ] = None,
    notation: Annotated[
        Literal["hs", "output"] | None, typer.Option(help="What they count: states (after i layers), or outputs of layer i.")
    ] = None,
    dtype: str = "float32",
) -> None:
    """Write another program's head as a head directory, to measure it, train it further or export it."""
    from spectrain.cli.export import import_head

    import_head(folder, target, out, layer_ids=layer_id, notation=notation, rows=rows, dtype=dtype, say=print)


@app.command()
@guarded
def push(
    head: Annotated[Path, typer.Argument(help="Head directory.")],
    repo: Annotated[str, typer.Argument(help="Repository on the Hub, user/name; made, and private, where it is not there.")],
    report: Annotated[Path | None, typer.Option(help="Folder of `spectrain evaluate`, for the card; goes along.")] = None,
    with_format: Annotated[list[str] | None, typer.Option(help="Of export --to; goes along, may be repeated.")] = None,
    dry_run: Annotated[Path | None, typer.Option(help="Write what would go to this folder, and upload nothing.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Make the repository public.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch; made where it is not there.")] = None,
    base_model: Annotated[str | None, typer.Option(help="The head's target on the Hub, where it was trained from a folder.")] = None,
    license_: Annotated[str | None, typer.Option("--license", help="By the Hub's name; else that of the target's model card.")] = None,
    data: Annotated[Path | None, typer.Option(help="What it was trained on, in Markdown, for the card.")] = None,
    target: Annotated[str | None, typer.Option(help="The head's target; needed for formats that take rows of it.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Upload a head to the Hub with a model card; the token is that of `hf auth login` or HF_TOKEN."""
    from spectrain.cli.push import Wanted
    from spectrain.cli.push import push as run

    wanted = Wanted(report, with_format or (), base_model, license_, data, target)
    run(head, repo, wanted, public=public, revision=revision, dry_run=dry_run, say=print, as_json=json_)
