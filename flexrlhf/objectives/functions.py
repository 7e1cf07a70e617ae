"""Losses of trains and mathematics of combines by the name that an operator has: the package's, or a user's.

A new algorithm adds its own to ``LOSSES`` and ``COMBINES``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from flexrlhf.config.algorithms.base import AlgorithmSpec
from flexrlhf.config.code_loading import load_function
from flexrlhf.config.spec import Spec
from flexrlhf.engines.base import Batch, Loss, Moments
from flexrlhf.errors import UserError
from flexrlhf.objectives.advantages import ppo_advantages, reinforce_advantages, remax_advantages, safe_advantages
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.objectives.episodes import episodes
from flexrlhf.objectives.evaluation_metrics import diversity, evaluation_scores, likelihood, pair_accuracy
from flexrlhf.objectives.group_advantages import best_of_group, group_advantages
from flexrlhf.objectives.losses import (
    likelihood_loss,
    on_policy,
    pair_loss,
    policy_loss,
    ptx_loss,
    shared_loss,
    value_loss,
)
from flexrlhf.objectives.parity import naming_tokens, parity
from flexrlhf.objectives.preferences import (
    kto_loss,
    orpo_loss,
    preference_accuracy,
    preference_loss,
    reference_point,
    simpo_loss,
)
from flexrlhf.objectives.reward_shaping import weighted_scores
from flexrlhf.objectives.surrogates import covariant_tokens, rejection, staleness
from flexrlhf.operators.columns import Column
from flexrlhf.operators.graph import Operator, is_own
from flexrlhf.user_code.planning_calls import bounded_here

LOSSES: dict[str, Callable[[Any], Loss]] = {
    "kto_loss": kto_loss,
    "likelihood_loss": likelihood_loss,
    "on_policy_loss": lambda spec: on_policy(spec, policy_loss(spec)),
    "on_policy_shared_loss": lambda spec: on_policy(spec, shared_loss(spec)),
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
    "episodes": episodes,
    "held_out_scores": evaluation_scores,
    "parity": parity,
    "reward": weighted_scores,
    "cost": weighted_scores,
}


def settings_of(function: str, spec: Spec) -> Any:
    """Return the section of the YAML that a combine reads: the algorithm's, unless it has one of its own."""
    others: dict[str, object] = {
        **{"parity": spec.rollout, "reward": spec.reward, "cost": spec.cost},
        **{"held_out_scores": spec.eval, "episodes": spec.environment},
    }
    return others.get(function, spec.algorithm)


def make_loss(function: str, algorithm: AlgorithmSpec) -> Loss:
    """Return the loss that a train operator names. Raises UserError if a user's function returns something else."""
    if not is_own(function):
        return LOSSES[function](algorithm)
    loss = _load(function)(algorithm)
    if not isinstance(loss, Loss):
        raise UserError(f"{function} returns {_kind(loss)}, not a flexrlhf.engines.base.Loss")
    return loss


def combine_of(function: str) -> Combine:
    """Return the mathematics of a combine."""
    return _load(function) if is_own(function) else COMBINES[function]


def computed_columns(
    operator: Operator, spec: Spec, batch: Batch, context: CombineContext, decode: Callable[[Sequence[int]], str]
) -> tuple[Columns, Moments]:
    """Return the columns that a combine writes, and its statistics, with the staleness of tokens that it selects.

    ``decode``: tokens to text, for errors. Raises UserError if a user's function returns something else.
    """
    with naming_tokens(decode, context.step):
        computed = combine_of(operator.function)(settings_of(operator.function, spec), batch, context)
    check_returned(operator, computed, batch)
    columns, statistics = computed
    if "policy_version" in batch.columns and columns.keys() & {"loss_mask", "kept_mask"}:
        statistics |= staleness(batch.with_columns(columns), context)
    return columns, statistics


@cache
def _load(reference: str) -> Callable[..., Any]:
    """Load a user's function, once in a process: a run goes on with the code that it began with."""
    with bounded_here(reference):
        return load_function(reference)


def check_returned(operator: Operator, returned: Any, batch: Batch) -> None:
    """Raise UserError if a user's combine does not return the columns that ``operator`` writes, and statistics."""
    if not is_own(operator.function):
        return
    if not isinstance(returned, tuple) or len(returned) != 2 or not all(isinstance(part, dict) for part in returned):
        raise UserError(f"{operator.function} returns {_kind(returned)}, not (columns, statistics), two mappings")
    columns, statistics = returned
    _check_columns(operator, columns, batch)
    for name, value in statistics.items():
        if not isinstance(value, Tensor) or value.shape != (3,):
            raise UserError(
                f"{operator.function}: statistic {name!r} is {_kind(value)}, not flexrlhf.engines.base.moments(values)"
            )


def _check_columns(operator: Operator, columns: Columns, batch: Batch) -> None:
    for name in operator.writes:
        short = name.removesuffix(operator.suffix)
        if short not in columns:
            raise UserError(f"{operator.function} returns no column {short!r}, which {operator.name} writes")
        found, dims = columns[short], 1 if Column.of(name).width == "row" else 2
        if not isinstance(found, Tensor) or found.dim() != dims or len(found) != len(batch):
            shape = _SHAPES.get(Column.of(name).width, "(n, ...)")
            raise UserError(
                f"{operator.function}: column {short!r} is {_kind(found)}, not a tensor {shape} of {len(batch)} rows"
            )


_SHAPES: dict[str, str] = {"row": "(n,)", "prompt": "(n, P)", "response": "(n, R)", "response+1": "(n, R+1)"}


def _kind(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
