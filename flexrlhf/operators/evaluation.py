"""Operators that evaluations of several algorithms have in common, what they tell, and what may be asked of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError, nearest
from flexrlhf.operators.columns import TEXT
from flexrlhf.operators.graph import Graph, Operator

GENERATE = Operator(
    "generate",
    "generate",
    "actor",
    ("prompts", "prompt_mask"),
    (*TEXT, "response_mask", "finished", "policy_version"),
)
DIVERSITY = Operator("diversity", "combine", "actor", ("tokens", "response_mask"), function="diversity")
HELD_OUT_SCORES = Operator(
    "held_out_scores", "combine", "actor", ("scores", "response_mask", "finished"), function="held_out_scores"
)
DRAWN = ".drawn"
"""Behind the names of what is generated where the data set has answers, too."""

TOLD: Mapping[str, tuple[str, ...]] = {
    "likelihood": ("eval_nll",),
    "pair_accuracy": ("eval_accuracy",),
    "preference_accuracy": ("eval_accuracy", "eval_preference_margin"),
    "diversity": ("eval_distinct_2", "eval_response_length"),
    "held_out_scores": (
        *("eval_reward_mean", "eval_reward_std", "eval_pass_at_1", "eval_pass_at_k"),
        *("eval_truncated", "eval_score_invalid"),
    ),
}
"""Function of a combine → the metrics of evaluations that follow from what it tells."""


def beside_answers(operator: Operator) -> Operator:
    """``operator`` on generated answers where the data set has answers, too."""
    own = {*TEXT, "response_mask", "finished", "policy_version"}

    def renamed(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{name}{DRAWN}" if name in own else name for name in names)

    return replace(operator, reads=renamed(operator.reads), writes=renamed(operator.writes), suffix=DRAWN)


def metrics_told(graph: Graph) -> tuple[str, ...]:
    """The metrics that evaluations of ``graph`` have."""
    return tuple(name for operator in graph.evaluation for name in TOLD.get(operator.function, ()))


def check_evaluation(graph: Graph, spec: Spec) -> None:
    """Raise UserError for settings of evaluations that the algorithm has no use for, and for a best without metric."""
    settings, algorithm = spec.eval, spec.algorithm
    if settings is not None:
        told = metrics_told(graph)
        if settings.samples_per_prompt is not None and graph.data != "prompts":
            raise UserError(
                f"eval.samples_per_prompt: the held-out rows of {algorithm.name} have their answers, as many as they "
                f"are; remove it"
            )
        for name, plain in (("pass_score", 1.0), ("pass_at", None)):
            if getattr(settings, name) != plain and "eval_pass_at_k" not in told:
                raise UserError(f"eval.{name}: evaluations of {algorithm.name} give answers no scores; remove it")
        samples = settings.num_samples(spec.algorithm.samples_per_prompt)
        if settings.pass_at is not None and settings.pass_at > samples:
            raise UserError(
                f"eval.pass_at: {settings.pass_at} of {samples} samples per prompt; use at most {samples}, or raise "
                f"eval.samples_per_prompt"
            )
    if spec.save.best is not None:
        _check_best(spec.save.best, graph, spec)


def _check_best(best: str, graph: Graph, spec: Spec) -> None:
    told = metrics_told(graph)
    if spec.eval is None:
        raise UserError(f"save.best: {best} is known of evaluations alone; give eval.path, or remove save.best")
    if best not in told:
        hint = nearest(best, told)
        raise UserError(
            f"save.best: {best!r} is no metric of the evaluations of {spec.algorithm.name}"
            f"{hint or '; use one of ' + ', '.join(told)}"
        )
