"""Advantages that are discounted returns less a baseline: REINFORCE++ and ReMax.

Shapes: n rows of this rank, R response positions.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flexrlhf.config.algorithms import ReinforceSpec, RemaxSpec, ReturnsSpec
from flexrlhf.engines.base import Batch, Moments, moments
from flexrlhf.objectives.advantages import gae, whiten
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.objectives.group_advantages import centre_in_groups
from flexrlhf.objectives.kl_penalty import kl_penalty
from flexrlhf.objectives.reward_shaping import on_last_token, shape_rewards


def reinforce_advantages(spec: ReinforceSpec, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """Return loss_mask and advantages (n, R) of REINFORCE++ (Hu 2025, section 3).

    They are returns of the score and the KL penalty; with ``baseline: group`` less the mean score of the group. Raises
    RunStopped for scores that are not finite, with ``invalid_scores: stop``.
    """
    shaped = shape_rewards(spec, batch, context)
    baseline = torch.zeros_like(shaped.scores)
    if spec.baseline == "group":
        baseline = shaped.scores - centre_in_groups(shaped.scores, shaped.counts, batch.samples_per_prompt, "mean")[0]
    penalty, kl = kl_penalty(spec, batch, shaped.mask, context.state)
    columns, statistics = returns_over_baseline(spec, shaped.rewards - penalty, baseline, shaped.mask, context)
    return columns, {**shaped.statistics, **kl, **statistics}


def remax_advantages(spec: RemaxSpec, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """Return loss_mask and advantages (n, R) of ReMax (Li et al. 2023, eq. 5).

    They are returns less the score of the greedy response (columns with the suffix ``.greedy``), shaped by the same
    settings. Raises RunStopped for scores that are not finite, with ``invalid_scores: stop``.
    """
    shaped = shape_rewards(spec, batch, context)
    greedy = shape_rewards(spec, without_suffix(batch, ".greedy"), context)
    counts = shaped.counts & greedy.counts
    mask = shaped.mask * counts[:, None].to(shaped.mask.dtype)
    penalty, kl = kl_penalty(spec, batch, mask, context.state)
    columns, statistics = returns_over_baseline(spec, shaped.rewards - penalty, greedy.scores, mask, context)
    statistics["greedy_score"] = greedy.statistics["reward"]
    statistics["not_counted"] = moments((~counts).float())
    return columns, {**shaped.statistics, **kl, **statistics}


def without_suffix(batch: Batch, suffix: str) -> Batch:
    """Return the columns of ``batch`` whose names end in ``suffix``, under names without it."""
    own = {name.removesuffix(suffix): column for name, column in batch.columns.items() if name.endswith(suffix)}
    return replace(batch, columns=own)


def returns_over_baseline(
    spec: ReturnsSpec, rewards: Tensor, baseline: Tensor, mask: Tensor, context: CombineContext
) -> tuple[Columns, Moments]:
    """Return loss_mask and advantages (n, R): discounted ``rewards`` (n, R) less ``baseline`` (n,), maybe whitened.

    The baseline is placed on the last token, as scores are, so that both are discounted alike.
    """
    zeros = rewards.new_zeros(len(rewards), rewards.shape[1] + 1)
    returns, expected = (
        gae(each, zeros, mask, spec.gamma, 1.0, zeros[:, 0])[0] for each in (rewards, on_last_token(baseline, mask))
    )
    advantages = returns - expected
    statistics = {"advantage": moments(advantages, mask), "return": moments(returns, mask)}
    if spec.whiten == "batch":
        advantages = whiten(advantages, mask, [slice(0, len(mask))], context.reducer)
    return {"loss_mask": mask, "advantages": advantages}, statistics
