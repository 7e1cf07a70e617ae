"""Importance sampling: weights of losses, and rejection, for responses that another policy has sampled.

Shapes: n rows, R response positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexrlhf.config.algorithms import ImportanceSpec, PolicySpec
from flexrlhf.engines.base import Batch, Moments, moments
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.objectives.kl_penalty import LOG_RATIO_CLAMP


def importance_weights(spec: ImportanceSpec | None, batch: Batch) -> tuple[Tensor, Moments]:
    """Return weights (n, R) of the tokens' losses, and their statistics; without ``spec`` weights are 1.

    The ratio is that of each token or of the whole response, also of its tokens that are rejected. At token level this
    is truncated importance sampling (Ionides 2008), as AReaL and verl apply it in addition to PPO's own ratio.
    """
    kept = batch.mask.float()
    if spec is None:
        return torch.ones_like(kept), {}
    mask = batch.sampled_mask.float()
    log_ratio = (batch["logprobs"] - batch["rollout_logprobs"]) * mask
    counted = kept
    if spec.level == "sequence":
        log_ratio, counted = log_ratio.sum(1, keepdim=True), kept.amax(1, keepdim=True)
    full = log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    weights, outside = full.clamp(max=spec.cap), full > spec.cap
    if spec.outside == "mask":
        outside |= full < (spec.floor or 0.0)
        weights = full.masked_fill(outside, 0.0)
    statistics = {
        "importance_weight": moments(weights, counted),
        "importance_clipped": moments(outside.float(), counted),
    }
    return weights.expand_as(kept), statistics


def rejection(spec: PolicySpec, batch: Batch, _: CombineContext) -> tuple[Columns, Moments]:
    """Return ``kept_mask`` (n, R): tokens that count, less those that the settings reject."""
    assert spec.importance is not None and spec.importance.reject is not None, "only graphs with rejection call it"
    settings, mask = spec.importance.reject, batch.sampled_mask.float()
    log_ratio = (batch["logprobs"] - batch["rollout_logprobs"]) * mask
    if settings.level != "token":
        log_ratio = log_ratio.sum(1, keepdim=True)
    if settings.level == "geometric":
        log_ratio = log_ratio / mask.sum(1, keepdim=True).clamp(min=1)
    ratio = log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    is_kept = ((ratio >= settings.lower) & (ratio <= settings.upper)).expand_as(mask)
    statistics = {"importance_rejected": moments((~is_kept).float(), mask)}
    return {"kept_mask": batch.sampled_mask * is_kept.to(torch.uint8)}, statistics
