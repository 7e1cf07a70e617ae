"""Run or plan of the page: its contents, its plan, made again, and its timelines, measured and predicted."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from flexrlhf.api import HubName, ModelShape, Plan, ResolvedSpec, RunDirectory, Span, Spec, UserError, model_shapes
from flexrlhf.guideline.simulation.inputs import costs_for
from flexrlhf.guideline.simulation.lengths import read_lengths
from flexrlhf.guideline.simulation.simulate import Simulation, simulate
from flexrlhf.report.file_reader import LineFields
from flexrlhf.report.look import InstructionStyles
from flexrlhf.report.run_contents import RunContents
from flexrlhf.report.step_times import StepTime, last_steps, settled_steps, step_times
from flexrlhf.report.timeline_picture import MOST_SPANS, MOST_STEPS, Lane, ShownTimeline, lanes_of

PLANNED_STEPS = 3
"""Steps of a plan that its timeline shows, after the first one."""
MOST_WALKED = 200
"""Steps of a run that are simulated one by one; of a longer one, only as many as are shown."""


@dataclass(frozen=True)
class Prediction:
    """Simulation of a run.

    simulation:  of its plan
    source:      origin of the costs, in words
    lengths:     of prompts and responses, in words
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

    The costs are measured in ``profile``, or chosen as by ``simulate``: figures of the device classes, or the profile
    in the directory of the runs.
    """
    spec = plan.spec.model_copy(update={"runs": str(contents.directory.parent)})
    lengths = [value for value in contents.rows.series("response_length").values if math.isfinite(value)]
    return predict(replace(plan, spec=spec), profile, sum(lengths) / len(lengths) if lengths else None)


def predict(plan: Plan, profile: Path | None = None, mean_response: float | None = None) -> Prediction | str:
    """Return the prediction of a plan, or the reason why there is none. ``mean_response``: None: of its data."""
    try:
        source = costs_for(plan.spec, profile)
        lengths = read_lengths(None if mean_response is None else f"{mean_response:.6g}", plan)
        simulation = simulate(plan, source.costs, lengths)
    except UserError as error:
        return str(error)
    of = "" if mean_response is None else ", the mean of the run"
    text = f"{lengths.mean_prompt:.4g} prompt tokens and {lengths.mean_response:.4g} of the response{of}"
    return Prediction(simulation, source.name, text)


@dataclass(frozen=True)
class ReportedRun:
    """A run or plan of the page.

    contents:    of its directory; of a plan its YAML alone
    plan:        None where it cannot be made
    prediction:  or the reason why there is none; empty where ``missing`` says it
    missing:     sentences on missing parts of the plan
    """

    contents: RunContents
    plan: Plan | None
    prediction: Prediction | str
    missing: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.contents.name

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on missing parts of this run, a prediction aside."""
        return (*self.contents.notes, *self.missing)

    @cached_property
    def styles(self) -> InstructionStyles:
        return InstructionStyles(self.plan, self.contents.spans)

    @cached_property
    def lanes(self) -> list[Lane]:
        """Lanes of its timelines."""
        return lanes_of(self.plan, self.contents.spans)

    @cached_property
    def measured(self) -> ShownTimeline | None:
        """Last steps of the timeline; None without one."""
        spans = self.contents.spans
        times = settled_steps(step_times(spans, is_complete=self.contents.state not in ("running", "failed")))
        shown = last_steps(times, spans, MOST_STEPS, MOST_SPANS)
        return ShownTimeline("measured", spans, shown) if shown else None

    @cached_property
    def predicted(self) -> ShownTimeline | None:
        """Predicted steps: those that were measured, else settled ones."""
        if isinstance(self.prediction, str):
            return None
        measured = self.measured
        number = len(measured.times) if measured is not None else PLANNED_STEPS
        lag = self.prediction.simulation.plan.schedule.lag
        last = measured.times[-1].step if measured is not None else number + lag + 1
        ranks = {lane.ranks[0] for lane in self.lanes}
        spans = self.prediction.spans(last, number, ranks)
        steps = step_times(spans, is_complete=measured is not None)
        settled = _after(steps, lag)
        return ShownTimeline("predicted", spans, last_steps(settled, spans, number, MOST_SPANS))

    @property
    def timelines(self) -> list[ShownTimeline]:
        return [part for part in (self.measured, self.predicted) if part is not None]


def _after(steps: Sequence[StepTime], lag: int) -> Sequence[StepTime]:
    """Return ``steps`` without those in which a pipeline of steps fills, where there are others."""
    settled = [time for time in steps if time.step > lag]
    return settled or steps


def plan_of_run(contents: RunContents) -> tuple[Plan | None, tuple[str, ...]]:
    """Return the plan of a run, and sentences on missing parts of it; None if its config plans nothing."""
    if contents.spec is None:
        return None, ()
    spec = _with_present_paths(contents.spec, contents.directory)
    try:
        resolved = ResolvedSpec.of(spec)
        shapes, missing = _known_shapes(resolved)
        plan = resolved.plan(resolved.place(), shapes)
    except UserError as error:
        return None, (f"the plan cannot be made again: {error}",)
    try:
        return _as_called(plan, contents), missing
    except UserError as error:
        calls = RunDirectory(contents.directory).calls.path
        return plan, (*missing, f"the schedule is as planned, not as called: {calls}: {error}")


def _as_called(plan: Plan, contents: RunContents) -> Plan:
    """Return ``plan`` with the last step of the run as a program called it, if one did. Raises UserError for calls that
    the plan cannot have."""
    lines = contents.calls
    if not lines or [line["step"] for line in lines[-1:]] != [*contents.rows.steps[-1:]]:
        return plan
    for call in (call for line in lines for call in line["calls"]):
        _check_call(plan, call)
    return plan.as_called((line["calls"] for line in lines), lines[-1]["step"])


def _check_call(plan: Plan, call: LineFields) -> None:
    """Raise UserError for a call on mini-batches or prompts that the plan does not have."""
    shape, (start, stop) = plan.batch, call["mini_batches"]
    if not 0 <= start < stop <= len(shape.mini_batches):
        raise UserError(f"{call['operator']} on mini-batches {start} to {stop} of {len(shape.mini_batches)}")
    if call["parts"]:
        prompts = sorted(prompt for part in call["parts"] for prompt in part)
        if prompts != sorted(prompt for number in range(start, stop) for prompt in shape.prompts(number)):
            raise UserError(f"{call['operator']} on other prompts than those of its mini-batches")


def _known_shapes(resolved: ResolvedSpec) -> tuple[dict[str, ModelShape], tuple[str, ...]]:
    """Return the shapes of the models, or none and why."""
    try:
        return model_shapes(resolved.spec, resolved.graph, {}), ()
    except UserError as error:
        return {}, (f"planned memory, weights that move and predictions are left out: {error}",)


def _with_present_paths(spec: Spec, directory: Path) -> Spec:
    """Return ``spec`` with relative paths that lead from where the run was started, if its directory still lies there,
    and without downloads."""
    runs, parent = Path(spec.runs), directory.absolute().parent
    is_moved = runs.is_absolute() or not runs.parts or parent.parts[-len(runs.parts) :] != runs.parts
    start = None if is_moved else Path(*parent.parts[: -len(runs.parts)])
    return spec.with_paths(lambda _, path: _present(path, start), {})


def _present(path: str, start: Path | None) -> str:
    """Return a path as it is found here; a name on the Hub that is not in the cache as a path that leads nowhere."""
    if Path(path).exists():
        return path
    if start is not None and (start / path).exists():
        return str(start / path)
    name = HubName.parse(path)
    if name is None:
        return path
    cached = name.cached("model")
    return f"./{path}" if cached is None else str(cached)
