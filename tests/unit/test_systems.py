"""How systems of the field run a step: what FlexRLHF's paper found must follow, with nothing keyed to it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.systems.calls import SystemCall, call_of, call_seconds, transition_seconds
from benchmarks.systems.engines import COSTS, TABLES
from benchmarks.systems.footprint import (
    FLOAT_SHARDS,
    MIXED,
    SCORE_BYTES,
    capacity_bytes,
    frozen_bytes,
    pass_bytes,
    rows_that_fit,
    selected_numbers,
    trained_bytes,
)
from benchmarks.systems.meshes import mesh_of, state_bytes
from benchmarks.systems.profiles import SYSTEMS, System
from benchmarks.systems.steps import SystemStep, best_step, part_seconds, steps_of, timed_as
from benchmarks.systems.workload import ACTOR, CRITIC, REF, REWARD, ROLLOUT, SystemPlacement, Workload, placements_of
from flexrlhf.guideline.costs.analytic import NO_OVERHEADS
from flexrlhf.guideline.costs.cost_model import Call, Cost, Links, Mesh, Transformer
from flexrlhf.guideline.costs.links import ACROSS
from flexrlhf.placement.devices import DeviceClass

A100 = DeviceClass.KNOWN["A100-80G"]
LINKS = Links(A100.link_gb_s, 100.0)
# LLaMA (Touvron et al. 2023, table 2): layers, hidden, ffn, heads
LLAMA = {7: (32, 4096, 11008, 32), 13: (40, 5120, 13824, 40), 33: (60, 6656, 17920, 52), 65: (80, 8192, 22016, 64)}
RANK = 4


def llama(billions: int) -> Transformer:
    layers, hidden, ffn, heads = LLAMA[billions]
    return Transformer(layers, hidden, ffn, heads, heads, 128, 32000)


def with_adapters(model: Transformer) -> Transformer:
    return replace(model, adapters=RANK * model.layers * (8 * model.hidden + 3 * (model.hidden + model.ffn)))


def task_of(billions: int, devices: int, rows: int | None = None) -> Workload:
    """FlexRLHF's: four models of one size, adapters of rank 4, 256 tokens of prompt and of response."""
    model = llama(billions)
    trained, scorer = with_adapters(model), model.as_scorer()
    models = {ACTOR: trained, REF: model, CRITIC: with_adapters(scorer), REWARD: scorer}
    return Workload(models, devices, A100, LINKS, rows, 256.0, (256.0,))


def step(name: str, billions: int, devices: int) -> SystemStep:
    found = best_step(task_of(billions, devices), SYSTEMS[name])
    assert found is not None
    return found


def speed(name: str, billions: int, devices: int) -> float:
    return step(name, billions, devices).rows_per_second


CO_LOCATED, INTERLEAVED_1 = "deepspeed-chat", "flexrlhf, interleaving 1"
INTERLEAVED_2, DISAGGREGATED = "flexrlhf, interleaving 2", "flexrlhf, disaggregated"


@pytest.mark.parametrize("devices", [8, 16])
def test_interleaving_frees_memory_for_rows_at_7b(devices):
    together, apart = step(CO_LOCATED, 7, devices), step(INTERLEAVED_1, 7, devices)
    assert apart.rows > together.rows
    assert 1.02 < apart.rows_per_second / together.rows_per_second < 1.4


@pytest.mark.parametrize("billions", [13, 33, 65])
def test_interleaving_is_neutral_where_weights_are_sharded(billions):
    assert speed(INTERLEAVED_1, billions, 16) == pytest.approx(speed(CO_LOCATED, billions, 16), rel=0.05)


def test_splitting_actor_and_critic_pays_only_where_gathers_cross_nodes():
    assert speed(INTERLEAVED_2, 7, 16) < speed(CO_LOCATED, 7, 16)
    assert all(speed(INTERLEAVED_2, billions, 16) > speed(CO_LOCATED, billions, 16) for billions in (33, 65))


@pytest.mark.parametrize(("billions", "devices"), [(33, 32), (65, 32), (33, 128), (65, 128)])
def test_generation_of_its_own_is_several_times_as_fast_for_large_models(billions, devices):
    assert speed(DISAGGREGATED, billions, devices) > 2 * speed(CO_LOCATED, billions, devices)


def test_generation_of_its_own_gains_more_on_more_nodes():
    gains = [speed(DISAGGREGATED, 33, devices) / speed(CO_LOCATED, 33, devices) for devices in (32, 128)]
    assert gains[1] > gains[0]


def test_generation_of_its_own_does_not_pay_at_7b():
    assert speed(DISAGGREGATED, 7, 8) < speed(CO_LOCATED, 7, 8)


def test_65b_needs_two_nodes():
    assert best_step(task_of(65, 8), SYSTEMS[CO_LOCATED]) is None
    assert best_step(task_of(65, 16), SYSTEMS[CO_LOCATED]) is not None


def test_33b_is_no_faster_on_two_nodes_than_on_one():
    assert speed(CO_LOCATED, 33, 16) < 1.1 * speed(CO_LOCATED, 33, 8)


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_runs_a_small_step(name):
    found = best_step(task_of(7, 16, rows=512), SYSTEMS[name])
    assert found is not None
    assert found.rows == 512
    assert found.seconds >= max(found.call_seconds.values()) * 0.999
    assert all(0 < size <= capacity_bytes(A100) * 1.001 for size in found.bytes)
    assert {work.name for work in found.calls} <= set(found.call_seconds)


@pytest.mark.parametrize("name", ["real v1, heuristic", "real v1", "hybridflow", "openrlhf", "nemo-rl"])
def test_more_devices_are_faster(name):
    steps = [best_step(task_of(13, devices, rows=512), SYSTEMS[name]) for devices in (16, 32, 64)]
    seconds = [found.seconds for found in steps if found is not None]
    assert len(seconds) == 3
    assert all(after < before for before, after in pairwise(seconds))


def test_a_search_is_no_slower_than_the_heuristic():
    for billions, devices in ((7, 16), (33, 32)):
        searched, rule = (
            best_step(task_of(billions, devices, 512), SYSTEMS[name]) for name in ("real v1", "real v1, heuristic")
        )
        assert searched is not None
        assert rule is not None
        assert searched.seconds <= rule.seconds * 1.001


def test_steps_come_fastest_first():
    steps = steps_of(task_of(13, 32, rows=512), SYSTEMS["hybridflow"])
    assert {found.placement.name for found in steps} >= {"co-located", "split"}
    assert all(before.rows_per_second >= after.rows_per_second for before, after in pairwise(steps))


def test_a_known_placement_is_kept():
    groups = {REF: (0,), REWARD: (1,), CRITIC: (2,), ACTOR: (3,), ROLLOUT: (4,)}
    placement = SystemPlacement("standalone", (1, 1, 2, 2, 2), groups)
    found = best_step(task_of(7, 8, rows=256), SYSTEMS["openrlhf"], placement=placement)
    assert found is not None
    assert found.placement == placement


def test_disjoint_groups_work_side_by_side():
    found = step(INTERLEAVED_2, 7, 16)
    trains = [found.call_seconds[f"{role} train"] for role in (ACTOR, CRITIC)]
    assert part_seconds(found, ("train",)) == pytest.approx(max(trains))
    together = step(CO_LOCATED, 7, 16)
    trains = [together.call_seconds[f"{role} train"] for role in (ACTOR, CRITIC)]
    assert part_seconds(together, ("train",)) == pytest.approx(sum(trains))


def test_running_ahead_hides_the_shorter_half():
    system = replace(SYSTEMS[DISAGGREGATED], name="ahead", ahead=True)
    workload = task_of(13, 32, rows=512)
    in_turn, ahead = best_step(workload, SYSTEMS[DISAGGREGATED]), best_step(workload, system)
    assert in_turn is not None
    assert ahead is not None
    assert ahead.seconds < in_turn.seconds


def test_a_slower_system_takes_longer_on_the_same_meshes():
    fast = SYSTEMS["real v1"]
    found = best_step(task_of(7, 8, rows=256), fast)
    assert found is not None
    slow = replace(fast, name="slow", overheads=replace(fast.overheads, passes=fast.overheads.passes / 2))
    assert timed_as(found, slow).seconds > found.seconds
    assert timed_as(found, fast).seconds == pytest.approx(found.seconds)


class Fixed:
    """Costs of one second a call, and one more for its optimizer steps."""

    def call(self, call: Call, mesh: Mesh) -> Cost:
        return Cost({"compute": 1.0, "optimizer": float(call.updates) if call.kind == "train" else 0.0})

    def __getattr__(self, name: str):
        return getattr(COSTS, name)


def work(kind, portions: int = 1, updates: int = 1, pp: int = 1) -> SystemCall:
    call = Call(kind, llama(7), "megatron", 64, 256.0, (256.0,), 512.0, updates=updates)
    return SystemCall(kind, ACTOR, call, mesh_of(task_of(7, 8), 8, 1, pp), (0,), portions=portions)


def test_portions_follow_each_other_and_optimizer_steps_happen_once():
    assert call_seconds(work("forward", 4), Fixed()) == pytest.approx(4)
    assert call_seconds(work("train", 4, updates=3), Fixed()) == pytest.approx(4 + 3)
    assert call_seconds(work("generate", 4), Fixed()) == pytest.approx(4)


def test_weights_are_sent_as_slowly_as_the_system_sends_them():
    """One rank broadcasts whole tensors through its port, an eighth of a node's; ranks that exchange shards use all."""
    workload = task_of(7, 16)
    placement = SystemPlacement("halves", (8, 8), {ACTOR: (0,), ROLLOUT: (1,)})
    costs = TABLES.costs(replace(NO_OVERHEADS, sync=0.5))
    trained, generate = mesh_of(workload, 8, zero=3), mesh_of(workload, 8)

    def seconds(gathers: str) -> float:
        system = System("slow", gathers=gathers, sync_seconds=3.0)
        return transition_seconds(workload, system, placement, trained, generate, costs) - 3.0

    sent = 2 * llama(7).parameters / (0.5 * ACROSS.share * workload.links.node_gb_s * 1e9)
    assert seconds("own copy") == pytest.approx(8 * sent, rel=0.05)
    assert seconds("reshard") == pytest.approx(sent, rel=0.25)


def test_rows_are_padded_to_the_longest_of_the_step():
    workload = replace(task_of(7, 16, rows=512), responses=(100.0, 500.0))
    for name, width in (("nemo-aligner", 756.0), ("nemo-rl", 556.0)):
        found = best_step(workload, SYSTEMS[name])
        assert found is not None
        assert {placed.call.width for placed in found.calls if placed.call.kind != "generate"} == {width}


def test_an_engine_decodes_the_rows_that_it_is_sent():
    groups = {REF: (0,), REWARD: (1,), CRITIC: (2,), ACTOR: (3,), ROLLOUT: (4,)}
    placement = SystemPlacement("standalone", (2, 2, 4, 4, 4), groups)
    workload = replace(task_of(7, 16, rows=512), sent_rows=8)
    found = best_step(workload, SYSTEMS["openrlhf"], placement=placement)
    assert found is not None
    generate = next(placed for placed in found.calls if placed.call.kind == "generate")
    assert generate.call.decode_rows * generate.mesh.dp == 8 * 4
    trains = [placed.call for placed in found.calls if placed.call.kind == "train"]
    assert all(call.offload_optimizer for call in trains)  # OpenRLHF's recipes do so even if they need not


def test_streamed_weights_take_no_device_memory_but_time():
    system, workload = SYSTEMS["deepspeed-chat 0.9, hybrid engine"], task_of(7, 1, rows=4)
    mesh = mesh_of(workload, 1, zero=3)
    assert state_bytes(workload, system, ACTOR, mesh, True) == state_bytes(workload, system, REF, mesh, True) == 0
    assert state_bytes(workload, replace(system, streams=False), REF, mesh, True) == frozen_bytes(llama(7), mesh)
    calls = [
        call_of(workload, each, "train", ACTOR, mesh, 4, True) for each in (system, replace(system, streams=False))
    ]
    streamed, resident = (COSTS.call(call, mesh).seconds for call in calls)
    assert streamed > resident


def test_attention_that_is_not_fused_keeps_its_scores():
    """Korthikanti et al. 2022, section 4: 5 a s^2 b bytes for each layer."""
    mesh, model = Mesh(A100, LINKS), llama(7).as_scorer()

    def scores(recompute) -> float:
        call = Call("train", model, "deepspeed", 4, 256.0, (256.0,), 512.0, recompute=recompute)
        return pass_bytes(replace(call, engine="deepspeed-2021"), mesh, 4) - pass_bytes(call, mesh, 4)

    of_layer = SCORE_BYTES * model.heads * 4 * 512**2
    assert (scores("none"), scores("full")) == pytest.approx((model.layers * of_layer, of_layer))


def test_selective_recomputation_keeps_less_than_all_and_more_than_inputs():
    mesh, model = Mesh(A100, LINKS), llama(7)
    kept = [
        pass_bytes(Call("train", model, "torch", 1, 0.0, (512.0,), 512.0, recompute=recompute), mesh, 1)
        for recompute in ("full", "selective", "none")
    ]
    assert kept == sorted(kept)
    # attention's result; half of query, key, value, output, gate, up and down
    assert selected_numbers(model) == 4096 + (4 * 4096 + 2 * 11008 + 4096) / 2


def test_fsdp_keeps_frozen_weights_in_float32():
    model, mesh = with_adapters(llama(7)), Mesh(A100, LINKS, 8, zero=3)
    frozen = model.parameters - model.adapters
    assert trained_bytes(model, mesh, FLOAT_SHARDS) == pytest.approx((4 * frozen + 16 * model.adapters) / 8)


@pytest.mark.parametrize("name", ["co-located", "reward alone", "interleaved", "split", "halves", "standalone"])
def test_placements_use_all_devices_once(name):
    for placement in placements_of(name, task_of(7, 32)):
        assert sum(placement.blocks) == 32
        assert {block for blocks in placement.groups.values() for block in blocks} == set(range(len(placement.blocks)))


def test_zero_of_75_billion_parameters_takes_what_its_paper_says():
    """Rajbhandari et al. 2020, figure 1: 120, 31.4, 16.6 and 1.9 GB on each of 64 ranks."""
    model = replace(llama(7), adapters=0)
    scale = 7.5e9 / model.parameters
    sizes = [trained_bytes(model, Mesh(A100, LINKS, 64, zero=stage), MIXED) * scale / 1e9 for stage in range(4)]
    assert sizes == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.1)


def test_offloading_leaves_weights():
    mesh = Mesh(A100, LINKS, 8, zero=2)
    assert trained_bytes(llama(7), mesh, MIXED, offload=True) == pytest.approx(frozen_bytes(llama(7), mesh))


def test_as_many_rows_fit_as_their_bytes_say():
    call = Call("train", llama(7), "deepspeed", 64, 256.0, (256.0,), 512.0, recompute="full")
    mesh = Mesh(A100, LINKS, 8, zero=3)
    for free in (1e9, 2e10, 5e10):
        rows = rows_that_fit(call, mesh, free)
        assert rows == 0 or pass_bytes(call, mesh, rows) <= free
        assert pass_bytes(call, mesh, rows + 1) > free
