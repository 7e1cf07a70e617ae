"""Rewrite a graph for models of scores with a tokenizer of their own (``models.ROLE.retokenize``).

An operator where the responses are decodes prompts and responses and encodes them for the model, in columns of its own
width: ``tokens.ROLE`` and ``attention_mask.ROLE``. They travel to the model in place of the policy's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.operators.columns import TEXT, column_of, qualified
from flexrlhf.operators.graph import Graph, Operator
from flexrlhf.operators.sources import SECTIONS


def is_scorer(role: str) -> bool:
    """Whether ``role`` is a model of scores: of rewards or of costs."""
    return any(role == section or role.startswith(f"{section}_") for section in SECTIONS) and role != "cost_critic"


def retokenized_roles(spec: Spec) -> tuple[str, ...]:
    """Return the roles of ``spec`` that read texts by their own tokenizer."""
    return tuple(role for role, model in spec.models if model is not None and model.retokenize)


def with_retokenized(graph: Graph, spec: Spec) -> Graph:
    """Return ``graph`` with an operator before each scoring of a model that retokenizes.

    Raises UserError for a model that cannot.
    """
    roles = [role for role in retokenized_roles(spec) if role in graph.roles]
    for role in roles:
        _check(role, graph, spec)
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
    """Yield the operator that writes texts for ``operator``, a forward, and ``operator`` on these."""
    assert graph.generated is not None, "a graph without responses is refused"
    suffix = operator.suffix
    texts = tuple(f"{name}{suffix}" for name in qualified(TEXT, operator.role))
    yield replace(
        operator,
        name=f"{operator.name}_texts",
        kind="retokenize",
        role=graph.generated,
        reads=(*operator.reads, f"response_mask{suffix}", f"finished{suffix}"),
        writes=texts,
        function=operator.role,
    )
    # what computes sees the names of columns without their suffix
    yield replace(operator, reads=texts, suffix=f".{operator.role}{suffix}")


def _check(role: str, graph: Graph, spec: Spec) -> None:
    """Raise UserError for a role that reads no finished texts, and for scores of single tokens."""
    if not is_scorer(role) or role in graph.trained or graph.generated is None:
        raise UserError(
            f"models.{role}.retokenize: {spec.algorithm.name} "
            f"{'trains' if role in graph.trained else 'reads tokens of'} this model, and only finished texts can be "
            f"encoded again, by a reward or cost model; remove it, and set data.tokenizer to the model's own"
        )
    operators = (*graph.operators, *graph.evaluation)
    written = {column_of(name).quantity for operator in operators if operator.role == role for name in operator.writes}
    if "token_scores" in written:
        raise UserError(
            f"models.{role}.retokenize: level token needs a score for each token of the policy, as level step "
            f"does, which another tokenizer does not have; use level answer"
        )
