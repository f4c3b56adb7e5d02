"""The commands that run a model: generate, evaluate, bench."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from spectrain.cli.options import Attention, Bits, Device, Dtype, Placement, Set, TpSize


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    target: Annotated[str, typer.Option(help="Hub name, folder or .gguf file.")],
    head: Annotated[Path | None, typer.Option(help="Head directory.")] = None,
    drafter: Annotated[str, typer.Option(help="head, ngram, suffix, none, or a smaller model (folder or Hub name).")] = "",
    chain: Annotated[int, typer.Option(min=1, help="Depth of the drafted chain.")] = 4,
    tree: Annotated[bool, typer.Option("--tree", help="Draft a dynamic tree instead of a chain.")] = False,
    tree_file: Annotated[Path | None, typer.Option(help="Draft the tree of a file of `spectrain evaluate --write-tree` instead.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    rule: Annotated[str, typer.Option(help="Verification rule; auto is the best lossless one.")] = "auto",
    policy: Annotated[
        str, typer.Option(help="Adapt the depth: heuristic, confidence, ema, a folder of `spectrain bench`, or a file of drafts by batch.")
    ] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    seed: int = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Take the prompt as plain text, without the chat template.")] = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
    attention: Attention = "auto",
    placement: Placement = "rank",
    tp_size: TpSize = None,
    quantization: Bits = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the stream.")] = False,
) -> None:
    """Stream an answer; green tokens were drafted and accepted, plain ones are the target's own. tau at the end."""
    from spectrain.cli.show import show_answer

    show_answer(
        prompt, target=target, head=head, drafter=drafter, chain=chain, tree=tree_file or tree, temperature=temperature,
        top_p=top_p, rule=rule, policy=policy, max_new_tokens=max_new_tokens, seed=seed, raw=raw, dtype=dtype,
        where=_where(device, attention, placement, tp_size, quantization), as_json=json_,
    )  # fmt: skip


def evaluate(
    target: Annotated[str, typer.Option(help="Hub name, folder or .gguf file.")],
    out: Annotated[Path | None, typer.Option(help="Folder for records and report.")] = None,
    drafters: Annotated[str | None, typer.Option(help="With commas between: none, ngram, suffix, head:FOLDER, model:FOLDER.")] = None,
    shapes: Annotated[str | None, typer.Option(help="With commas between: auto, chain:4, tree:10x6x48, tree:FILE.json.")] = None,
    head: Annotated[Path | None, typer.Option(help="Head directory, short for --drafters ngram,head:FOLDER.")] = None,
    suite: Annotated[str, typer.Option(help="A name in eval/suites, or a file.")] = "quick",
    prompts: Annotated[Path | None, typer.Option(help="Your own prompts (.jsonl) instead of a suite.")] = None,
    temperature: Annotated[str | None, typer.Option(help="One or several, such as 0,0.7,1 (default 0: greedy).")] = None,
    against: Annotated[Path | None, typer.Option(help="report.json of an earlier evaluation, to compare with.")] = None,
    require: Annotated[list[str] | None, typer.Option(help="Condition, such as 'tau.code>=2.0': else exit code 1.")] = None,
    tree: Annotated[Path | None, typer.Option("--tree", "--tree-file", help="Measure the tree of a file of --write-tree, too.")] = None,
    write_tree: Annotated[Path | None, typer.Option(help="Instead: write the tree that the head's acceptance makes (.json).")] = None,
    engine: Annotated[Literal["vllm", "sglang"] | None, typer.Option(help="Instead: what a running engine accepts.")] = None,
    endpoint: Annotated[str, typer.Option(help="Its address, such as http://127.0.0.1:8000/v1.")] = "",
    model: Annotated[str, typer.Option(help="Its name of the model (default: the only one it serves).")] = "",
    api_key_env: Annotated[str, typer.Option(help="Environment variable that holds its key.")] = "",
    api_key_file: Annotated[Path | None, typer.Option(help="File that holds its key.")] = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    attention: Attention = "auto",
    placement: Placement = "rank",
    tp_size: TpSize = None,
    quantization: Bits = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
    set_: Set = None,
) -> None:
    """Measure tau, acceptance and speed by domain, and write report.html, report.md and report.json; several processes
    (`accelerate launch -m spectrain evaluate …`) share the prompts."""
    from spectrain.cli.measured import Asked, evaluate_by, overrides_of, with_head
    from spectrain.cli.regenerate import api_key

    if write_tree is not None and out is not None:
        raise typer.BadParameter("--write-tree makes a tree only and --out is for records and report; give one of them")
    if write_tree is None and out is None:
        raise typer.BadParameter("--out FOLDER is needed for records and report (or --write-tree FILE to make a tree only)")
    asked = Asked(
        target, suite, _where(device, attention, placement, tp_size, quantization), with_head(drafters, head), prompts,
        against, require or (), json_, dtype, [*overrides_of(shapes, tree, temperature), *(set_ or [])],
    )  # fmt: skip
    key = api_key(api_key_env, api_key_file)
    evaluate_by(asked, out, head=head, write_tree=write_tree, engine=engine, endpoint=endpoint, model=model, key=key)


def bench(
    target: Annotated[str, typer.Option(help="Hub name, folder or .gguf file.")],
    out: Annotated[Path, typer.Option(help="Folder for bench.json; `spectrain report` shows it beside the report there.")],
    head: Annotated[Path | None, typer.Option(help="Head directory.")] = None,
    drafters: Annotated[str | None, typer.Option(help="Instead, or also: ngram, suffix, head:FOLDER, model:FOLDER.")] = None,
    batch: Annotated[str | None, typer.Option(help="Numbers of rows, such as 1,8,32.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens behind which passes are timed; longer prompts are left out.")] = None,
    suite: Annotated[str | None, typer.Option(help="A suite of eval/suites by name, or a file.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=3, help="Of every answer.")] = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    attention: Attention = "auto",
    placement: Annotated[
        Literal["rank", "device_map"], typer.Option(help="Of the target: whole on a device, or layer by layer over all.")
    ] = "rank",
    quantization: Bits = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the content of bench.json.")] = False,
    set_: Set = None,
) -> None:
    """Tokens a second by batch with drafts and without, where the sign flips, and a policy by batch for engines, which is run, too."""
    from spectrain.cli.bench import bench as run

    given = {"suite": suite and json.dumps(suite), "batches": batch and f"[{batch}]", "context": context, "max_new_tokens": max_new_tokens}
    listed = [*(drafters or "").split(","), f"head:{head}" if head else ""]
    run(
        target, [text.strip() for text in listed if text.strip()], out, dtype=dtype, as_json=json_,
        where=_where(device, attention, placement, None, quantization),
        overrides=[*(f"{key}={value}" for key, value in given.items() if value is not None), *(set_ or [])],
    )  # fmt: skip


def _where(device: str, attention: str, placement: str, tp_size: int | None, quantization: str | None) -> dict[str, Any]:
    """Arguments of `load_target` beside name and dtype."""
    return {"device": device, "attention": attention, "placement": placement, "tp_size": tp_size, "quantization": quantization}
