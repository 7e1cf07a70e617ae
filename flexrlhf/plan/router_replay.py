"""Recording of experts in generation, and their replay (``models.actor.router_replay``): the graph rewritten for it."""

from __future__ import annotations

from dataclasses import replace

from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.operators.columns import Column
from flexrlhf.operators.graph import Graph, Operator
from flexrlhf.plan.old_logprobs import also_writing


def with_router_replay(graph: Graph, spec: Spec) -> Graph:
    """Return ``graph`` with the experts that generation has chosen: passes of the policy over the same responses read
    them, and training alone where they are compared. A reference has routers of its own.

    Raises UserError for roles without generation.
    """
    roles = [role for role, model in spec.models if model is not None and model.has_replay]
    for role in roles:
        _check(role, graph, spec)
    if not roles:
        return graph
    kinds = ("train",) if _mode(roles[0], spec) == "compare" else ("forward", "train")

    def reading(operator: Operator) -> Operator:
        is_policy = operator.role == graph.generated and operator.adapters and operator.kind in kinds
        reads = is_policy and "tokens" in operator.reads
        return replace(operator, reads=(*operator.reads, Column.EXPERTS)) if reads else operator

    return replace(graph, operators=also_writing((reading(each) for each in graph.operators), Column.EXPERTS))


def _mode(role: str, spec: Spec) -> str:
    model = spec.models.of(role)
    assert model is not None, f"{role} is resolved"
    return model.router_replay


def _check(role: str, graph: Graph, spec: Spec) -> None:
    key = f"models.{role}.router_replay: {_mode(role, spec)}"
    if role != graph.generated:
        who = f"the {graph.generated}" if graph.generated else "none here"
        raise UserError(f"{key} is for the model that generates, which is {who}; use none")
    if graph.data != "prompts":
        raise UserError(f"{key} is for data without responses, and {spec.algorithm.name} has some; use none")
