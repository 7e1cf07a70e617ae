"""Execution of a verification: one side after the other, each on ranks of its own, then their comparison.

A token is the argmax of log-probs + noise. Two runs that part at a token have the same text before it, so each has
recorded the log-prob of its own choice under the same distribution; the noise is a function of (seed, step, row,
position). So a tie is told from a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from flexrlhf.api import Hosts, Plan, RankFactory, RankFailure, RunDirectory, UserError, make_plan, prepare_job
from flexrlhf.api.engine import RecordedColumn, gumbel_noise
from flexrlhf.verify.comparison import RecordedRun, compare_runs, not_compared
from flexrlhf.verify.comparison_text import format_table, format_tie, format_verdict
from flexrlhf.verify.deviations import BITWISE, Deviation, Limits, Tie, limits_for

Print = Callable[[str], None]
SAMPLED = ("rollout_logprobs", "logprobs")
"""Columns with the log-probs of sampled tokens, the nearest to the distribution that they were sampled from first."""


@dataclass(frozen=True)
class Verdict:
    """Result of comparing one side with the first one.

    deviations:  of all steps, in order
    tie:         of responses, after which the side ran again with the first run's
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
    if Hosts.under_torchrun():
        raise UserError("verify starts the ranks of both sides itself; call it without torchrun")
    try:
        prepare_job([plan], Hosts()).start(factory=factory)
    except RankFailure as error:
        raise RankFailure(f"{plan.spec.name}: {error}") from None
    return RecordedRun(plan)


def verify_side(
    first: RecordedRun, second: RecordedRun, is_repeated: bool, write: Print, factory: RankFactory | None
) -> Verdict:
    """Compare a side with ``first`` and print the table and the verdict; after a tie it runs again, on ranks of
    ``factory``.

    ``is_repeated``: the plan is the first side's: on CPUs its numbers are the same to the last bit.
    """
    runs, plan = (first, second), second.plan
    models = (*first.plan.placement.models, *plan.placement.models)
    sent = first.plan.spec.sync.dtype, plan.spec.sync.dtype
    limits = BITWISE if is_repeated and _is_on_cpu(first) else limits_for(models, sent)
    tie = first_tie(runs, limits)
    if tie is not None:
        write("\n" + format_tie(tie, runs) + "\n")
        debug = plan.spec.debug.model_copy(update={"replay": str(first.directory)})
        replay = plan.spec.model_copy(update={"name": f"{plan.spec.name}-replay", "debug": debug})
        runs = first, run_side(make_plan(replay), factory)
    verdict = Verdict(tuple(compare_runs(runs, limits)), tie, limits)
    write("\n" + "\n".join(_report(verdict, runs)) + "\n")
    return verdict


def first_tie(runs: tuple[RecordedRun, RecordedRun], limits: Limits) -> Tie | None:
    """Return the tie at which the tokens of two runs part first; None if they do not, or part otherwise."""
    spec = runs[0].plan.spec
    for step in range(spec.steps):
        one, other = (run.columns(step) for run in runs)
        if "tokens" not in one or "tokens" not in other:
            continue
        if any((one["tokens"].values[row] != values).any() for row, values in other["tokens"].values.items()):
            return find_tie(one, other, runs[0].plan, step, limits.tie)
    return None


def _is_on_cpu(run: RecordedRun) -> bool:
    return str(RunDirectory(run.directory).facts()["device"]) == "cpu"


def _report(verdict: Verdict, runs: tuple[RecordedRun, RecordedRun]) -> Sequence[str]:
    lines = [f"{runs[1].name} compared with {runs[0].name}", ""]
    lines += format_table(verdict.deviations, verdict.limits, runs[0].plan.spec.steps)
    if alone := not_compared(runs):
        lines.append(f"  not compared, since one of the two alone has it: {', '.join(alone)}")
    return [*lines, "", *format_verdict(verdict.deviations, runs, verdict.limits)]


def find_tie(
    first: Mapping[str, RecordedColumn], second: Mapping[str, RecordedColumn], plan: Plan, step: int, limit: float
) -> Tie | None:
    """Return the tie where every response that differs parts at a token whose margin is at most ``limit``."""
    tokens = [run.get("tokens") for run in (first, second)]
    sampled = [next((run[name] for name in SAMPLED if name in run), None) for run in (first, second)]
    if tokens[0] is None or tokens[1] is None or sampled[0] is None or sampled[1] is None:
        return None
    margins: dict[int, float] = {}
    for row in sorted(tokens[0].values.keys() & tokens[1].values.keys()):
        one, other = tokens[0].values[row], tokens[1].values[row]
        places = (one != other).nonzero().flatten().tolist()
        if not places:
            continue
        position = places[0] - plan.lengths.prompt
        if position < 0:
            return None
        noise = _noise(
            plan.spec.seed, *plan.batch.as_taken(row, step), position, int(one[places[0]]), int(other[places[0]])
        )
        chosen = [float(run.values[row][position]) for run in (sampled[0], sampled[1])]
        margins[row] = abs(chosen[0] + noise[0] - chosen[1] - noise[1])
    if not margins or max(margins.values()) > limit:
        return None
    return Tie(step, tuple(margins), max(margins.values()))


def _noise(seed: int, step: int, row: int, position: int, *tokens: int) -> list[float]:
    """Return the noise of ``tokens`` at one place, which does not depend on the vocabulary's size."""
    noise = gumbel_noise(seed, step, torch.tensor([row]), position, max(tokens) + 1)[0]
    return [float(noise[token]) for token in tokens]
