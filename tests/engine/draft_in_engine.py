"""Runs in the engine's own interpreter: greedy answers of a target in vLLM, alone and with exported heads, and what it accepted of them.

usage: draft_in_engine.py JOB.json OUT.json
JOB: {"target": folder, "heads": [speculative config, ...], "prompts": [[ids], ...], "new": tokens an answer}
OUT: {"plain": [[ids], ...], "heads": [{"answers": [[ids], ...], "rounds": int, "accepted": [by position]}, ...]}
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams


def answer(job: dict[str, Any], speculation: dict[str, Any] | None) -> tuple[list[list[int]], dict[str, Any]]:
    llm = LLM(
        job["target"], dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=len(job["prompts"]),
        speculative_config=speculation, disable_log_stats=False, enable_prefix_caching=False,
    )  # fmt: skip
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=job["new"], ignore_eos=True), use_tqdm=False)
    counters = {m.name: getattr(m, "values", None) or getattr(m, "value", None) for m in llm.get_metrics()}
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    del llm
    gc.collect()
    return answers, counters


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    found: dict[str, Any] = {"plain": answer(job, None)[0], "heads": []}
    for head in job["heads"]:
        answers, counters = answer(job, head)
        accepted = [int(n) for n in counters["vllm:spec_decode_num_accepted_tokens_per_pos"]]
        found["heads"].append({"answers": answers, "rounds": int(counters["vllm:spec_decode_num_drafts"]), "accepted": accepted})
    Path(sys.argv[2]).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # taking down several engines at exit may take minutes


if __name__ == "__main__":
    main()
