"""Weighted sum of the scores of several sources."""

from __future__ import annotations

import torch

from flexrlhf.config.reward_sources import ModelSource, Sources
from flexrlhf.engines.base import Batch, Moments
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.objectives.reward_shaping import on_last_token
from flexrlhf.operators.columns import plain
from flexrlhf.operators.sources import CALLED, STEP_ENDS


def weighted_scores(sources: Sources, batch: Batch, _: CombineContext) -> tuple[Columns, Moments]:
    """Return ``scores`` (n,), ``token_scores`` (n, R), and ``step_ends`` (n, R) where a source scores steps.

    Scores of whole responses are on their last tokens; those of functions and services are weighted already. Of a
    model with steps only the tokens that end one count.
    """
    weights = {source.model: source.weight for source in sources if isinstance(source, ModelSource)} | {CALLED: 1.0}
    mask = batch["response_mask"]
    total, by_token = torch.zeros(len(batch), device=mask.device), torch.zeros_like(mask, dtype=torch.float32)
    for source, weight in weights.items():
        if f"token_scores.{source}" in batch.columns:
            counted = batch.columns.get(f"step_ends.{source}", mask) if source != CALLED else mask
            tokens = (weight * batch[f"token_scores.{source}"]).where(counted.bool(), 0.0)
            total, by_token = total + tokens.sum(1), by_token + tokens
        elif f"scores.{source}" in batch.columns:
            scores = weight * batch[f"scores.{source}"]
            total, by_token = total + scores, by_token + on_last_token(scores, mask)
    ends = [column for name, column in batch.columns.items() if plain(name) == STEP_ENDS]
    of_steps = {STEP_ENDS: torch.stack(ends).amax(0)} if ends else {}
    return {"scores": total, "token_scores": by_token, **of_steps}, {}
