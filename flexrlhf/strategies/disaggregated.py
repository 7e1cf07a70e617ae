"""Disaggregated: training on the first devices, inference with shadow copies on the others.

``lag: 0``: chunks pipeline through generate → forward → train; the result equals co-located.
``lag: 1``: the next batch is generated while the last one trains; then its rows move to the training side.
"""

from __future__ import annotations

from flexrlhf.config.spec import Spec
from flexrlhf.operators.graph import Graph
from flexrlhf.placement.layout import BatchShape
from flexrlhf.placement.placed import Placement
from flexrlhf.strategies.instructions import Instruction
from flexrlhf.strategies.schedule import Builder, by_wave, closing, make_tasks, with_syncs

NAME = "disaggregated"


def matches(placement: Placement) -> bool:
    """Whether ``placement`` is run by this strategy."""
    return bool(placement.shadows)


def order(graph: Graph, placement: Placement, shape: BatchShape, spec: Spec) -> list[Instruction]:
    """Return the instructions of one step."""
    if spec.schedule.lag == 0:
        return by_wave(graph, placement, shape, spec)
    builder = Builder(placement, shape)
    trained = [o for o in graph.operators if not builder.model_of(o).follows and o.role in graph.trained]
    inference = make_tasks(graph, placement, shape, [o for o in graph.operators if o not in trained])
    training = make_tasks(graph, placement, shape, trained)
    newest, rows = builder.emit(inference), builder.moves(inference, training)
    builder.lag = 1
    # before the syncs, which would delay them
    instructions = [*newest, *builder.emit(training), *rows]
    return with_syncs(instructions, placement, spec, lag=1, end=closing(graph, placement, shape, spec, lag=1))
