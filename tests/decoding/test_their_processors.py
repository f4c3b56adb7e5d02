"""The logits processors of the installed transformers: each is refused by name, or follows the nodes of a tree.

Whether a class may be used is found by calling it, and by reading its source for state and for rows told apart.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor
from transformers.generation import logits_process as theirs

from spectrain.decoding.processors import REFUSED, Processing

V, END = 12, 1
WHISPER = SimpleNamespace(no_timestamps_token_id=7, eos_token_id=END, bos_token_id=0, max_initial_timestamp_index=2)
MADE: dict[str, Callable[..., Any]] = {  # of the classes that may be used; each maker gets the class
    "MinLengthLogitsProcessor": lambda c: c(5, END),
    "MinNewTokensLengthLogitsProcessor": lambda c: c(3, 2, END),
    "TemperatureLogitsWarper": lambda c: c(0.6),
    "RepetitionPenaltyLogitsProcessor": lambda c: c(1.4, prompt_ignore_length=2),
    "TopPLogitsWarper": lambda c: c(0.7),
    "TopKLogitsWarper": lambda c: c(3),
    "TopHLogitsWarper": lambda c: c(0.5),
    "MinPLogitsWarper": lambda c: c(0.3),
    "TypicalLogitsWarper": lambda c: c(0.6),
    "EpsilonLogitsWarper": lambda c: c(0.1),
    "EtaLogitsWarper": lambda c: c(0.2),
    "NoRepeatNGramLogitsProcessor": lambda c: c(2),
    "SequenceBiasLogitsProcessor": lambda c: c([[[3], 1.5], [[2, 4], -2.0], [[3, 4], 2.0]]),
    "NoBadWordsLogitsProcessor": lambda c: c([[3], [2, 4], [3, 4]]),
    "ForcedBOSTokenLogitsProcessor": lambda c: c(3),
    "ForcedEOSTokenLogitsProcessor": lambda c: c(5, END),
    "InfNanRemoveLogitsProcessor": lambda c: c(),
    "ExponentialDecayLengthPenalty": lambda c: c((1, 1.3), END, 2),
    "LogitNormalization": lambda c: c(),
    "SuppressTokensAtBeginLogitsProcessor": lambda c: c([4, 5], 4),
    "SuppressTokensLogitsProcessor": lambda c: c([4, 5]),
    "WhisperTimeStampLogitsProcessor": lambda c: c(WHISPER, begin_index=2),
    "AlternatingCodebooksLogitsProcessor": lambda c: c(2, 6, 3),
    "BarkEosPrioritizerLogitsProcessor": lambda c: c(END, 0.2),
    "WatermarkLogitsProcessor": lambda c: c(V, "cpu", context_width=2),
}
# Signs in the source of classes that may be used, each looked at.
HARMLESS = {
    "RepetitionPenaltyLogitsProcessor": "moves a tensor to the device; that tensor tells rows apart, so that it is refused where it is set",
    "SequenceBiasLogitsProcessor": "prepares its tensors at the first call, from the vocabulary's size alone",
    "NoBadWordsLogitsProcessor": "as SequenceBiasLogitsProcessor",
    "ExponentialDecayLengthPenalty": "moves the end ids to the device",
    "SuppressTokensAtBeginLogitsProcessor": "its begin_index is set by hand only",
    "WhisperTimeStampLogitsProcessor": "its begin_index is set by hand only; each row is looked at alone",
    "WatermarkLogitsProcessor": "seeds its generator from each row's own ids before each use",
}
ROW_CALLS = ("enumerate(input_ids", "range(batch_size", "self.rng.")
ROW_NAMES = {"batch_id", "batch_idx", "b_idx", "active_batches", "num_channels", "encoder_input_ids", "num_hypos", "repeat", "split"}


def classes() -> dict[str, type]:
    found = {name: c for name, c in vars(theirs).items() if inspect.isclass(c) and issubclass(c, LogitsProcessor)}
    return {name: c for name, c in found.items() if c is not LogitsProcessor}


def root_of(node: ast.expr) -> str:
    """The name that an attribute or an item hangs on."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def writes_to_self(node: ast.AST) -> bool:
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return any(root_of(target) == "self" and not isinstance(target, ast.Name) for target in targets if isinstance(target, ast.expr))


def signs(cls: type) -> set[str]:
    """Lines outside __init__ that write to self, count the rows of input_ids or seed a generator, and names that stand for rows."""
    out = set()
    methods = [f for base in cls.__mro__ if base not in (LogitsProcessor, object) for f in vars(base).values() if inspect.isfunction(f)]
    for method in methods:
        if method.__name__ == "__init__":
            continue
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))):
            counts_rows = isinstance(node, ast.Call) and ast.unparse(node).startswith(ROW_CALLS)
            if writes_to_self(node) or counts_rows or getattr(node, "id", getattr(node, "attr", "")) in ROW_NAMES:
                out.add(ast.unparse(node))
    return out


def test_class_is_neither_refused_nor_checked() -> None:
    found = set(classes())
    assert not found - set(REFUSED) - set(MADE), "look at these: refuse them in decoding/processors.py, or make them here"
    assert set(MADE) <= found and not set(MADE) & set(REFUSED)
    assert set(REFUSED) - found == {"HiggsAudioV2DelayPatternLogitsProcessor"}  # a model's own, and no name without a class


def test_sign_of_a_state_or_a_row_goes_unseen() -> None:
    seen = {name for name, cls in classes().items() if signs(cls)}
    assert not seen - set(REFUSED) - set(HARMLESS), "these write to self or tell rows apart"
    assert not set(HARMLESS) - seen and not (set(REFUSED) & set(classes())) - seen  # the scan sees all that is known


@pytest.mark.parametrize("name", [*sorted(REFUSED), "RepetitionPenaltyLogitsProcessor"])
def test_processor_that_cannot_follow_a_tree_is_taken(name: str) -> None:
    cls = classes().get(name) or type(name, (LogitsProcessor,), {"__call__": lambda self, input_ids, scores: scores})
    processor = object.__new__(type("Own", (cls,), {}))
    if name not in REFUSED:
        processor = cls(1.2, prompt_ignore_length=torch.tensor([2, 3]))
    way_out = r"; pass a function of \(input_ids, scores\) that depends on input_ids alone"
    with pytest.raises(ValueError, match=r"holds (Own|Repetition\w+), which .*" + way_out):
        Processing(logits_processors=[processor])


@pytest.mark.parametrize("name", MADE)
def test_row_depends_on_its_call(name: str) -> None:
    """Histories together, alone, in another order and after other calls: the scores of each are the same, bit for bit."""
    make = MADE[name]
    (processor,) = Processing(logits_processors=[make(classes()[name])]).logits_processors
    g = torch.Generator().manual_seed(0)
    changed = False
    for length in (1, 4, 6, 3, 4, 5):
        ids = torch.randint(0, V, (6, length), generator=g)
        scores = 2 * torch.randn(6, V, generator=g)
        together = processor(ids, scores.clone())
        order = torch.randperm(6, generator=g)[:5]
        assert torch.equal(processor(ids[order], scores[order]), together[order])
        for b in range(6):
            alone = make(classes()[name])(ids[b : b + 1], scores[b : b + 1].clone())[0]
            torch.testing.assert_close(alone, together[b], rtol=1e-6, atol=1e-6)
        changed |= not torch.equal(together, scores)
    assert changed or name == "InfNanRemoveLogitsProcessor"  # scores without NaN and infinity stay
