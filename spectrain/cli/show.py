"""`spectrain generate`: an answer as it comes, with drafted tokens in colour."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from spectrain.cli.room import open_target
from spectrain.cli.stages import open_head
from spectrain.cli.wiring import generate
from spectrain.decoding.accept import LOSSY
from spectrain.decoding.generate import RowResult
from spectrain.decoding.policies import KINDS, Adaptive
from spectrain.decoding.shapes import Chain, Shape, Tree
from spectrain.drafters.lookup import NGram
from spectrain.drafters.small_model import SmallModel
from spectrain.drafters.suffix import Suffix
from spectrain.evaluation.policy import load_policy
from spectrain.evaluation.processes import open_processes
from spectrain.target.model import Target, load_target


def show_answer(
    prompt: str, *, target: str, head: Path | None, drafter: str, chain: int, tree: bool | Path, temperature: float, top_p: float,
    rule: str, policy: str, max_new_tokens: int, seed: int, raw: bool, dtype: str, where: Mapping[str, Any], as_json: bool,
) -> None:  # fmt: skip
    """Generate one answer; see `spectrain generate --help`. tree: a dynamic one, or the file of one. where: further arguments of
    `load_target`; several processes make the same passes, and the main one talks. Raises ValueError for a drafter that does not exist."""
    shape: Shape = Tree.load(tree) if isinstance(tree, Path) else Tree.dynamic(top_k=4, depth=5, budget=15) if tree else Chain(chain)
    name = drafter or ("head" if head else "none")
    if isinstance(tree, Path) and name == "none":
        raise ValueError(f"the tree of {tree} is drafted by a head; add --head FOLDER, or another --drafter")
    asked: Any = prompt if raw else [{"role": "user", "content": prompt}]
    with open_processes(splits=False) as processes:
        console = Console(quiet=as_json or not processes.leads, highlight=False)
        own, say = head if name == "head" else None, partial(console.print, markup=False, soft_wrap=True)
        loaded = open_target(target, own, dtype, say, where, caches=(1, max_new_tokens), processes=processes)
        chosen = _drafter(name, head, loaded)
        result = generate(
            loaded, [asked], drafter=chosen, shape=shape, rule=rule, policy=_policy(policy),
            temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens, seed=seed,
            stream=None if as_json else _Printer(loaded, console),
        )  # fmt: skip
    row = result.rows[0]
    figures = summary(row)
    if as_json and processes.leads:
        print(json.dumps({**figures, "text": row.text, "tokens": row.tokens, "finish_reason": row.finish_reason}))
    console.print()
    kind = "none" if chosen is None else f"{name}, {shape}, rule {result.rule}" + (" (lossy)" if result.rule in LOSSY else "")
    if chosen is not None and not shape.depth:
        kind = f"none (the tree of {tree} has no nodes: none was predicted to pay)"
    console.print(
        f"[dim]{figures['tokens']} tokens in {figures['rounds']} passes: tau {figures['tau']:.2f}, {figures['accepted']} of "
        f"{figures['drafted']} drafted tokens accepted, {figures['tokens_per_s']:.1f} tokens/s, drafter {kind}, {row.finish_reason}[/dim]"
    )


def _drafter(name: str, head: Path | None, target: Target) -> Any:
    if name == "none":
        return None
    if name == "ngram":
        return NGram()
    if name == "head":
        if head is None:
            raise ValueError("drafter head needs --head FOLDER; train one with `spectrain train RECIPE`")
        return open_head(head, target)
    if name == "suffix":
        return Suffix()
    if "/" in name or Path(name).exists():
        return SmallModel(load_target(name, dtype=str(target.model.dtype).removeprefix("torch."), device=str(target.device)))
    raise ValueError(f"drafter {name!r} is unknown; choose head, ngram, suffix, none, or the folder or Hub name of a smaller model")


def _policy(text: str) -> Adaptive | None:
    """A kind, or a file or folder with a policy."""
    if not text:
        return None
    if text not in KINDS and not Path(text).exists():
        raise ValueError(f"policy {text!r} is neither a file or folder here nor one of {', '.join(KINDS)}; `spectrain bench` writes one")
    return Adaptive(text) if text in KINDS else load_policy(text)


class _Printer:
    """Prints committed tokens as they come; those before the last of a round were drafted."""

    def __init__(self, target: Target, console: Console) -> None:
        self._decode, self._console = target.tokenizer.decode, console
        self._ids: list[int] = []
        self._shown = ""

    def __call__(self, row: int, tokens: list[int], text: str) -> None:
        final = self._shown + text  # never beyond what is certain
        for i, token in enumerate(tokens):
            self._ids.append(token)
            so_far = self._decode(self._ids)
            so_far = so_far if final.startswith(so_far) else final
            piece, self._shown = so_far[len(self._shown) :], so_far
            self._console.print(piece, end="", markup=False, style="green" if i + 1 < len(tokens) else None, soft_wrap=True)


def summary(row: RowResult) -> dict[str, Any]:
    """Counts of one answer: tau = committed tokens per verification pass, the prompt's pass and its token left out."""
    committed, rounds = sum(r.committed for r in row.rounds), len(row.rounds)
    seconds = sum(sum(r.seconds.values()) for r in row.rounds)
    return {
        "tokens": len(row.tokens), "rounds": rounds, "tau": committed / rounds if rounds else 0.0,
        "drafted": sum(r.drafted for r in row.rounds), "accepted": sum(r.accepted for r in row.rounds),
        "tokens_per_s": committed / seconds if seconds else 0.0,
    }  # fmt: skip
