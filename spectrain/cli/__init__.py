"""The commands. Each imports what it needs when it runs, so that `--help` answers at once."""

import errno
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Train, measure and ship draft heads.")
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting of the recipe; may be repeated.")]


def main() -> None:
    """Entry point of `spectrain` and `python -m spectrain`."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():  # as our own bars do
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    app()


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
def train(
    recipe: Annotated[Path, typer.Argument(help="A file of recipes/.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the run (default runs/<name of the recipe>).")] = None,
    fresh_answers: Annotated[bool, typer.Option("--fresh-answers", help="Let the target answer the training prompts anew.")] = False,
    set_: Set = None,
) -> None:
    """Train a head by a recipe: answers, states, training; also under `accelerate launch -m spectrain train RECIPE`."""
    from spectrain.cli.train import train as run

    run(recipe, out=out, fresh_answers=fresh_answers, overrides=set_ or [])


@app.command()
@guarded
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    target: Annotated[str, typer.Option(help="Hub name, folder or .gguf file.")],
    head: Annotated[Path | None, typer.Option(help="Head directory.")] = None,
    drafter: Annotated[str, typer.Option(help="head, ngram, suffix, none, or a smaller model (folder or Hub name).")] = "",
    chain: Annotated[int, typer.Option(min=1, help="Depth of the drafted chain.")] = 4,
    tree: Annotated[bool, typer.Option("--tree", help="Draft a dynamic tree instead of a chain.")] = False,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    rule: Annotated[str, typer.Option(help="Verification rule; auto is the best lossless one.")] = "auto",
    policy: Annotated[str, typer.Option(help="Adapt the depth: heuristic, confidence or ema.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    seed: int = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Take the prompt as plain text, without the chat template.")] = False,
    dtype: str = "float32",
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the stream.")] = False,
) -> None:
    """Stream an answer; green tokens were drafted and accepted, plain ones are the target's own. tau at the end."""
    from spectrain.cli.show import show_answer

    show_answer(
        prompt, target=target, head=head, drafter=drafter, chain=chain, tree=tree, temperature=temperature, top_p=top_p,
        rule=rule, policy=policy, max_new_tokens=max_new_tokens, seed=seed, raw=raw, dtype=dtype, as_json=json_,
    )  # fmt: skip


@app.command()
@guarded
def evaluate(
    target: Annotated[str, typer.Option(help="Hub name, folder or .gguf file.")],
    out: Annotated[Path, typer.Option(help="Folder for records and report.")],
    head: Annotated[Path | None, typer.Option(help="Head directory; without one only free drafters are measured.")] = None,
    suite: Annotated[Path, typer.Option(help="A file of eval/suites.")] = Path("eval/suites/quick.yaml"),
    dtype: str = "float32",
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, such as shapes.chain=3.")
    ] = None,
) -> None:
    """Measure tau, acceptance and speed by domain, and write report.html, report.md and report.json."""
    from spectrain.cli.train import evaluate as run

    run(target, head, suite, out, dtype=dtype, overrides=set_ or [])


@app.command()
@guarded
def report(folder: Annotated[Path, typer.Argument(help="Folder with a report.json.")]) -> None:
    """Show a report again and rewrite its Markdown and HTML from report.json."""
    from spectrain.cli.train import show_report

    show_report(folder)


@app.command()
@guarded
def export(
    head: Annotated[Path, typer.Argument(help="Head directory.")],
    to: Annotated[str, typer.Option(help="eagle3 (also vllm, sglang: the same folder).")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
) -> None:
    """Write a head for a serving engine and print the command that serves it."""
    from spectrain.cli.train import export as run

    run(head, to, out)
