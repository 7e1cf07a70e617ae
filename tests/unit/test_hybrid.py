"""The hybrid engine in a plan: a copy of the actor on its own ranks, in another layout, which lives to generate."""

from __future__ import annotations

from fractions import Fraction

import pytest
from small_runs import TINY, plan_of

from benchmarks.resharding_volumes import DEGREES, stored_twice
from flexrlhf.config.axes import ParallelDims
from flexrlhf.config.engines import EngineFacts
from flexrlhf.guideline.advice.advise import advise
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.simulation.calls import engine_of, reads_prompts_once
from flexrlhf.guideline.simulation.inputs import longest_lengths
from flexrlhf.guideline.simulation.pricing import Pricer
from flexrlhf.memory.budget import Phase
from flexrlhf.placement.layout import Layout, generation_layout, received_share
from flexrlhf.plan.placement_text import placement_lines
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Offload, Release, Reload, Run, Sync
from flexrlhf.weights.parameters import count_elements

HYBRID, TP = "rollout.engine=torch", "rollout.tp=2"
ZERO = ("models.actor.engine=deepspeed", "models.actor.zero=3")
LORA = "models.actor.lora={rank: 2}"
EIGHT = {**TINY, "num_attention_heads": 8, "hidden_size": 32}
"""A model whose heads are divided by 8."""


def phase(plan: Plan, label: str, rank: int = 0) -> Phase:
    return next(each for each in plan.memory(rank).phases if each.label == label)


def of_rollout(plan: Plan) -> list[str]:
    """Instructions that use the copy, in order."""
    mine = [each for each in plan.schedule.for_rank(0) if "actor.rollout" in each.label]
    return [type(each).__name__ for each in mine if isinstance(each, Offload | Release | Reload | Run | Sync)]


@pytest.mark.parametrize("overrides", [ZERO, ("models.actor.tp=2",), ("models.actor.zero=3",), ()])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_copy_generates_on_the_ranks_that_train_in_a_layout_of_its_own(overrides: tuple[str, ...], tp: int) -> None:
    plan = plan_of(None, 4, HYBRID, f"rollout.tp={tp}", *overrides)
    copy, actor = plan.placement["actor.rollout"], plan.placement["actor"]
    assert set(copy.ranks) == set(actor.ranks) and (copy.layout.dims.tp, copy.engine, copy.settings.zero) == (
        tp,
        "torch",
        0,
    )
    models = {each.operator.name: each.model for each in plan.schedule.instructions if isinstance(each, Run)}
    assert models["generate"] == "actor.rollout" and models["train_actor"] == models["logprobs"] == "actor"
    assert of_rollout(plan) == ["Sync", "Run", "Release"]


@pytest.mark.parametrize(("trained", "generating"), [(8, 2), (8, 4), (4, 2), (2, 1), (8, 8)])
def test_a_sync_sends_what_hybridflow_sends(trained: int, generating: int) -> None:
    """(t - t_g) / (t_g t) of what is split over ranks; norms and the embedding are on every rank already."""
    overrides = (f"models.actor.init={EIGHT}", f"models.actor.tp={trained}", f"rollout.tp={generating}")
    plan = plan_of(None, 8, HYBRID, *overrides)
    sync = next(each for each in plan.schedule.instructions if isinstance(each, Sync))
    layout, shape = plan.placement["actor"].layout, plan.shapes["actor"]
    whole = [each for each in shape.parameters if len(each[1]) == 1 or each[0] == "model.embed_tokens.weight"]
    split = 4 * (shape.num_parameters - count_elements(tuple(whole)))
    share = received_share(layout, ParallelDims(generating))
    assert share == Fraction(trained - generating, trained * generating)
    assert plan.traffic.sync_bytes(sync) == 8 * share * split
    assert sync.is_in_place == (trained == generating)


@pytest.mark.parametrize("degrees", DEGREES)
def test_weights_in_common_are_stored_once(degrees: tuple[int, int, int, int, int]) -> None:
    """HybridFlow's table 2: no redundancy after training by torch, or in stages by Megatron; vLLM, which generates in
    stages, has memory of its own."""
    p, t, d, p_g, t_g = degrees
    training = Layout(tuple(range(p * t * d)), ParallelDims(t, p))
    generation = generation_layout(training, ParallelDims(t_g, p_g))
    twice = Fraction(1, t * p)
    assert stored_twice(training, generation, is_once=True) == (twice if p_g > 1 else 0)
    assert stored_twice(training, generation, is_once=False) == twice


def test_the_plan_says_why_weights_are_stored_twice() -> None:
    def of_copy(*overrides: str) -> str:
        lines = placement_lines(plan_of(None, 4, HYBRID, TP, *overrides))
        return lines[[line.startswith("actor.rollout") for line in lines].index(True) + 1].strip()

    assert of_copy("models.actor.tp=2") == "views of the weights of actor"
    assert of_copy() == "views of the weights of actor"
    common = "next to the weights of actor: "
    assert of_copy(*ZERO) == f"{common}deepspeed shards actor as flat ranges"
    bfloat16 = "models.actor.dtype=bfloat16"
    assert of_copy("models.actor.zero=3", bfloat16) == (
        f"{common}actor is stored in float32, and it computes in bfloat16"
    )
    assert of_copy(bfloat16, "rollout.dtype=float32") == (
        f"{common}actor is stored in bfloat16, and it computes in float32"
    )
    assert of_copy("sync.dtype=bfloat16") == f"{common}sync.dtype rounds its weights to bfloat16"
    assert of_copy("rollout.sleep=false") == f"{common}its weights stay between its calls"


def test_the_copy_has_memory_only_while_it_generates() -> None:
    """Nothing of it is in host memory meanwhile, where vLLM's weights would be."""
    plan = plan_of(None, 4, HYBRID, TP, *ZERO)
    state = plan.state(plan.placement["actor.rollout"], 0)
    assert state is not None and state.weights == state.freed > 0 and state.offloaded == state.cache == 0
    trains, generates = phase(plan, "train on actor"), phase(plan, "generate on actor.rollout")
    without = plan_of(None, 4, *ZERO)
    assert trains.total == phase(without, "train on actor").total and trains.host == 0
    others = sum(each.resting for name, each in plan.memory(0).states.items() if each and name != "actor.rollout")
    assert generates.states == others + state.weights and "KV cache" in generates.parts
    awake = plan_of(None, 4, HYBRID, TP, "rollout.sleep=false", *ZERO)
    assert phase(awake, "train on actor").total == trains.total + state.weights


def test_generation_on_slices_needs_no_gathered_weights() -> None:
    hybrid, gathering = plan_of(None, 4, HYBRID, TP, *ZERO), plan_of(None, 4, *ZERO)
    assert phase(gathering, "generate on actor").parts["gathered"]
    assert not phase(hybrid, "generate on actor.rollout").parts["gathered"]


def test_weights_that_adapters_do_not_change_are_kept_in_host_memory() -> None:
    """The Sync sends only what training changes."""
    plan = plan_of(None, 4, HYBRID, LORA)
    copy = plan.placement["actor.rollout"]
    state = plan.state(copy, 0)
    assert not copy.is_transient and state is not None and state.offloaded == state.weights
    assert phase(plan, "train on actor").host == state.weights


@pytest.mark.parametrize("overrides", [(), ("schedule.num_chunks=4", "algorithm.num_mini_batches=4")])
@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_little_memory_never_evicts_it_between_its_weights_and_its_responses(
    share: float, overrides: tuple[str, ...]
) -> None:
    free = plan_of([1, 1, 0.5, 0.5], 4, HYBRID, *overrides)
    peak = max(free.memory(rank).peak_bytes for rank in range(4))
    plan = plan_of([1, 1, 0.5, 0.5], 4, HYBRID, *overrides, f"cluster.memory_gb={share * peak / 1e9}")
    used = of_rollout(plan)
    assert (used[0], set(used[1:-1]), used[-1]) == ("Sync", {"Run"}, "Release")
    assert share == 0.9 or any(
        isinstance(x, Offload) and x.model != "actor.rollout" for x in plan.schedule.instructions
    )


def test_kv_tokens_bound_the_rows_that_are_decoded_together() -> None:
    plan = plan_of(None, 2, HYBRID, "rollout.kv_tokens=24")
    assert plan.placement["actor.rollout"].settings.generate_tokens == 24
    all_rows = plan_of(None, 2, HYBRID)
    fewer, more = (phase(each, "generate on actor.rollout").parts["KV cache"] for each in (plan, all_rows))
    assert fewer is not None and more is not None and 2 * fewer == more


def test_the_copy_computes_as_the_actor_does() -> None:
    plan = plan_of(None, 2, HYBRID, "models.actor.attention=eager", "models.actor.share_prompts=false")
    copy = plan.placement["actor.rollout"]
    assert (copy.settings.attention, reads_prompts_once(copy)) == ("eager", False)
    assert EngineFacts.of(engine_of(copy)).transformers_modules


CUDA = "cluster={nodes: [{count: 1, devices: 4, class: A100-80G}]}"


def test_generation_without_gathers_is_priced_below_that_of_zero_3() -> None:
    """Where weights are large: every step of ZeRO-3 gathers all of them."""
    large = {**TINY, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 8, "num_attention_heads": 16}
    common = (CUDA, f"models.actor.init={large}", *ZERO)
    gathering, hybrid = plan_of(None, 4, "rollout.engine=transformers", *common), plan_of(None, 4, HYBRID, TP, *common)
    seconds = []
    for plan in (gathering, hybrid):
        pricer = Pricer(plan, AnalyticCosts(), longest_lengths(plan))
        mine = [each for each in plan.schedule.instructions if isinstance(each, Run | Sync)]
        names = ("generate", "weights actor")
        seconds.append(sum(pricer.price(each).seconds for each in mine if each.label.startswith(names)))
    assert seconds[1] < seconds[0]


def test_advice_generates_on_the_ranks_that_train() -> None:
    spec = plan_of(None, 4, HYBRID, CUDA).spec
    found = advise(spec, AnalyticCosts(), seconds_limit=20.0)
    assert found.feasible and all(
        "actor.rollout" in plan.placement and not plan.placement.shadows
        for plan in (candidate.plan for candidate in found.feasible)
    )


def test_families_that_vllm_lacks_generate() -> None:
    """At temperatures that vLLM would raise, too."""
    gpt2 = "models.actor.init={model_type: gpt2, vocab_size: 32, n_embd: 8, n_layer: 1, n_head: 2}"
    plan = plan_of(None, 2, HYBRID, gpt2, "algorithm.temperature=0.005")
    assert plan.placement["actor.rollout"].engine == "torch"
    assert of_rollout(plan) == ["Sync", "Run", "Release"]
