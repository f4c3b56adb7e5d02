"""What the exactness grid decodes: models with questions, plain answers made once, and drafters that are right most of the time."""

import copy
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from small_models import VOCAB, brief_head, cycle_table, gemma_target, llama_target, noisy_copy, table_target

from spectrain.data.formats import read_prompts
from spectrain.decoding.audit import TIE
from spectrain.decoding.drafter import Drafter
from spectrain.decoding.generate import RowResult, generate
from spectrain.decoding.rows import end_ids
from spectrain.decoding.tree import DraftTree
from spectrain.drafters.from_head import HeadDrafter
from spectrain.drafters.hybrid import Hybrid
from spectrain.drafters.lookup import NGram
from spectrain.drafters.scripted import Scripted
from spectrain.drafters.small_model import SmallModel
from spectrain.drafters.suffix import Suffix
from spectrain.kernels import tree_attention
from spectrain.target.model import Target

SIZE = 24  # questions of a set: a multiple of the batches 1, 3 and 8
BEYOND = 8  # tokens known after an answer's end: drafts overrun it, rightly
MISS = 0.2  # chance that an oracle's next token is planted wrong


@dataclass(frozen=True)
class Question:
    """A prompt in token ids, the ids that end answers of its set (None: none do), plain decoding's answer, and more of it than that."""

    prompt: tuple[int, ...]
    eos: tuple[int, ...] | None
    answer: RowResult
    longer: tuple[int, ...]


class World(ABC):
    """A target, its questions by set, and its drafters; all made when first asked for."""

    kinds = 1  # sets that must all be asked for a cell to be whole

    def __init__(self, target: Target, *, new_tokens: int, noise: float) -> None:
        self.target, self.new_tokens = target, new_tokens
        self._noise = noise
        self._sets: dict[int, list[Question]] = {}
        self._drafters: dict[str, Drafter] = {}

    @abstractmethod
    def prompts(self, number: int) -> list[tuple[int, ...]]:
        """The prompts of a set."""

    @abstractmethod
    def eos(self, number: int, longer: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
        """What ends the answers of a set, None for nothing."""

    @abstractmethod
    def head(self, kind: str) -> Any:
        """A head of this kind for the target."""

    def questions(self, number: int) -> list[Question]:
        """The questions of a set with plain decoding's answers, made once without end ids and cut at them here."""
        if number not in self._sets:
            prompts = self.prompts(number)
            rows = generate(self.target, prompts, max_new_tokens=self.new_tokens + BEYOND, eos=None, compile=False).rows
            eos = self.eos(number, [row.tokens for row in rows])
            self._sets[number] = [
                Question(prompt, eos, self._cut(row, eos), (*prompt, *row.tokens)) for prompt, row in zip(prompts, rows, strict=True)
            ]
        return self._sets[number]

    def _cut(self, row: RowResult, eos: Sequence[int] | None) -> RowResult:
        tokens = row.tokens[: self.new_tokens]
        end = next((i for i, token in enumerate(tokens) if token in (eos or ())), None)
        kept = tokens if end is None else tokens[: end + 1]
        text = self.target.tokenizer.decode(kept if end is None else kept[:-1])
        return replace(row, tokens=kept, text=text, finish_reason="length" if end is None else "stop")

    @torch.inference_mode()
    def confirm(self) -> tuple[int, list[dict[str, Any]]]:
        """Answers looked at, and where plain decoding is not what transformers' own attention makes of a whole text in one pass."""
        model, found = copy.deepcopy(self.target.model), []
        model.set_attn_implementation("eager")
        for question in self._first():
            start = len(question.prompt)
            ids_L = torch.tensor(question.longer, device=self.target.device)
            logits_LV = model(input_ids=ids_L[None]).logits[0, start - 1 : -1, : self.target.num_ids]
            gap_L = logits_LV.amax(-1) - logits_LV.gather(1, ids_L[start:, None])[:, 0]
            gap = float(gap_L.max())
            if gap > 0:
                what = f"token {int(gap_L.argmax())} is not transformers'"
                found.append({"kind": "tie" if gap < TIE else "fault", "gap": gap, "what": what, "prompt": list(question.prompt)})
        return len(self._first()), found

    def _first(self) -> list[Question]:
        """The first set of each kind."""
        return [q for number in range(self.kinds) for q in self.questions(number)]

    def drafter(self, name: str) -> Drafter:
        if name not in self._drafters:
            self._drafters[name] = self._make(name)
        return self._drafters[name]

    def _make(self, name: str) -> Drafter:
        if "|" in name:
            first, second = name.split("|")
            return Hybrid(self.drafter(first), self.drafter(second))
        makers: dict[str, Callable[[], Drafter]] = {
            "ngram": NGram, "suffix": Suffix, "small model": lambda: SmallModel(noisy_copy(self.target, self._noise)),
            "oracle chain": lambda: Scripted(Oracle(self).chain), "oracle tree": lambda: Scripted(Oracle(self).tree),
        }  # fmt: skip
        return makers[name]() if name in makers else HeadDrafter(self.head(name))

    def known(self, ids: Sequence[int], more: int) -> list[int]:
        """The next `more` tokens of plain decoding, fewer at the end of what is known, none after a difference."""
        for questions in self._sets.values():
            for q in questions:
                if len(q.prompt) <= len(ids) and q.longer[: len(ids)] == tuple(ids):
                    return list(q.longer[len(ids) : len(ids) + more])
        return []


class Oracle:
    """Drafts from the known answers with planted errors, the same for the same committed text."""

    def __init__(self, world: World, *, depth: int = 5) -> None:
        self._world, self._depth = world, depth

    def _coin(self, ids: Sequence[int]) -> random.Random:
        return random.Random(hash((len(ids), *ids[-3:])))

    def _wrong(self, right: int, coin: random.Random) -> int:
        return (right + coin.randrange(1, self._world.target.num_ids)) % self._world.target.num_ids

    def chain(self, ids: list[int]) -> list[int]:
        """The right tokens, each wrong with the chance MISS; now and then nothing."""
        coin = self._coin(ids)
        if coin.random() < 0.05:
            return []
        return [self._wrong(token, coin) if coin.random() < MISS else token for token in self._world.known(ids, self._depth)]

    def tree(self, ids: list[int]) -> DraftTree | None:
        """A tree whose right path turns into a random branch at each level, or ends there (chance MISS); its siblings are wrong, and below
        the one before it hang the tokens that would be right below itself. Depth first, so levels are mixed."""
        coin, tokens, parents, above = self._coin(ids), [ids[-1]], [-1], 0
        for right, after in zip(self._world.known(ids, self._depth), self._world.known(ids, self._depth + 1)[1:], strict=False):
            width = coin.choice((1, 2, 3))
            place = width if coin.random() < MISS else coin.randrange(width)
            here = 0
            for k in range(width):
                tokens.append(right if k == place else self._wrong(right, coin))
                parents.append(above)
                here = len(tokens) - 1 if k == place else here
                if k == place - 1:
                    tokens.append(after)
                    parents.append(len(tokens) - 2)
            if place == width:
                break
            above = here
        if len(tokens) == 1:
            return None
        return DraftTree(torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([len(tokens)]), "point_mass")


class SmallWorld(World):
    """A small random model with prompts of 1 to 40 random tokens; odd sets have an end id that about half of their answers meet.

    device: where it answers; its heads are trained on the CPU.
    """

    kinds = 2

    def __init__(self, name: str, *, quick: bool, device: str = "cpu") -> None:
        table_VV, self._successor = cycle_table((5, 9, 11, 13, 17, 19, 22))
        targets = {
            "llama": lambda: llama_target(), "calm llama": lambda: llama_target(calm=0.03), "gemma2": lambda: gemma_target(calm=0.06),
            "table": lambda: table_target(table_VV),
        }  # fmt: skip
        self._name, self._quick = name, quick
        self._here = targets[name]()
        super().__init__(moved(self._here, torch.device(device)), new_tokens=50 if quick else 200, noise=0.05 if name == "llama" else 0.15)

    def prompts(self, number: int) -> list[tuple[int, ...]]:
        coin = random.Random(number)
        return [tuple(coin.randrange(2, VOCAB) for _ in range(coin.choice((1, 2, 3, 9, 20, 40)))) for _ in range(SIZE)]

    def eos(self, number: int, longer: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
        if number % 2 == 0:
            return None
        ends = {token: [tokens.index(token) for tokens in longer if token in tokens[: self.new_tokens]] for token in range(VOCAB)}
        return (min(ends, key=lambda token: (abs(len(ends[token]) - SIZE // 2), -sum(ends[token]))),)

    def confirm(self) -> tuple[int, list[dict[str, Any]]]:
        rows, found = super().confirm()
        if self._name == "table":  # its answers are known without any model
            for q in self._first():
                pairs = zip(q.longer[len(q.prompt) - 1 :], q.longer[len(q.prompt) :], strict=False)
                if any(self._successor[a] != b for a, b in pairs):
                    found.append({"kind": "fault", "gap": None, "what": "not the table's", "prompt": list(q.prompt)})
        return rows, found

    def head(self, kind: str) -> Any:
        texts = [(q.prompt, q.longer[len(q.prompt) :]) for q in self._first()]
        return brief_head(self._here, kind, texts, epochs=4 if self._quick else 8).to(self.target.device)


def moved(target: Target, device: torch.device) -> Target:
    """A copy of a target on a device, with the attention that targets have there."""
    if device.type == "cpu":
        return target
    model = copy.deepcopy(target.model).to(device)
    model.set_attn_implementation(tree_attention.register(tree_attention.way_of("auto", device)))
    return replace(target, model=model)


class RealWorld(World):
    """A real model with the short prompts of a folder of JSONL files, as chats, and its own end ids. heads: by kind."""

    def __init__(self, target: Target, heads: Mapping[str, Any], folder: Path) -> None:
        super().__init__(target, new_tokens=64, noise=0.04)
        self._heads, self._folder = heads, folder

    @cached_property
    def _all(self) -> list[tuple[int, ...]]:
        """Prompts of all domains by turns, the short ones first."""
        files = sorted(self._folder.glob("*.jsonl"))
        domains = [sorted((tuple(self.target.encode(p.chat)) for p in read_prompts(file)), key=len) for file in files]
        return [prompt for some in zip(*domains, strict=False) for prompt in some]

    def prompts(self, number: int) -> list[tuple[int, ...]]:
        return self._all[number * SIZE : (number + 1) * SIZE]

    def eos(self, number: int, longer: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
        return tuple(sorted(end_ids("auto", self.target)))

    def head(self, kind: str) -> Any:
        return self._heads[kind]
