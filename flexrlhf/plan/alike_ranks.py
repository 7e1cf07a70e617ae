"""Ranks with the same work on the same kind of device, of which one is sized for all."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.layout import BatchShape, Layout
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.placement.placement import Placement
from flexrlhf.strategies.instructions import Eval, Instruction, Run, Save


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
    shared = {copy.role for copy in copies if not copy.obstacle_to_reuse(placement[copy.role], None)}

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
    stage, tp_index, shard = model.position(rank)
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
