"""KL penalty: estimates of KL(policy || reference), in the reward of each token or in the loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flexrlhf.config.algorithms import KlSpec, PolicySpec
from flexrlhf.engines.base import Batch, Moments, moments

LOG_RATIO_CLAMP = 20.0
"""Bound of log-ratios that keeps exp() finite; far beyond what any sane policy update reaches."""


def kl_estimate(spec: KlSpec, log_ratio: Tensor) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token, in nats (Schulman 2020, "Approximating KL Divergence").

    With r = log policy - log reference: k1 = r, k2 = r^2 / 2, k3 = exp(-r) - 1 + r.

    ``log_ratio``: r, of any shape.
    """
    limit = LOG_RATIO_CLAMP if spec.clamp is None else spec.clamp
    bounded = log_ratio.clamp(-limit, limit)
    match spec.estimator:
        case "k1":
            return log_ratio if spec.clamp is None else bounded
        case "k2":
            return (log_ratio if spec.clamp is None else bounded) ** 2 / 2
        case "k3":
            return (-bounded).exp() - 1 + bounded


def behaviour_logprobs(batch: Batch) -> Tensor:
    """Log-probs (n, R) under the policy that sampled the responses.

    Column ``logprobs``, unless one policy samples and another is trained.
    """
    return batch["rollout_logprobs"] if "rollout_logprobs" in batch.columns else batch["logprobs"]


def kl_penalty(spec: PolicySpec, batch: Batch, mask: Tensor, state: Mapping[str, float]) -> tuple[Tensor, Moments]:
    """Return the KL penalty (n, R) to subtract from the reward of each token, and statistics of the KL.

    Both are empty without a KL penalty; the penalty is 0 where it is part of the loss.

    mask:  (n, R), tokens that count.
    state: of the controllers, with the coefficient of this step.
    """
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
