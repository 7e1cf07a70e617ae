"""Operators that evaluations of several algorithms share, the metrics that follow, and the settings that they allow."""

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
EVALUATION_SCORES = Operator(
    "held_out_scores", "combine", "actor", ("scores", "response_mask", "finished"), function="held_out_scores"
)
GENERATED = ".drawn"
"""Suffix of generated columns where the data set has responses, too."""

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
        return tuple(f"{name}{GENERATED}" if name in own else name for name in names)

    return replace(operator, reads=renamed(operator.reads), writes=renamed(operator.writes), suffix=GENERATED)


def evaluation_metrics(graph: Graph) -> tuple[str, ...]:
    """Return the names of the metrics that evaluations of ``graph`` report."""
    return tuple(name for operator in graph.evaluation for name in METRICS.get(operator.function, ()))


def check_evaluation(graph: Graph, spec: Spec) -> None:
    """Raise UserError for settings of evaluations that do nothing for the algorithm, and for a best without metric."""
    settings, algorithm = spec.eval, spec.algorithm
    if settings is not None:
        metrics = evaluation_metrics(graph)
        if settings.samples_per_prompt is not None and graph.data != "prompts":
            raise UserError(
                f"eval.samples_per_prompt: the evaluation set of {algorithm.name} has its responses, which are not "
                f"sampled; remove it"
            )
        for name, plain in (("pass_score", 1.0), ("pass_at", None)):
            if getattr(settings, name) != plain and "eval_pass_at_k" not in metrics:
                raise UserError(f"eval.{name}: evaluations of {algorithm.name} score no responses; remove it")
        samples = settings.num_samples(spec.algorithm.samples_per_prompt)
        if settings.pass_at is not None and settings.pass_at > samples:
            raise UserError(
                f"eval.pass_at: {settings.pass_at} of {samples} samples per prompt; use at most {samples}, or raise "
                f"eval.samples_per_prompt"
            )
    if spec.save.best is not None:
        _check_best(spec.save.best, graph, spec)


def _check_best(best: str, graph: Graph, spec: Spec) -> None:
    metrics = evaluation_metrics(graph)
    if spec.eval is None:
        raise UserError(f"save.best: {best} is a metric of evaluations; give eval.path, or remove save.best")
    if best not in metrics:
        hint = nearest(best, metrics)
        raise UserError(
            f"save.best: {best!r} is no metric of the evaluations of {spec.algorithm.name}"
            f"{hint or '; use one of ' + ', '.join(metrics)}"
        )
