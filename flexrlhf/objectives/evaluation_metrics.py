"""Metrics of evaluations: statistics over the rows of the evaluation set. They write no columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexrlhf.config.data_settings import EvalSpec
from flexrlhf.engines.base import Batch, Moments, moments
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.objectives.losses import pairs_of


def likelihood(_: Any, batch: Batch, __: CombineContext) -> tuple[Columns, Moments]:
    """Return the negative log-likelihood of response tokens that are trained on, in nats."""
    return {}, {"eval_nll": moments(-batch["logprobs"], batch.mask)}


def pair_accuracy(_: Any, batch: Batch, __: CombineContext) -> tuple[Columns, Moments]:
    """Return the share of pairs whose chosen response has the higher score."""
    chosen, rejected = pairs_of(batch["scores"])
    return {}, {"eval_accuracy": moments((chosen > rejected).float())}


def diversity(_: Any, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """Return distinct-2, different bigrams / bigrams over all responses (Li et al. 2016), and response lengths."""
    mask = batch["response_mask"].bool()
    responses = batch["tokens"][:, -mask.shape[1] :].long()
    bigrams = (responses[:, :-1] << 32 | responses[:, 1:])[mask[:, :-1] & mask[:, 1:]]
    gathered = context.reducer.gather(bigrams)
    share = mask.new_tensor([len(torch.unique(gathered)) / max(len(gathered), 1)], dtype=torch.float64)
    return {}, {"eval_distinct_2": moments(share), "eval_response_length": moments(mask.sum(1).float())}


def evaluation_scores(settings: EvalSpec, batch: Batch, _: CombineContext) -> tuple[Columns, Moments]:
    """Return the mean score of the responses, pass@1 and pass@k over prompts, and shares of truncated ones.

    A response passes with a score of at least ``pass_score``. A score that is not finite does not pass and is left out
    of the mean.
    """
    scores, samples = batch["scores"], batch.samples_per_prompt
    is_valid = scores.isfinite()
    passes = is_valid & (scores >= settings.pass_score)
    num_passed = passes.view(-1, samples).sum(1)
    return {}, {
        "eval_reward": moments(scores.where(is_valid, 0.0), is_valid),
        "eval_pass_at_1": moments(pass_at_k(1, num_passed, samples)),
        "eval_pass_at_k": moments(pass_at_k(settings.pass_at or samples, num_passed, samples)),
        "eval_truncated": moments(1.0 - batch["finished"].float()),
        "eval_score_invalid": moments((~is_valid).float()),
    }


def pass_at_k(k: int, num_passed: Tensor, samples: int) -> Tensor:
    """Return the unbiased estimate of pass@k (Chen et al. 2021, eq. 1): float64 (g,), one for each of g prompts.

    1 - C(samples - passed, k) / C(samples, k), the probability that at least one of k responses passes.

    num_passed: (g,), how many of a prompt's responses pass.
    samples:    responses of a prompt.
    """
    num_failed = (samples - num_passed).double()
    none_passes = torch.ones_like(num_failed)
    for number in range(k):
        none_passes = none_passes * (num_failed - number).clamp(min=0) / (samples - number)
    return 1 - none_passes
