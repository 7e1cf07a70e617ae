"""Execution of a verification: one side after the other, each on ranks of its own, then their comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexrlhf.errors import RankFailure, UserError
from flexrlhf.launch.job import prepare_job
from flexrlhf.launch.rank_factory import RankFactory
from flexrlhf.placement.hosts import Hosts, under_torchrun
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.run_directory import read_facts
from flexrlhf.verify.comparison import compare_runs, not_compared
from flexrlhf.verify.comparison_text import format_table, format_tie, format_verdict
from flexrlhf.verify.deviation import Deviation, Tie
from flexrlhf.verify.recorded_run import RecordedRun
from flexrlhf.verify.ties import find_tie
from flexrlhf.verify.tolerances import BITWISE, Limits, limits_for

Print = Callable[[str], None]


@dataclass(frozen=True)
class Verdict:
    """Result of comparing one side with the first one.

    deviations:  of all steps, in order
    tie:         of responses, after which the side ran again with those of the first run
    limits:      of the comparison
    """

    deviations: tuple[Deviation, ...]
    tie: Tie | None
    limits: Limits

    @property
    def is_same(self) -> bool:
        """Whether no difference is beyond its limit."""
        return not any(each.is_beyond for each in self.deviations)


def run_side(plan: Plan, factory: RankFactory | None) -> RecordedRun:
    """Run one side on this machine, on ranks of ``factory``. Raises UserError, RankFailure or Interrupted."""
    if under_torchrun():
        raise UserError("verify starts the ranks of both sides itself; call it without torchrun")
    try:
        prepare_job([plan], Hosts()).start(factory=factory)
    except RankFailure as error:
        raise RankFailure(f"{plan.spec.name}: {error}") from None
    return RecordedRun(plan)


def verify_side(
    first: RecordedRun, plan: Plan, is_repeated: bool, write: Print, factory: RankFactory | None
) -> Verdict:
    """Run ``plan`` on ranks of ``factory``, compare it with ``first`` and print the table and the verdict.

    ``is_repeated``: the plan is that of ``first``: on CPUs its numbers are the same to the last bit.
    """
    runs = first, run_side(plan, factory)
    models = (*first.plan.placement.models, *plan.placement.models)
    sent = first.plan.spec.sync.dtype, plan.spec.sync.dtype
    limits = BITWISE if is_repeated and _is_on_cpu(first) else limits_for(models, sent)
    tie = first_tie(runs, limits)
    if tie is not None:
        write("\n" + format_tie(tie, runs) + "\n")
        runs = first, run_side(_replaying(plan, first.directory), factory)
    verdict = Verdict(tuple(compare_runs(runs, limits)), tie, limits)
    write("\n" + "\n".join(_report(verdict, runs)) + "\n")
    return verdict


def first_tie(runs: tuple[RecordedRun, RecordedRun], limits: Limits) -> Tie | None:
    """Return the tie at which the tokens of two runs part first; None where they do not, or part otherwise."""
    spec = runs[0].plan.spec
    for step in range(spec.steps):
        one, other = (run.columns(step) for run in runs)
        if "tokens" not in one or "tokens" not in other:
            continue
        if any((one["tokens"].values[row] != values).any() for row, values in other["tokens"].values.items()):
            return find_tie(one, other, spec.seed, step, spec.data.max_prompt_tokens, limits.tie)
    return None


def _is_on_cpu(run: RecordedRun) -> bool:
    return str(read_facts(run.directory / "timeline.json")["device"]) == "cpu"


def _replaying(plan: Plan, directory: Path) -> Plan:
    spec = plan.spec
    debug = spec.debug.model_copy(update={"replay": str(directory)})
    return make_plan(spec.model_copy(update={"name": f"{spec.name}-replay", "debug": debug}))


def _report(verdict: Verdict, runs: tuple[RecordedRun, RecordedRun]) -> Sequence[str]:
    lines = [f"{runs[1].name} compared with {runs[0].name}", ""]
    lines += format_table(verdict.deviations, verdict.limits, runs[0].plan.spec.steps)
    if alone := not_compared(runs):
        lines.append(f"  not compared, since one of the two alone has it: {', '.join(alone)}")
    return [*lines, "", *format_verdict(verdict.deviations, runs, verdict.limits)]
