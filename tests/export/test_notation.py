"""Layer ids that a folder counts in one of two ways: a head that only agrees with the target in one of them is read in that one.

Legend: V vocabulary, W width, L tokens of a row.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spectrain.export.eagle3 import export_eagle3
from spectrain.export.families import head_from_folder
from spectrain.export.flat import AmbiguousIds
from spectrain.export.notation import hits
from spectrain.heads.base import save_head
from spectrain.heads.eagle3 import Eagle3
from spectrain.target.model import Target
from spectrain.training.setup import made_with

KEY = "eagle_aux_hidden_state_layer_ids"
LAYERS = 9  # of the target: its default states are hs[2], hs[4], hs[6]


@pytest.fixture(scope="module")
def deep(make_target: Callable[..., Target]) -> Target:
    """A target whose layers turn the stream enough to be told apart, with output rows that are its embedding's."""
    return make_target(num_hidden_layers=LAYERS, initializer_range=0.1)


def rows_of(count: int, length: int = 60) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(6, 100, (count, length), generator=generator).tolist()


def seer(target: Target, layer_ids: tuple[int, ...]) -> Eagle3:
    """A head over the whole vocabulary that is fitted to the target's best tokens on the states of these layers alone."""
    c = target.config
    head = Eagle3(
        Eagle3.Config(
            hidden_size=32, target_hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            rms_norm_eps=1e-5, rope_parameters=dict(c.rope_parameters), max_position_embeddings=256, vocab_size=100, draft_vocab_size=100,
            layer_ids=layer_ids, target_layers=LAYERS,
        )
    )  # fmt: skip
    head.start_from(
        layer=None, norm=torch.ones(32), output_VW=target.output_VW, target_ids=torch.arange(100), train_output=True, seed=0
    )  # fmt: skip
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    ids_BL = torch.tensor(rows_of(8))
    positions = torch.arange(ids_BL.shape[1])[None].expand_as(ids_BL)
    out = target.forward(ids_BL, positions_BN=positions, mask=None, cache=None, layer_ids=layer_ids)
    batch = SimpleNamespace(ids_BL=ids_BL, mask_BL=torch.ones_like(ids_BL) > 0, states_BLF=out.states_BNF, doc_BL=None, position_BL=None)
    row_R = torch.arange(ids_BL.numel()).view_as(ids_BL)[:, :-1].flatten()
    for _ in range(60):
        optimizer.zero_grad()
        _, logits = next(iter(head.rows(batch, row_R, target.embedding_VW, 1)))
        torch.nn.functional.cross_entropy(logits, out.logits_BKV[:, 1:].argmax(-1).flatten()).backward()
        optimizer.step()
    return head.eval().requires_grad_(False)


def folder_of(head: Eagle3, target: Target, out: Path, ids: list[int]) -> Path:
    """The head as a folder without a word of ours, that names its layers by the nested key alone."""
    save_head(head, out.with_name("head"), run_yaml="", made_with=made_with(target, {}))
    export_eagle3(out.with_name("head"), out)
    config: dict[str, Any] = json.loads((out / "config.json").read_text())
    said = {key: value for key, value in config.items() if key not in (KEY, "spectrain")}
    (out / "config.json").write_text(json.dumps({**said, "eagle_config": {KEY: ids}}))
    return out


@pytest.mark.parametrize("trained", [(1, 3, 5), (2, 4, 6)])
def test_ids_are_counted_as_the_head_was_not_trained(deep: Target, tmp_path: Path, trained: tuple[int, ...]) -> None:
    """The folder says 1, 4, 7 in either case: states hs[1, 4, 7], or outputs hs[2, 5, 8]."""
    states = {(1, 3, 5): (1, 4, 7), (2, 4, 6): (2, 5, 8)}[trained]
    head = seer(deep, states)
    folder = folder_of(head, deep, tmp_path / "theirs", [1, 4, 7])
    with pytest.raises(AmbiguousIds, match="--rows FOLDER"):
        head_from_folder(folder, deep)
    found, notes = head_from_folder(folder, deep, rows=rows_of(8))
    assert found.layer_ids == states and f"layer ids hs{list(states)}: first drafts agree with tiny on" in notes[-1]
    assert torch.equal(hits(found, deep, rows_of(8)), hits(head, deep, rows_of(8)))
    given, _ = head_from_folder(folder, deep, notation="hs" if states[0] == 1 else "output")
    assert given.layer_ids == states


def test_head_that_agrees_with_neither_is_guessed(deep: Target, make_head: Callable[..., Eagle3], tmp_path: Path) -> None:
    folder = folder_of(make_head(deep, draft_vocab=100, layer_ids=(1, 4, 7)), deep, tmp_path / "theirs", [1, 4, 7])
    with pytest.raises(ValueError, match="too close to tell"):
        head_from_folder(folder, deep, rows=rows_of(2))
    with pytest.raises(ValueError, match="less than three tokens"):
        head_from_folder(folder, deep, rows=[[7, 8]])


def test_ids_that_are_none_in_one_notation_are_asked_for(deep: Target, make_head: Callable[..., Eagle3], tmp_path: Path) -> None:
    folder = folder_of(make_head(deep, draft_vocab=100, layer_ids=(1, 4, 8)), deep, tmp_path / "theirs", [1, 4, 8])
    found, notes = head_from_folder(folder, deep, rows=rows_of(1))
    assert found.layer_ids == (1, 4, 8) and "in the other notation they are none" in notes[-1]
