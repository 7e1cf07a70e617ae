"""The largest batch of a plan and its longest text: the most prompts a step, and tokens, that memory has room for."""

from __future__ import annotations

from typing import Any

import pytest
from small_runs import plan_of

from flexrlhf.config.spec import Spec
from flexrlhf.guideline.simulation.inputs import costs_for
from flexrlhf.guideline.simulation.simulate import simulate
from flexrlhf.guideline.simulation.simulation_text import format_simulation
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan

LINE = "  largest batch        "
MINI_BATCHES = "algorithm={name: ppo, prompts_per_step: 8, num_mini_batches: 4}"
PLACEMENTS = {"co-located": ([1, 1, 1, 1], 2), "six models, a lag": ([0.5] * 6, 2)}


TEXT = "  longest text         "
SETTINGS = ("activation_checkpointing", "offload_activations", "tiled_mlp")


def with_response(spec: Spec, tokens: int) -> Spec:
    return spec.model_copy(update={"data": spec.data.model_copy(update={"max_response_tokens": tokens})})


def peak_with(plan: Plan, prompts: int) -> int:
    return peak_of(plan.spec.with_prompts(prompts))


def peak_of(spec: Spec) -> int:
    """Bytes on the fullest rank in a plan of its own, with the columns of the newest batch."""
    larger = make_plan(spec)
    kept = larger.num_steps_kept + 1
    ranks = larger.cluster.ranks
    return max(larger.memory_of(rank, larger.batch, larger.row_bytes(rank, kept)).peak_bytes for rank in ranks)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_no_larger_batch_fits(name: str) -> None:
    placement, devices = PLACEMENTS[name]
    lag = int("lag" in name)
    unlimited = plan_of(placement, devices, MINI_BATCHES, f"schedule.lag={lag}")
    assert unlimited.limits.largest_batch() is None and LINE not in format_plan(unlimited)
    least, wished = peak_with(unlimited, 8), peak_with(unlimited, 2000)
    for size in (least, (least + wished) // 2, wished):
        plan = plan_of(placement, devices, MINI_BATCHES, f"schedule.lag={lag}", f"cluster.memory_gb={size / 1e9!r}")
        assert plan.schedule == unlimited.schedule, "nothing is offloaded"
        found, limit = plan.limits.largest_batch(), plan.device_bytes(0)
        assert found is not None and found.is_memory_filled and found.prompts % 4 == 0
        peaks = [peak_with(unlimited, found.prompts + more) for more in (0, 4)]
        assert limit is not None and peaks[0] <= limit < peaks[1]
        line = f"{LINE}{found.prompts:>8} = at most so many prompts a step at these settings, by memory"
        assert line in format_plan(plan)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_no_longer_text_fits(name: str) -> None:
    placement, devices = PLACEMENTS[name]

    def planned(*overrides: Any) -> Plan:
        return plan_of(placement, devices, MINI_BATCHES, f"schedule.lag={int('lag' in name)}", *overrides)

    unlimited = planned()
    assert unlimited.limits.longest_text() is None and TEXT not in format_plan(unlimited)
    least, wished = peak_of(unlimited.spec), peak_of(with_response(unlimited.spec, 3000))
    for size in (least, (least + wished) // 2):
        plan = planned(f"cluster.memory_gb={size / 1e9!r}")
        assert plan.schedule == unlimited.schedule, "nothing is offloaded"
        found, limit = plan.limits.longest_text(), plan.device_bytes(0)
        assert found is not None and found.limit == "by memory" and limit is not None
        peaks = [peak_of(with_response(unlimited.spec, found.response + more)) for more in (0, 1)]
        assert peaks[0] <= limit < peaks[1]
        prompt = plan.lengths.prompt
        line = f"{prompt} prompt + at most {found.response} response at these settings, by memory"
        assert f"{TEXT}{prompt + found.response:>8} = {line}" in format_plan(plan)


def test_settings_make_the_longest_text_longer_up_to_other_limits() -> None:
    """Inputs in host memory, MLPs in tiles; positions of the model; a cache that has no more pages."""
    memory = "cluster.memory_gb=0.02"
    sft = ("algorithm={name: sft}", "models.reward=null", "models.actor.init.num_hidden_layers=6", memory)
    texts = [
        plan_of(None, 1, *sft, *(f"models.actor.{name}=true" for name in SETTINGS[:number])).limits.longest_text()
        for number in range(4)
    ]
    tokens = [each.response for each in texts if each is not None]
    assert len(tokens) == 4 and tokens == sorted(set(tokens)) and tokens[-1] > 1.5 * tokens[0] > 0
    few = plan_of(None, 1, memory, "models.reward.init.max_position_embeddings=16")
    assert f"{TEXT}      16 = " in format_plan(few) and "at these settings, the positions of critic" in format_plan(few)
    cached = plan_of(None, 1, memory, "rollout={engine: vllm, kv_tokens: 64}")
    assert "at these settings, the cache of actor.rollout" in format_plan(cached)


def test_a_simulation_has_the_line_of_the_plan() -> None:
    plan = plan_of(None, 1, "cluster={nodes: [{devices: 1, class: A100-80G, memory_gb: 0.02}]}")
    (line,) = plan.limits.text_lines()
    printed = format_simulation(simulate(plan), costs_for(plan.spec, None))
    assert f"  {line}\n" in printed and f"  {line}\n" in format_plan(plan)


def test_a_batch_is_limited_by_what_a_plan_takes_or_does_not_fit_at_all() -> None:
    large = plan_of(None, 2, "cluster={nodes: [{devices: 2, class: A100-80G}]}", "rollout.engine=transformers")
    assert f"{LINE} 1000000 = at most so many prompts a step at these settings, the limit of a plan" in format_plan(
        large
    )
    nothing = format_plan(plan_of(None, 2, "cluster.memory_gb=0.000001"))
    assert f"{LINE}       0 = none fits" in nothing and f"{TEXT}       0 = none fits" in nothing
