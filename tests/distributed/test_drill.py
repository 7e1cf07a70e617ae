"""Faults in random instructions of random ranks: runs end in time and by name, or continue, and resume to the last
bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from drill import cannot_drill, new_drill, plan_injections, table
from drill_kinds import KINDS

COUNT, SEED = 20, 14
PROBLEM = cannot_drill()
pytestmark = [
    pytest.mark.full,
    # one injection and the resumed runs that fall to it take half a minute
    pytest.mark.timeout(COUNT * 180),
    pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM or "-"),
]


def test_every_fault_ends_by_name_or_goes_on_and_resumes_to_the_last_bit(tmp_path: Path) -> None:
    injections = plan_injections(COUNT, SEED)
    assert {injection.kind.name for injection in injections} == set(KINDS)
    with new_drill(tmp_path) as drill:
        outcomes = list(drill.run(injections))
    short = [str(each) for each in outcomes if each.problems]
    assert len(outcomes) == COUNT and not short, "\n".join([*short, table(outcomes)])
