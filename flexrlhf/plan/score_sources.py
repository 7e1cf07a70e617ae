"""Rewrite a graph whose scores come from other sources than one model of that name, or by a tokenizer of their own.

Each model of several is a role of its own. Functions, services and rules take no devices: they are called where the
responses are. Without any model the role goes, and the ratio vector loses its entry.

For a model with ``models.ROLE.retokenize`` an operator where the responses are decodes prompts and responses and
encodes them for the model, in columns of its own width: ``tokens.ROLE`` and ``attention_mask.ROLE``. They travel to the
model in place of the policy's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from flexrlhf.config.reward_sources import ModelSource, RewardSource, Sources
from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.operators.columns import TEXT, Column, Qualifier
from flexrlhf.operators.graph import Graph, Operator

SECTIONS = ("reward", "cost")


def with_sources(graph: Graph, spec: Spec) -> Graph:
    """Return ``graph`` with the sources of ``spec``. Raises UserError if the algorithm uses no such scores."""
    for section, sources in (("reward", spec.reward), ("cost", spec.cost)):
        has_rewards = section == "reward" and spec.environment is not None
        if has_rewards and sources is None:
            sources = () if spec.models.reward is None else (ModelSource(model=section),)
        elif sources is None or (sources == (ModelSource(model=section),) and not has_rewards):
            continue  # the graph has a model of that name
        if not any(_scores(operator, section) for operator in graph.operators):
            if has_rewards and spec.reward is None:
                continue  # episodes are refused by what they are
            raise UserError(f"{section}: {spec.algorithm.name} uses no such scores; remove it")
        graph = _with_section(graph, section, sources, has_rewards)
    if _reads_ends(graph.operators) and Column.STEP_ENDS not in graph.producers:
        raise UserError(
            "algorithm.supervision: process needs a source of reward with level: step, or an environment, whose turns "
            "are steps; give one, or use outcome"
        )
    return graph


def _reads_ends(operators: Sequence[Operator]) -> bool:
    return any(Column.STEP_ENDS in operator.reads for operator in operators)


def _scores(operator: Operator, section: str) -> bool:
    return operator.kind == "forward" and operator.role == section


def _with_section(graph: Graph, section: str, sources: Sources, has_rewards: bool) -> Graph:
    """Return ``graph`` with the ``sources`` of a section. ``has_rewards``: whether an environment is a further one."""
    models = tuple(dict.fromkeys(source.model for source in sources if isinstance(source, ModelSource)))
    _check_names(section, sources, models)

    def all_of(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
        with_ends = _reads_ends(operators)
        return tuple(
            each
            for operator in operators
            for each in (
                _replaced(operator, section, sources, with_ends, has_rewards)
                if _scores(operator, section)
                else [operator]
            )
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


def _replaced(
    operator: Operator, section: str, sources: Sources, with_ends: bool, has_rewards: bool
) -> Iterator[Operator]:
    """Yield the operators that take the place of ``operator``, a forward of the section's model.

    with_ends:    whether the ends of steps are read, too.
    has_rewards:  whether the environment's rewards are added.
    """
    models = [source for source in sources if isinstance(source, ModelSource)]
    called = [source for source in sources if not isinstance(source, ModelSource)]
    (column,) = operator.writes
    suffix = column.removeprefix("scores")
    own = _columns_of(sources, "", suffix, with_ends)
    texts = (*operator.reads, f"response_mask{operator.suffix}", f"finished{operator.suffix}")
    call = replace(operator, kind="score", role="actor", function=section, suffix=suffix)
    if not models and not has_rewards:
        yield replace(call, reads=texts, writes=own)
        return
    parts: list[str] = []
    if has_rewards:
        # a turn is a step, whose reward is that of the turn
        parts += [f"{Column.REWARDS}{suffix}", *([Column.TURN_ENDS] if with_ends else [])]
        own = tuple(dict.fromkeys((*own, f"token_scores{suffix}", *([Column.STEP_ENDS] if with_ends else []))))
    for source in models:
        name = f"{'scores' if source.level == 'answer' else 'token_scores'}.{source.model}{suffix}"
        yield replace(operator, name=f"{operator.name}_{source.model}", role=source.model, writes=(name,))
        parts.append(name)
    further = _columns_of(called, f".{Qualifier.CALLED}", suffix, with_ends) if called else ()
    further += tuple(f"{Column.STEP_ENDS}.{source.model}{suffix}" for source in models if source.level == "step")
    if further:
        yield replace(call, name=f"{operator.name}_{Qualifier.CALLED}", reads=texts, writes=further)
    parts += further
    yield replace(call, kind="combine", reads=(*parts, f"response_mask{operator.suffix}"), writes=own)


def _columns_of(sources: Sequence[RewardSource], qualifier: str, suffix: str, with_ends: bool) -> tuple[str, ...]:
    """Return the names of the columns with the weighted scores of ``sources``."""
    levels = {source.level for source in sources}
    kinds = ["scores", *(["token_scores"] if levels - {"answer"} else [])]
    if with_ends and "step" in levels:
        kinds.append(Column.STEP_ENDS)
    return tuple(f"{kind}{qualifier}{suffix}" for kind in kinds)


def _with_token_scores(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """Return ``operators`` where readers of scores also read the token scores that exist."""
    written = {name for operator in operators for name in operator.writes if Column.plain(name) == "token_scores"}

    def reading(operator: Operator) -> Operator:
        further = tuple(f"token_{name}" for name in operator.reads if f"token_{name}" in written - set(operator.reads))
        is_weighing = operator.kind == "combine" and set(operator.writes) & written
        return operator if is_weighing else replace(operator, reads=(*operator.reads, *further))

    return tuple(reading(operator) for operator in operators)


def is_scorer(role: str) -> bool:
    """Whether ``role`` is a model of scores: of rewards or of costs."""
    return any(role == section or role.startswith(f"{section}_") for section in SECTIONS) and role != "cost_critic"


def with_retokenized(graph: Graph, spec: Spec) -> Graph:
    """Return ``graph`` with an operator before each scoring of a model that retokenizes.

    Raises UserError for a model that cannot.
    """
    roles = [role for role, model in spec.models if model is not None and model.retokenize and role in graph.roles]
    for role in roles:
        _check_retokenized(role, graph, spec)
    if not roles:
        return graph

    def all_of(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
        return tuple(
            each
            for operator in operators
            for each in (_retokenized(operator, graph) if operator.role in roles else [operator])
        )

    return replace(graph, operators=all_of(graph.operators), evaluation=all_of(graph.evaluation))


def _retokenized(operator: Operator, graph: Graph) -> Iterator[Operator]:
    """Yield the operator that encodes sequences for ``operator``, a forward, and ``operator`` on these."""
    assert graph.generated is not None, "a graph without responses is refused"
    suffix = operator.suffix
    texts = tuple(f"{name}{suffix}" for name in Column.qualified(TEXT, operator.role))
    yield replace(
        operator,
        name=f"{operator.name}_texts",
        kind="retokenize",
        role=graph.generated,
        reads=(*operator.reads, f"response_mask{suffix}", f"finished{suffix}"),
        writes=texts,
        function=operator.role,
    )
    # the model's forward sees the names of columns without their suffix
    yield replace(operator, reads=texts, suffix=f".{operator.role}{suffix}")


def _check_retokenized(role: str, graph: Graph, spec: Spec) -> None:
    """Raise UserError for a role that reads no finished responses, and for scores of single tokens."""
    if not is_scorer(role) or role in graph.trained or graph.generated is None:
        raise UserError(
            f"models.{role}.retokenize: {spec.algorithm.name} "
            f"{'trains' if role in graph.trained else 'reads tokens of'} this model, and only finished texts can be "
            f"encoded again, by a reward or cost model; remove it, and set data.tokenizer to the model's own"
        )
    operators = (*graph.operators, *graph.evaluation)
    written = {Column.of(name).quantity for operator in operators if operator.role == role for name in operator.writes}
    if "token_scores" in written:
        raise UserError(
            f"models.{role}.retokenize: level token needs a score for each token of the policy, as level step "
            f"does, which another tokenizer does not have; use level answer"
        )
