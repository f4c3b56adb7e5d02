"""Variants of EAGLE-3 in a real engine: the text stays the target's, and the engine accepts what our own generator accepts.

The heads are trained for a moment on the target's own answers, so that a good part of their drafts is accepted. Each variant is also
drafted here with one option ignored: what the engine accepted must not be that.
"""

import runpy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.config import HeadConfig
from spectrain.export.eagle3 import export_eagle3
from spectrain.heads.base import save_head
from spectrain.target.model import Target
from spectrain.training.setup import made_with, new_head

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]  # reading GGUF warns inside third-party code
PASSES = 12
SERVED = runpy.run_path(str(Path(__file__).with_name("served_heads.py")))
MOVED, VOCABULARY, answers_of, apart, drafted, prompts_of, serve, train_a_moment = (
    SERVED[name] for name in ("MOVED", "VOCABULARY", "answers_of", "apart", "drafted", "prompts_of", "serve", "train_a_moment")
)


@dataclass
class Variant:
    """settings: of the recipe's head. ignored: fields of the head's config as an engine has them that knows nothing of the option."""

    settings: dict[str, Any]
    ignored: list[dict[str, Any]] = field(default_factory=list)


FLAGS = ("norm_before_residual", "fc_norm", "norm_output")
VARIANTS = {
    "flags": Variant(dict.fromkeys(FLAGS, True), [{flag: False} for flag in FLAGS]),
    "two layers behind a window": Variant(
        {"num_layers": 2, "sliding_window": 4}, [{"sliding_window": None}, {"sliding_window": 3}, {"num_hidden_layers": 1}]
    ),
    "one state": Variant({"layer_ids": (27,)}, [{"layer_ids": (15,)}]),
    "another width": Variant({"hidden_size": 384, "norm_before_fc": True}, [{"norm_before_fc": False}]),
}


@pytest.fixture(scope="module")
def prompts(small: Target) -> list[list[int]]:
    found: list[list[int]] = prompts_of(small)
    return found


@pytest.fixture(scope="module")
def plain(small: Target, prompts: list[list[int]]) -> list[list[int]]:
    return [row.tokens for row in answers_of(small, prompts)]


def trained(small: Target, prompts: list[list[int]], plain: list[list[int]], settings: dict[str, Any]) -> Any:
    """A head that has seen the target's answers a few times, in every step of its unrolling."""
    counts_V = torch.bincount(torch.tensor(sum(plain, [])), minlength=small.vocab_size)
    config = HeadConfig(**{"draft_vocab_size": VOCABULARY, "layer_ids": (2, 15, 27), **settings})
    head = new_head(config, small, [], seed=0, counts_V=counts_V)
    with torch.no_grad():
        first = dict(head.midlayer.named_parameters())
        for name, parameter in head.above.named_parameters():  # further layers start faint, and would hardly be missed
            parameter.copy_(first[name.partition(".")[2]][..., -parameter.shape[-1] :])
        for name, parameter in head.named_parameters():
            if "norm" in name:  # a started head has even factors, which hide where a norm is applied
                parameter.mul_((0.6 * torch.randn_like(parameter)).exp())
    return train_a_moment(small, head, prompts, plain, passes=PASSES)


def without(head: Any, changes: dict[str, Any]) -> Any:
    """The same weights computed otherwise."""
    other = type(head)(head.config.model_copy(update=changes))
    other.load_state_dict(head.state_dict(), strict=False)
    return other.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def heads(small: Target, prompts: list[list[int]], plain: list[list[int]]) -> dict[str, Any]:
    found = {}
    for name, variant in VARIANTS.items():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            found[name] = trained(small, prompts, plain, variant.settings)
    return found


@pytest.fixture(scope="module")
def served(
    engine_python: str, small_folder: Path, small: Target, heads: dict[str, Any], prompts: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:  # fmt: skip
    """What the engine made of every head, in one process."""
    folder = tmp_path_factory.mktemp("variants")
    folders: dict[str, tuple[str, Path]] = {}
    for name, head in heads.items():
        save_head(head, folder / f"{name} head", run_yaml="", made_with=made_with(small, {}))
        out = export_eagle3(folder / f"{name} head", folder / name.replace(" ", "_"), embed_VW=small.embedding_VW)
        folders[name] = ("eagle3", out)
    found: dict[str, Any] = serve(engine_python, small_folder, folders, prompts, folder)
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_engine_computes_another_head_than_the_generator(
    served: dict[str, Any], small: Target, heads: dict[str, Any], prompts: list[list[int]], name: str
) -> None:
    assert served[name]["answers"] == served["plain"], "drafting changed the text"
    found, own = [served[name]["rounds"], *served[name]["accepted"]], drafted(small, prompts, heads[name])
    print(f"{name}: rounds and accepted drafts by position: {found} in the engine, {own} here")
    assert apart(found, own) <= MOVED
    assert found[1] > found[0] / 3 and found[-1] > MOVED, "too few are accepted to tell heads apart"
    for changes in VARIANTS[name].ignored:
        other = drafted(small, prompts, without(heads[name], changes))
        print(f"  {other} with {changes}")
        assert apart(found, other) > 2 * MOVED, f"accepted drafts do not show {changes}"
