"""Advantages of Safe RLHF: the mean cost is to stay under a limit. Shapes: n rows, R response positions."""

from __future__ import annotations

from flexrlhf.config.algorithms import SafeRlhfSpec
from flexrlhf.engines.base import Batch, Moments, moments
from flexrlhf.objectives.advantages import estimate_advantages, whiten_advantages
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.objectives.kl_penalty import kl_penalty
from flexrlhf.objectives.reward_shaping import finite_scores, shape_rewards, token_rewards


def safe_advantages(spec: SafeRlhfSpec, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """Return loss_mask, advantages (n, R), and returns (n, R) of the reward and the cost critic.

    Advantages are (A_reward - lambda A_cost) / (1 + lambda) (Dai et al. 2024, section 3.3). The KL penalty lowers the
    reward and raises the cost, so its weight in the advantage does not depend on lambda. Raises RunStopped for scores
    that are not finite, with ``invalid_scores: stop``.
    """
    shaped = shape_rewards(spec, batch, context)
    finite = finite_scores(spec, batch, batch["scores.cost"], context)
    costs = batch["scores.cost"].where(finite, 0.0)
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
        "not_counted": moments((~(shaped.counts & finite)).float()),
        "cost": moments(costs, finite),
        "lagrange": moments(costs.new_full((len(batch),), multiplier)),
        "advantage": moments(advantages, mask),
        "return": moments(returns, mask),
        "value": moments(batch["values"][:, :-1], mask),
    }
    columns = {"returns": returns, "returns.cost": cost_returns}
    return {"loss_mask": mask, "advantages": whiten_advantages(spec, advantages, mask, context), **columns}, statistics
