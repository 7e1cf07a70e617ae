"""Launcher of the ranks of a session, a process beside the program: ``python -m flexrlhf.launch.session_ranks ORDERS
OUTCOME``, a file of one order and a file for the sentence of an error."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(orders: str, outcome: str) -> int:
    """Run the ranks until the program ends; return the exit status."""
    from flexrlhf.errors import Interrupted, Preempted, RankFailure, RunStopped, UserError
    from flexrlhf.user_code.processes import is_killed_with_parent

    is_killed_with_parent()
    from flexrlhf.launch.rank_factory import RankFactory

    try:
        with RankFactory.starting(is_copied=True) as factory:
            from flexrlhf.launch.preparation import checked_job
            from flexrlhf.placement.hosts import Hosts
            from flexrlhf.plan.pipeline import make_plan
            from flexrlhf.runs.resume import ORDERS, Resumption

            (order,) = ORDERS.validate_json(Path(orders).read_bytes())
            checked_job([Resumption.ordered(make_plan(order.spec), order)], Hosts()).start(factory=factory)
    except (UserError, RankFailure, RunStopped, Interrupted, Preempted) as error:
        Path(outcome).write_text(json.dumps([type(error).__name__, str(error)]))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
