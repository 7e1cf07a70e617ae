"""One rank that does a run twice: unchanged, then with an actor in which one weight differs from the engine's.

``python perturbed.py CONFIG NAME AMOUNT``: add AMOUNT to the first number of the actor's weight NAME.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from flexrlhf.comm.world import World, open_world
from flexrlhf.config.spec import Spec
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.display.events import EventSender
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.runs.run_files import RunFiles
from flexrlhf.trainer.flight_record import FlightRecord
from flexrlhf.trainer.memory_meter import MemoryMeter
from flexrlhf.trainer.rank_context import open_rank
from flexrlhf.trainer.stop_requests import StopRequests
from flexrlhf.trainer.trainer import Trainer


def run(spec: Spec, world: World, name: str, amount: float) -> None:
    """Run as flexrlhf/launch/worker.py, except for the weight."""
    plan = make_plan(spec)
    RunDirectory(plan.spec.directory).prepare(plan.spec, format_plan(plan), continues=False).close()
    flight = FlightRecord(plan, world, RunDirectory(spec.directory))
    meter, stops, files = MemoryMeter(world.device), StopRequests(world.store), RunFiles(world.rank == 0)
    rank = open_rank(plan, plan.data.load(), files, world, flight, meter, stops, EventSender())
    trainer = Trainer(rank)
    weight = rank.models["actor"].engine.weights()[name]
    with torch.no_grad():
        weight.view(-1)[0] += amount
    trainer.run()
    rank.close()
    print(f"{spec.name} ended", flush=True)


def main(config: str, name: str, amount: str) -> None:
    spec = Spec.parse(read_yaml(Path(config).read_text()))
    with open_world("cpu", spec.timeout_seconds) as world:
        run(spec.model_copy(update={"name": "as-it-is"}), world, name, 0.0)
        run(spec.model_copy(update={"name": "perturbed"}), world, name, float(amount))


if __name__ == "__main__":
    main(*sys.argv[1:])
