"""Two sides of a run, compared as ``flexrlhf verify`` compares them; the first one is kept for further comparisons.

    python -m benchmarks.gpu.against DIRECTORY BASE.yaml NAME [--set KEY=VALUE] [--plain-set ...] [--against-set ...]

A side whose directory has a finished run is not run again. Prints the table and the verdict, and as the last line the
result as JSON; ends with 0 also if the sides part.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexrlhf.config.spec_file import load_spec
from flexrlhf.launch.rank_factory import RankFactory
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.verify.comparison import RecordedRun
from flexrlhf.verify.deviations import first_beyond, is_exact
from flexrlhf.verify.sides import check_comparable, short_spec, side_text
from flexrlhf.verify.verify import Verdict, run_side, verify_side


def plan_side(path: Path, name: str, directory: Path, settings: Sequence[str]) -> Plan:
    """Return the plan of one side, whose run is ``directory / name``."""
    spec = load_spec(path, settings)
    return make_plan(short_spec(spec, name, directory, spec.steps))


def main() -> None:
    options = _options()
    sides = [(f"{options.base.stem}-plain", options.plain_set), (options.name, options.against_set)]
    plans = [plan_side(options.base, name, options.directory, (*options.set, *own)) for name, own in sides]
    check_comparable(plans[0], plans[1], options.name)
    for plan in plans:
        print(side_text(plan, plans[0]))
    with RankFactory.starting(is_copied=True) as factory:
        first, second = (_finished(plan, factory) for plan in plans)
        verdict = verify_side(first, second, False, print, factory)
    print(json.dumps(result(verdict, second)))


def _finished(plan: Plan, factory: RankFactory | None) -> RecordedRun:
    status = RunDirectory(plan.spec.directory).status
    return RecordedRun(plan) if status is not None and status.state == "finished" else run_side(plan, factory)


def result(verdict: Verdict, run: RecordedRun) -> dict[str, Any]:
    """Return the largest differences of a comparison, and where the sides part."""
    numbers = [each.size for each in verdict.deviations if each.kind == "column" and not is_exact(each.name)]
    first = first_beyond(verdict.deviations)
    return {
        "numbers": max(numbers, default=0.0),
        "weights": max((each.size for each in verdict.deviations if each.kind == "weights"), default=0.0),
        "limit": verdict.limits.numbers,
        "tie": verdict.tie is not None,
        "seconds": float(run.metrics[-1]["seconds"]),
        "part": "" if first is None else f"{first.kind} {first.name} of step {first.step}: {first.size:.1e}",
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.against")
    parser.add_argument("directory", type=Path)
    parser.add_argument("base", type=Path)
    parser.add_argument("name")
    for option in ("--set", "--plain-set", "--against-set"):
        parser.add_argument(option, action="append", default=[])
    return parser.parse_args()


if __name__ == "__main__":
    main()
