"""Responses with their scores, for tests of the mathematics."""

from __future__ import annotations

import torch
from replicas import Alone, batch_of
from torch import Tensor

from flexrlhf.config.algorithms.policy import PolicySpec
from flexrlhf.engines.base import Batch
from flexrlhf.objectives.context import CombineContext, Reducer
from flexrlhf.objectives.kl_penalty import kl_penalty
from flexrlhf.objectives.reward_shaping import shape_rewards
from flexrlhf.trainer.controllers import first_state


def scored_batch(mask: Tensor, scores: list[float], finished: list[int] | None = None, **columns: Tensor) -> Batch:
    """Return responses with ``scores``, and zeros for all other outputs of models."""
    zeros = torch.zeros(mask.shape)
    return batch_of(
        **{
            "response_mask": mask,
            "scores": torch.tensor(scores),
            "finished": torch.tensor(finished or [1] * len(scores), dtype=torch.uint8),
            "logprobs": zeros,
            "ref_logprobs": zeros.clone(),
            "values": torch.zeros(mask.shape[0], mask.shape[1] + 1),
        }
        | columns
    )


def context_of(spec: PolicySpec, batch: Batch, reducer: Reducer | None = None, **state: float) -> CombineContext:
    """Return the context of one mini-batch, on one rank without ``reducer``; ``state``: changes to the first step's."""
    return CombineContext([slice(0, len(batch))], reducer or Alone(), first_state(spec) | state)


def rewards_of(spec: PolicySpec, batch: Batch, **state: float) -> Tensor:
    """Rewards (n, R) of the tokens, less the KL penalty."""
    context = context_of(spec, batch, **state)
    found = shape_rewards(spec, batch, context)
    return found.rewards - kl_penalty(spec, batch, found.mask, context.state)[0]


def ragged(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noise, and the mask of responses of 0 to 6 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 7, (rows,), generator=generator)
    mask = (torch.arange(6) < lengths[:, None]).to(torch.uint8)
    return torch.randn(rows, 6, generator=generator), mask
