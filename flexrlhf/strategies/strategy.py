"""Strategies: which placement each one is for, and the order of its instructions.

* Co-located: every model on every device; operators run one after another on all of them, and no row moves.
* Interleaving: some models on parts of the devices, side by side. The order is that of co-located: ranks skip the
  instructions that do not name them, so operators of one wave overlap.
* Disaggregated: training on the first devices, inference with shadow copies on the others. ``lag: 0``: chunks pipeline
  through generate → forward → train; the result equals co-located. ``lag: k``: the next batches are generated while
  the one k before the newest trains; the rows of the newest move to the training side after that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.operators.graph import Graph
from flexrlhf.placement.layout import BatchShape
from flexrlhf.placement.placement import Placement
from flexrlhf.strategies.instructions import Instruction
from flexrlhf.strategies.late_operators import is_late
from flexrlhf.strategies.schedule import Builder, closing, emitted, make_tasks, opening
from flexrlhf.strategies.syncs import with_refills, with_syncs
from flexrlhf.text import counted


def by_wave(graph: Graph, placement: Placement, shape: BatchShape, spec: Spec) -> list[Instruction]:
    """Return the instructions of one step without a lag, every operator in its tick."""
    instructions = [*emitted(placement, shape, make_tasks(graph, placement, shape, graph.operators))]
    end = closing(graph, placement, shape, spec, lag=0)
    whole = with_syncs(instructions, placement, spec, lag=0, end=end)
    return with_refills([*opening(graph, placement, shape, spec), *whole], placement)


def with_shadows(graph: Graph, placement: Placement, shape: BatchShape, spec: Spec) -> list[Instruction]:
    """Return the instructions of one step whose inference is on other ranks than its training."""
    lag = spec.schedule.lag
    if lag == 0:
        return by_wave(graph, placement, shape, spec)
    builder = Builder(placement, shape)
    late = [operator for operator in graph.operators if is_late(operator, graph, placement)]
    inference = make_tasks(graph, placement, shape, [operator for operator in graph.operators if operator not in late])
    training = make_tasks(graph, placement, shape, late)
    newest, rows = builder.emit(inference), builder.moves(inference, training)
    builder.lag = lag
    # before the syncs, which would delay them
    instructions = [*newest, *builder.emit(training), *rows]
    whole = with_syncs(instructions, placement, spec, lag, end=closing(graph, placement, shape, spec, lag))
    return with_refills([*opening(graph, placement, shape, spec), *whole], placement)


@dataclass(frozen=True)
class Strategy:
    """Strategy of a run.

    matches:  whether it runs a placement.
    order:    returns the instructions of one step.
    """

    matches: Callable[[Placement], bool]
    order: Callable[[Graph, Placement, BatchShape, Spec], list[Instruction]]

    COLOCATED: ClassVar = "co-located"
    INTERLEAVING: ClassVar = "interleaving"
    DISAGGREGATED: ClassVar = "disaggregated"
    ALL: ClassVar[Mapping[str, Strategy]]
    """Strategies by name; each placement matches one."""

    @staticmethod
    def choose(spec: Spec, placement: Placement) -> str:
        """Return the name of the strategy that matches. Raises UserError if ``schedule.strategy``, lag or sync
        contradict it.
        """
        name = next(name for name, strategy in Strategy.ALL.items() if strategy.matches(placement))
        if spec.schedule.strategy not in (None, name):
            raise UserError(
                f"schedule.strategy: {spec.schedule.strategy!r} contradicts the placement, which means {name!r}; "
                f"remove it or change the placement"
            )
        if name != Strategy.DISAGGREGATED and spec.schedule.lag:
            raise UserError(
                f"schedule.lag: {spec.schedule.lag} needs shadow models (a disaggregated placement), found {name}; "
                f"use lag 0"
            )
        if spec.schedule.lag and spec.schedule.lag >= spec.steps:
            most = f"at most {spec.steps - 1}" if spec.steps > 1 else "0"
            raise UserError(
                f"schedule.lag: {spec.schedule.lag} in a run of {counted(spec.steps, 'step')}, so every batch would be "
                f"generated with the first weights; use {most}, or more steps"
            )
        if name != Strategy.DISAGGREGATED and spec.sync.every != 1:
            raise UserError(
                f"sync.every: {spec.sync.every} needs shadow models (a disaggregated placement), found {name}; use 1"
            )
        return name


def _is_whole(placement: Placement) -> bool:
    return all(len(model.ranks) == placement.num_ranks for model in placement.models)


Strategy.ALL = {
    Strategy.COLOCATED: Strategy(lambda placement: not placement.shadows and _is_whole(placement), by_wave),
    Strategy.INTERLEAVING: Strategy(lambda placement: not placement.shadows and not _is_whole(placement), by_wave),
    Strategy.DISAGGREGATED: Strategy(lambda placement: bool(placement.shadows), with_shadows),
}
