"""Reports of operators: their statistics, summed over ranks, in the job's key-value store.

The first rank of a placed model publishes the reports of its operators. Rank 0 makes metrics of those that have arrived
(``results_writer.py``), and the ranks of a Save read those of an evaluation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flexrlhf.comm.mailbox import Mailbox
from flexrlhf.comm.world import World
from flexrlhf.metrics import METRICS, Triple
from flexrlhf.operators.graph import Operator
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Eval, Instruction, Run, Save
from flexrlhf.strategies.schedule import RunStart
from flexrlhf.trainer.execution import Execution, Observer
from flexrlhf.trainer.samples import SamplePart

OperatorReport = dict[str, Any]
"""``statistics`` of an operator, ``labels``: words for the row of metrics, ``samples``: parts of samples, ``outcomes``:
rows by outcome, ``positions``: prompts of an attempt and their places in the order of the data."""


def make_report(
    statistics: Mapping[str, Triple] | None = None,
    labels: Mapping[str, str] | None = None,
    samples: Sequence[SamplePart] = (),
    outcomes: Mapping[str, Sequence[int]] | None = None,
    positions: Iterable[tuple[int, int]] = (),
) -> OperatorReport:
    """Return the report of an operator; without arguments an empty one."""
    return {
        "statistics": dict(statistics or {}),
        "labels": dict(labels or {}),
        "samples": list(samples),
        "outcomes": dict(outcomes or {}),
        "positions": list(positions),
    }


class Steps(Protocol):
    """Instructions of each step, by which reports are found."""

    def index(self, position: int) -> int:
        """Return the number in its step of the instruction at ``position`` of the walk."""

    def due(self, step: int) -> Iterable[tuple[int, Instruction]]:
        """Yield the instructions of ``step``, and the number of each."""

    def is_whole(self, step: int) -> bool:
        """Return whether no instruction can join those of ``step``."""

    def takes_data(self, step: int) -> bool:
        """Return whether the prompts of ``step`` are of the data."""

    def at(self, step: int, position: int) -> Instruction:
        """Return the instruction of ``step`` at ``position`` of the walk."""

    def in_flight(self, next_step: int, generated: int) -> range:
        """Return the steps whose rows exist before ``next_step`` is trained on. ``generated``: first step without
        rows at the start of the run."""

    def restored(self, step: int, start: RunStart) -> Iterator[tuple[int, Run]]:
        """Yield the runs of a step in flight that were executed before ``start``, and their positions."""


@dataclass(frozen=True)
class PlannedSteps:
    """Steps as the schedule of ``plan`` lists them."""

    plan: Plan

    def index(self, position: int) -> int:
        return position % len(self.plan.schedule.instructions)

    def due(self, step: int) -> Iterable[tuple[int, Instruction]]:
        listed = enumerate(self.plan.schedule.instructions)
        return ((index, each) for index, each in listed if each.due(step, self.plan.spec.steps))

    def is_whole(self, step: int) -> bool:
        return True

    def takes_data(self, step: int) -> bool:
        return True

    def at(self, step: int, position: int) -> Instruction:
        return self.plan.schedule.instructions[position % len(self.plan.schedule.instructions)]

    def in_flight(self, next_step: int, generated: int) -> range:
        return self.plan.steps_in_flight(next_step, generated)

    def restored(self, step: int, start: RunStart) -> Iterator[tuple[int, Run]]:
        lag, steps = self.plan.schedule.lag, self.plan.spec.steps
        for index, run in enumerate(self.plan.schedule.instructions):
            if isinstance(run, Run) and run.lag < lag and run.due(step, steps) and not start.brings(run):
                yield index, run


class Recorder(Observer):
    """Publisher of the reports of this rank."""

    def __init__(self, plan: Plan, world: World, steps: Steps | None = None) -> None:
        """``steps``: None: those of the plan."""
        self.plan, self.world, self.steps = plan, world, steps or PlannedSteps(plan)
        self.mailbox = Mailbox(world, f"record/{plan.spec.name}", plan.spec.timeout_seconds)
        chosen = [each for each in plan.schedule.instructions if isinstance(each, Save) and each.best is not None]
        self._num_readers = sum(len(save.ranks) for save in chosen)
        self.best: dict[str, float] = {}
        """Best metric of the evaluations so far, by model."""
        self._in_flight: dict[int, dict[str, OperatorReport]] = defaultdict(dict)

    def computed(self, execution: Execution) -> None:
        """Sum the statistics of an operator over its model's data-parallel group; the model's first rank publishes.

        All ranks of the group have statistics of the same names, and the first one has the samples of all.
        """
        work = execution.work
        named = {_statistic(work.operator, name): value for name, value in execution.moments.items()}
        names = sorted(named)
        # one collective for all of them
        table = work.model.dp.sum(torch.stack([named[name] for name in names])).tolist() if names else []
        execution.statistics = {name: tuple(row) for name, row in zip(names, table, strict=True)}
        if self.world.rank == work.model.placed.ranks[0]:
            is_sampled = execution.inner is None and work.operator.samples_responses
            labels = {"rollout_engine": work.model.placed.engine} if is_sampled else {}
            taken = sorted(execution.positions.items())
            report = make_report(execution.statistics, labels, execution.samples, execution.outcomes, taken)
            self.publish(execution.step, execution.position, report, execution.inner)

    def publish(self, step: int, position: int, report: OperatorReport, inner: int | None = None) -> None:
        """Publish the report of the instruction at ``position`` of the walk.

        ``inner``: index in the list of an Eval, for an instruction there.
        """
        key = _key(step, self.steps.index(position), inner)
        self.mailbox.publish(key, report)
        if inner is not None and self._num_readers:
            self.mailbox.publish(f"best/{key}", report)
        if inner is None and self.plan.schedule.lag:
            self._keep(step, position, report)

    def _keep(self, step: int, position: int, report: OperatorReport) -> None:
        """Keep a report of a step that is in flight when a checkpoint is written, summed over chunks."""
        run = self.steps.at(step, position)
        assert isinstance(run, Run), "only runs report outside evaluations"
        kept = self._in_flight[step].setdefault(run.operator.name, make_report())
        METRICS.add(kept["statistics"], report["statistics"])
        kept["labels"] |= report["labels"]
        kept["samples"] += report["samples"]
        kept["positions"] += report["positions"]

    def reports_from(self, step: int) -> dict[int, dict[str, OperatorReport]]:
        """Return the reports that this rank has published from ``step`` on, by operator; earlier ones are forgotten."""
        for old in [each for each in self._in_flight if each < step]:
            del self._in_flight[old]
        return dict(self._in_flight)

    def restore(
        self, reports: Mapping[str, Mapping[str, OperatorReport]], best: Mapping[str, float], start: RunStart
    ) -> None:
        """Publish reports of steps in flight again, and set the best metrics.

        An operator's report is that of its first chunk; further chunks report nothing.
        """
        self.best |= best
        for step, operators in reports.items():
            pending = dict(operators)
            for position, run in self.steps.restored(int(step), start):
                report = make_report(**pending.pop(run.operator.name, {}))
                if self.world.rank == run.ranks[0]:
                    self.publish(int(step), position, report)

    def improved(self, save: Save, step: int) -> float | None:
        """Return the metric of ``save`` in the evaluation of ``step`` if it is better than all before; else None.

        Every rank of every such Save calls this once, and all get the same; waits for the ranks that evaluate.
        """
        assert save.best is not None
        value = self._read_evaluation(step).get(save.best)
        if value is None or not METRICS.named(save.best).is_better(value, self.best.get(save.model)):
            return None
        self.best[save.model] = value
        return value

    def _read_evaluation(self, step: int) -> dict[str, float]:
        """Wait for the evaluation of ``step`` and return its metrics."""
        keys = {f"best/{key}": who for key, who in self.keys(step, Eval).items()}
        total: dict[str, Triple] = {}
        for report in self.mailbox.gather(keys, f"the evaluation of step {step}"):
            METRICS.add(total, report["statistics"])
        # the row of metrics may have been written long before
        self.mailbox.clear(list(keys), self._num_readers)
        return METRICS.evaluate(total)

    def attempt_keys(self, step: int) -> dict[str, str]:
        """Return the keys of the reports of the attempts of a step, and who publishes each."""
        listed = enumerate(self.plan.schedule.instructions)
        runs = [(index, run) for index, run in listed if isinstance(run, Run) and run.operator.takes_prompts]
        return {_key(step, index): _publisher(run) for index, run in runs}

    def keys(self, step: int, *kinds: type[Run | Eval]) -> dict[str, str]:
        """Return the keys of the reports of a step, or of its instructions of ``kinds``, and who publishes each."""
        keys: dict[str, str] = {}
        for index, instruction in self.steps.due(step):
            if not isinstance(instruction, kinds or (Run, Eval)):
                continue
            if isinstance(instruction, Run):
                keys[_key(step, index)] = _publisher(instruction)
                continue
            for inner, each in enumerate(instruction.instructions):
                if isinstance(each, Run):
                    keys[_key(step, index, inner)] = _publisher(each)
        return keys

    def read(self, step: int, position: int, run: Run) -> dict[str, Triple]:
        """Wait for the statistics of ``run``, executed at ``position``, and return them. Rank 0 calls this before the
        metrics of ``step`` are written."""
        key = _key(step, self.steps.index(position))
        report: OperatorReport = self.mailbox.receive(key, _publisher(run), f"the statistics of {run.label}")
        statistics: dict[str, Triple] = report["statistics"]
        return statistics


def _statistic(operator: Operator, name: str) -> str:
    """Return the name of a statistic of ``operator``: that of a loss without its update is not the training's."""
    return f"{operator.name}/{name}" if operator.kind == "loss" else METRICS.statistic_name(operator.name, name)


def _publisher(run: Run) -> str:
    """Return the rank that publishes the statistics of ``run``, in words."""
    return f"rank {run.ranks[0]} ({run.label})"


def _key(step: int, index: int, inner: int | None = None) -> str:
    return f"{step}/{index}" if inner is None else f"{step}/{index}.{inner}"
