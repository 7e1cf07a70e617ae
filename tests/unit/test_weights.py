"""Weights between parts and whole tensors: what is cut and filled in again is what was there."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import cast

import pytest
import torch
import torch.distributed as dist
from small_runs import TINY, placed_model
from torch import Tensor
from torch.nn.functional import pad

from flexrlhf.comm.weights import WeightGather, fill, flat
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.runs.tensor_files import cut
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.shapes import model_shape
from flexrlhf.weights.shards import Part

SETTINGS = [
    {},
    {"tp": 2},
    {"zero": 3},
    {"zero": 2, "tp": 2},
    {"engine": "deepspeed", "zero": 3},
    {"engine": "deepspeed", "zero": 1},
]


def shape_of(**settings: object) -> ModelShape:
    shape = model_shape("actor", ModelSpec(init=TINY | settings))
    assert shape is not None
    return shape


def tensors_of(shape: ModelShape, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=draw) for name, size in shape.parameters}


def gather_of(model: PlacedModel, shape: ModelShape, ranks: tuple[int, ...]) -> WeightGather:
    parts = tuple(shape.trained_parts(model, rank) for rank in ranks)
    return WeightGather(None, ranks, parts, lambda work, ranks: pytest.fail("a rank by itself waits for nobody"))


# --- cut and fill


def test_a_part_is_cut_as_a_vector() -> None:
    tensor = torch.arange(12).view(3, 4)
    assert cut(tensor, Part.whole((3, 4))).tolist() == list(range(12))
    assert cut(tensor, Part((3, 4), (range(1, 3), range(2)))).tolist() == [4, 5, 8, 9]
    assert cut(tensor, Part((3, 4), (range(3), range(4)), range(5, 8))).tolist() == [5, 6, 7]
    assert cut(tensor, Part((3, 4), (range(1, 3), range(2)), range(1, 3))).tolist() == [5, 8]
    assert cut(tensor, Part((3, 4), (range(3, 3), range(4)))).tolist() == []


def test_a_part_is_filled_from_a_vector() -> None:
    tensor = torch.zeros(3, 4)
    fill(tensor, Part((3, 4), (range(1, 3), range(2))), torch.tensor([1.0, 2, 3, 4]))
    assert tensor.tolist() == [[0, 0, 0, 0], [1, 2, 0, 0], [3, 4, 0, 0]]
    fill(tensor, Part((3, 4), (range(3), range(4)), range(3, 5)), torch.tensor([5.0, 6]))
    assert tensor.tolist() == [[0, 0, 0, 5], [6, 2, 0, 0], [3, 4, 0, 0]]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("num_ranks", [2, 4, 6])
def test_the_parts_of_all_ranks_give_the_tensors_back(settings: dict[str, object], num_ranks: int) -> None:
    model, shape = placed_model("actor", tuple(range(num_ranks)), **settings), shape_of()
    tensors = tensors_of(shape)
    for ranks in model.gather_sets:
        back = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
        for rank in ranks:
            for name, part in shape.parts_on(model, rank).items():
                fill(back[name], part, cut(tensors[name], part))
        assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_tensors_of_any_size_are_given_back() -> None:
    draw = random.Random(0)
    for _ in range(100):
        settings, dp = draw.choice(SETTINGS), draw.randint(1, 5)
        tp = int(str(settings.get("tp", 1)))
        size = (tp * draw.randint(1, 4), *(tp * draw.randint(1, 3) for _ in range(draw.randint(0, 2))))
        shape = ModelShape((("q_proj.weight", size),))
        model = placed_model("actor", tuple(range(tp * dp)), **settings)
        tensor, back = tensors_of(shape)["q_proj.weight"], torch.full(size, torch.nan)
        for rank in model.gather_sets[0]:
            part = shape.parts_on(model, rank)["q_proj.weight"]
            fill(back, part, cut(tensor, part))
        assert torch.equal(back, tensor), f"{settings}, dp {dp}, {size}"


# --- vectors of several tensors


def test_the_named_tensors_are_copied_into_one_vector() -> None:
    weights = {"b": torch.tensor([[1.0, 2.0]]), "a": torch.tensor([3.0]), "c": torch.tensor([4.0])}
    vector = flat(weights, ["b", "a"], torch.float32)
    assert vector.tolist() == [1, 2, 3]
    vector.zero_()
    assert weights["b"].tolist() == [[1, 2]]


def test_the_vector_has_the_wanted_type_and_no_gradient() -> None:
    weight = torch.ones(2, requires_grad=True)
    vector = flat({"a": weight}, ["a"], torch.bfloat16)
    assert vector.dtype == torch.bfloat16
    assert not vector.requires_grad


# --- a rank that holds whole tensors


def test_a_rank_with_whole_tensors_gathers_nothing() -> None:
    model, shape = placed_model("actor", (4, 7)), shape_of()
    gather, names = gather_of(model, shape, (7,)), [name for name, _ in shape.parameters][:3]
    tensors = tensors_of(shape)
    found = gather.whole(tensors, names, torch.float32)
    assert list(found) == names
    assert all(torch.equal(found[name], tensors[name]) for name in names)
    assert gather.bytes_sent(names, 4) == 0


def test_whole_tensors_have_their_shape_and_the_wanted_type() -> None:
    """Engines may hand over their tensors in any shape."""
    model, shape = placed_model("actor", (0,)), shape_of()
    tensors = tensors_of(shape)
    vectors = {name: tensor.view(-1) for name, tensor in tensors.items()}
    found = gather_of(model, shape, (0,)).whole(vectors, list(vectors), torch.bfloat16)
    for name, tensor in tensors.items():
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor.bfloat16())


# --- ranks that put their shards together


@pytest.mark.parametrize("settings", [s for s in SETTINGS if s.get("zero") != 1 and s], ids=str)
def test_shards_become_whole_tensors(settings: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks' vectors are there, padded to the longest, as after the collective."""
    model, shape = placed_model("actor", (0, 1, 2, 3), **settings), shape_of()
    names, tensors = [name for name, _ in shape.parameters][2:7], tensors_of(shape)
    ranks = model.gather_sets[0]
    held = {rank: shape.parts_on(model, rank) for rank in ranks}
    local = {rank: {name: cut(tensors[name], held[rank][name]) for name in names} for rank in ranks}
    vectors = [flat(local[rank], names, torch.float32) for rank in ranks]

    def gathered(self: WeightGather, mine: Tensor, longest: int) -> Tensor:
        assert longest == max(map(len, vectors))
        return torch.stack([pad(vector, (0, longest - len(vector)), value=torch.nan) for vector in vectors])

    monkeypatch.setattr(WeightGather, "_all_gather", gathered)
    gather = replace(gather_of(model, shape, ranks), group=cast(dist.ProcessGroup, "a group"))
    for rank in ranks:
        found = gather.whole(local[rank], names, torch.float32)
        assert all(torch.equal(found[name], tensors[name]) for name in names)
    assert gather.bytes_sent(names, 4) == (len(ranks) - 1) * max(map(len, vectors)) * 4
