"""Costs of generation: what must be true of any constants, how batches end, and a few published speeds."""

from __future__ import annotations

import csv
import heapq
import json
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.calibration import generation
from benchmarks.systems.engines import DECODERS, TABLES
from flexrlhf.config.axes import ParallelDims
from flexrlhf.config.model_names import MODELS
from flexrlhf.guideline.costs.analytic import NO_OVERHEADS
from flexrlhf.guideline.costs.cost_model import Call, Cost, Links, Mesh, Transformer
from flexrlhf.guideline.costs.decode_phases import EVEN_BINS, TAIL_BINS, decode_phases, length_bins
from flexrlhf.guideline.costs.generation import generate_cost, prefill_cost, step_cost
from flexrlhf.guideline.costs.kernels import FIGURES, LAUNCH_SECONDS
from flexrlhf.guideline.costs.profiles import Batching, host_factor
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.weights.families import model_sizes

SMALL = Transformer(24, 896, 4864, 14, 2, 64, 151936, tied=True)
SEVEN = Transformer(32, 4096, 11008, 32, 32, 128, 32000)
QWEN_SEVEN = Transformer(28, 3584, 18944, 28, 4, 128, 152064)
SEVENTY = Transformer(80, 8192, 28672, 64, 8, 128, 32000)
COSTS = TABLES.costs(NO_OVERHEADS)


def mesh_of(name: str = "A100-80G", **sizes: int) -> Mesh:
    device = DeviceClass.KNOWN[name]
    dims = ParallelDims(**{name: sizes.pop(name) for name in ParallelDims._fields if name in sizes})
    return Mesh(device, Links(device.link_gb_s, device.node_gb_s), dims=dims, **{"per_node": 8, **sizes})


def call_of(engine: str = "vllm", **changes: object) -> Call:
    usual = Call("generate", SEVEN, engine, 64, 128.0, (512.0,), 128.0, decode_rows=64)
    return replace(usual, **changes)  # type: ignore[arg-type]


def seconds_of(call: Call, mesh: Mesh | None = None) -> float:
    return COSTS.call(call, mesh or mesh_of()).seconds


def first_tokens_of(call: Call, mesh: Mesh) -> float:
    return prefill_cost(call, mesh, DECODERS[call.engine]).seconds


def one_step(call: Call, mesh: Mesh, rows: float, context: float) -> Cost:
    return step_cost(call, mesh, rows, context, DECODERS[call.engine])


def test_of_the_same_lengths_every_batching_takes_the_same() -> None:
    """And that is steps times the time of one, in addition to the prefill."""
    for batching in ("refill", "group", "static"):
        phases = list(decode_phases(batching, 64, 32, (101.0,)))
        assert sum(phase.steps for phase in phases) == pytest.approx(200)
        assert all(phase.rows == 32 and phase.age == 50 for phase in phases)
    call, mesh = call_of(), mesh_of()
    steps = 511 * one_step(call, mesh, 64, 128 + 511 / 2).seconds
    assert seconds_of(call, mesh) == pytest.approx(first_tokens_of(call, mesh) + steps)


def test_ended_rows_cost_nothing_where_they_leave() -> None:
    """Static batches carry them; groups lose them; refilled places take the next."""
    draw = random.Random(0)
    call = call_of("torch", rows=256, responses=tuple(draw.expovariate(1 / 300) for _ in range(200)))
    profile, mesh = DECODERS["vllm"], mesh_of()
    static, group, refill = (
        generate_cost(call, mesh, replace(profile, batching=batching)).seconds
        for batching in ("static", "group", "refill")
    )
    assert refill < group < static


@pytest.mark.parametrize("rows, places", [(64, 64), (512, 64), (200, 128), (1000, 16)])
def test_steps_are_those_of_a_walk_over_every_row(rows: int, places: int) -> None:
    draw = random.Random(rows)
    sample = tuple(draw.expovariate(1 / 200) for _ in range(2000))
    phases = list(decode_phases("refill", rows, places, sample))
    walks = [_walked(draw.choices(sample, k=rows), places) for _ in range(20)]
    assert sum(phase.steps for phase in phases) == pytest.approx(sum(walks) / len(walks), rel=0.25)
    tokens = rows * (sum(sample) / len(sample) - 1)
    assert sum(phase.steps * phase.rows for phase in phases) == pytest.approx(tokens, rel=0.01)


@pytest.mark.parametrize("batching", ["refill", "group", "static"])
def test_replicas_wait_for_the_longest_response_of_all(batching: Batching) -> None:
    draw, replicas, rows = random.Random(0), 16, 64
    sample = tuple(draw.lognormvariate(5, 0.9) for _ in range(2000))
    steps, alone = (
        sum(phase.steps for phase in decode_phases(batching, rows, rows, sample, replicas=number))
        for number in (replicas, 1)
    )
    longest = [max(draw.choices(sample, k=replicas * rows)) - 1 for _ in range(100)]
    assert steps == pytest.approx(sum(longest) / len(longest), rel=0.05) and alone < 0.8 * steps


def _walked(lengths: list[float], places: int) -> float:
    """Steps until the last row ends, if every place that gets free takes the next row."""
    ends = [0.0] * places
    for length in lengths:
        heapq.heappush(ends, heapq.heappop(ends) + length)
    return max(ends)


def test_a_large_sample_is_cut_into_few_pieces_that_keep_its_mean_and_its_tail() -> None:
    draw = random.Random(1)
    sample = tuple(2 + draw.expovariate(1 / 300) for _ in range(500))
    pieces = length_bins(sample)
    assert len(pieces) <= EVEN_BINS + TAIL_BINS
    assert pieces[-1].end == pytest.approx(max(sample) - 1)
    assert sum(piece.steps * piece.alive for piece in pieces) == pytest.approx(sum(sample) / 500 - 1)


def test_answers_of_one_token_are_the_prefill() -> None:
    call, mesh = call_of(responses=(1.0,)), mesh_of()
    assert seconds_of(call, mesh) == first_tokens_of(call, mesh)


def test_samples_of_a_prompt_read_it_once() -> None:
    """Eight rows of a prompt cost what one costs, but for the engine's entry of each."""
    mesh = mesh_of(tp=2)
    together, one_each = call_of(rows=64, prompt_samples=8), call_of(rows=8)
    parts, of_prompts = (dict(prefill_cost(call, mesh, DECODERS["vllm"]).parts) for call in (together, one_each))
    entries = parts.pop("scheduler") - of_prompts.pop("scheduler")
    assert parts == of_prompts
    assert entries == pytest.approx(host_factor(mesh.device) * 56 * DECODERS["vllm"].entry_seconds)
    assert seconds_of(together) < seconds_of(replace(together, prompt_samples=1))


def test_launches_hide_behind_a_busy_device() -> None:
    mesh = mesh_of()
    small = one_step(call_of("transformers", model=SMALL), mesh, 1, 100)
    large = one_step(call_of("transformers", model=SEVENTY), mesh, 32, 4000)
    assert small.largest == "launch"
    assert large.parts["launch"] == 0


def test_adapters_of_their_own_start_two_kernels_in_every_step() -> None:
    plain, apart = (one_step(call_of(adapters_apart=number), mesh_of(), 16, 500) for number in (0, 7 * 32))
    assert apart.seconds - plain.seconds == pytest.approx(2 * 7 * 32 * FIGURES.start_seconds)
    assert apart.parts | {"layers": 0} == plain.parts | {"layers": 0}


def test_a_pipeline_decodes_no_faster() -> None:
    call = call_of()
    assert one_step(call, mesh_of(pp=4), 16, 500).seconds == one_step(call, mesh_of(), 16, 500).seconds


def test_zero_gathers_all_weights_in_every_step() -> None:
    """32 A100, 33B: 1.46 s of a step through 100 GB/s of a node, and worse if it were less (FlexRLHF, DSChat)."""
    model = Transformer(60, 6656, 17920, 52, 52, 128, 32000)
    cost = one_step(call_of("deepspeed", model=model), mesh_of(dp=32, zero=3), 8, 256)
    assert cost.largest == "gather"
    assert cost.parts["gather"] > 2 * model.parameters / 200e9
    assert "gather" not in cost.parts or one_step(call_of("deepspeed"), mesh_of(dp=32), 8, 256).parts["gather"] == 0


def test_heads_that_share_keys_save_reading_only_where_kernels_know() -> None:
    shared, own = QWEN_SEVEN, replace(QWEN_SEVEN, kv_heads=28)
    for engine, factor in (("vllm", 7.0), ("transformers", 1.0)):
        few = one_step(call_of(engine, model=shared), mesh_of(), 8, 1000).parts["cache"]
        many = one_step(call_of(engine, model=own), mesh_of(), 8, 1000).parts["cache"]
        assert many / few == pytest.approx(factor)


def test_key_value_heads_are_copied_to_devices_beyond_their_number() -> None:
    call = call_of(model=QWEN_SEVEN)
    four, eight = (one_step(call, mesh_of(tp=tp), 8, 1000).parts["cache"] for tp in (4, 8))
    assert four == eight


def test_a_step_reads_the_experts_that_its_rows_take() -> None:
    """One row takes 8 of 128, many rows take all; ranks that share a layer have their part of it."""
    sizes = model_sizes(MODELS["qwen3-235b-a22b"])
    assert sizes is not None
    model = Transformer(**sizes.by_name)
    dense = model.parameters - model.expert_parameters - model.hidden * (model.vocabulary + 1)

    def read(rows: int, tp: int = 8) -> float:
        seconds = one_step(call_of(model=model), mesh_of("H100-80G", tp=tp), rows, 1000).parts["weights"]
        return seconds * FIGURES.weights * tp * 3350e9 / 2

    assert read(1) == pytest.approx(dense + model.expert_parameters / 16, rel=0.01)
    assert read(32) == pytest.approx(dense + model.expert_parameters * (1 - (1 - 1 / 16) ** 32), rel=0.01)
    assert read(512) == pytest.approx(dense + model.expert_parameters, rel=0.01) == read(512, tp=16)


def test_a_step_launches_products_of_experts_one_by_one_where_torch_has_no_kernel() -> None:
    """Two of each of 128 experts in 94 layers, by this package's own decoding on an A100."""
    sizes = model_sizes(MODELS["qwen3-235b-a22b"])
    assert sizes is not None
    model = Transformer(**sizes.by_name)

    def launched(name: str, engine: str) -> float:
        parts, mesh = one_step(call_of(engine, model=model), mesh_of(name), 8, 1000).parts, mesh_of(name)
        return (parts["launch"] + parts["weights"] + parts["compute"]) / host_factor(mesh.device)

    assert launched("A100-80G", "torch") > 94 * 2 * 128 * LAUNCH_SECONDS
    assert launched("H100-80G", "torch") < 94 * 2 * 128 * LAUNCH_SECONDS


def test_latents_are_read_by_every_device_and_made_into_keys_by_transformers() -> None:
    """A latent of 576 numbers a layer is whole on each of two devices; of its keys and values each makes half."""
    sizes = model_sizes(MODELS["deepseek-v2-lite"])
    assert sizes is not None
    model = Transformer(**sizes.by_name)
    assert model.kv_bytes() == 2 * 27 * 576

    def cache(engine: str, tp: int) -> float:
        return one_step(call_of(engine, model=model), mesh_of(tp=tp), 64, 4096).parts["cache"]

    assert cache("vllm", 2) == pytest.approx(cache("vllm", 1))
    assert 0.5 * cache("torch", 1) < cache("torch", 2) < 0.6 * cache("torch", 1)
    assert cache("torch", 1) > 10 * cache("vllm", 1)


def test_a_host_is_as_old_as_its_bus() -> None:
    factors = [host_factor(DeviceClass.KNOWN[name]) for name in ("H100-80G", "A100-80G", "V100-32G")]
    assert factors == sorted(factors)
    assert factors[0] == 1


@pytest.mark.parametrize(
    "engine, model, tp, prompt, answer, rows, tokens_per_second",
    [
        # gpt-fast, README: 7B and 70B on A100, one sequence
        ("gpt-fast", SEVEN, 1, 6, 200, 1, 104.9),
        ("gpt-fast", SEVEN, 8, 6, 200, 1, 328.4),
        ("gpt-fast", SEVENTY, 8, 6, 200, 1, 62.5),
        # Qwen2.5 speed benchmark, A100, one sequence
        ("transformers", SMALL, 1, 1, 2048, 1, 47.4),
        ("transformers", QWEN_SEVEN, 1, 1, 2048, 1, 40.4),
        ("transformers", QWEN_SEVEN, 1, 30720, 2048, 1, 18.8),
        ("vllm-0.6", QWEN_SEVEN, 1, 30720, 2048, 1, 70.3),
        # LMDeploy 0.1.0, A100, static batches
        ("lmdeploy", SEVEN, 1, 128, 2048, 16, 1010.6),
    ],
)
def test_published_speeds(
    engine: str, model: Transformer, tp: int, prompt: int, answer: int, rows: int, tokens_per_second: float
) -> None:
    call = call_of(engine, model=model, rows=rows, prompt=float(prompt), responses=(float(answer),))
    assert rows * answer / seconds_of(call, mesh_of(tp=tp)) == pytest.approx(tokens_per_second, rel=0.15)


def test_a_cost_is_ready_in_a_blink() -> None:
    """A plan is one of thousands; 0.1 ms on an idle core, here with much to spare, without the time of others on it."""
    draw = random.Random(2)
    call = call_of(rows=512, responses=tuple(draw.expovariate(1 / 300) for _ in range(256)))
    meshes = [mesh_of(tp=tp, dp=dp) for tp in (1, 2, 4, 8) for dp in range(1, 51)]
    COSTS.call(call, meshes[0])
    start = time.process_time()
    for mesh in meshes:
        COSTS.call(call, mesh)
    assert (time.process_time() - start) / len(meshes) < 1e-3


MODEL = "model,layers,hidden,ffn,heads,kv_heads,head_dim,vocab,gated_mlp,tied_embeddings\n"
SETTINGS = ("model", "call", "placement", "tp", "pp", "micro_bs", "global_batch", "prompt_len", "gen_len", "dtype")
COLUMNS = ("id", "kind", "system", "version", "gpu", "n_gpus", *SETTINGS, "metric", "value", "unit", "split", "group")
USUAL = {
    "kind": "decode",
    "system": "vLLM",
    "version": "0.6.0",
    "gpu": "H100-80GB-SXM",
    "n_gpus": "2",
    "model": "Llama-3-8B-Instruct (bf16)",
    "tp": "2",
    "global_batch": "16",
    "prompt_len": "128",
    "gen_len": "256",
    "dtype": "bf16",
    "metric": "throughput",
    "value": "100",
    "unit": "out tokens/s (total)",
    "group": "vllm-0.6/h100",
}


def directory_of(path: Path, *rows: dict[str, str]) -> Path:
    """A directory of measurements; each row as ``USUAL`` but for what is given."""
    (path / "models.csv").write_text(MODEL + "Llama-3.1-8B,32,4096,14336,32,8,128,128256,1,0\n")
    (path / "sharegpt320_lens.json").write_text(json.dumps({"input_lens": [100, 300], "output_lens": [50, 150]}))
    with (path / "measurements_calib.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows({"id": f"row-{index}", **USUAL, **row} for index, row in enumerate(rows))
    return path


def test_measurements_in_every_unit_are_seconds(tmp_path: Path) -> None:
    units = ("out tokens/s (total)", "out tokens/s/GPU", "requests/s", "s", "ms")
    cases, left_out = generation.read_cases(directory_of(tmp_path, *({"unit": unit} for unit in units)))
    assert [case.measured for case in cases] == pytest.approx([16 * 256 / 100, 16 * 256 / 200, 16 / 100, 100, 0.1])
    assert not left_out


def test_rows_become_calls_as_they_were_run(tmp_path: Path) -> None:
    burst = {
        "global_batch": "320 requests, max-num-seqs 1024 default 256",
        "prompt_len": "mean 205 (sharegpt list)",
        "gen_len": "~190 mean",
        "call": "offline burst of 320 requests",
    }
    step = {**burst, "global_batch": "~230-290 (first steps)", "metric": "decode_step_time", "unit": "ms"}
    stages = {"system": "HF Transformers", "version": "4.46", "placement": "device_map over 2", "group": "hf"}
    saturated = {"system": "TensorRT-LLM", "version": "1.0", "dtype": "fp8", "global_batch": "saturated", "group": "t"}
    cases, _ = generation.read_cases(directory_of(tmp_path, burst, step, stages, saturated))
    assert (cases[0].call.rows, cases[0].call.decode_rows) == (320, 320)
    assert cases[0].call.mean_response == pytest.approx(190)
    assert cases[1].rows == 260
    assert (cases[2].mesh.dims, cases[2].call.engine) == (ParallelDims(pp=2), "transformers")
    assert (cases[3].call.item, cases[3].call.cache_item, cases[3].call.decode_rows) == (1, 1, 2048)
    assert cases[3].mesh.device.tflops > cases[0].mesh.device.tflops


def test_rows_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    rows = ({"gpu": "Abacus"}, {"model": "Unheard-7B"}, {"dtype": "AWQ int4"}, {"unit": "fortnights"})
    cases, left_out = generation.read_cases(directory_of(tmp_path, *rows))
    assert not cases
    assert [line.split(":")[0] for line in left_out] == [f"row-{index}" for index in range(4)]


def test_predictions_have_the_naive_ones_beside_them(tmp_path: Path) -> None:
    (item,) = generation.predictions(directory_of(tmp_path, {"value": "1500"}))
    assert item.goal == "decode"
    assert item.constant_mfu == pytest.approx(item.measured), "one row fits itself"
    assert item.roofline < item.predicted
    assert len(generation.fitted()) < 30
