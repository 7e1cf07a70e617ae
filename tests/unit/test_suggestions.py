"""Suggestions: each reduces the planned peak by the bytes that it states; runs that cannot fit are refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest
from small_runs import plan_of

from flexrlhf.errors import UserError
from flexrlhf.plan.algorithm_graph import make_graph
from flexrlhf.plan.changes import SettingChange
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.plan.suggestions import MemorySuggestion, check_fits, memory_suggestions, replanned
from flexrlhf.strategies.instructions import Offload

ACTOR = (
    "{model_type: llama, hidden_size: 2048, intermediate_size: 5504, num_hidden_layers: 16, num_attention_heads: 16}"
)
LARGE = (
    f"models.actor.init={ACTOR}",
    "models.reward.init={model_type: llama, hidden_size: 1024, intermediate_size: 2752, num_hidden_layers: 8, "
    "num_attention_heads: 16}",
    "algorithm.prompts_per_step=256",
    "data.max_prompt_tokens=256",
    "data.max_response_tokens=256",
)
DEEPSPEED = ("models.actor.engine=deepspeed", "models.actor.zero=2", "models.critic.engine=deepspeed")


MEGATRON = ("rollout.engine=vllm", "models.actor.engine=megatron", "models.critic.engine=megatron")


def large(placement: Any = None, devices: int = 4, *overrides: str) -> Plan:
    return plan_of(placement, devices, *LARGE, *overrides)


def test_a_change_sets_a_value_or_leaves_it_open() -> None:
    spec = large(None, 4, "models.actor.zero=2", "schedule.num_chunks=1").spec
    changes = {"models.actor.zero": ..., "models.actor.shadow.tp": 2, "data.max_response_tokens": 128}
    changed = spec.with_settings(changes)
    assert changed.models.actor is not None and changed.models.actor.shadow is not None
    assert "zero" not in changed.models.actor.model_fields_set and changed.models.actor.shadow.tp == 2
    assert (changed.data.max_response_tokens, changed.models.critic) == (128, spec.models.critic)


def settings_of(found: list[MemorySuggestion]) -> set[str]:
    return {suggestion.change.partition("=")[0] for suggestion in found}


@pytest.mark.parametrize(
    ("placement", "overrides"),
    [
        (None, ()),
        (None, DEEPSPEED),
        ([1, 1, 0.5, 0.5], ("models.actor.zero=3", "models.actor.dtype=bfloat16")),
        ([0.5] * 6, ("sync.overlap=true",)),
        ([0.5] * 6, ("models.actor.shadow={zero: 3, dtype: bfloat16}",)),
        ([0.5] * 6, ("rollout.engine=vllm", "rollout.tp=2")),
        (None, ("rollout={engine: vllm, sleep: false}", "cluster.memory_gb=1000")),
        (None, MEGATRON),
    ],
    ids=["replicas", "deepspeed", "interleaving", "disaggregated", "shadow", "rollout", "rollout-beside", "megatron"],
)
def test_a_suggestion_lowers_the_peak_by_its_bytes(placement: Any, overrides: tuple[str, ...]) -> None:
    plan = large(placement, 4, *overrides)
    for rank in (0, 3):
        found = memory_suggestions(plan, rank)
        assert found
        for suggestion in found:
            changed = large(placement, 4, *overrides, *re.split(" (?=models|rollout)", suggestion.change))
            freed = plan.memory(rank).peak_bytes - changed.memory(rank).peak_bytes
            # with adapters the actor becomes its own reference, which frees more
            assert freed >= suggestion.freed > 0 and ("actor.lora" in suggestion.change or freed == suggestion.freed)


def test_suggestions_are_in_order_and_state_whether_results_change() -> None:
    found = memory_suggestions(large(), 0)
    assert found == sorted(found, key=lambda suggestion: (not suggestion.same_numbers, -suggestion.freed))
    for suggestion in found:
        assert suggestion.same_numbers == (".lora=" not in suggestion.change and ".dtype=" not in suggestion.change)


def test_context_parallel_ranks_are_suggested_for_long_rows() -> None:
    plan = large(None, 4, "data.max_response_tokens=8192")
    found = {suggestion.change: suggestion.freed for suggestion in memory_suggestions(plan, 0)}
    shared = large(None, 4, "data.max_response_tokens=8192", "models.actor.cp=2")
    assert found["models.actor.cp=2"] == plan.memory(0).peak_bytes - shared.memory(0).peak_bytes > 0
    assert "models.actor.cp" not in settings_of(memory_suggestions(large(), 0))


def test_expert_parallel_ranks_are_suggested_for_models_with_experts() -> None:
    experts = "{model_type: mixtral, hidden_size: 512, intermediate_size: 1024, num_hidden_layers: 4, "
    init = f"models.actor.init={experts}num_attention_heads: 8, num_key_value_heads: 8, num_local_experts: 8}}"
    plan = large(None, 4, init)
    found = {suggestion.change: suggestion for suggestion in memory_suggestions(plan, 0)}
    shared = large(None, 4, init, "models.actor.ep=4")
    assert found["models.actor.ep=4"].freed == plan.memory(0).peak_bytes - shared.memory(0).peak_bytes > 0
    assert found["models.actor.ep=4"].same_numbers
    assert "models.actor.ep" not in settings_of(memory_suggestions(large(), 0))


def test_only_settings_of_the_engine_are_suggested() -> None:
    torch, deepspeed = (
        settings_of(memory_suggestions(large(), 0)),
        settings_of(memory_suggestions(large(None, 4, *DEEPSPEED), 0)),
    )
    assert "models.actor.offload_optimizer" in deepspeed
    assert not any("offload" in setting for setting in torch)
    assert "models.actor.tp" in torch & deepspeed
    stages = [
        suggestion.change
        for suggestion in memory_suggestions(large(), 0)
        if suggestion.change.startswith("models.actor.zero")
    ]
    assert stages and all("=1" not in stage for stage in stages)


def test_stages_are_offered_to_megatron_alone() -> None:
    found = settings_of(memory_suggestions(large(None, 4, *MEGATRON), 0))
    assert {"models.actor.pp", "models.critic.pp"} <= found
    assert not any(setting.endswith(".pp") for setting in settings_of(memory_suggestions(large(), 0)))
    assert not {"models.ref.pp", "rollout.pp"} & found


def test_only_types_of_the_device_are_suggested() -> None:
    old = large(None, 4, "cluster={nodes: [{devices: 4, class: V100-32G}]}")
    changes = " ".join(suggestion.change for suggestion in memory_suggestions(old, 0))
    assert "float16" in changes and "bfloat16" not in changes


def test_models_that_need_alike_are_changed_together() -> None:
    """Of equal models a change of one alone hands the peak to the other."""
    plan = large(None, 2, f"models.reward.init={ACTOR}")
    found = {suggestion.change: suggestion.freed for suggestion in memory_suggestions(plan, 0)}
    both = "models.actor.activation_checkpointing=true models.critic.activation_checkpointing=true"
    assert found[both] > found.get("models.actor.activation_checkpointing=true", 0)


def test_changes_are_tried_once_for_all_reports_of_a_plan() -> None:
    plan = large(None, 2)
    first = memory_suggestions(plan, 0)
    assert first and len(plan.tried_peaks) >= len(first)
    plan.tried_peaks.update({key: peak and peak - 10**6 for key, peak in plan.tried_peaks.items()})
    again = {each.change: each.freed for each in memory_suggestions(plan, 0)}
    assert all(again[each.change] == each.freed + 10**6 for each in first)


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [(("cluster.memory_gb=24",), {0, 1}), (("cluster.memory_gb=16", "rollout.engine=vllm"), {0, 1, 2, 3})],
    ids=["fits", "cache-without-room"],
)
def test_a_trial_evicts_models_of_its_rank_alone(overrides: tuple[str, ...], ranks: set[int]) -> None:
    plan = large([1, 1, 0.5, 0.5], 4, *overrides)
    graph, change = make_graph(plan.spec), (SettingChange("models.actor.activation_checkpointing", True),)
    whole = replanned(plan, graph, change)
    for rank in range(4):
        alone = replanned(plan, graph, change, rank)
        evicted = [
            {each for item in made.schedule.instructions if isinstance(item, Offload) for each in item.ranks}
            for made in (alone, whole)
        ]
        assert evicted == [{rank} & ranks, ranks]
        assert alone.memory(rank).peak_bytes == whole.memory(rank).peak_bytes


def test_128_alike_ranks_are_sized_once() -> None:
    plan = large([1, 1, 0.5, 0.5], 128)
    # each half, and the rank that writes files
    assert len({id(memory.states) for memory in plan.memories}) == 3


def test_the_tightest_rank_lacks_most() -> None:
    plan = large([0.5] * 6, 4)
    assert plan.tightest_rank in plan.placement["actor"].ranks
    nodes = "cluster={nodes: [{devices: 2, memory_gb: 1000}, {devices: 2, memory_gb: 1}]}"
    assert large([0.5] * 6, 4, nodes).tightest_rank in plan.placement["actor.shadow"].ranks


# --- runs that cannot fit


def test_a_run_that_fits_or_whose_devices_are_unknown_passes() -> None:
    check_fits(large())
    check_fits(large(None, 4, "cluster.memory_gb=1000"))


def test_a_run_that_cannot_fit_is_refused_with_the_best_remedy() -> None:
    plan = large(None, 4, "cluster={nodes: [{devices: 4, class: V100-16G}]}")
    with pytest.raises(UserError) as caught:
        check_fits(plan)
    message = str(caught.value)
    assert "\n" not in message
    best = memory_suggestions(plan, 0)[0]
    for words in ("rank 0", "V100-16G", "has 13.9 GB", "for train on actor", f"{best.change} frees"):
        assert words in message, message


QWEN = ("models.actor={init: qwen2.5-7b}", "cluster={nodes: [{devices: 8, class: A100-80G}]}")


def test_two_changes_together_are_named_where_none_suffices() -> None:
    """Supervised training of 7B on eight devices: changes that leave learning as it is, and then fit."""
    settings = ("algorithm.name=sft", "models.ref=null", "models.critic=null", "models.reward=null")
    plan = large(None, 8, *settings, *QWEN, "data.max_response_tokens=4096")
    with pytest.raises(UserError, match="which suffices$") as caught:
        check_fits(plan)
    best = memory_suggestions(plan, 0)[0]
    assert best.suffices and best.same_numbers and len(best.change.split()) > 1
    assert best.change in str(caught.value)
    check_fits(large(None, 8, *settings, *QWEN, "data.max_response_tokens=4096", *best.change.split()))


# --- the printed plan


def table(plan: Plan) -> list[str]:
    """The section of the plan, without its title."""
    text = format_plan(plan)
    return text[text.index("memory per rank") :].split("\n\n")[0].splitlines()[1:]


def test_six_models_fit_the_page() -> None:
    lines = table(large([0.5] * 6, 4, "cluster.memory_gb=24", "sync.overlap=true"))
    assert max(map(len, lines)) <= 100
    assert [line.strip() for line in lines if line.strip().startswith("rank")] == [
        line.strip() for line in lines if ": at most" in line
    ]
    assert sum("host memory" in line for line in lines) == 2
    assert any(line.strip().startswith("to free memory on rank") for line in lines)


def test_equal_ranks_are_printed_once() -> None:
    lines = table(large(None, 4))
    assert [line for line in lines if line.startswith("  rank")] == [lines[0]]
    assert lines[0].startswith("  ranks 0-3: at most ")


def test_a_small_run_gets_no_advice() -> None:
    assert not any("to free memory" in line for line in table(plan_of(None, 2)))


def test_unknown_architectures_and_idle_ranks_are_printed() -> None:
    plan = plan_of(
        {name: {"ranks": [0]} for name in ("actor", "critic", "ref", "reward")},
        2,
        "models.reward.init={model_type: gpt2}",
    )
    lines = table(plan)
    assert ": at least " in lines[0]
    assert any("? B activations" in line for line in lines)
    assert lines[-1] == "  rank 1: nothing"
