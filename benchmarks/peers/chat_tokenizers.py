"""Small tokenizers of five families: their chat templates, special tokens and ways to split a text.

The vocabulary is trained on a few sentences, so words have several tokens, as with the large vocabularies.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parents[2] / "tests" / "fixtures" / "chat_templates"
SENTENCES = (
    "What is the capital of France? The capital of France is Paris.",
    "Name two primes, please. Two and three are primes; so is five.",
    "Below is a question. Write an answer that is short and right.",
    "user assistant system model [INST] [/INST] You are a helpful assistant. Thanks a lot!",
)


@dataclass(frozen=True)
class Family:
    """A family of tokenizers.

    specials:  its special tokens
    eos:       its end of sequence
    bos:       its beginning of sequence, if it has such a token
    pad:       its padding, if it has such a token
    adds_bos:  whether it writes bos before a text
    is_byte:   whether it splits bytes (GPT-2) or characters, with a word's space before it (SentencePiece)
    has_space: whether, of characters, a space is put before every text between special tokens
    """

    specials: tuple[str, ...]
    eos: str
    bos: str | None = None
    pad: str | None = None
    adds_bos: bool = False
    is_byte: bool = True
    has_space: bool = False


FAMILIES = {
    "smollm2": Family(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|im_start|>", "<|im_end|>"),
    "qwen2_5": Family(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>", pad="<|endoftext|>"),
    "llama3": Family(
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|end_of_text|>",
        "<|begin_of_text|>",
        adds_bos=True,
    ),
    "mistral": Family(("<unk>", "<s>", "</s>"), "</s>", "<s>", adds_bos=True, is_byte=False, has_space=True),
    "gemma": Family(
        ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        "<eos>",
        "<bos>",
        "<pad>",
        adds_bos=True,
        is_byte=False,
    ),
}


TOOL_FAMILIES = {
    "qwen2_5": FAMILIES["qwen2_5"],
    "llama3_1": Family((*FAMILIES["llama3"].specials, "<|python_tag|>"), "<|eot_id|>", "<|begin_of_text|>"),
    "qwen3": FAMILIES["qwen2_5"],
    "qwen3_instruct_2507": FAMILIES["qwen2_5"],
}
"""Families whose chat templates write tools."""


def build_chat_tokenizer(name: str, directory: Path) -> PreTrainedTokenizerFast:
    """Save the tokenizer of a family in ``directory``, with its chat template, and return it."""
    family = (FAMILIES | TOOL_FAMILIES)[name]
    inner = _splitter(family)
    kind = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(family.specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if family.is_byte else [*string.printable, "▁"],
        show_progress=False,
    )
    inner.train_from_iterator([*SENTENCES, "\n".join(SENTENCES)], kind)
    if family.adds_bos:
        bos = (str(family.bos), inner.token_to_id(str(family.bos)))
        inner.post_processor = processors.TemplateProcessing(single=f"{family.bos} $A", special_tokens=[bos])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=family.bos, eos_token=family.eos, pad_token=family.pad
    )
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer.save_pretrained(directory)
    return tokenizer


def _splitter(family: Family) -> Tokenizer:
    """Return an untrained tokenizer of the family's way to split a text."""
    if family.is_byte:
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
        inner.decoder = decoders.ByteLevel()
        return inner
    inner = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    spaces = [normalizers.Prepend("▁")] if family.has_space else []
    inner.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return inner
