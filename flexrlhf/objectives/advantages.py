"""Advantages: how much better a token is than what was expected of it. Tensors in, tensors out.

Shapes: n rows, R response positions. Statistics that normalise are of the whole batch over all replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexrlhf.config.algorithms import PpoSpec
from flexrlhf.engines.base import Batch, Moments, moments
from flexrlhf.objectives.context import Columns, CombineContext, Reducer
from flexrlhf.objectives.reward_shaping import kl_penalty, last_positions, shape_rewards


def ppo_advantages(spec: PpoSpec, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """Advantages and returns of PPO; returns come before whitening."""
    found = shape_rewards(spec, batch, context)
    penalty, kl = kl_penalty(spec, batch, found.mask, context.state)
    advantages, returns = estimate_advantages(spec, batch, found.rewards - penalty, batch["values"], found.mask)
    statistics = {
        **found.statistics,
        **kl,
        "advantage": moments(advantages, found.mask),
        "return": moments(returns, found.mask),
        "value": moments(batch["values"][:, :-1], found.mask),
    }
    advantages = whiten_advantages(spec, advantages, found.mask, context)
    return {"loss_mask": found.mask, "advantages": advantages, "returns": returns}, statistics


def estimate_advantages(
    spec: PpoSpec, batch: Batch, rewards: Tensor, values: Tensor, mask: Tensor, is_told: bool = False
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (n, R) by GAE. ``values`` (n, R+1): a truncated answer may end in the last of its own.

    ``is_told``: its rewards say all of a truncated answer, and no value stands for what they lack.
    """
    after_last = (last_positions(mask.bool()) + 1)[:, None]
    final = values.gather(1, after_last).squeeze(1) * (1 - batch["finished"].float())
    if is_told or spec.truncation != "bootstrap":
        final = torch.zeros_like(final)
    return gae(rewards, values, mask, spec.gamma, spec.gae_lambda, final)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float, final: Tensor
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16), carried forward over gaps of the mask.

    rewards, mask (n, R); values (n, R+1), the first R are used; ``final`` (n,): the value after the last token.
    Returns advantages and returns (n, R), 0 outside the mask.
    """
    weights = mask.to(values.dtype)
    advantage, next_value = torch.zeros_like(final), final
    columns: list[Tensor] = []
    for t in reversed(range(rewards.shape[1])):
        here = weights[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = here * (delta + gamma * gae_lambda * advantage) + (1 - here) * advantage
        next_value = here * values[:, t] + (1 - here) * next_value
        columns.append(advantage * here)
    advantages = torch.stack(columns[::-1], 1)
    return advantages, (advantages + values[:, :-1]) * weights


def whiten_advantages(spec: PpoSpec, advantages: Tensor, mask: Tensor, context: CombineContext) -> Tensor:
    """``advantages`` (n, R), whitened over what ``whiten`` says."""
    if spec.whiten == "none":
        return advantages
    parts = [slice(0, len(mask))] if spec.whiten == "batch" else context.segments
    return whiten(advantages, mask, parts, context.reducer)


def whiten(values: Tensor, mask: Tensor, segments: Sequence[slice], reducer: Reducer) -> Tensor:
    """Mean 0, variance 1 (Bessel's correction) over the tokens of each segment on all replicas; 0 outside the mask."""
    sums = torch.stack([moments(values[part], mask[part]) for part in segments])
    reducer.sum(sums)
    out = torch.zeros_like(values)
    for part, (count, total, squares) in zip(segments, sums.tolist(), strict=True):
        mean = total / max(count, 1)
        variance = max(squares - count * mean * mean, 0.0) / max(count - 1, 1)
        out[part] = (values[part] - mean) * (variance + 1e-8) ** -0.5 * mask[part]
    return out
