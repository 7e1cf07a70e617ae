"""Sampling settings of a run's responses, and of its evaluations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from flexrlhf.config.algorithms.base import SampledSpec
from flexrlhf.engines.base import Sampling
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.run_data import RunData

EVALUATION_STEP = -1
"""Step that the sampling noise of evaluations is a function of; training has no such step."""


def step_sampling(plan: Plan, data: RunData, decode: Callable[[Sequence[int]], str]) -> Sampling:
    """Return how responses are sampled in step 0; other steps differ in ``step`` alone.

    ``decode``: tokens to text, without special tokens.
    """
    algorithm = plan.spec.algorithm
    sampling = Sampling(plan.spec.seed, 0, plan.temperature, data.eos_token_ids, data.pad_token_id, decode=decode)
    if not isinstance(algorithm, SampledSpec):
        return sampling
    return replace(
        sampling,
        top_p=algorithm.top_p,
        top_k=algorithm.top_k,
        min_tokens=algorithm.min_response_tokens,
        stop=algorithm.stop,
    )


def evaluation_sampling(plan: Plan, sampling: Sampling) -> Sampling:
    """Return how evaluations sample: as training does, at ``eval.temperature`` where it is given."""
    settings = plan.spec.eval
    if settings is not None and settings.temperature is not None:
        sampling = replace(sampling, temperature=settings.temperature)
    return replace(sampling, step=EVALUATION_STEP)
