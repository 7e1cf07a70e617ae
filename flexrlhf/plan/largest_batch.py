"""The largest batch of a placement: the most prompts a step that memory has room for, at the settings of its plan.

FlexRLHF compares placements by it (Fig. 9), and its guideline lets the batch grow until memory is full (section IV-C).
Rows of a step pass through a model in micro-batches, so what grows without end are their columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from flexrlhf.config.spec import MAX_ROWS, Spec
from flexrlhf.placement.layout import BatchShape
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.workload import first_alike


@dataclass(frozen=True)
class LargestBatch:
    """Most prompts of a step.

    prompts:           ``prompts_per_step``, a multiple of the mini-batches; 0: memory has room for none.
    is_memory_filled:  whether memory limits it, else the rows of a plan (``MAX_ROWS``).
    """

    prompts: int
    is_memory_filled: bool


def largest_batch(plan: Plan) -> LargestBatch | None:
    """Return the largest batch with the instructions and the cache of ``plan``; None for devices of unknown size.

    The columns of the newest batch count, which a plan leaves out. Not counted: idle models that a larger batch would
    move to host memory, or a smaller cache, as another plan may have.
    """
    alike = first_alike(plan.schedule.instructions, plan.placement, plan.batch, plan.cluster)
    ranks = sorted(set(alike.values()))
    sizes = {rank: size for rank in ranks if (size := plan.device_bytes(rank)) is not None}
    if len(sizes) < len(ranks):
        return None
    kept = plan.num_steps_kept + 1 + any(operator.turns for operator in plan.graph.operators)
    own, unit = plan.spec.algorithm.prompts_per_step, plan.spec.algorithm.num_mini_batches
    of_prompt = {rank: Fraction(plan.row_bytes(rank, kept), own) for rank in ranks}

    def lacking(prompts: int) -> dict[int, int]:
        batch = BatchShape.of(with_prompts(plan.spec, prompts))
        peaks = {rank: plan.memory_of(rank, batch, int(prompts * of_prompt[rank])).peak_bytes for rank in ranks}
        return {rank: peaks[rank] - sizes[rank] for rank in ranks if peaks[rank] > sizes[rank]}

    most = own * MAX_ROWS // plan.batch.num_rows // unit * unit
    short = lacking(most)
    if not short:
        return LargestBatch(most, is_memory_filled=False)
    # a batch of so many prompts fits; if passes are then as large as those of the larger one, it is the largest
    room = min((most - lack / of_prompt[rank] if of_prompt[rank] else 0) for rank, lack in short.items())
    low, high = max(0, int(room) // unit), most // unit
    if lacking((low + 1) * unit):
        high = low + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if lacking(middle * unit) else (middle, high)
    return LargestBatch(low * unit, is_memory_filled=True)


def with_prompts(spec: Spec, prompts: int) -> Spec:
    """Return ``spec`` with so many prompts a step."""
    algorithm = spec.algorithm.model_copy(update={"prompts_per_step": prompts})
    return spec.model_copy(update={"algorithm": algorithm})
