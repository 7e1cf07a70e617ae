"""Surrogates of the policy gradient: losses of single tokens, from ratios and advantages, with importance weights.

Tokens that high covariance selects follow from the whole mini-batch and from hashes of places, so they are the same for
every number of ranks and every size of micro-batches. Shapes: n rows, R response positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexrlhf.config.algorithms.base import ImportanceSpec
from flexrlhf.config.algorithms.policy import PolicySpec
from flexrlhf.engines.base import Batch, Moments, Outputs, moments
from flexrlhf.engines.sampling import place_numbers
from flexrlhf.metrics import METRICS
from flexrlhf.objectives.context import Columns, CombineContext, Reducer
from flexrlhf.objectives.kl_penalty import LOG_RATIO_CLAMP

ROUNDING = 1e-5
"""Size of a log-ratio below which its sign is rounding: a penalty of its size has no gradient there."""
PURPOSE = 0x636F76
"""Makes hashes of a selection others than those that tokens are sampled with."""


def surrogate_losses(spec: PolicySpec, outputs: Outputs, batch: Batch) -> tuple[Tensor, Moments]:
    """Return losses (n, R) of the tokens, with importance weights, and their statistics.

    Reads ``advantages`` and ``logprobs`` (n, R), ``selected_tokens`` (n, R) for clip-cov and kl-cov, and
    ``rollout_logprobs`` (n, R) for importance weights.
    """
    mask = batch.mask
    log_ratio = clamped_log_ratio(outputs, batch)
    match spec.surrogate:
        case "cispo":
            losses, is_clipped = _weighted_logprobs(spec, outputs.quantity, log_ratio, batch["advantages"])
        case "kl-cov":
            losses, is_clipped = _penalised_ratios(spec, log_ratio, batch)
        case "clip" | "clip-cov":
            losses, is_clipped = _clipped(spec, used_ratio(spec, log_ratio, mask), batch["advantages"])
    if spec.surrogate == "clip-cov":
        # clipped ones have no gradient, and verl does not select them
        losses = losses * (1 - (batch["selected_tokens"].bool() & ~is_clipped).to(losses.dtype))
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


def clamped_log_ratio(outputs: Outputs, batch: Batch) -> Tensor:
    """Return the log-ratio (n, R) of the policy to the one that the step starts from."""
    return (outputs.quantity - batch["logprobs"]).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def used_ratio(spec: PolicySpec, log_ratio: Tensor, mask: Tensor) -> Tensor:
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


def covariant_tokens(spec: PolicySpec, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """Return ``selected_tokens`` (n, R), by covariance of log-probs and advantages (Cui et al. 2025, section 4.2)."""
    selected = torch.zeros_like(batch.mask)
    covariances = torch.zeros_like(batch["advantages"])
    for part in context.segments:
        rows = batch.select(part)
        covariances[part], count = _covariances(rows, context.reducer)
        keys, is_candidate = _ranked(spec, covariances[part], rows, context)
        number = max(int(spec.covariance.share * count), 1)
        selected[part] = _highest(keys, is_candidate, number, context.reducer).to(selected.dtype)
    return {"selected_tokens": selected}, {
        "covariance": moments(covariances, batch.mask),
        "covariance_selected": moments(selected.float(), batch.mask),
    }


def _covariances(batch: Batch, reducer: Reducer) -> tuple[Tensor, float]:
    """Return the covariance (n, R) of each token of a mini-batch, and the number of its tokens on all ranks."""
    columns = (batch["logprobs"], batch["advantages"])
    sums = reducer.sum(torch.stack([moments(each, batch.mask) for each in columns]))
    (count, logprobs, _), (_, advantages, _) = sums.tolist()
    centred = [each - total / max(count, 1) for each, total in zip(columns, (logprobs, advantages), strict=True)]
    return centred[0] * centred[1], count


def _ranked(spec: PolicySpec, covariances: Tensor, batch: Batch, context: CombineContext) -> tuple[Tensor, Tensor]:
    """Return keys (n, R), each once and the highest to be selected, and bool (n, R): which tokens may be."""
    positions = torch.arange(covariances.shape[1], device=covariances.device)
    rows, counts = batch.rows[:, None].expand(-1, len(positions)), batch.mask.bool()
    if spec.surrogate == "clip-cov":
        counts = counts & (covariances > spec.covariance.lower) & (covariances < spec.covariance.upper)
        order = place_numbers(context.seed, context.step, rows, positions, PURPOSE)
    else:
        order = _order(covariances)
    return (order << 31) + rows * len(positions) + positions, counts


def _order(numbers: Tensor) -> Tensor:
    """Return int64 from 0 to 2^32 - 1 in the order of ``numbers``, by the bits of float32."""
    bits = numbers.float().view(torch.int32).long()
    return torch.where(bits >= 0, bits + (1 << 31), (1 << 31) - 1 - (bits & 0x7FFFFFFF))


def _highest(keys: Tensor, is_candidate: Tensor, number: int, reducer: Reducer) -> Tensor:
    """Return bool (n, R): the ``number`` candidates with the highest keys of all ranks, or all of fewer."""
    own = keys[is_candidate]
    found = reducer.gather(own.topk(min(number, len(own))).values)
    if not len(found):
        return torch.zeros_like(is_candidate)
    return is_candidate & (keys >= found.topk(min(number, len(found))).values.min())


def importance_weights(spec: ImportanceSpec | None, batch: Batch) -> tuple[Tensor, Moments]:
    """Return weights (n, R) of the tokens' losses, and their statistics; without ``spec`` weights are 1.

    The ratio is that of each token or of the whole response, also of its tokens that are rejected. At token level this
    is truncated importance sampling (Ionides 2008) in addition to PPO's own ratio to pi_old, the proximal policy of
    decoupled PPO (Hilton et al. 2022; Fu et al. 2025, AReaL).
    """
    kept = batch.mask.float()
    if spec is None:
        return torch.ones_like(kept), {}
    mask = batch.sampled_mask.float()
    log_ratio = (batch["logprobs"] - batch["rollout_logprobs"]) * mask
    single = log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    counted = kept
    if spec.level == "sequence":
        log_ratio, counted = log_ratio.sum(1, keepdim=True), kept.amax(1, keepdim=True)
    full = log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    weights, outside = full.clamp(max=spec.cap), full > spec.cap
    if spec.outside == "mask":
        outside |= full < (spec.floor or 0.0)
        weights = full.masked_fill(outside, 0.0)
    if spec.level == "none":
        weights, outside = torch.ones_like(full), torch.zeros_like(outside)
    statistics = {
        "importance_weight": moments(weights, counted),
        "importance_clipped": moments(outside.float(), counted),
        "behaviour_kl": moments(single.exp() - 1 - single, kept),
    }
    return weights.expand_as(kept), statistics


def rejection(spec: PolicySpec, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """Return ``kept_mask`` (n, R): tokens that count, less those that the settings reject or that are too stale."""
    settings, kept = spec.importance, batch.sampled_mask
    assert settings is not None, "only graphs of importance sampling call it"
    statistics = {}
    if settings.reject is not None:
        ratio = _rejected_ratio(settings.reject.level, batch)
        is_kept = (ratio >= settings.reject.lower) & (ratio <= settings.reject.upper)
        statistics["importance_rejected"] = moments((~is_kept).float(), batch.sampled_mask)
        kept = kept * is_kept
    if settings.max_staleness is not None and "policy_version" in batch.columns:
        is_fresh = context.step - batch["policy_version"] <= settings.max_staleness
        statistics["staleness_dropped"] = moments((~is_fresh).float(), batch.sampled_mask)
        kept = kept * is_fresh
    return {"kept_mask": kept}, statistics


def _rejected_ratio(level: str, batch: Batch) -> Tensor:
    """Return the ratio (n, R) that rejection bounds: of each token, or of its response."""
    mask = batch.sampled_mask.float()
    log_ratio = (batch["logprobs"] - batch["rollout_logprobs"]) * mask
    if level != "token":
        log_ratio = log_ratio.sum(1, keepdim=True)
    if level == "geometric":
        log_ratio = log_ratio / mask.sum(1, keepdim=True).clamp(min=1)
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp().expand_as(mask)


def staleness(batch: Batch, context: CombineContext) -> Moments:
    """Return statistics of the tokens that are trained on: batches trained on since the weights that sampled each."""
    found = (context.step - batch["policy_version"]).long()[batch.mask.bool()]
    # one number of each rank, none of a rank without such tokens
    largest = context.reducer.gather(found.topk(min(1, len(found))).values)
    names = METRICS.stale_shares
    shares = torch.bincount(found.clamp(max=len(names) - 1), minlength=len(names)).double()
    total = shares.sum()
    return {
        "staleness": moments(found),
        "staleness_max": moments(largest.topk(min(1, len(largest))).values),
        **{n: torch.stack([total, share, share]) for n, share in zip(names, shares.unbind(), strict=True)},
    }
