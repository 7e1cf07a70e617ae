"""Observers of a rank's instructions, in the order in which they receive each event."""

from __future__ import annotations

import time

from flexrlhf.display.events import EventSender
from flexrlhf.strategies.instructions import Run
from flexrlhf.trainer.checkpointer import Checkpointer
from flexrlhf.trainer.column_files import ColumnFiles, Replay
from flexrlhf.trainer.controllers import Controllers
from flexrlhf.trainer.execution import Execution, Observer
from flexrlhf.trainer.memory_meter import PeakMemory
from flexrlhf.trainer.rank_context import RankContext
from flexrlhf.trainer.results_writer import ResultsWriter
from flexrlhf.trainer.row_ledger import RowLedger
from flexrlhf.trainer.samples import ResponseTexts, Samples

VERBS = {"eval": "evaluating", "save": "saving", "checkpoint": "writing a checkpoint of"}
"""Words for instructions that few steps have."""


def make_observers(
    rank: RankContext, controllers: Controllers, ledger: RowLedger, results: ResultsWriter, checkpointer: Checkpointer
) -> tuple[Observer, ...]:
    """Return the observers of a run on this rank. Each event passes through them in this order."""
    spec, debug = rank.plan.spec, rank.plan.spec.debug
    return (
        Display(rank.events, spec.name),
        # responses of another run replace this one's before anything is read of them
        *([Replay(debug.replay)] if debug.replay is not None else []),
        # a report contains samples and outcomes; controllers follow from the statistics that it sums over ranks
        Samples(spec, ResponseTexts(rank.decode, rank.text, rank.read_reply)),
        ledger,
        results.recorder,
        controllers,
        # files are written before the times of an operator begin and after its columns are replayed
        *([ColumnFiles(rank)] if debug.record_columns else []),
        # the log of an instruction's end has its peak of memory
        PeakMemory(rank.meter, rank.models, rank.report_memory),
        rank.flight,
        # a delay is a part of an operator's times
        *([Delay(debug.run_delay_seconds)] if debug.run_delay_seconds else []),
        # the times of a step are counted once a span has ended, and before rank 0 reads them
        results.work,
        results,
        # a checkpoint is whole once the metrics of all steps before it are written
        checkpointer,
    )


class Display(Observer):
    """Sender of the instructions of this rank to a display."""

    def __init__(self, events: EventSender, run: str) -> None:
        self._events, self._run = events, run

    def begin(self, execution: Execution) -> None:
        """Send the instruction in words."""
        instruction = execution.instruction
        verb = VERBS.get(instruction.kind)
        kind = "" if isinstance(instruction, Run) else f"{verb or instruction.kind} "
        self._events.do(self._run, f"{kind}{instruction.label}", execution.step, rare=verb is not None)


class Delay(Observer):
    """Delay of every operator (``debug.run_delay_seconds``)."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def arrived(self, execution: Execution) -> None:
        """Wait."""
        time.sleep(self._seconds)
