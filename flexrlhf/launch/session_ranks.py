"""Launcher of the ranks of a session on the machine of the program, a process next to it:
``python -m flexrlhf.launch.session_ranks ORDERS OUTCOME NNODES ENDPOINT``, a file of one order, a file for the sentence
of an error, and the machines of the job as ``flexrlhf run`` has them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from secrets import token_hex


def main(orders: str, outcome: str, nnodes: str, endpoint: str) -> int:
    """Run the ranks until the program ends; return the exit status."""
    from flexrlhf.errors import Interrupted, Preempted, RankFailure, RunStopped, UserError
    from flexrlhf.user_code.processes import is_killed_with_parent

    is_killed_with_parent()
    from flexrlhf.launch.rank_factory import RankFactory

    try:
        with RankFactory.starting(is_copied=True) as factory:
            from flexrlhf.config.job_secret import JobSecret
            from flexrlhf.config.secrets import without_secrets
            from flexrlhf.launch.preparation import checked_job
            from flexrlhf.launch.rendezvous import OpenJob
            from flexrlhf.placement.hosts import Hosts
            from flexrlhf.plan.pipeline import make_plan
            from flexrlhf.runs.resume import Resumption, RunOrder

            hosts = Hosts(int(nnodes), rdzv_endpoint=endpoint)
            if hosts.nnodes == 1 and not JobSecret.here().value:
                # several machines agree on one
                os.environ[JobSecret.VARIABLE] = token_hex()
            (order,) = RunOrder.from_json(Path(orders).read_text())
            try:
                job = checked_job([Resumption.ordered(make_plan(order.spec), order)], hosts)
            except UserError as error:
                if hosts.nnodes > 1:
                    OpenJob.refuse(hosts, without_secrets(str(error)))
                raise
            job.start(factory=factory)
    except (UserError, RankFailure, RunStopped, Interrupted, Preempted) as error:
        Path(outcome).write_text(json.dumps([type(error).__name__, str(error)]))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
