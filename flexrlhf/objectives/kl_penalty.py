"""KL penalty: estimates of KL(policy || reference), in the reward or advantage of each token, or in the loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flexrlhf.config.algorithms.policy import PolicySpec
from flexrlhf.config.algorithms.policy_sections import KlSpec
from flexrlhf.engines.base import Batch, Moments, moments

LOG_RATIO_CLAMP = 20.0
"""Bound of log-ratios that keeps exp() finite; far beyond what any sane policy update reaches."""


def kl_estimate(spec: KlSpec, log_ratio: Tensor) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token, in nats (Schulman 2020, "Approximating KL Divergence").

    With r = log policy - log reference: k1 = r, k2 = r^2 / 2, k3 = exp(-r) - 1 + r. Beyond ``value_clamp`` an estimate
    is constant, and has no gradient.

    ``log_ratio``: r, of any shape.
    """
    limit = LOG_RATIO_CLAMP if spec.clamp is None else spec.clamp
    bounded = log_ratio.clamp(-limit, limit)
    match spec.estimator:
        case "k1":
            estimate = log_ratio if spec.clamp is None else bounded
        case "k2":
            estimate = (log_ratio if spec.clamp is None else bounded) ** 2 / 2
        case "k3":
            estimate = (-bounded).exp() - 1 + bounded
    return estimate if spec.value_clamp is None else estimate.clamp(-spec.value_clamp, spec.value_clamp)


def kl_penalty(spec: PolicySpec, batch: Batch, mask: Tensor, state: Mapping[str, float]) -> tuple[Tensor, Moments]:
    """Return the KL penalty (n, R) of each token, for its reward or its advantage, and statistics of the KL.

    Both are empty without a KL penalty; the penalty is 0 if it is part of the loss. A loss that computes the
    policy's log-probs itself reports the KL itself, too.

    mask:  (n, R), tokens that count.
    state: of the controllers, with the coefficient of this step.
    """
    nothing = torch.zeros_like(mask, dtype=torch.float32)
    if spec.kl is None:
        return nothing, {}
    coefficient = state["kl_coefficient"]
    used = {"kl_coefficient": moments(nothing.new_full((len(batch),), coefficient, dtype=torch.float64))}
    if "ref_logprobs" not in batch.columns:
        return nothing, used
    # of the policy that sampled the responses, which may be another one than is trained
    sampled = batch["rollout_logprobs" if "rollout_logprobs" in batch.columns else "logprobs"]
    log_ratio = (sampled - batch["ref_logprobs"]) * mask
    estimate = kl_estimate(spec.kl, log_ratio) * mask
    statistics = measured_kl(log_ratio, mask, batch) | used
    if spec.kl.target is not None and spec.kl.target_unit == "token":
        means, is_counted = estimate.sum(1) / mask.sum(1).clamp(min=1), mask.any(1) & ~batch.is_further
        statistics["kl_response_mean"] = moments(means, is_counted)
    if spec.kl.place == "loss":
        return torch.zeros_like(log_ratio), statistics
    return coefficient * estimate, statistics


def measured_kl(log_ratio: Tensor, mask: Tensor, batch: Batch) -> Moments:
    """Return the statistics of the KL to the reference, from log-ratios (n, R) that are 0 outside ``mask`` (n, R).

    The mean over responses is of episodes, each with all its sequences.
    """
    of_responses, is_counted = moments(log_ratio.sum(1), mask.any(1)), mask.any(1)
    of_responses[0] -= (is_counted & batch.is_further).double().sum()
    return {"kl": of_responses, "kl_token": moments(log_ratio, mask)}
