"""Tensors of a rank in a checkpoint, and their copies in host memory: pieces of loaded models, and rows in flight.

Rows in flight are generated at the end of a step but not trained on (``schedule.lag``), or not whole yet
(``rollout.segment_tokens``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from flexrlhf.engines.base import TrainingState
from flexrlhf.engines.copy_streams import CopyStreams
from flexrlhf.errors import UserError
from flexrlhf.operators.columns import Column
from flexrlhf.placement.layout import BatchShape
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.tensor_files import Piece
from flexrlhf.strategies.instructions import Move, Run
from flexrlhf.trainer.loaded_models import LoadedModel
from flexrlhf.trainer.open_steps import CalledSteps
from flexrlhf.trainer.step_rows import StepRows

_ALIGNMENT = 64
"""Tensors in host memory begin at a multiple of so many bytes."""


class HostCopies:
    """Copies of tensors in host memory, which is kept for the next time: to allocate and to pin it takes longer than
    the copies."""

    def __init__(self, device: torch.device, streams: CopyStreams) -> None:
        self._device, self._streams = device, streams
        self._memory: dict[str, Tensor] = {}

    def begin(self, file: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of ``tensors`` for ``file``, complete after ``wait``, in the place of the copies before."""
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()]
        if file not in self._memory or self._memory[file].nbytes < sum(sizes):
            self._memory.pop(file, None)
            self._memory[file] = self._streams.host_memory(sum(sizes))
        copies = {}
        for start, (key, tensor) in zip(accumulate(sizes, initial=0), tensors.items(), strict=False):
            copies[key] = self._memory[file][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            # in the order of the computing stream, which frees and overwrites ``tensor`` later
            copies[key].copy_(tensor.detach(), non_blocking=True)
        return copies

    def begin_pieces(self, file: str, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        """Return copies of ``pieces``, with the arguments of ``begin``."""
        copies = self.begin(file, {key: piece.values for key, piece in pieces.items()})
        return {key: replace(piece, values=copies[key]) for key, piece in pieces.items()}

    def wait(self) -> None:
        """Wait for all copies."""
        if self._device.type != "cpu":
            torch.accelerator.current_stream(self._device).synchronize()


def trained_pieces(model: LoadedModel, rank: int) -> dict[str, Piece]:
    """Return the weights and moments of a trained model that ``rank`` writes."""
    parts, mine = model.shape.trained_parts(model.placed, rank), model.shape.written_names(model.placed, rank)
    pieces: dict[str, Piece] = {}
    for kind, tensors in model.engine.training_state().tensors.items():
        for name, tensor in tensors.items():
            # ranks with a range of their own each write theirs
            if tensor.values.numel() and (tensor.flat is not None or name in mine):
                pieces[Piece.key(kind, name)] = Piece(tensor.values, tensor.part_of(parts[name]))
    return pieces


def follower_pieces(model: LoadedModel, rank: int) -> dict[str, Piece]:
    """Return the weights that ``rank`` writes of a copy which may be behind its trained model."""
    parts, live = model.shape.trained_parts(model.placed, rank), model.engine.weights()
    names = [name for name in model.shape.written_names(model.placed, rank) if live[name].numel()]
    return {Piece.key(TrainingState.WEIGHTS, name): Piece(live[name], parts[name]) for name in sorted(names)}


RowTensors = dict[str, Tensor]
"""``<step>/<column>`` → values, and ``<step>/<column>/rows`` → their row numbers, int64."""


def columns_in_flight(plan: Plan, rank: int, rows: StepRows, next_step: int) -> RowTensors:
    """Return the columns that operators on ``rank`` have written for steps in flight."""
    file: RowTensors = {}
    for step in _steps_with_rows(plan, rows, next_step):
        written: dict[str, set[int]] = defaultdict(set)
        if rows.called is not None and step >= next_step:
            written |= rows.called.columns(step, rank, is_own=True)
        for run in _generating_runs(plan, rank):
            if run.layout.is_first_of_replica(rank):
                for column in _left_columns(plan, run, step, next_step, rows.called):
                    written[column].update(_rows_of(plan, run, rank))
        for column, numbers in written.items():
            ordered = sorted(numbers)
            file[f"{step}/{column}"] = rows.at(step).get(column, ordered)
            file[f"{step}/{column}/rows"] = torch.tensor(ordered, dtype=torch.int64)
    return {key: tensor for key, tensor in file.items() if len(tensor)}


def load_rows(plan: Plan, rank: int, rows: StepRows, checkpoint: Path, next_step: int, shape: BatchShape) -> None:
    """Put the rows in flight that this rank would have written or received into ``rows``.

    ``shape``: of the batches of the run that wrote them, which may have had other segments. Raises UserError for rows
    that are not in the files.
    """
    steps = _steps_with_rows(plan, rows, next_step)
    if not steps or (steps.start < next_step and shape.segments == 1):
        return
    stored = _read_all(checkpoint, steps)
    device, missing = rows.device, missing_columns(plan, checkpoint, steps)
    for step in steps:
        for column, needed in _needed(plan, rank, step, next_step, rows.called).items():
            if column in missing:
                continue
            ordered, values = sorted(needed), stored.get(f"{step}/{column}", {})
            places = {plan.batch.place_of(*shape.as_taken(row, step)): value for row, value in values.items()}
            (absent,) = rows.at(step).absent(column, 1)
            if column == Column.PRESENT and not values:
                # rows that were generated whole are all there
                places = {row: torch.ones_like(absent) for row in ordered if plan.batch.as_taken(row, step)[0] == step}
            # places for further segments than there were are empty
            known = [row for row in ordered if plan.batch.as_taken(row, step)[0] > step - shape.segments]
            if not places.keys() >= set(known):
                raise UserError(f"checkpoint {checkpoint}: it lacks rows of {column} of step {step}; use another one")
            found = [places.get(row, absent).to(device) for row in ordered]
            rows.at(step).put(column, ordered, torch.stack(found))


def missing_columns(plan: Plan, checkpoint: Path, steps: range) -> frozenset[str]:
    """Return the columns of ``steps`` in flight that are not in a checkpoint: of frozen models and sources of scores,
    which the run that wrote it has placed on ranks of training."""
    if not steps:
        return frozenset()
    stored: set[str] = set()
    for path in sorted(checkpoint.glob("rows-[0-9]*.safetensors")):
        with safe_open(path, framework="pt") as file:
            stored.update(key.split("/")[1] for key in file.keys())  # noqa: SIM118
    runs = [each for each in plan.schedule.instructions if isinstance(each, Run) and each.operator.every == 1]
    early = [
        run.operator for run in runs if run.lag < plan.schedule.lag and run.operator.role not in plan.graph.trained
    ]
    return frozenset(column for operator in early for column in operator.writes if column not in stored)


def _steps_with_rows(plan: Plan, rows: StepRows, next_step: int) -> range:
    """Return the steps in flight, and the step before where rows are carried from it."""
    steps = rows.steps_in_flight(next_step)
    runs = (each for each in plan.schedule.instructions if isinstance(each, Run) and each.operator.carries)
    called = rows.called
    is_carried = any(
        run.lag == plan.schedule.lag or (called is not None and called.lacks(run.operator, next_step)) for run in runs
    )
    return range(next_step - 1, steps.stop) if is_carried else steps


def _left_columns(plan: Plan, run: Run, step: int, next_step: int, called: CalledSteps | None) -> tuple[str, ...]:
    """Return the columns of ``run`` that are needed from ``next_step`` on: of a step in flight all that are written, of
    the step before the carried. Steps in flight that a program has ``called`` have columns of their own."""
    is_with_training = run.lag == plan.schedule.lag
    if step >= next_step:
        return () if is_with_training or called is not None else run.operator.writes
    if is_with_training or (called is not None and called.lacks(run.operator, next_step)):
        return run.operator.carries
    return ()


def _needed(plan: Plan, rank: int, step: int, next_step: int, called: CalledSteps | None) -> Mapping[str, set[int]]:
    """Return the rows of ``step`` that a rank has at the end of the step before ``next_step``, by column."""
    if called is not None and step >= next_step:
        return called.columns(step, rank, is_own=False)
    needed: dict[str, set[int]] = defaultdict(set)
    for run in _generating_runs(plan, rank):
        for column in _left_columns(plan, run, step, next_step, called):
            needed[column].update(_rows_of(plan, run, rank))
    for move in plan.schedule.for_rank(rank):
        if isinstance(move, Move) and move.lag < plan.schedule.lag and step >= next_step:
            for transfer in move.transfers:
                if transfer.destination == rank:
                    needed[transfer.column].update(plan.batch.rows(transfer.prompts))
    return {column: numbers for column, numbers in needed.items() if numbers}


def _generating_runs(plan: Plan, rank: int) -> Iterable[Run]:
    """Return the runs of every step that write columns of steps in flight, or columns that are carried to the next
    step; rare ones write what they alone read."""
    runs = [each for each in plan.schedule.for_rank(rank) if isinstance(each, Run)]
    return [run for run in runs if (run.lag < plan.schedule.lag and run.operator.every == 1) or run.operator.carries]


def _rows_of(plan: Plan, run: Run, rank: int) -> Sequence[int]:
    return plan.batch.rows(plan.batch.prompts_on(run.layout, rank, run.mini_batches, run.attempt))


def _read_all(checkpoint: Path, steps: range) -> dict[str, dict[int, Tensor]]:
    """Return all rows of ``steps`` in a checkpoint: key → row number → values."""
    stored: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for path in sorted(checkpoint.glob("rows-[0-9]*.safetensors")):
        with safe_open(path, framework="pt") as file:
            keys = [key for key in file.keys() if not key.endswith("/rows") and int(key.split("/")[0]) in steps]  # noqa: SIM118
            for key in keys:
                stored[key].update(zip(file.get_tensor(f"{key}/rows").tolist(), file.get_tensor(key), strict=True))
    return stored
