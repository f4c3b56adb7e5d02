"""Each stage of a run wired to its inputs: recipe in, files out. The commands call these; nothing here computes."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spectrain.config import AnswersConfig, Recipe
from spectrain.data.formats import Message, Prompt, mix_prompts, read_prompts
from spectrain.data.regenerate import Answer, regenerate
from spectrain.decoding.generate import generate
from spectrain.target.model import Target


def training_prompts(config: AnswersConfig, target: Target, root: Path) -> list[Prompt]:
    """The recipe's mix of training prompts."""
    return mix_prompts(
        read_prompts(root / config.prompts), config.mix, seed=config.seed,
        fits=lambda p: len(target.encode(p.chat)) <= config.max_prompt_tokens,
    )  # fmt: skip


def make_answers(config: AnswersConfig, target: Target, root: Path, out: Path) -> int:
    """Let the target answer the recipe's prompts, greedy and sampled, into `out`; returns how many were made now."""

    def settings(prompt: Prompt) -> Mapping[str, Any]:
        dice = int(hashlib.sha256(f"{config.seed}:sampled:{prompt.id}".encode()).hexdigest()[:8], 16) / 0xFFFFFFFF
        temperature = config.temperature if dice < config.sampled else 0.0
        return {"temperature": temperature, "max_new_tokens": config.max_new_tokens, "seed": config.seed, **target.fingerprints}

    def answer(chats: Sequence[list[Message]], settings: Mapping[str, Any], seeds: Sequence[int]) -> list[Answer]:
        result = generate(
            target, chats, temperature=settings["temperature"], max_new_tokens=settings["max_new_tokens"], seed=list(seeds)
        )
        return [Answer(text=row.text, tokens=len(row.tokens), finish_reason=row.finish_reason) for row in result.rows]

    return regenerate(training_prompts(config, target, root), answer=answer, settings=settings, out=out, batch_size=config.batch_size)
