"""Overheads of a step: none makes anything faster, and each slows down what it is named after."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import pytest
from small_runs import plan_of

from benchmarks.calibration.shared import ASSUMED
from benchmarks.systems.engines import DECODERS, TABLES
from benchmarks.systems.profiles import SYSTEMS
from benchmarks.systems.steps import best_step, timed_as
from benchmarks.systems.workload import ACTOR, CRITIC, REF, REWARD, Workload
from flexrlhf.config.axes import ParallelDims
from flexrlhf.guideline.costs import analytic
from flexrlhf.guideline.costs.analytic import NO_OVERHEADS, OVERHEADS, AnalyticCosts, RunOverheads
from flexrlhf.guideline.costs.cost_model import Call, Links, Mesh, Traffic, Transformer
from flexrlhf.guideline.costs.generation import step_cost
from flexrlhf.guideline.costs.profiles import (
    FROM_FIGURES,
    FROM_MEASUREMENTS,
    Accuracy,
    EngineFamily,
    StepPart,
    accuracy_by_figures,
    read_table,
)
from flexrlhf.guideline.simulation.inputs import CostSource
from flexrlhf.placement.devices import DeviceClass

FAMILIES = get_args(EngineFamily)
SEVEN = Transformer(32, 4096, 11008, 32, 32, 128, 32000)
LINKS = Links(300, 200)
ALONE, IN_STEP = AnalyticCosts(overheads=NO_OVERHEADS), AnalyticCosts()


def mesh_of(dp: int = 1, tp: int = 1, zero: int = 0) -> Mesh:
    return Mesh(DeviceClass.KNOWN["A100-80G"], LINKS, dp, ParallelDims(tp), per_node=8, zero=zero)


def call_of(kind: str, engine: str) -> Call:
    return Call(kind, SEVEN, engine, 64, 256.0, (256.0,), 512.0, micro_rows=8, decode_rows=64)  # type: ignore[arg-type]


CALLS = [
    call_of(kind, engine)
    for kind, engine in (
        ("forward", "torch"),
        ("train", "deepspeed"),
        ("train", "megatron"),
        ("generate", "vllm"),
        ("generate", "deepspeed"),
    )
]


def test_each_share_slows_down_what_it_is_named_after() -> None:
    train, generate = call_of("train", "torch"), call_of("generate", "vllm")
    mesh, half = mesh_of(tp=8), 0.5
    for call, share, slowed in (
        (train, "passes", {"compute", "attention", "elements", "head"}),
        (train, "tensor", {"tensor parallel"}),
        (generate, "decode", {"weights", "cache", "layers"}),
        (generate, "tensor", {"tensor parallel"}),
    ):
        usual = ALONE.call(call, mesh).parts
        parts = AnalyticCosts(overheads=RunOverheads(**{share: half})).call(call, mesh).parts
        for name, seconds in usual.items():
            if name in slowed:
                assert parts[name] == pytest.approx(2 * seconds), name
        if call is generate:  # a part of the passes over prompts is collectives
            assert usual["prefill"] < parts["prefill"] < 2 * usual["prefill"]
    both = AnalyticCosts(overheads=RunOverheads(decode=half, tensor=half)).call(generate, mesh).parts
    assert both["prefill"] == pytest.approx(2 * ALONE.call(generate, mesh).parts["prefill"])
    optimizer = "optimizer"
    assert IN_STEP.call(train, mesh).parts[optimizer] == ALONE.call(train, mesh).parts[optimizer]


def test_gathers_of_sharded_weights_hide_behind_the_speed_that_decoding_reaches() -> None:
    generate, mesh = call_of("generate", "deepspeed"), mesh_of(dp=16, zero=3)
    costs = [AnalyticCosts(overheads=RunOverheads(decode=share)).call(generate, mesh) for share in (1.0, 0.5)]
    alone, slower = (cost.parts for cost in costs)
    assert 0 < slower["gather"] < alone["gather"]
    busy = sum(alone[name] for name in ("weights", "compute", "cache", "layers", "launch"))
    assert alone["gather"] - slower["gather"] == pytest.approx(busy)


def test_present_overheads_are_slower_than_none() -> None:
    assert all(0 < share <= 1 for share in (OVERHEADS.passes, OVERHEADS.decode, OVERHEADS.tensor))
    for call in CALLS:
        assert IN_STEP.call(call, mesh_of()).seconds > ALONE.call(call, mesh_of()).seconds


def test_syncs_are_slower_between_nodes_alone() -> None:
    across, within, nothing = Traffic(0, 10**10), Traffic(10**10, 0), Traffic(0, 0)
    alone, slower = (
        AnalyticCosts(overheads=RunOverheads(sync=share)).sync(across, nothing, 0, LINKS) for share in (1.0, 0.5)
    )
    assert slower.parts["send"] == pytest.approx(2 * alone.parts["send"], rel=0.01)
    assert IN_STEP.sync(within, within, 10, LINKS) == ALONE.sync(within, within, 10, LINKS)


def test_layers_that_are_launched_one_by_one_take_longer_with_tensor_parallelism() -> None:
    call = call_of("generate", "torch")
    alone, shared = (step_cost(call, mesh_of(tp=tp), 1, 512, DECODERS["torch"]) for tp in (1, 8))
    graphs = [step_cost(call, mesh_of(tp=tp), 1, 512, DECODERS["vllm"]) for tp in (1, 8)]
    assert shared.seconds > alone.seconds
    assert graphs[1].seconds < graphs[0].seconds


WORKLOAD = Workload(
    models={ACTOR: SEVEN, REF: SEVEN, CRITIC: SEVEN.as_scorer(), REWARD: SEVEN.as_scorer()},
    devices=16,
    device=DeviceClass.KNOWN["A100-80G"],
    links=LINKS,
    rows=512,
    prompt=256.0,
    responses=(256.0,),
)


@pytest.mark.parametrize("name", ["openrlhf", "hybridflow", "verl", "real"])
def test_a_controlling_process_is_never_faster_than_none(name: str) -> None:
    system = SYSTEMS[name]
    step = best_step(WORKLOAD, system, TABLES.costs(system.overheads))
    assert step is not None
    free = timed_as(step, replace(system, controller_seconds=0.0))
    assert step.seconds > free.seconds
    assert step.seconds <= free.seconds + len(step.calls) * system.controller_seconds + 1e-9


def test_systems_without_overheads_of_their_own_have_those_of_plans() -> None:
    own = {name for name, system in SYSTEMS.items() if system.overheads != OVERHEADS}
    assert all(name.startswith(("deepspeed-chat", "flexrlhf", "real v1")) for name in own)
    names = {item.name for item in fields(RunOverheads)}
    assert names == {row["name"] for row in read_table(Path(analytic.__file__).with_name("overheads.csv"))}
    assert names <= set(ASSUMED)


BY_FAMILY = [accuracy_by_figures(family, part) for family in FAMILIES for part in get_args(StepPart)]


@pytest.mark.parametrize("accuracy", [*BY_FAMILY, FROM_MEASUREMENTS], ids=lambda each: each.name)
def test_a_range_has_what_is_predicted(accuracy: Accuracy) -> None:
    low, high = accuracy.seconds(10.0)
    assert low < 10 < high
    assert accuracy.has(10.0, 10.0)
    assert not accuracy.has(1.01 * high, 10.0)
    assert 0 <= accuracy.tie < accuracy.high


def test_ranges_of_families_are_between_the_measured_and_the_general_one() -> None:
    """Plans of several engines have no narrower range than those of one."""
    width = {family: accuracy_by_figures(family).high / accuracy_by_figures(family).low for family in FAMILIES}
    assert all(
        FROM_MEASUREMENTS.high / FROM_MEASUREMENTS.low < width[family] <= width["figures"] for family in FAMILIES[:3]
    )


@pytest.mark.parametrize(
    ("settings", "family"),
    [
        ((), "torch and megatron"),
        (("models.critic.engine=megatron",), "torch and megatron"),
        (("models.all.engine=deepspeed",), "deepspeed"),
        (("models.critic.engine=deepspeed",), "figures"),
        (("models.all.engine=deepspeed", "models.actor.lora={rank: 2}"), "adapters"),
    ],
    ids=str,
)
def test_a_plan_has_the_range_of_its_engines_and_adapters(settings: tuple[str, ...], family: EngineFamily) -> None:
    source, plan = CostSource(IN_STEP, "figures", FROM_FIGURES), plan_of([1, 1, 1, 1], 2, *settings)
    assert source.accuracy_of(plan) == accuracy_by_figures(family)
    assert source.accuracy_of(plan, "training") == accuracy_by_figures(family, "training")
    assert replace(source, accuracy=FROM_MEASUREMENTS).accuracy_of(plan) == FROM_MEASUREMENTS


def test_measurements_that_vary_more_have_a_wider_range() -> None:
    still, varied = (FROM_MEASUREMENTS.scattered(spread) for spread in (0.05, 0.4))
    assert still == FROM_MEASUREMENTS
    assert varied.low == pytest.approx(1 / varied.high) and varied.high == pytest.approx(1.6)
