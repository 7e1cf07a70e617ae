"""Functions of operators by name: losses of trains, and mathematics of combines. A new algorithm adds its own here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flexrlhf.config.spec import Spec
from flexrlhf.engines.base import Batch, Loss, Moments
from flexrlhf.objectives.advantages import ppo_advantages, reinforce_advantages, remax_advantages
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.objectives.evaluation_metrics import diversity, evaluation_scores, likelihood, pair_accuracy
from flexrlhf.objectives.group_advantages import best_of_group, group_advantages
from flexrlhf.objectives.importance import rejection
from flexrlhf.objectives.losses import (
    likelihood_loss,
    on_policy_loss,
    on_policy_shared_loss,
    pair_loss,
    policy_loss,
    ptx_loss,
    shared_loss,
    value_loss,
)
from flexrlhf.objectives.parity import parity
from flexrlhf.objectives.preferences import (
    kto_loss,
    orpo_loss,
    preference_accuracy,
    preference_loss,
    reference_point,
    simpo_loss,
)
from flexrlhf.objectives.reward_shaping import weighted_scores
from flexrlhf.objectives.safety import safe_advantages
from flexrlhf.objectives.surrogates import covariant_tokens

LOSSES: dict[str, Callable[[Any], Loss]] = {
    "kto_loss": kto_loss,
    "likelihood_loss": likelihood_loss,
    "on_policy_loss": on_policy_loss,
    "on_policy_shared_loss": on_policy_shared_loss,
    "orpo_loss": orpo_loss,
    "pair_loss": pair_loss,
    "policy_loss": policy_loss,
    "preference_loss": preference_loss,
    "ptx": ptx_loss,
    "shared_loss": shared_loss,
    "simpo_loss": simpo_loss,
    "value_loss": value_loss,
}
"""Function name → settings of the algorithm → loss."""
Combine = Callable[[Any, Batch, CombineContext], tuple[Columns, Moments]]
"""(settings, rows of this rank, context) → columns that it writes, statistics of this rank's rows."""
COMBINES: dict[str, Combine] = {
    "ppo_advantages": ppo_advantages,
    "group_advantages": group_advantages,
    "best_of_group": best_of_group,
    "covariant_tokens": covariant_tokens,
    "rejection": rejection,
    "reinforce_advantages": reinforce_advantages,
    "remax_advantages": remax_advantages,
    "safe_advantages": safe_advantages,
    "reference_point": reference_point,
    "likelihood": likelihood,
    "pair_accuracy": pair_accuracy,
    "preference_accuracy": preference_accuracy,
    "diversity": diversity,
    "held_out_scores": evaluation_scores,
    "parity": parity,
    "reward": weighted_scores,
    "cost": weighted_scores,
}


def settings_of(function: str, spec: Spec) -> Any:
    """Return the section of the YAML that a combine reads: the algorithm's, unless it has one of its own."""
    others = {"parity": spec.rollout, "reward": spec.reward, "cost": spec.cost, "held_out_scores": spec.eval}
    return others.get(function, spec.algorithm)
