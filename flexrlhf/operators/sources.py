"""Rewrite a graph whose scores come from other sources than one model of that name.

Each model of several is a role of its own. Functions, services and rules take no devices: they are called where the
responses are. Without any model the role goes, and the ratio vector loses its entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from flexrlhf.config.reward_sources import ModelSource, RewardSource, Sources
from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.operators.columns import plain
from flexrlhf.operators.graph import Graph, Operator

SECTIONS = ("reward", "cost")
CALLED = "called"
"""Qualifier of columns that functions, services and rules write."""
STEP_ENDS = "step_ends"
"""Column of the tokens that end a step."""


def with_sources(graph: Graph, spec: Spec) -> Graph:
    """Return ``graph`` with the sources of ``spec``. Raises UserError where the algorithm uses no such scores."""
    for section, sources in (("reward", spec.reward), ("cost", spec.cost)):
        if sources is None or _is_plain(sources, section):
            continue
        if not any(_scores(operator, section) for operator in graph.operators):
            raise UserError(f"{section}: {spec.algorithm.name} uses no such scores; remove it")
        graph = _with(graph, section, sources)
    if _reads_ends(graph.operators) and STEP_ENDS not in graph.producers:
        raise UserError(
            "algorithm.supervision: process needs a source of reward with level: step; give one, or use outcome"
        )
    return graph


def _reads_ends(operators: Sequence[Operator]) -> bool:
    return any(STEP_ENDS in operator.reads for operator in operators)


def _is_plain(sources: Sources, section: str) -> bool:
    """Whether the sources are what the graph already has: one model of that name."""
    return sources == (ModelSource(model=section),)


def _scores(operator: Operator, section: str) -> bool:
    return operator.kind == "forward" and operator.role == section


def _with(graph: Graph, section: str, sources: Sources) -> Graph:
    models = tuple(dict.fromkeys(source.model for source in sources if isinstance(source, ModelSource)))
    _check_names(section, sources, models)

    def all_of(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
        with_ends = _reads_ends(operators)
        return tuple(
            each
            for operator in operators
            for each in (_replaced(operator, section, sources, with_ends) if _scores(operator, section) else [operator])
        )

    # a graph of a user's own need not have a role that no model takes
    index = graph.roles.index(section) if section in graph.roles else len(graph.roles)
    return replace(
        graph,
        operators=_with_token_scores(all_of(graph.operators)),
        evaluation=all_of(graph.evaluation),
        roles=(*graph.roles[:index], *models, *graph.roles[index + 1 :]),
    )


def _check_names(section: str, sources: Sources, models: tuple[str, ...]) -> None:
    for name in models:
        if name != section and not name.startswith(f"{section}_"):
            raise UserError(f"{section}: model {name!r}: call it {section}, or {section}_ and a name of yours")
    if len(models) < sum(isinstance(source, ModelSource) for source in sources):
        raise UserError(f"{section}: a model stands there twice; give each of {', '.join(models)} once")


def _replaced(operator: Operator, section: str, sources: Sources, with_ends: bool) -> Iterator[Operator]:
    """Yield the operators that take the place of ``operator``, a forward of the section's model.

    ``with_ends``: whether the ends of steps are read, too.
    """
    models = [source for source in sources if isinstance(source, ModelSource)]
    called = [source for source in sources if not isinstance(source, ModelSource)]
    (column,) = operator.writes
    suffix = column.removeprefix("scores")
    own = _columns_of(sources, "", suffix, with_ends)
    texts = (*operator.reads, f"response_mask{operator.suffix}", f"finished{operator.suffix}")
    call = replace(operator, kind="score", role="actor", function=section, suffix=suffix)
    if not models:
        yield replace(call, reads=texts, writes=own)
        return
    parts: list[str] = []
    for source in models:
        name = f"{'scores' if source.level == 'answer' else 'token_scores'}.{source.model}{suffix}"
        yield replace(operator, name=f"{operator.name}_{source.model}", role=source.model, writes=(name,))
        parts.append(name)
    further = _columns_of(called, f".{CALLED}", suffix, with_ends) if called else ()
    further += tuple(f"{STEP_ENDS}.{source.model}{suffix}" for source in models if source.level == "step")
    if further:
        yield replace(call, name=f"{operator.name}_{CALLED}", reads=texts, writes=further)
    parts += further
    yield replace(call, kind="combine", reads=(*parts, f"response_mask{operator.suffix}"), writes=own)


def _columns_of(sources: Sequence[RewardSource], qualifier: str, suffix: str, with_ends: bool) -> tuple[str, ...]:
    """Return the names of the columns with the weighted scores of ``sources``."""
    levels = {source.level for source in sources}
    kinds = ["scores", *(["token_scores"] if levels - {"answer"} else [])]
    if with_ends and "step" in levels:
        kinds.append(STEP_ENDS)
    return tuple(f"{kind}{qualifier}{suffix}" for kind in kinds)


def _with_token_scores(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """Return ``operators`` where readers of scores also read the token scores that exist."""
    written = {name for operator in operators for name in operator.writes if plain(name) == "token_scores"}

    def reading(operator: Operator) -> Operator:
        further = tuple(f"token_{name}" for name in operator.reads if f"token_{name}" in written - set(operator.reads))
        is_weighing = operator.kind == "combine" and set(operator.writes) & written
        return operator if is_weighing else replace(operator, reads=(*operator.reads, *further))

    return tuple(reading(operator) for operator in operators)
