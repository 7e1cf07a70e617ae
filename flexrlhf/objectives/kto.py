"""KTO: losses of responses that are desirable or not, around a reference point.

Samples 0 and 1 of a prompt are chosen (desirable) and rejected (undesirable). Shapes: n rows, R response positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexrlhf.config.algorithms import KtoSpec
from flexrlhf.engines.base import Batch, Loss, Moments, Outputs, Totals, moments
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.objectives.losses import pairs_of
from flexrlhf.objectives.preferences import PAIR_STATISTICS, implicit_rewards, of_responses, pair_statistics


def kto_loss(spec: KtoSpec) -> Loss:
    """Return the loss of KTO, mean over responses (Ethayarajh et al. 2024, eq. 7). Reads ``reference_point`` (n,)."""

    def function(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Moments]:
        rewards = implicit_rewards(spec, outputs.quantity, batch)
        chosen, rejected = pairs_of(rewards - spec.beta * batch["reference_point"])
        # 1 - sigmoid(x) = sigmoid(-x)
        desirable = spec.desirable_weight * torch.sigmoid(-chosen)
        undesirable = spec.undesirable_weight * torch.sigmoid(rejected)
        losses = (desirable + undesirable) / 2
        return losses.sum() / totals.prompts, pair_statistics(losses, rewards, outputs.quantity, batch)

    return Loss("logprobs", function, PAIR_STATISTICS)


def reference_point(_: KtoSpec, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """Return ``reference_point`` (n,), an estimate of KL(policy || reference), at least 0, one for each mini-batch.

    It is the mean log-ratio of responses that belong to other prompts (Ethayarajh et al. 2024, section 4), over all
    rows of the mini-batch, on whichever rank they are.
    """
    log_ratios = of_responses(batch["logprobs"] - batch["ref_logprobs"], batch.mask, is_mean=False)
    sums = context.reducer.sum(torch.stack([moments(log_ratios[part]) for part in context.segments]))
    points = torch.zeros_like(log_ratios)
    for part, (count, total, _squares) in zip(context.segments, sums.tolist(), strict=True):
        points[part] = max(total / max(count, 1), 0.0)
    return {"reference_point": points}, {"reference_point": moments(points)}
