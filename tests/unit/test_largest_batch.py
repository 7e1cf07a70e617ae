"""The largest batch of a plan: the most prompts a step that memory has room for."""

from __future__ import annotations

import pytest
from small_runs import plan_of

from flexrlhf.plan.largest_batch import largest_batch, with_prompts
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan

LINE = "  largest batch        "
MINI_BATCHES = "algorithm={name: ppo, prompts_per_step: 8, num_mini_batches: 4}"
PLACEMENTS = {"co-located": ([1, 1, 1, 1], 2), "six models, a lag": ([0.5] * 6, 2)}


def peak_with(plan: Plan, prompts: int) -> int:
    """Bytes on the fullest rank in a plan of its own for ``prompts``, with the columns of the newest batch."""
    larger = make_plan(with_prompts(plan.spec, prompts))
    kept = larger.num_steps_kept + 1
    ranks = larger.cluster.ranks
    return max(larger.memory_of(rank, larger.batch, larger.row_bytes(rank, kept)).peak_bytes for rank in ranks)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_no_larger_batch_fits(name: str) -> None:
    placement, devices = PLACEMENTS[name]
    lag = int("lag" in name)
    unlimited = plan_of(placement, devices, MINI_BATCHES, f"schedule.lag={lag}")
    assert largest_batch(unlimited) is None and LINE not in format_plan(unlimited)
    least, wished = peak_with(unlimited, 8), peak_with(unlimited, 2000)
    for size in (least, (least + wished) // 2, wished):
        plan = plan_of(placement, devices, MINI_BATCHES, f"schedule.lag={lag}", f"cluster.memory_gb={size / 1e9!r}")
        assert plan.schedule == unlimited.schedule, "nothing is offloaded"
        found, limit = largest_batch(plan), plan.device_bytes(0)
        assert found is not None and found.is_memory_filled and found.prompts % 4 == 0
        assert limit is not None and peak_with(plan, found.prompts) <= limit < peak_with(plan, found.prompts + 4)
        line = f"{LINE}{found.prompts:>8} = at most so many prompts a step at these settings, by memory"
        assert line in format_plan(plan)


def test_a_batch_is_limited_by_what_a_plan_takes_or_does_not_fit_at_all() -> None:
    large = plan_of(None, 2, "cluster={nodes: [{devices: 2, class: A100-80G}]}", "rollout.engine=transformers")
    assert f"{LINE} 1000000 = at most so many prompts a step at these settings, the limit of a plan" in format_plan(
        large
    )
    assert f"{LINE}       0 = none fits" in format_plan(plan_of(None, 2, "cluster.memory_gb=0.000001"))
