"""Files with the columns that operators have written, and as they arrived by moves (``debug.record_columns``).

A run may take the responses of another one from its files (``debug.replay``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from flexrlhf.metrics import Triple
from flexrlhf.runs.recorded_columns import ARRIVAL_PREFIX, DIRECTORY, EVALUATION_PREFIX, STATISTICS, replay_responses
from flexrlhf.runs.tensor_files import save_tensors
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
            self._write(execution, names, ARRIVAL_PREFIX)

    def computed(self, execution: Execution) -> None:
        """Write the columns that the operator has written; the first rank of a replica does for all of its ranks."""
        work = execution.work
        if work.operator.writes and not work.goes_on and work.layout.is_first_of_replica(self._rank.rank):
            self._write(execution, work.operator.writes, "" if execution.inner is None else EVALUATION_PREFIX)

    def _write(self, execution: Execution, names: Sequence[str], prefix: str) -> None:
        directory, operator, rows = self._rank.directory / DIRECTORY, execution.work.operator, execution.work.rows
        directory.mkdir(parents=True, exist_ok=True)
        columns = {name: execution.store.get(name, rows).cpu().contiguous() for name in names}
        place = f"step{execution.step}-{operator.name}-chunk{execution.instruction.chunk or 0}-rank{self._rank.rank}"
        path = directory / f"{prefix}{place}.safetensors"
        save_tensors({**columns, "rows": torch.tensor(rows, dtype=torch.int64)}, path)
        self._rank.files.send(path)


class Replay(Observer):
    """Replacement of the responses of training by another run's."""

    def __init__(self, run: str) -> None:
        """``run``: its directory."""
        self._run = run

    def computed(self, execution: Execution) -> None:
        """Replace the columns that a generate has written."""
        work = execution.work
        if work.operator.completes_responses and not work.goes_on and execution.inner is None:
            replay_responses(self._run, work.operator, execution.step, work.rows, execution.store)


def record_statistics(
    directory: Path, step: int, statistics: Mapping[str, Triple], reporters: Mapping[str, str]
) -> None:
    """Append the statistics of a step. ``reporters``: instruction that reported each, in words."""
    (directory / DIRECTORY).mkdir(parents=True, exist_ok=True)
    with (directory / DIRECTORY / STATISTICS).open("a") as file:
        file.write(json.dumps({"step": step, "statistics": statistics, "reporters": reporters}) + "\n")
