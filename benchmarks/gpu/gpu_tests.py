"""The tests marked ``gpu``: on the GPU, or without one on CPU ranks."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.clock import Failed, OutOfTime, TimeBudget
from benchmarks.gpu.results import LeftOut, Row

FILES = ("tests/distributed/test_gpu.py", "tests/engines/test_head.py", "tests/engines/test_attention.py")
SELECTED = {"one-rank": "not _2", "ranks": "_2"}
"""By stage: tests of one rank or none, and of two ranks on the GPU, by the ends of their names."""
MEASUREMENT = "tests marked gpu"


def run_tests(stage: str, directory: Path, device: str, budget: TimeBudget) -> Iterator[Row | LeftOut]:
    """Run the tests of a stage with pytest; yield a row for all and a line for each that was skipped."""
    report = directory / f"{stage}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-k", SELECTED[stage], "-p", "no:cacheprovider"]
    # pytest's own exit status is in the counts
    shell = f"{shlex.join([*command, '--junitxml', str(report), *FILES])} || test $? = 1"
    try:
        budget.run(["sh", "-c", shell], {"FLEXRLHF_TEST_DEVICE": device, "OMP_NUM_THREADS": "1"})
    except OutOfTime as error:
        ended = {word: error.printed.count(f" {word}") for word in ("PASSED", "FAILED", "SKIPPED")}
        yield LeftOut(stage, MEASUREMENT, f"{error}, {', '.join(f'{n} {word}' for word, n in ended.items())}")
        return
    except Failed as error:
        yield Row(stage, MEASUREMENT, f"pytest failed: {error}", {"failed": 1})
        return
    yield from _of_report(stage, ElementTree.parse(report).getroot())


def _of_report(stage: str, report: ElementTree.Element) -> Iterator[Row | LeftOut]:
    counts: Counter[str] = Counter()
    for case in report.iter("testcase"):
        outcome = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        kind = "passed" if outcome is None else outcome.tag
        counts[kind] += 1
        if outcome is not None and kind != "skipped":
            yield Row(stage, case.get("name", ""), f"{kind}: {_first_line(outcome.get('message'))}")
        elif outcome is not None:
            yield LeftOut(stage, case.get("name", ""), _first_line(outcome.get("message")))
    failed = counts["failure"] + counts["error"]
    found = f"{counts['passed']} passed, {failed} failed, {counts['skipped']} skipped"
    yield Row(stage, MEASUREMENT, found, {"passed": counts["passed"], "failed": failed})


def _first_line(message: str | None) -> str:
    return (message or "no reason given").splitlines()[0].replace("|", "/")
