"""Sizes of a rollout engine's cache that follow from the memory which a plan leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexrlhf.config.spec_file import load_spec
from flexrlhf.errors import UserError
from flexrlhf.plan.cache_size import FILLED
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.suggestions import check_fits

TEXT = """
name: sized
algorithm: {name: grpo, prompts_per_step: 64, samples_per_prompt: 16, num_mini_batches: 4, kl: null}
models: {actor: {init: qwen2.5-7b, zero: 3, activation_checkpointing: true}}
reward: {rule: gsm8k}
data: {path: prompts.jsonl, max_prompt_tokens: 1024, max_response_tokens: 8192}
cluster: {nodes: [{devices: 8, class: H100-80G}]}
rollout: {engine: vllm, tp: 2}
"""
ROW = 1024 + 8192


def plan_of(directory: Path, *overrides: str) -> Plan:
    (directory / "a.yaml").write_text(TEXT)
    return make_plan(load_spec(directory / "a.yaml", overrides))


def tokens_of(plan: Plan) -> int:
    return plan.placement["actor.rollout"].settings.generate_tokens


def test_a_cache_takes_the_memory_that_is_left(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    fullest = max(plan.memories, key=lambda memory: memory.peak_bytes)
    size = plan.device_bytes(fullest.rank)
    assert size is not None and 0.98 * FILLED * size < fullest.peak_bytes <= FILLED * size
    assert fullest.peak is not None and fullest.peak.label == "generate on actor.rollout"
    # of an engine that sleeps, so that training has the memory
    assert tokens_of(plan) > 100 * ROW
    assert tokens_of(plan_of(tmp_path, "cluster={nodes: [{devices: 8, class: A100-40G}]}")) < tokens_of(plan) / 2


@pytest.mark.parametrize("overrides", [(), ("rollout.sleep=false",), ("placement=[0.5, 0.5]", "schedule.lag=1")])
def test_the_size_changes_no_schedule(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    plan = plan_of(tmp_path, *overrides)
    for tokens in (tokens_of(plan), ROW):
        written = plan_of(tmp_path, *overrides, f"rollout.kv_tokens={tokens}")
        assert tokens_of(written) == tokens
        assert (written.schedule, written.offloaded) == (plan.schedule, plan.offloaded)
        assert written.memories == plan.memories or tokens == ROW


def test_a_cache_has_at_most_all_rows_of_a_step(tmp_path: Path) -> None:
    few = ("algorithm.prompts_per_step=8", "algorithm.samples_per_prompt=4", "algorithm.num_mini_batches=1")
    assert tokens_of(plan_of(tmp_path, *few)) == 8 * ROW
    small = plan_of(tmp_path, "models.actor.generate_tokens=20000")
    assert tokens_of(small) == 20000


def test_a_small_cache_is_found_where_the_usual_one_does_not_fit(tmp_path: Path) -> None:
    """The weights of 14B parameters leave room for fewer tokens than 65,536, whatever is offloaded."""
    overrides = (
        "cluster={nodes: [{devices: 8, class: A100-80G, memory_gb: 40}]}",
        "models.actor={init: qwen2.5-14b, zero: 3, lora: {rank: 8}, activation_checkpointing: true}",
        "rollout={engine: vllm, tp: 1}",
    )
    plan = plan_of(tmp_path, *overrides)
    assert ROW <= tokens_of(plan) < 65536
    check_fits(plan)
    with pytest.raises(UserError, match="memory"):
        check_fits(plan_of(tmp_path, *overrides, "rollout.kv_tokens=65536"))


def test_a_sync_comes_before_the_cache(tmp_path: Path) -> None:
    """The trained weights and gradients are there as well, so that a cache next to them would be smaller."""
    plan = plan_of(tmp_path)
    phases = {phase.label: phase.states for phase in plan.memory(0).phases}
    cache = plan.sizing.kv_bytes(plan.placement["actor.rollout"])
    assert phases["sync to actor.rollout"] + cache == phases["generate on actor.rollout"]


def test_a_phase_that_only_a_larger_cache_has_limits_it(tmp_path: Path) -> None:
    """Models wait in host memory next to it, and are loaded in turn."""
    plan = plan_of(
        tmp_path,
        "models.actor={init: qwen3-32b, engine: megatron, tp: 4, pp: 4, micro_batch_tokens: 4096}",
        "algorithm={name: grpo, prompts_per_step: 64, samples_per_prompt: 32, num_mini_batches: 4}",
        "data.max_response_tokens=3072",
        "cluster={nodes: [{count: 4, devices: 8, class: H100-80G}]}",
        "rollout.tp=4",
    )
    assert tokens_of(plan) % plan.placement["actor.rollout"].facts.cache_block == 0 < tokens_of(plan)


def asleep(plan: Plan) -> int:
    """Bytes of models on the device while the actor trains."""
    phase = next(phase for phase in plan.memory(0).phases if phase.label == "train on actor")
    return phase.states


def test_graphs_and_buffers_of_an_engine_are_planned_on_gpus(tmp_path: Path) -> None:
    """Graphs leave the device with the weights, unless vLLM keeps them; buffers of its ``tp`` stay, and communicators
    are of the whole run."""
    few = ("rollout.kv_tokens=1536000",)
    plan = plan_of(tmp_path, *few)
    engine = plan.placement["actor.rollout"]
    state = plan.state(engine, 0)
    assert state is not None and plan.sizing.texts.rows_decoded(engine, None) == 1000
    assert state.graphs == (51 + 51) * 28 * 300_000
    assert (state.buffers, state.freed) == (300_000_000, state.weights + state.cache + state.graphs)
    kept = plan_of(tmp_path, *few, "rollout.config={sleep_mode_offload_cudagraph: false}")
    eager = plan_of(tmp_path, *few, "rollout.cuda_graphs=false")
    assert asleep(kept) - asleep(plan) == state.graphs and asleep(eager) == asleep(plan)
    assert plan.memory(0).loaded_host_bytes - eager.memory(0).loaded_host_bytes == state.graphs
    assert plan.memory(0).phases[0].total - eager.memory(0).phases[0].total == state.graphs
    apart = ("placement=[0.5, 0.5]", "schedule.lag=1")
    awake = [plan_of(tmp_path, *apart, f"rollout.cuda_graphs={value}") for value in ("true", "false")]
    rank = awake[0].placement["actor.rollout"].ranks[0]
    assert awake[0].memory(rank).loaded_host_bytes == awake[1].memory(rank).loaded_host_bytes
    one = plan_of(tmp_path, *few, "rollout.tp=1")
    assert plan.most_communicators == 1 + max(map(plan.communicators_of_groups, range(8)))
    assert one.most_communicators == max(map(one.communicators_of_groups, range(8)))
    unknown = plan_of(tmp_path, *few, "cluster={devices: 8, memory_gb: 70}")
    bare = unknown.state(unknown.placement["actor.rollout"], 0)
    assert bare is not None and bare.graphs == bare.buffers == 0
