"""Files with the columns that operators have written (``debug.record_columns``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexrlhf.checkpoints.tensor_files import save_tensors
from flexrlhf.comm.rows import RowStore
from flexrlhf.execution.rank_context import RankContext
from flexrlhf.strategies.instructions import Run

EVALUATION_PREFIX = "held-out-"
"""Begins the names of files with rows of the evaluation set."""


def record_columns(
    context: RankContext, run: Run, step: int, rows: Sequence[int], store: RowStore, prefix: str = ""
) -> None:
    """Write the columns that ``run`` wrote for ``rows``, with the row numbers, if ``debug.record_columns`` is set.

    The first tensor-parallel rank of a replica writes for all of its ranks.
    """
    if not context.plan.spec.debug.record_columns or not run.operator.writes:
        return
    if context.models[run.model].placed.layout.tp_index(context.rank):
        return
    directory = context.directory / "columns"
    directory.mkdir(parents=True, exist_ok=True)
    columns = {name: store.get(name, rows).cpu().contiguous() for name in run.operator.writes}
    file = f"{prefix}step{step}-{run.operator.name}-chunk{run.chunk or 0}-rank{context.rank}.safetensors"
    save_tensors({**columns, "rows": torch.tensor(rows, dtype=torch.int64)}, directory / file)
