"""Adapters of a target: how far they move its law, kept as peft does, merged, and refused where they do not belong."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.config import LoraConfig
from spectrain.data.rows import Row
from spectrain.heads.base import check_head, load_head, save_head
from spectrain.target import adapter as adapters
from spectrain.target.adapter import check_lora, law_change, merged, save_adapter, with_adapter
from spectrain.target.model import Target, load_target

ROWS = [Row(str(i), "d", [7 + i, 12, 9, 30 + i, 41, 5], [0, 0, 1, 1, 0, 1]) for i in range(4)]


def moved(target: Target, folder: Path, size: float = 0.2, seed: int = 0, modules: Sequence[str] | None = None) -> tuple[Target, str]:
    """The target with a random adapter, and that adapter's hash as it is saved in `folder`."""
    adapted, wrapped = with_adapter(target, LoraConfig(rank=2, alpha=4, modules=modules), seed=seed)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in wrapped.parameters():
            if p.requires_grad:
                p.copy_(torch.randn(p.shape, generator=g) * size)
    return adapted, save_adapter(wrapped, target, folder)


@pytest.fixture
def on_disk(make_target: Callable[..., Target], tmp_path: Path) -> Callable[..., tuple[Target, Path]]:
    """on_disk(name, **changes): a target in a folder of its own."""

    def make(name: str, **changes: Any) -> tuple[Target, Path]:
        target = make_target(**changes)
        target.model.save_pretrained(tmp_path / name)
        target.tokenizer.save_pretrained(tmp_path / name)
        return target, tmp_path / name

    return make


def last_logits(target: Target, row: Row) -> torch.Tensor:
    ids_1L = torch.tensor(row.ids_L.tolist())[None]
    return target.forward(ids_1L, positions_BN=torch.arange(len(row))[None], mask=None, cache=None).logits_BKV[0]


def test_change_of_the_law_is_not_counted_right(make_target: Callable[..., Target], tmp_path: Path) -> None:
    """Sums by hand in float64 over the laws that answer supervised tokens; a new adapter changes nothing at all."""
    target = make_target()
    new, _ = with_adapter(target, LoraConfig(), seed=0)
    assert adapters.LawChange(12, 0.0, 12) == law_change(target, new, ROWS)
    adapted, _ = moved(target, tmp_path / "a")
    found = law_change(target, adapted, ROWS)
    p_RV, q_RV = (torch.cat([last_logits(t, row)[[1, 2, 4]].double().log_softmax(-1) for row in ROWS]) for t in (target, adapted))
    assert found.tokens == 12 and found.agree == int((p_RV.argmax(-1) == q_RV.argmax(-1)).sum()) < 12
    assert found.kl_nats == pytest.approx(float((p_RV.exp() * (p_RV - q_RV)).sum()), rel=1e-4) and found.kl_nats > 0.1
    told = found.record("4 rows")
    assert told == {"kl": found.kl_nats / 12, "agreement": found.agree / 12, "kl_nats": found.kl_nats, "agree": found.agree, "tokens": 12,
                    "rows": "4 rows"}  # fmt: skip
    text = adapters.change_text(told)
    assert f"nats a token ({found.kl_nats:.2f} over 12 tokens)" in text and f"({found.agree}/12), on 4 rows" in text


def test_merged_target_forgets_what_it_is(on_disk: Callable[..., tuple[Target, Path]], tmp_path: Path) -> None:
    """Merged from disk it has the adapted law and names the adapter, also after it was saved as a plain folder; the target without the
    adapter stays as it was."""
    target, folder = on_disk("one")
    plain = last_logits(target, ROWS[0])
    adapted, sha256 = moved(target, tmp_path / "adapter")
    assert not (tmp_path / "adapter/README.md").exists()
    whole = load_target(folder, adapter=tmp_path / "adapter")
    torch.testing.assert_close(last_logits(whole, ROWS[0]), last_logits(adapted, ROWS[0]), atol=1e-4, rtol=1e-4)
    assert torch.equal(last_logits(target, ROWS[0]), plain) and (last_logits(whole, ROWS[0]) - plain).abs().max() > 0.1
    assert whole.adapter == whole.fingerprints["adapter_sha256"] == sha256 and "adapter_sha256" not in target.fingerprints
    assert not any(p.requires_grad or "lora" in name for name, p in whole.model.named_parameters())
    whole.model.save_pretrained(tmp_path / "whole")
    whole.tokenizer.save_pretrained(tmp_path / "whole")
    again = load_target(tmp_path / "whole")
    assert again.fingerprints == whole.fingerprints
    assert torch.equal(last_logits(load_target(tmp_path / "whole", adapter=tmp_path / "adapter"), ROWS[0]), last_logits(whole, ROWS[0]))


def test_adapter_is_taken_where_it_does_not_belong(on_disk: Callable[..., tuple[Target, Path]], tmp_path: Path) -> None:
    target, folder = on_disk("one")
    moved(target, tmp_path / "adapter")
    moved(target, tmp_path / "other", seed=1)
    _, stranger = on_disk("two", seed=5)
    with pytest.raises(ValueError, match=r"is an adapter of tiny, whose embedding differs from that of .*two; load that target"):
        load_target(stranger, adapter=tmp_path / "adapter")
    with pytest.raises(ValueError, match="has another adapter than .*other merged into it"):
        merged(load_target(folder, adapter=tmp_path / "adapter"), tmp_path / "other")
    with pytest.raises(ValueError, match="no adapter in .*one; give a head directory"):
        load_target(folder, adapter=folder)
    (tmp_path / "adapter/adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no whole adapter"):
        load_target(folder, adapter=tmp_path / "adapter")
    _, wide = on_disk("three", hidden_size=16)
    (tmp_path / "other/made_with.json").unlink()  # as peft alone writes it
    with pytest.raises(ValueError, match="other does not fit .*three"):
        load_target(wide, adapter=tmp_path / "other")
    assert load_target(folder, adapter=tmp_path / "other").adapter is not None


def test_head_serves_a_target_that_it_was_not_trained_with(
    on_disk: Callable[..., tuple[Target, Path]], make_head: Callable[..., Any], tmp_path: Path
) -> None:
    """Without the adapter, with another one, and a head that was trained alone on a target with one; a damaged adapter."""
    target, folder = on_disk("one")
    made = {"target": str(folder), **{key: target.fingerprints[key] for key in adapters.TIED}}
    save_head(make_head(target), tmp_path / "alone", run_yaml="", made_with=made)
    for name, seed in (("head", 0), ("other", 1)):
        save_head(make_head(target), tmp_path / name, run_yaml="", made_with=made, adapter=lambda to, n=seed: moved(target, to, seed=n)[1])
    heads = {name: load_head(tmp_path / name) for name in ("alone", "head", "other")}
    assert heads["alone"].adapter is None and heads["head"].adapter == tmp_path / "head/adapter"
    adapted = load_target(folder, adapter=tmp_path / "head")

    def check(name: str, some: Target) -> None:
        check_head(heads[name], some.fingerprints, some.name, some.tokenizer)

    check("alone", target)
    check("head", adapted)
    load = rf"load them together: load_target\('{folder}', adapter='{tmp_path}/head/adapter'\)"
    with pytest.raises(ValueError, match=f"trained together with an adapter of its target, and tiny is without it; {load}"):
        check("head", target)
    with pytest.raises(ValueError, match="and .*one has another one; load them together"):
        check("other", adapted)
    with pytest.raises(ValueError, match="one has an adapter, and this head was trained for the target without one"):
        check("alone", adapted)
    shutil.copytree(tmp_path / "other/adapter", tmp_path / "head/adapter", dirs_exist_ok=True)
    with pytest.raises(ValueError, match="head/adapter is not the adapter that the head was trained with"):
        load_head(tmp_path / "head")


def test_hash_is_of_other_things_than_the_adapter(target: Target, tmp_path: Path) -> None:
    """Weights and strength count; the place of the target and the order of names do not."""
    _, one = moved(target, tmp_path / "one")
    _, two = moved(target, tmp_path / "two")
    assert one == two
    path = tmp_path / "two/adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "base_model_name_or_path": "elsewhere", "target_modules": config["target_modules"][::-1]}))
    assert adapters.adapter_hash(tmp_path / "two") == one
    path.write_text(json.dumps({**config, "lora_alpha": 5}))
    assert adapters.adapter_hash(tmp_path / "two") != one != moved(target, tmp_path / "three", seed=1)[1]


def test_adapter_that_cannot_be_made_is_no_error(target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert len(check_lora(LoraConfig(), target)) == 21 and len(check_lora(LoraConfig(modules=("q_proj",)), target)) == 3
    with pytest.raises(ValueError, match=r"lora.modules query: tiny has no such part to adapt; its layers have .* down_proj, .*q_proj"):
        check_lora(LoraConfig(modules=("q_proj", "query")), target)
    adapted, _ = moved(target, tmp_path / "a", modules=("v_proj",))
    assert "v_proj" in json.loads((tmp_path / "a/adapter_config.json").read_text())["target_modules"][0]
    assert sum("lora_A" in name for name, _ in adapted.model.named_parameters()) == 3
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="training.lora needs peft, which is not installed: pip install peft"):
        check_lora(LoraConfig(), target)
