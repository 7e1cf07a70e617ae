"""Recommendations against their opponents; rows of rankings that are planned again from their files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from time import process_time
from typing import Any

from benchmarks.opponents.cases import Case
from benchmarks.opponents.moves import Moves, changed_paths
from benchmarks.opponents.searches import LEAST_GAIN, PlannedSeconds, climbed, fits, lean, needed_changes, sampled
from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import load_spec
from flexrlhf.config.yaml_io import read_yaml, write_yaml
from flexrlhf.errors import UserError
from flexrlhf.guideline.advice.advice_text import format_advice
from flexrlhf.guideline.advice.advise import SECONDS, advise
from flexrlhf.guideline.advice.advised_yaml import write_advised
from flexrlhf.guideline.advice.candidates import FeasibleCandidate
from flexrlhf.guideline.advice.choice import Advice
from flexrlhf.guideline.simulation.inputs import costs_for
from flexrlhf.guideline.simulation.lengths import expected_lengths
from flexrlhf.guideline.simulation.simulate import simulate
from flexrlhf.plan.choice import planned
from flexrlhf.plan.suggestions import need_text

Record = dict[str, Any]
METHODS = ("guideline", "usual", "search")
LEAST_ROWS = 3
"""Rows of a ranking that are planned again whatever time it takes."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of one recommendation with its opponents.

    case:    the request.
    folder:  for files.
    limit:   CPU seconds of the random changes, of the climb and of the rows, each.
    """

    case: Case
    folder: Path
    limit: float

    def path(self, kind: str) -> Path:
        return self.folder / f"{self.case.file_name}.{kind}"

    def record(self) -> Record:
        """Request advice with ``--tie 0`` and compare."""
        options, spec = self.case.options(), self.case.spec(self.folder)
        source, lengths = costs_for(spec, None), expected_lengths(spec, None, options.mean_response)
        began = process_time()
        advice = advise(spec, source.costs, lengths, SECONDS, 0.0, max_lag=options.max_lag)
        record: Record = {"name": self.case.name, "command": self.case.command, "search": process_time() - began}
        seconds = PlannedSeconds(source.costs, lengths, max(spec.schedule.lag, options.max_lag or 0))
        try:
            best = advice.best
            self.path("txt").write_text(format_advice(advice, source))
        except UserError as error:
            return record | {"cpu": process_time() - began} | self._refused(spec, seconds, str(error))
        record["cpu"] = process_time() - began
        if best.lag > seconds.lag:
            reason = f"a placement with lag {best.lag}, without leave, of {best.seconds:.5g} s"
            return record | self._refused(spec, seconds, reason)
        return record | self._advised(spec, seconds, advice, replace(advice, margin=source.accuracy.tie).best)

    def _advised(self, spec: Spec, planned_seconds: PlannedSeconds, advice: Advice, tied: FeasibleCandidate) -> Record:
        best = advice.best
        write_advised(best, self.path("pick.yaml"))
        start = read_yaml(self.path("pick.yaml").read_text())
        seconds = planned_seconds.of(start)
        record: Record = {"pick": best.candidate.name, "s": seconds}
        record |= {"tie": tied.candidate.name, "tie cost": tied.seconds / best.seconds - 1}
        record["rows"] = list(self._rows(advice, tied, planned_seconds))
        record["kinds"] = dict(_losses_by_kind(advice))
        if isinstance(seconds, str):
            return record
        moves = Moves(Random(self.case.name), start, spec, planned_seconds.lag)
        found = {
            "random": sampled(planned_seconds, start, seconds, moves, self.limit),
            "climb": climbed(planned_seconds, start, seconds, moves, self.limit),
        }
        opponents = {method: _fastest(advice, method) for method in METHODS}
        opponents |= {name: each.seconds for name, each in found.items()}
        record["opponents"] = opponents
        record |= {name: [each.fitting, each.tried, each.is_top] for name, each in found.items()}
        least, name = min((value, name) for name, value in opponents.items() if value is not None)
        record |= {"best": least, "loss": max(0.0, seconds / least - 1)}
        record["by"] = name if record["loss"] > LEAST_GAIN else ""
        if name in found:
            self.path("best.yaml").write_text(write_yaml(found[name].raw))
            record["changes"] = needed_changes(planned_seconds, start, found[name])
        return record

    def _rows(self, advice: Advice, tied: FeasibleCandidate, planned_seconds: PlannedSeconds) -> Iterator[Record]:
        """Write rows and plan them again: recommended ones, the guideline's, others as long as time is left."""
        end = process_time() + self.limit
        others = sorted(advice.feasible, key=lambda item: item.candidate.method != "guideline")
        rows = {id(each): each for each in (advice.best, tied, *others)}
        for number, row in enumerate(rows.values()):
            if number < LEAST_ROWS or process_time() < end:
                yield {"row": f"{row.candidate.method} {row.candidate.name}", **self._again(row, planned_seconds)}

    def _again(self, row: FeasibleCandidate, planned_seconds: PlannedSeconds) -> Record:
        """Return the fault of the file of a row; nothing if it plans, fits and takes the printed time."""
        write_advised(row, self.path("row.yaml"))
        try:
            ((plan, sentence),) = planned([load_spec(self.path("row.yaml"), ())])
        except UserError as error:
            return {"refused": str(error)}
        if sentence or not fits(plan):
            return {"memory": sentence or need_text(plan)}
        seconds = simulate(plan, planned_seconds.costs, planned_seconds.lengths).seconds
        return {"untrue": [row.seconds, seconds]} if abs(seconds / row.seconds - 1) > LEAST_GAIN else {}

    def _refused(self, spec: Spec, planned_seconds: PlannedSeconds, reason: str) -> Record:
        """Sample settings until one fits: with the rollout engine of the spec, then with transformers if none is
        asked for."""
        options, start = self.case.options(), read_yaml(spec.dump(short=True))
        record: Record = {"refusal": reason, "tried": 0}
        moves = Moves(Random(self.case.name), start, spec, planned_seconds.lag)
        for rollout in (None,) if options.rollout else (None, "transformers"):
            found = lean(planned_seconds, start, moves, rollout, options.engine is None, 2 * self.limit)
            record["tried"] += found.tried
            if found.fitting:
                self.path("best.yaml").write_text(write_yaml(found.raw))
                return record | {"changes": changed_paths(start, found.raw), "best": found.seconds}
        return record


def _losses_by_kind(advice: Advice) -> Iterator[tuple[str, float]]:
    """Yield by how much the search's row with shadows or without, and with a lag, is slower than others of its kind."""
    kinds: dict[tuple[bool, int], list[FeasibleCandidate]] = {}
    for row in advice.feasible:
        kinds.setdefault((row.candidate.space.has_shadows, row.lag), []).append(row)
    for (has_shadows, lag), rows in kinds.items():
        own = min((row.seconds for row in rows if row.candidate.method == "search"), default=None)
        if own is not None:
            name = f"{'with' if has_shadows else 'without'} shadows, lag {lag}"
            yield name, own / min(row.seconds for row in rows) - 1


def _fastest(advice: Advice, method: str) -> float | None:
    return min((row.seconds for row in advice.comparable if row.candidate.method == method), default=None)
