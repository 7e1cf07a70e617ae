"""Surrogates of the policy gradient: losses of single tokens, from ratios and advantages.

Shapes: n rows, R response positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexrlhf.config.algorithms import PolicySpec
from flexrlhf.engines.base import Batch, Moments, Outputs, moments
from flexrlhf.objectives.importance import importance_weights
from flexrlhf.objectives.kl_penalty import LOG_RATIO_CLAMP

ROUNDING = 1e-5
"""Size of a log-ratio below which its sign is rounding: a penalty of its size has no gradient there."""


def surrogate_losses(spec: PolicySpec, outputs: Outputs, batch: Batch) -> tuple[Tensor, Moments]:
    """Return losses (n, R) of the tokens, with importance weights, and their statistics.

    Reads ``advantages`` and ``logprobs`` (n, R), ``selected_tokens`` (n, R) for clip-cov and kl-cov, and
    ``rollout_logprobs`` (n, R) for importance weights.
    """
    mask = batch.mask
    log_ratio = (outputs.quantity - batch["logprobs"]).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    match spec.surrogate:
        case "cispo":
            losses, is_clipped = _weighted_logprobs(spec, outputs.quantity, log_ratio, batch["advantages"])
        case "kl-cov":
            losses, is_clipped = _penalised_ratios(spec, log_ratio, batch)
        case "clip" | "clip-cov":
            losses, is_clipped = _clipped(spec, _used_ratio(spec, log_ratio, mask), batch["advantages"])
    if spec.surrogate == "clip-cov":
        losses = losses * (1 - batch["selected_tokens"].to(losses.dtype))
    weights, importance = importance_weights(spec.importance, batch)
    losses = losses * weights
    assert outputs.entropy is not None
    statistics = {
        "policy_loss": moments(losses, mask),
        "ratio_clipped": moments(is_clipped.float(), mask),
        "update_kl": moments(log_ratio.exp() - 1 - log_ratio, mask),
        "entropy": moments(outputs.entropy, mask),
    }
    return losses, statistics | importance


def _used_ratio(spec: PolicySpec, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return the ratio (n, R) that is clipped: of each token, or of the response to the power 1 / its length.

    sequence:       GSPO (Zheng et al. 2025, eq. 7).
    sequence-token: GSPO-token (section 4.3): the same value, with the gradient of each token's own ratio.
    """
    if spec.ratio == "token":
        return log_ratio.exp()
    weights = mask.to(log_ratio.dtype)
    mean = ((log_ratio * weights).sum(1) / weights.sum(1).clamp(min=1))[:, None].expand_as(log_ratio)
    if spec.ratio == "sequence-token":
        mean = mean.detach() + log_ratio - log_ratio.detach()
    return mean.exp()


def _clipped(spec: PolicySpec, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return -min(ratio A, clip(ratio) A) (n, R), and where the clip sets it.

    With ``dual_clip`` c it is at most -c A where the advantage A is negative (Ye et al. 2020, eq. 5).
    """
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    losses = torch.maximum(plain, bounded)
    if spec.dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * spec.dual_clip), losses)
    return losses, bounded > plain


def _weighted_logprobs(
    spec: PolicySpec, logprobs: Tensor, log_ratio: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor]:
    """Return -clip(ratio) A log pi (n, R), the clipped ratio without gradient, and where it is clipped.

    CISPO (MiniMax-M1, Chen et al. 2025, section 3.1).
    """
    ratio = log_ratio.exp().detach()
    clipped = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    return -clipped * advantages * logprobs, clipped != ratio


def _penalised_ratios(spec: PolicySpec, log_ratio: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return -ratio A (n, R), plus coefficient abs(log ratio) for selected tokens; none is clipped.

    KL-Cov (Cui et al. 2025, section 4.2), in the form of the authors' code and of verl.
    """
    distance = log_ratio.abs().where(log_ratio.abs() > ROUNDING, 0.0)
    penalty = spec.covariance.coefficient * distance * batch["selected_tokens"].to(log_ratio.dtype)
    return -batch["advantages"] * log_ratio.exp() + penalty, torch.zeros_like(log_ratio, dtype=torch.bool)
