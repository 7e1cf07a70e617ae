"""Measure communication: sums over ranks, moves of columns, weights, host offload and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from flexrlhf.api import BatchShape, Layout, ModelName, ModelShape, Move, PlacedModel, Transfer
from flexrlhf.api.engine import LoadedModel, ModelDirectory
from flexrlhf.guideline.costs.measurements import LinearTime, MeasuredPrimitive
from flexrlhf.measure.model_calls import ProfileContext
from flexrlhf.measure.stopwatch import TimedCall

COLUMN = "logprobs"
REDUCE_SIZES = (2, 2**16, 2**20)
"""Float32 values of a sum over ranks."""
SYNC_SIZES = ((1, 2**14), (64, 2**14), (4, 2**21))
"""Tensors of a sync, and float32 values of all of them together."""
SAVE_SIZES = (2**18, 2**22)
"""Float32 values of a checkpoint."""
READ_BYTES = 2**27
"""Bytes that each rank reads from memory, far more than its caches have."""


def measure_reduce(context: ProfileContext) -> LinearTime:
    """Measure a sum over all ranks."""
    group = context.stopwatch.all_ranks
    assert group.group is not None, "one rank sums nothing"
    device = context.rank.world.device
    calls = {str(4 * size): partial(group.sum, torch.zeros(size, device=device)) for size in REDUCE_SIZES}
    timings = context.stopwatch.time(calls, context.budget)
    return fit([(0.0, float(name), timing.seconds) for name, timing in timings.items()])


def measure_moves(context: ProfileContext) -> dict[MeasuredPrimitive, LinearTime]:
    """Measure each primitive among all ranks, from the call until the rows can be read."""
    ranks, rows = context.stopwatch.all_ranks.ranks, context.plan.batch.num_rows
    sizes = sorted({max(1, rows // 4), rows, 8 * rows})
    transfers_of: dict[MeasuredPrimitive, Callable[[int], list[Transfer]]] = {
        "all_gather": lambda count: _all_to_all(ranks, count),
        "all_to_all": lambda count: _all_to_all(ranks, count),
        "point_to_point": lambda count: [Transfer(COLUMN, ranks[0], ranks[1], tuple(range(count)))],
    }
    calls, bytes_of = {}, {}
    for primitive, transfers in transfers_of.items():
        for count in sizes:
            name = f"{primitive} {count}"
            calls[name], bytes_of[name] = _move_call(context, primitive, transfers(count))
    skipped = frozenset(name for name in calls if name.startswith("point") and context.rank.world.rank not in ranks[:2])
    timings = context.stopwatch.time(calls, context.budget, skipped)
    lines = {}
    for primitive in transfers_of:
        names = [f"{primitive} {count}" for count in sizes]
        line = fit([(0.0, bytes_of[name], timings[name].seconds) for name in names])
        messages = 1 if primitive == "point_to_point" else len(ranks) - 1
        lines[primitive] = LinearTime(start=0.0, per_item=line.start / messages, per_byte=line.per_byte)
    return lines


def _all_to_all(ranks: Sequence[int], count: int) -> list[Transfer]:
    """Return transfers of ``count`` rows from each rank to every other."""
    return [
        Transfer(COLUMN, source, destination, tuple(range(place * count, (place + 1) * count)))
        for place, source in enumerate(ranks)
        for destination in ranks
        if source != destination
    ]


def _move_call(
    context: ProfileContext, primitive: MeasuredPrimitive, transfers: list[Transfer]
) -> tuple[TimedCall, float]:
    """Return the call on this rank, and the maximum over ranks of the bytes received."""
    rank, ranks, lengths = context.rank, context.stopwatch.all_ranks.ranks, context.plan.lengths
    ranks = ranks[:2] if primitive == "point_to_point" else ranks
    move = Move(
        ranks=ranks,
        columns=(COLUMN,),
        sources=("a",),
        destinations=("b",),
        primitive=primitive,
        transfers=tuple(transfers),
    )
    shape = BatchShape(1 + max(transfer.prompts[-1] for transfer in transfers))
    sent = {prompt for t in transfers if t.source == rank.world.rank for prompt in t.prompts}
    values = torch.zeros(len(sent), lengths.response, device=rank.world.device)
    call = rank.move_call(move, shape, lengths, {COLUMN: values})
    received = max(sum(len(t.prompts) for t in transfers if t.destination == each) for each in ranks)
    return call, float(received * lengths.row_bytes(COLUMN))


def measure_sync(context: ProfileContext) -> LinearTime:
    """Measure a sync from the first rank to the second, checksums included if the run has them."""
    calls, sizes = {}, {}
    for tensors, numbers in SYNC_SIZES:
        name = f"{tensors} {numbers}"
        calls[name] = _sync_call(context, tensors, numbers // tensors)
        sizes[name] = float(tensors), 4.0 * numbers
    is_idle = context.rank.world.rank not in context.stopwatch.all_ranks.ranks[:2]
    skipped = frozenset(calls) if is_idle else frozenset[str]()
    timings = context.stopwatch.time(calls, context.budget, skipped)
    return fit([(*sizes[name], timing.seconds) for name, timing in timings.items()])


def _sync_call(context: ProfileContext, tensors: int, numbers: int) -> TimedCall:
    source, destination = context.stopwatch.all_ranks.ranks[:2]
    shape = ModelShape(tuple((f"tensor {number:03}", (numbers,)) for number in range(tensors)))
    trained = PlacedModel(ModelName("a"), Layout((source,)), trained=True)
    copy = PlacedModel(ModelName("a.shadow"), Layout((destination,)), trained=False)
    weights = {name: torch.zeros(numbers, device=context.rank.world.device) for name, _ in shape.parameters}
    return context.rank.sync_call(trained, copy, shape, context.plan.spec.sync, weights)


def measure_switch(context: ProfileContext, loaded: LoadedModel) -> LinearTime:
    """Measure one way of a host offload: half the time of a model to host memory and back."""
    usage = loaded.engine.memory_usage()

    def call() -> None:
        loaded.engine.offload()
        loaded.engine.reload()

    timings = context.stopwatch.time({"switch": call}, context.budget)
    return LinearTime(start=0.0, per_byte=timings["switch"].seconds / 2 / (usage.weights + usage.optimizer))


def measure_save(context: ProfileContext, loaded: LoadedModel, directory: Path) -> LinearTime:
    """Measure a checkpoint that one rank writes."""
    config, tokenizer = loaded.engine.config, context.plan.spec.data.tokenizer
    calls = {}
    for size in SAVE_SIZES:
        weights = {"weights": torch.zeros(size)}
        calls[str(4 * size)] = partial(ModelDirectory(directory / str(size), tokenizer).save, weights, config)
    skipped = frozenset(calls) if context.rank.world.rank else frozenset[str]()
    timings = context.stopwatch.time(calls, context.budget, skipped)
    return fit([(0.0, float(name), timing.seconds) for name, timing in timings.items()])


def measure_memory(context: ProfileContext) -> float:
    """Return bytes per second at which each rank reads weights from memory, all ranks at once."""
    weights = torch.zeros(READ_BYTES // 4, device=context.rank.world.device)
    timings = context.stopwatch.time({"read": lambda: weights.sum()}, context.budget)
    return READ_BYTES / timings["read"].seconds


def fit(points: Sequence[tuple[float, float, float]], relative: bool = True) -> LinearTime:
    """Fit a line through (items, bytes, seconds): least squares of errors, no coefficient negative.

    ``relative``: whether errors are relative to the seconds.
    """
    table = torch.tensor(points, dtype=torch.float64)
    seconds = table[:, 2:]
    weights = 1 / seconds if relative else torch.ones_like(seconds)
    columns = torch.cat([torch.ones_like(seconds), table[:, :2]], 1) * weights
    kept = [0, 1, 2] if len(set(table[:, 0].tolist())) > 1 else [0, 2]
    while True:
        solved = torch.linalg.lstsq(columns[:, kept], seconds * weights).solution[:, 0]
        smallest = int(solved.argmin())
        if solved[smallest] >= 0 or len(kept) == 1:
            break
        del kept[smallest]
    coefficients = dict.fromkeys(range(3), 0.0) | dict(zip(kept, solved.tolist(), strict=True))
    start, per_item, per_byte = (max(0.0, coefficients[index]) for index in range(3))
    return LinearTime(start=start, per_item=per_item, per_byte=per_byte)
