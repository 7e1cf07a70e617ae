"""Losses of trains and mathematics of combines, by the name that an operator has: where each is, and its properties.

The functions are in ``objectives/``, which needs torch. A new algorithm adds a row for each of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class NamedFunction:
    """A loss, or the mathematics of a combine.

    module:          of ``objectives/``.
    attribute:       its name there; empty: the name that operators have.
    compares:        of a loss: whether it compares the chosen and the rejected response to a prompt.
    on_policy:       of a loss: the same with the log-probs of its own pass as the ones of the policy that the step
                     starts from; empty: there is none.
    compares_ended:  of a combine: whether it compares a response with its group's that have ended in earlier steps, by
                     the algorithm's ``group_columns``.
    section:         of a combine: section of the YAML that it reads.
    metrics:         of a combine: metrics of evaluations that follow from its statistics.
    """

    module: str
    attribute: str = ""
    compares: bool = False
    on_policy: str = ""
    compares_ended: bool = False
    section: str = "algorithm"
    metrics: tuple[str, ...] = ()


LOSSES: Mapping[str, NamedFunction] = {
    "likelihood_loss": NamedFunction("losses"),
    "policy_loss": NamedFunction("losses", on_policy="on_policy_loss"),
    "shared_loss": NamedFunction("losses", on_policy="on_policy_shared_loss"),
    "value_loss": NamedFunction("losses"),
    "ptx": NamedFunction("losses", "ptx_loss"),
    "on_policy_loss": NamedFunction("losses"),
    "on_policy_shared_loss": NamedFunction("losses"),
    "kto_loss": NamedFunction("preferences", compares=True),
    "orpo_loss": NamedFunction("preferences", compares=True),
    "pair_loss": NamedFunction("losses", compares=True),
    "preference_loss": NamedFunction("preferences", compares=True),
    "simpo_loss": NamedFunction("preferences", compares=True),
}
COMBINES: Mapping[str, NamedFunction] = {
    "ppo_advantages": NamedFunction("advantages"),
    "group_advantages": NamedFunction("group_advantages", compares_ended=True),
    "best_of_group": NamedFunction("group_advantages"),
    "covariant_tokens": NamedFunction("surrogates"),
    "rejection": NamedFunction("surrogates"),
    "reinforce_advantages": NamedFunction("advantages", compares_ended=True),
    "remax_advantages": NamedFunction("advantages"),
    "safe_advantages": NamedFunction("advantages"),
    "reference_point": NamedFunction("preferences"),
    "likelihood": NamedFunction("evaluation_metrics", metrics=("eval_nll",)),
    "pair_accuracy": NamedFunction("evaluation_metrics", metrics=("eval_accuracy",)),
    "preference_accuracy": NamedFunction("preferences", metrics=("eval_accuracy", "eval_preference_margin")),
    "diversity": NamedFunction("evaluation_metrics", metrics=("eval_distinct_2", "eval_response_length")),
    "episodes": NamedFunction("episodes", section="environment", metrics=("eval_turns_mean", "eval_episode_failed")),
    "held_out_scores": NamedFunction(
        "evaluation_metrics",
        "evaluation_scores",
        section="eval",
        metrics=(
            *("eval_reward_mean", "eval_reward_std", "eval_pass_at_1", "eval_pass_at_k"),
            *("eval_truncated", "eval_score_invalid"),
        ),
    ),
    "parity": NamedFunction("parity", section="rollout"),
    "reward": NamedFunction("reward_shaping", "weighted_scores", section="reward"),
    "cost": NamedFunction("reward_shaping", "weighted_scores", section="cost"),
}
