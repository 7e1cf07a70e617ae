"""Advantages of a policy whose mean cost is to stay under a limit. Shapes: n rows, R response positions."""

from __future__ import annotations

from flexrlhf.config.algorithms import SafeRlhfSpec
from flexrlhf.engines.base import Batch, Moments, moments
from flexrlhf.objectives.advantages import estimate_advantages, whiten_advantages
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.objectives.reward_shaping import finite_scores, kl_penalty, shape_rewards, token_rewards


def safe_advantages(spec: SafeRlhfSpec, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """(A_reward - lambda * A_cost) / (1 + lambda) (Dai et al. 2024, section 3.3), and returns for both critics.

    The KL penalty lowers the reward and raises the cost, so its weight in the advantage does not depend on lambda.
    """
    found = shape_rewards(spec, batch, context)
    finite = finite_scores(spec, batch, batch["scores.cost"], context.reducer)
    costs = batch["scores.cost"].where(finite, 0.0)
    mask = found.mask * finite[:, None].to(found.mask.dtype)
    penalty, kl = kl_penalty(spec, batch, mask, context.state)
    by_token = token_rewards(costs, batch, mask, ".cost")
    gained, returns = estimate_advantages(spec, batch, found.rewards * mask - penalty, batch["values"], mask)
    spent, cost_returns = estimate_advantages(spec, batch, by_token + penalty, batch["values.cost"], mask, is_told=True)
    multiplier = context.state["lagrange"]
    advantages = (gained - multiplier * spent) / (1 + multiplier)
    statistics = {
        **found.statistics,
        **kl,
        "not_counted": moments((~(found.counts & finite)).float()),
        "cost": moments(costs, finite),
        "lagrange": moments(costs.new_full((len(batch),), multiplier)),
        "advantage": moments(advantages, mask),
        "return": moments(returns, mask),
        "value": moments(batch["values"][:, :-1], mask),
    }
    columns = {"returns": returns, "returns.cost": cost_returns}
    return {"loss_mask": mask, "advantages": whiten_advantages(spec, advantages, mask, context), **columns}, statistics
