"""From what models and functions said of the answers to rewards: which answers count, shaped scores, the KL penalty.

Shapes: n rows, R response positions; n is this rank's rows of the mini-batches at work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flexrlhf.config.algorithms import PolicySpec, TruncationPenalty
from flexrlhf.engines.base import Batch, Moments, moments
from flexrlhf.errors import RunStopped
from flexrlhf.objectives.context import CombineContext, Reducer
from flexrlhf.objectives.losses import kl_estimate


@dataclass(frozen=True)
class ShapedRewards:
    """``counts`` (n,): which answers do. ``mask`` (n, R): 1 on their response tokens. ``told`` (n,): scores as they
    were told, ``scores`` (n,): shaped; 0 where there is none.

    ``rewards`` (n, R): of every token: what its answer scores, on the last one, less the KL penalty where it has one.
    """

    counts: Tensor
    mask: Tensor
    told: Tensor
    scores: Tensor
    rewards: Tensor
    statistics: Moments


def shape_rewards(spec: PolicySpec, batch: Batch, context: CombineContext) -> ShapedRewards:
    """What the answers of ``batch`` are worth.

    Raises RunStopped for scores that are no finite numbers, where ``invalid_scores`` says so.
    """
    raw = batch["scores"]
    finite = finite_scores(spec, batch, raw, context.reducer)
    truncated = 1 - batch["finished"].float()
    counts = finite & (truncated == 0) if spec.truncation == "mask" else finite
    mask = batch["response_mask"] * counts[:, None].to(batch["response_mask"].dtype)
    # a critic's value stands for the score of an answer that was cut off
    scored = counts & (truncated == 0) if spec.truncation == "bootstrap" else counts
    told = raw.where(finite, 0.0)
    ruled = _ruled(spec, batch, told, truncated)
    normalised = _normalised(spec, ruled, scored, context)
    scores = normalised
    if spec.reward_clip is not None:
        scores = normalised.clamp(-spec.reward_clip, spec.reward_clip)
    # one that is cut off, of whose tokens some have scores of their own, keeps these
    scores = scores.where(scored, token_scores_of(batch, mask).sum(1))
    statistics = {
        "reward": moments(told, finite),
        "shaped_score": moments(ruled, scored),
        "score_invalid": moments((~finite).float()),
        "not_counted": moments((~counts).float()),
        "response_length": moments(batch["response_mask"].float().sum(1)),
        "truncated": moments(truncated),
    }
    if spec.reward_clip is not None:
        statistics["reward_clipped"] = moments((normalised.abs() > spec.reward_clip).float(), scored)
    rewards = token_rewards(scores, batch, mask)
    return ShapedRewards(counts, mask, told, scores, rewards, statistics)


def finite_scores(spec: PolicySpec, batch: Batch, scores: Tensor, reducer: Reducer) -> Tensor:
    """(n,): which scores are finite numbers. Raises RunStopped where the others are to end the run.

    All replicas see the same rows, so they stop together.
    """
    finite = scores.isfinite()
    rows = sorted(reducer.gather(batch.rows[~finite]).tolist()) if spec.invalid_scores == "stop" else []
    if rows:
        shown = ", ".join(map(str, rows[:5])) + (" ..." if len(rows) > 5 else "")
        raise RunStopped(
            f"{len(rows)} answers have a score that is no finite number (rows {shown} of the step); "
            f"algorithm.invalid_scores: mask would go on without them"
        )
    return finite


def _ruled(spec: PolicySpec, batch: Batch, scores: Tensor, truncated: Tensor) -> Tensor:
    """Scores (n,) after what is said about answers that are cut off, or nearly."""
    if isinstance(spec.truncation, TruncationPenalty):
        scores = scores - spec.truncation.penalty * truncated
    if spec.overlong is not None:
        mask = batch["response_mask"]
        buffer = spec.overlong.buffer_tokens or max(1, mask.shape[1] // 5)
        over = mask.float().sum(1) - (mask.shape[1] - buffer)
        scores = scores - spec.overlong.penalty * (over / buffer).clamp(0, 1)
    return scores


def _normalised(spec: PolicySpec, scores: Tensor, counts: Tensor, context: CombineContext) -> Tensor:
    """To mean 0 and deviation 1 of the scores of the steps before, or of all that count in this one."""
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
    return (scores - mean) / (deviation + 1e-8)


def token_rewards(scores: Tensor, batch: Batch, mask: Tensor, qualifier: str = "") -> Tensor:
    """Rewards (n, R): the scores on the last response tokens; where tokens have scores of their own these, and on the
    last one what shaping has changed of their sum."""
    by_token = token_scores_of(batch, mask, qualifier)
    return by_token + on_last_token(scores - by_token.sum(1), mask)


def on_last_token(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` (n,) on the last response tokens (n, R); those of empty responses are nowhere."""
    position, weights = last_positions(mask.bool())[:, None], mask.float()
    return torch.zeros_like(weights).scatter_add(1, position, values[:, None] * weights.gather(1, position))


def token_scores_of(batch: Batch, mask: Tensor, qualifier: str = "") -> Tensor:
    """Scores (n, R) that tokens have of their own; zeros where there are none."""
    name = f"token_scores{qualifier}"
    if name not in batch.columns:
        return torch.zeros_like(mask, dtype=torch.float32)
    return batch[name].where(mask.bool() & batch[name].isfinite(), 0.0)


def last_positions(mask: Tensor) -> Tensor:
    """Index (n,) of the last response token; 0 for an empty response."""
    return (mask.shape[1] - 1 - mask.flip(1).long().argmax(1)) * mask.any(1)


def behaviour_logprobs(batch: Batch) -> Tensor:
    """Log-probs (n, R) under the policy that drew the answers, whose KL it is: column ``logprobs`` unless one policy
    draws and another is trained."""
    return batch["rollout_logprobs"] if "rollout_logprobs" in batch.columns else batch["logprobs"]


def kl_penalty(spec: PolicySpec, batch: Batch, mask: Tensor, state: Mapping[str, float]) -> tuple[Tensor, Moments]:
    """Penalty (n, R) of every token for leaving the reference, and the measured KL; zeros where there is none."""
    if spec.kl is None:
        return torch.zeros_like(mask, dtype=torch.float32), {}
    log_ratio = (behaviour_logprobs(batch) - batch["ref_logprobs"]) * mask
    coefficient = state["kl_coefficient"]
    statistics = {
        "kl": moments(log_ratio.sum(1), mask.any(1)),
        "kl_token": moments(log_ratio, mask),
        "kl_coefficient": moments(log_ratio.new_full((len(batch),), coefficient, dtype=torch.float64)),
    }
    if spec.kl.place == "loss":
        return torch.zeros_like(log_ratio), statistics
    return coefficient * kl_estimate(spec.kl, log_ratio) * mask, statistics
