"""A target that is spread over processes is the same target: its weights, states, stores and answers are those of one process."""

import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from transformers import GPT2Config, GptOssConfig, GptOssForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import spectrain as st
from spectrain.config import LoraConfig
from spectrain.target import placement as placement_module
from spectrain.target.adapter import check_lora
from spectrain.target.features import FeatureStore
from spectrain.target.model import Target, load_target
from spectrain.target.passes import choose
from spectrain.target.placement import Placement, finish, loading, open_placement
from spectrain.target.spread_cache import SpreadCache

SCRIPT = Path(__file__).with_name("placed.py")
SIZES = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.25, "bos_token_id": None,
    "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


def qwen3() -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))


def gpt_oss() -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    layers = ["sliding_attention", "full_attention"] * 2
    more = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "layer_types": layers, "rope_parameters": rope}
    return GptOssForCausalLM(GptOssConfig(**SIZES, **more, tie_word_embeddings=False))


@dataclass
class Spread:
    """What every process found, what one process finds, and where the files are."""

    kind: str
    found: list[dict[str, Any]]
    one: dict[str, Any]
    target: Target
    folder: Path

    @property
    def exact(self) -> bool:
        """Products that are split are summed in another order."""
        return self.kind != "tp"


def spread(folder: Path, make_target: Callable[..., Target], make_tokenizer: Callable[..., PreTrainedTokenizerFast], case: Any) -> Spread:
    """Save a model, ask one process and several the same."""
    family, kind, world, tp_size = case
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make_target(num_hidden_layers=4).model if family == "llama" else {"qwen3": qwen3, "gpt_oss": gpt_oss}[family]()
    model.save_pretrained(folder / "target")
    make_tokenizer(100).save_pretrained(folder / "target")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}", str(SCRIPT), str(folder), kind]
    run = subprocess.run([*start, *([str(tp_size)] if tp_size else [])], capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stdout + run.stderr
    target, ask = load_target(folder / "target"), runpy.run_path(str(SCRIPT))
    one = {**ask["weights"](target), **ask["stored"](target, folder / "one"), "online": ask["online"], "uneven": ask["uneven"]}
    return Spread(kind, [torch.load(folder / f"found-{rank}.pt") for rank in range(world)], one, target, folder)


OTHERS = [(family, kind, 2, None) for family in ("qwen3", "gpt_oss") for kind in ("fsdp2", "tp")]
SLOW = [("llama", "zero3", 2, None), ("llama", "tp", 4, 2), *OTHERS]  # four processes: two groups of two
CASES = [("llama", "fsdp2", 2, None), ("llama", "tp", 2, None), *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case[:3])))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, make_target: Any, make_tokenizer: Any) -> Spread:
    if request.param[1] == "zero3":
        pytest.importorskip("deepspeed")
    return spread(tmp_path_factory.mktemp("spread"), make_target, make_tokenizer, request.param)


def test_every_process_holds_the_whole_target(both: Spread) -> None:
    whole = sum(p.numel() for p in both.target.layers.parameters())
    assert all(found["shares"] < 0.8 * whole for found in both.found)
    world = len(both.found)
    copies = {"tp": world // 2}.get(both.kind, world)
    size = world // copies
    assert [found["place"] for found in both.found] == [(rank // size, copies, rank % size == 0) for rank in range(world)]


def test_weights_or_what_starts_from_them_are_not_the_targets(both: Spread) -> None:
    """Fingerprints, embedding and output rows, a head's start from the last layer and from the size of states."""
    for found in both.found:
        assert found["fingerprints"] == both.one["fingerprints"] and found["rows"] == both.one["rows"]
        assert found["notes"] == both.one["notes"]
        for name, tensor in both.one["head"].items():
            torch.testing.assert_close(found["head"][name], tensor, atol=1e-6, rtol=1e-5)


def test_answers_are_not_those_of_one_process(both: Spread) -> None:
    assert all(found["answers"] == both.one["answers"] for found in both.found)


def test_store_differs_from_that_of_one_process(both: Spread) -> None:
    """Also after a lost shard was made anew; by tp to a step of the codes."""
    out, one = both.folder / "states", both.folder / "one"
    names = sorted(p.name for p in one.iterdir())
    assert sorted(p.name for p in out.iterdir()) == names
    alike = names if both.exact else ["manifest.json"]
    assert all((out / name).read_bytes() == (one / name).read_bytes() for name in alike)
    rows = runpy.run_path(str(SCRIPT))["rows"]()
    ours, theirs = FeatureStore(out, rows), FeatureStore(one, rows)
    for i in range(len(rows)):
        for name, codes in theirs[i].states.tensors.items():
            step = {"atol": 1, "rtol": 0} if codes.dtype == torch.int8 else {"atol": 1e-4, "rtol": 0.01}
            torch.testing.assert_close(ours[i].states.tensors[name].float(), codes.float(), **step)
        assert torch.equal(ours[i].best_M, theirs[i].best_M)


def test_shards_are_made_by_each_process_of_a_group_or_not_again(both: Spread) -> None:
    first, second = (sum(found["made"][i] for found in both.found) for i in range(2))
    assert both.one["made"] == [5, 1]
    if both.kind == "tp":
        assert all(found["made"] == [0, 0] for found in both.found if not found["place"][2])
    # A process that is done makes what the others have not written, which these then write, too: how many depends on the disk.
    copies = both.found[0]["place"][1]
    assert 5 <= first <= 5 + 4 * (copies - 1) and 1 <= second <= copies
    assert all("4 rows" in found["check"] for found in both.found)


def test_online_states_are_of_another_process_or_rounded(both: Spread) -> None:
    for rank, found in enumerate(both.found):
        expected = both.one["online"](both.target, [(0, 5, 2), (3,)][rank % 2])
        for name, tensor in expected.items():
            torch.testing.assert_close(found["online"][name], tensor, atol=1e-5, rtol=1e-5)


def test_processes_with_more_passes_than_the_others_wait_for_ever(both: Spread) -> None:
    """Three and five passes, two and none; each is over the process's own row."""
    if both.kind == "tp":
        assert "uneven" not in both.found[0]  # they make every pass together
        return
    for rank, found in enumerate(both.found):
        expected = [both.one["uneven"](both.target, [counts[rank]] * 2, rank) for counts in ((3, 5), (2, 0))]
        torch.testing.assert_close(found["uneven"], expected, atol=1e-4, rtol=1e-5)


def test_next_target_is_spread_like_the_first(both: Spread) -> None:
    assert [found["whole"] for found in both.found] == [float(both.target.output_VW.abs().sum())] * len(both.found)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"placement": "pp"}, "placement 'pp' is unknown; choose one of rank, fsdp2, tp, zero3"),
        ({"placement": "fsdp2"}, "placement fsdp2 .* this is one process; start several: torchrun --nproc_per_node N"),
        ({"placement": "fsdp2", "tp_size": 2}, "tp_size 2 belongs to placement tp, found placement fsdp2"),
        ({"placement": "tp", "adapter": "runs/x"}, r"an adapter was to be merged \(runs/x\); merge it into a folder first"),
        ({"placement": "fsdp2", "device": "meta"}, "device meta was asked for; leave it out"),
    ],
)
def test_placement_that_cannot_be_had_hangs(asked: dict[str, Any], message: str, target: Target, tmp_path: Path) -> None:
    target.model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_target(tmp_path, **asked)


def test_gguf_file_or_quantised_weights_are_spread() -> None:
    with pytest.raises(ValueError, match="m.gguf is a GGUF file; write it as a folder first"):
        open_placement("tp", None, name="m.gguf", device="cpu")
    with pytest.raises(ValueError, match="quantization 8bit was asked for; leave one of the two out"):
        open_placement("fsdp2", None, name="m", device="cpu", quantization="8bit")


def test_tp_size_that_no_group_can_have_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ValueError, match="tp_size 4 and 6 processes; needed is 2 or more, and a number of processes that it divides"):
        open_placement("tp", 4, name="m", device="cpu")


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("llama", 3, "it has 4 query and 2 key heads; choose a tp_size of 2, or placement fsdp2"),
        ("gpt_oss", 3, "it has 4 query and 2 key heads"),
        ("gpt2", 2, "transformers has no plan to split it; choose placement fsdp2"),
    ],
)
def test_heads_that_do_not_divide_fail_far_inside(family: str, size: int, message: str, target: Target, tmp_path: Path) -> None:
    config = {"llama": target.model.config, "gpt_oss": gpt_oss().config, "gpt2": GPT2Config()}[family]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message), loading(Placement("tp", size), str(tmp_path), torch.float32):
        pass


@pytest.mark.parametrize(("kind", "method"), [("fsdp2", "bitsandbytes"), ("zero3", "gptq")])
def test_model_that_was_saved_quantised_is_spread(kind: Any, method: str, tmp_path: Path) -> None:
    config = LlamaConfig()
    config.quantization_config = {"quant_method": method}
    config.save_pretrained(tmp_path)
    wanted = f"was saved quantised .{method}., which placement {kind} cannot spread; choose placement rank"
    with pytest.raises(ValueError, match=wanted), loading(Placement(kind), str(tmp_path), torch.float32):
        pass


def test_weights_of_two_dtypes_are_made_one() -> None:
    class Odd(torch.nn.Module):
        _keep_in_fp32_modules, _keep_in_fp32_modules_strict = None, {"router"}

    with pytest.raises(ValueError, match="Odd keeps router in float32 beside bfloat16; choose placement fsdp2 or dtype float32"):
        finish(Placement("zero3"), Odd(), torch.bfloat16)


def test_launch_leaves_the_target_empty(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate launch --use_fsdp` without a file, which has transformers load weights in the first process alone; one process serves."""
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(name, "true")
    assert load_target(tmp_path).vocab_size == 100  # processes that know nothing of each other load all
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="leaves a frozen target empty on .* set fsdp_cpu_ram_efficient_loading: false"):
            load_target(tmp_path)
    finally:
        dist.destroy_process_group()


class OverTwo(Target):
    """Layers 0 and 2 on one device, 1 and 3 on another one, both of which are the CPU under names of their own."""

    def new_cache(self, rows: int, max_length: int) -> SpreadCache:
        devices = [torch.device("cpu"), torch.device("cpu", 0)] * 2
        return SpreadCache(devices, rows=rows, kv_heads=2, head_dim=8, max_length=max_length, dtype=torch.float32)


def test_layers_on_several_devices_answer_otherwise(make_target: Callable[..., Target], make_head: Callable[..., Any]) -> None:
    """By accelerate's hooks, with a cache in two parts: rows of unequal length, paths of trees, rows that leave."""
    whole = make_target(num_hidden_layers=4)
    model = accelerate.dispatch_model(make_target(num_hidden_layers=4).model, {"": "cpu"}, force_hooks=True)
    assert hasattr(model.model.layers[2], "_hf_hook")
    spread = OverTwo(model=model, tokenizer=whole.tokenizer, name="tiny", placement=Placement("device_map"))
    assert spread.fingerprints == whole.fingerprints and choose(spread, "auto", passes=10**6) == "eager"
    head, prompts = make_head(whole), [[6, 7, 8, 9, 6, 7], [20, 21, 22], [30] * 9]
    for shape in (st.Chain(3), st.Tree.dynamic(top_k=3, depth=3, budget=8)):
        for temperature in (0.0, 0.8):
            how = {"drafter": head, "shape": shape, "temperature": temperature, "max_new_tokens": 16, "eos": 20, "compile": False}
            ours, theirs = (st.generate(target, prompts, **how).rows for target in (spread, whole))
            assert [row.tokens for row in ours] == [row.tokens for row in theirs]
    assert len({len(row.rounds) for row in ours}) > 1  # some rows left before the others
    first, second = spread.new_cache(1, 5)._others, spread.new_cache(1, 5)._slab_XBGSD
    assert len(first) == 1 and len(second) == 4


def test_device_map_puts_layers_elsewhere_unsaid(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU all lies on the CPU and answers as ever; a map that leaves layers on the disk is refused, and so are processes."""
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(placement_module, "DEVICE_MAP", {"": "cpu"})
    loaded = load_target(tmp_path, placement="device_map", device="cpu")
    assert loaded.placement == Placement("device_map") and isinstance(loaded.new_cache(1, 4), SpreadCache)
    ours, theirs = (st.generate(which, [[6, 7, 8]], max_new_tokens=8).rows[0].tokens for which in (loaded, target))
    assert ours == theirs
    target.model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "disk"}
    with pytest.raises(ValueError, match="no room for all of it: parts would lie on 0, disk; choose a smaller dtype, quantization"):
        finish(Placement("device_map"), target.model, torch.float32)
    del target.model.hf_device_map
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="the devices of one process, and these are 2 processes; start one, without a launcher"):
        load_target(tmp_path, placement="device_map", device="cpu")


def test_error_in_a_section_waits_for_the_others() -> None:
    """It is raised where it happens, without a pass or a word to the others; the next section is open to all."""
    placement, idle = Placement("fsdp2"), []
    with pytest.raises(RuntimeError, match="it fell over"), placement.section(lambda: idle.append(1), torch.device("cpu")):
        raise RuntimeError("it fell over")
    assert not idle and not placement.stepping


def test_spread_weights_are_copied_packed_compiled_or_adapted(target: Target) -> None:
    sharded = Target(model=target.model, tokenizer=target.tokenizer, name="tiny", placement=Placement("tp", 2))
    assert choose(sharded, "auto", passes=10**6) == "eager"
    with pytest.raises(ValueError, match="compile=True is for plain weights, those of tiny are in placement tp; use compile='auto'"):
        choose(sharded, True, passes=1)
    with pytest.raises(ValueError, match="training.lora needs the target whole .* placement is tp; set --set target.placement=rank"):
        check_lora(LoraConfig(), sharded)
