"""Reward shaping: from raw scores of responses to rewards of tokens.

Scores go through the penalties for length, normalisation and clipping, in this order, and end up on the last token of
their response. Shapes: n rows of this rank, R response positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexrlhf.config.algorithms.policy import PolicySpec
from flexrlhf.config.reward_sources import ModelSource, Sources
from flexrlhf.engines.base import Batch, Moments, moments
from flexrlhf.errors import RunStopped
from flexrlhf.metrics import Outcome
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.operators.columns import Column, Qualifier
from flexrlhf.operators.outcomes import EpisodeState

ROUNDING = 4 * torch.finfo(torch.float32).eps
"""Relative difference up to which scores, which are float32, are the same."""


@dataclass(frozen=True)
class ShapedRewards:
    """Rewards of the tokens of a batch, before the KL penalty.

    outcomes:   uint8 (n,), codes of why responses are left out.
    mask:       uint8 (n, R), 1 on response tokens of the others.
    raw_scores: (n,), scores before shaping; 0 for one that is not finite.
    scores:     (n,), scores after shaping; 0 for a response without one.
    rewards:    (n, R), reward of each token; a response's sum to its score.
    statistics: of scores and lengths.
    """

    outcomes: Tensor
    mask: Tensor
    raw_scores: Tensor
    scores: Tensor
    rewards: Tensor
    statistics: Moments

    @property
    def counts(self) -> Tensor:
        """Bool (n,): responses that are trained on."""
        return self.outcomes == 0


def shape_rewards(spec: PolicySpec, batch: Batch, context: CombineContext) -> ShapedRewards:
    """Shape the scores of ``batch`` by the settings of the algorithm.

    Reads ``scores`` (n,), ``finished`` (n,), ``response_mask`` (n, R), and ``token_scores`` (n, R) if there are any. An
    episode has one score, that of its first sequence, and counts once in statistics; further sequences, without scores
    of tokens, have it on their last token. Raises RunStopped for scores that are not finite, with ``invalid_scores:
    stop``.
    """
    shaped = _shaped_episodes(spec, batch.episodes, context)
    if batch.sequences == 1:
        return shaped
    of_rows, mask = batch.of_rows, batch["response_mask"]
    outcomes = of_rows(shaped.outcomes).masked_fill(batch.is_further & ~mask.bool().any(1), Outcome.UNUSED.code)
    mask = mask * (outcomes == 0)[:, None].to(mask.dtype)
    scores = of_rows(shaped.scores)
    rewards = token_rewards(scores, batch, mask)
    return ShapedRewards(outcomes, mask, of_rows(shaped.raw_scores), scores, rewards, shaped.statistics)


def _shaped_episodes(spec: PolicySpec, batch: Batch, context: CombineContext) -> ShapedRewards:
    """Return the rewards of ``batch``, whose rows are episodes of their own."""
    truncated = 1 - batch["finished"].float()
    scores_before, outcomes = raw_scores(spec, batch, context)
    counts, invalid = outcomes == 0, outcomes == Outcome.INVALID_SCORE.code
    finite = ~invalid & (outcomes != Outcome.FAILED_EPISODE.code)
    mask = batch["response_mask"] * counts[:, None].to(batch["response_mask"].dtype)
    # with bootstrap the critic's value replaces the score of a truncated response
    scored = counts & (truncated == 0) if spec.truncation == "bootstrap" else counts
    penalised = _length_penalised(spec, batch, scores_before, truncated)
    normalised = _normalised(spec, penalised, scored, context)
    scores = normalised
    if spec.reward_clip is not None:
        scores = normalised.clamp(-spec.reward_clip, spec.reward_clip)
    # without a score of its own, a response keeps the scores of its tokens
    scores = scores.where(scored, token_scores_of(batch, mask).sum(1))
    statistics = {
        "reward": moments(scores_before, finite),
        "shaped_score": moments(penalised, scored),
        "score_invalid": moments(invalid.float()),
        "response_length": moments(batch["response_mask"].float().sum(1)),
        "truncated": moments(truncated),
    }
    if spec.reward_clip is not None:
        statistics["reward_clipped"] = moments((normalised.abs() > spec.reward_clip).float(), scored)
    return ShapedRewards(outcomes, mask, scores_before, scores, token_rewards(scores, batch, mask), statistics)


def raw_scores(spec: PolicySpec, batch: Batch, context: CombineContext) -> tuple[Tensor, Tensor]:
    """Return scores (n,), 0 for one that is not finite, and uint8 (n,): codes of why responses do not count.

    The score of an episode that failed is not read. Raises RunStopped for others that are not finite, with
    ``invalid_scores: stop``.
    """
    scores, has_failed = batch["scores"], torch.zeros_like(batch["finished"], dtype=torch.bool)
    if "episode" in batch.columns:
        has_failed = batch["episode"] >= EpisodeState.FAILED
        scores = scores.masked_fill(has_failed, 0.0)
    finite = finite_scores(spec, batch, scores, context)
    is_masked = (batch["finished"] == 0) & (spec.truncation == "mask")
    outcomes = (is_masked.to(torch.uint8) * Outcome.TRUNCATED.code).masked_fill(~finite, Outcome.INVALID_SCORE.code)
    return scores.where(finite, 0.0), outcomes.masked_fill(has_failed, Outcome.FAILED_EPISODE.code)


def finite_scores(spec: PolicySpec, batch: Batch, scores: Tensor, context: CombineContext) -> Tensor:
    """Return bool (n,): which scores are finite.

    Raises RunStopped for any other, on all ranks alike, with ``invalid_scores: stop``.
    """
    finite = scores.isfinite()
    rows = sorted(context.reducer.gather(batch.rows[~finite]).tolist()) if spec.invalid_scores == "stop" else []
    if rows:
        shown = ", ".join(map(str, rows[:5])) + (" ..." if len(rows) > 5 else "")
        raise RunStopped(
            f"{len(rows)} responses have a score that is not a finite number (rows {shown} of step {context.step}); "
            f"algorithm.invalid_scores: mask would go on without them"
        )
    return finite


def _length_penalised(spec: PolicySpec, batch: Batch, scores: Tensor, truncated: Tensor) -> Tensor:
    """Subtract the penalties (n,) of truncated and of overlong responses.

    Overlong: linear over the last ``buffer_tokens`` before R (DAPO, Yu et al. 2025, eq. 13).
    """
    if not isinstance(spec.truncation, str):
        scores = scores - spec.truncation.penalty * truncated
    if spec.overlong is not None:
        mask = batch["response_mask"]
        buffer = spec.overlong.buffer_tokens or max(1, mask.shape[1] // 5)
        # replies of an environment take up room, too
        length = (last_positions(mask.bool()) + 1) * mask.any(1)
        over = length.float() - (mask.shape[1] - buffer)
        scores = scores - spec.overlong.penalty * (over / buffer).clamp(0, 1)
    return scores


def _normalised(spec: PolicySpec, scores: Tensor, counts: Tensor, context: CombineContext) -> Tensor:
    """Subtract the mean (n,) and divide by the deviation: of the steps before, or of all that count in this one."""
    match spec.normalise_scores:
        case "none":
            return scores
        case "running":
            if context.state["score_count"] < 2:
                return scores
            mean, deviation = context.state["score_mean"], context.state["score_deviation"]
        case "batch":
            count, total, squares = context.reducer.sum(moments(scores, counts)).tolist()
            mean = total / max(count, 1)
            deviation = (max(squares - count * mean * mean, 0.0) / max(count - 1, 1)) ** 0.5
    centred = scores.double() - mean
    # a deviation of the size of the scores' own rounding is none
    return (centred / (deviation + 1e-8)).float() if deviation > ROUNDING * abs(mean) else centred.float()


def token_rewards(scores: Tensor, batch: Batch, mask: Tensor, suffix: str = "") -> Tensor:
    """Return rewards (n, R) of the tokens that sum to ``scores`` (n,).

    The score is on the last token; if tokens have scores of their own, only its difference to their sum is.

    ``suffix``: of the column ``token_scores``.
    """
    by_token = token_scores_of(batch, mask, suffix)
    return by_token + on_last_token(scores - by_token.sum(1), mask)


def on_last_token(values: Tensor, mask: Tensor) -> Tensor:
    """Return (n, R) with ``values`` (n,) on the last response tokens; empty responses have none."""
    position, weights = last_positions(mask.bool())[:, None], mask.to(values.dtype)
    return torch.zeros_like(weights).scatter_add(1, position, values[:, None] * weights.gather(1, position))


def token_scores_of(batch: Batch, mask: Tensor, suffix: str = "") -> Tensor:
    """Return the scores (n, R) of single tokens: column ``token_scores``; 0 outside ``mask`` and without a score."""
    name = f"token_scores{suffix}"
    if name not in batch.columns:
        return torch.zeros_like(mask, dtype=torch.float32)
    return batch[name].where(mask.bool() & batch[name].isfinite(), 0.0)


def last_positions(mask: Tensor) -> Tensor:
    """Return the index (n,) of the last response token; 0 for an empty response."""
    return (mask.shape[1] - 1 - mask.flip(1).long().argmax(1)) * mask.any(1)


def weighted_scores(sources: Sources | None, batch: Batch, _: CombineContext) -> tuple[Columns, Moments]:
    """Return ``scores`` (n,), ``token_scores`` (n, R), and ``step_ends`` (n, R) if a source scores steps.

    Scores of whole responses are on their last tokens; scores of functions and services are weighted already, as an
    environment's rewards are. Of a model with steps only the tokens that end one count; of episodes a turn is a step.
    An episode that failed has the score NaN. ``sources``: None: the model of that name, or the environment alone.
    """
    given = {source.model: source.weight for source in sources or () if isinstance(source, ModelSource)}
    found = dict.fromkeys(
        name.partition(".")[2] for name in batch.columns if Column.plain(name) in ("scores", "token_scores")
    )
    weights = {source: given.get(source, 1.0) for source in (*given, *found)}
    mask = batch["response_mask"]
    total, by_token = torch.zeros(len(batch), device=mask.device), torch.zeros_like(mask, dtype=torch.float32)
    for source, weight in weights.items():
        if f"token_scores.{source}" in batch.columns:
            counted = batch.columns.get(f"step_ends.{source}", mask) if source != Qualifier.CALLED else mask
            if source == Qualifier.ENVIRONMENT:
                counted = torch.ones_like(mask)
            tokens = (weight * batch[f"token_scores.{source}"]).where(counted.bool(), 0.0)
            total, by_token = total + tokens.sum(1), by_token + tokens
        elif f"scores.{source}" in batch.columns:
            scores = weight * batch[f"scores.{source}"]
            total, by_token = total + scores, by_token + on_last_token(scores, mask)
    ends = [
        column for name, column in batch.columns.items() if Column.plain(name) in (Column.STEP_ENDS, Column.TURN_ENDS)
    ]
    of_steps = {Column.STEP_ENDS: torch.stack(ends).amax(0)} if ends else {}
    return {"scores": total, "token_scores": by_token, **of_steps}, {}
