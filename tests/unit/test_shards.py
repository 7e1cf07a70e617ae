"""What a rank holds of each tensor: all ranks together hold every number, and as often as the layout says."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from small_runs import TINY, placed_model

from flexrlhf.config.engines import Split
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.spec import RolloutSpec
from flexrlhf.memory.states import kv_cache_bytes
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.shapes import model_shape
from flexrlhf.weights.shards import Part, elements_on_rank, fsdp_dim, tensor_parallel_dim

LAYOUTS = [
    ("torch", 0, 1),
    ("torch", 0, 2),
    ("torch", 2, 1),
    ("torch", 3, 1),
    ("torch", 3, 2),
    ("torch", 2, 3),
    ("torch in nodes", 3, 1),
    ("torch in nodes", 2, 2),
    ("deepspeed", 2, 1),
    ("deepspeed", 3, 1),
]
"""Engine, ZeRO stage and tensor-parallel ranks; in nodes: half of the replicas are on one, where they are several."""
NAMES = ("q_proj.weight", "q_proj.bias", "o_proj.weight", "o_proj.bias", "norm.weight", "lm_head.weight")


def placed(engine: str, zero: int, tp: int, dp: int) -> PlacedModel:
    """On ranks that neither begin with 0 nor follow each other."""
    name, _, in_nodes = engine.partition(" in ")
    model = placed_model("actor", tuple(range(3, 3 + 2 * tp * dp, 2)), engine=name, zero=zero, tp=tp)
    return replace(model, sharded_over=dp // 2) if in_nodes and dp % 2 == 0 and dp > 2 else model


def numbers(part: Part) -> list[int]:
    """Where the numbers of ``part`` stand among the row-major ones of the tensor."""
    places = torch.arange(torch.Size(part.shape).numel()).view(part.shape)
    inside = [int(places[index]) for index in product(*part.box)]
    return inside if part.flat is None else inside[part.flat.start : part.flat.stop]


def drawn_shape(draw: random.Random, tp: int) -> ModelShape:
    """Tensors of any sizes, many of them smaller than the group. ``tp`` divides what it cuts, as planning demands."""
    parameters: dict[str, tuple[int, ...]] = {}
    for name in NAMES:
        if name.startswith("lm_head"):
            size: tuple[int, ...] = (draw.randint(1, 9), draw.randint(1, 4))
        elif name.endswith("bias") or name.startswith("norm"):
            size = (tp * draw.randint(1, 5),)
        else:
            size = (tp * draw.randint(1, 4), tp * draw.randint(1, 4))
        parameters[name] = size
    return ModelShape(tuple(sorted(parameters.items())))


def copies(model: PlacedModel, name: str, size: tuple[int, ...]) -> int:
    """How many ranks hold a number of this tensor."""
    layout = model.layout
    is_cut = layout.dims.tp > 1 and tensor_parallel_dim(name, size, layout.dims.tp) is not None
    return (1 if is_cut else layout.dims.tp) * layout.dp // model.num_shards


# --- all ranks together


@pytest.mark.parametrize(("engine", "zero", "tp"), LAYOUTS)
def test_the_ranks_hold_every_number_as_often_as_the_layout_says(engine: str, zero: int, tp: int) -> None:
    draw = random.Random(0)
    for _ in range(60):
        model, shape = placed(engine, zero, tp, draw.randint(1, 6)), drawn_shape(draw, tp)
        held = {rank: shape.parts_on(model, rank) for rank in model.ranks}
        for name, size in shape.parameters:
            assert all(list(parts) == [name for name, _ in shape.parameters] for parts in held.values())
            count = Counter(place for parts in held.values() for place in numbers(parts[name]))
            everywhere = range(torch.Size(size).numel())
            assert count == dict.fromkeys(everywhere, copies(model, name, size)), f"{name} {size} of {model}"
            assert all(part.num_elements == len(numbers(part)) for part in (parts[name] for parts in held.values()))


@pytest.mark.parametrize(("engine", "zero", "tp"), LAYOUTS)
def test_replicas_hold_the_same_where_nothing_is_sharded(engine: str, zero: int, tp: int) -> None:
    draw = random.Random(1)
    for _ in range(20):
        model, shape = placed(engine, zero, tp, draw.randint(2, 4)), drawn_shape(draw, tp)
        held = {rank: shape.parts_on(model, rank) for rank in model.ranks}
        for rank in model.ranks:
            others = [held[other] for other in model.layout.dp_set(rank)]
            assert all(parts == held[rank] for parts in others) == (model.split == "whole")


def test_a_part_counts_the_elements_of_its_box_or_range() -> None:
    assert Part.whole((3, 2)).num_elements == 6
    assert Part((3, 2), (range(3), range(2)), range(5)).num_elements == 5
    assert Part((3, 2), (range(2), range(2))).num_elements == 4


# --- which numbers


@pytest.mark.parametrize("zero", [2, 3])
def test_fsdp_cuts_rows_as_torch_chunks_them(zero: int) -> None:
    """What does not divide leaves the last ranks less, or nothing."""
    for rows, dp in product(range(1, 10), range(2, 6)):
        model, shape = placed("torch", zero, 1, dp), ModelShape((("norm.weight", (rows, 3)),))
        sizes = [len(shape.parts_on(model, rank)["norm.weight"].box[0]) for rank in model.ranks]
        chunks = [len(chunk) for chunk in torch.empty(rows, 3).chunk(dp)]
        assert sizes == chunks + [0] * (dp - len(chunks))


def test_deepspeed_cuts_the_flat_numbers_of_a_tensor() -> None:
    model, shape = placed("deepspeed", 3, 1, 4), ModelShape((("norm.weight", (3, 3)),))
    parts = [shape.parts_on(model, rank)["norm.weight"] for rank in model.ranks]
    assert [part.flat for part in parts] == [range(0, 3), range(3, 6), range(6, 9), range(9, 9)]
    assert all(part.box == (range(3), range(3)) for part in parts)


def test_tensor_parallel_comes_before_shards() -> None:
    """Ranks 3, 5 and 7, 9 are replicas; of 8 rows each tensor-parallel rank has 4, and a shard is 2 of those."""
    model = placed("torch", 3, 2, 2)
    shape = ModelShape((("o_proj.weight", (4, 6)), ("q_proj.weight", (8, 4))))
    parts = [shape.parts_on(model, rank) for rank in model.ranks]
    assert [part["q_proj.weight"].box[0] for part in parts] == [range(0, 2), range(4, 6), range(2, 4), range(6, 8)]
    assert [part["o_proj.weight"].box for part in parts] == [
        (range(0, 2), range(0, 3)),
        (range(0, 2), range(3, 6)),
        (range(2, 4), range(0, 3)),
        (range(2, 4), range(3, 6)),
    ]


@pytest.mark.parametrize(
    ("name", "size", "dim"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (8, 8), 0),
        ("model.layers.0.self_attn.k_proj.weight", (4, 8), 0),
        ("model.layers.0.self_attn.v_proj.weight", (4, 8), 0),
        ("model.layers.0.self_attn.o_proj.weight", (8, 8), 1),
        ("model.layers.0.mlp.gate_proj.weight", (16, 8), 0),
        ("model.layers.0.mlp.up_proj.weight", (16, 8), 0),
        ("model.layers.0.mlp.down_proj.weight", (8, 16), 1),
        ("model.layers.0.self_attn.q_proj.bias", (8,), 0),
        ("model.layers.0.mlp.up_proj.bias", (16,), 0),
        ("model.layers.0.self_attn.o_proj.bias", (8,), None),
        ("model.layers.0.mlp.down_proj.bias", (8,), None),
        ("model.layers.0.input_layernorm.weight", (8,), None),
        ("model.layers.0.self_attn.q_norm.weight", (4,), None),
        ("model.embed_tokens.weight", (32, 8), None),
        ("model.norm.weight", (8,), None),
        ("lm_head.weight", (32, 8), 0),
        ("lm_head.weight", (33, 8), None),
        ("score.weight", (1, 8), None),
        ("weight", (8, 8), None),
        # whole experts, each of which has inner features
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 24, 8), 0),
        ("model.layers.0.mlp.experts.down_proj", (4, 8, 12), 0),
        ("model.layers.0.mlp.gate.weight", (4, 8), None),
        ("model.layers.0.mlp.shared_expert.down_proj.weight", (8, 12), 1),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 8), None),
        # a layer that is split along its outputs has B split so, one along its inputs A
        ("model.layers.0.self_attn.q_proj.base_layer.weight", (8, 8), 0),
        ("model.layers.0.self_attn.q_proj.base_layer.bias", (8,), 0),
        ("model.layers.0.self_attn.q_proj.lora_A.default.weight", (2, 8), None),
        ("model.layers.0.self_attn.q_proj.lora_B.default.weight", (8, 2), 0),
        ("model.layers.0.mlp.down_proj.base_layer.weight", (8, 16), 1),
        ("model.layers.0.mlp.down_proj.base_layer.bias", (8,), None),
        ("model.layers.0.mlp.down_proj.lora_A.default.weight", (2, 16), 1),
        ("model.layers.0.mlp.down_proj.lora_B.default.weight", (8, 2), None),
    ],
)
def test_the_dim_that_tensor_parallelism_cuts(name: str, size: tuple[int, ...], dim: int | None) -> None:
    assert tensor_parallel_dim(name, size, 2) == dim


@pytest.mark.parametrize(
    ("name", "num_shards", "dim"),
    # as many experts for each rank; a part of each expert, by outputs or by inputs; neither divides
    [("experts.gate_up_proj", shards, dim) for shards, dim in ((2, 0), (8, 0), (16, 1), (48, 1), (9, 2), (5, 0))]
    + [("gate_up_proj.weight", 16, 0)],
)
def test_the_dim_that_fsdp_splits(name: str, num_shards: int, dim: int) -> None:
    assert fsdp_dim(f"model.layers.0.mlp.{name}", (8, 96, 36), num_shards) == dim


def test_mixtral_on_more_ranks_than_experts_has_equal_parts() -> None:
    shape = model_shape("actor", ModelSpec(init="mixtral-8x7b"))
    assert shape is not None
    model = placed("torch", 3, 1, 64)
    parameters = sum(math.prod(size) for _, size in shape.parameters)
    for rank in (model.ranks[0], model.ranks[-1]):
        assert elements_on_rank(model, shape.parameters, rank) == pytest.approx(parameters / 64, rel=1e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_is_the_embedding_and_stays_whole(tied: bool) -> None:
    shape = model_shape("actor", ModelSpec(init=TINY | {"tie_word_embeddings": tied}))
    assert shape is not None
    parts = shape.parts_on(placed("torch", 0, 2, 1), 3)
    embedding = parts["model.embed_tokens.weight"]
    assert embedding == Part.whole(embedding.shape)
    assert ("lm_head.weight" in parts) != tied
    assert tied or parts["lm_head.weight"].box == (range(16), range(8))


# --- a rollout engine


QWEN2 = TINY | {"model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2}


def rollout(tp: int, dp: int = 1) -> PlacedModel:
    own = RolloutSpec(engine="vllm", tp=tp)
    return replace(placed("vllm", 0, tp, dp), name="actor.rollout", trained=False, rollout=own)


@pytest.mark.parametrize(
    ("vocabulary", "tp", "rows"),
    [
        (128, 2, [64, 64]),
        (130, 2, [96, 34]),
        (100, 2, [64, 36]),
        (64, 2, [32, 32]),
        (32, 2, [32, 0]),
        (151_936, 4, [37_984] * 4),
        (50_257, 4, [12_576, 12_576, 12_576, 12_529]),
        (130, 1, [130]),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_rollout_engine_cuts_the_vocabulary_as_it_pads_it(
    vocabulary: int, tp: int, rows: list[int], tied: bool
) -> None:
    model = rollout(tp, dp=2)
    parameters = {"model.embed_tokens.weight": (vocabulary, 8)} | ({} if tied else {"lm_head.weight": (vocabulary, 8)})
    shape = ModelShape(tuple(sorted(parameters.items())))
    for set_of_ranks in model.layout.sets("tp"):
        parts = [shape.parts_on(model, rank) for rank in set_of_ranks]
        for name in parameters:
            boxes = [part[name].box for part in parts]
            assert [len(box[0]) for box in boxes] == rows and all(box[1] == range(8) for box in boxes)
            assert [row for box in boxes for row in box[0]] == list(range(vocabulary))


def test_a_rollout_engine_cuts_layers_as_other_engines_do() -> None:
    shape = model_shape("actor", ModelSpec(init=QWEN2))
    assert shape is not None
    own, others = (shape.parts_on(model, 5) for model in (rollout(2), placed("torch", 0, 2, 1)))
    assert {name for name in own if own[name] != others[name]} == {"lm_head.weight", "model.embed_tokens.weight"}
    bias = "model.layers.0.self_attn.k_proj.bias"
    assert own[bias].num_elements == dict(shape.parameters)[bias][0] // 2


def test_ranks_of_a_rollout_engine_share_a_key_value_head() -> None:
    """Of two heads four ranks have one each, neighbours the same."""
    shape = model_shape("actor", ModelSpec(init=QWEN2))
    assert shape is not None
    model = rollout(4, dp=2)
    for ranks in model.layout.sets("tp"):
        parts = [shape.parts_on(model, rank) for rank in ranks]
        for name in ("k_proj.weight", "v_proj.bias"):
            full = f"model.layers.0.self_attn.{name}"
            assert [part[full].box[0] for part in parts] == [range(2), range(2), range(2, 4), range(2, 4)]
        queries = [part["model.layers.0.self_attn.q_proj.weight"].box[0] for part in parts]
        assert queries == [range(2 * i, 2 * i + 2) for i in range(4)]
    assert kv_cache_bytes(model, shape) == kv_cache_bytes(rollout(2), shape)


# --- how a placed model is split


@pytest.mark.parametrize(
    ("engine", "zero", "dp", "split"),
    [
        *(("torch", zero, 2, split) for zero, split in ((0, "whole"), (2, "rows"), (3, "rows"))),
        *(("deepspeed", zero, 2, split) for zero, split in enumerate(("whole", "whole", "whole", "flat"))),
        *((engine, zero, 1, "whole") for engine in ("torch", "deepspeed") for zero in (0, 2, 3)),
    ],
)
def test_how_replicas_share_the_weights(engine: str, zero: int, dp: int, split: Split) -> None:
    assert placed(engine, zero, 1, dp).split == split


@pytest.mark.parametrize(
    ("engine", "zero", "tp", "sets"),
    [
        ("torch", 0, 1, ((3,), (5,), (7,), (9,))),
        ("torch", 0, 2, ((3, 5), (7, 9))),
        ("torch", 3, 1, ((3, 5, 7, 9),)),
        ("torch", 3, 2, ((3, 5, 7, 9),)),
        ("torch in nodes", 3, 1, ((3, 5), (7, 9))),
        ("deepspeed", 2, 1, ((3,), (5,), (7,), (9,))),
        ("deepspeed", 3, 1, ((3, 5, 7, 9),)),
    ],
)
def test_the_smallest_sets_of_ranks_with_all_weights(
    engine: str, zero: int, tp: int, sets: tuple[tuple[int, ...], ...]
) -> None:
    model, shape = placed(engine, zero, tp, 4 // tp), drawn_shape(random.Random(3), tp)
    assert model.gather_sets == sets
    for ranks in sets:
        for name, size in shape.parameters:
            places = {place for rank in ranks for place in numbers(shape.parts_on(model, rank)[name])}
            assert len(places) == torch.Size(size).numel()
