"""Planned bytes: against published formulas and measurements, against DeepSpeed as counted, and by their own rules."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import placed_model, plan_of

from flexrlhf.config.axes import ParallelDims
from flexrlhf.config.model_settings import LoraSpec, ModelSpec
from flexrlhf.config.spec import SyncSpec
from flexrlhf.engines.deepspeed.config import ELEMENTS, deepspeed_config
from flexrlhf.guideline.simulation.calls import TextLayout
from flexrlhf.memory.activations import Blocks
from flexrlhf.memory.budget import Compute, Saving, SequenceLengths, Sizing
from flexrlhf.memory.engine_bytes import (
    bytes_per_parameter,
    gathered_bytes,
    model_state,
    new_gradient_bytes,
    update_bytes,
)
from flexrlhf.memory.packed_rows import TextGroup, TextPacking, largest_pass
from flexrlhf.memory.rank_memory import RankMemory, Start
from flexrlhf.memory.states import PerParameter, State, sliced_elements, trained_units
from flexrlhf.memory.transfer_bytes import UNDER_WAY, saved_model, saving_parts, sync_parts, writing_bytes
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.placement.placement import Placement
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Eval, Offload, Reload, Run
from flexrlhf.strategies.residency import DeviceMemory
from flexrlhf.strategies.workload import workload, works_of
from flexrlhf.text import bytes_text
from flexrlhf.weights.decoder_sizes import Sizes
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.shapes import model_shape

GIB = 2**30
MIXED = PerParameter(weights=2, gradients=2, optimizer=12)
"""Mixed-precision Adam of the ZeRO paper: fp16 weights and gradients, K = 12."""
LLAMA_2_7B = Sizes(32, 4096, 11008, 32, 32, 128, 32000, family="llama")


def square(size: int = 1000) -> ModelShape:
    """One tensor, which every small number of ranks divides."""
    return ModelShape((("model.layers.0.mlp.up_proj.weight", (size, size)),))


def llama(**changes: Any) -> ModelShape:
    init = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    shape = model_shape("actor", ModelSpec(init=init | changes))
    assert shape is not None
    return shape


# --- published formulas


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_paper_figure_1(stage: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020: 7.5e9 parameters on 64 ranks."""
    assert MIXED.on_rank(7.5e9, stage, 64) / 1e9 == pytest.approx(gigabytes, abs=0.06)


def test_deepspeed_estimates() -> None:
    """DeepSpeed docs, memory.rst: 2851e6 parameters on 8 GPUs, ZeRO-2 15.93 and ZeRO-3 6.10 GiB.

    4P + 16P/N: the 16-bit gradients exist whole before they are summed. 4 x largest layer: two layers are gathered.
    """
    parameters, largest_layer = 2851e6, 32e6
    sums = PerParameter(weights=2, gradients=4, optimizer=12)
    zero_2 = sums.on_rank(parameters, 2, 8) + 2 * parameters
    zero_3 = sums.on_rank(parameters, 3, 8) + 2 * 2 * largest_layer
    assert zero_2 == 4 * parameters + 16 * parameters / 8
    assert zero_2 / GIB == pytest.approx(15.93, abs=0.005)
    assert zero_3 / GIB == pytest.approx(6.10, abs=0.01)


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "size"),
    [
        (40, 40, 128, 819_200),  # OPT-13B (Kwon et al. 2023, sec. 3)
        (32, 32, 128, 524_288),  # Llama-2-7B
        (32, 8, 128, 131_072),  # Llama-3-8B
        (80, 8, 128, 327_680),  # 70B with grouped queries
    ],
)
def test_key_value_cache_of_a_token_in_16_bits(layers: int, kv_heads: int, head_dim: int, size: int) -> None:
    sizes = Sizes(layers, 64 * head_dim, 1, 64, kv_heads, head_dim, 1, family="llama")
    assert Blocks(sizes, 2).kv_bytes_per_token() == size
    assert Blocks(sizes, 2, ParallelDims(tp=8)).kv_bytes_per_token() == size // 8


def test_full_recomputation_keeps_two_bytes_per_hidden_number() -> None:
    """Korthikanti et al. 2022, table 2: 2sbh for each layer."""
    sizes = LLAMA_2_7B
    more = Sizes(**{**vars(sizes), "layers": sizes.layers + 1})
    one_layer = Blocks(more, 2).train_bytes(4 * 512, 512, True) - Blocks(sizes, 2).train_bytes(4 * 512, 512, True)
    assert one_layer == 2 * 4 * 512 * sizes.hidden


def test_a_training_model_takes_eight_times_an_inference_model() -> None:
    """The rule of thumb of the FlexRLHF paper."""
    assert MIXED.on_rank(1) / MIXED.weights == 8


def test_what_our_16_bit_training_keeps_per_parameter() -> None:
    """HybridFlow (Sheng et al. 2024, sec. 8.1): bf16 weights 2, float32 gradients 4, Adam 8, master weights 4."""
    actor = placed_model("actor", (0,), dtype="bfloat16")
    assert bytes_per_parameter(actor) == PerParameter(weights=2, gradients=4, optimizer=8 + 4)


# --- published measurements


def test_memory_of_generation_with_one_row() -> None:
    """Qwen2.5 docs, speed benchmark, transformers on an A100, 2049 tokens: 7B 14.38, 32B 61.58 GiB."""
    for parameters, kv_bytes, measured in ((7.616e9, 57_344, 14.38), (32.764e9, 262_144, 61.58)):
        assert (2 * parameters + 2049 * kv_bytes) / GIB == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(("tokens", "measured"), [(16_384, 17.1), (65_536, 36.1)])
def test_peak_of_sharded_training(tokens: int, measured: float) -> None:
    """prime-rl benchmarks, Qwen3-4B by FSDP2 over 8 H100, all layers recomputed: GiB of the largest rank.

    Rows of 512 tokens here, since theirs are packed without the mask that padding needs.
    """
    init = {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    }
    settings = {"zero": 3, "dtype": "bfloat16", "activation_checkpointing": True, "micro_batch_tokens": tokens}
    actor = placed_model("actor", tuple(range(8)), init=init, **settings)
    shape = model_shape("actor", actor.settings)
    assert shape is not None
    sizing = Sizing(Placement((actor,), 8), {"actor": shape}, SequenceLengths(256, 256), SyncSpec())
    planned = RankMemory.of(sizing, 0, [(Compute("train", "actor", None), frozenset())])
    assert planned.peak_bytes / GIB == pytest.approx(measured, rel=0.1)


# --- states

W = 1_000_000
COUNTED = [
    # dtype, stage, offload: at rest, and while gradients are whole; bytes per parameter on one of 2 ranks
    ("float32", 0, False, 12, 16),
    ("float32", 1, False, 10, 14),
    ("float32", 2, False, 10, 12),
    ("float32", 3, False, 10, 10),
    ("bfloat16", 1, False, 12, 12),
    ("bfloat16", 2, False, 8, 10),
    ("bfloat16", 3, False, 9, 9),
    ("float16", 1, False, 8, 12),
    ("float16", 2, False, 8, 10),
    ("float16", 3, False, 9, 9),
    ("float32", 3, True, 12, 12),
    ("bfloat16", 3, True, 11, 11),
]
"""Live tensors of DeepSpeed 0.19.8 in units of the parameters, without its reduce bucket."""


@pytest.mark.parametrize(("dtype", "stage", "offload", "at_rest", "training"), COUNTED)
def test_states_of_deepspeed_are_what_was_counted(
    dtype: str, stage: int, offload: bool, at_rest: float, training: float
) -> None:
    actor = placed_model("actor", (0, 1), engine="deepspeed", dtype=dtype, zero=stage, offload_optimizer=offload)
    state = model_state(actor, square(), 0)
    bucket = 4 * ELEMENTS["reduce_bucket_size"] if stage == 3 else 0
    assert state.resting + state.host - bucket == at_rest * W
    assert state.training + state.host - bucket == training * W


@pytest.mark.parametrize(
    ("dtype", "stage", "at_rest", "training"),
    [
        ("float32", 1, 14.981, 18.985),
        ("float32", 2, 17.044, 17.044),
        ("bfloat16", 1, 11.491, 15.495),
        ("bfloat16", 2, 11.491, 13.491),
    ],
)
def test_an_offloaded_optimizer_takes_more_in_all(dtype: str, stage: int, at_rest: float, training: float) -> None:
    """Counted on a model whose largest tensor is 0.12265 of it; a copy of that lies on both sides."""
    actor = placed_model("actor", (0, 1), engine="deepspeed", dtype=dtype, zero=stage, offload_optimizer=True)
    parts = tuple((f"c{index}.weight", (8774, 10)) for index in range(10))
    state = model_state(actor, ModelShape((("a.weight", (12_265, 10)), *parts)), 0)
    assert (state.resting + state.host) / W == pytest.approx(at_rest, rel=0.005)
    assert (state.training + state.host) / W == pytest.approx(training, rel=0.005)
    assert state.optimizer == 0


def test_planned_defaults_are_those_of_the_configuration() -> None:
    """A bucket that our own configuration sets must be planned, too."""
    zero = deepspeed_config(ModelSpec(engine="deepspeed", zero=3), trained=True)["zero_optimization"]
    assert {name: zero.get(name, size) for name, size in ELEMENTS.items()} == ELEMENTS


@pytest.mark.parametrize(
    ("settings", "state"),
    [
        ({}, State(4 * W, 4 * W, 8 * W, 8 * W)),
        ({"optimizer": {"name": "sgd"}}, State(4 * W, 4 * W, 0)),
        ({"dtype": "bfloat16"}, State(2 * W, 4 * W, 12 * W, 8 * W)),
        ({"dtype": "bfloat16", "zero": 3}, State(2 * W, 2 * W, 4 * W, 4 * W)),
        ({"zero": 2}, State(2 * W, 2 * W, 4 * W, 4 * W)),
    ],
)
def test_states_of_a_trained_torch_model(settings: dict[str, Any], state: State) -> None:
    assert model_state(placed_model("actor", (0, 1), **settings), square(), 0) == state


@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_frozen_copies_hold_weights_alone(engine: str) -> None:
    ref = placed_model("ref", (0, 1), engine=engine, dtype="bfloat16")
    assert model_state(ref, square(), 0) == State(2 * W)
    sharded = placed_model("ref", (0, 1), engine=engine, dtype="bfloat16", zero=3)
    assert model_state(sharded, square(), 1) == State(1 * W)


def test_offloaded_parameters_lie_in_host_memory() -> None:
    settings = {"engine": "deepspeed", "zero": 3, "dtype": "bfloat16", "offload_parameters": True}
    assert model_state(placed_model("ref", (0, 1), **settings), square(), 0) == State(0, host=W)
    actor = model_state(placed_model("actor", (0, 1), **settings), square(), 0)
    assert (actor.weights, actor.host) == (0, W)


# --- rules


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("engine", "stages"), [("torch", (0, 3)), ("deepspeed", (0, 1, 2, 3))])
def test_more_sharding_never_takes_more_state(engine: str, stages: tuple[int, ...], dtype: str) -> None:
    totals = []
    for stage in stages:
        state = model_state(placed_model("actor", (0, 1, 2, 3), engine=engine, zero=stage, dtype=dtype), llama(), 0)
        totals.append(state.training - state.buffers)
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_shards_add_up_to_the_whole(num_ranks: int) -> None:
    shape, ranks = llama(), tuple(range(num_ranks))
    actor = placed_model("actor", ranks, zero=3)
    states = [model_state(actor, shape, rank) for rank in ranks]
    assert sum(state.weights for state in states) == 4 * shape.num_parameters
    assert sum(state.optimizer for state in states) == 8 * shape.num_parameters


def test_tensor_parallel_slices_are_gathered_slices() -> None:
    shape = llama()
    both, one = placed_model("actor", (0, 1, 2, 3), tp=2, zero=3), placed_model("actor", (0, 1), tp=2)
    assert sliced_elements(both, shape.parameters, 0) == sliced_elements(one, shape.parameters, 0)
    norms = 7 * 64 + 512 * 64  # norms and the embedding are whole on both
    assert 2 * sliced_elements(one, shape.parameters, 0) == shape.num_parameters + norms
    halves = [model_state(both, shape, rank).weights for rank in (0, 2)]
    assert sum(halves) == model_state(one, shape, 0).weights


@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
@pytest.mark.parametrize("zero", [0, 3])
def test_adapters_alone_are_trained(engine: str, zero: int) -> None:
    shape = llama().with_adapters("actor", LoraSpec(rank=4))
    trained = sum(math.prod(size) for _, size in shape.trained)
    actor = placed_model("actor", (0, 1), engine=engine, zero=zero, lora=LoraSpec(rank=4))
    state = model_state(actor, shape, 0)
    ways = 2 if zero else 1
    assert state.gradients == pytest.approx(4 * trained / ways, rel=0.02)
    assert state.weights == pytest.approx(4 * shape.num_parameters / ways, rel=0.01)
    assert trained_units(actor, shape, 0).total == trained < 0.2 * shape.num_parameters


def test_units_are_the_root_and_the_largest_layer() -> None:
    units = trained_units(placed_model("actor", (0, 1), zero=3), llama(), 0)
    layer = 2 * 64 + 64 * (64 + 32 + 32 + 64) + 3 * 64 * 160
    root = 2 * 512 * 64 + 64
    assert (units.root, units.layer, units.head, units.largest) == (root, layer, 512 * 64, 512 * 64)
    assert units.total == root + 3 * layer
    tied = trained_units(placed_model("actor", (0,)), llama(tie_word_embeddings=True), 0)
    assert (tied.root, tied.head) == (512 * 64 + 64, 512 * 64)


def test_replicas_gather_nothing_and_stage_2_gathers_all() -> None:
    shape = llama()
    whole, all_at_once, by_layer = (placed_model("actor", (0, 1), zero=zero) for zero in (0, 2, 3))
    assert gathered_bytes(whole, shape, 0) == 0
    assert gathered_bytes(all_at_once, shape, 0) > gathered_bytes(by_layer, shape, 0)
    assert gathered_bytes(all_at_once, shape, 0) >= 4 * shape.num_parameters


@pytest.mark.parametrize(
    ("zero", "dtype", "root", "layers", "counted"),
    [
        (3, "float32", 1.602, 4, 5.21),
        (2, "float32", 1.602, 4, 7.60),
        (3, "bfloat16", 1.602, 4, 5.71),
        (2, "bfloat16", 1.602, 4, 8.10),
        (3, "float32", 0.026, 8, 3.03),
        (2, "float32", 0.026, 8, 10.03),
        (3, "bfloat16", 0.026, 8, 3.53),
        (3, "float32", 23.74, 2, 49.49),
        (2, "float32", 23.74, 2, 49.49),
        (3, "bfloat16", 23.74, 2, 59.35),
    ],
)
def test_gathered_units_of_fsdp_are_what_was_counted(
    zero: int, dtype: str, root: float, layers: int, counted: float
) -> None:
    """Peaks of torch 2.13's FSDP2 for one token on 2 ranks, in units of a layer; ``root`` in the same unit."""
    parameters = [("model.norm.weight", (round(1000 * root), 100))]
    parameters += [(f"model.layers.{index}.mlp.up_proj.weight", (1000, 100)) for index in range(layers)]
    actor = placed_model("actor", (0, 1), zero=zero, dtype=dtype)
    item = 4 if dtype == "float32" else 2
    planned = gathered_bytes(actor, ModelShape(tuple(parameters)), 0) / item / 100_000
    assert -0.02 <= planned / counted - 1 <= 0.06


def test_a_smaller_bucket_of_deepspeed_takes_less() -> None:
    shape, small = llama(), {"zero_optimization": {"reduce_bucket_size": 1000}}
    for stage in (1, 2, 3):
        default = placed_model("actor", (0, 1), engine="deepspeed", zero=stage)
        smaller = placed_model("actor", (0, 1), engine="deepspeed", zero=stage, config=small)
        for measure in (new_gradient_bytes, lambda *args: model_state(*args).training):
            assert measure(smaller, shape, 0) <= measure(default, shape, 0)
        assert update_bytes(smaller, shape, 0) == update_bytes(default, shape, 0)


# --- weights that travel


def test_buffers_of_a_sync() -> None:
    """Of one bucket where that is within the setting, else as much as that; of all where it overlaps."""
    shape = ModelShape(tuple((f"w{index}", (1000,)) for index in range(4)))
    actor, shadow = placed_model("actor", (0, 1)), placed_model("actor.shadow", (2, 3))
    for bucket_mb, size in ((0.1, 16000), (0.004, 4000)):
        settings = SyncSpec(bucket_mb=bucket_mb)
        assert sync_parts(actor, shadow, shape, settings, 0) == {"buckets": size}
        assert sync_parts(actor, shadow, shape, settings, 2) == {"buckets": size}
    for rank in (0, 2):
        assert sync_parts(actor, shadow, shape, settings, rank, overlaps=True) == {UNDER_WAY: 16000}


def test_a_rank_packs_its_own_shards() -> None:
    shape = ModelShape(tuple((f"w{index}.weight", (1000, 1)) for index in range(4)))
    actor = placed_model("actor", (0, 1), zero=3)
    shadow = placed_model("actor.shadow", (2,), dtype="bfloat16")
    assert [sync_parts(actor, shadow, shape, SyncSpec(), rank) for rank in (0, 1, 2)] == [
        {"buckets": 4000},
        {"buckets": 4000},
        {"buckets": 8000},
    ]


def test_shards_are_gathered_before_they_are_saved() -> None:
    shape = ModelShape(tuple((f"w{index}.weight", (1000, 1)) for index in range(4)))
    actor = placed_model("actor", (0, 1), zero=3)
    saved = saved_model(actor, shape, 4000, 16000)
    assert saving_parts(saved, 2) == {"gathered": 2 * 4000 + 2 * 2000} and saving_parts(saved, 1) == {"gathered": 0}
    # a rank has a bucket for its file while another file's is gathered
    several = saved_model(actor, shape, 4000, 8000)
    assert [writing_bytes(actor, shape, each, 2) for each in (saved, several)] == [4000, 8000]
    assert writing_bytes(actor, shape, several, 1) == 4000


# --- a rank


def phases_of(memory: RankMemory) -> set[str]:
    return {phase.label for phase in memory.phases}


def test_a_rank_knows_its_phases() -> None:
    plan = plan_of([0.5] * 6, 4)
    assert phases_of(plan.memory(0)) == {
        *(f"{kind} on {role}" for kind in ("train", "update") for role in ("actor", "critic")),
        *(f"save of {role}" for role in ("actor", "critic")),
        *(f"sync to {role}.shadow" for role in ("actor", "critic")),
    }
    assert {"generate on actor.shadow", "forward on ref", "sync to actor.shadow"} <= phases_of(plan.memory(2))


def test_the_peak_is_the_states_and_the_largest_phase() -> None:
    memory = plan_of([1, 1, 0.5, 0.5], 2).memory(0)
    resting = sum(state.resting for state in memory.states.values() if state)
    assert memory.peak is not None
    assert memory.peak_bytes == memory.peak.total == max(phase.total for phase in memory.phases)
    for phase in memory.phases:
        state = memory.states[phase.model]
        assert state is not None
        gradients = state.gradients if phase.kind in ("train", "update") else 0
        assert phase.states == resting + gradients
    assert memory.is_complete


def test_training_takes_a_mini_batch_and_the_rest_all_rows() -> None:
    plan = plan_of(None, 1, "algorithm.prompts_per_step=8", "algorithm.num_mini_batches=4")
    work = dict.fromkeys(item for item, _ in workload(plan.schedule.for_rank(0), plan.placement, plan.batch, 0))
    rows = {(item.kind, item.model): item.rows for item in work if isinstance(item, Compute)}
    assert rows["train", "actor"] == 2
    assert rows["generate", "actor"] == rows["forward", "ref"] == 8


def test_evaluation_takes_no_more_rows_than_a_step() -> None:
    """Eight prompts on two replicas are four each."""
    plan = plan_of(None, 2, "eval={path: held_out.jsonl}")
    works = [work for item in plan.schedule.instructions if isinstance(item, Eval) for work in evaluated(plan, item)]
    assert [(work.kind, work.model, work.rows) for work in works] == [
        ("generate", "actor", 4),
        ("forward", "reward", 4),
    ]


def evaluated(plan: Plan, item: Eval) -> list[Compute]:
    works = works_of(item, plan.batch, 0)
    return [work for work in works if isinstance(work, Compute)]


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("compares", [True, False])
@pytest.mark.parametrize(("prompt", "response", "samples"), [(512, 64, 8), (16, 40, 1), (4, 300, 6), (100, 3, 16)])
def test_no_pass_is_larger_than_the_largest(
    prompt: int, response: int, samples: int, compares: bool, shares: bool, packs: bool
) -> None:
    chance = random.Random(prompt)
    for budget in (1, 700, 3000, 8192):
        layout, bound = (
            TextLayout(budget, packs, shares, compares),
            largest_pass(prompt, response, samples, budget, None, packs, shares, compares),
        )
        for lengths in (lambda most: most, lambda most: chance.randint(1, most), lambda most: max(1, most // 3)):
            groups = [TextGroup(lengths(prompt), tuple(lengths(response) for _ in range(samples))) for _ in range(24)]
            few = largest_pass(prompt, response, samples, budget, 2 * samples, packs, shares, compares)
            for part, size in ((groups, bound), (groups[:2], few)):
                units = [unit for group in part for unit in layout.units(group)]
                for each in layout.passes(part):
                    answered = sum(sum(group.responses) for unit in each.units for group in units[unit])
                    assert each.tokens <= size.tokens and each.width <= size.width and answered <= size.responses
        assert compares or bound.tokens == max(budget, prompt + response)


def test_the_largest_pass_is_full_where_texts_are_the_longest() -> None:
    """Eight samples of a prompt are computed with one copy of it, so a budget has five times as many."""
    apart, shared = (largest_pass(512, 64, 8, 8192, None, True, shares) for shares in (False, True))
    layouts = [TextLayout(8192, True, shares) for shares in (False, True)]
    groups = [TextGroup(512, (64,) * 8)] * 16
    counts = [[(len(each.units), each.tokens) for each in layout.passes(groups)] for layout in layouts]
    assert counts == [[(14, 8064)] * 9 + [(2, 1152)], [(8, 8192)] * 2]
    assert (apart.tokens, shared.tokens, shared.width) == (8192, 8192, 3 * 1024)
    alone = largest_pass(512, 64, 8, 8192, 8, True, True)
    assert (alone.tokens, alone.width, alone.responses) == (1024, 1024, 512)


def test_a_window_of_attention_leaves_texts_in_rows_of_their_own() -> None:
    def packs_texts(settings: ModelSpec, shape: ModelShape | None, longest: int) -> bool:
        return TextPacking.of(PlacedModel(ModelName("actor"), Layout((0,)), True, settings), shape, longest).packs

    settings = ModelSpec()
    for config, packs in (
        ({}, True),
        ({"model_type": "mistral"}, False),
        ({"model_type": "mistral", "sliding_window": None}, True),
        ({"model_type": "qwen2"}, True),
        ({"model_type": "qwen2", "use_sliding_window": True}, False),
    ):
        assert packs_texts(settings, llama(**config), 5000) == packs
        assert packs_texts(settings, llama(**config), 4096)
    assert not packs_texts(ModelSpec(pack_texts=False), llama(), 8)
    assert not packs_texts(settings, None, 8)


def test_what_is_offloaded_counts_in_host_memory() -> None:
    plan = plan_of(None, 1)
    runs = [i for i in plan.schedule.instructions if isinstance(i, Run) and i.model == "ref"]
    instructions = (
        Reload(ranks=(0,), model="ref"),
        runs[0],
        Offload(ranks=(0,), model="ref"),
        *plan.schedule.instructions,
    )
    items = list(workload(instructions, plan.placement, plan.batch, 0))
    assert [away for _, away in items[:2]] == [frozenset(), frozenset({"ref"})]
    names = [model.name for model in plan.placement.models]
    start = Start(names, frozenset(), frozenset({"ref"}), kept=frozenset({"ref"}), read=frozenset())
    memory = RankMemory.of(plan.sizing, 0, items, start)
    ref = memory.states["ref"]
    assert ref is not None
    train = next(phase for phase in memory.phases if phase.label == "train on actor")
    always = next(phase for phase in plan.memory(0).phases if phase.label == "train on actor")
    assert always.states - train.states == train.host == ref.weights


def test_the_residency_pass_is_told_the_same() -> None:
    plan = plan_of([1, 1, 0.5, 0.5], 2, "cluster.memory_gb=1")
    memory = DeviceMemory(plan.sizing, plan.cluster, plan.batch)
    resting = {name: state.resting for name, state in plan.memory(1).states.items() if state is not None}
    assert {name: memory.state(1, name) for name in resting} == resting
    needed = max(memory.needed_for(1, instruction) for instruction in plan.schedule.for_rank(1))
    assert sum(resting.values()) + needed == plan.memory(1).peak_bytes


def test_models_that_do_not_fit_together_take_turns() -> None:
    """The residency pass lowers the peak, and what is away counts in host memory."""
    together = plan_of(None, 1, "cluster.memory_gb=1").memory(0)
    tight = plan_of(None, 1, f"cluster.memory_gb={(together.peak_bytes - 1000) / 1e9:.7f}").memory(0)
    assert tight.peak_bytes < together.peak_bytes
    assert max(phase.host for phase in tight.phases) > max(phase.host for phase in together.phases)


def test_models_are_loaded_and_restored_one_at_a_time() -> None:
    """What starts in host memory comes first, alone; moments exist once a checkpoint is read."""
    together = plan_of(None, 1, "cluster.memory_gb=1").memory(0)
    assert not {"load", "resume"} & {phase.kind for phase in together.phases}
    plan = plan_of(None, 1, f"cluster.memory_gb={(together.peak_bytes - 1000) / 1e9:.7f}")
    tight, away = plan.memory(0), set(plan.offloaded[0])
    load, resume = (next(each for each in tight.phases if each.kind == kind) for kind in ("load", "resume"))
    names = [model.name for model in plan.loaded_on(0)]
    assert set(names[: len(away)]) == away and len(names) == 4
    states = {name: state for name, state in tight.states.items() if state is not None}
    staying = sum(state.loaded for name, state in states.items() if name not in away)
    assert load.total == max(staying, *(states[name].loaded for name in away))
    movable = {each.model for each in plan.schedule.instructions if isinstance(each, Offload)}
    others = sum(state.resting for name, state in states.items() if name not in movable)
    # of what is away here a checkpoint has nothing
    assert movable <= {"ref", "reward"} and resume.total == others < sum(state.resting for state in states.values())


def test_the_first_rank_of_a_save_writes_one_tensor_at_a_time_from_host_memory() -> None:
    actor, shape = placed_model("actor", (0, 1), zero=3, dtype="bfloat16"), llama()
    sizing = Sizing(Placement((actor,), 2), {"actor": shape}, SequenceLengths(4, 4), SyncSpec())
    first, second = (RankMemory.of(sizing, rank, [(Saving("actor", (0, 1)), frozenset())]) for rank in (0, 1))
    assert first.phases[0].host == 4 * max(math.prod(size) for _, size in shape.parameters)
    assert second.phases[0].host == 0
    assert second.host_bytes == second.loading == 4 * shape.num_parameters


def test_models_in_files_are_loaded_in_parts_and_others_whole(tmp_path: Path) -> None:
    """Host memory besides a rank's part: a block, and a tensor for ZeRO-3; a random model is made whole."""
    shape = llama()
    largest, total = max(math.prod(size) for _, size in shape.parameters), shape.num_parameters

    def loading(**settings: Any) -> tuple[int, bool]:
        model = placed_model("actor", (0, 1), **settings)
        sizing = Sizing(Placement((model,), 2), {"actor": shape}, SequenceLengths(4, 4), SyncSpec())
        memory = RankMemory.of(sizing, 0, [])
        return memory.loading, memory.loads_whole

    path = str(tmp_path / "actor")
    assert loading(path=path) == loading(path=path, zero=3, dtype="bfloat16") == (4 * largest, False)
    assert loading(path=path, engine="deepspeed", zero=2) == (4 * largest, False)
    assert loading(path=path, engine="deepspeed", zero=3, dtype="bfloat16") == (4 * largest + 2 * largest, False)
    assert loading(init={"model_type": "llama"}) == (4 * total, True)
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "config.json").write_text('{"model_type": "llama", "auto_map": {"AutoConfig": "code.C"}}')
    assert loading(path=path, trust_remote_code=True) == (4 * total, True)
    assert loading(path=path) == (4 * largest, False)
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    assert loading(path=str(tmp_path / "adapters")) == (4 * total, True)


def test_an_architecture_that_only_loading_can_tell_is_unknown() -> None:
    plan = plan_of(None, 1, "models.reward.init={model_type: gpt2}")
    memory = plan.memory(0)
    assert memory.states["reward"] is None and not memory.is_complete
    assert next(p for p in memory.phases if p.label == "forward on reward").parts == {"activations": None}
    assert memory.peak_bytes > 0


def test_an_idle_rank_needs_nothing() -> None:
    memory = plan_of(
        {"actor": {"ranks": [0]}, "critic": {"ranks": [0]}, "ref": {"ranks": [0]}, "reward": {"ranks": [0]}}, 2
    ).memory(1)
    assert (memory.peak, memory.peak_bytes, memory.host_bytes) == (None, 0, 0)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e6, "2.5 MB"), (81e9, "81 GB"), (None, "? B")),
        *((999.4e9, "999 GB"), (999.6e9, "1 TB"), (6.66e13, "66.6 TB"), (1.5e15, "1500 TB")),
    ],
)
def test_bytes_are_written_in_decimal_units(size: int | None, text: str) -> None:
    assert bytes_text(size) == text


# --- rollout engines

VLLM = "rollout.engine=vllm"
LLAMA_3 = (
    "models.actor.init={model_type: llama, hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32, "
    "num_attention_heads: 32, num_key_value_heads: 8, vocab_size: 128256}",
    "models.actor.dtype=bfloat16",
    "data.max_prompt_tokens=500",
    "data.max_response_tokens=500",
    "algorithm.prompts_per_step=64",
)


def state_of(plan: Plan, name: str = "actor.rollout", rank: int = 0) -> State:
    state = plan.state(plan.placement[name], rank)
    assert state is not None
    return state


@pytest.mark.parametrize(
    ("overrides", "tokens", "of_token"),
    [
        ((), 32 * 1024, 131_072),
        (("rollout.tp=2",), 64 * 1024, 65_536),
        (("rollout.pp=2",), 64 * 1024, 65_536),
        (("rollout.kv_tokens=2048",), 2048, 131_072),
        (("rollout.kv_tokens=2050",), 2080, 131_072),
        (("rollout.dtype=float32",), 32 * 1024, 262_144),
        (("models.actor.generate_tokens=4096",), 4096, 131_072),
    ],
)
def test_keys_and_values_of_llama_3_8b(overrides: tuple[str, ...], tokens: int, of_token: int) -> None:
    """128 KiB of a token in 16 bits. 64 rows over two ranks, each padded to 1024 tokens; blocks of 32, and one more."""
    state = state_of(plan_of(None, 2, VLLM, *LLAMA_3, *overrides))
    assert state.cache == (tokens + 32) * of_token


def test_the_engine_is_told_the_bytes_of_its_cache() -> None:
    plan = plan_of([0.5] * 6, 4, VLLM, "rollout.tp=2")
    engine = plan.placement["actor.rollout"]
    assert plan.sizing.kv_bytes(engine) == state_of(plan, rank=2).cache == state_of(plan, rank=3).cache > 0
    assert all(plan.sizing.kv_bytes(model) == 0 for model in plan.placement.models if model != engine)


def test_an_engine_holds_weights_and_keys_and_values_alone() -> None:
    plan = plan_of(None, 2, VLLM, "models.actor.zero=3")
    state, elements = state_of(plan), plan.shapes["actor"].num_parameters
    assert state == State(4 * elements, cache=state.cache)
    assert state_of(plan_of(None, 2, "rollout={engine: vllm, dtype: bfloat16}")).weights == 2 * elements


def test_tensor_parallel_ranks_of_an_engine_hold_half_of_what_is_cut() -> None:
    """32 words are padded to 64, so the first rank holds them all and the second none; norms are whole on both."""
    plan = plan_of(None, 2, VLLM, "rollout.tp=2")
    linear, words, norms = 4 * 8 * 8 + 3 * 8 * 16, 2 * 32 * 8, 3 * 8
    assert [state_of(plan, rank=rank).weights for rank in (0, 1)] == [
        4 * (linear // 2 + words + norms),
        4 * (linear // 2 + norms),
    ]


def test_an_engine_holds_adapters_merged() -> None:
    adapters = ("models.actor.lora={rank: 4}",)
    assert state_of(plan_of(None, 2, VLLM, *adapters)) == state_of(plan_of(None, 2, VLLM))
    more = state_of(plan_of(None, 2, VLLM, *adapters), "actor").weights
    assert more > state_of(plan_of(None, 2, VLLM), "actor").weights


def test_an_engine_that_adds_adapters_stores_them_next_to_its_weights() -> None:
    """With 8 rows of A, and columns of B, for adapters of rank 4; on 2 ranks one of both is halved."""
    settings = (VLLM, "models.actor.lora={rank: 4}", "rollout.adapters=separate")
    merged = state_of(plan_of(None, 2, *settings[:2])).weights
    assert state_of(plan_of(None, 2, *settings)).weights == merged + 4 * 8 * (4 * (8 + 8) + 3 * (8 + 16))
    pair = [state_of(plan_of(None, 2, *each, "rollout.tp=2"), rank=1).weights for each in (settings[:2], settings)]
    whole, split = 5 * 8 + 2 * 8, 3 * 8 + 2 * 16 + 8 + 16
    assert pair[1] == pair[0] + 4 * 8 * (whole + split // 2)


def test_offloading_loses_keys_and_values_and_parks_the_rest() -> None:
    state = State(weights=100, optimizer=10, buffers=7, cache=30)
    assert (state.resting, state.freed, state.offloaded, state.training) == (147, 140, 110, 117)


def phase_of(plan: Plan, label: str, rank: int = 0) -> Any:
    return next(phase for phase in plan.memory(rank).phases if phase.label == label)


def test_a_sleeping_engine_leaves_its_memory_to_training() -> None:
    """Its weights and its keys and values wait nowhere: a sync brings weights, unless it brings adapters."""
    asleep, awake = plan_of(None, 1, VLLM), plan_of(None, 1, VLLM, "rollout.sleep=false")
    state = state_of(asleep)
    for label in ("train on actor", "train on critic", "forward on ref"):
        assert phase_of(awake, label).states - phase_of(asleep, label).states == state.weights + state.cache
        assert phase_of(asleep, label).host == 0
    assert phase_of(awake, "generate on actor.rollout") == phase_of(asleep, "generate on actor.rollout")
    # the cache is allocated once the weights are there
    synced = phase_of(asleep, "sync to actor.rollout")
    assert replace(synced, states=synced.states + state.cache) == phase_of(awake, "sync to actor.rollout")
    peaks = [plan.memory(0).peak_bytes for plan in (asleep, awake)]
    assert peaks[0] < peaks[1]
    adapted = plan_of(None, 1, VLLM, "models.actor.lora={rank: 4}")
    assert {phase.host for phase in adapted.memory(0).phases if phase.kind == "train"} == {state_of(adapted).weights}


def test_between_chunks_other_models_work_beside_the_engine() -> None:
    plan = plan_of(None, 1, VLLM, "algorithm.num_mini_batches=4", "schedule.num_chunks=4")
    resting = sum(state_of(plan, model.name).resting for model in plan.placement.models)
    assert phase_of(plan, "forward on ref").states == resting
    assert phase_of(plan, "train on critic").states < resting


def test_an_engine_decodes_with_the_cache_that_it_has() -> None:
    """Others make theirs for the call."""
    assert "KV cache" in {*phase_of(plan_of(None, 1, *LLAMA_3), "generate on actor").parts}
    parts = phase_of(plan_of(None, 1, VLLM, *LLAMA_3), "generate on actor.rollout").parts
    assert parts and "KV cache" not in parts


def test_to_copy_in_place_takes_no_buffer() -> None:
    """Whole tensors are there already; of shards the other half arrives and the own one is sent."""
    shape = ModelShape(tuple((f"w{index}", (1000,)) for index in range(4)))
    plan = plan_of(None, 2, VLLM)
    engine = plan.placement["actor.rollout"]
    assert sync_parts(placed_model("actor", (0, 1)), engine, shape, SyncSpec(), 0) == {}
    shards = sync_parts(placed_model("actor", (0, 1), zero=3), engine, shape, SyncSpec(), 0)
    assert shards == {"buckets": 2 * 8000}


def test_adapters_are_merged_in_float32_region_by_region() -> None:
    """q k v o of 8 x 8, gate up down of 8 x 16, and A and B of rank 2 next to each."""
    plan = plan_of([0.5] * 6, 2, "rollout={engine: vllm, dtype: bfloat16}", "models.actor.lora={rank: 2}")
    actor, engine = plan.placement["actor"], plan.placement["actor.rollout"]
    sender, receiver = (
        sync_parts(actor, engine, plan.shapes["actor"], SyncSpec(), model.ranks[0]) for model in (actor, engine)
    )
    linear, adapters = 4 * 8 * 8 + 3 * 8 * 16, 2 * (4 * (8 + 8) + 3 * (8 + 16))
    assert sender == {"buckets": 2 * linear, "merged": 3 * 4 * 8 * 16, "gathered": 4 * adapters}
    assert receiver == {"buckets": 2 * linear}
