"""Work of a rank that needs memory, with the models that are offloaded during each piece of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flexrlhf.memory.budget import Compute, Copying, Releasing, Saving, Work
from flexrlhf.memory.transfer_bytes import WeightSync
from flexrlhf.operators.columns import Lengths
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.layout import BatchShape, Layout
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.placement.placement import Placement
from flexrlhf.strategies.instructions import (
    Checkpoint,
    Eval,
    Instruction,
    Move,
    Offload,
    Release,
    Reload,
    Run,
    Save,
    Sync,
)
from flexrlhf.weights.reuse import obstacle
from flexrlhf.weights.shards import position_of


def workload(
    instructions: Sequence[Instruction],
    placement: Placement,
    batch: BatchShape,
    rank: int,
) -> Iterator[tuple[Work, frozenset[ModelName]]]:
    """Yield the work of ``instructions``, those of one step that name ``rank``, and the models that are offloaded or
    released during it.

    A model that is first reloaded starts in host memory, one that is refilled has no memory before.
    """
    absent, woken = _absent_at_start(instructions), frozenset[ModelName]()
    for instruction in instructions:
        match instruction:
            case Offload():
                absent |= {instruction.model}
            case Reload():
                absent -= {instruction.model}
                woken |= {instruction.model}
            case Run() | Eval():
                woken -= frozenset(instruction.uses)
            case Sync(refills=True):
                absent -= {instruction.destination}
                woken |= {instruction.destination}
        for work in works_of(instruction, batch, rank):
            if isinstance(work, WeightSync) and work.destination in woken:
                yield replace(work, wakes=placement[work.destination].has_cache), absent
            else:
                yield work, absent
        if isinstance(instruction, Release):
            absent |= {instruction.model}


def works_of(instruction: Instruction, batch: BatchShape, rank: int) -> tuple[Work, ...]:
    """Return the work of ``rank`` at ``instruction``; none at instructions that need next to no memory."""
    match instruction:
        case Run():
            return _compute(instruction, batch, _largest_call(instruction, batch, rank))
        case Eval(batch=evaluation):
            runs = [run for run in instruction.runs if rank in run.ranks]
            return tuple(work for run in runs for work in works_of(run, evaluation, rank))
        case Sync():
            return (WeightSync(instruction.source, instruction.destination, instruction.overlaps),)
        case Save():
            return (Saving(instruction.model, instruction.ranks),)
        case Checkpoint():
            return (Copying(instruction.models),)
        case Release():
            return (Releasing(instruction.model),)
    return ()


def _compute(run: Run, batch: BatchShape, rows: int) -> tuple[Work, ...]:
    operator, call, texts = run.operator, run.operator.call, 2 if run.operator.extra_loss else 1
    if call is None:
        return ()
    compares, block = operator.compares_responses, batch.block_rows
    return (Compute(call, run.model, rows, batch.samples_per_prompt, texts, compares, block, run.tokens),)


def _largest_call(run: Run, batch: BatchShape, rank: int) -> int:
    """Return the rows of the largest call: training takes a mini-batch at a time, all else all of them."""
    single = [range(index, index + 1) for index in run.mini_batches]
    calls = single if run.operator.call == "train" else [run.mini_batches]
    return batch.samples_per_prompt * max(batch.num_prompts_on(run.layout, rank, call, run.attempt) for call in calls)


@dataclass(frozen=True)
class StoredColumns:
    """Columns of one batch on a rank: prompts by column, and the columns that most steps do not have."""

    prompts: Mapping[str, int]
    rare: frozenset[str]

    def row_bytes(self, lengths: Lengths, num_kept: int) -> int:
        """Return the bytes of a sample of each prompt in ``num_kept`` batches, of which one may have rare columns."""
        sizes = {column: number * lengths.row_bytes(column) for column, number in self.prompts.items()}
        return sum((1 if column in self.rare else num_kept) * size for column, size in sizes.items())


def stored_columns(
    instructions: Sequence[Instruction], batch: BatchShape, inputs: Collection[str], rank: int
) -> StoredColumns:
    """Return the columns of one batch on ``rank``. ``inputs``: columns that come from the data set."""
    stored: dict[str, set[int]] = defaultdict(set)
    rare: set[str] = set()
    for each in instructions:
        if isinstance(each, Run) and rank in each.ranks:
            prompts = batch.prompts_on(each.layout, rank, each.mini_batches, each.attempt)
            for column in (*each.operator.stored_columns, *set(inputs).intersection(each.operator.reads)):
                stored[column].update(prompts)
            rare.update(each.operator.writes if each.is_rare else ())
        elif isinstance(each, Move) and rank in each.ranks:
            for transfer in each.transfers:
                if transfer.destination == rank:
                    stored[transfer.column].update(transfer.prompts)
    return StoredColumns({column: len(prompts) for column, prompts in stored.items()}, frozenset(rare))


def _absent_at_start(instructions: Sequence[Instruction]) -> frozenset[ModelName]:
    first: dict[ModelName, Instruction] = {}
    for instruction in instructions:
        if isinstance(instruction, Offload | Reload):
            first.setdefault(instruction.model, instruction)
        elif isinstance(instruction, Sync) and instruction.refills:
            first.setdefault(instruction.destination, instruction)
    return frozenset(name for name, instruction in first.items() if isinstance(instruction, Reload | Sync))


def first_alike(
    instructions: Sequence[Instruction], placement: Placement, batch: BatchShape, cluster: Cluster
) -> dict[int, int]:
    """Return for each rank the first rank with the same work on the same kind of device, so that few ranks are sized.

    If shards are uneven, the first rank stores most.
    """
    firsts: dict[object, int] = {}
    # the rank that writes the files of a model; of several the next ranks write some
    writers = [each.ranks[:1] if isinstance(each, Save) else () for each in instructions]
    named = [frozenset(instruction.ranks) for instruction in instructions]
    shapes = (batch, *dict.fromkeys(each.batch for each in instructions if isinstance(each, Eval)))
    # how much of a sync arrives on a rank depends on which models its node has
    beside: dict[int, Counter[str]] = defaultdict(Counter)
    for rank in range(placement.num_ranks):
        beside[cluster.node_of(rank)].update(model.name for model in placement.on_rank(rank))
    nodes = {node: frozenset(found.items()) for node, found in beside.items()}

    layouts = {model.name: {model.layout} for model in placement.models}
    for run in (each for each in instructions if isinstance(each, Run)):
        layouts[run.model].add(run.layout)
    rows = {model.name: _rows(layouts[model.name], shapes) for model in placement.models}
    # what a copy reuses depends on the shard of its source
    copies = [model for model in placement.models if model.is_transient]
    shared = {copy.role for copy in copies if not obstacle(placement[copy.role], copy, None)}

    def work_of(rank: int) -> object:
        placed = [
            (model.name, _position(model, rank, model.role in shared), rows[model.name][model.layout.replica(rank)])
            for model in placement.on_rank(rank)
        ]
        parts = [(index, rank in each) for index, each in enumerate(writers) if rank in named[index]]
        device = cluster.devices[rank].device_class, cluster.memory_bytes(rank)
        return tuple(placed), tuple(parts), device, nodes[cluster.node_of(rank)]

    return {rank: firsts.setdefault(work_of(rank), rank) for rank in range(placement.num_ranks)}


def _position(model: PlacedModel, rank: int, with_shard: bool) -> tuple[int, ...]:
    """Return the tensor-parallel part and the pipeline stage on ``rank``, and its shard if that matters."""
    stage, tp_index, shard = position_of(model, rank)
    return (stage, tp_index, shard) if with_shard else (stage, tp_index)


def _rows(layouts: Iterable[Layout], shapes: Iterable[BatchShape]) -> list[tuple[object, ...]]:
    """Return for each replica the number of its prompts in each mini-batch of ``shapes``, in each of ``layouts``; the
    prompts themselves if a protocol splits them, since rows that move to a replica depend on which it has."""
    of_mini_batches = (
        shape.counts(layout, m)
        if layout.protocol is None
        else [shape.part(layout, replica, m) for replica in range(layout.dp)]
        for layout in layouts
        for shape in shapes
        for m in shape.mini_batches
    )
    return list(zip(*of_mini_batches, strict=True))
