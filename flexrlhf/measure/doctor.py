"""Start the ranks of a preflight on this machine, and judge what they and the other machines have collected."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from flexrlhf.errors import RankFailure, RunStopped, UserError
from flexrlhf.launch import start as launch
from flexrlhf.launch.rank_factory import RankFactory
from flexrlhf.launch.rendezvous import NodeRendezvous
from flexrlhf.launch.shared_directories import probed_directories
from flexrlhf.measure.checks import Check
from flexrlhf.measure.doctor_report import judge
from flexrlhf.measure.facts import JobFacts, SurveyRequest, load_job, write_request
from flexrlhf.measure.host import host_facts
from flexrlhf.placement.hosts import Hosts, under_torchrun
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.resume import Resumption

END_SECONDS = 30.0
"""Longest wait for node 0 to end a preflight before its run begins."""


@dataclass(frozen=True)
class Waits:
    """Longest waits of a preflight, in seconds.

    join:  for the launchers of the other machines
    rank:  for a rank
    """

    join: float
    rank: float


def preflight(
    runs: Sequence[Resumption], hosts: Hosts, waits: Waits, factory: RankFactory | None = None
) -> list[Check]:
    """Measure this machine, with its ranks all machines, and return the checks; no process and no file is left.

    ``factory``: as of ``start_ranks``. Raises UserError under torchrun, and Interrupted on a signal.
    """
    if under_torchrun():
        raise UserError("preflight: starts ranks by itself; under torchrun run `flexrlhf doctor` before, without it")
    job, failure = survey(runs, hosts, waits, factory)
    return judge([run.plan for run in runs], job, failure)


def measure_network(plan: Plan, hosts: Hosts, waits: Waits) -> float:
    """Return the GB/s of the slowest link between two of the machines, all their ranks together, in one direction.

    Raises RunStopped where a machine is missing or cannot be reached.
    """
    job, failure = survey([Resumption(plan)], hosts, waits)
    if failure or not job.links:
        raise RunStopped(f"network: {failure or 'no link was measured; flexrlhf doctor says why'}")
    return min(link.gb_s for link in job.links if link.ends[0] != link.ends[1])


def survey(
    runs: Sequence[Resumption], hosts: Hosts, waits: Waits, factory: RankFactory | None = None
) -> tuple[JobFacts, str]:
    """Return what the ranks of all machines have collected, and the sentence with which they ended early, if they did.

    No process and no file is left.
    """
    plans = [run.plan for run in runs]
    host = host_facts(runs, hosts)
    with probed_directories(plans, hosts.is_first_node) as directories, TemporaryDirectory(prefix="flexrlhf-") as place:
        host = replace(host, directories=tuple(directories))
        request, result = Path(place) / "request.json", Path(place) / "facts.json"
        write_request(request, SurveyRequest(host, hosts.nnodes, waits.rank))
        failure = _survey(plans[0], hosts, waits, (request, result), factory)
        job = load_job(result.read_bytes()) if result.exists() else JobFacts((host,))
    return job, failure


def _survey(plan: Plan, hosts: Hosts, waits: Waits, files: tuple[Path, Path], factory: RankFactory | None) -> str:
    """Run the ranks of this machine; return the sentence with which they ended early, if they did."""
    limited = replace(plan, spec=plan.spec.model_copy(update={"timeout_seconds": waits.rank}))
    rendezvous = NodeRendezvous(hosts, waits.join)
    try:
        module = ["flexrlhf.measure.doctor_rank", *map(str, files)]
        launch.start_ranks(module, limited, hosts, rendezvous=rendezvous, factory=factory)
    except RankFailure as error:
        return str(error)
    finally:
        rendezvous.shutdown()
        # the store's server ends with the last reference to it
        gc.collect()
    rendezvous.await_end(END_SECONDS)
    return ""
