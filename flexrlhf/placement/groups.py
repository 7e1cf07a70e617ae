"""Process groups by purpose. The plan lists them, comm/ creates them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from flexrlhf.config.axes import OF_COPIES, OF_PARTS, OF_REPLICA
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.placed import PlacedModel

Purposes = Iterator[tuple[str, tuple[int, ...]]]
"""Purposes of groups, and their ranks."""


class GroupPurpose(StrEnum):
    """Purposes of the groups of an engine's ranks; a group's own is followed by the name of the placed model. Those of
    ranks along an axis of parallelism are called as the axis: cp, tp, pp.

    COMPUTE:                data-parallel ranks.
    WEIGHTS:                data-parallel and context-parallel ranks together.
    EXPERTS, SAME_EXPERTS:  ranks that have different experts of a layer, and those that have the same.
    SHARD, COPIES:          of data-parallel ranks those that store different parts, and those that store the same one.
    ENDS:                   the first and the last rank of a pipeline.
    REPLICA, MODEL:         ranks of a replica, and of all replicas.
    """

    COMPUTE = "compute"
    WEIGHTS = "weights"
    EXPERTS = "experts"
    SAME_EXPERTS = "same experts"
    SHARD = "shard"
    COPIES = "copies"
    ENDS = "ends"
    REPLICA = "replica"
    MODEL = "model"

    @classmethod
    def of_replica(cls, layout: Layout) -> str:
        """Return the purpose of the group of a replica's ranks."""
        several = layout.dims.several(OF_REPLICA) or OF_PARTS[:1]
        return several[0].name if len(several) == 1 else cls.REPLICA

    @classmethod
    def of_all(cls, layout: Layout) -> str:
        """Return the purpose of the group of all ranks of an engine with pipeline stages."""
        if layout.dp == 1:
            return cls.of_replica(layout)
        return cls.COMPUTE if layout.dims.replica == 1 else cls.MODEL

    @classmethod
    def of_ends(cls, pipeline: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """Return the purpose of the group of the first and the last rank of a pipeline, and these ranks."""
        return ("pp", pipeline) if len(pipeline) < 3 else (cls.ENDS, (pipeline[0], pipeline[-1]))


@dataclass(frozen=True)
class Group:
    """Ranks that communicate for one purpose: compute, weights, experts, same experts, shard, copies, cp, tp, pp, ends,
    replica, model (of a placed model), move, sync or gather.

    A single rank needs none, unless a library requires one (``alone``).

    inside:  whether layers wait for its messages while FSDP2 gathers weights and scatters gradients of others over the
             same ranks.
    apart:   whether groups of the same ranks have other communicators.
    """

    purpose: str
    ranks: tuple[int, ...]
    alone: bool = False
    inside: bool = field(default=False, compare=False)
    apart: bool = field(default=False, compare=False)

    @property
    def communicator(self) -> tuple[str, tuple[int, ...]]:
        """Kind and ranks of the communicator of its messages: one for all messages that these ranks await where they
        begin them, one for those inside layers, which would queue behind FSDP2's, and one for each purpose that goes on
        meanwhile. A GPU has up to 0.5 GB of buffers for each.
        """
        is_own = self.apart or self.goes_on
        return (self.purpose if is_own else "inside layers" if self.inside else "blocking", self.ranks)

    @property
    def goes_on(self) -> bool:
        """Whether ranks begin messages and go on, for as long as they compute, before they wait for them."""
        return self.purpose == "move" or self.purpose.startswith("sync ")

    @classmethod
    def of_model(cls, model: PlacedModel) -> list[Group]:
        """Return the groups of an engine: data-parallel, context-parallel, tensor-parallel, pipelines, and those that a
        library requires."""
        layout = model.layout
        purposes: list[tuple[str, tuple[int, ...]]] = [
            *((GroupPurpose.COMPUTE, ranks) for ranks in dict.fromkeys(map(layout.dp_set, model.ranks))),
            *_copies_purposes(layout),
            *_expert_purposes(model),
            *_shard_purposes(model),
            *((axis.name, ranks) for axis in OF_PARTS for ranks in layout.sets(axis.name)),
            *(GroupPurpose.of_ends(ranks) for ranks in layout.sets("pp")),
            *((GroupPurpose.of_replica(layout), ranks) for ranks in layout.replica_sets),
        ]
        if model.facts.model_group:
            purposes.append((GroupPurpose.of_all(layout), layout.ranks))
        groups = [
            cls(f"{purpose} {model.name}", ranks, inside=_is_inside(model, purpose, ranks))
            for purpose, ranks in dict.fromkeys(purposes)
        ]
        if model.facts.groups_of_one or needs_group_of_one(model):
            groups += [cls("alone", (rank,), alone=True) for rank in model.ranks]
        return groups


def _is_inside(model: PlacedModel, purpose: str, ranks: tuple[int, ...]) -> bool:
    """Whether messages of a group travel inside layers, and FSDP2 shards over the same ranks."""
    return (
        purpose in (GroupPurpose.EXPERTS, *(axis.name for axis in OF_COPIES))
        and model.split == "rows"
        and ranks == model.shard_set(ranks[0])
    )


def _copies_purposes(layout: Layout) -> Purposes:
    """Yield the groups of a replica's ranks with a copy of the weights each, and of the ranks that sum gradients."""
    several = layout.dims.several(OF_COPIES)
    for axis in several:
        yield from ((axis.name, ranks) for ranks in layout.sets(axis.name))
    for ranks in dict.fromkeys(map(layout.of_weights.dp_set, layout.ranks)) if several else ():
        yield GroupPurpose.WEIGHTS, ranks


def _expert_purposes(model: PlacedModel) -> Purposes:
    """Yield the groups of expert-parallel ranks: ranks with different experts, ranks with the same."""
    if model.layout.dims.expert_parts > 1:
        yield from ((GroupPurpose.EXPERTS, ranks) for ranks in model.layout.sets("ep"))
        same = dict.fromkeys(map(model.expert_copy_set, model.ranks))
        yield from ((GroupPurpose.SAME_EXPERTS, ranks) for ranks in same)


def _shard_purposes(model: PlacedModel) -> Purposes:
    """Yield the groups of a model with several copies of its shards: ranks that gather, ranks that store the same."""
    if model.is_sharded_in_nodes:
        yield from ((GroupPurpose.SHARD, ranks) for ranks in dict.fromkeys(map(model.shard_set, model.ranks)))
        yield from ((GroupPurpose.COPIES, ranks) for ranks in dict.fromkeys(map(model.copy_set, model.ranks)))


def needs_group_of_one(model: PlacedModel) -> bool:
    """Whether each rank alone stores its experts, of a model whose other weights are sharded."""
    parts = model.layout.dims.expert_parts
    return parts > 1 and model.split != "whole" and model.num_shards == parts
