"""Files with the columns that operators have written, and as they arrived by moves (``debug.record_columns``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from flexrlhf.comm.rows import RowStore
from flexrlhf.metrics import Triple
from flexrlhf.runs.recorded_columns import ARRIVAL_PREFIX, DIRECTORY, STATISTICS
from flexrlhf.runs.tensor_files import save_tensors
from flexrlhf.strategies.instructions import Move, Run
from flexrlhf.trainer.rank_context import RankContext


def record_columns(
    context: RankContext, run: Run, step: int, rows: Sequence[int], store: RowStore, prefix: str = ""
) -> None:
    """Write the columns that ``run`` wrote for ``rows``, with the row numbers, if ``debug.record_columns`` is set.

    The first rank of a replica writes for all of its ranks.
    """
    if not context.plan.spec.debug.record_columns or not run.operator.writes:
        return
    if not context.models[run.model].placed.layout.is_first_of_replica(context.rank):
        return
    _write(context, run, step, rows, store, run.operator.writes, prefix)


def record_arrivals(context: RankContext, run: Run, step: int, rows: Sequence[int], store: RowStore) -> None:
    """Write the columns that ``run`` reads and that moves bring to this rank, if ``debug.record_columns`` is set."""
    if context.plan.spec.debug.record_columns:
        moved = {
            transfer.column
            for move in context.plan.schedule.instructions
            if isinstance(move, Move)
            for transfer in move.transfers
            if transfer.destination == context.rank
        }
        arrived = [name for name in run.operator.reads if name in moved]
        if arrived and rows:
            _write(context, run, step, rows, store, arrived, ARRIVAL_PREFIX)


def _write(
    context: RankContext,
    run: Run,
    step: int,
    rows: Sequence[int],
    store: RowStore,
    names: Sequence[str],
    prefix: str,
) -> None:
    directory = context.directory / DIRECTORY
    directory.mkdir(parents=True, exist_ok=True)
    columns = {name: store.get(name, rows).cpu().contiguous() for name in names}
    path = directory / f"{prefix}step{step}-{run.operator.name}-chunk{run.chunk or 0}-rank{context.rank}.safetensors"
    save_tensors({**columns, "rows": torch.tensor(rows, dtype=torch.int64)}, path)
    context.files.send(path)


def record_statistics(
    directory: Path, step: int, statistics: Mapping[str, Triple], reporters: Mapping[str, str]
) -> None:
    """Append the statistics of a step. ``reporters``: instruction that reported each, in words."""
    (directory / DIRECTORY).mkdir(parents=True, exist_ok=True)
    with (directory / DIRECTORY / STATISTICS).open("a") as file:
        file.write(json.dumps({"step": step, "statistics": statistics, "reporters": reporters}) + "\n")
