"""Process supervision: scores of steps, compared over the responses to a prompt.

Shapes: n rows of this rank, R response positions; g = n / samples_per_prompt groups of s responses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexrlhf.config.algorithms import GroupSpec
from flexrlhf.engines.base import Batch, Moments, moments
from flexrlhf.objectives.reward_shaping import ShapedRewards, last_positions

EPSILON = 1e-6
"""Added to the deviation of a group, as in verl."""


@dataclass(frozen=True)
class StepRewards:
    """Rewards of steps, on the tokens that end them.

    rewards: (n, R), 0 elsewhere.
    ends:    bool (n, R), tokens that end a step of a response that counts.
    """

    rewards: Tensor
    ends: Tensor


def process_advantages(spec: GroupSpec, batch: Batch, shaped: ShapedRewards) -> tuple[Tensor, Moments]:
    """Return advantages (n, R): for each token the normalised rewards of the steps that end at it or later.

    Rewards of steps are normalised over all steps of the group (GRPO, Shao et al. 2024, section 4.1.3).
    """
    steps = step_rewards(batch, shaped)
    normalised = _normalised(steps, batch.samples_per_prompt, spec.scale == "group")
    advantages = normalised.flip(1).cumsum(1).flip(1) * shaped.mask
    return advantages, {"response_steps": moments(steps.ends.sum(1).float(), shaped.counts)}


def step_rewards(batch: Batch, shaped: ShapedRewards) -> StepRewards:
    """Return the rewards of steps; what the shaping of scores has put on other tokens is part of the last step.

    A response without steps is one step.
    """
    mask = shaped.mask.bool()
    ends = batch["step_ends"].bool() & mask
    last = torch.where(ends.any(1), last_positions(ends), last_positions(mask))[:, None]
    ends = ends.scatter(1, last, mask.gather(1, last))
    others = shaped.rewards.masked_fill(ends, 0.0).sum(1, keepdim=True)
    rewards = shaped.rewards.masked_fill(~ends, 0.0)
    return StepRewards(rewards.scatter_add(1, last, others * mask.gather(1, last)), ends)


def _normalised(steps: StepRewards, samples: int, by_deviation: bool) -> Tensor:
    """Return rewards (n, R) less the mean of their group's steps, over their deviation (Bessel's correction)."""
    shape = steps.rewards.shape
    rewards, ends = steps.rewards.view(-1, samples * shape[1]), steps.ends.view(-1, samples * shape[1])
    number = ends.sum(1, keepdim=True)
    centred = (rewards - rewards.sum(1, keepdim=True) / number.clamp(min=1)) * ends
    highest = rewards.masked_fill(~ends, -torch.inf).amax(1, keepdim=True)
    lowest = rewards.masked_fill(~ends, torch.inf).amin(1, keepdim=True)
    # equal rewards have a deviation of exactly 0, not a rounding error
    centred = torch.where(highest <= lowest, 0.0, centred)
    if by_deviation:
        centred = centred / (((centred**2).sum(1, keepdim=True) / (number - 1).clamp(min=1)).sqrt() + EPSILON)
    return centred.view(shape)
