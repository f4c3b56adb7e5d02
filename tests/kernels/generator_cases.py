"""Whole generations with tree attention by the kernel against the model's own; as a script, under triton's interpreter or on a GPU.

Usage: generator_cases.py DEVICE FAMILY...    (families of tests/target/test_families.py)
"""

import sys
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "target")]

from conftest import ScriptedDrafter, word_tokenizer  # noqa: E402
from test_families import FAMILIES, PROMPTS, VOCAB, build, following, off  # noqa: E402

from spectrain.decoding.generate import generate  # noqa: E402
from spectrain.decoding.shapes import Chain  # noqa: E402
from spectrain.kernels import tree_attention, tree_attention_triton  # noqa: E402
from spectrain.target.model import Target  # noqa: E402

NEW = 14
DEVICE = torch.device(sys.argv[1])
NAMES = sys.argv[2:]


def greedy(model: Any, ids: list[int]) -> list[int]:
    """Greedy tokens of transformers' own model, a whole forward for each."""
    tokens = list(ids)
    for _ in range(NEW):
        tokens.append(int(model(input_ids=torch.tensor([tokens], device=DEVICE), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(ids) :]


def main() -> None:
    calls: list[tuple[int, ...]] = []
    kernel = tree_attention_triton.attend_packed

    def counted(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(tuple(q.shape))
        return kernel(q, *args, **kwargs)

    tree_attention_triton.attend_packed = counted
    for name in NAMES:
        target = Target(model=build(*FAMILIES[name]).to(DEVICE), tokenizer=word_tokenizer(VOCAB), name=name)
        target.model.set_attn_implementation("eager")
        with torch.no_grad():
            expected = [greedy(target.model, prompt) for prompt in PROMPTS]
        texts = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
        target.model.set_attn_implementation(tree_attention.register("triton"))

        def draft(ids: list[int], texts: list[list[int]] = texts) -> list[tuple[int, int]]:
            """Wrong siblings before each right node, and wrong from some depth on."""
            nodes: list[tuple[int, int]] = []
            parent = 0
            for depth, right in enumerate(following(texts, ids, 4)):
                nodes += [(off(right), parent), (right if depth < 1 + len(ids) % 4 else off(off(right)), parent)]
                parent = len(nodes)
            return nodes

        calls.clear()
        for rows, drafter in ((slice(0, 3), ScriptedDrafter(draft)), (slice(2, 3), ScriptedDrafter(draft)), (slice(0, 3), None)):
            result = generate(target, PROMPTS[rows], drafter=drafter, shape=Chain(8), eos=None, max_new_tokens=NEW, compile=False)
            assert [row.tokens for row in result.rows] == expected[rows], name
            accepted = [r.accepted for row in result.rows for r in row.rounds[:-1]]
            assert drafter is None or sum(accepted) / len(accepted) > 1
        assert {shape[2] for shape in calls} == {1, 9} and len(calls) > 20, calls
    print("same")


if __name__ == "__main__":
    main()
