"""Properties that the costs of kernels, links, forward and training calls have on every shape."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from test_cost_laws import ROUNDING, random_call, random_mesh

from benchmarks.systems.engines import PROFILES
from flexrlhf.config.axes import ParallelDims
from flexrlhf.guideline.costs import training
from flexrlhf.guideline.costs.cost_model import Call, Cost, Links, Mesh, Traffic, Transformer
from flexrlhf.guideline.costs.kernels import LAUNCH_SECONDS, attention_seconds
from flexrlhf.guideline.costs.links import all_reduce_seconds, gather_seconds, travel_seconds
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.weights.decoder_sizes import ExpertSizes


def forward_cost(call: Call, mesh: Mesh) -> Cost:
    return training.forward_cost(call, mesh, PROFILES[call.engine])


def train_cost(call: Call, mesh: Mesh) -> Cost:
    return training.train_cost(call, mesh, PROFILES[call.engine])


COSTS = pytest.mark.parametrize("cost", [forward_cost, train_cost])


@COSTS
def test_twice_the_rows_take_up_to_twice_the_time(cost):
    """Of whole micro-batches: a smaller last one takes more of its time for launches."""
    chance = random.Random(7)
    for _ in range(300):
        call, mesh = random_call(chance), random_mesh(chance)
        whole = -(-call.rows // call.micro_rows) * call.micro_rows
        once, twice, most = (cost(replace(call, rows=rows), mesh).seconds for rows in (call.rows, 2 * call.rows, whole))
        assert once <= twice * ROUNDING
        assert twice <= 2 * most * ROUNDING


@COSTS
def test_replicas_compute_the_same(cost):
    chance = random.Random(8)
    for _ in range(200):
        call, mesh = random_call(chance), random_mesh(chance)
        alone, many = cost(call, replace(mesh, dp=1, per_node=8)), cost(call, replace(mesh, dp=16, per_node=8))
        for name in ("compute", "attention", "elements", "head", "launch"):
            assert many.parts[name] == alone.parts[name]


@COSTS
def test_tensor_parallel_devices_compute_no_more(cost):
    chance = random.Random(9)
    for _ in range(200):
        call, mesh = random_call(chance), replace(random_mesh(chance), dims=ParallelDims(), per_node=8)
        split = replace(mesh, dims=ParallelDims(tp=chance.choice([2, 4, 8])))
        whole, shared = cost(call, mesh).parts, cost(call, split).parts
        for name in ("compute", "attention", "elements", "head"):
            assert shared[name] <= whole[name] * ROUNDING


def test_adapters_save_gradients_of_weights():
    """Of three products for each weight, one is not made."""
    chance = random.Random(11)
    for _ in range(100):
        call, mesh = (
            replace(random_call(chance), recompute="none", width=2048.0, responses=(1024.0,)),
            random_mesh(chance),
        )
        full, frozen = (
            train_cost(replace(call, model=replace(call.model, adapters=adapters)), mesh) for adapters in (0, 4000000)
        )
        assert frozen.parts["compute"] < full.parts["compute"]


def test_offloaded_optimizer_is_slower():
    chance = random.Random(12)
    for _ in range(100):
        call, mesh = replace(random_call(chance), offload_optimizer=False), random_mesh(chance)
        resident = train_cost(call, mesh).parts["optimizer"]
        assert train_cost(replace(call, offload_optimizer=True), mesh).parts["optimizer"] > resident


def test_offloaded_activations_take_time_where_the_link_is_slower_than_a_layer():
    chance = random.Random(20)
    for _ in range(100):
        call, mesh = replace(random_call(chance), offload_activations=False), random_mesh(chance, stages=1)
        offloaded = replace(call, offload_activations=True)
        links = [replace(mesh, device=replace(mesh.device, host_gb_s=speed)) for speed in (1e6, 1e-3)]
        hidden, exposed = (train_cost(offloaded, each).parts["host"] for each in links)
        size = call.item * call.model.hidden * call.model.layers * call.width * call.rows
        assert hidden == 0 and 0 < exposed < 2 * size / 1e6
        busy = sum(train_cost(call, links[1]).parts[name] for name in ("compute", "attention", "elements", "launch"))
        assert exposed >= 2 * size / 1e6 - ROUNDING * busy


def test_tiles_of_an_mlp_cost_less_where_layers_are_computed_again_anyway():
    """An MLP is computed twice in all: without recomputation once more, with it only its last product."""
    chance = random.Random(21)
    for _ in range(100):
        call, mesh = replace(random_call(chance), engine="torch", tiled_mlp=False, width=2048.0), random_mesh(chance)
        more = {}
        for recompute in ("none", "full"):
            each = replace(call, recompute=recompute)
            whole, tiled = (train_cost(replace(each, tiled_mlp=on), mesh).parts["compute"] for on in (False, True))
            more[recompute] = tiled - whole
        assert 0 < more["full"] < more["none"]


def test_dispatched_tokens_are_moved_as_often_as_the_engine_moves_them():
    """Not as often as a layer's own elements, of which an engine without fused kernels moves more than are counted."""
    model = Transformer(2, 4096, 1, 64, 4, 128, 1000, experts=ExpertSizes(128, 8, 1536))
    dense, profile = replace(model, experts=None, ffn=8 * 1536), PROFILES["torch"]
    alone, over_ranks = training.PassShape(1, 512, 0, 2), training.PassShape(1, 512, 0, 2, sharers=8)
    moved = [training.element_bytes(model, profile, shape, 1) for shape in (alone, over_ranks)]
    plain = training.element_bytes(dense, profile, alone, 1)
    assert [each - plain for each in moved] == pytest.approx([passes * 512 * 2 * 8 * 4096 for passes in (7, 17)])
    fused = [training.element_bytes(each, PROFILES["serving"], alone, 1) for each in (model, dense)]
    assert fused[0] - fused[1] == pytest.approx(PROFILES["serving"].elements * (moved[0] - plain))
    # of two ranks with the same tokens each moves a half of the choices, but zeros and the sum of all of them
    halves = (training.element_bytes(each, profile, over_ranks, 2) for each in (model, dense))
    assert next(halves) - next(halves) == pytest.approx((2 + 15 / 2) * 512 * 2 * 8 * 4096)
    one, two = (training.layer_products(model, tp, 512, 8)[-1] for tp in (1, 2))
    assert (two.m, two.k, two.n, two.groups) == (one.m, one.k, one.n, one.groups / 2)


def test_products_of_experts_are_one_kernel_or_a_loop_by_device_class():
    """In a loop no product takes less than its launch, so a rank with fewer experts has less to wait for."""
    model = Transformer(2, 2048, 6144, 32, 4, 128, 1000, experts=ExpertSizes(128, 8, 768))

    def products(device: str, item: int, engine: str = "torch", of: Transformer = model, ep: int = 1) -> float:
        shape = training.PassShape(1, 512, 0, item, sharers=ep)
        return training.layer_forward(of, DeviceClass.KNOWN[device], PROFILES[engine], shape, 1).products

    dense = replace(model, experts=None)
    cases = (("A100-80G", 2, True), ("H100-80G", 2, False), ("B200-180G", 2, False), ("H100-80G", 4, True))
    for device, item, loops in cases:
        in_kernels = products(device, item, "serving")
        assert products(device, item, of=dense) == products(device, item, "serving", dense)
        assert (products(device, item) > in_kernels) == loops
        if loops:
            assert products(device, item) >= 2 * 128 * LAUNCH_SECONDS
            assert products(device, item, ep=8) < products(device, item) / 4


def test_no_rows_are_no_compute():
    chance = random.Random(13)
    call, mesh = replace(random_call(chance), rows=0), random_mesh(chance, stages=1)
    assert forward_cost(call, mesh).seconds == 0


def test_attention_grows_with_the_square_of_the_width():
    device = DeviceClass.KNOWN["A100-80G"]
    short, long = (attention_seconds(1, width, 4096, device) for width in (8192, 16384))
    assert 3.9 < long / short < 4


def test_collectives_of_one_rank_are_free():
    links = Links(300, 25)
    assert all_reduce_seconds(1e9, 1, 8, links) == gather_seconds(1e9, 1, 8, links) == 0


def test_message_takes_its_start_and_its_bytes():
    links = Links(100, 10)
    little, much = travel_seconds(Traffic(0, 1000), links), travel_seconds(Traffic(0, 10**9), links)
    assert little < 1e-4
    assert 0.1 < much < 0.3
    assert travel_seconds(Traffic(10**9, 0), links) < much


def test_shards_that_stay_gathered_in_a_call_are_gathered_once_and_whole_weights_never():
    chance = random.Random(23)
    for engine, stored in (("torch", "shards"), ("deepspeed", "whole")):
        for _ in range(100):
            call, mesh = replace(random_call(chance), engine=engine), replace(random_mesh(chance), dp=4, sharded_over=0)
            profile = replace(PROFILES[engine], overlap=0.0)
            whole, two, three = (
                training.forward_cost(call, replace(mesh, zero=zero), profile).seconds for zero in (0, 2, 3)
            )
            once = training.gather_weights_seconds(call, replace(mesh, zero=2), profile)
            assert two - whole == pytest.approx(once if stored == "shards" else 0.0, abs=1e-9 * whole)
            assert two <= three


def test_shards_in_host_memory_come_over_its_link_before_each_gather():
    chance = random.Random(22)
    for _ in range(100):
        call, mesh = random_call(chance), replace(random_mesh(chance), zero=3)
        near, far = (
            training.gather_weights_seconds(replace(call, offload_parameters=offloads), mesh, PROFILES[call.engine])
            for offloads in (False, True)
        )
        shard = call.item * call.model.parameters / (mesh.dims.parts * mesh.num_shards)
        assert far - near == pytest.approx(shard / (1e9 * mesh.device.host_gb_s))
