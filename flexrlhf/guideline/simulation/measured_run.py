"""Measurements of a run that predictions start from: times of its instructions, and lengths of its recent steps.

An instruction takes from when its last rank begins it to when its last rank ends it, so without the waiting of ranks
for each other. Times are compared with a prediction for the lengths of the same steps; what differs becomes a factor of
each kind of call, engine and model.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from flexrlhf.api import Instruction, Plan, Run, RunDirectory, Span, Spec, Sync, UserError
from flexrlhf.guideline.costs.cost_model import transformer_of
from flexrlhf.guideline.costs.environment_times import EnvironmentTimes
from flexrlhf.guideline.costs.profiles import FROM_MEASUREMENTS
from flexrlhf.guideline.costs.scaled import ScaledCosts, ScaledWork
from flexrlhf.guideline.simulation.calls import engine_of
from flexrlhf.guideline.simulation.inputs import (
    CostSource,
    TextLengths,
    costs_for,
    lengths_in_data,
    ordinary_cpu,
    truncated,
    truncated_exponential,
)
from flexrlhf.guideline.simulation.simulate import Simulation, simulate
from flexrlhf.guideline.simulation.timed_instructions import WAYS

RECENT_STEPS = 10
"""Steps whose times and lengths are taken, the last ones."""
LEAST_STEPS = 2
"""Steps that a run must have, in addition to the first one, in which libraries load."""
LEAST_SAMPLES = 8
"""Samples whose lengths give the shape of their distribution."""
REPLY_SHARES = {0.5: "p50", 0.9: "p90", 0.99: "p99", 1.0: "max"}
"""Share of a step's replies → end of the name of the metric that has the longest of them."""
NUM_REPLIES, LEAST_SECONDS = 256, 1e-6
"""Replies whose times stand for all, and the least time of one."""
LEAST_SHARE = 0.02
"""Share of a step below which work gives no factor: it is the trainer's time around it, which no size changes."""

_Key = tuple[str, str, int | None]
"""Kind, label and chunk of an instruction."""


@dataclass(frozen=True)
class RunRecord:
    """Content of a run's directory.

    directory:  of the run
    plan:       its plan, of its ``config.yaml``
    rows:       of its metrics
    samples:    of its responses
    spans:      of its timeline
    """

    directory: Path
    plan: Plan
    rows: Sequence[Mapping[str, Any]]
    samples: Iterable[Mapping[str, Any]]
    spans: Sequence[Span]


@dataclass(frozen=True)
class MeasuredRun:
    """Times of a run, and predictions that start from them.

    record:      the run
    steps:       settled steps that were measured, the last ones
    seconds:     median time of one
    warm_up:     time that the first step took in addition
    lengths:     of their texts
    source:      costs that are scaled to their times
    """

    record: RunRecord
    steps: tuple[int, ...]
    seconds: float
    warm_up: float
    lengths: TextLengths
    source: CostSource

    @cached_property
    def simulation(self) -> Simulation:
        """Prediction of a step with these costs and lengths."""
        return simulate(self.record.plan, self.source.costs, self.lengths)

    @property
    def next_step(self) -> int:
        """The first step whose metrics are not there."""
        return int(self.record.rows[-1]["step"]) + 1

    @cached_property
    def restart_seconds(self) -> float:
        """Time of a restart: the start as measured, writing and reading a checkpoint, and the time that a first step
        takes in addition. Raises UserError if the start was not measured."""
        directory, plan = self.record.directory, self.record.plan
        status = RunDirectory(directory).status
        if status is None or status.start_seconds is None:
            raise UserError(
                f"run {directory}: its status.json has no start_seconds, so that the time of a restart is not known; "
                f"it is of an older version"
            )
        copies = 2 * self.source.costs.save(plan.checkpoint_bytes).seconds
        return status.start_seconds + copies + self.warm_up


def measured_run(record: RunRecord, profile: Path | None = None) -> MeasuredRun:
    """Return the measurements of a run. ``profile``: measurements of the machine to scale, if not those of
    ``costs_for``.

    Raises UserError for a run without steps to measure.
    """
    steps = _settled_steps(record)
    by_step = {row["step"]: float(row["seconds"]) for row in record.rows}
    low, seconds, high = quantiles([by_step[step] for step in steps], n=4, method="inclusive")
    lengths, base = _recent_lengths(record, steps), _base_costs(record.plan.spec, profile)
    unscaled = ScaledCosts(base.costs, {}, 1.0, reply_times(record, steps, base))
    predicted = simulate(record.plan, unscaled, lengths)
    scaled = _scaled_costs(predicted, _measured_times(record, steps), unscaled)
    accuracy = FROM_MEASUREMENTS.scattered((high - low) / seconds)
    source = CostSource(scaled, f"times of {record.directory}, by {base.name}", accuracy)
    first = next(iter(by_step.values()))
    return MeasuredRun(record, steps, seconds, max(0.0, first - seconds), lengths, source)


def _base_costs(spec: Spec, profile: Path | None) -> CostSource:
    """Return the costs to scale: those of ``costs_for``, else of another machine, whose factors differ more."""
    try:
        return costs_for(spec, profile)
    except UserError:
        if profile is not None:
            raise
        return ordinary_cpu(spec)


def _settled_steps(record: RunRecord) -> tuple[int, ...]:
    """Return the last steps with metrics whose spans are the instructions of the plan, the first such step left out.

    A run that went on under another placement has spans of both.
    """
    plan = record.plan
    planned = [each for each in plan.schedule.instructions if not each.is_rare and each.period == 1]
    expected = Counter((*_key(each), rank) for each in planned for rank in each.ranks)
    others = {_key(each) for each in plan.schedule.instructions if each.is_rare or each.period > 1}
    found: dict[int, Counter[tuple[Any, ...]]] = defaultdict(Counter)
    for span in record.spans:
        key = span.kind, span.label, span.chunk
        if span.kind not in ("save", "eval", "checkpoint") and key not in others:
            found[span.step][(*key, span.rank)] += 1
    known = {row["step"] for row in record.rows}
    steps = [step for step in sorted(found) if step in known and found[step] == expected][1:]
    if len(steps) < LEAST_STEPS:
        raise UserError(
            f"--from {record.directory}: {len(steps)} settled steps of its placement in the timeline, expected at "
            f"least {LEAST_STEPS}; let it train longer"
        )
    return tuple(steps[-RECENT_STEPS:])


def _key(instruction: Instruction) -> _Key:
    return instruction.kind, instruction.label, instruction.chunk


def _measured_times(record: RunRecord, steps: Sequence[int]) -> dict[_Key, float]:
    """Return the time of each instruction, the median over ``steps``."""
    starts: dict[tuple[_Key, int], float] = {}
    ends: dict[tuple[_Key, int], float] = {}
    chosen = set(steps)
    for span in record.spans:
        if span.step in chosen:
            key = (span.kind, span.label, span.chunk), span.step
            starts[key], ends[key] = max(span.start, starts.get(key, 0.0)), max(span.end, ends.get(key, 0.0))
    times: dict[_Key, list[float]] = defaultdict(list)
    for key, start in starts.items():
        times[key[0]].append(max(0.0, ends[key] - start))
    return {key: median(each) for key, each in times.items()}


def _scaled_costs(predicted: Simulation, times: Mapping[_Key, float], costs: ScaledCosts) -> ScaledCosts:
    """Return ``costs`` with factors by which ``times`` differ from ``predicted``, waiting for replies aside."""
    expected: dict[ScaledWork, float] = defaultdict(float)
    measured: dict[ScaledWork, float] = defaultdict(float)
    for item in predicted.regular:
        work = _work_of(predicted.plan, item.instruction)
        if work is not None and _key(item.instruction) in times:
            expected[work] += item.computing
            measured[work] += max(0.0, times[_key(item.instruction)] - item.awaiting)
    calls = [work for work in expected if isinstance(work, tuple)]
    total = sum(measured[work] for work in calls), sum(expected[work] for work in calls)
    step = sum(measured.values()), sum(expected.values())
    factors = {
        work: measured[work] / expected[work]
        for work in expected
        if measured[work] >= LEAST_SHARE * step[0] and expected[work] >= LEAST_SHARE * step[1]
    }
    return replace(costs, factors=factors, usual=total[0] / total[1])


def _work_of(plan: Plan, instruction: Instruction) -> ScaledWork | None:
    """Return the work of an instruction whose span is its time; None for others."""
    match instruction:
        case Run() if instruction.operator.call is None:
            return "combine"
        case Run():
            model = plan.placement[instruction.model]
            assert instruction.operator.call is not None, "a call"
            shape = transformer_of(plan.shapes[model.role], model.head, is_adapted=model.settings.lora is not None)
            return instruction.operator.call, engine_of(model), shape
        case Sync() if not instruction.proceeds_in_background:
            return "sync"
    return "switch" if instruction.kind in WAYS else None


def reply_times(record: RunRecord, steps: Sequence[int], base: CostSource) -> EnvironmentTimes | None:
    """Return the times of an environment's replies: of ``base``, or all alike, with the mean of ``steps``. None without
    an environment, or if neither is known."""
    environment = record.plan.spec.environment
    if environment is None:
        return None
    known, mean = base.costs.environment(environment.name), _mean(record, steps, "reply_seconds_mean")
    if mean is None:
        return known
    known = known or EnvironmentTimes(name=environment.name, resets=(), replies=())
    shape = reply_quantiles(record, steps) or known.replies or (1.0,)
    before = sum(shape) / len(shape)
    longer = tuple(mean / before * each for each in shape) if before else (mean,)
    return known.model_copy(update={"replies": longer})


def reply_quantiles(record: RunRecord, steps: Sequence[int]) -> tuple[float, ...]:
    """Return a sample of the times of replies in ``steps``, ascending, by shares of them in the metrics, between which
    their logarithm grows evenly; none of a run of an older version."""
    found = {share: _mean(record, steps, f"reply_seconds_{name}") for share, name in REPLY_SHARES.items()}
    points = {share: max(LEAST_SECONDS, seconds) for share, seconds in found.items() if seconds is not None}
    if points.keys() != found.keys():
        return ()
    # of the faster half nothing else is known
    points = {0.0: points[0.5], **points}
    shares = [(index + 0.5) / NUM_REPLIES for index in range(NUM_REPLIES)]
    return tuple(_between(points, share) for share in shares)


def _between(points: Mapping[float, float], share: float) -> float:
    """Return the value at a ``share`` of a distribution with some ``points``, ascending."""
    low, high = next((low, high) for low, high in pairwise(points) if share <= high)
    return points[low] * math.exp(math.log(points[high] / points[low]) * (share - low) / (high - low))


def _recent_lengths(record: RunRecord, steps: Sequence[int]) -> TextLengths:
    """Return the lengths of the texts of ``steps``: responses with the mean of the metrics, distributed as the samples
    or, without enough of them, exponentially; those in the data if no responses are generated."""
    known, longest = lengths_in_data(record.plan), record.plan.lengths.response
    # an episode's sequences are rows of their own, of which a step has the lengths of the first one
    number = _mean(record, steps, "sequences_mean") or 1.0
    sampled_tokens = _mean(record, steps, "response_length")
    replies = (_mean(record, steps, "reply_length_mean") or 0.0) / number
    if sampled_tokens is None:
        return known
    mean = max(1.0, sampled_tokens + replies)
    recent = [*_sampled_lengths(record.samples, steps[0])]
    sampled = recent if len(recent) >= LEAST_SAMPLES else [*_sampled_lengths(record.samples, 0)]
    if mean >= longest:
        responses: tuple[float, ...] = (longest,)
    elif len(sampled) >= LEAST_SAMPLES:
        responses = truncated(sorted(sampled), mean, longest)
    else:
        responses = truncated_exponential(mean, longest)
    turns = _mean(record, steps, "turns_mean")
    turns = None if turns is None else turns / number
    episodes = tuple(_sampled_episodes(record.samples, steps[0], sampled_tokens, replies))
    return TextLengths(known.prompt, responses, known.prompts, turns=turns, replies=replies, episodes=episodes)


def _sampled_episodes(
    samples: Iterable[Mapping[str, Any]], from_step: int, sampled: float, replies: float
) -> Iterator[tuple[tuple[float, float], ...]]:
    """Yield the turns of recorded episodes, in tokens of a turn and of the reply to it, if there are enough of them.

    sampled, replies:  mean tokens of both in an episode, as metrics have them of all episodes.
    """
    found = [
        each["turn_tokens"]
        for each in samples
        if each.get("rows") == "training" and each["step"] >= from_step and each.get("turn_tokens")
    ]
    if len(found) < LEAST_SAMPLES:
        return
    sums = (sum(turn[index] for turns in found for turn in turns) / len(found) for index in (0, 1))
    factors = [mean / own if own else 1.0 for mean, own in zip((sampled, replies), sums, strict=True)]
    for turns in found:
        yield tuple((max(1.0, factors[0] * turn[0]), factors[1] * turn[1]) for turn in turns)


def _mean(record: RunRecord, steps: Sequence[int], name: str) -> float | None:
    """Return the mean of a metric over ``steps``; None if they do not have it."""
    found = [float(row[name]) for row in record.rows if row["step"] in steps and name in row]
    return sum(found) / len(found) if found else None


def _sampled_lengths(samples: Iterable[Mapping[str, Any]], from_step: int) -> Iterator[float]:
    for each in samples:
        if each.get("rows") == "training" and each["step"] >= from_step and each.get("length"):
            yield float(each["length"])
