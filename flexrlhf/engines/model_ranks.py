"""Ranks that compute a placed model together with this rank, in groups by what they have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.comm.world import Groups, Wait
from flexrlhf.config.axes import OF_COPIES
from flexrlhf.placement.groups import GroupPurpose
from flexrlhf.placement.placed import PlacedModel


@dataclass(frozen=True)
class StageRanks:
    """Ranks of a model whose engine has pipeline stages, as this rank is grouped with them.

    stages:   ranks at the same position in every stage, which have the same rows.
    ends:     first and last of them.
    replica:  all ranks with these rows, of every tensor-parallel part and stage.
    model:    all ranks.
    """

    stages: RankGroup
    ends: RankGroup
    replica: RankGroup
    model: RankGroup


@dataclass(frozen=True)
class ShardRanks:
    """Parts of the data-parallel group of a model whose state is sharded in each node.

    shards: ranks of this node, which store different parts.
    copies: ranks of other nodes that store the same part, and this one.
    """

    shards: RankGroup
    copies: RankGroup


@dataclass(frozen=True)
class CopyRanks:
    """Ranks of a model whose replicas have several copies of the weights.

    along:    axis → ranks of the replica that have the other copies along it, such as parts of the same rows (``cp``).
    weights:  ranks that have the same part of the model, with any rows: these and the data-parallel ones.
    """

    along: Mapping[str, RankGroup]
    weights: RankGroup


@dataclass(frozen=True)
class ExpertRanks:
    """Ranks of a model whose experts are split over ranks.

    parts:  ranks that have the other experts of each layer.
    same:   ranks that have the same experts, of those that together store all weights.
    """

    parts: RankGroup
    same: RankGroup


@dataclass(frozen=True)
class ModelRanks:
    """Ranks of a placed model, as this rank is grouped with them.

    dp:       ranks that have the same part of the model and other rows.
    tp:       ranks that have the other parts of the same layers, and the same rows.
    alone:    process group of this rank alone, for a library that requires one; None where the plan has none.
    stages:   groups of an engine with pipeline stages.
    in_node:  groups of a model that is sharded in each node; None: it is sharded over all, or not at all.
    copies:   groups of a model with several copies of the weights in a replica; None: there is one.
    experts:  groups of a model with expert-parallel ranks; None: a rank has all experts.
    """

    dp: RankGroup
    tp: RankGroup
    alone: dist.ProcessGroup | None = None
    stages: StageRanks | None = None
    in_node: ShardRanks | None = None
    copies: CopyRanks | None = None
    experts: ExpertRanks | None = None

    @classmethod
    def of(cls, model: PlacedModel, rank: int, groups: Groups, wait: Wait) -> ModelRanks:
        """Return the ranks of ``model`` as ``rank``, one of them, is grouped with them. ``groups``: of the run."""
        layout = model.layout

        def ranks_of(purpose: str, ranks: tuple[int, ...]) -> RankGroup:
            return RankGroup(groups.get(f"{purpose} {model.name}", ranks), ranks, wait)

        pipeline = layout.along("pp", rank)
        replica = ranks_of(GroupPurpose.of_replica(layout), layout.replica_sets[layout.replica(rank)])
        in_node = copies = experts = None
        if model.is_sharded_in_nodes:
            in_node = ShardRanks(
                shards=ranks_of(GroupPurpose.SHARD, model.shard_set(rank)),
                copies=ranks_of(GroupPurpose.COPIES, model.copy_set(rank)),
            )
        if several := layout.dims.several(OF_COPIES):
            copies = CopyRanks(
                along={axis.name: ranks_of(axis.name, layout.along(axis.name, rank)) for axis in several},
                weights=ranks_of(GroupPurpose.WEIGHTS, layout.of_weights.dp_set(rank)),
            )
        if layout.dims.expert_parts > 1:
            experts = ExpertRanks(
                parts=ranks_of(GroupPurpose.EXPERTS, layout.along("ep", rank)),
                same=ranks_of(GroupPurpose.SAME_EXPERTS, model.expert_copy_set(rank)),
            )
        return cls(
            dp=ranks_of(GroupPurpose.COMPUTE, layout.dp_set(rank)),
            tp=ranks_of("tp", layout.along("tp", rank)),
            alone=groups.alone(rank),
            stages=StageRanks(
                stages=ranks_of("pp", pipeline),
                ends=ranks_of(*GroupPurpose.of_ends(pipeline)),
                replica=replica,
                model=ranks_of(GroupPurpose.of_all(layout), layout.ranks) if model.facts.model_group else replica,
            ),
            in_node=in_node,
            copies=copies,
            experts=experts,
        )

    @property
    def same_part(self) -> RankGroup:
        """Ranks that have the same part of the model, over which gradients are summed."""
        return self.dp if self.copies is None else self.copies.weights

    @property
    def replica(self) -> RankGroup:
        """All ranks with the rows of this one."""
        assert self.stages is not None, "every engine of a run has its replica"
        return self.stages.replica

    @property
    def number(self) -> int:
        """Number of this rank in the run."""
        for each in (self.same_part, self.tp):
            if each.group is not None:
                return each.ranks[dist.get_rank(each.group)]
        return self.dp.ranks[0]
