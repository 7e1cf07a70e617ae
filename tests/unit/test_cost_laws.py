"""Laws of costs on random shapes: each names times in the order in which they never fall."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from benchmarks.systems.engines import DECODERS, PROFILES, TABLES
from flexrlhf.config.axes import ParallelDims
from flexrlhf.guideline.costs import training
from flexrlhf.guideline.costs.analytic import NO_OVERHEADS, AnalyticCosts, RunOverheads
from flexrlhf.guideline.costs.cost_model import Call, Links, Mesh, Transformer
from flexrlhf.guideline.costs.kernels import matmul_seconds
from flexrlhf.guideline.costs.links import all_reduce_seconds, gather_seconds
from flexrlhf.placement.devices import DeviceClass

COSTS = TABLES.costs(NO_OVERHEADS)
ENGINES = sorted(PROFILES.keys() - {"serving", "lmdeploy"})
"""Those that train."""
NODES = [8 * 2**power for power in range(12)]
ROUNDING = 1 + 1e-9
Law = Callable[[random.Random], list[float]]
"""Returns times of one random case."""


def random_model(chance: random.Random) -> Transformer:
    heads = chance.choice([4, 8, 16, 32, 64])
    return Transformer(
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


def random_call(chance: random.Random, kind: str = "train") -> Call:
    width = chance.choice([40.0, 512.0, 2048.0, 16384.0])
    if kind == "generate":
        responses = tuple(float(round(chance.lognormvariate(5, 1))) for _ in range(chance.choice((1, 2, 7, 100, 400))))
        model, prompt = replace(random_model(chance), head="causal"), float(chance.choice((1, 100, 1024, 8000)))
        rows, places = chance.choice((1, 3, 16, 100, 512)), chance.choice((1, 8, 64, 256))
        engine = chance.choice(sorted(DECODERS))
        return Call("generate", model, engine, rows, prompt, responses, prompt, decode_rows=places)
    return Call(
        kind=kind,  # type: ignore[arg-type]
        model=random_model(chance),
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


def random_mesh(chance: random.Random, stages: int = 0) -> Mesh:
    """``stages``: of the pipeline; 0: any."""
    device = DeviceClass.KNOWN[chance.choice(sorted(DeviceClass.KNOWN))]
    tp, pp, dp = chance.choice([1, 2, 8]), chance.choice([1, 1, 2, 4]), chance.choice([1, 2, 16])
    links = Links(device.link_gb_s, device.node_gb_s)
    dims, zero = ParallelDims(tp, stages or pp), chance.choice([0, 1, 2, 3])
    return Mesh(device, links, dp, dims, per_node=min(8, tp * pp * dp), zero=zero)


def seconds(call: Call, mesh: Mesh) -> float:
    return COSTS.call(call, mesh).seconds


def better(kind: str, part: str, figure: str, chance: random.Random) -> list[float]:
    """``part``: device or links."""
    call, mesh = random_call(chance, kind), random_mesh(chance)
    found = getattr(mesh, part)
    faster = replace(found, **{figure: chance.uniform(1, 4) * getattr(found, figure)})
    return [seconds(call, replace(mesh, **{part: faster})), seconds(call, mesh)]


def smaller(kind: str, size: str, chance: random.Random) -> list[float]:
    call, mesh = random_call(chance, kind), random_mesh(chance)
    less = max(1, int(getattr(call.model, size) * chance.uniform(0.3, 1)))
    return [seconds(replace(call, model=replace(call.model, **{size: less})), mesh), seconds(call, mesh)]


def more_work(kind: str, chance: random.Random) -> list[float]:
    """Fewer rows, shorter ones, and in generation one longer response."""
    call, mesh = random_call(chance, kind), random_mesh(chance)
    less = [replace(call, rows=chance.randint(1, call.rows))]
    if kind == "generate":
        *shorter, longest = sorted(call.responses)
        less += [replace(call, prompt=call.prompt / 1.3)]
        less += [replace(call, responses=tuple(max(1.0, each / 1.3) for each in call.responses))]
        less += [replace(call, responses=(*shorter, max(1.0, longest / 2)))]
    else:
        less += [replace(call, width=call.width * 0.9, responses=(call.width / 4,))]
    return [max(seconds(each, mesh) for each in less), seconds(call, mesh)]


def fewer_places(chance: random.Random) -> list[float]:
    """Where rows enter as others end."""
    refilling = [name for name in sorted(DECODERS) if DECODERS[name].batching == "refill"]
    call, mesh = replace(random_call(chance, "generate"), engine=chance.choice(refilling)), random_mesh(chance)
    return [seconds(replace(call, decode_rows=places), mesh) for places in (512, 128, 50, 16, 5, 2, 1)]


def backward_and_recomputation(chance: random.Random) -> list[float]:
    call, mesh = random_call(chance), replace(random_mesh(chance), zero=1)
    times = [seconds(replace(call, recompute=each), mesh) for each in ("none", "selective", "full")]
    return [seconds(replace(call, kind="forward"), mesh), *times]


def recomputation_that_stops_early(chance: random.Random) -> list[float]:
    call, mesh = random_call(chance), replace(random_mesh(chance), zero=1)
    whole = replace(PROFILES[call.engine], stops_early=False, repeats=0.0)
    ways = (("none", True), ("full", True), ("full", False))
    return [
        training.train_cost(replace(call, recompute=each), mesh, replace(whole, stops_early=early)).seconds
        for each, early in ways
    ]


def links_reached_by_the_engine(chance: random.Random) -> list[float]:
    call, mesh = random_call(chance), replace(random_mesh(chance), zero=3)
    fast, name = PROFILES[call.engine], chance.choice(["gather_gb_s", "gather_within_gb_s"])
    slow = replace(fast, **{name: min(getattr(fast, name), 100.0) / 4})
    return [training.train_cost(call, mesh, profile).seconds for profile in (fast, slow)]


def replicas_that_gather_weights(chance: random.Random) -> list[float]:
    """ZeRO-3 of 175B on 384 and 1,536 GPUs took 1.4 and 4 times what one message of all weights does."""
    call, mesh = random_call(chance), replace(random_mesh(chance, stages=1), zero=3, per_node=8)
    meshes = (replace(mesh, dp=ranks // mesh.dims.tp) for ranks in NODES)
    return [training.gather_weights_seconds(call, each, PROFILES[call.engine]) for each in meshes]


def shares_of_overheads(chance: random.Random) -> list[float]:
    kind, name = chance.choice(["forward", "train", "generate"]), chance.choice(["passes", "decode", "tensor"])
    call, mesh = replace(random_call(chance, kind), engine="torch"), random_mesh(chance)
    return [AnalyticCosts(overheads=RunOverheads(**{name: each})).call(call, mesh).seconds for each in (1, 0.5, 0.1)]


def a_size_of_a_product(chance: random.Random) -> list[float]:
    """None is faster than its operations and bytes."""
    device = DeviceClass.KNOWN[chance.choice(sorted(DeviceClass.KNOWN))]
    m, k, n = sizes = [int(20000 ** chance.random()) for _ in range(3)]
    grown = [size + chance.randint(1, 2000) * (index == chance.randrange(3)) for index, size in enumerate(sizes)]
    flops = 2 * m * k * n / (device.tflops * 1e12)
    traffic = 2 * (m * k + k * n + m * n) / (device.memory_gb_s * 1e9)
    return [max(flops, traffic), matmul_seconds(*sizes, device), matmul_seconds(*grown, device)]


def sums_and_gathers(chance: random.Random) -> list[float]:
    size, ranks, links = chance.uniform(1, 1e11), chance.choice([2, 4, 8]), Links(300, 25)
    return [collective(size, ranks, 8, links) for collective in (gather_seconds, all_reduce_seconds)]


def sums_within_and_across_nodes(chance: random.Random) -> list[float]:
    size, ranks, links = chance.uniform(1, 1e11), chance.choice([2, 4, 8]), Links(300, 25)
    return [all_reduce_seconds(size, number, ranks, links) for number in (ranks, 2 * ranks)]


def ranks_of_a_collective(collective: Callable[..., float], nodes: list[int], chance: random.Random) -> list[float]:
    size, links = chance.uniform(1, 1e11), Links(chance.uniform(16, 900), chance.uniform(1, 400))
    return [collective(size, ranks, 8, links) for ranks in nodes]


def parts_of_a_gather(name: str, chance: random.Random) -> list[float]:
    size, ranks = chance.uniform(1, 1e11), chance.choice([2, 8, *NODES])
    return [gather_seconds(size, ranks, 8, Links(300, 25), **{name: number}) for number in (1, 2, 10, 96)]


PASSES = ("forward", "train")
KINDS = (*PASSES, "generate")
FIGURES = ("tflops", "memory_gb_s", "host_gb_s")
OF_KINDS = (
    *product((better,), PASSES, ("device",), (*FIGURES, "matmul", "sustained", "attention")),
    *product((better,), ("generate",), ("device",), FIGURES),
    *product((better,), KINDS, ("links",), ("device_gb_s", "node_gb_s")),
    *product((smaller,), PASSES, ("layers", "hidden", "ffn", "vocabulary")),
    (smaller, "generate", "layers"),
    *product((more_work,), KINDS),
    *product((ranks_of_a_collective,), (all_reduce_seconds, gather_seconds), ([1, 2, 4, 8], NODES)),
    *product((parts_of_a_gather,), ("pieces", "groups")),
    *((fewer_places,), (backward_and_recomputation,), (recomputation_that_stops_early,), (a_size_of_a_product,)),
    *((links_reached_by_the_engine,), (replicas_that_gather_weights,), (shares_of_overheads,)),
    *((sums_and_gathers,), (sums_within_and_across_nodes,)),
)
LAWS: dict[str, Law] = {
    " ".join(getattr(each, "__name__", str(each)) for each in law): partial(*law) for law in OF_KINDS
}


def falling(law: Law, cases: int) -> Iterator[list[float]]:
    """Yield the times of cases that break a law."""
    chance = random.Random(20240601)
    for _ in range(cases):
        times = law(chance)
        if any(before > after * ROUNDING for before, after in zip(times, times[1:], strict=False)):
            yield times


@pytest.mark.parametrize("name", LAWS)
def test_no_time_falls(name: str) -> None:
    assert list(falling(LAWS[name], 300)) == []


def test_a_law_that_does_not_hold_is_broken() -> None:
    def reversed_law(chance: random.Random) -> list[float]:
        return better("train", "device", "tflops", chance)[::-1]

    assert list(falling(reversed_law, 50))
