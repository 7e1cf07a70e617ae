"""Advantages of PPO: generalized advantage estimation and whitening.

Shapes: n rows of this rank, R response positions. Statistics for whitening are of all rows of the data-parallel group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexrlhf.config.algorithms import PpoSpec
from flexrlhf.engines.base import Batch, Moments, moments
from flexrlhf.objectives.context import Columns, CombineContext, Reducer
from flexrlhf.objectives.kl_penalty import kl_penalty
from flexrlhf.objectives.reward_shaping import last_positions, shape_rewards


def ppo_advantages(spec: PpoSpec, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """Return loss_mask, advantages and returns (n, R) of PPO. Returns are computed before whitening.

    Raises RunStopped for scores that are not finite, with ``invalid_scores: stop``.
    """
    shaped = shape_rewards(spec, batch, context)
    penalty, kl = kl_penalty(spec, batch, shaped.mask, context.state)
    advantages, returns = estimate_advantages(spec, batch, shaped.rewards - penalty, batch["values"], shaped.mask)
    statistics = {
        **shaped.statistics,
        **kl,
        "advantage": moments(advantages, shaped.mask),
        "return": moments(returns, shaped.mask),
        "value": moments(batch["values"][:, :-1], shaped.mask),
    }
    advantages = whiten_advantages(spec, advantages, shaped.mask, context)
    return {"loss_mask": shaped.mask, "advantages": advantages, "returns": returns}, statistics


def estimate_advantages(
    spec: PpoSpec, batch: Batch, rewards: Tensor, values: Tensor, mask: Tensor, bootstrap: bool = True
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns (n, R) by GAE.

    values:    (n, R+1); with ``truncation: bootstrap`` the value after the last token continues a truncated response.
    bootstrap: False: never, for rewards that are complete also of a truncated response.
    """
    after_last = (last_positions(mask.bool()) + 1)[:, None]
    final = values.gather(1, after_last).squeeze(1) * (1 - batch["finished"].float())
    if not bootstrap or spec.truncation != "bootstrap":
        final = torch.zeros_like(final)
    return gae(rewards, values, mask, spec.gamma, spec.gae_lambda, final)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float, final: Tensor
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16), carried over gaps of the mask.

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lambda A_{t+1}; the return is A_t + V_t. Returns
    advantages and returns (n, R), 0 outside the mask.

    rewards, mask: (n, R).
    values:        (n, R+1), of which the first R are used.
    final:         (n,), value after the last token.
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
    """Whiten ``advantages`` (n, R) over the batch or each mini-batch, or not at all, by the setting ``whiten``."""
    if spec.whiten == "none":
        return advantages
    segments = [slice(0, len(mask))] if spec.whiten == "batch" else context.segments
    return whiten(advantages, mask, segments, context.reducer)


def whiten(values: Tensor, mask: Tensor, segments: Sequence[slice], reducer: Reducer) -> Tensor:
    """Return ``values`` (n, R) with mean 0 and variance 1 (Bessel's correction) in each segment of rows.

    Over the tokens of the segment on all ranks of ``reducer``; 0 outside the mask.
    """
    sums = torch.stack([moments(values[part], mask[part]) for part in segments])
    reducer.sum(sums)
    out = torch.zeros_like(values)
    for part, (count, total, squares) in zip(segments, sums.tolist(), strict=True):
        mean = total / max(count, 1)
        variance = max(squares - count * mean * mean, 0.0) / max(count - 1, 1)
        out[part] = (values[part] - mean) * (variance + 1e-8) ** -0.5 * mask[part]
    return out
