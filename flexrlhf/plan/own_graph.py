"""Graphs of a user's own: ``algorithm.graph`` names a function that returns one, with losses and combines of its file.

The graph is checked here, before a rank starts. A function of the file is named in the graph by its
reference, ``path/to/file.py:name``, unlike the package's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType, TracebackType
from typing import get_args

from flexrlhf.config.algorithms.base import AlgorithmSpec
from flexrlhf.config.code_checks import check_function
from flexrlhf.config.code_loading import line_of, load_module
from flexrlhf.config.model_settings import FURTHER_MODELS, ModelsSpec
from flexrlhf.errors import UserError, nearest
from flexrlhf.operators.columns import COLUMNS, plain
from flexrlhf.operators.graph import COMBINES, LOSSES, Graph, Operator, OperatorKind

KEY = "algorithm.graph"
ENTRY_POINTS = "flexrlhf.graphs"
"""Group of the entry points by which an installed package offers graphs."""
_KINDS = tuple(kind for choice in get_args(OperatorKind) for kind in get_args(choice) or (choice,))


def own_graph(spec: AlgorithmSpec) -> Graph:
    """Return the graph that the function of ``spec.graph`` makes of ``spec``. Raises UserError for one that cannot run.

    Its operators' functions are from the same file, else the package's.
    """
    assert spec.graph is not None, "a graph of one's own"
    place, _, name = _reference(spec.graph).rpartition(":")
    with _Named(spec.graph):
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
        if role not in known and not role.startswith(FURTHER_MODELS):
            prefixes = ", ".join(f"{prefix}{role}" for prefix in FURTHER_MODELS)
            raise UserError(f"{KEY}: role {role!r} is no name of a model; use {', '.join(known)}, or {prefixes}")


def check_operators_have_roles(graph: Graph) -> None:
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
        if operator.kind not in _KINDS:
            raise UserError(
                f"{KEY}: {operator.name} has kind {operator.kind!r}{nearest(operator.kind, _KINDS)}; "
                f"there are {', '.join(_KINDS)}"
            )
        if operator.name in names:
            raise UserError(f"{KEY}: two operators are called {operator.name!r}; give each a name of its own")
        names.add(operator.name)
        for column in (*operator.reads, *operator.writes):
            if plain(column) not in COLUMNS:
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


class _Named:
    """Context in which an error of a user's code becomes one sentence with file and line."""

    def __init__(self, reference: str) -> None:
        self._reference = reference

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and not isinstance(error, UserError | KeyboardInterrupt):
            raise UserError(f"{KEY}: {self._reference} raised {line_of(error)}") from error
