"""The graph of the algorithm before its models are placed: sources of scores, shared weights, heads, evaluations.

A user's own graph (``algorithm.graph`` names a function that returns it) is checked here, before a rank starts. A
function of its file is named in it by its reference, ``path/to/file.py:name``, unlike the package's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

from flexrlhf.config.algorithms.base import AlgorithmSpec
from flexrlhf.config.code_checks import check_function
from flexrlhf.config.code_loading import NamedErrors, load_module
from flexrlhf.config.model_settings import Head, ModelsSpec
from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError, nearest
from flexrlhf.operators.columns import COLUMNS, Column
from flexrlhf.operators.graph import Graph, Operator
from flexrlhf.operators.named_functions import COMBINES, LOSSES
from flexrlhf.plan.score_sources import with_retokenized, with_sources
from flexrlhf.user_code.planning_calls import bounded_here

KEY = "algorithm.graph"
ENTRY_POINTS = "flexrlhf.graphs"
"""Group of the entry points by which an installed package offers graphs."""


def make_graph(spec: Spec) -> Graph:
    """Return the graph of the algorithm before its models are placed, with the sources of scores; roles that share
    another's weights are part of that role. Raises UserError for sources that the algorithm does not use, for models
    that cannot retokenize, and for a graph or loop of a user's own that cannot run.
    """
    algorithm = spec.algorithm
    if algorithm.loop is not None:
        check_function(algorithm.loop, "algorithm.loop")
    made = algorithm.step_graph() if algorithm.graph is None else _own_graph(algorithm)
    if made.generated is not None and not algorithm.SAMPLES:
        raise UserError(
            f"{KEY}: {algorithm.graph} generates responses, and {algorithm.name}, which trains on those of the data "
            f"set, has no temperature to sample them at; use the settings of an algorithm that samples, such as grpo"
        )
    graph = with_retokenized(with_sources(made, spec), spec)
    if algorithm.graph is not None:
        _check_operators_have_roles(graph)
    for role in graph.roles:
        model = spec.models.of(role)
        if model is not None and model.share is not None:
            graph = graph.sharing(role, model.share)
    return _with_passes_of_training(graph)


def _with_passes_of_training(graph: Graph) -> Graph:
    """Return ``graph`` with forwards that keep a prompt's sequences in one pass if a train does: with the same weights
    both then compute the same bits.
    """
    if not any(each.compares_responses for each in graph.operators):
        return graph
    forwards = (replace(each, compares=True) if each.kind == "forward" else each for each in graph.operators)
    return replace(graph, operators=tuple(forwards))


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
            return tuple(Column.of(name).quantity for name in operator.writes)
        case "train":
            return operator.quantities
    return ()


def check_evaluation(graph: Graph, spec: Spec) -> None:
    """Raise UserError for settings of evaluations that do nothing for the algorithm, and for a best without metric."""
    settings, algorithm = spec.eval, spec.algorithm
    if settings is not None:
        metrics = graph.evaluation_metrics
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
    metrics = graph.evaluation_metrics
    if spec.eval is None:
        raise UserError(f"save.best: {best} is a metric of evaluations; give eval.path, or remove save.best")
    if best not in metrics:
        hint = nearest(best, metrics)
        raise UserError(
            f"save.best: {best!r} is no metric of the evaluations of {spec.algorithm.name}"
            f"{hint or '; use one of ' + ', '.join(metrics)}"
        )


def _own_graph(spec: AlgorithmSpec) -> Graph:
    """Return the graph that the function of ``spec.graph`` makes of ``spec``. Raises UserError for one that cannot run.

    Its operators' functions are from the same file, else the package's.
    """
    assert spec.graph is not None, "a graph of one's own"
    place, _, name = _reference(spec.graph).rpartition(":")
    called = f"{KEY}: {spec.graph}"
    with NamedErrors(called), bounded_here(called):
        module = load_module(place)
        graph = getattr(module, name)(spec)
    if not isinstance(graph, Graph):
        raise UserError(f"{KEY}: {spec.graph} returns {type(graph).__name__}, not a flexrlhf.operators.graph.Graph")
    _check_roles(graph)
    _check_columns(graph.operators, graph.inputs)
    _check_columns(graph.evaluation, (*graph.inputs, *(name for each in graph.operators for name in each.writes)))

    def referring(operators: Sequence[Operator]) -> tuple[Operator, ...]:
        return tuple(replace(each, function=_function(each, module, place)) for each in operators)

    return replace(graph, operators=referring(graph.operators), evaluation=referring(graph.evaluation))


def _reference(written: str) -> str:
    """Return ``place:name`` of a function, or of the entry point of that name."""
    if ":" in written:
        check_function(written, KEY)
        return written
    offered: dict[str, EntryPoint] = {each.name: each for each in entry_points(group=ENTRY_POINTS)}
    if written not in offered:
        known = f"; there are {', '.join(sorted(offered))}" if offered else ""
        raise UserError(
            f"{KEY}: no entry point {written!r} of {ENTRY_POINTS}{nearest(written, offered)}{known}; "
            f"a file is named as path/to/file.py:function"
        )
    return offered[written].value


def _check_roles(graph: Graph) -> None:
    known = tuple(dict(ModelsSpec()))
    for role in graph.roles:
        if role not in known and not role.startswith(ModelsSpec.FURTHER):
            prefixes = ", ".join(f"{prefix}{role}" for prefix in ModelsSpec.FURTHER)
            raise UserError(f"{KEY}: role {role!r} is no name of a model; use {', '.join(known)}, or {prefixes}")


def _check_operators_have_roles(graph: Graph) -> None:
    """Raise UserError for an operator of a role that ``graph`` does not have, once sources of scores have theirs."""
    for operator in (*graph.operators, *graph.evaluation):
        if operator.role not in graph.roles:
            raise UserError(
                f"{KEY}: {operator.name} is of role {operator.role!r}, which is not among the graph's roles, "
                f"{', '.join(graph.roles)}; add it there"
            )


def _check_columns(operators: Sequence[Operator], inputs: Sequence[str]) -> None:
    """Raise UserError for a column that no earlier operator writes, and for two operators of one name."""
    names, written = set[str](), set(inputs)
    for operator in operators:
        if operator.kind not in Operator.KINDS:
            raise UserError(
                f"{KEY}: {operator.name} has kind {operator.kind!r}{nearest(operator.kind, Operator.KINDS)}; "
                f"there are {', '.join(Operator.KINDS)}"
            )
        if operator.name in names:
            raise UserError(f"{KEY}: two operators are called {operator.name!r}; give each a name of its own")
        names.add(operator.name)
        for column in (*operator.reads, *operator.writes):
            if Column.plain(column) not in COLUMNS:
                raise UserError(
                    f"{KEY}: {operator.name}: no column {column!r}{nearest(column, COLUMNS)}; a column of your own "
                    f"has a name of yours behind a known one, such as scores.{column}"
                )
        for column in operator.reads:
            if column not in written:
                raise UserError(
                    f"{KEY}: {operator.name} reads {column!r}, which no operator before it writes"
                    f"{nearest(column, written)}"
                )
        written.update(operator.writes)


def _function(operator: Operator, module: ModuleType, place: str) -> str:
    """Return the function of ``operator`` as a reference where the user's file has it, else its name."""
    known = {"train": LOSSES, "combine": COMBINES}.get(operator.kind)
    if known is None:
        return operator.function
    if callable(getattr(module, operator.function, None)):
        return f"{place}:{operator.function}"
    if operator.function not in known:
        functions = {*known, *(name for name, value in vars(module).items() if callable(value))}
        raise UserError(
            f"{KEY}: {operator.name}: no function {operator.function!r} in {place} or among the package's"
            f"{nearest(operator.function, functions)}; there are {', '.join(sorted(known))}"
        )
    return operator.function
