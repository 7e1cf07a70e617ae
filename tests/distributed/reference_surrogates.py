"""Losses of single tokens in the reference: surrogates, importance weights, selection and rejection of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from reference_responses import Response
from reference_terms import Terms
from torch import Tensor

from flexrlhf.config.algorithms.policy import PolicySpec
from flexrlhf.config.spec import Spec
from flexrlhf.engines.sampling import place_hash, splitmix
from flexrlhf.objectives.surrogates import PURPOSE


def surrogate(policy: PolicySpec, response: Response, logprobs: Tensor, kept: Tensor, terms: Terms) -> Tensor:
    """The losses of the tokens that are kept."""
    advantages, log_ratio = torch.tensor(response.advantages), logprobs - torch.tensor(response.logprobs)
    selected = torch.tensor(response.selected or [0.0] * len(log_ratio))
    match policy.surrogate:
        case "cispo":
            weights = log_ratio.exp().detach()
            bounded = weights.clamp(1 - policy.clip_low, 1 + policy.clip_high)
            losses, is_clipped = -bounded * advantages * logprobs, bounded != weights
        case "kl-cov":
            # if old and new are the same policy the sign of their difference is rounding
            moved = (log_ratio.abs() > 1e-5).float()
            penalty = policy.covariance.coefficient * selected * moved * log_ratio.abs()
            losses, is_clipped = penalty - log_ratio.exp() * advantages, torch.zeros(len(log_ratio))
        case _:
            losses, is_clipped = clipped(policy, ratio_of(policy, log_ratio, kept), advantages)
    if policy.surrogate == "clip-cov":
        losses = losses * (1 - selected)
    losses = (losses * importance_of(policy, response, kept, terms))[kept]
    terms.add("policy_loss", losses)
    terms.add("ratio_clipped", is_clipped.float()[kept])
    terms.add("update_kl", (log_ratio.exp() - 1 - log_ratio)[kept], [1.0] * len(losses))
    return losses


def ratio_of(policy: PolicySpec, log_ratio: Tensor, kept: Tensor) -> Tensor:
    """Zheng et al. 2025, eq. 7: each token has the geometric mean over its response; and GSPO-token."""
    if policy.ratio == "token":
        return log_ratio.exp()
    mean = log_ratio[kept].mean().exp() if kept.any() else torch.tensor(1.0)
    if policy.ratio == "sequence":
        return mean.expand(len(log_ratio))
    own = log_ratio.exp()
    return mean.detach() * own / own.detach()


def clipped(policy: PolicySpec, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - policy.clip_low, 1 + policy.clip_high)
    losses = torch.maximum(plain, bounded)
    if policy.dual_clip is not None:
        # Ye et al. 2020, eq. 5
        limited = torch.minimum(losses, -policy.dual_clip * advantages)
        losses = torch.stack([b if a < 0 else x for a, b, x in zip(advantages, limited, losses, strict=True)])
    return losses, bounded > plain


def importance_of(policy: PolicySpec, response: Response, kept: Tensor, terms: Terms) -> Tensor:
    """Weight of each token's loss; of one number all tokens have it."""
    settings = policy.importance
    if settings is None:
        return torch.tensor([1.0])
    if settings.level == "none":
        return torch.ones(len(kept))
    ratios = importance_ratios(settings.level, response)
    weights = [min(ratio, settings.cap) for ratio in ratios]
    is_outside = [ratio > settings.cap for ratio in ratios]
    if settings.outside == "mask":
        is_outside = [not (settings.floor or 0.0) <= ratio <= settings.cap for ratio in ratios]
        weights = [0.0 if outside else ratio for ratio, outside in zip(ratios, is_outside, strict=True)]
    counted = kept.tolist() if settings.level == "token" else [bool(kept.any())]
    terms.add("importance_weight", [w for w, counts in zip(weights, counted, strict=True) if counts])
    terms.add("importance_clipped", [float(x) for x, counts in zip(is_outside, counted, strict=True) if counts])
    # of r = old / rollout: r - 1 - log r (Schulman 2020, k3)
    k3 = [ratio - 1 - math.log(ratio) for ratio in importance_ratios("token", response)]
    own = [x for x, counts in zip(k3, kept.tolist(), strict=True) if counts]
    terms.add("behaviour_kl", own, [1.0] * len(own))
    return torch.tensor(weights)


def importance_ratios(level: str, response: Response) -> list[float]:
    """pi_old / pi_rollout of every token, of the response as one, or its geometric mean."""
    log_ratios = [old - sampled for old, sampled in zip(response.logprobs, response.rollout_logprobs, strict=True)]
    if level == "token":
        return [math.exp(x) for x in log_ratios]
    return [math.exp(sum(log_ratios) / (len(log_ratios) if level == "geometric" else 1))]


def reject(spec: Spec, step: int, responses: Sequence[Response], terms: Terms) -> None:
    """Fill in which tokens are kept, and describe the staleness of those that are trained on."""
    policy = spec.algorithm
    assert isinstance(policy, PolicySpec)
    settings, stalest = policy.importance, spec.schedule.lag + spec.sync.every - 1
    if spec.rollout.segment_tokens is not None:
        needed = math.ceil(spec.data.max_response_tokens / spec.rollout.segment_tokens)
        stalest += (spec.rollout.max_segments or needed) - 1
    for response in responses:
        kept, ages = [True] * len(response.tokens), [step - version for version in response.versions]
        if settings is not None and settings.reject is not None:
            ratios = importance_ratios(settings.reject.level, response)
            inside = [settings.reject.lower <= ratio <= settings.reject.upper for ratio in ratios]
            kept = inside if settings.reject.level == "token" else inside * len(response.tokens)
            if response.is_trained:
                terms.add("importance_rejected", [float(not each) for each in kept])
        # a bound that no token can exceed leaves the column out
        limit = None if settings is None else settings.max_staleness
        is_bound = limit is not None and limit < stalest
        if is_bound and response.is_trained:
            terms.add("staleness_dropped", [float(age > limit) for age in ages])
        if is_bound:
            kept = [each and age <= limit for each, age in zip(kept, ages, strict=True)]
        if is_bound or (settings is not None and settings.reject is not None):
            response.kept = kept
        if stalest and response.is_trained:
            terms.add("staleness_mean", [float(age) for age, counts in zip(ages, kept, strict=True) if counts])
    describe_staleness(terms)


def describe_staleness(terms: Terms) -> None:
    """The largest staleness, and the share of each up to 16, which stands for all from there on."""
    ages = terms.values("staleness_mean")
    terms.add("staleness_max", [max(ages)] if ages else [])
    for age in {min(int(age), 16) for age in ages}:
        terms.add(f"staleness_{age}", [float(min(int(each), 16) == age) for each in ages])


def select(spec: Spec, step: int, responses: Sequence[Response], mini_batches: Sequence[range], terms: Terms) -> None:
    """Fill in the tokens that clip-cov and kl-cov choose of every mini-batch (Cui et al. 2025, section 4.2)."""
    policy = spec.algorithm
    assert isinstance(policy, PolicySpec)
    if policy.surrogate not in ("clip-cov", "kl-cov"):
        return
    for rows in mini_batches:
        for row in rows:
            responses[row].selected = [0.0] * len(responses[row].tokens)
        places = [
            (row, place)
            for row in rows
            for place in range(len(responses[row].tokens))
            if responses[row].is_trained and (not responses[row].kept or responses[row].kept[place])
        ]
        if places:
            covariances = covariances_of(responses, places)
            for row, place in chosen(spec, step, covariances):
                responses[row].selected[place] = 1.0
            terms.add("covariance", list(covariances.values()))
            terms.add("covariance_selected", [responses[row].selected[place] for row, place in places])


Place = tuple[int, int]
"""Row and token."""


def covariances_of(responses: Sequence[Response], places: list[Place]) -> dict[Place, float]:
    logprobs = [responses[row].logprobs[place] for row, place in places]
    advantages = [responses[row].advantages[place] for row, place in places]
    means = sum(logprobs) / len(places), sum(advantages) / len(places)
    return {place: (x - means[0]) * (a - means[1]) for place, x, a in zip(places, logprobs, advantages, strict=True)}


def chosen(spec: Spec, step: int, covariances: dict[Place, float]) -> list[Place]:
    policy = spec.algorithm
    assert isinstance(policy, PolicySpec)
    number = max(int(policy.covariance.share * len(covariances)), 1)
    if policy.surrogate == "kl-cov":
        return sorted(covariances, key=lambda place: covariances[place], reverse=True)[:number]
    between = [p for p, x in covariances.items() if policy.covariance.lower < x < policy.covariance.upper]
    return sorted(between, key=lambda place: hash_of(spec.seed, step, place), reverse=True)[:number]


def hash_of(seed: int, step: int, place: Place) -> int:
    """The upper half of the 64 bits that take the place of chance."""
    row, position = place
    return int(splitmix(place_hash(seed, step, torch.tensor([row]), position) ^ PURPOSE)) % 2**64 >> 32
