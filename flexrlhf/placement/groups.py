"""Process groups by purpose. The plan lists them, comm/ creates them."""

from __future__ import annotations

from dataclasses import dataclass, field

from flexrlhf.placement.layout import Layout
from flexrlhf.placement.placed import PlacedModel

SHARD, COPIES = "shard", "copies"
"""Purposes of groups inside a data-parallel group: ranks that store different parts, ranks that store the same one."""
EXPERTS, SAME_EXPERTS = "experts", "same experts"
"""Purposes of groups of ranks that have different experts of a layer, and of those that have the same."""
WEIGHTS = "weights"
"""Purpose of the groups of data-parallel and context-parallel ranks together."""


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


def compute_groups(model: PlacedModel) -> list[Group]:
    """Return the groups of an engine: data-parallel, context-parallel, tensor-parallel, pipelines, and those that a
    library requires."""
    layout = model.layout
    pipelines = tuple(dict.fromkeys(map(layout.pp_set, model.ranks)))
    purposes: list[tuple[str, tuple[int, ...]]] = [
        *(("compute", ranks) for ranks in dict.fromkeys(map(layout.dp_set, model.ranks))),
        *_context_purposes(layout),
        *_expert_purposes(model),
        *_shard_purposes(model),
        *(("tp", ranks) for ranks in layout.tp_sets),
        *(("pp", ranks) for ranks in pipelines),
        *(pipeline_ends(ranks) for ranks in pipelines),
        *((replica_purpose(layout), ranks) for ranks in layout.replica_sets),
    ]
    if model.facts.model_group:
        purposes.append((model_purpose(layout), layout.ranks))
    groups = [
        Group(f"{purpose} {model.name}", ranks, inside=_is_inside(model, purpose, ranks))
        for purpose, ranks in dict.fromkeys(purposes)
    ]
    if model.facts.groups_of_one or needs_group_of_one(model):
        groups += [Group("alone", (rank,), alone=True) for rank in model.ranks]
    return groups


def _is_inside(model: PlacedModel, purpose: str, ranks: tuple[int, ...]) -> bool:
    """Whether messages of a group travel inside layers, and FSDP2 shards over the same ranks."""
    return purpose in ("cp", EXPERTS) and model.split == "rows" and ranks == model.shard_set(ranks[0])


def _context_purposes(layout: Layout) -> list[tuple[str, tuple[int, ...]]]:
    """Return the groups of context-parallel ranks, and of the ranks that sum gradients."""
    if layout.cp == 1:
        return []
    return [("cp", ranks) for ranks in dict.fromkeys(map(layout.cp_set, layout.ranks))] + [
        (WEIGHTS, ranks) for ranks in dict.fromkeys(map(layout.of_weights.dp_set, layout.ranks))
    ]


def _expert_purposes(model: PlacedModel) -> list[tuple[str, tuple[int, ...]]]:
    """Return the groups of expert-parallel ranks: ranks with different experts, ranks with the same."""
    if model.layout.ep == 1:
        return []
    return [(EXPERTS, ranks) for ranks in dict.fromkeys(map(model.layout.ep_set, model.ranks))] + [
        (SAME_EXPERTS, ranks) for ranks in dict.fromkeys(map(model.expert_copy_set, model.ranks))
    ]


def _shard_purposes(model: PlacedModel) -> list[tuple[str, tuple[int, ...]]]:
    """Return the groups of a model with several copies of its shards: ranks that gather, ranks that store the same."""
    if not model.is_sharded_in_nodes:
        return []
    return [(SHARD, ranks) for ranks in dict.fromkeys(map(model.shard_set, model.ranks))] + [
        (COPIES, ranks) for ranks in dict.fromkeys(map(model.copy_set, model.ranks))
    ]


def needs_group_of_one(model: PlacedModel) -> bool:
    """Whether each rank alone stores its experts, of a model whose other weights are sharded."""
    return model.layout.ep > 1 and model.split != "whole" and model.num_shards == model.layout.ep


def pipeline_ends(pipeline: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the first and the last rank of a pipeline, after the purpose of their group."""
    return ("pp", pipeline) if len(pipeline) < 3 else ("ends", (pipeline[0], pipeline[-1]))


def replica_purpose(layout: Layout) -> str:
    """Return the purpose of the group of a replica's ranks."""
    degrees = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp}
    several = [name for name, degree in degrees.items() if degree > 1] or ["tp"]
    return several[0] if len(several) == 1 else "replica"


def model_purpose(layout: Layout) -> str:
    """Return the purpose of the group of all ranks of an engine with pipeline stages."""
    return replica_purpose(layout) if layout.dp == 1 else "compute" if layout.width == layout.pp == 1 else "model"
