"""The graph of the algorithm before its models are placed: sources of scores, shared weights, heads, evaluations."""

from __future__ import annotations

from flexrlhf.config.code_checks import check_function
from flexrlhf.config.model_settings import Head
from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError, nearest
from flexrlhf.operators.columns import column_of
from flexrlhf.operators.graph import Graph, Operator, evaluation_metrics, share_weights
from flexrlhf.plan.own_graph import check_operators_have_roles, own_graph
from flexrlhf.plan.score_sources import with_retokenized, with_sources


def make_graph(spec: Spec) -> Graph:
    """Return the graph of the algorithm before its models are placed, with the sources of scores; roles that share
    another's weights are part of that role. Raises UserError for sources that the algorithm does not use, for models
    that cannot retokenize, and for a graph or loop of a user's own that cannot run.
    """
    algorithm = spec.algorithm
    if algorithm.loop is not None:
        check_function(algorithm.loop, "algorithm.loop")
    made = algorithm.step_graph() if algorithm.graph is None else own_graph(algorithm)
    graph = with_retokenized(with_sources(made, spec), spec)
    if algorithm.graph is not None:
        check_operators_have_roles(graph)
    for role in graph.roles:
        model = spec.models.of(role)
        if model is not None and model.share is not None:
            graph = share_weights(graph, role, model.share)
    return graph


def heads_of(graph: Graph) -> dict[str, Head]:
    """Return the head that each role's model needs for its operators."""
    return {role: _head(graph, role) for role in graph.roles}


def _head(graph: Graph, role: str) -> Head:
    computed: set[str | None] = set()
    for operator in (*graph.operators, *graph.evaluation):
        if operator.role == role:
            computed.update(_computed(operator))
    if computed <= {"logprobs"}:
        return "causal"
    return "both" if "logprobs" in computed else "scalar"


def _computed(operator: Operator) -> tuple[str | None, ...]:
    """Return the quantities that the model computes for ``operator``."""
    match operator.kind:
        case "generate":
            return ("logprobs",)
        case "forward":
            return tuple(column_of(name).quantity for name in operator.writes)
        case "train":
            return operator.quantities
    return ()


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
