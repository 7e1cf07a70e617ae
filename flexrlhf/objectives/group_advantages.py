"""Advantages of answers against the others to the same prompt. Samples of a prompt are neighbours on one rank.

Shapes: n rows, R response positions; g = n / samples_per_prompt groups of s answers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexrlhf.config.algorithms import GroupSpec, RaftSpec
from flexrlhf.engines.base import Batch, Moments, moments
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.objectives.reward_shaping import ShapedRewards, kl_penalty, shape_rewards

EPSILON = 1e-6
"""Beside a group's deviation (verl's)."""


def group_advantages(spec: GroupSpec, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """Every token has its answer's advantage: the score, less the KL penalty where it is in the reward, over the
    group's baseline; Shao et al. 2024, section 4.1.2; RLOO: Ahmadian et al. 2024, eq. 9."""
    found = shape_rewards(spec, batch, context)
    penalty, kl = kl_penalty(spec, batch, found.mask, context.state)
    totals = (found.rewards - penalty).sum(1)
    centred, deviation = centre_in_groups(totals, found.counts, batch.samples_per_prompt, spec.baseline)
    if spec.scale == "group":
        centred = centred / (deviation + EPSILON)
    mask, statistics = found.mask, {**found.statistics, **kl}
    # by what was told: a penalty, for their length too, tells apart answers that score alike
    alike = _alike(found.told.view(-1, batch.samples_per_prompt), found.counts.view(-1, batch.samples_per_prompt))
    statistics["group_alike"] = moments(alike.float().expand(-1, batch.samples_per_prompt).reshape(-1), found.counts)
    if spec.dynamic_sampling is not None:
        taken = _taken(spec, batch, found, context)
        mask = mask * taken[:, None].to(mask.dtype)
        statistics["group_taken"] = moments(taken.float())
    advantages = centred[:, None] * mask
    statistics["advantage"] = moments(advantages, mask)
    return {"loss_mask": mask, "advantages": advantages}, statistics


def best_of_group(spec: RaftSpec, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """Advantage 1 for the first of the answers of a group that score best (Dong et al. 2023, section 3); no other one
    is trained on."""
    found = shape_rewards(spec, batch, context)
    penalty, kl = kl_penalty(spec, batch, found.mask, context.state)
    totals = (found.rewards - penalty).sum(1).masked_fill(~found.counts, -torch.inf)
    best = totals.view(-1, batch.samples_per_prompt).argmax(1, keepdim=True)
    taken = torch.zeros_like(found.counts).view(-1, batch.samples_per_prompt).scatter(1, best, True).view(-1)
    mask = found.mask * taken[:, None].to(found.mask.dtype)
    statistics = {**found.statistics, **kl, "group_taken": moments(taken.float()), "advantage": moments(mask, mask)}
    return {"loss_mask": mask, "advantages": mask.float()}, statistics


def centre_in_groups(scores: Tensor, counts: Tensor, samples: int, baseline: str) -> tuple[Tensor, Tensor]:
    """``scores`` (n,) over the baseline of their group, and its standard deviation (n,), with Bessel's correction.

    Of the answers of a group those count that ``counts`` (n,) says; one alone has advantage 0.
    """
    grouped, weights = scores.view(-1, samples), counts.view(-1, samples).to(scores.dtype)
    number = weights.sum(1, keepdim=True)
    centred = (grouped - (grouped * weights).sum(1, keepdim=True) / number.clamp(min=1)) * weights
    # equal scores have a deviation of 0, not of what rounding leaves
    centred = torch.where(_alike(grouped, weights), 0.0, centred)
    deviation = ((centred**2).sum(1, keepdim=True) / (number - 1).clamp(min=1)).sqrt()
    if baseline == "others":
        # score - mean of the others = (score - mean of all) * n / (n - 1)
        centred = centred * number / (number - 1).clamp(min=1)
    return centred.reshape(-1), deviation.expand_as(grouped).reshape(-1)


def _alike(grouped: Tensor, weights: Tensor) -> Tensor:
    """(g, 1): whether all answers of a group that count score the same."""
    counted = weights.bool()
    highest = grouped.masked_fill(~counted, -torch.inf).amax(1, keepdim=True)
    lowest = grouped.masked_fill(~counted, torch.inf).amin(1, keepdim=True)
    return highest <= lowest


def _taken(spec: GroupSpec, batch: Batch, found: ShapedRewards, context: CombineContext) -> Tensor:
    """(n,): whether the answer's group is one of those that its mini-batch trains on."""
    taken = torch.zeros_like(found.counts)
    for part in context.segments:
        taken[part] = _taken_of_mini_batch(spec, batch.select(part), found.told[part], found.counts[part], context)
    return taken


def _taken_of_mini_batch(
    spec: GroupSpec, batch: Batch, scores: Tensor, counts: Tensor, context: CombineContext
) -> Tensor:
    """The first groups whose answers differ, as many as are the mini-batch's share of those that a step trains on.

    Mini-batch by mini-batch, so that none is left without rows while another has more than its share.
    """
    assert spec.dynamic_sampling is not None
    samples, rounds = batch.samples_per_prompt, spec.dynamic_sampling.rounds
    useful = ~_alike(scores.view(-1, samples), counts.view(-1, samples)).squeeze(1)
    prompts = batch.rows[::samples] // samples
    drawn = context.reducer.gather(prompts)
    share = (int(drawn.max()) + 1) // rounds - int(drawn.min()) // rounds if len(drawn) else 0
    first = context.reducer.gather(prompts[useful]).sort().values[:share]
    return torch.isin(prompts, first).repeat_interleave(samples)
