"""Costs and lengths that predictions start from: of device classes or a profile, or as a run measured them
(``--from``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer

from flexrlhf.api import load_plugin

if TYPE_CHECKING:
    from flexrlhf.api import Spec
    from flexrlhf.guideline.simulation.inputs import CostSource, TextLengths
    from flexrlhf.guideline.simulation.measured_run import MeasuredRun

Profile = Annotated[Path | None, typer.Option(help="times measured by `flexrlhf profile`")]
MeasuredIn = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="RUN",
        help="directory of a run: times scaled to its own, lengths of its last steps; its config if none is given",
    ),
]


@dataclass(frozen=True)
class Basis:
    """Basis of predictions.

    profile:  file of ``flexrlhf profile``; None: the usual one
    run:      measurements of a run, which go before it
    """

    profile: Path | None
    run: MeasuredRun | None = None

    @classmethod
    def of(cls, profile: Path | None, run: Path | None) -> Self:
        """Read the directory of a ``run``, if one is given."""
        if run is None:
            return cls(profile)
        from flexrlhf.guideline.simulation.measured_run import measured_run

        return cls(profile, measured_run(load_plugin("functions", "read_record")(run), profile))

    def source(self, spec: Spec) -> CostSource:
        """Return the costs of the devices of ``spec``."""
        from flexrlhf.guideline.simulation.inputs import costs_for

        return costs_for(spec, self.profile) if self.run is None else self.run.source

    def lengths(self, *given: object, read: Callable[[], TextLengths]) -> TextLengths:
        """Return the lengths by ``read``, but those of the run if there is one and no option is ``given``."""
        return read() if self.run is None or any(each is not None for each in given) else self.run.lengths
