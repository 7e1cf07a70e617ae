"""Files with the columns that operators have written, and as they arrived by moves (``debug.record_columns``).

A run may take the responses of another one from its files (``debug.replay``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flexrlhf.runs.recorded_columns import RecordedColumns
from flexrlhf.strategies.instructions import Move
from flexrlhf.trainer.execution import Execution, Observer
from flexrlhf.trainer.rank_context import RankContext


class ColumnFiles(Observer):
    """Writer of the columns of this rank's operators, with the numbers of their rows."""

    def __init__(self, rank: RankContext) -> None:
        self._rank = rank
        self._moved = {
            transfer.column
            for move in rank.plan.schedule.instructions
            if isinstance(move, Move)
            for transfer in move.transfers
            if transfer.destination == rank.rank
        }

    def arrived(self, execution: Execution) -> None:
        """Write the columns that the operator reads and that moves bring to this rank."""
        names = [name for name in execution.work.operator.reads if name in self._moved]
        if names and execution.work.rows:
            self._write(execution, names, arrived=True)

    def computed(self, execution: Execution) -> None:
        """Write the columns that the operator has written; the first rank of a replica does for all of its ranks."""
        work = execution.work
        if work.operator.writes and work.layout.is_first_of_replica(self._rank.rank):
            self._write(execution, work.operator.writes)

    def _write(self, execution: Execution, names: Sequence[str], arrived: bool = False) -> None:
        operator, rows = execution.work.operator, execution.work.rows
        columns = {name: execution.store.get(name, rows).cpu().contiguous() for name in names}
        place = f"step{execution.step}-{operator.name}-chunk{execution.instruction.chunk or 0}-rank{self._rank.rank}"
        of_evaluation = not arrived and execution.inner is not None
        files = RecordedColumns(self._rank.directory.path)
        self._rank.files.send(files.write(place, rows, columns, arrived, of_evaluation))


class Replay(Observer):
    """Replacement of the responses of training by another run's."""

    def __init__(self, run: str) -> None:
        """``run``: its directory."""
        self._recorded = RecordedColumns(Path(run))

    def computed(self, execution: Execution) -> None:
        """Replace the columns that a generate has written."""
        work = execution.work
        if work.operator.samples_responses and execution.inner is None:
            self._recorded.replay(work.operator, execution.step, work.rows, execution.store)
