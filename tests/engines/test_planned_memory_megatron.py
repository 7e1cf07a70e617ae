"""Memory of Megatron-Core equals the plan, stage by stage; the additional memory of calls is close below it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import run_ranks
from planned_memory_ranks import ALONE, LENGTHS, ROWS, TOGETHER, Case

from flexrlhf.config.spec import SyncSpec
from flexrlhf.memory.budget import Compute, SequenceLengths, Sizing
from flexrlhf.placement.placement import Placement
from flexrlhf.weights.shapes import model_shape

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.full

Found = dict[int, dict[str, dict[str, int]]]


def launched(directory: Path, which: str, number: int) -> Found:
    """Return the measurements of each of ``number`` ranks, by case."""
    run_ranks("planned_memory_ranks", directory, which, number=number)
    return {rank: json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(number)}


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return launched(tmp_path_factory.mktemp("one"), "alone", 1)


@pytest.fixture(scope="module")
def of_four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return launched(tmp_path_factory.mktemp("four"), "together", 4)


@pytest.mark.parametrize("name", ALONE)
def test_planned_and_measured_bytes(name: str, of_one_rank: Found) -> None:
    check(ALONE[name], name, of_one_rank)


@pytest.mark.parametrize("name", TOGETHER)
def test_planned_and_measured_bytes_of_stages(name: str, of_four_ranks: Found) -> None:
    check(TOGETHER[name], name, of_four_ranks)


def check(case: Case, name: str, found: Found) -> None:
    for rank, (planned, measured) in compared(case, name, found):
        for kind in ("weights", "gradients"):
            assert planned[kind] == measured[kind], (rank, kind)
        assert measured["between trainings"] == 0
        # a part of the padded buffer may be all padding
        assert 0.95 * planned["optimizer"] - 4096 <= measured["optimizer"] <= planned["optimizer"] + 256, rank
        # how many copies of gloo exist at a time differs from one time to the next
        least, most = (0.97, 1.8) if case.settings.get("tp", 1) == 1 else (0.95, 2.5)
        for kind in ("train", "forward"):
            assert least < planned[kind] / measured[kind] < most, (rank, kind)


def compared(case: Case, name: str, found: Found) -> Iterator[tuple[int, tuple[dict[str, int], dict[str, int]]]]:
    """Yield for each rank planned and measured bytes, by name."""
    model = case.placed(name)
    shape = model_shape(model.role, model.settings, case.head)
    assert shape is not None
    if model.settings.lora is not None:
        shape = shape.with_adapters(model.role, model.settings.lora)
    lengths = SequenceLengths(LENGTHS.prompt, LENGTHS.response)
    sizing = Sizing(Placement((model,), case.ranks), {model.role: shape}, lengths, SyncSpec())

    def most(kind: Any, rank: int) -> int:
        return max(phase.part_bytes for phase in sizing.phases(Compute(kind, model.name, ROWS), rank))

    for rank in model.ranks:
        state = sizing.state(model, rank)
        assert state is not None
        planned = {"weights": state.weights, "gradients": state.gradients, "optimizer": state.optimizer}
        # gradients exist while a model trains
        planned |= {"train": state.gradients + most("train", rank), "forward": most("forward", rank)}
        yield rank, (planned, found[rank][name])
