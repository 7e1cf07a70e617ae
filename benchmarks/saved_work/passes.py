"""Forward and training passes of an engine: padding and copies of a prompt, computed and left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore

from benchmarks.peers.speed.workloads import SMALL
from benchmarks.saved_work.costs import SavedWork, Work, compare
from benchmarks.saved_work.texts import LONGEST, Text, batch_of, padded
from flexrlhf.comm.reduce import RankGroup
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.engines.base import Batch, EngineContext, Loss, Moments, Outputs, Totals
from flexrlhf.engines.model_ranks import ModelRanks
from flexrlhf.engines.torch.engine import TorchEngine
from flexrlhf.operators.columns import Column, Lengths
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.placed import ModelName, PlacedModel

SAMPLES, GROUPS = 8, Lengths(512, 64)
"""Samples of a prompt, and tokens of prompts and responses, of groups."""
NUM_GROUPS = 2
ONE_RANK = RankGroup(None, (0,), lambda work, ranks: None)


def padding(texts: Sequence[Text], rounds: int) -> Iterator[SavedWork]:
    """Yield the savings of ``pack_texts``, compared with padded rows and with rows of one sequence each."""
    batch = batch_of(texts, LONGEST, SMALL["vocab_size"])
    packs, apart = (engine_with(LONGEST, pack_texts=each) for each in (True, False))
    rows = padded(batch, texts, LONGEST, ModelSpec().micro_batch_tokens)
    yield from _both("padding, rows in the batch's order", (apart, rows), (packs, [batch]), rounds)
    yield from _both("padding, one text in a row", (apart, [batch]), (packs, [batch]), rounds)


def prompts(rounds: int) -> Iterator[SavedWork]:
    """Yield the savings of ``share_prompts`` in groups of samples."""
    texts = [Text(GROUPS.prompt, GROUPS.response)] * (SAMPLES * NUM_GROUPS)
    batch = batch_of(texts, GROUPS, SMALL["vocab_size"], SAMPLES)
    shares, copies = (engine_with(GROUPS, share_prompts=each) for each in (True, False))
    yield from _both("copies of a prompt", (copies, [batch]), (shares, [batch]), rounds)


def masks(tokens: int, rounds: int) -> Iterator[SavedWork]:
    """Yield the savings in training passes of so many tokens by attention that takes the lengths of sequences.

    Of 16 sequences of uneven lengths, the longest of which has half of the tokens; and of a prompt with half of them
    and 8 responses. Both ways lay out rows as they do best.
    """
    half, eighth = tokens // 2, tokens // 16
    uneven = [half, *(half * (1 + number % 5) // 45 for number in range(15))]
    layouts = {
        "16 sequences": ([Text(length - length // 4, length // 4) for length in uneven], 1),
        "8 responses": ([Text(half, eighth)] * SAMPLES, SAMPLES),
    }
    for name, (texts, samples) in layouts.items():
        lengths = Lengths(max(text.prompt for text in texts), max(text.response for text in texts))
        batch = batch_of(texts, lengths, SMALL["vocab_size"], samples)
        masked, by_lengths = (engine_with(lengths, attention=way) for way in ("sdpa", "auto"))
        yield compare(
            f"a mask, {tokens} tokens",
            f"training, {name}",
            optimizer_step(masked, [batch]),
            optimizer_step(by_lengths, [batch]),
            rounds,
            attention_alone=True,
        )


def engine_with(lengths: Lengths, **settings: Any) -> TorchEngine:
    """Return a trained model of random weights on one rank."""
    model = ModelSpec(init=SMALL, **settings)
    context = EngineContext(
        placed=PlacedModel(ModelName("actor"), Layout((0,)), True, model),
        lengths=lengths,
        temperature=1.0,
        seed=0,
        num_updates=1,
        ranks=ModelRanks(ONE_RANK, ONE_RANK),
        device=torch.device("cpu"),
        kv_bytes=0,
        store=HashStore(),
    )
    return TorchEngine(context)


Way = tuple[TorchEngine, Sequence[Batch]]
"""Engine, and the batches that it computes one after another."""


def _both(saved: str, computed: Way, left_out: Way, rounds: int) -> Iterator[SavedWork]:
    yield compare(saved, "forward", forward_pass(*computed), forward_pass(*left_out), rounds)
    yield compare(saved, "training", optimizer_step(*computed), optimizer_step(*left_out), rounds)


def forward_pass(engine: TorchEngine, batches: Sequence[Batch]) -> Work:
    """Return the forward of log-probs of all ``batches``."""
    columns = [Column.of("logprobs")]
    return lambda: [engine.forward(batch, columns) for batch in batches]


def optimizer_step(engine: TorchEngine, batches: Sequence[Batch]) -> Work:
    """Return one optimizer step over all ``batches``, as of one mini-batch."""
    parts = [(batch, Loss("logprobs", _likelihood, ())) for batch in batches]
    return lambda: engine.train(parts)


def _likelihood(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Moments]:
    return -(outputs.quantity * batch.mask).sum() / totals.tokens, {}
