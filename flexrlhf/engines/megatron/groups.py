"""Process groups of a placed model as Megatron-Core requires them: explicit ones, never its global state."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from flexrlhf.engines.base import EngineContext, StageRanks


def process_groups(context: EngineContext, ranks: StageRanks) -> ProcessGroupCollection:
    """Return the groups of this rank; a rank that is alone in one has a group of its own there."""
    alone = context.alone
    assert alone is not None, "the plan has a group of one rank for every rank of a Megatron model"

    def group(of: dist.ProcessGroup | None) -> dist.ProcessGroup:
        return alone if of is None else of

    dp, tp = group(context.dp.group), group(context.tp.group)
    stages, replica, ends = group(ranks.stages.group), group(ranks.replica.group), group(ranks.ends.group)
    return ProcessGroupCollection(
        tp=tp,
        pp=stages,
        mp=replica,
        embd=ends,
        pos_embd=alone,
        dp=dp,
        dp_cp=dp,
        intra_dp_cp=dp,
        intra_dist_opt=group(ranks.model.group),
        cp=alone,
        tp_cp=tp,
        ep=alone,
        expt_tp=tp,
        tp_ep=tp,
        tp_ep_pp=replica,
        expt_dp=dp,
        intra_expt_dp=dp,
    )
