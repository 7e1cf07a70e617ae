"""Errors of the cost model on published measurements: ``python -m benchmarks.calibration DIRECTORY``.

``DIRECTORY`` has the tables of measurements, with any rows. Errors are by group, and compared with goals.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from types import ModuleType

from benchmarks.calibration import generation, kernels, links, memory, order, rlhf, rlhf_errors, system_fit, training
from benchmarks.calibration.rows import Prediction, distinct, verdict

GOALS = {
    "training": 0.10,
    "prefill": 0.12,
    "decode": 0.12,
    rlhf.CALLS: 0.20,
    rlhf.STEPS: 0.20,
}
"""Goal → highest mean relative error that meets it."""
GROUP_GOALS = {("training", f"llm-foundry/{device}"): 0.06 for device in ("a100-40gb", "a100-80gb", "h100-80gb")}
ROW_GOALS = {"real/h100": 0.25, "real-v1/a100": 0.25}
"""Group → highest error of a row that its own planner claims (ReaL: below 25 %), for rows of that system."""
MEMORY_GOAL, ORDER_GOAL = 0.90, 0.96
MARGINS = (0.0, memory.MARGIN, 0.08, 0.12, 0.2)
"""Fractions of a device that are left free, to show the cost of a larger margin."""


@dataclass(frozen=True)
class GroupErrors:
    """Errors of the predictions of one goal and group."""

    goal: str
    group: str
    found: Sequence[Prediction]

    @property
    def mean(self) -> float:
        return mean(each.error for each in self.found)

    @property
    def goal_error(self) -> float | None:
        return GROUP_GOALS.get((self.goal, self.group), GOALS.get(self.goal))

    def text(self) -> str:
        errors = [each.error for each in self.found]
        naive = [mean(abs(value(each) - each.measured) / each.measured for each in self.found) for value in _NAIVE]
        summary = [mean(errors), median(errors), max(errors), *naive]
        cells = "".join(f"{100 * error:9.1f}" for error in summary)
        return f"{self.goal:12} {self.group:34} {len(errors):5d}{cells}   {verdict(self.mean, self.goal_error)}"


_NAIVE = (lambda each: each.constant_mfu, lambda each: each.roofline)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calibration", description=__doc__)
    parser.add_argument("directory", type=Path, help="directory with the tables of measurements")
    directory = parser.parse_args().directory
    steps = rlhf.read(directory)
    found = distinct([*_predictions(directory), *steps.predictions])
    print("relative errors in %: of the model, and of two naive predictors (one MFU for all; the roofline)\n")
    print(f"{'goal':12} {'group':34} {'rows':>5}{'mean':>9}{'median':>9}{'worst':>9}{'MFU':>9}{'roof':>9}   goal met")
    for line in _lines(found):
        print(line.text())
    print()
    for text in (
        *rlhf_errors.lines(directory, steps.predictions),
        *_planner(steps),
        *_memory(directory),
        *_order(directory),
        *_constants(),
        *_left_out(steps, directory),
    ):
        print(text)


def _predictions(directory: Path) -> Iterator[Prediction]:
    for module in (kernels, links, training, generation):
        yield from module.predictions(directory)


def _lines(found: Sequence[Prediction]) -> Iterator[GroupErrors]:
    """Yield the errors of each goal: of all its rows, then by group."""
    by_goal: dict[str, dict[str, list[Prediction]]] = defaultdict(lambda: defaultdict(list))
    for each in found:
        by_goal[each.goal][each.group].append(each)
    for goal, groups in sorted(by_goal.items()):
        yield GroupErrors(goal, "all", [each for group in groups.values() for each in group])
        yield from (GroupErrors(goal, group, each) for group, each in sorted(groups.items()))


def _planner(steps: rlhf.ReadRows) -> Iterator[str]:
    """Yield the rows of ReaL whose error exceeds the 25 % that its own planner claims."""
    for group, goal_error in ROW_GOALS.items():
        rows = [each for each in steps.predictions if each.group == group and "ReaL" in steps.systems[each.row]]
        above = [f"{each.row} {100 * each.error:.0f} %" for each in rows if each.error > goal_error]
        if rows:
            share = f"{len(rows) - len(above)} of {len(rows)}"
            others = ", ".join(above) or "none"
            yield f"ReaL's own rows in {group} within {100 * goal_error:.0f} %: {share}; above: {others}"


def _memory(directory: Path) -> Iterator[str]:
    found = memory.read(directory)
    right = sum(each.is_right for each in found.verdicts)
    share = right / max(1, len(found.verdicts))
    yield f"\nmemory: {right} of {len(found.verdicts)} verdicts right ({_met(share, MEMORY_GOAL)})"
    wrong = [each for each in found.verdicts if not each.is_right]
    for each in wrong:
        predicted, published = ("fits", "does not") if each.predicted else ("does not fit", "fits")
        yield f"  {each.row} ({each.claim}): predicted that it {predicted}; published: {published}"
    by_source: dict[str, list[float]] = defaultdict(list)
    for peak in found.peaks:
        by_source[peak.source].append(peak.error)
    for source, errors in sorted(by_source.items()):
        worst = f"worst {100 * max(errors):.0f} %"
        yield f"  peaks of {source}: {len(errors)} rows, mean {100 * mean(errors):.0f} %, {worst}"
    refused = [each for each in found.verdicts if each.is_cell and not each.measured]
    fit = sum(each.predicted for each in refused)
    yield f"  published out-of-memory cells predicted to fit: {fit} of {len(refused)}"
    for margin in MARGINS:
        wrong = [each for each in memory.read(directory, margin).verdicts if not each.is_right]
        unfit = sum(each.predicted for each in wrong)
        careful = f"{len(wrong) - unfit} predicted not to fit that do"
        yield f"  with {100 * margin:.0f} % of each device left free: {unfit} predicted to fit that do not, {careful}"
    yield f"  left out: {_reasons(found.left_out)}"


def _order(directory: Path) -> Iterator[str]:
    pairs = order.read(directory)
    right = Counter(pair.kind for pair in pairs if pair.is_right)
    total = Counter(pair.kind for pair in pairs)
    share = right.total() / max(1, total.total())
    yield f"\norder: {right.total()} of {total.total()} pairs right ({_met(share, ORDER_GOAL)})"
    yield from (f"  {kind}: {right[kind]} of {count}" for kind, count in sorted(total.items()))
    for pair in pairs:
        if not pair.is_right:
            first, second = pair.rows
            yield f"  wrong: {first} and {second}: measured x {pair.measured:.2f}, predicted x {pair.predicted:.2f}"


def _met(share: float, goal_error: float) -> str:
    return f"{100 * share:.1f} %; goal {100 * goal_error:.0f} % {'met' if share >= goal_error else 'NOT MET'}"


def _constants() -> Iterator[str]:
    modules = (kernels, links, training, generation, system_fit)
    counts = {module.__name__.rsplit(".", 1)[-1]: len(_fitted(module)) for module in modules}
    yield f"\nfitted constants: {sum(counts.values())} ({', '.join(f'{name} {n}' for name, n in counts.items())})"


def _fitted(module: ModuleType) -> Collection[str]:
    """Return the names of a module's fitted constants."""
    return getattr(module, "fitted", dict)()


def _left_out(steps: rlhf.ReadRows, directory: Path) -> Iterator[str]:
    yield f"rows of RLHF left out: {steps.left_out.total()} ({_reasons(steps.left_out)})"
    trained, generated = training.read_cases(directory)[1], generation.read_cases(directory)[1]
    yield f"rows of training and generation left out: {len(trained)}, {len(generated)}"


def _reasons(left_out: Counter[str]) -> str:
    return "; ".join(f"{count} {reason}" for reason, count in left_out.most_common()) or "none"


if __name__ == "__main__":
    main()
