"""Planned bytes of pipeline stages: what each stores, what it keeps in flight, and that all stages are the model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from small_runs import HEADS, plan_of

from flexrlhf.config.axes import ParallelDims
from flexrlhf.config.model_settings import Head, LoraSpec, ModelSpec
from flexrlhf.config.spec import SyncSpec
from flexrlhf.engines.megatron.memory import ALIGNMENT, megatron_buffer
from flexrlhf.memory.activations import Blocks
from flexrlhf.memory.budget import Compute, Phase, SequenceLengths, Sizing, layers_on_rank
from flexrlhf.memory.engine_bytes import model_state, new_gradient_bytes
from flexrlhf.memory.packed_rows import largest_pass
from flexrlhf.memory.states import trained_units, with_fused_layers
from flexrlhf.memory.transfer_bytes import copied_bytes, saved_model
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.placement.placement import Placement
from flexrlhf.plan.memory_text import planned_memory
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.strategies.instructions import Run
from flexrlhf.strategies.workload import works_of
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.parameters import count_elements
from flexrlhf.weights.shapes import model_shape

LAYERS, HIDDEN, FFN, VOCABULARY = 8, 128, 384, 1024
INIT = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
TEXTS = SequenceLengths(prompt=16, response=48)
BUDGET = 256
LAYOUTS = [(1, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 4), (2, 2, 2), (1, 4, 8), (3, 2, 2)]


def shape_of(head: Head = "causal", **changes: Any) -> ModelShape:
    shape = model_shape("actor", ModelSpec(init=INIT | changes), head)
    assert shape is not None
    return shape


def placed(dp: int, tp: int, pp: int, name: str = "actor", trained: bool = True, **settings: Any) -> PlacedModel:
    spec = ModelSpec(engine="megatron", tp=tp, pp=pp, micro_batch_tokens=BUDGET, **settings)
    layout = Layout(tuple(range(dp * tp * pp)), ParallelDims(tp, pp))
    return PlacedModel(ModelName(name), layout, trained, spec, head=HEADS.get(name, "causal"))


def phases(
    model: PlacedModel, rank: int, rows: int | None, kind: Any = "train", vocabulary: int | None = None
) -> tuple[Phase, ...]:
    shape = shape_of(model.head)
    if vocabulary is not None:
        assert shape.sizes is not None
        shape = replace(shape, sizes=replace(shape.sizes, vocabulary=vocabulary))
    sizing = Sizing(Placement((model,), len(model.ranks)), {model.role: shape}, TEXTS, SyncSpec())
    return sizing.phases(Compute(kind, model.name, rows), rank)


def activations(model: PlacedModel, stage: int, rows: int | None) -> int:
    size = phases(model, model.layout.along("pp", 0)[stage], rows)[0].parts["activations"]
    assert size is not None
    return size


# --- states


@pytest.mark.parametrize(("dp", "tp", "pp"), LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
def test_all_ranks_of_a_replica_store_the_model(dp: int, tp: int, pp: int, tied: bool) -> None:
    """Once, but for norms, which tensor-parallel ranks repeat, and a tied embedding, which two stages have."""
    model, shape = placed(dp, tp, pp), shape_of(tie_word_embeddings=tied)
    replica = model.layout.replica_sets[0]
    stored = sum(model_state(model, shape, rank).weights for rank in replica)
    norms = (2 * LAYERS + 1) * HIDDEN * (tp - 1)
    again = VOCABULARY * HIDDEN if tied and pp > 1 else 0
    assert stored == 4 * (shape.num_parameters + norms + again)


@pytest.mark.parametrize(("dp", "tp", "pp"), LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_of_a_trained_model(dp: int, tp: int, pp: int, dtype: str) -> None:
    model, shape = placed(dp, tp, pp, dtype=dtype), shape_of()
    item, master = (4, 0) if dtype == "float32" else (2, 4)
    for rank in model.ranks:
        state = model_state(model, shape, rank)
        elements = state.weights // item
        assert (state.gradients, state.optimizer) == (4 * elements, (8 + master) * elements)
        assert state.training - state.resting == state.gradients == state.at_load


@pytest.mark.parametrize("dp", [1, 2, 3, 8])
def test_the_distributed_optimizer_splits_its_state_over_replicas(dp: int) -> None:
    shape, plain, split = shape_of(), placed(dp, 2, 2, dtype="bfloat16"), placed(dp, 2, 2, dtype="bfloat16", zero=1)
    for rank in split.ranks:
        whole, mine = model_state(plain, shape, rank), model_state(split, shape, rank)
        buffer = megatron_buffer(split, shape.on_rank(split, rank).parameters, rank)
        assert mine.optimizer == 12 * buffer // dp and mine.gradients == 4 * buffer
        # gaps are few: less than one alignment a tensor, and a multiple at the end
        gaps = len(shape.parameters) * ALIGNMENT + 128 * dp
        assert whole.weights <= mine.weights < whole.weights + 2 * gaps


def test_frozen_copies_store_weights_alone() -> None:
    state = model_state(placed(1, 2, 2, "reward", trained=False, zero=1), shape_of("scalar"), 0)
    assert state.resting == state.weights > 0


@pytest.mark.parametrize(("dp", "tp", "pp"), LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
def test_ranks_write_every_part_of_a_checkpoint_once(dp: int, tp: int, pp: int, tied: bool) -> None:
    model, shape = placed(dp, tp, pp), shape_of(tie_word_embeddings=tied)
    written = Counter(
        (name, shape.trained_parts(model, rank)[name])
        for rank in model.ranks
        for name in shape.written_names(model, rank)
    )
    assert set(written.values()) == {1}
    stored = {item for rank in model.ranks for item in shape.trained_parts(model, rank).items()}
    assert set(written) == stored
    assert sum(copied_bytes(model, shape, rank) for rank in model.ranks) == 12 * sum(
        part.num_elements for _, part in stored
    )


def test_a_save_gathers_all_stages() -> None:
    one, two, shape = placed(1, 2, 1), placed(1, 1, 2), shape_of()
    sizes = 500_000, 5_000_000_000
    assert saved_model(two, shape, *sizes) == saved_model(one, shape, *sizes)


# --- activations


def test_a_stage_keeps_the_micro_batches_that_wait_for_later_stages() -> None:
    """One forward, one backward: stage s of pp begins pp - s micro-batches before the first one returns."""
    pp = 4
    model = placed(1, 1, pp)
    sizes = [activations(model, stage, None) for stage in range(pp)]
    assert sizes == sorted(sizes, reverse=True)
    blocks = [layers_on_rank(model, shape_of().sizes, rank) for rank in model.layout.along("pp", 0)]
    assert [each.is_last for each in blocks] == [False, False, False, True]
    kept = [(sizes[stage] - sizes[stage + 1]) for stage in range(pp - 2)]
    assert kept[0] == kept[1] > 0  # each stage before keeps one micro-batch more
    assert blocks[0].layers == LAYERS // pp


def test_the_first_stage_keeps_about_as_much_as_an_undivided_model() -> None:
    """PTD-P (Narayanan et al. 2021, sec. 2.2.1): pp micro-batches of 1/pp of the layers."""
    whole = activations(placed(1, 1, 1), 0, None)
    assert activations(placed(1, 1, 8), 0, None) == pytest.approx(whole, rel=0.1)


def test_one_micro_batch_is_divided_over_the_stages() -> None:
    rows = BUDGET // TEXTS.width
    whole = activations(placed(1, 1, 1), 0, rows)
    stages = [activations(placed(1, 1, 4), stage, rows) for stage in range(4)]
    assert max(stages) < 0.35 * whole
    assert sum(stages) >= whole


@pytest.mark.parametrize("rows", [None, 4, 16, 1000])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_what_never_takes_more(rows: int | None, recompute: bool, tp: int) -> None:
    def most(pp: int, **settings: Any) -> int:
        model = placed(1, tp, pp, activation_checkpointing=recompute, **settings)
        return max(activations(model, stage, rows) for stage in range(pp))

    assert most(2) <= most(1)
    assert most(4, dtype="bfloat16") <= most(4)
    plain = placed(1, tp, 4)
    for stage in range(4):
        fewer = placed(1, tp, 4, activation_checkpointing=True)
        assert activations(fewer, stage, rows) <= activations(plain, stage, rows)


def test_more_rows_never_take_less_and_at_last_no_more() -> None:
    sizes = [activations(placed(1, 1, 4), 0, rows) for rows in (1, 2, 4, 8, 16, 32, 64)]
    assert sizes == sorted(sizes)
    assert sizes[-1] == activations(placed(1, 1, 4), 0, None)


def test_logits_are_on_the_last_stage_alone() -> None:
    """As far as they exceed what a layer's gradients need: of a small vocabulary nowhere."""

    def stages(name: str, vocabulary: int | None) -> list[bool]:
        model = placed(1, 2, 2, name)
        return ["logits" in phases(model, rank, 8, vocabulary=vocabulary)[0].parts for rank in (0, 2)]

    assert stages("actor", 10**5) == [False, True]
    assert stages("actor", None) == stages("critic", 10**5) == [False, False]


@pytest.mark.parametrize("kind", ["forward", "train"])
def test_stages_exchange_hidden_states(kind: str) -> None:
    def between(pp: int, stage: int, rows: int | None = None) -> int:
        model = placed(1, 1, pp)
        return phases(model, model.layout.along("pp", 0)[stage], rows, kind)[0].parts.get("between stages") or 0

    assert between(1, 0) == 0
    assert between(2, 0) >= 2 * BUDGET * HIDDEN * 4
    assert (between(4, 0) > between(4, 3)) == (kind == "train")


def test_tensor_parallel_ranks_share_the_norms() -> None:
    sizes = shape_of().sizes
    assert sizes is not None
    whole, shared = (
        Blocks(sizes, 2, ParallelDims(tp=2), fused=True, sharers=number).saved_by_layer(0) for number in (1, 2)
    )
    assert whole - shared == 8 * HIDDEN + 4  # half of two norms of 4 + 2b bytes a feature
    models = placed(1, 2, 1), placed(1, 1, 1)
    assert [layers_on_rank(each, sizes, 0).sharers for each in models] == [2, 1]


def test_adapters_of_fused_layers_share_matrices() -> None:
    """B of queries (128 outputs), keys and values (64 each) is 256 x 3 ranks, that of gate and up 768 x 2 ranks; one
    of each layer is kept in a pass, with checkpointing of one layer in all."""
    sizes, tokens = shape_of().sizes, 200
    assert sizes is not None
    for tp, recompute in ((1, False), (2, False), (1, True)):
        plain = Blocks(sizes, 2, ParallelDims(tp), fused=True)
        adapted, part = (
            replace(plain, lora=LoraSpec(rank=8)),
            replace(plain, lora=LoraSpec(rank=8, targets=("v_proj",))),
        )
        layers = 1 if recompute else LAYERS
        for blocks, targets, entries in ((adapted, 7, 256 * 3 + 768 * 2), (part, 1, 256)):
            more = blocks.train_bytes(tokens, 8, recompute) - plain.train_bytes(tokens, 8, recompute)
            assert more == 2 * 8 * (tokens * layers * targets + (layers + 1) * entries // tp)


def test_passes_in_flight_are_no_more_than_all_texts() -> None:
    size = largest_pass(16, 48, 1, BUDGET, 6, True, True)
    assert size.total == 6 * 64 and size.in_flight(1) == size.tokens == BUDGET
    assert size.in_flight(8) == size.total
    assert size.in_flight(8, texts=2) == 2 * size.total
    assert largest_pass(16, 48, 1, BUDGET, None, True, True).in_flight(8) == 8 * BUDGET


def test_further_texts_of_an_update_are_in_flight_too() -> None:
    plan = plan_of(None, 2, "algorithm.ptx={path: texts.jsonl}")
    runs = [each for each in plan.schedule.instructions if isinstance(each, Run) and each.operator.kind == "train"]
    works = {run.model: works_of(run, plan.batch, 0)[0] for run in runs}
    assert [getattr(works[name], "texts", None) for name in ("actor", "critic")] == [2, 1]


# --- transients


def test_fused_layers_are_one_tensor() -> None:
    fused = dict(with_fused_layers(shape_of().parameters))
    assert fused["model.layers.0.self_attn.q_proj.weight"] == (HIDDEN + 2 * HIDDEN // 2, HIDDEN)
    assert fused["model.layers.0.mlp.gate_proj.weight"] == (2 * FFN, HIDDEN)
    assert sum(count_elements((item,)) for item in fused.items()) == shape_of().num_parameters
    assert fused["model.layers.0.self_attn.o_proj.weight"] == (HIDDEN, HIDDEN)


def test_gradients_of_a_stage_without_the_vocabulary_are_those_of_a_layer() -> None:
    model, shape = placed(1, 1, 4), shape_of()
    vocabulary, layer = VOCABULARY * HIDDEN, 2 * FFN * HIDDEN
    assert [trained_units(model, shape, rank).largest for rank in model.ranks] == [vocabulary, layer, layer, vocabulary]
    assert new_gradient_bytes(model, shape, 1) == 4 * layer


# --- what is printed


def test_the_plan_names_stages_and_their_layers() -> None:
    text = format_plan(
        plan_of(
            None,
            4,
            "models.critic={engine: megatron, pp: 2, tp: 2, init: {model_type: llama, vocab_size: 32, hidden_size: 8, "
            "intermediate_size: 16, num_hidden_layers: 4, num_attention_heads: 2}}",
        )
    )
    assert "megatron tp 2 pp 2" in text
    assert "stage 0 on ranks 0-1: layers 0-1, model.embed_tokens" in text
    assert "stage 1 on ranks 2-3: layers 2-3, model.norm, score" in text


def test_memory_of_different_stages_is_printed_apart() -> None:
    tall = "models.critic.init={model_type: llama, hidden_size: 8, num_attention_heads: 2, num_hidden_layers: 4}"
    lines = planned_memory(plan_of(None, 4, tall, "models.critic.engine=megatron", "models.critic.pp=2"))
    assert [line.partition(":")[0] for line in lines if line.startswith("ranks")] == ["ranks 0-1", "ranks 2-3"]
