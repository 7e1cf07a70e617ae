"""Advantages of responses relative to others to the same prompt: GRPO, RLOO, RAFT.

Shapes: n rows of this rank, R response positions; g = n / samples_per_prompt groups of s responses, which are
neighbours on one rank. A response is one row, or an episode of k: groups compare episodes, and all sequences of one
have its advantage.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexrlhf.config.algorithms.grpo import GroupSpec, RaftSpec
from flexrlhf.engines.base import Batch, Moments, moments
from flexrlhf.engines.sampling import running_sums
from flexrlhf.metrics import Outcome
from flexrlhf.objectives.context import Columns, CombineContext, EarlierScores
from flexrlhf.objectives.kl_penalty import kl_penalty
from flexrlhf.objectives.reward_shaping import ROUNDING, ShapedRewards, last_positions, raw_scores, shape_rewards
from flexrlhf.operators.columns import Column

EPSILON = 1e-6
"""Added to the deviation of a group, as in verl."""


def group_advantages(spec: GroupSpec, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """Return loss_mask and advantages (n, R), one value for all tokens of a response, or one for each of its steps.

    It is the response's score, less the KL penalty if that is in the reward, over the baseline of its group, divided
    by the group's deviation with ``scale: group`` (GRPO, Shao et al. 2024, section 4.1.2; RLOO, Ahmadian et al.
    2024, eq. 9); with ``supervision: process`` see ``process_advantages``. A penalty with ``place: advantages`` differs
    from token to token: of those from it to the last. Raises RunStopped for scores that are not finite, with
    ``invalid_scores: stop``.
    """
    shaped = shape_rewards(spec, batch, context)
    penalty, kl = kl_penalty(spec, batch, shaped.mask, context.state)
    is_after = spec.kl is not None and spec.kl.place == "advantages"
    rewards, k = (shaped.rewards if is_after else shaped.rewards - penalty).double(), batch.sequences
    totals = _totals(rewards, torch.zeros_like(penalty) if is_after else penalty, batch)
    compared = _compare(spec, totals, shaped, batch, context.earlier)
    centred, alike = compared.centred, compared.alike
    if spec.scale == "group":
        centred = centred / (compared.deviation + EPSILON)
    mask, outcomes, statistics = shaped.mask, shaped.outcomes, {**shaped.statistics, **kl}
    if spec.truncation == "mask-loss":
        is_truncated = (batch.of_rows(batch.episodes["finished"]) == 0) & (outcomes == 0)
        mask = mask * (~is_truncated)[:, None].to(mask.dtype)
        outcomes = outcomes.masked_fill(is_truncated, Outcome.TRUNCATED.code)
    statistics["group_alike"] = moments(alike[::k].float(), shaped.counts[::k])
    if spec.dynamic_sampling is not None:
        selected = _selected(spec, batch, shaped, context)
        mask = mask * selected[:, None].to(mask.dtype)
        reasons = torch.where(alike, Outcome.ALIKE.code, Outcome.SURPLUS.code)
        # in a mean over responses a truncated one counts if its group does
        kept = shaped.outcomes if spec.counts_truncated else outcomes
        outcomes = outcomes.where(selected | (kept > 0), reasons.to(outcomes.dtype))
        statistics |= _taken(batch, selected)
    advantages, ended = centred[:, None] * mask, ended_scores(batch.of_rows(totals), shaped.counts, context)
    if is_after:
        # a token's choice has made the tokens after it possible, so their penalties count as well
        advantages = (centred[:, None] - _from_here_on(penalty)) * mask
    if spec.supervision == "process":
        of_steps, ended_steps, step_statistics = process_advantages(spec, batch, shaped, context.earlier)
        advantages, ended, statistics = of_steps * mask, ended | ended_steps, statistics | step_statistics
    advantages = advantages.float()
    statistics["advantage"] = moments(advantages, mask)
    return {"loss_mask": mask, "advantages": advantages, "outcome": outcomes, **ended}, statistics


def ended_scores(scores: Tensor, counts: Tensor, context: CombineContext) -> Columns:
    """Return the column of ``scores`` (n,), of the rows that count, for responses of their groups that end later."""
    if context.earlier is None:
        return {}
    return {Column.GROUP_SCORES: scores.float().masked_fill(~counts, torch.nan)}


class _Compared(NamedTuple):
    """Responses compared with their groups, (n,) each: scores less the baseline, deviation, whether all score alike."""

    centred: Tensor
    deviation: Tensor
    alike: Tensor


def _totals(rewards: Tensor, penalty: Tensor, batch: Batch) -> Tensor:
    """Return the sum (n / k,) of the ``rewards`` (n, R) of each episode's first sequence, which are less their penalty,
    less the ``penalty`` (n, R) of its further ones."""
    k = batch.sequences
    return rewards[::k].sum(1) - penalty.to(rewards.dtype).sum(1).view(-1, k)[:, 1:].sum(1)


def _compare(
    spec: GroupSpec, scores: Tensor, shaped: ShapedRewards, batch: Batch, earlier: EarlierScores | None
) -> _Compared:
    """Compare ``scores`` (n / k,) in groups, which ``earlier`` completes where they are not whole."""
    k = batch.sequences
    samples, counts = batch.samples_per_prompt // k, shaped.counts[::k]
    centred, deviation = centre_in_groups(scores, counts, samples, spec.baseline, earlier)
    if earlier is None:
        # by raw scores: a penalty, also one for length, would make responses differ that score alike
        alike = _score_alike(shaped.raw_scores[::k].view(-1, samples), counts.view(-1, samples))
        alike = alike.expand(-1, samples).reshape(-1)
    else:
        known = earlier.completed(Column.GROUP_SCORES, scores, counts)
        alike = _score_alike(known.nan_to_num(), ~known.isnan()).expand_as(known).flatten()[earlier.places]
    return _Compared(*map(batch.of_rows, (centred, deviation, alike)))


def best_of_group(spec: RaftSpec, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """Return loss_mask and advantages (n, R): 1 on the tokens of the best response of each group, 0 on all others.

    Of equally good ones the first (RAFT, Dong et al. 2023, section 3). Raises RunStopped for scores that are not
    finite, with ``invalid_scores: stop``.
    """
    shaped = shape_rewards(spec, batch, context)
    penalty, kl = kl_penalty(spec, batch, shaped.mask, context.state)
    totals = _totals(shaped.rewards - penalty, penalty, batch).masked_fill(
        ~shaped.counts[:: batch.sequences], -torch.inf
    )
    totals = totals.view(-1, batch.samples_per_prompt // batch.sequences)
    best = totals.argmax(1, keepdim=True)
    selected = batch.of_rows(torch.zeros_like(totals, dtype=torch.bool).scatter(1, best, True).flatten())
    mask = shaped.mask * selected[:, None].to(shaped.mask.dtype)
    outcomes = shaped.outcomes.masked_fill(shaped.counts & ~selected, Outcome.NOT_BEST.code)
    statistics = {**shaped.statistics, **kl, **_taken(batch, selected), "advantage": moments(mask, mask)}
    return {"loss_mask": mask, "advantages": mask.float(), "outcome": outcomes}, statistics


def _taken(batch: Batch, selected: Tensor) -> Moments:
    """Return the length of the responses that a choice has taken."""
    k = batch.sequences
    return {"taken_length": moments(batch["response_mask"][::k].float().sum(1), selected[::k])}


def centre_in_groups(
    scores: Tensor, counts: Tensor, samples: int, baseline: str, earlier: EarlierScores | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``scores`` (n,) less the baseline of their group, and the group's deviation (n,), Bessel's correction.

    Both are float64: in float32 the mean of equal large scores has an error of its own, which a division by a deviation
    of that size would make an advantage. Responses that do not count are left out of both and are 0; so is one that
    counts alone in its group.

    counts:   bool (n,), responses that count.
    samples:  responses of a group.
    baseline: "mean" of the group, or mean of the "others" (leave one out).
    earlier:  scores that complete the groups where they are not whole.
    """
    if earlier is not None:
        known = earlier.completed(Column.GROUP_SCORES, scores, counts)
        filled = known.nan_to_num().flatten(), ~known.isnan().flatten()
        centred, deviation = centre_in_groups(*filled, known.shape[1], baseline)
        return centred[earlier.places], deviation[earlier.places]
    grouped, weights = scores.double().view(-1, samples), counts.double().view(-1, samples)
    number = weights.sum(1, keepdim=True)
    centred = (grouped - (grouped * weights).sum(1, keepdim=True) / number.clamp(min=1)) * weights
    # equal scores have a deviation of exactly 0, and one at the mean has no sign, by which a ratio would be clipped
    centred = torch.where(centred.abs() <= _rounding(grouped, weights), 0.0, centred)
    deviation = ((centred**2).sum(1, keepdim=True) / (number - 1).clamp(min=1)).sqrt()
    if baseline == "others":
        # score - mean of the others = (score - mean of all) * n / (n - 1)
        centred = centred * number / (number - 1).clamp(min=1)
    return centred.reshape(-1), deviation.expand_as(grouped).reshape(-1)


def _score_alike(grouped: Tensor, weights: Tensor) -> Tensor:
    """Return bool (g, 1): whether all responses of a group that count have the same score, but for rounding.

    ``grouped``, ``weights`` (g, s): scores, and not 0 for those that count.
    """
    counted = weights.bool()
    highest = grouped.masked_fill(~counted, -torch.inf).amax(1, keepdim=True)
    lowest = grouped.masked_fill(~counted, torch.inf).amin(1, keepdim=True)
    return highest - lowest <= _rounding(grouped, weights)


def _rounding(grouped: Tensor, weights: Tensor) -> Tensor:
    """Return the difference (g, 1) that rounding may make between scores of a group, as ``_score_alike`` has them."""
    return ROUNDING * grouped.abs().masked_fill(~weights.bool(), 0.0).amax(1, keepdim=True)


def useful_groups(spec: GroupSpec, batch: Batch, context: CombineContext) -> Tensor:
    """Return bool (g,): whether the responses of a group that count have different raw scores."""
    episodes = batch.episodes
    scores, outcomes = raw_scores(spec, episodes, context)
    samples = episodes.samples_per_prompt
    return ~_score_alike(scores.view(-1, samples), (outcomes == 0).view(-1, samples)).squeeze(1)


def _selected(spec: GroupSpec, batch: Batch, shaped: ShapedRewards, context: CombineContext) -> Tensor:
    """Return bool (n,): whether the group of a response is one that its mini-batch trains on."""
    selected = torch.zeros_like(shaped.counts)
    for part in context.segments:
        scores, counts = shaped.raw_scores[part], shaped.counts[part]
        selected[part] = _selected_of_mini_batch(spec, batch.select(part), scores, counts, context)
    return selected


def _selected_of_mini_batch(
    spec: GroupSpec, batch: Batch, scores: Tensor, counts: Tensor, context: CombineContext
) -> Tensor:
    """Select the first groups with different scores, up to the mini-batch's share of those that a step trains on; all
    of them where no further attempt has made some of them surplus.

    This is DAPO's dynamic sampling (Yu et al. 2025, section 3.2). It is done for each mini-batch, so that none is left
    without rows while another has more than its share: as many groups as its first attempt has.
    """
    samples, k = batch.samples_per_prompt, batch.sequences
    useful = ~_score_alike(scores[::k].view(-1, samples // k), counts[::k].view(-1, samples // k)).squeeze(1)
    if not context.has_surplus:
        return useful.repeat_interleave(samples)
    prompts = batch.rows[::samples] // samples
    # in the order of the data: attempt by attempt
    order = (prompts % spec.attempts << 32) + prompts // spec.attempts
    share = int((context.reducer.gather(order) < 1 << 32).sum())
    first = context.reducer.gather(order[useful]).sort().values[:share]
    return torch.isin(order, first).repeat_interleave(samples)


def process_advantages(
    spec: GroupSpec, batch: Batch, shaped: ShapedRewards, earlier: EarlierScores | None
) -> tuple[Tensor, Columns, Moments]:
    """Return advantages (n, R): for each token the normalised rewards of the steps that end at it or later; and the
    column of the rewards of steps, for responses of their groups that end later.

    Rewards of steps are normalised over all steps of the group (GRPO, Shao et al. 2024, section 4.1.3), of its
    responses that have ended by now. ``earlier``: of these, if groups are not whole. Further sequences of an episode
    have the normalised rewards of all its steps.
    """
    k = batch.sequences
    (rewards, ends), counts = (each[::k] for each in _step_rewards(batch, shaped)), shaped.counts[::k]
    by_deviation, ended, statistics = spec.scale == "group", Columns(), moments(ends.sum(1).float(), counts)
    if earlier is None:
        normalised = _normalised(rewards, ends, batch.samples_per_prompt // k, by_deviation)
    else:
        own = rewards.float().masked_fill(~ends, torch.nan)
        ended[Column.GROUP_STEPS] = batch.of_rows(own)
        known = earlier.completed(Column.GROUP_STEPS, own, counts)
        filled, known_ends = known.nan_to_num().flatten(0, 1), ~known.isnan().flatten(0, 1)
        normalised = _normalised(filled, known_ends, known.shape[1], by_deviation)[earlier.places]
    advantages = batch.of_rows(_from_here_on(normalised))
    advantages = torch.where(batch.is_further[:, None], advantages[:, :1], advantages)
    return advantages * shaped.mask, ended, {"response_steps": statistics}


def _from_here_on(values: Tensor) -> Tensor:
    """Return the sum (n, R) of each value and the ones behind it."""
    with running_sums():
        return values.flip(1).cumsum(1).flip(1)


def _step_rewards(batch: Batch, shaped: ShapedRewards) -> tuple[Tensor, Tensor]:
    """Return the rewards (n, R) of steps on the tokens that end them, and bool (n, R): these tokens.

    The shaping of scores may reward other tokens; their rewards are part of the last step. A response without steps is
    one step, and one that does not count has none.
    """
    mask = shaped.mask.bool()
    ends = batch["step_ends"].bool() & mask
    last = torch.where(ends.any(1), last_positions(ends), last_positions(mask))[:, None]
    ends = ends.scatter(1, last, mask.gather(1, last))
    others = shaped.rewards.masked_fill(ends, 0.0).sum(1, keepdim=True)
    rewards = shaped.rewards.masked_fill(~ends, 0.0)
    return rewards.scatter_add(1, last, others * mask.gather(1, last)), ends


def _normalised(rewards: Tensor, ends: Tensor, samples: int, by_deviation: bool) -> Tensor:
    """Return rewards (n, R) less the mean of their group's steps, over their deviation (Bessel's correction)."""
    shape = rewards.shape
    rewards, ends = (each.reshape(-1, samples * shape[1]) for each in (rewards.double(), ends))
    number = ends.sum(1, keepdim=True)
    centred = (rewards - rewards.sum(1, keepdim=True) / number.clamp(min=1)) * ends
    centred = torch.where(centred.abs() <= _rounding(rewards, ends), 0.0, centred)
    if by_deviation:
        centred = centred / (((centred**2).sum(1, keepdim=True) / (number - 1).clamp(min=1)).sqrt() + EPSILON)
    return centred.view(shape)
