"""Advantages that are the rewards which follow a token, less a baseline. Shapes: n rows, R response positions."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flexrlhf.config.algorithms import ReinforceSpec, RemaxSpec, ReturnsSpec
from flexrlhf.engines.base import Batch, Moments, moments
from flexrlhf.objectives.advantages import gae, whiten
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.objectives.group_advantages import centre_in_groups
from flexrlhf.objectives.reward_shaping import kl_penalty, on_last_token, shape_rewards


def reinforce_advantages(spec: ReinforceSpec, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """REINFORCE++ (Hu 2025, section 3): the score, over the group's mean where asked for, less the KL penalty."""
    found = shape_rewards(spec, batch, context)
    baseline = torch.zeros_like(found.scores)
    if spec.baseline == "group":
        baseline = found.scores - centre_in_groups(found.scores, found.counts, batch.samples_per_prompt, "mean")[0]
    penalty, kl = kl_penalty(spec, batch, found.mask, context.state)
    columns, statistics = returns_over_baseline(spec, found.rewards - penalty, baseline, found.mask, context)
    return columns, {**found.statistics, **kl, **statistics}


def remax_advantages(spec: RemaxSpec, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """Returns less the score of the greedy answer (Li et al. 2023, eq. 5), which the same rules have shaped."""
    found = shape_rewards(spec, batch, context)
    greedy = shape_rewards(spec, without_qualifier(batch, "greedy"), context)
    counts = found.counts & greedy.counts
    mask = found.mask * counts[:, None].to(found.mask.dtype)
    penalty, kl = kl_penalty(spec, batch, mask, context.state)
    columns, statistics = returns_over_baseline(spec, found.rewards - penalty, greedy.scores, mask, context)
    statistics["greedy_score"] = greedy.statistics["reward"]
    statistics["not_counted"] = moments((~counts).float())
    return columns, {**found.statistics, **kl, **statistics}


def without_qualifier(batch: Batch, qualifier: str) -> Batch:
    """The columns of ``batch`` with ``qualifier`` behind their names, without it."""
    suffix = f".{qualifier}"
    own = {name.removesuffix(suffix): column for name, column in batch.columns.items() if name.endswith(suffix)}
    return replace(batch, columns=own)


def returns_over_baseline(
    spec: ReturnsSpec, rewards: Tensor, baseline: Tensor, mask: Tensor, context: CombineContext
) -> tuple[Columns, Moments]:
    """Returns of ``rewards`` (n, R) less the ``baseline`` (n,) of the answer, whitened where asked for.

    The baseline stands where the score does, so that both are discounted alike.
    """
    nothing = rewards.new_zeros(len(rewards), rewards.shape[1] + 1)
    returns, expected = (
        gae(each, nothing, mask, spec.gamma, 1.0, nothing[:, 0])[0] for each in (rewards, on_last_token(baseline, mask))
    )
    advantages = returns - expected
    statistics = {"advantage": moments(advantages, mask), "return": moments(returns, mask)}
    if spec.whiten == "batch":
        advantages = whiten(advantages, mask, [slice(0, len(mask))], context.reducer)
    return {"loss_mask": mask, "advantages": advantages}, statistics
