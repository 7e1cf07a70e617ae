"""Files that both sides of a comparison read: models, tokenizers and prompts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from benchmarks.peers.messages import Message, read_dialogues
from benchmarks.peers.speed.workloads import PeerJob, PeerWorkload

SEED = 0
PAD, END = "<pad>", "<end>"


def write_files(job: PeerJob, data: Path | None, model: Path | None) -> None:
    """Write the inputs of ``job``.

    data:   directory of hh_pairs.jsonl.gz, for dialogues
    model:  of workloads without a config
    """
    texts = _words(job.workload, job.steps) if job.workload.texts == "words" else _dialogues(_given(data, "--data"))
    pretrained = job.workload.model is None
    tokenizer = _pretrained_tokenizer(_given(model, "--model")) if pretrained else _tokenizer(job, texts)
    tokenizer.padding_side = "left"
    _write_models(job, model, tokenizer)
    _write_prompts(job, texts, tokenizer)


def _given(path: Path | None, option: str) -> Path:
    if path is None:
        raise SystemExit(f"this workload needs {option}; see --help")
    return path


def _words(workload: PeerWorkload, steps: int) -> list[str]:
    """Return prompts of words at random, each of which is one token."""
    assert workload.model is not None, "a pretrained model has its own tokenizer"
    generator = random.Random(SEED)
    words = [_word(number) for number in range(2, workload.model["vocab_size"])]
    return [" ".join(generator.choices(words, k=workload.prompt)) for _ in range(workload.prompts * steps)]


def _word(number: int) -> str:
    return f"w{number}"


def _dialogues(directory: Path) -> list[str]:
    """Return dialogues up to the assistant's turn, in random order."""
    texts = ["".join(map(_turn, row["prompt"])) + "\n\nAssistant:" for row in read_dialogues(directory)]
    random.Random(SEED).shuffle(texts)
    return texts


def _turn(message: Message) -> str:
    return f"\n\n{'Human' if message['role'] == 'user' else 'Assistant'}: {message['content']}"


def _pretrained_tokenizer(model: Path) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer with an end token that no text has, so that all responses have their full length."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = tokenizer.added_tokens_decoder[max(tokenizer.added_tokens_decoder)].content
    return tokenizer


def _tokenizer(job: PeerJob, texts: list[str]) -> PreTrainedTokenizerBase:
    """Return a tokenizer of the workload's vocabulary: of words, or trained on the dialogues."""
    assert job.workload.model is not None
    size = job.workload.model["vocab_size"]
    if job.workload.texts == "words":
        words = [PAD, END, *map(_word, range(2, size))]
        inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=PAD))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        inner.train_from_iterator(
            texts, trainers.BpeTrainer(vocab_size=size, special_tokens=[PAD, END], show_progress=False)
        )
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=PAD, eos_token=END)


def _write_models(job: PeerJob, model: Path | None, tokenizer: PreTrainedTokenizerBase) -> None:
    torch.manual_seed(SEED)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    policy, scored = job.directory / "policy", job.directory / "scored"
    if job.workload.model is None:
        causal = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    else:
        causal = AutoModelForCausalLM.from_config(AutoConfig.for_model(**job.workload.model), dtype=torch.float32)
    causal.config.update(ids)
    causal.generation_config = GenerationConfig(**ids)
    causal.save_pretrained(policy)
    head = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, dtype=torch.float32)
    head.config.pad_token_id = tokenizer.pad_token_id
    head.save_pretrained(scored)
    for directory in (policy, scored):
        tokenizer.save_pretrained(directory)


def _write_prompts(job: PeerJob, texts: list[str], tokenizer: PreTrainedTokenizerBase) -> None:
    fitting = [text for text in texts if len(tokenizer(text)["input_ids"]) <= job.workload.prompt]
    needed = job.workload.prompts * job.steps
    rows = [fitting[number % len(fitting)] for number in range(needed)]
    (job.directory / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in rows))


def read_prompts(job: PeerJob) -> list[str]:
    """Return the prompts of ``job``, in the order of the steps."""
    lines = (job.directory / "prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]
