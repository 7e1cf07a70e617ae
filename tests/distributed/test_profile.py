"""``flexrlhf profile`` with real ranks: it measures all that the cost model needs, and writes a whole file or none."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import SIZES
from commands import children, is_alive, read_until, start

from benchmarks.two_hosts import can_link, linked_hosts
from flexrlhf.config.output_path import OutputPath
from flexrlhf.config.spec_file import load_spec
from flexrlhf.data.quickstart import config_paths, prepare_corpus
from flexrlhf.errors import UserError
from flexrlhf.guideline.costs.cost_model import Call, Links, Mesh, Traffic
from flexrlhf.guideline.costs.measured import load_costs
from flexrlhf.guideline.costs.measurements import Measurements, Points, read_measurements
from flexrlhf.measure.profiled_models import (
    MeasuredRows,
    RowCounts,
    length_sample,
    profiled_models,
    profiling_spec,
    row_counts,
    slim_spec,
)
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.plan.pipeline import make_plan, make_plans

SECONDS = 60
DEVICE, LINKS = DeviceClass("any", 1, 1, 1, 1, 1, 1), Links(1, 1)


def write_config(directory: Path, **changes: Any) -> str:
    """A run whose data does not exist yet, on placements that the profile does not read."""
    model = {"init": {"model_type": "llama", **SIZES}, "optimizer": {"learning_rate": 0.1}}
    raw = {
        "name": "tiny",
        "algorithm": {"name": "ppo", "prompts_per_step": 16, "num_mini_batches": 2, "samples_per_prompt": 2},
        "models": {"actor": model, "reward": {"init": model["init"]}},
        "data": {"path": "none.jsonl", "max_prompt_tokens": 8, "max_response_tokens": 8},
        "cluster": {"devices": 2},
        "placement": [0.5] * 6,
        "schedule": {"lag": 1},
    }
    path = directory / "tiny.yaml"
    path.write_text(yaml.safe_dump(raw | changes))
    return str(path)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    directory = tmp_path_factory.mktemp("profile")
    process = start(["profile", write_config(directory), "-o", "found/costs.json", "--seconds", "1"], directory)
    out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, out
    return out, directory / "found" / "costs.json"


@pytest.fixture(scope="module")
def measured(profiled: tuple[str, Path]) -> Measurements:
    return read_measurements(profiled[1])


def rows(points: Points) -> set[int]:
    return {point.rows for point in points}


def test_the_layers_of_both_models_are_measured_in_powers_of_two(measured: Measurements) -> None:
    """Sixteen prompts of two samples, half of them on a replica; of more there are times if they are short."""
    causal, scalar = measured.models
    assert (causal.model.head, scalar.model.head) == ("causal", "scalar")
    needed, all_rows = {2, 8}, {2, 8, 32}
    for times in measured.models:
        assert set(times.layers) == {1, 2} and set(times.update) == {1, 2}
        assert not times.layers[1].summed and times.layers[2].summed
        for layers in times.layers.values():
            assert rows(layers.embedding.forward) == rows(layers.block.forward)
            for part in (layers.block, layers.head):
                for points in (part.forward, part.train):
                    assert needed <= rows(points) <= all_rows
                    # prompts and responses of 4 to 8 tokens; two samples share a prompt
                    assert all(point.tokens and 8 * point.rows <= point.tokens <= 12 * point.rows for point in points)
            assert layers.block.forward[-1].seconds + layers.head.forward[-1].seconds > 0
    assert not scalar.measures("generate") and causal.measures("generate")
    block = causal.layers[1].block
    assert [step.cache for step in block.step] == [10, 14], "three steps after the prompt, and the last three"
    assert all(needed <= rows(step.points) <= all_rows for step in block.step)
    assert all(point.tokens == 8 * point.rows // 2 for point in block.prefill)
    # of sequences of 8 to 12 tokens, to which attention is confined in a row of several
    assert causal.width == 16 and causal.row is not None and 8 <= causal.row < 16


def test_transfers_between_ranks_are_measured(measured: Measurements) -> None:
    assert measured.machine.ranks == 2 and measured.machine.threads == 1
    assert set(measured.contention) == {1, 2} and measured.contention[1] == 1
    assert set(measured.moves) == {"all_gather", "all_to_all", "point_to_point"}
    assert measured.sync is not None and measured.reduce is not None
    assert {4, 16} <= rows(measured.combine) <= {4, 16, 32}
    assert 0 < measured.bookkeeping < measured.statistics < 1


def test_the_cost_model_reads_the_file(profiled: tuple[str, Path], measured: Measurements) -> None:
    costs, model = load_costs(profiled[1], ranks=2), measured.models[0].model
    mesh = Mesh(DEVICE, LINKS, dp=2, per_node=2)
    forward = Call("forward", model, "torch", 16, 8, (8.0,), 16, item=4)
    layers = measured.models[0].layers[1]
    assert costs.call(forward, mesh).seconds >= layers.block.forward[-1].seconds + layers.head.forward[-1].seconds
    train = Call("train", model, "torch", 16, 8, (8.0,), 16, updates=2, item=4)
    assert costs.call(train, mesh).seconds > costs.call(forward, mesh).seconds
    assert costs.sync(Traffic(4 * model.parameters, 0, 1), Traffic(0, 0), 20, LINKS).seconds > 0


def test_progress_and_a_table_are_printed(profiled: tuple[str, Path]) -> None:
    out, path = profiled
    for words in (
        "measuring layers of actor (1 of 3)",
        "a layer: decoding, 10 in cache",
        "a layer, tp 2: forward and backward",
        "optimizer step, 2 replicas",
        "written to found",
    ):
        assert words in out
    assert [file.name for file in path.parent.iterdir()] == ["costs.json"]


STEP = {"prompts_per_step": 4, "num_mini_batches": 2, "samples_per_prompt": 2}
OTHERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "grpo": ({"reward": {"rule": "gsm8k"}, "placement": [1, 0.5]}, ["causal"]),
    "ac-share": ({"placement": [1, 1, 0.5]}, ["causal", "scalar"]),
}
"""Algorithm → further settings of its run, and the heads of the measured models."""


@pytest.mark.full
@pytest.mark.parametrize("name", OTHERS)
def test_models_of_other_algorithms_are_measured(name: str, tmp_path: Path) -> None:
    changes, heads = OTHERS[name]
    model = {"init": {"model_type": "llama", **SIZES}}
    models = {"actor": model} | ({} if "reward" in changes else {"reward": model})
    path = write_config(tmp_path, algorithm={"name": name, **STEP}, models=models, schedule={}, **changes)
    process = start(["profile", path, "-o", "costs.json", "--seconds", "0.1"], tmp_path)
    out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, out
    measured = read_measurements(tmp_path / "costs.json")
    assert [times.model.head for times in measured.models] == heads
    first = measured.models[0]
    assert all(map(first.measures, ("generate", "forward", "train"))) and set(first.update) == {1, 2}
    assert measured.combine


def test_a_path_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    process = start(["profile", write_config(tmp_path), "-o", "."], tmp_path)
    out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 2 and "-o .: a directory; give a file" in out and "measuring" not in out, out
    with pytest.raises(UserError, match="is a file, not a directory"):
        OutputPath(tmp_path / "file" / "costs.json", "-o").check_file(
            "profile.json", str.isspace, makes_directories=True
        )


def test_an_interrupt_leaves_no_file_and_no_process(tmp_path: Path) -> None:
    process = start(["profile", write_config(tmp_path), "-o", "costs.json"], tmp_path)
    read_until(process, "measuring")
    ranks = children(process)
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 130 and "stopped" in out, out
    assert not any(map(is_alive, ranks)) and not (tmp_path / "costs.json").exists()


def test_lengths_come_from_the_data_or_are_the_maximum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick start's prompts come without responses; its evaluation set has them."""
    monkeypatch.chdir(tmp_path)
    plan = make_plans([load_spec(path) for path in config_paths()])[-1]
    assert (plan.data.prompt_lengths(), plan.data.response_lengths()) == ((), ())
    assert set(length_sample(plan).responses) == set(range(10, 21))
    prepare_corpus()
    responses, prompts = plan.data.response_lengths(), plan.data.prompt_lengths()
    assert len(set(responses)) > 5 and 10 < sum(responses) / len(responses) < 20 == max(responses)
    assert len(set(prompts)) > 2 and max(prompts) <= 16
    rows = length_sample(plan).rows(8)
    assert [max(each) for each in zip(*rows, strict=True)] == [max(prompts), max(responses)]
    settings = plan.model("actor").model_copy(update={"micro_batch_tokens": 900, "generate_tokens": 36 * 200})
    expected = RowCounts(
        combine=MeasuredRows((8, 32), (64,)),
        passes=MeasuredRows((2, 8, 32)),
        decode=MeasuredRows((1, 4, 16, 64)),
    )
    assert row_counts(plan, settings, tokens=25.0) == expected


def test_a_slice_has_a_share_of_heads_features_and_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks measure tensor parallelism of two themselves, and a slice of four each by itself."""
    monkeypatch.chdir(tmp_path)
    model = {"init": {"model_type": "llama", **SIZES, "num_key_value_heads": 4}}
    (plan,) = make_plans([load_spec(write_config(tmp_path, models={"actor": model, "reward": model}))])
    base = make_plan(profiling_spec(plan, [plan], 2, "cpu"))
    causal, scalar = profiled_models(base, most_tp=8)
    assert causal.slices == (1, 2, 4) and causal.trunk is None
    assert scalar.slices == (1,) and scalar.trunk == causal.transformer, "it has the layers of the first"
    for tp, share, layout in ((1, 1, (2, 1)), (2, 1, (1, 2)), (4, 4, (2, 1))):
        slim = make_plan(slim_spec(base, 3, tp))
        found, whole = slim.shapes["actor"].sizes, base.shapes["actor"].sizes
        assert found is not None and whole is not None
        assert (found.layers, found.hidden, found.head_dim) == (3, whole.hidden, whole.head_dim)
        assert found.heads * share == whole.heads and found.kv_heads * share == whole.kv_heads
        assert found.ffn * share == whole.ffn and found.vocabulary * share == whole.vocabulary
        assert [(m.layout.dp, m.layout.dims.tp) for m in slim.placement.models if m.role == "actor"] == [layout]


@pytest.mark.full
@pytest.mark.skipif(not can_link(), reason="needs the right to make network namespaces")
def test_the_link_between_two_machines_is_measured(tmp_path: Path) -> None:
    """One of 400 Mbit/s, which is 0.05 GB/s; node 0 writes the file."""
    nodes = {"nodes": [{"count": 2, "devices": 1}], "device": "cpu", "memory_gb": 8}
    config = write_config(tmp_path, cluster=nodes)
    with linked_hosts() as link:
        link.limit(400)
        options = ["profile", config, "--seconds", "0.2", "--nnodes", "2", "--rdzv-endpoint", f"{link.hosts[0]}:29500"]
        jobs = [link.start(number, [*options, "--node-rank", str(number)], tmp_path) for number in (0, 1)]
        outputs = [job.communicate(timeout=2 * SECONDS)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    found = read_measurements(tmp_path / "runs" / "profile.json")
    assert found.network_gb_s is not None and 0.02 < found.network_gb_s < 0.06
    shown = f"{found.network_gb_s:.3g} GB/s"
    assert f"slowest link between machines     {shown}" in outputs[0]
    assert outputs[1].endswith(f"slowest link between machines: {shown}; node 0 measures the rest\n")
    # a sync that is fast on one machine is as slow as the link
    costs = load_costs(tmp_path / "runs" / "profile.json")
    sent = costs.sync(Traffic(0, 10_000_000), Traffic(0, 0), 1, LINKS).parts["send"]
    assert sent == pytest.approx(0.01 / found.network_gb_s)
