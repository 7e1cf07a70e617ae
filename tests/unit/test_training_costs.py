"""Properties that the costs of kernels, links, forward and training calls have on every shape."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.systems.engines import PROFILES
from flexrlhf.guideline.costs import training
from flexrlhf.guideline.costs.cost_model import Call, Cost, Links, Mesh, Traffic, Transformer
from flexrlhf.guideline.costs.kernels import LAUNCH_SECONDS, attention_seconds, matmul_seconds
from flexrlhf.guideline.costs.links import all_reduce_seconds, gather_seconds, travel_seconds
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.weights.decoder_sizes import ExpertSizes

ENGINES = sorted(PROFILES.keys() - {"serving", "lmdeploy"})
"""Those that train."""
ROUNDING = 1 + 1e-9


def forward_cost(call: Call, mesh: Mesh) -> Cost:
    return training.forward_cost(call, mesh, PROFILES[call.engine])


def train_cost(call: Call, mesh: Mesh) -> Cost:
    return training.train_cost(call, mesh, PROFILES[call.engine])


COSTS = pytest.mark.parametrize("cost", [forward_cost, train_cost])


def _model(chance: random.Random, **changes: int) -> Transformer:
    heads = chance.choice([4, 8, 16, 32, 64])
    model = Transformer(
        layers=chance.randint(1, 80),
        hidden=heads * chance.choice([64, 128]),
        ffn=chance.randint(500, 30000),
        heads=heads,
        kv_heads=chance.choice([2, heads]),
        head_dim=chance.choice([64, 128]),
        vocabulary=chance.choice([100, 32000, 152000]),
        gated=chance.random() < 0.5,
        head=chance.choice(["causal", "scalar"]),
        adapters=chance.choice([0, 0, 4000000]),
    )
    return replace(model, **changes)


def _call(chance: random.Random) -> Call:
    width = chance.choice([40.0, 512.0, 2048.0, 16384.0])
    return Call(
        kind="train",
        model=_model(chance),
        engine=chance.choice(ENGINES),
        rows=chance.randint(1, 200),
        prompt=width / 4,
        responses=(width / 2, width * 3 / 4),
        width=width,
        updates=chance.randint(1, 4),
        micro_rows=chance.randint(1, 16),
        recompute=chance.choice(["none", "selective", "full"]),
        tiled_mlp=chance.random() < 0.2,
        offload_activations=chance.random() < 0.2,
        offload_optimizer=chance.random() < 0.2,
    )


def _mesh(chance: random.Random) -> Mesh:
    device = DeviceClass.KNOWN[chance.choice(sorted(DeviceClass.KNOWN))]
    tp, pp, dp = chance.choice([1, 2, 8]), chance.choice([1, 1, 2, 4]), chance.choice([1, 2, 16])
    return Mesh(
        device=device,
        links=Links(device.link_gb_s, device.node_gb_s),
        dp=dp,
        tp=tp,
        pp=pp,
        per_node=min(8, tp * pp * dp),
        zero=chance.choice([0, 1, 2, 3]),
    )


def _never_slower(
    cost: Callable[[Call, Mesh], object],
    change: Callable[[random.Random, Call, Mesh], tuple[Call, Mesh]],
    cases: int = 400,
) -> None:
    """What ``change`` makes of a case takes no longer than the case."""
    chance = random.Random(20240601)
    for _ in range(cases):
        call, mesh = _call(chance), _mesh(chance)
        assert cost(*change(chance, call, mesh)).seconds <= cost(call, mesh).seconds * ROUNDING, (call, mesh)


@COSTS
@pytest.mark.parametrize("figure", ["tflops", "memory_gb_s", "host_gb_s", "matmul", "sustained", "attention"])
def test_better_device_is_never_slower(cost, figure):
    def faster(chance: random.Random, call: Call, mesh: Mesh) -> tuple[Call, Mesh]:
        better = getattr(mesh.device, figure) * chance.uniform(1, 4)
        return call, replace(mesh, device=replace(mesh.device, **{figure: better}))

    _never_slower(cost, faster)


@COSTS
@pytest.mark.parametrize("link", ["device_gb_s", "node_gb_s"])
def test_better_links_are_never_slower(cost, link):
    def faster(chance: random.Random, call: Call, mesh: Mesh) -> tuple[Call, Mesh]:
        better = getattr(mesh.links, link) * chance.uniform(1, 4)
        return call, replace(mesh, links=replace(mesh.links, **{link: better}))

    _never_slower(cost, faster)


@COSTS
@pytest.mark.parametrize("size", ["layers", "hidden", "ffn", "vocabulary"])
def test_smaller_model_is_never_slower(cost, size):
    def smaller(chance: random.Random, call: Call, mesh: Mesh) -> tuple[Call, Mesh]:
        less = max(1, int(getattr(call.model, size) * chance.uniform(0.3, 1)))
        return replace(call, model=replace(call.model, **{size: less})), mesh

    _never_slower(cost, smaller)


@COSTS
def test_fewer_rows_are_never_slower(cost):
    _never_slower(cost, lambda chance, call, mesh: (replace(call, rows=chance.randint(1, call.rows)), mesh))


@COSTS
def test_shorter_rows_are_never_slower(cost):
    _never_slower(
        cost, lambda chance, call, mesh: (replace(call, width=call.width * 0.9, responses=(call.width / 4,)), mesh)
    )


@COSTS
def test_twice_the_rows_take_up_to_twice_the_time(cost):
    """Of whole micro-batches: a smaller last one takes more of its time for launches."""
    chance = random.Random(7)
    for _ in range(300):
        call, mesh = _call(chance), _mesh(chance)
        whole = -(-call.rows // call.micro_rows) * call.micro_rows
        once, twice, most = (cost(replace(call, rows=rows), mesh).seconds for rows in (call.rows, 2 * call.rows, whole))
        assert once <= twice * ROUNDING
        assert twice <= 2 * most * ROUNDING


@COSTS
def test_replicas_compute_the_same(cost):
    chance = random.Random(8)
    for _ in range(200):
        call, mesh = _call(chance), _mesh(chance)
        alone, many = cost(call, replace(mesh, dp=1, per_node=8)), cost(call, replace(mesh, dp=16, per_node=8))
        for name in ("compute", "attention", "elements", "head", "launch"):
            assert many.parts[name] == alone.parts[name]


@COSTS
def test_tensor_parallel_devices_compute_no_more(cost):
    chance = random.Random(9)
    for _ in range(200):
        call, mesh = _call(chance), replace(_mesh(chance), tp=1, pp=1, per_node=8)
        whole, shared = cost(call, mesh).parts, cost(call, replace(mesh, tp=chance.choice([2, 4, 8]))).parts
        for name in ("compute", "attention", "elements", "head"):
            assert shared[name] <= whole[name] * ROUNDING


def test_backward_and_recomputation_add():
    chance = random.Random(10)
    for _ in range(200):
        call, mesh = _call(chance), replace(_mesh(chance), zero=1)
        times = [train_cost(replace(call, recompute=kind), mesh).seconds for kind in ("none", "selective", "full")]
        assert [forward_cost(call, mesh).seconds, *times] == sorted([forward_cost(call, mesh).seconds, *times])


def test_adapters_save_gradients_of_weights():
    """Of three products for each weight, one is not made."""
    chance = random.Random(11)
    for _ in range(100):
        call, mesh = replace(_call(chance), recompute="none", width=2048.0, responses=(1024.0,)), _mesh(chance)
        full, frozen = (
            train_cost(replace(call, model=replace(call.model, adapters=adapters)), mesh) for adapters in (0, 4000000)
        )
        assert frozen.parts["compute"] < full.parts["compute"]


def test_offloaded_optimizer_is_slower():
    chance = random.Random(12)
    for _ in range(100):
        call, mesh = replace(_call(chance), offload_optimizer=False), _mesh(chance)
        resident = train_cost(call, mesh).parts["optimizer"]
        assert train_cost(replace(call, offload_optimizer=True), mesh).parts["optimizer"] > resident


def test_offloaded_activations_take_time_where_the_link_is_slower_than_a_layer():
    chance = random.Random(20)
    for _ in range(100):
        call, mesh = replace(_call(chance), offload_activations=False), replace(_mesh(chance), pp=1)
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
        call, mesh = replace(_call(chance), engine="torch", tiled_mlp=False, width=2048.0), _mesh(chance)
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
    alone, over_ranks = training.PassShape(1, 512, 0, 2), training.PassShape(1, 512, 0, 2, ep=8)
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
        shape = training.PassShape(1, 512, 0, item, ep=ep)
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
    call, mesh = replace(_call(chance), rows=0), replace(_mesh(chance), pp=1)
    assert forward_cost(call, mesh).seconds == 0


def test_product_never_falls_in_any_size():
    chance = random.Random(14)
    for _ in range(1000):
        device = DeviceClass.KNOWN[chance.choice(sorted(DeviceClass.KNOWN))]
        sizes = [chance.randint(1, 20000) for _ in range(3)]
        time = matmul_seconds(*sizes, device)
        for i in range(3):
            grown = [size + chance.randint(1, 2000) * (i == j) for j, size in enumerate(sizes)]
            assert matmul_seconds(*grown, device) >= time


def test_product_is_no_faster_than_the_roofline():
    chance = random.Random(15)
    for _ in range(1000):
        device = DeviceClass.KNOWN[chance.choice(sorted(DeviceClass.KNOWN))]
        m, k, n = (chance.randint(1, 20000) for _ in range(3))
        flops, traffic = (
            2 * m * k * n / (device.tflops * 1e12),
            2 * (m * k + k * n + m * n) / (device.memory_gb_s * 1e9),
        )
        assert matmul_seconds(m, k, n, device) > max(flops, traffic)


def test_attention_grows_with_the_square_of_the_width():
    device = DeviceClass.KNOWN["A100-80G"]
    short, long = (attention_seconds(1, width, 4096, device) for width in (8192, 16384))
    assert 3.9 < long / short < 4


def test_collectives_of_one_rank_are_free():
    links = Links(300, 25)
    assert all_reduce_seconds(1e9, 1, 8, links) == gather_seconds(1e9, 1, 8, links) == 0


def test_all_reduce_is_slower_than_gather_and_across_than_within():
    chance, links = random.Random(16), Links(300, 25)
    for _ in range(200):
        size, ranks = chance.uniform(1, 1e10), chance.choice([2, 4, 8])
        assert all_reduce_seconds(size, ranks, 8, links) > gather_seconds(size, ranks, 8, links)
        assert all_reduce_seconds(size, 2 * ranks, ranks, links) > all_reduce_seconds(size, ranks, ranks, links)


def test_message_takes_its_start_and_its_bytes():
    links = Links(100, 10)
    little, much = travel_seconds(Traffic(0, 1000), links), travel_seconds(Traffic(0, 10**9), links)
    assert little < 1e-4
    assert 0.1 < much < 0.3
    assert travel_seconds(Traffic(10**9, 0), links) < much


NODES = [8 * 2**power for power in range(12)]


@pytest.mark.parametrize("collective", [all_reduce_seconds, gather_seconds])
def test_more_ranks_never_exchange_faster(collective):
    chance = random.Random(17)
    for _ in range(200):
        size, links = chance.uniform(1, 1e11), Links(chance.uniform(16, 900), chance.uniform(1, 400))
        within = [collective(size, ranks, 8, links) for ranks in (1, 2, 4, 8)]
        across = [collective(size, ranks, 8, links) for ranks in NODES]
        for times in (within, across):
            assert times == sorted(times)


def test_more_pieces_and_more_groups_never_gather_faster():
    chance, links = random.Random(18), Links(300, 25)
    for _ in range(200):
        size, ranks = chance.uniform(1, 1e11), chance.choice([2, 8, *NODES])
        for name in ("pieces", "groups"):
            times = [gather_seconds(size, ranks, 8, links, **{name: number}) for number in (1, 2, 10, 96)]
            assert times == sorted(times)


def test_more_replicas_never_gather_weights_faster():
    """ZeRO-3 of 175B on 384 and 1,536 GPUs took 1.4 and 4 times what one message of all weights does."""
    chance = random.Random(19)
    for _ in range(100):
        call, mesh = _call(chance), replace(_mesh(chance), zero=3, pp=1, per_node=8)
        costs = [
            training.gather_weights_seconds(call, replace(mesh, dp=ranks // mesh.tp), PROFILES[call.engine])
            for ranks in NODES
        ]
        assert costs == sorted(costs)


def test_shards_that_stay_gathered_in_a_call_are_gathered_once_and_whole_weights_never():
    chance = random.Random(23)
    for engine, stored in (("torch", "shards"), ("deepspeed", "whole")):
        for _ in range(100):
            call, mesh = replace(_call(chance), engine=engine), replace(_mesh(chance), dp=4, sharded_over=0)
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
        call, mesh = _call(chance), replace(_mesh(chance), zero=3)
        near, far = (
            training.gather_weights_seconds(replace(call, offload_parameters=offloads), mesh, PROFILES[call.engine])
            for offloads in (False, True)
        )
        shard = call.item * call.model.parameters / (mesh.tp * mesh.pp * mesh.num_shards)
        assert far - near == pytest.approx(shard / (1e9 * mesh.device.host_gb_s))


def test_an_engine_that_reaches_less_of_its_links_is_never_faster():
    chance = random.Random(20)
    for _ in range(200):
        call, mesh = _call(chance), replace(_mesh(chance), zero=3)
        fast = PROFILES[call.engine]
        for name in ("gather_gb_s", "gather_within_gb_s"):
            slow = replace(fast, **{name: min(getattr(fast, name), 100.0) / 4})
            assert training.train_cost(call, mesh, slow).seconds >= training.train_cost(call, mesh, fast).seconds


def test_recomputation_that_stops_early_saves_time_but_costs_some():
    chance = random.Random(21)
    for _ in range(200):
        call, mesh = _call(chance), replace(_mesh(chance), zero=1)
        whole = replace(PROFILES[call.engine], stops_early=False, repeats=0.0)
        early = replace(whole, stops_early=True)
        full = replace(call, recompute="full")
        times = [
            training.train_cost(replace(call, recompute="none"), mesh, early).seconds,
            training.train_cost(full, mesh, early).seconds,
            training.train_cost(full, mesh, whole).seconds,
        ]
        assert times[0] <= times[1] * ROUNDING
        assert times[1] <= times[2] * ROUNDING
