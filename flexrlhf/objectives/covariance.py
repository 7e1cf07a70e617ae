"""Tokens whose log-prob and advantage vary together, which clip-cov and kl-cov select in each mini-batch.

The selection follows from the whole mini-batch and from hashes of places, so it is the same for every number of ranks
and every size of micro-batches. Shapes: n rows, R response positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexrlhf.config.algorithms import PolicySpec
from flexrlhf.engines.base import Batch, Moments, moments
from flexrlhf.engines.hashing import mixed, place_hash, shift_right
from flexrlhf.objectives.context import Columns, CombineContext, Reducer

PURPOSE = 0x636F76
"""Makes hashes of a selection others than those that tokens are sampled with."""


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
        order = shift_right(mixed(place_hash(context.seed, context.step, rows, positions) ^ PURPOSE), 32)
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
