"""Sequences of the measured passes: their lengths, and batches of random tokens of these lengths."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer

from benchmarks.peers.messages import read_dialogues
from flexrlhf.engines.base import Batch
from flexrlhf.operators.columns import Lengths

LONGEST = Lengths(512, 128)
MEAN_PROMPT, MEAN_RESPONSE = 131.6, 42.0
"""Means of exponential distributions, which are 129 and 40 once they are cut at ``LONGEST``."""


@dataclass(frozen=True)
class Text:
    """Tokens of one text.

    prompt:    tokens of the prompt
    response:  tokens of the response
    """

    prompt: int
    response: int


def sampled_texts(number: int) -> list[Text]:
    """Return sequences whose lengths are exponentially distributed, nearly as in hh-rlhf."""
    chance = random.Random(0)

    def length(mean: float, most: int) -> int:
        return min(most, max(1, round(chance.expovariate(1 / mean))))

    return [Text(length(MEAN_PROMPT, LONGEST.prompt), length(MEAN_RESPONSE, LONGEST.response)) for _ in range(number)]


def dialogue_texts(directory: Path, number: int, vocabulary: int) -> list[Text]:
    """Return the lengths of dialogues of hh-rlhf, in an order of chance, by a tokenizer that is trained on them."""
    rows = list(read_dialogues(directory))
    prompts = ["\n\n".join(f"{turn['role']}: {turn['content']}" for turn in row["prompt"]) for row in rows]
    responses = [row["chosen"][0]["content"] for row in rows]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([*prompts, *responses], vocab_size=vocabulary, show_progress=False)

    def lengths(texts: Sequence[str]) -> list[int]:
        return [len(encoding.ids) for encoding in tokenizer.encode_batch(list(texts))]

    pairs = zip(lengths(prompts), lengths(responses), strict=True)
    texts = [Text(*pair) for pair in pairs if pair[0] <= LONGEST.prompt and 0 < pair[1] <= LONGEST.response]
    random.Random(0).shuffle(texts)
    return texts[:number]


def batch_of(texts: Sequence[Text], lengths: Lengths, vocabulary: int, samples: int = 1) -> Batch:
    """Return rows of random tokens: left-padded prompts, the same one in each ``samples`` rows, and responses."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (len(texts), lengths.total), generator=generator, dtype=torch.int32)
    tokens[:, : lengths.prompt] = tokens[::samples, : lengths.prompt].repeat_interleave(samples, 0)
    sizes = torch.tensor([(text.prompt, text.response) for text in texts])
    return _masked(tokens, sizes, lengths, samples)


def _masked(tokens: torch.Tensor, sizes: torch.Tensor, lengths: Lengths, samples: int) -> Batch:
    """Return a batch whose mask has ``sizes`` (n, 2) tokens of prompts and responses."""
    columns = torch.arange(lengths.total)
    prompts, responses = (lengths.prompt - sizes[:, :1], lengths.prompt + sizes[:, 1:])
    mask = ((columns >= prompts) & (columns < responses)).to(torch.uint8)
    found = {"tokens": tokens * mask, "attention_mask": mask, "response_mask": mask[:, lengths.prompt :]}
    return Batch(found, torch.arange(len(tokens)), samples)


def padded(batch: Batch, texts: Sequence[Text], lengths: Lengths, budget: int) -> list[Batch]:
    """Return the passes of padded rows in the order of ``batch``, each as sequences that are as long as its rows.

    A row has the longest prompt and the longest response of its pass, and a pass at most ``budget`` such tokens, as
    engines compute that pad and cut a batch in its order.
    """
    passes = []
    for rows in _cut(texts, budget):
        part = batch.select(rows)
        sizes = torch.tensor([_widest(texts[rows])] * len(part))
        passes.append(_masked(part["tokens"], sizes, lengths, batch.samples_per_prompt))
    return passes


def _cut(texts: Sequence[Text], budget: int) -> Iterator[slice]:
    start = 0
    for end in range(1, len(texts) + 1):
        if end == len(texts) or sum(_widest(texts[start : end + 1])) * (end + 1 - start) > budget:
            yield slice(start, end)
            start = end


def _widest(texts: Sequence[Text]) -> tuple[int, int]:
    return max(text.prompt for text in texts), max(text.response for text in texts)
