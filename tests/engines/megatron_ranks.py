"""One process: a rank of four that compute models by Megatron-Core, one after the other and two at once."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from engine_on_rank import engine_on_rank
from megatron_models import CASES, TOGETHER, UPDATES, Case, parts_of, poisoned, rows_of
from small_models import LENGTHS, SEED, mini_batch, train_in_turn
from torch import Tensor

from flexrlhf.comm.world import Groups, World, open_world
from flexrlhf.engines.non_finite import NonFiniteStep
from flexrlhf.placement.groups import Group
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.weights.shapes import model_shape

SECONDS = 100.0


def named(name: str, case: Case, path: Path) -> PlacedModel:
    """The model of a case under a unique name, so that its groups are unique."""
    model = case.placed(path)
    return PlacedModel(ModelName(name), model.layout, True, model.settings, head=model.head)


def run_case(model: PlacedModel, case: Case, world: World, groups: Groups) -> dict[str, Tensor]:
    """Columns of this rank's rows before and after some updates, norms of gradients, and its parts of the weights."""
    shape = model_shape("actor", model.settings, model.head)
    assert shape is not None
    engine, rows = engine_on_rank(model, world, groups, LENGTHS, SEED, UPDATES), rows_of(model.layout, world.rank)
    planned = {each: part.num_elements for each, part in shape.parts_on(model, world.rank).items()}
    assert planned == {each: tensor.numel() for each, tensor in engine.weights().items()}, model.name
    batch = mini_batch(20, rows=7).select(rows)
    found = {f"first {each}": tensor.clone() for each, tensor in engine.weights().items()}
    found["before"] = engine.forward(batch, [case.column])[case.column.name]
    found["losses"] = torch.stack([*engine.losses(parts_of(case, 0, rows)).values()])
    for step in range(UPDATES):
        parts = parts_of(case, step, rows)
        in_turn = partial(train_in_turn, between=partial(engine.forward, batch, [case.column]))
        found[f"norm {step}"] = (in_turn(engine, parts) if step == 1 else engine.train(parts))["grad_norm"][1]
        if step == 1:
            engine.offload()
            engine.reload()
    found["after"] = engine.forward(batch, [case.column])[case.column.name]
    found |= {f"last {each}": tensor for each, tensor in engine.weights().items()}
    for kind, tensors in engine.training_state().tensors.items():
        found |= {f"{kind} {each}": tensor.values for each, tensor in tensors.items()}
    found = {each: tensor.detach().clone() for each, tensor in found.items()}
    engine.close()
    return found


def run_together(world: World, groups: Groups, models: dict[str, PlacedModel]) -> dict[str, Tensor]:
    """Two models at once: one is trained, the other gets its weights and computes before and after.

    Then a loss that is not finite on one replica stops the update on all ranks.
    """
    case, model = CASES[TOGETHER], models[TOGETHER]
    rows, batch = rows_of(model.layout, world.rank), mini_batch(20, rows=7)
    trained = engine_on_rank(model, world, groups, LENGTHS, SEED, UPDATES)
    frozen = engine_on_rank(replace(model, trained=False), world, groups, LENGTHS, SEED, UPDATES)
    own = batch.select(rows)
    found = {"stale": frozen.forward(own, [case.column])[case.column.name]}
    for step in range(UPDATES):
        trained.train(parts_of(case, step, rows))
        frozen.forward(own, [case.column])
    frozen.load_weights({name: tensor.clone() for name, tensor in trained.weights().items()})
    frozen.weights_changed()
    found["filled"] = frozen.forward(own, [case.column])[case.column.name]
    found["expected"] = trained.forward(own, [case.column])[case.column.name]
    before = {name: tensor.clone() for name, tensor in trained.weights().items()}
    with pytest.raises(NonFiniteStep) as stopped:
        trained.train([(mini_batch(0, rows=7).select(rows), poisoned(row=6))])
    assert stopped.value.first is not None
    found["row"] = torch.tensor(stopped.value.first.row)
    assert all(torch.equal(before[name], tensor) for name, tensor in trained.weights().items())
    for engine in (trained, frozen):
        engine.close()
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def run_rank(directory: Path, files: Path, cases: list[str], world: World) -> None:
    models = {name: named(name, CASES[name], files) for name in cases}
    groups = world.make_groups(
        dict.fromkeys(
            group for model in models.values() for group in Group.of_model(model) if len(group.ranks) > 1 or group.alone
        ),
        SECONDS,
    )
    found = {
        name: run_case(model, CASES[name], world, groups) for name, model in models.items() if world.rank in model.ranks
    }
    found["together"] = run_together(world, groups, models)
    torch.save(found, directory / f"rank-{world.rank}.pt")
    world.close_groups(groups, SECONDS)
    world.meet("end", SECONDS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open_world("cpu", SECONDS) as opened:
        run_rank(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:], opened)
