"""The Python interface (FlexRLHF, Fig. 5): ``ExecutionEngine(config_path, ...)()`` is ``flexrlhf run``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from flexrlhf.config.spec_file import load_spec, program_settings
from flexrlhf.launch.lifetime import quiet_torch
from flexrlhf.launch.preparation import prepare_job
from flexrlhf.launch.rank_factory import lasting_factory
from flexrlhf.placement.hosts import Hosts
from flexrlhf.plan.choice import planned
from flexrlhf.plan.suggestions import check_fits
from flexrlhf.runs.run_directory import RunDirectory


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    directory:  where its config, plan, metrics, samples, timeline and models are
    metrics:    the rows of ``metrics.jsonl``, one for each step; none on a node without that directory
    models:     directory of each trained model, by role
    """

    directory: Path
    metrics: list[dict[str, Any]]
    models: dict[str, Path]


class ExecutionEngine:
    """A run that starts when the engine is called.

    From plain Python the call starts the ranks of this machine as processes of their own, as ``flexrlhf run`` does;
    the script needs no ``if __name__ == "__main__"``. In a script that torchrun starts, each process is a rank. Reward
    functions run in processes that load the script again: under torchrun, guard the call there.
    A later release may add to this interface, and changes nothing of it.
    """

    def __init__(
        self,
        config_path: str | Path,
        actor_model_path: str | Path | None = None,
        critic_model_path: str | Path | None = None,
        placement_ratio: Sequence[float | Fraction] | str | None = None,
        *,
        devices: int | None = None,
        overrides: Sequence[str] = (),
        force: bool = False,
        resume: str | Path | None = None,
        accept_changes: bool = False,
    ) -> None:
        """Load and plan the run of a YAML file. Raises UserError; ``plan`` has the result.

        actor_model_path, critic_model_path:  model directories, instead of ``models.*.path`` or ``init``
        placement_ratio:  such as ``[1, 1, 0.5, 0.5]``, or the same as a string
        devices:          number of ranks, instead of ``cluster.devices``
        overrides:        further settings, as of the option ``--set``
        force:            whether a plan may exceed the memory of its devices
        resume:           ``auto``, or the directory of a run or a checkpoint: go on from there
        accept_changes:   go on although types, models or code have changed since the checkpoint
        """
        paths = {"actor": actor_model_path, "critic": critic_model_path}
        settings = program_settings(overrides, devices, paths)
        spec = load_spec(config_path, settings, placement_ratio)
        Hosts().check_single_planner([spec])
        self._resume = None if resume is None else str(resume)
        self._accepts = accept_changes
        ((self.plan, text),) = planned([spec])
        if text:
            print(text)
        if not force:
            check_fits(self.plan)

    def __call__(self) -> RunResult:
        """Train, and return when all ranks have ended. Raises UserError, RankFailure, Interrupted or Preempted."""
        factory = None if Hosts.under_torchrun() else lasting_factory()
        if factory is not None:
            quiet_torch()
            factory.start()
        prepare_job([self.plan], Hosts(), resume=self._resume, accepts=self._accepts).start(factory=factory)
        directory = self.plan.spec.directory
        models = {role: directory / role for role in self.plan.graph.trained}
        return RunResult(directory, RunDirectory(directory).metrics.read(), models)
