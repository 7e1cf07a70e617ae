"""Operators that evaluations of several algorithms share, and the metrics that follow from an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flexrlhf.operators.columns import GENERATED, TEXT
from flexrlhf.operators.graph import Graph, Operator

GENERATE = Operator(
    "generate",
    "generate",
    "actor",
    ("prompts", "prompt_mask"),
    (*TEXT, "response_mask", "finished", "policy_version"),
)
DIVERSITY = Operator("diversity", "combine", "actor", ("tokens", "response_mask"), function="diversity")
EVALUATION_SCORES = Operator(
    "held_out_scores", "combine", "actor", ("scores", "response_mask", "finished"), function="held_out_scores"
)
METRICS: Mapping[str, tuple[str, ...]] = {
    "likelihood": ("eval_nll",),
    "pair_accuracy": ("eval_accuracy",),
    "preference_accuracy": ("eval_accuracy", "eval_preference_margin"),
    "diversity": ("eval_distinct_2", "eval_response_length"),
    "held_out_scores": (
        *("eval_reward_mean", "eval_reward_std", "eval_pass_at_1", "eval_pass_at_k"),
        *("eval_truncated", "eval_score_invalid"),
    ),
}
"""Function of a combine → the metrics of evaluations that follow from its statistics."""


def next_to_data(operator: Operator) -> Operator:
    """Return ``operator`` on generated responses, for a data set that has responses, too."""
    own = {*TEXT, "response_mask", "finished", "policy_version"}

    def renamed(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{name}.{GENERATED}" if name in own else name for name in names)

    return replace(operator, reads=renamed(operator.reads), writes=renamed(operator.writes), suffix=f".{GENERATED}")


def evaluation_metrics(graph: Graph) -> tuple[str, ...]:
    """Return the names of the metrics that evaluations of ``graph`` report."""
    return tuple(name for operator in graph.evaluation for name in METRICS.get(operator.function, ()))
