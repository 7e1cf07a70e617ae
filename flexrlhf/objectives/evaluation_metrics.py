"""What evaluations look at: statistics of answers to held-out prompts. Tensors in, statistics out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexrlhf.config.spec import EvalSpec
from flexrlhf.engines.base import Batch, Moments, moments
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.objectives.losses import pairs_of


def likelihood(_: Any, batch: Batch, __: CombineContext) -> tuple[Columns, Moments]:
    return {}, {"eval_nll": moments(-batch["logprobs"], batch["response_mask"])}


def pair_accuracy(_: Any, batch: Batch, __: CombineContext) -> tuple[Columns, Moments]:
    chosen, rejected = pairs_of(batch["scores"])
    return {}, {"eval_accuracy": moments((chosen > rejected).float())}


def diversity(_: Any, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """distinct-2: different bigrams / bigrams over all answers (Li et al. 2016)."""
    mask = batch["response_mask"].bool()
    answers = batch["tokens"][:, -mask.shape[1] :].long()
    pairs = (answers[:, :-1] << 32 | answers[:, 1:])[mask[:, 1:]]
    gathered = context.reducer.gather(pairs)
    share = mask.new_tensor([len(torch.unique(gathered)) / max(len(gathered), 1)], dtype=torch.float64)
    return {}, {"eval_distinct_2": moments(share), "eval_response_length": moments(mask.sum(1).float())}


def evaluation_scores(settings: EvalSpec, batch: Batch, _: CombineContext) -> tuple[Columns, Moments]:
    """What the answers scored, and pass@1 and pass@k over their prompts. A score that is no finite number is a wrong
    answer's, and is left out of the mean."""
    scores, samples = batch["scores"], batch.samples_per_prompt
    is_valid = scores.isfinite()
    is_right = is_valid & (scores >= settings.pass_score)
    right = is_right.view(-1, samples).sum(1)
    return {}, {
        "eval_reward": moments(scores.where(is_valid, 0.0), is_valid),
        "eval_pass_at_1": moments(pass_at_k(1, right, samples)),
        "eval_pass_at_k": moments(pass_at_k(settings.pass_at or samples, right, samples)),
        "eval_truncated": moments(1.0 - batch["finished"].float()),
        "eval_score_invalid": moments((~is_valid).float()),
    }


def pass_at_k(k: int, right: Tensor, samples: int) -> Tensor:
    """1 - C(samples - right, k) / C(samples, k), float64 (n,): the unbiased estimate of the share of prompts of which
    at least one of k answers is right (Chen et al. 2021, eq. 1). ``right`` (n,): how many of a prompt's answers are."""
    wrong = (samples - right).double()
    misses = torch.ones_like(wrong)
    for drawn in range(k):
        misses = misses * (wrong - drawn).clamp(min=0) / (samples - drawn)
    return 1 - misses
