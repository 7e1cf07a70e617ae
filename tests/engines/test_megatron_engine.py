"""Megatron-Core's parts, stages and replicas compute the same as one rank with PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from forked import run_ranks
from megatron_models import CASES, IN_FULL_ALONE, LLAMA, TOGETHER, UPDATES, Case, parts_of, rows_of
from small_models import engine_for, mini_batch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.runs.tensor_files import cut
from flexrlhf.weights.shapes import model_shape

pytest.importorskip("megatron.core")

Found = tuple[dict[str, dict[str, Tensor]], ...]


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as transformers writes it."""
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA)).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def of_four_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_files: Path) -> Found:
    """Results of each of four ranks, by case."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    cases = {item.callspec.params["name"] for item in items} | {TOGETHER}
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks("megatron_ranks", directory, model_files, *(name for name in CASES if name in cases), number=4)
    return tuple(torch.load(directory / f"rank-{rank}.pt") for rank in range(4))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in IN_FULL_ALONE)) for name in CASES]
)
def test_ranks_compute_the_same_as_one(name: str, of_four_ranks: Found, model_files: Path) -> None:
    case = CASES[name]
    engine, batch = engine_for(case.placed(model_files, "torch"), UPDATES), mini_batch(20, rows=7)
    layout, column = case.placed(model_files).layout, case.column.name
    found = {rank: of_four_ranks[rank][name] for rank in layout.ranks}
    for rank in layout.ranks:
        check_weights(case, rank, found[rank], "first", engine.weights(), exact=True)
    expected = {"before": engine.forward(batch, [case.column])[column]}
    losses = torch.stack([*engine.losses(parts_of(case, 0, slice(None))).values()])[:, :2]
    summed = sum(found[ranks[0]]["losses"][:, :2] for ranks in layout.replica_sets)
    close(summed, losses, (0.05 if "dtype" in case.settings else 1e-5) * float(losses.max()), "losses")
    for step in range(UPDATES):
        expected[f"norm {step}"] = engine.train(parts_of(case, step, slice(None)))["grad_norm"][1]
    expected["after"] = engine.forward(batch, [case.column])[column]
    is_rounded = "dtype" in case.settings
    for rank in layout.ranks:
        rows = rows_of(layout, rank)
        close(found[rank]["before"], expected["before"][rows], 0.05 if is_rounded else 1e-5, "before")
        for step in range(UPDATES):
            name = f"norm {step}"
            close(found[rank][name], expected[name], (0.1 if is_rounded else 5e-5) * float(expected[name]), name)
        check_updated(case, found[rank]["after"], expected["after"][rows], "after", 0.1)
        check_weights(case, rank, found[rank], "last", engine.weights())
    check_states(case, list(found.values()))


def test_two_models_in_one_process_do_not_disturb_each_other(of_four_ranks: Found) -> None:
    for of_rank in of_four_ranks:
        found = of_rank["together"]
        assert torch.equal(found["filled"], found["expected"])
        assert not torch.equal(found["filled"], found["stale"])
        assert int(found["row"]) == 6


def close(found: Tensor, expected: Tensor, limit: float, name: str) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=limit, msg=lambda text: f"{name}: {text}")


def check_updated(case: Case, found: Tensor, expected: Tensor, name: str, rounding: float) -> None:
    """Check that updates are the same: in 16 bits on average, because Adam turns a rounding into a sign."""
    if "dtype" in case.settings:
        found, expected = (found - expected).abs().mean(), torch.zeros(())
    close(found, expected, rounding if "dtype" in case.settings else 5e-5, name)


def check_weights(
    case: Case, rank: int, found: dict[str, Tensor], when: str, expected: dict[str, Tensor], exact: bool = False
) -> None:
    """A rank has its planned part of one rank's weights; exactly: of the float32 weights, rounded."""
    shape = model_shape("actor", ModelSpec(init=case.init), case.head)
    assert shape is not None
    for name, part in shape.parts_on(case.placed(), rank).items():
        values = found[f"{when} {name}"].reshape(-1)
        own = cut(expected[name], part)
        if exact:
            assert torch.equal(values, own.to(values.dtype)), name
        else:
            check_updated(case, values.float(), own, name, 0.01)


def check_states(case: Case, found: list[dict[str, Tensor]]) -> None:
    """Moments of every parameter are there, with the distributed optimizer once over the replicas."""
    model, shape = case.placed(), model_shape("actor", ModelSpec(init=case.init), case.head)
    assert shape is not None
    for each, _ in shape.parameters:
        stored = sum(of_rank[f"exp_avg {each}"].numel() for of_rank in found if f"exp_avg {each}" in of_rank)
        planned = sum(
            parts[each].num_elements for rank in model.ranks if each in (parts := shape.parts_on(model, rank))
        )
        assert stored == (planned // model.layout.of_weights.dp if model.settings.zero == 1 else planned), each
