"""One rank of a run, as the parts that execute its instructions see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flexrlhf.comm.world import Groups, Wait, World
from flexrlhf.placement.placed import ModelName
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.run_data import RunData
from flexrlhf.runs.run_files import RunFiles
from flexrlhf.trainer.loaded_models import LoadedModel


@dataclass(frozen=True)
class RankContext:
    """Arguments of the parts of a trainer.

    plan:       of the run; every rank has the same.
    data:       examples of the run and its special tokens.
    directory:  where the run writes.
    files:      of the run, where machines have directories of their own.
    world:      rank, device and store.
    groups:     process groups of the plan.
    wait:       waits for communication, with a deadline and an error that names what was waited for.
    models:     placed models that are loaded on this rank.
    """

    plan: Plan
    data: RunData
    directory: Path
    files: RunFiles
    world: World
    groups: Groups
    wait: Wait
    models: Mapping[ModelName, LoadedModel]

    @property
    def rank(self) -> int:
        return self.world.rank
