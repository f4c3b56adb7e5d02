"""Medusa and EAGLE-1 heads in a real engine: the text stays the target's, and the engine accepts what our own generator accepts.

Each head is also drafted here with a part read otherwise: what the engine accepted must not be that. The target is small and random, with
logits far apart: five engines in one process are started for it in a minute or so.
"""

import copy
import runpy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.config import HeadConfig
from spectrain.export.engines import export_head
from spectrain.heads.base import save_head
from spectrain.heads.eagle import Eagle
from spectrain.target.model import Target, load_target
from spectrain.training.setup import made_with, new_head

pytestmark = [pytest.mark.engine]
SERVED = runpy.run_path(str(Path(__file__).with_name("served_heads.py")))
DEPTH, MOVED, answers_of, apart, drafted, serve, train_a_moment = (
    SERVED[name] for name in ("DEPTH", "MOVED", "answers_of", "apart", "drafted", "serve", "train_a_moment")
)
VOCABULARY, PASSES = 120, 20


@dataclass
class Family:
    """settings: of the recipe's head. otherwise: what an engine might make of its weights instead, by name."""

    to: str
    settings: dict[str, Any]
    otherwise: dict[str, Callable[[Any], None]]


def no_bias(head: Any) -> None:
    for name, parameter in head.named_parameters():
        if name.endswith("linear.bias"):
            parameter.zero_()


def one_block(head: Any) -> None:
    for blocks in head.heads:
        blocks[1].linear.weight.zero_()
        blocks[1].linear.bias.zero_()


def swapped_fc(head: Any) -> None:
    head.fc.weight.copy_(head.fc.weight.roll(head.config.hidden_size, dims=1))


def one_layer(head: Any) -> None:
    head.layers[1].self_attn.o_proj.weight.zero_()
    head.layers[1].mlp.down_proj.weight.zero_()


MEDUSA: dict[str, Any] = {"kind": "medusa", "num_heads": DEPTH, "draft_vocab_size": VOCABULARY}
EAGLE: dict[str, Any] = {"kind": "eagle", "draft_vocab_size": VOCABULARY, "output": "frozen"}
FAMILIES = {
    "medusa": Family("vllm", MEDUSA, {"no bias": no_bias}),
    "medusa with one output, two blocks": Family(
        "vllm", {**MEDUSA, "num_layers": 2, "shared_output": True}, {"no bias": no_bias, "one block": one_block}
    ),
    "medusa of the original layout": Family("medusa", MEDUSA, {"no bias": no_bias}),
    "eagle": Family("vllm", EAGLE, {"fc swapped": swapped_fc}),
    "eagle of two layers": Family("vllm", {**EAGLE, "num_layers": 2}, {"one layer": one_layer}),
}


@pytest.fixture(autouse=True, scope="module")
def one_core(all_cores: None) -> Iterator[None]:
    """On tensors this small, threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(make_target: Callable[..., Target], tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Attention heads of 32, the smallest that vLLM has."""
    folder = tmp_path_factory.mktemp("target")
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "max_position_embeddings": 512}
    made = make_target(vocab=300, initializer_range=0.1, **sizes)
    made.model.save_pretrained(folder)
    made.tokenizer.save_pretrained(folder)
    return load_target(folder, device="cpu")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    found: list[list[int]] = torch.randint(6, 300, (6, 12), generator=torch.Generator().manual_seed(0)).tolist()
    return found


@pytest.fixture(scope="module")
def heads(tiny: Target, prompts: list[list[int]]) -> dict[str, Any]:
    plain, found = [row.tokens for row in answers_of(tiny, prompts)], {}
    counts_V = torch.bincount(torch.tensor(sum(plain, [])), minlength=tiny.vocab_size)
    for name, family in FAMILIES.items():
        head = new_head(HeadConfig(**family.settings), tiny, [], seed=0, counts_V=counts_V)
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            for key, parameter in head.named_parameters():
                if key.endswith("linear.bias"):
                    parameter.copy_(torch.randn_like(parameter))
                if key.startswith("layers.1.") and key.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.mul_(20)  # it starts faint, and would hardly be missed
        found[name] = train_a_moment(tiny, head, prompts, plain, passes=PASSES)
    return found


@pytest.fixture(scope="module")
def served(
    engine_python: str, tiny: Target, heads: dict[str, Any], prompts: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:  # fmt: skip
    """What the engine made of every head, in one process."""
    folder = tmp_path_factory.mktemp("families")
    folders: dict[str, tuple[str, Path]] = {}
    for name, head in heads.items():
        where, family = folder / name.replace(" ", "_").replace(",", ""), FAMILIES[name]
        save_head(head, where.with_suffix(".head"), run_yaml="", made_with=made_with(tiny, {}))
        export_head(where.with_suffix(".head"), family.to, where, embed_VW=tiny.embedding_VW, output_VW=tiny.output_VW)
        folders[name] = (family.settings["kind"], where)
    found: dict[str, Any] = serve(engine_python, Path(tiny.name), folders, prompts, folder)
    return found


@torch.no_grad()
def as_served(tiny: Target, head: Any) -> Any:
    """The head with the ids that the engine drafts from: an EAGLE-1 head there goes through all of the target's output rows."""
    if not isinstance(head, Eagle):
        return head
    whole = Eagle(head.config.model_copy(update={"draft_vocab_size": tiny.vocab_size}))
    state = {name: tensor for name, tensor in head.state_dict().items() if name not in ("d2t", "t2d")}
    whole.load_state_dict({**state, "lm_head.weight": tiny.output_VW}, strict=False)
    whole.set_vocabulary(torch.arange(tiny.vocab_size))
    return whole.eval().requires_grad_(False)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_engine_computes_another_head_than_the_generator(
    served: dict[str, Any], tiny: Target, heads: dict[str, Any], prompts: list[list[int]], name: str
) -> None:
    assert served[name]["answers"] == served["plain"], "drafting changed the text"
    head = as_served(tiny, heads[name])
    found, own = [served[name]["rounds"], *served[name]["accepted"]], drafted(tiny, prompts, head)
    print(f"{name}: rounds and accepted drafts by position: {found} in the engine, {own} here")
    assert apart(found, own) <= MOVED
    assert found[1] > found[0] / 3 and found[-1] > MOVED, "too few are accepted to tell heads apart"
    for what, change in FAMILIES[name].otherwise.items():
        other = copy.deepcopy(head)
        change(other)
        counted = drafted(tiny, prompts, other)
        print(f"  {counted} with {what}")
        assert apart(found, counted) > 2 * MOVED, f"accepted drafts do not show {what}"
