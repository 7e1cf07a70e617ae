"""What each engine can serve; planning refuses the rest. Pure: importing an engine happens on the ranks."""

from __future__ import annotations

from flexrlhf.errors import UserError, nearest
from flexrlhf.operators.graph import Graph
from flexrlhf.placement.placed import Placement

SERVES: dict[str, frozenset[str]] = {
    "torch": frozenset({"generate", "forward", "train"}),
}


def check_engines(graph: Graph, placement: Placement) -> None:
    """Raise UserError where a placed model's engine cannot serve an operator of its role."""
    for model in placement.models:
        if model.engine not in SERVES:
            raise UserError(
                f"models.{model.role}.engine: unknown engine {model.engine!r}{nearest(model.engine, SERVES)}; "
                f"known: {', '.join(SERVES)}"
            )
        for operator in graph.operators:
            if operator.role == model.role and operator.kind != "combine" and operator.kind not in SERVES[model.engine]:
                raise UserError(f"models.{model.role}.engine: engine {model.engine} cannot serve {operator.kind}")
