"""Weighted sum of the scores of several sources."""

from __future__ import annotations

import torch

from flexrlhf.config.reward_sources import ModelSource, Sources
from flexrlhf.engines.base import Batch, Moments
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.objectives.reward_shaping import on_last_token
from flexrlhf.operators.sources import CALLED


def weighted_scores(sources: Sources, batch: Batch, _: CombineContext) -> tuple[Columns, Moments]:
    """Return ``scores`` (n,) and ``token_scores`` (n, R); scores of whole responses are on their last tokens.

    Scores of functions and services are one source, weighted already.
    """
    weights = {source.model: source.weight for source in sources if isinstance(source, ModelSource)} | {CALLED: 1.0}
    mask = batch["response_mask"]
    total, by_token = torch.zeros(len(batch), device=mask.device), torch.zeros_like(mask, dtype=torch.float32)
    for source, weight in weights.items():
        if f"token_scores.{source}" in batch.columns:
            tokens = (weight * batch[f"token_scores.{source}"]).where(mask.bool(), 0.0)
            total, by_token = total + tokens.sum(1), by_token + tokens
        elif f"scores.{source}" in batch.columns:
            scores = weight * batch[f"scores.{source}"]
            total, by_token = total + scores, by_token + on_last_token(scores, mask)
    return {"scores": total, "token_scores": by_token}, {}
