"""Runs of both sides in turns, and their medians."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.peers.speed import flexrlhf_steps, trl_steps
from benchmarks.peers.speed.files import write_files
from benchmarks.peers.speed.workloads import PeerJob, PeerWorkload


@dataclass(frozen=True)
class RunOptions:
    """Settings of the command line.

    environment: virtual environment of TRL
    steps:       measured steps of each run
    rounds:      runs of each side
    data:        directory of hh-rlhf's dialogues
    model:       directory of a pretrained model
    """

    environment: Path
    steps: int
    rounds: int
    data: Path | None
    model: Path | None


@dataclass(frozen=True)
class StepSeconds:
    """Time of every measured step.

    workload: models, batch and lengths
    flexrlhf: by flexrlhf, of all runs
    trl:      by TRL, of all runs
    """

    workload: PeerWorkload
    flexrlhf: list[float]
    trl: list[float]

    @property
    def ratio(self) -> float:
        """Median time of TRL over flexrlhf's."""
        return median(self.trl) / median(self.flexrlhf)

    def as_json(self) -> dict[str, Any]:
        """Return the workload, the times of all steps and their medians."""
        return asdict(self) | {
            "median_flexrlhf": median(self.flexrlhf),
            "median_trl": median(self.trl),
            "ratio": self.ratio,
        }

    def line(self) -> str:
        """Return a line of the table."""
        ours, theirs = median(self.flexrlhf), median(self.trl)
        tokens = self.workload.rows * self.workload.response
        return (
            f"{self.workload.label:<24} {ours:>9.2f} s {theirs:>9.2f} s {tokens / ours:>9.0f} {tokens / theirs:>9.0f}"
            f" {self.ratio:>7.2f}"
        )


HEADER = f"{'':<24} {'flexrlhf':>11} {'TRL':>11} {'tokens/s':>9} {'of TRL':>9} {'ratio':>7}"
"""Median step time, generated tokens a second of both, and how many times faster flexrlhf is."""


def compare(workload: PeerWorkload, options: RunOptions) -> StepSeconds:
    """Run both sides ``rounds`` times, one after the other."""
    ours: list[float] = []
    theirs: list[float] = []
    with TemporaryDirectory() as name:
        files = PeerJob(workload, Path(name), options.steps + 1)
        write_files(files, options.data, options.model)
        for number in range(options.rounds):
            ours += flexrlhf_steps.seconds(files, f"round-{number}")
            theirs += trl_steps.seconds(files, options.environment)
    return StepSeconds(workload, ours, theirs)
