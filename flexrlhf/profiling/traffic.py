"""Measure what travels: sums over ranks, moves of columns, weights, and what goes to host memory or a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from flexrlhf.comm.move import ColumnMover, RowPacking
from flexrlhf.comm.rows import RowStore
from flexrlhf.comm.sync import SyncChannel, WeightReceiver, WeightSender
from flexrlhf.comm.weights import WeightGather
from flexrlhf.execution.checkpoint import save_model
from flexrlhf.execution.loaded_models import LoadedModel
from flexrlhf.guideline.costs.measurements import LinearTime, MeasuredPrimitive
from flexrlhf.placement.layout import BatchShape, Layout
from flexrlhf.placement.names import ModelName
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.placement.routes import Transfer
from flexrlhf.plan.plan import bucket_bytes
from flexrlhf.profiling.model_calls import Bench
from flexrlhf.profiling.stopwatch import Work
from flexrlhf.strategies.instructions import Move
from flexrlhf.weights.reshard import WeightTransfer
from flexrlhf.weights.shapes import ModelShape
from flexrlhf.weights.sync_plan import plan_sync

COLUMN = "logprobs"
SUMMED = (2, 2**16, 2**20)
"""Float32 numbers of a sum over ranks."""
SENT = ((1, 2**14), (64, 2**14), (4, 2**21))
"""Tensors, and float32 numbers of all together, of a sync."""
SAVED = (2**18, 2**22)
STREAM_BYTES = 2**27


@dataclass(frozen=True)
class Channel:
    """``group``: of all ranks, for one purpose; None where there is one rank."""

    bench: Bench
    group: dist.ProcessGroup
    ranks: tuple[int, ...]


def measure_reduce(bench: Bench) -> LinearTime:
    everyone = bench.stopwatch.everyone
    works = {str(4 * size): _summing(bench, size) for size in SUMMED}
    timed = bench.stopwatch.time(works, bench.budget)
    assert everyone.group is not None, "one rank sums nothing"
    return fit([(0.0, float(name), each.seconds) for name, each in timed.items()])


def _summing(bench: Bench, size: int) -> Work:
    tensor = torch.zeros(size, device=bench.device)
    return lambda: bench.stopwatch.everyone.sum(tensor)


def measure_moves(channel: Channel) -> dict[MeasuredPrimitive, LinearTime]:
    """Each primitive among all ranks, from the call to rows that can be read."""
    rows = channel.bench.plan.batch.num_rows
    sizes = sorted({max(1, rows // 4), rows, 8 * rows})
    plans: dict[MeasuredPrimitive, Callable[[int], list[Transfer]]] = {
        "all_gather": lambda count: _everything(channel.ranks, count),
        "all_to_all": lambda count: _everything(channel.ranks, count),
        "point_to_point": lambda count: [Transfer(COLUMN, channel.ranks[0], channel.ranks[1], tuple(range(count)))],
    }
    works, bytes_of = {}, {}
    for primitive, transfers in plans.items():
        for count in sizes:
            name = f"{primitive} {count}"
            works[name], bytes_of[name] = _moving(channel, primitive, transfers(count))
    idle = frozenset(name for name in works if name.startswith("point") and channel.bench.rank not in channel.ranks[:2])
    timed = channel.bench.stopwatch.time(works, channel.bench.budget, idle)
    messages = {"all_gather": len(channel.ranks) - 1, "all_to_all": len(channel.ranks) - 1, "point_to_point": 1}
    return {
        primitive: _per_message(
            fit([(0.0, bytes_of[f"{primitive} {c}"], timed[f"{primitive} {c}"].seconds) for c in sizes]),
            messages[primitive],
        )
        for primitive in plans
    }


def _per_message(line: LinearTime, messages: int) -> LinearTime:
    """What a move takes whatever its size, shared out over its messages."""
    return LinearTime(start=0.0, per_item=line.start / messages, per_byte=line.per_byte)


def _everything(ranks: Sequence[int], count: int) -> list[Transfer]:
    """Each rank sends ``count`` rows of its own to every other."""
    return [
        Transfer(COLUMN, source, destination, tuple(range(place * count, (place + 1) * count)))
        for place, source in enumerate(ranks)
        for destination in ranks
        if source != destination
    ]


def _moving(channel: Channel, primitive: MeasuredPrimitive, transfers: list[Transfer]) -> tuple[Work, float]:
    """The work on this rank, and the most bytes that a rank sends or receives."""
    bench, rank = channel.bench, channel.bench.rank
    ranks = channel.ranks[:2] if primitive == "point_to_point" else channel.ranks
    move = Move(
        ranks=ranks,
        columns=(COLUMN,),
        sources=("a",),
        destinations=("b",),
        primitive=primitive,
        transfers=tuple(transfers),
    )
    shape = BatchShape(1 + max(transfer.prompts[-1] for transfer in transfers))
    mover = ColumnMover(rank, RowPacking(shape, bench.plan.lengths, bench.device), bench.stopwatch.everyone.wait)
    mine = sorted({prompt for t in transfers if t.source == rank for prompt in t.prompts})
    due = sorted({prompt for t in transfers if t.destination == rank for prompt in t.prompts})
    values = torch.zeros(len(mine), bench.plan.lengths.response, device=bench.device)

    def work() -> None:
        store = RowStore(bench.plan.lengths, bench.device)
        store.put(COLUMN, mine, values)
        mover.start(move, store, channel.group)
        store.arrive([COLUMN], due)
        mover.close()

    received = max(sum(len(t.prompts) for t in transfers if t.destination == each) for each in ranks)
    return work, float(received * bench.plan.lengths.row_bytes(COLUMN))


def measure_sync(channel: Channel) -> LinearTime:
    """Weights from the first rank to the second, checksums included where the run has them."""
    works, sizes = {}, {}
    for tensors, numbers in SENT:
        name = f"{tensors} {numbers}"
        works[name], sizes[name] = _syncing(channel, tensors, numbers // tensors), (float(tensors), 4.0 * numbers)
    idle = frozenset(works) if channel.bench.rank not in channel.ranks[:2] else frozenset[str]()
    timed = channel.bench.stopwatch.time(works, channel.bench.budget, idle)
    return fit([(*sizes[name], each.seconds) for name, each in timed.items()])


def _syncing(channel: Channel, tensors: int, numbers: int) -> Work:
    bench, (source, destination) = channel.bench, channel.ranks[:2]
    spec, wait = bench.plan.spec, bench.stopwatch.everyone.wait
    shape = ModelShape(tuple((f"tensor {number:03}", (numbers,)) for number in range(tensors)))
    trained = PlacedModel(ModelName("a"), Layout((source,)), trained=True)
    copy = PlacedModel(ModelName("a.shadow"), Layout((destination,)), trained=False)
    transfers = (WeightTransfer(source, destination),)
    plan = plan_sync(trained, copy, shape, transfers, bucket_bytes(spec), bench.rank)
    gather = None if plan.send is None else WeightGather(None, plan.send.ranks, plan.send.shards, wait)
    sync = SyncChannel(plan, torch.float32, gather, channel.group)
    sender, receiver = WeightSender(spec.sync, wait), WeightReceiver(spec.sync.checksum, wait)
    weights = {name: torch.zeros(numbers, device=bench.device) for name, _ in shape.parameters}

    def load(values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            weights[name].copy_(value)

    def work() -> None:
        if bench.rank == source:
            sender.send(sync, weights, None)
            sender.close()
        else:
            receiver.receive(sync, weights, load)

    return work


def measure_switch(bench: Bench, loaded: LoadedModel) -> LinearTime:
    """A model to host memory and back."""
    usage = loaded.engine.memory_usage()
    size = usage.weights + usage.optimizer

    def work() -> None:
        loaded.engine.offload()
        loaded.engine.reload()

    timed = bench.stopwatch.time({"switch": work}, bench.budget)
    return LinearTime(start=0.0, per_byte=timed["switch"].seconds / 2 / size)


def measure_save(bench: Bench, loaded: LoadedModel, directory: Path) -> LinearTime:
    """Weights to a directory, by one rank."""
    source = bench.plan.spec.data.tokenizer
    works = {str(4 * size): _saving(loaded, directory / str(size), torch.zeros(size), source) for size in SAVED}
    idle = frozenset(works) if bench.rank else frozenset[str]()
    timed = bench.stopwatch.time(works, bench.budget, idle)
    return fit([(0.0, float(name), each.seconds) for name, each in timed.items()])


def _saving(loaded: LoadedModel, directory: Path, weights: Tensor, tokenizer: str | None) -> Work:
    return lambda: save_model(directory, {"weights": weights}, loaded.engine.config, tokenizer)


def measure_memory(bench: Bench) -> float:
    """Bytes a second at which all ranks read weights far larger than their caches."""
    weights = torch.zeros(STREAM_BYTES // 4, device=bench.device)
    timed = bench.stopwatch.time({"read": lambda: weights.sum()}, bench.budget)
    return STREAM_BYTES / timed["read"].seconds


def fit(points: Sequence[tuple[float, float, float]]) -> LinearTime:
    """Through (items, bytes, seconds): least squares of what is left, relative to each point; no part negative."""
    table = torch.tensor(points, dtype=torch.float64)
    seconds = table[:, 2]
    columns = torch.stack([torch.ones_like(seconds), table[:, 0], table[:, 1]], 1) / seconds[:, None]
    kept = [0, 1, 2] if len(set(table[:, 0].tolist())) > 1 else [0, 2]
    while True:
        found = torch.linalg.lstsq(columns[:, kept], torch.ones(len(points), 1, dtype=torch.float64)).solution[:, 0]
        lowest = int(found.argmin())
        if found[lowest] >= 0 or len(kept) == 1:
            break
        del kept[lowest]
    parts = dict.fromkeys(range(3), 0.0) | dict(zip(kept, found.tolist(), strict=True))
    return LinearTime(start=max(0.0, parts[0]), per_item=max(0.0, parts[1]), per_byte=max(0.0, parts[2]))
