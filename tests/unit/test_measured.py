"""The measured cost model: layers composed to calls on any layout, and shapes that nobody measured."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flexrlhf.config.axes import ParallelDims
from flexrlhf.errors import UserError
from flexrlhf.guideline.costs.cost_model import Call, Links, MeanPass, Mesh, Traffic, Transformer
from flexrlhf.guideline.costs.layer_prices import Curve
from flexrlhf.guideline.costs.measured import MeasuredCosts, load_costs, slowdown
from flexrlhf.guideline.costs.measurements import (
    DecodeTimes,
    LayerTimes,
    LinearTime,
    Machine,
    Measurements,
    ModelTimes,
    PartTimes,
    Point,
    Points,
    read_measurements,
    write_measurements,
)
from flexrlhf.placement.devices import DeviceClass

MODEL = Transformer(layers=4, hidden=64, ffn=128, heads=4, kv_heads=4, head_dim=16, vocabulary=100)
DEVICE = DeviceClass("any", 1, 1, 1, 1, 1, 1)
LINKS = Links(1, 1)
MESH = Mesh(DEVICE, LINKS, dp=2, per_node=2)
WIDTH, PROMPT = 32, 16


def points(fixed: float, per_token: float, *tokens: int) -> Points:
    return tuple(Point(rows=count // WIDTH, tokens=count, seconds=fixed + per_token * count) for count in tokens)


def steps(fixed: float, per_row: float, *rows: int) -> Points:
    return tuple(Point(rows=count, seconds=fixed + per_row * count) for count in rows)


SIZES = (256, 512, 1024)
EMBEDDING = PartTimes(forward=points(0.0, 1e-4, *SIZES), train=points(0.0, 3e-4, *SIZES))
HEAD = PartTimes(
    forward=points(0.2, 1e-3, *SIZES),
    train=points(0.6, 3e-3, *SIZES),
    prefill=points(0.1, 1e-3, *SIZES),
    step=(DecodeTimes(cache=16, points=steps(0.1, 0.01, 4, 32)), DecodeTimes(cache=32, points=steps(0.1, 0.01, 4, 32))),
)


def block(share: float) -> PartTimes:
    """A layer of which a rank has a ``share`` of the products."""
    return PartTimes(
        forward=points(0.2, share * 2e-3, *SIZES),
        train=points(0.6, share * 6e-3, *SIZES),
        prefill=points(0.1, share * 2e-3, *SIZES),
        step=(
            DecodeTimes(cache=16, points=steps(0.05, share * 0.01, 4, 32)),
            DecodeTimes(cache=32, points=steps(0.05, share * 0.02, 4, 32)),
        ),
    )


def slice_of(share: float) -> LayerTimes:
    return LayerTimes(embedding=EMBEDDING, block=block(share), head=HEAD)


UPDATE = LinearTime(start=0.1, per_item=0.05, per_byte=1e-7)
TIMES = ModelTimes(
    model=MODEL,
    engine="torch",
    item=4,
    width=WIDTH,
    prompt=PROMPT,
    layers={1: slice_of(1.0), 4: slice_of(0.25)},
    update={1: UPDATE, 2: UPDATE.model_copy(update={"start": 0.6})},
)
MEASURED = Measurements(
    machine=Machine(date="2025-01-01", torch="2", transformers="5", device="cpu", cores=2, threads=1, ranks=2),
    models=(TIMES,),
    combine=points(0.1, 0.01, 8, 16),
    bookkeeping=0.001,
    statistics=0.002,
    contention={1: 1.0, 2: 1.1},
    memory_bytes_s=1e10,
    reduce=LinearTime(start=0.01, per_byte=1e-6),
    moves={"all_gather": LinearTime(start=0.0, per_item=0.1, per_byte=1e-3)},
    sync=LinearTime(start=0.1, per_item=0.01, per_byte=1e-6),
    switch=LinearTime(start=0.0, per_byte=1e-9),
    save=LinearTime(start=0.5, per_byte=1e-9),
)
COSTS = MeasuredCosts(MEASURED)


def call(kind: Any, rows: int, **changes: Any) -> Call:
    return replace(Call(kind, MODEL, "torch", rows, PROMPT, (10.0,), WIDTH, micro_rows=rows, item=4), **changes)


def seconds(call: Call, mesh: Mesh = MESH, costs: MeasuredCosts = COSTS) -> float:
    return costs.call(call, mesh).seconds


def test_what_crosses_between_nodes_takes_as_long_as_their_network() -> None:
    """1 GB/s, as reached, where the same bytes were faster on one machine."""
    assert MEASURED.sync is not None
    here, there = Traffic(2_000_000, 0), Traffic(0, 2_000_000)
    slow = Links(1, 1e-4)
    assert COSTS.sync(here, Traffic(0, 0), 1, slow).seconds == pytest.approx(0.1 + 0.01 + 2.0)
    assert COSTS.sync(there, Traffic(0, 0), 1, slow).seconds == pytest.approx(2e6 / 1e5)
    assert COSTS.sync(there, Traffic(0, 0), 1, LINKS) == COSTS.sync(here, Traffic(0, 0), 1, LINKS)
    assert COSTS.move("all_gather", there, Links(1, 1e-9)).seconds == pytest.approx(2e6)
    # replicas on two nodes: half of twice the gradients
    train, gradients = call("train", 8), 4 * MODEL.trained_parameters
    spread = replace(MESH, per_node=1, links=Links(1, 1e-6))
    more = COSTS.call(train, spread).parts["gradients"] - COSTS.call(train, MESH).parts["gradients"]
    assert more == pytest.approx(train.updates * gradients / 1e3)


def forward(tokens: float, share: float = 1.0) -> tuple[float, float, float]:
    """Embedding, four layers, head."""
    return 1e-4 * tokens, 4 * (0.2 + share * 2e-3 * tokens), 0.2 + 1e-3 * tokens


def train(tokens: float) -> float:
    return 3e-4 * tokens + 4 * (0.6 + 6e-3 * tokens) + 0.6 + 3e-3 * tokens


def update(start: float = 0.1, tp: int = 1) -> float:
    embedding = MODEL.hidden * MODEL.vocabulary
    parameters = embedding + (MODEL.parameters - embedding) / tp
    return start + 4 * 0.05 + 1e-7 * 4 * parameters


@pytest.mark.parametrize("rows", [1, 8, 12, 32, 100])
def test_a_forward_is_the_sum_of_its_layers(rows: int) -> None:
    assert seconds(call("forward", rows)) == pytest.approx(sum(forward(WIDTH * rows)) + 0.001)


def test_a_pipeline_waits_for_its_slowest_stage() -> None:
    """Two stages of two layers, three micro-batches: the last stage, with the head, works three times, the first
    fills the pipeline once; activations travel twice between them."""
    mesh = replace(MESH, dp=1, dims=ParallelDims(pp=2))
    parts = COSTS.call(call("forward", 24, micro_rows=8), mesh).parts
    embedding, layers, head = forward(WIDTH * 8)
    assert parts["compute"] == pytest.approx(3 * (layers / 2 + head))
    assert parts["bubble"] == pytest.approx(embedding + layers / 2)
    message = 4 * MODEL.hidden * WIDTH * 8
    assert parts["pipeline"] == pytest.approx(3 * (0.01 + 1e-6 * message))


def test_slices_of_tensor_parallel_ranks_are_interpolated_and_their_sums_added() -> None:
    """One rank and four were measured: two lie between in the logarithm; eight have half of the products of four."""
    tokens = WIDTH * 16
    (embedding, whole, head), (_, quarter, _) = (forward(tokens, share) for share in (1.0, 0.25))
    beyond = (1e-4 * tokens + 4 * 0.25 * 2e-3 * tokens + 1e-3 * tokens) / 2 + 4 * 0.2 + 0.2
    between = embedding + (whole * quarter) ** 0.5 + head
    for tp, expected in ((4, embedding + quarter + head), (2, between), (8, beyond)):
        mesh = replace(MESH, dp=1, dims=ParallelDims(tp), per_node=tp)
        parts = COSTS.call(call("forward", 16), mesh).parts
        assert parts["compute"] == pytest.approx(expected, rel=1e-5)
        # two sums in each of four layers, of a ring's bytes
        size = 4 * MODEL.hidden * tokens * (tp - 1) / tp / (1 / 2)
        assert parts["tensor parallel"] == pytest.approx(8 * (0.01 + 1e-6 * size))
    split = COSTS.call(call("train", 16), replace(MESH, dp=1, dims=ParallelDims(tp=4), per_node=4)).parts
    assert split["optimizer"] == pytest.approx(update(tp=4))


def test_a_slower_class_takes_longer_than_the_measured_machine() -> None:
    slow = replace(MESH, device=replace(MESH.device, relative_speed=0.25))
    parts, slower = (COSTS.call(call("forward", 8), mesh).parts for mesh in (MESH, slow))
    assert slower["compute"] == pytest.approx(4 * parts["compute"])
    assert slower["bookkeeping"] == parts["bookkeeping"]


def test_every_pass_is_launched() -> None:
    assert seconds(call("forward", 32, micro_rows=8)) == pytest.approx(4 * sum(forward(WIDTH * 8)) + 0.001)
    assert seconds(call("train", 32, micro_rows=8)) == pytest.approx(4 * train(WIDTH * 8) + update(0.6) + 0.002)


def test_recomputing_repeats_the_forward_pass_of_every_layer() -> None:
    more = seconds(call("train", 32, recompute="full")) - seconds(call("train", 32))
    assert more == pytest.approx(forward(WIDTH * 32)[1])
    tiled = seconds(call("train", 32, tiled_mlp=True)) - seconds(call("train", 32))
    assert 0 < tiled < more
    assert seconds(call("train", 32, recompute="full", tiled_mlp=True)) == seconds(call("train", 32, recompute="full"))
    offloaded = COSTS.call(call("train", 32, recompute="full", offload_activations=True), MESH).parts["host"]
    model = call("train", 32).model
    size = call("train", 32).item * model.hidden * WIDTH * 32 * model.layers
    assert offloaded == pytest.approx(2 * COSTS.switch(int(size), MESH.device).seconds)


def test_passes_are_priced_by_the_tokens_that_they_compute() -> None:
    """Half of the tokens of 32 sequences, in two passes."""
    passes = MeanPass(count=2, rows=8, width=WIDTH, responses=80, texts=32 * WIDTH)
    assert seconds(call("forward", 32, passes=passes)) == pytest.approx(2 * sum(forward(WIDTH * 8)) + 0.001)


def test_times_never_fall_with_rows_even_where_the_measured_ones_do() -> None:
    curve = Curve.of([Point(rows=4, seconds=2.0), Point(rows=8, seconds=1.5), Point(rows=16, seconds=3.0)])
    found = [curve.seconds(rows / 4) for rows in range(200)]
    assert all(low <= high for low, high in pairwise(found))
    assert found[0] >= 0


def test_the_fixed_part_is_not_negative() -> None:
    curve = Curve.of([Point(rows=4, seconds=1.0), Point(rows=8, seconds=4.0)])
    assert curve.seconds(2) == pytest.approx(0.5) and curve.fixed == 0


def test_one_point_is_in_proportion_beyond_it() -> None:
    curve = Curve.of([Point(rows=4, seconds=1.0)])
    assert [curve.seconds(rows) for rows in (1, 4, 8)] == [1.0, 1.0, 2.0]


def generation(rows: int) -> float:
    """Prompts of 16 tokens, then nine steps, with 20.5 columns of keys and values in the mean."""
    prompts = 4 * (0.1 + 2e-3 * PROMPT * rows) + 0.1 + 1e-3 * PROMPT * rows
    per_row = 0.01 + (20.5 - 16) / (32 - 16) * 0.01
    return prompts + 9 * (4 * (0.05 + per_row * rows) + 0.1 + 0.01 * rows) + 0.002


def test_generation_is_a_prompt_and_a_step_for_every_further_token() -> None:
    assert seconds(call("generate", 16)) == pytest.approx(generation(16))


def test_samples_of_a_prompt_read_it_once() -> None:
    saved = seconds(call("generate", 16)) - seconds(call("generate", 16, prompt_samples=4))
    assert saved == pytest.approx((4 * 2e-3 + 1e-3) * PROMPT * 12)


def test_answers_that_end_early_save_time_but_not_all_of_it() -> None:
    alike, spread = call("generate", 16, responses=(10.0,)), call("generate", 16, responses=(2.0, 10.0))
    half = call("generate", 8, responses=(10.0,))
    assert seconds(half) < seconds(spread) < seconds(alike)


def test_training_takes_the_time_of_each_update() -> None:
    once = seconds(call("train", 8, updates=2, micro_rows=4))
    assert once == pytest.approx(2 * (train(WIDTH * 4) + update(0.6)) + 0.002)


def test_replicas_that_were_not_measured_pay_for_their_sum() -> None:
    four = seconds(call("train", 4), replace(MESH, dp=4, per_node=4))
    size = 4 * MODEL.parameters
    assert four == pytest.approx(train(WIDTH * 4) + update() + 0.01 + 1e-6 * size * (3 / 4) / (1 / 2) + 0.002)


def test_another_shape_costs_launches_by_layers_and_rows_by_operations() -> None:
    deep = replace(MODEL, layers=8)
    more = seconds(call("forward", 16, model=deep)) - seconds(call("forward", 16))
    assert more == pytest.approx(forward(WIDTH * 16)[1])
    wide = replace(MODEL, hidden=128, ffn=256, head_dim=32)
    launched, layers = 4 * 0.2, forward(WIDTH * 16)[1]
    part = COSTS.call(call("forward", 16, model=wide), MESH).seconds
    assert launched + 3 * (layers - launched) < part < launched + 5 * (layers - launched)


def test_the_model_of_the_same_kind_and_nearest_size_is_taken() -> None:
    slow = slice_of(1.0).model_copy(update={"head": HEAD.model_copy(update={"forward": points(9.0, 1e-3, *SIZES)})})
    scorer = TIMES.model_copy(update={"model": MODEL.as_scorer(), "layers": {1: slow}})
    costs = MeasuredCosts(MEASURED.model_copy(update={"models": (scorer, TIMES)}))
    causal, scalar = (seconds(call("forward", 16, model=m), costs=costs) for m in (MODEL, MODEL.as_scorer()))
    assert causal == pytest.approx(seconds(call("forward", 16))) and scalar - causal == pytest.approx(8.8)


def test_a_smaller_model_is_never_free() -> None:
    tiny = Transformer(layers=1, hidden=8, ffn=16, heads=1, kv_heads=1, head_dim=8, vocabulary=10)
    for kind in ("generate", "forward", "train"):
        assert 0 < seconds(call(kind, 16, model=tiny)) < seconds(call(kind, 16))


def test_what_was_not_measured_is_analytic() -> None:
    assert seconds(call("forward", 16, engine="deepspeed")) > 0
    assert COSTS.move("all_to_all", Traffic(100, 0, 1), LINKS).seconds > 0
    assert COSTS.move("none", Traffic(0, 0, 0), LINKS).seconds == 0


def test_what_travels_follows_its_line() -> None:
    assert COSTS.move("all_gather", Traffic(100, 0, 2), LINKS).seconds == pytest.approx(0.2 + 0.1)
    assert COSTS.sync(Traffic(1000, 0, 1), Traffic(0, 0), 5, LINKS).seconds == pytest.approx(0.1 + 0.05 + 0.001)
    assert COSTS.save(10**9).seconds == pytest.approx(1.5)
    assert COSTS.switch(10**9, DEVICE).seconds == pytest.approx(1.0)
    assert COSTS.combine(16, 32).seconds == pytest.approx(0.26 + 0.002)


def test_ranks_share_cores() -> None:
    assert slowdown(MEASURED, 2) == 1.0
    assert slowdown(MEASURED, 1) == pytest.approx(1 / 1.1)
    assert slowdown(MEASURED, 4) == pytest.approx(2.0)


def test_measurements_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.json"
    write_measurements(path, MEASURED)
    assert read_measurements(path) == MEASURED
    assert load_costs(path).call(call("forward", 8), MESH) == COSTS.call(call("forward", 8), MESH)
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 99}, "measurements of version 99, expected 2"),
        ({"version": None}, "measurements of version None"),
        ({"bookkeeping": "long"}, "bookkeeping: "),
        ({"bookkeeping": -1.0}, "bookkeeping is -1.0, where a measurement is a number of at least 0"),
        ({"statistics": float("nan")}, "statistics is nan"),
        ({"contention": {"2": -2}}, "contention.2 is -2"),
        ({"models": [{}]}, "models.0"),
    ],
)
def test_other_files_are_refused_in_a_sentence(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(json.loads(MEASURED.model_dump_json()) | changes))
    with pytest.raises(UserError, match=words) as error:
        read_measurements(path)
    assert "run flexrlhf profile again" in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file; flexrlhf profile -o"):
        read_measurements(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("text")
    with pytest.raises(UserError, match="not JSON"):
        read_measurements(tmp_path / "text.json")
