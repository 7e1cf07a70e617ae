"""Decision of a run whether to go on under another placement: by its own times, and the lengths that it has now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from flexrlhf.api import (
    Cluster,
    ModelSpec,
    Plan,
    Spec,
    UserError,
    counted,
    ranks_text,
)
from flexrlhf.guideline.advice.advise import SECONDS, advise, with_kind
from flexrlhf.guideline.advice.candidates import FeasibleCandidate, Method
from flexrlhf.guideline.advice.choice import Advice
from flexrlhf.guideline.advice.request_changes import OF_MODELS
from flexrlhf.guideline.simulation.measured_run import MeasuredRun
from flexrlhf.guideline.simulation.simulation_text import seconds_text

OTHER_LENGTH = 1.25
"""Ratio of mean lengths from which on a run may go back to a placement that it has left."""


@dataclass(frozen=True)
class Replan:
    """Comparison of a run's placement with another one, over its remaining steps.

    run:             what it has measured
    advice:          placements under which its numbers are the same
    restart_seconds: time that a restart takes
    """

    run: MeasuredRun
    advice: Advice
    restart_seconds: float

    @property
    def remaining(self) -> int:
        """Steps that are left."""
        return self.run.record.plan.spec.steps - self.run.next_step

    @property
    def best(self) -> FeasibleCandidate:
        return self.advice.best

    @property
    def saved(self) -> float:
        """Predicted time by which a step is shorter under the other placement; negative if it is longer."""
        return self.run.simulation.seconds - self.best.seconds

    @property
    def is_clear(self) -> bool:
        """Whether the predictions of the two steps differ by more than a tie."""
        return self.saved > self.advice.margin * self.best.seconds

    @property
    def gain(self) -> float:
        """Predicted time by which the run ends sooner, the restart included."""
        return self.remaining * self.saved - self.restart_seconds

    @property
    def switches(self) -> bool:
        return self.is_clear and self.gain > 0


def replan(
    run: MeasuredRun,
    restart_seconds: float,
    written: Spec | None = None,
    seconds_limit: float = SECONDS,
    margin: float | None = None,
    take: Method | None = None,
) -> Replan:
    """Compare the placement of ``run`` with the one that ``advise`` would use now.

    restart_seconds:  time that a restart takes
    written:          the run's YAML, whose settings stay; None: settings of models are chosen again on known GPUs
    seconds_limit:    work of all searches together, in seconds that it takes on an ordinary core
    margin:           share of the time by which a slower placement counts as equally fast; None: by the accuracy of
                      measurements
    take:             kind of placements whose fastest is compared; None: the one to use

    Raises UserError if no placement fits, or the numbers of the run would be others under it.
    """
    margin = run.source.accuracy.tie if margin is None else margin
    spec = reopened(run.record.plan.spec, written)
    advice = advise(spec, run.source.costs, run.lengths, seconds_limit, margin, explains=False)
    advice = advice if take is None else with_kind(advice, take)
    changed = run.record.plan.spec.differences(advice.best.plan.spec)
    if changed:
        raise UserError(f"{spec.name}: under the placement that is advised {changed[0]}, which changes its numbers")
    return Replan(run, advice, restart_seconds)


def returns(found: Replan, decisions: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a run would go back to the placement that it left last, with responses about as long as then: two
    predictions then contradict each other, and would cost a restart each time.

    decisions: rows of ``replans.jsonl``
    """
    left = next((each for each in reversed(decisions) if each["switches"]), None)
    if left is None or left["before"] != places_text(found.best.plan):
        return False
    now, then = found.run.lengths.mean_response, left["response_length"]
    return bool(max(now, then) < OTHER_LENGTH * min(now, then))


def reopened(spec: Spec, written: Spec | None = None) -> Spec:
    """Return the resolved ``spec`` of a run with its placement open, its chunks and, on known GPUs, settings of models
    that time and memory depend on, unless they are ``written``. What numbers depend on stays."""
    return spec.with_settings(dict(_openings(spec, written)))


def _openings(spec: Spec, written: Spec | None) -> Iterator[tuple[str, Any]]:
    is_open = Cluster.of(spec.cluster).has_known_gpus(spec.cluster)
    yield "placement", None
    # values that no YAML has stay, too
    yield from (("schedule.lag", spec.schedule.lag), ("rollout.engine", spec.rollout.engine))
    sections: list[tuple[str, BaseModel, BaseModel | None, Sequence[str], bool]] = [
        ("schedule", spec.schedule, written and written.schedule, ("strategy", "num_chunks"), True),
        ("rollout", spec.rollout, written and written.rollout, ("tp", "kv_tokens"), is_open),
    ]
    for role, model in spec.models:
        own = None if written is None else written.models.of(role) or written.models.all
        if isinstance(model, ModelSpec) and role != "all":
            for name in ("engine", "dtype"):
                yield f"models.{role}.{name}", getattr(model, name)
            sections.append((f"models.{role}", model, own, OF_MODELS, is_open))
            if model.shadow is not None:
                of_shadow = [name for name in OF_MODELS if name in type(model.shadow).model_fields]
                sections.append((f"models.{role}.shadow", model.shadow, own and own.shadow, of_shadow, is_open))
    for path, section, by_user, names, is_chosen in sections:
        for name in names:
            # of devices without figures only placements are compared
            is_kept = not is_chosen or (by_user is not None and name in by_user.model_fields_set)
            yield f"{path}.{name}", getattr(section, name) if is_kept else ...


def format_replan(found: Replan) -> str:
    """Return the decision in words, a sentence a line."""
    run, best = found.run, found.best
    lines = [
        measured_text(run),
        f"its placement: {places_text(run.record.plan)}",
        f"advised now: {places_text(best.plan)}; {seconds_text(best.seconds)} a step as predicted",
    ]
    if not found.is_clear:
        lines.append(f"no difference beyond the accuracy of predictions ({found.advice.margin:.0%}): go on as it is")
        return "\n".join(lines)
    steps, restart = counted(found.remaining, "remaining step"), seconds_text(found.restart_seconds)
    lines.append(f"saves {seconds_text(found.remaining * found.saved)} in {steps}, and a restart takes {restart}")
    lines[-1] += ": switch" if found.switches else ": go on as it is"
    return "\n".join(lines)


def measured_text(run: MeasuredRun) -> str:
    """Return the measurements of a run that predictions start from."""
    first, last = run.steps[0], run.steps[-1]
    return (
        f"{run.record.plan.spec.name}: steps {first}-{last} took {seconds_text(run.seconds)} each (predicted "
        f"{seconds_text(run.simulation.seconds)}), with responses of {run.lengths.mean_response:.4g} tokens in the mean"
    )


def places_text(plan: Plan) -> str:
    """Return the models by their ranks."""
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for model in plan.placement.models:
        by_ranks.setdefault(model.ranks, []).append(model.name)
    return "; ".join(f"{', '.join(names)} on {ranks_text(ranks)}" for ranks, names in by_ranks.items())
