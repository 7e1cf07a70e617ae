"""Predicted timeline of a plan: its simulation with the lengths of a run, or why there is none."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flexrlhf.errors import UserError
from flexrlhf.guideline.simulation.inputs import costs_for, read_lengths
from flexrlhf.guideline.simulation.simulate import Simulation, simulate
from flexrlhf.plan.plan import Plan
from flexrlhf.report.run_contents import RunContents
from flexrlhf.timeline import Span

MOST_WALKED = 200
"""Steps of a run that are simulated one by one; of a longer one, only as many as are shown."""


@dataclass(frozen=True)
class Prediction:
    """Simulation of a run.

    simulation:  of its plan
    source:      where the seconds come from, in words
    lengths:     lengths of the texts, in words
    """

    simulation: Simulation
    source: str
    lengths: str

    def spans(self, last_step: int, shown: int, ranks: Collection[int]) -> tuple[Span, ...]:
        """Return the predicted timeline of ``ranks``: all steps up to ``last_step``, or the first of a long run."""
        lag = self.simulation.plan.schedule.lag
        number = last_step + 1 if last_step < MOST_WALKED else shown + lag + 2
        return tuple(self.simulation.spans(number, ranks))


def predict_run(plan: Plan, contents: RunContents, profile: Path | None) -> Prediction | str:
    """Return the prediction of a run with the mean response length that it measured, or the reason why there is none.

    The times are those of ``profile``, else those that ``simulate`` takes: by the figures of the device classes, or of
    the profile in the directory of the runs.
    """
    spec = plan.spec.model_copy(update={"runs": str(contents.directory.parent)})
    return _predict(replace(plan, spec=spec), profile, _mean_response(contents))


def predict_plan(plan: Plan, profile: Path | None) -> Prediction | str:
    """Return the prediction of a plan with the lengths in its data, or the reason why there is none."""
    return _predict(plan, profile, None)


def _predict(plan: Plan, profile: Path | None, mean_response: float | None) -> Prediction | str:
    try:
        source = costs_for(plan.spec, profile)
        lengths = read_lengths(None if mean_response is None else f"{mean_response:.6g}", plan)
        simulation = simulate(plan, source.costs, lengths)
    except UserError as error:
        return str(error)
    text = f"{lengths.mean_prompt:.4g} prompt tokens and {lengths.mean_response:.4g} of the response"
    return Prediction(simulation, source.name, text)


def _mean_response(contents: RunContents) -> float | None:
    lengths: Sequence[float] = [
        row["response_length"] for row in contents.rows if isinstance(row.get("response_length"), int | float)
    ]
    return sum(lengths) / len(lengths) if lengths else None
