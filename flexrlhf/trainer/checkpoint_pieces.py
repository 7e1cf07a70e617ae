"""Tensors of a rank in a checkpoint, copied to host memory: pieces of loaded models, and rows in flight.

Rows in flight are generated at the end of a step but not trained on (``schedule.lag``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from flexrlhf.engines.base import WEIGHTS, StateTensor
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.tensor_files import Piece, piece_key
from flexrlhf.strategies.instructions import Move, Run
from flexrlhf.trainer.loaded_models import LoadedModel
from flexrlhf.trainer.step_rows import StepRows
from flexrlhf.weights.saving import written_names
from flexrlhf.weights.shards import Part, Parts, trained_parts


def trained_pieces(model: LoadedModel, rank: int) -> dict[str, Piece]:
    """Return the weights and moments of a trained model that ``rank`` writes."""
    parts, mine = trained_parts(model.placed, model.shape, rank), written_names(model.placed, model.shape, rank)
    pieces: dict[str, Piece] = {}
    for kind, tensors in model.engine.training_state().tensors.items():
        for name, tensor in tensors.items():
            # ranks with a range of their own each write theirs
            if tensor.values.numel() and (tensor.flat is not None or name in mine):
                pieces[piece_key(kind, name)] = Piece(_copied(tensor.values), part_of(tensor, parts, name))
    return pieces


def follower_pieces(model: LoadedModel, rank: int) -> dict[str, Piece]:
    """Return the weights that ``rank`` writes of a copy which may be behind its trained model."""
    parts, live = trained_parts(model.placed, model.shape, rank), model.engine.weights()
    names = [name for name in written_names(model.placed, model.shape, rank) if live[name].numel()]
    return {piece_key(WEIGHTS, name): Piece(_copied(live[name]), parts[name]) for name in sorted(names)}


def part_of(tensor: StateTensor, parts: Parts, name: str) -> Part:
    """Return the part of the parameter ``name`` that ``tensor`` is; ``parts``: of this rank."""
    part = parts[name]
    return part if tensor.flat is None else replace(part, flat=tensor.flat)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


RowFile = dict[str, Tensor]
"""``<step>/<column>`` → values, and ``<step>/<column>/rows`` → their row numbers, int64."""


def rows_in_flight(plan: Plan, rank: int, rows: StepRows, next_step: int) -> RowFile:
    """Return the columns that operators on ``rank`` have written for steps in flight, copied to host memory."""
    file: RowFile = {}
    for step in plan.steps_in_flight(next_step):
        written: dict[str, set[int]] = defaultdict(set)
        for run in _generating_runs(plan, rank):
            if plan.placement[run.model].layout.is_first_of_replica(rank):
                for column in run.operator.writes:
                    written[column].update(_rows_of(plan, run, rank))
        for column, numbers in written.items():
            ordered = sorted(numbers)
            file[f"{step}/{column}"] = rows.at(step).get(column, ordered).to("cpu", copy=True).contiguous()
            file[f"{step}/{column}/rows"] = torch.tensor(ordered, dtype=torch.int64)
    return {key: tensor for key, tensor in file.items() if len(tensor)}


def load_rows(plan: Plan, rank: int, rows: StepRows, checkpoint: Path, next_step: int) -> None:
    """Put the rows in flight that this rank would have written or received into ``rows``."""
    steps = plan.steps_in_flight(next_step)
    if not steps:
        return
    stored = _read_all(checkpoint, steps)
    device = rows.device
    for step in steps:
        for column, needed in _needed(plan, rank).items():
            ordered = sorted(needed)
            values = stored[f"{step}/{column}"]
            rows.at(step).put(column, ordered, torch.stack([values[row] for row in ordered]).to(device))


def _needed(plan: Plan, rank: int) -> Mapping[str, set[int]]:
    """Return the rows in flight that a rank has at the end of a step, by column."""
    needed: dict[str, set[int]] = defaultdict(set)
    for run in _generating_runs(plan, rank):
        for column in run.operator.writes:
            needed[column].update(_rows_of(plan, run, rank))
    for move in plan.schedule.for_rank(rank):
        if isinstance(move, Move) and move.lag < plan.schedule.lag:
            for transfer in move.transfers:
                if transfer.destination == rank:
                    needed[transfer.column].update(plan.batch.rows(transfer.prompts))
    return {column: numbers for column, numbers in needed.items() if numbers}


def _generating_runs(plan: Plan, rank: int) -> Iterable[Run]:
    """Return the runs of every step that write columns of steps in flight; rare ones write what they alone read."""
    runs = [each for each in plan.schedule.for_rank(rank) if isinstance(each, Run)]
    return [run for run in runs if run.lag < plan.schedule.lag and run.operator.every == 1]


def _rows_of(plan: Plan, run: Run, rank: int) -> Sequence[int]:
    layout = plan.placement[run.model].layout
    return plan.batch.rows(plan.batch.prompts_on(layout, rank, run.mini_batches))


def _read_all(checkpoint: Path, steps: range) -> dict[str, dict[int, Tensor]]:
    """Return all rows of ``steps`` in a checkpoint: key → row number → values."""
    stored: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for path in sorted(checkpoint.glob("rows-[0-9]*.safetensors")):
        with safe_open(path, framework="pt") as file:
            keys = [key for key in file.keys() if not key.endswith("/rows") and int(key.split("/")[0]) in steps]  # noqa: SIM118
            for key in keys:
                stored[key].update(zip(file.get_tensor(f"{key}/rows").tolist(), file.get_tensor(key), strict=True))
    return stored
