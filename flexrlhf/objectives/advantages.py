"""Advantages of PPO, Safe RLHF, REINFORCE++ and ReMax, by generalized advantage estimation; whitening.

Shapes: n rows of this rank, R response positions. Statistics for whitening are of all rows of the data-parallel group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flexrlhf.config.algorithms.ppo import PpoSpec, SafeRlhfSpec
from flexrlhf.config.algorithms.reinforce import ReinforceSpec, ReturnsSpec
from flexrlhf.engines.base import Batch, Moments, moments
from flexrlhf.metrics import Outcome
from flexrlhf.objectives.context import Columns, CombineContext, Reducer
from flexrlhf.objectives.group_advantages import centre_in_groups, ended_scores
from flexrlhf.objectives.kl_penalty import kl_penalty
from flexrlhf.objectives.reward_shaping import (
    finite_scores,
    last_positions,
    on_last_token,
    shape_rewards,
    token_rewards,
)


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
    columns = {"loss_mask": shaped.mask, "advantages": advantages, "returns": returns, "outcome": shaped.outcomes}
    return columns, statistics


def safe_advantages(spec: SafeRlhfSpec, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """Return loss_mask, advantages (n, R), and returns (n, R) of the reward and the cost critic.

    Advantages are (A_reward - lambda A_cost) / (1 + lambda) (Dai et al. 2024, section 3.3). The KL penalty lowers the
    reward and raises the cost, so its weight in the advantage does not depend on lambda. Raises RunStopped for scores
    that are not finite, with ``invalid_scores: stop``.
    """
    shaped = shape_rewards(spec, batch, context)
    episodes = batch.episodes
    finite = finite_scores(spec, episodes, episodes["scores.cost"], context)
    costs = episodes["scores.cost"].where(finite, 0.0)
    cost_statistics, costs, finite = moments(costs, finite), batch.of_rows(costs), batch.of_rows(finite)
    mask = shaped.mask * finite[:, None].to(shaped.mask.dtype)
    penalty, kl = kl_penalty(spec, batch, mask, context.state)
    token_costs = token_rewards(costs, batch, mask, ".cost")
    of_reward, returns = estimate_advantages(spec, batch, shaped.rewards * mask - penalty, batch["values"], mask)
    of_cost, cost_returns = estimate_advantages(
        spec, batch, token_costs + penalty, batch["values.cost"], mask, bootstrap=False
    )
    multiplier = context.state["lagrange"]
    advantages = (of_reward - multiplier * of_cost) / (1 + multiplier)
    statistics = {
        **shaped.statistics,
        **kl,
        "cost": cost_statistics,
        "lagrange": moments(costs.new_full((len(batch),), multiplier)),
        "advantage": moments(advantages, mask),
        "return": moments(returns, mask),
        "value": moments(batch["values"][:, :-1], mask),
    }
    advantages = whiten_advantages(spec, advantages, mask, context)
    is_invalid = ~finite & (shaped.outcomes != Outcome.UNUSED.code)
    outcomes = shaped.outcomes.masked_fill(is_invalid, Outcome.INVALID_SCORE.code)
    returned = {"returns": returns, "returns.cost": cost_returns}
    return {"loss_mask": mask, "advantages": advantages, **returned, "outcome": outcomes}, statistics


def estimate_advantages(
    spec: PpoSpec, batch: Batch, rewards: Tensor, values: Tensor, mask: Tensor, bootstrap: bool = True
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns (n, R) by GAE.

    values:    (n, R+1); with ``truncation: bootstrap`` the value after the last token continues a truncated response.
    bootstrap: False: never, for rewards that are complete also of a truncated response.
    """
    after_last = (last_positions(mask.bool()) + 1)[:, None]
    final = values.gather(1, after_last).squeeze(1) * (1 - batch.of_rows(batch.episodes["finished"]).float())
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
        out[part] = ((values[part].double() - mean) * (variance + 1e-8) ** -0.5 * mask[part]).to(values.dtype)
    return out


def reinforce_advantages(spec: ReinforceSpec, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """Return loss_mask and advantages (n, R) of REINFORCE++ (Hu 2025, section 3).

    They are returns of the score and the KL penalty. With ``baseline: group`` all tokens have the score of their whole
    response less the mean score of the group, wherever its rewards are, as the paper and verl have it: less a mean of
    whole responses, rewards from a token on would be too low the later it is. Raises RunStopped for scores that are not
    finite, with ``invalid_scores: stop``.
    """
    shaped = shape_rewards(spec, batch, context)
    rewards, baseline = shaped.rewards, torch.zeros_like(shaped.scores)
    if spec.baseline == "group":
        rewards, scores = on_last_token(shaped.scores, shaped.mask), shaped.scores.double()
        k, earlier = batch.sequences, context.earlier
        firsts, counts = scores[::k], shaped.counts[::k]
        centred = centre_in_groups(firsts, counts, batch.samples_per_prompt // k, "mean", earlier)[0]
        baseline = scores - batch.of_rows(centred)
    penalty, kl = kl_penalty(spec, batch, shaped.mask, context.state)
    columns, statistics = returns_over_baseline(spec, rewards - penalty, baseline, shaped.mask, context)
    columns |= {"outcome": shaped.outcomes, **ended_scores(shaped.scores, shaped.counts, context)}
    return columns, {**shaped.statistics, **kl, **statistics}


def remax_advantages(spec: ReturnsSpec, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """Return loss_mask and advantages (n, R) of ReMax (Li et al. 2023, eq. 5).

    They are returns less the score of the greedy response (columns with the suffix ``.greedy``), shaped by the same
    settings. Raises RunStopped for scores that are not finite, with ``invalid_scores: stop``.
    """
    shaped = shape_rewards(spec, batch, context)
    greedy_columns = {
        name.removesuffix(".greedy"): column for name, column in batch.columns.items() if name.endswith(".greedy")
    }
    greedy = shape_rewards(spec, replace(batch, columns=greedy_columns), context)
    greedy_outcomes = batch.of_rows(greedy.outcomes[:: batch.sequences])
    outcomes = shaped.outcomes.where(shaped.outcomes > 0, greedy_outcomes)
    mask = shaped.mask * (outcomes == 0)[:, None].to(shaped.mask.dtype)
    penalty, kl = kl_penalty(spec, batch, mask, context.state)
    columns, statistics = returns_over_baseline(spec, shaped.rewards - penalty, greedy.scores, mask, context)
    statistics["greedy_score"] = greedy.statistics["reward"]
    return {**columns, "outcome": outcomes}, {**shaped.statistics, **kl, **statistics}


def returns_over_baseline(
    spec: ReturnsSpec, rewards: Tensor, baseline: Tensor, mask: Tensor, context: CombineContext
) -> tuple[Columns, Moments]:
    """Return loss_mask and advantages (n, R): discounted ``rewards`` (n, R) less ``baseline`` (n,), maybe whitened.

    The baseline is placed on the last token, so that it is discounted as a score of the whole response is. The
    difference of large numbers is float64.
    """
    zeros = rewards.new_zeros(len(rewards), rewards.shape[1] + 1, dtype=torch.float64)
    returns, expected = (
        gae(each.double(), zeros, mask, spec.gamma, 1.0, zeros[:, 0])[0]
        for each in (rewards, on_last_token(baseline.double(), mask))
    )
    advantages, returns = (returns - expected).float(), returns.float()
    statistics = {"advantage": moments(advantages, mask), "return": moments(returns, mask)}
    if spec.whiten == "batch":
        advantages = whiten(advantages, mask, [slice(0, len(mask))], context.reducer)
    return {"loss_mask": mask, "advantages": advantages}, statistics
