"""The graph that a run executes: the algorithm's, changed for sources, shared weights, copies and rollout engines."""

from __future__ import annotations

from dataclasses import replace

from flexrlhf.config.spec import Spec
from flexrlhf.operators.graph import Graph
from flexrlhf.operators.registry import make_graph
from flexrlhf.operators.rollout import with_rollout
from flexrlhf.placement.dtypes import with_placed_dtypes
from flexrlhf.placement.placed import Placement


def run_graph(spec: Spec, placement: Placement) -> Graph:
    """Return the graph of ``spec`` as it runs under ``placement``. Every rewrite of a graph is a line here or in
    ``make_graph``, which makes the graph that is placed.

    Raises UserError for settings of rollouts that do not go with the algorithm.
    """
    graph, shadowed = make_graph(spec), {model.role for model in placement.shadows}
    spec = with_placed_dtypes(spec, placement)
    return with_rollout(_on_both_copies(graph, spec, shadowed), spec, is_remote=graph.generated in shadowed)


def _on_both_copies(graph: Graph, spec: Spec, shadowed: set[str]) -> Graph:
    """Return ``graph`` with operators that either copy may compute on the trained one, in parallel with the shadow.

    Both copies store the same weights then: without a lag, and with a sync of unrounded weights after every step.
    """
    if spec.schedule.lag or spec.sync.every > 1 or spec.sync.dtype is not None:
        return graph
    return replace(
        graph,
        operators=tuple(
            replace(operator, on_trained=operator.on_trained or (operator.either_copy and operator.role in shadowed))
            for operator in graph.operators
        ),
    )
