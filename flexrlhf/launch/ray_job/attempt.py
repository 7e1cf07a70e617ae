"""One attempt to run the ranks of a job in a Ray cluster: from the comparison of its machines to its end."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from socket import gethostname
from tempfile import TemporaryDirectory

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from flexrlhf.errors import UserError
from flexrlhf.launch.failures import Failure, FailureReporter, root_cause
from flexrlhf.launch.launchers.job_start import JobStart
from flexrlhf.launch.ray_job.actor import RankReport
from flexrlhf.launch.ray_job.ranks import (
    SILENCE_SECONDS,
    ActorRank,
    close_ranks,
    end_ranks,
    gathered,
    hosts_of_ranks,
    poll_ranks,
    start_ranks,
)
from flexrlhf.launch.shared_directories import probed_directories
from flexrlhf.launch.terms import Terms, dump_terms
from flexrlhf.runs.resume import ORDERS
from flexrlhf.text import ranks_text

COMPARE_SECONDS = 900.0
"""Longest wait for the digests of all machines."""
SETTLE_SECONDS = 7.0
"""Time in which a failure that explains the first one is awaited, from actors that respond."""
SUDDEN = ("killed", "user", "error", "node")
"""Kinds of failures that no other one explains."""


def compare_machines(ranks: Sequence[ActorRank], job: JobStart, terms: Terms) -> None:
    """Compare terms and directories of one rank of each planned node with those of the driver.

    Raises UserError with the first difference.
    """
    firsts = [each for each in ranks if each.position.local_rank == 0]
    driver = f"the driver (host {gethostname()})"
    with probed_directories(job.plans, makes_probes=True) as directories:
        for each in directories:
            if each.problem:
                raise UserError(f"runs: {each.place} cannot be written ({each.problem})")
        shared = (ORDERS.dump_json(job.orders).decode(), dump_terms(terms), tuple(directories))
        calls = [(each, each.actor.compare.remote(*shared, each.node, driver)) for each in firsts]
        sentence = next(filter(None, gathered(calls, COMPARE_SECONDS)), "")
    if sentence:
        raise UserError(sentence)


def print_places(ranks: Sequence[ActorRank]) -> None:
    """Print the Ray node of each planned node."""
    for node in dict.fromkeys(each.node for each in ranks):
        own = [each for each in ranks if each.node == node]
        place = own[0].place
        numbers = ranks_text(tuple(each.rank for each in own))
        print(
            f"node {node}: {numbers} on host {place.host} ({place.address}, Ray node {place.ray_node[:8]})", flush=True
        )


@dataclass
class Attempt:
    """Run of all ranks, up to its end or its first failure.

    ranks:     in order.
    job:       their job.
    stop:      file of the driver that exists once a signal requests to save and end.
    record:    directory of the records of the ranks, once one has failed.
    """

    ranks: Sequence[ActorRank]
    job: JobStart
    stop: Path
    record: Path | None = None
    _request: str | None = field(default=None, init=False)

    def run(self, number: int) -> Failure | None:
        """Run the ranks; return what ended them, None where all ended well. No rank is left.

        ``number``: of the attempt, from 0. Raises SignalException or KeyboardInterrupt on a signal.
        """
        start_ranks(self.ranks, ORDERS.dump_json(self.job.orders).decode(), number, self.job.max_restarts)
        try:
            while any(each.is_running for each in self.ranks) and not self._has_failed:
                self._poll()
            return self._conclude() if self._has_failed else None
        except (SignalException, KeyboardInterrupt):
            self._pass_request()
            self._report(end_ranks(self.ranks))
            raise
        finally:
            close_ranks(self.ranks)

    @property
    def _has_failed(self) -> bool:
        return any(each.has_failed for each in self.ranks)

    def _poll(self) -> None:
        self._pass_request()
        poll_ranks(self.ranks)

    def _pass_request(self) -> None:
        """Create the file of a request on the machines of the ranks, as the driver's is."""
        found = self.stop.read_text() if self.stop.exists() else None
        if found != self._request and found is not None:
            self._request = found
            for each in self.ranks:
                if each.is_running:
                    each.actor.request_stop.remote(found)

    def _conclude(self) -> Failure:
        """Wait a little for the failure that explains the first one, end the others, and return the cause."""
        began = time.monotonic()
        while not self._is_explained() and self._may_be_explained(time.monotonic() - began):
            self._poll()
        failed = {each.rank: each.report for each in self.ranks if each.report is not None and each.report.code}
        end_ranks(self.ranks)
        return root_cause(self._report(failed))

    def _is_explained(self) -> bool:
        """Whether a rank has failed by itself, or all have ended."""
        if any(each.loss for each in self.ranks) or not any(each.is_running for each in self.ranks):
            return True
        reports = [each.report for each in self.ranks if each.report is not None and each.report.code]
        return any((report.code or 0) < 0 or _error_data(report).get("kind") in SUDDEN for report in reports)

    def _may_be_explained(self, seconds: float) -> bool:
        """Whether a rank may still be seen to fail: Ray takes its time to report a node that is lost."""
        now = time.monotonic()
        is_silent = any(each.is_running and now - each.heard > 2.0 for each in self.ranks)
        return seconds < (SILENCE_SECONDS + SETTLE_SECONDS if is_silent else SETTLE_SECONDS)

    def _report(self, failed: Mapping[int, RankReport]) -> list[Failure]:
        """Write the records that ranks could not write themselves, and return the failures."""
        directories = [order.spec.directory for order in self.job.orders]
        ranks = [each.rank for each in self.ranks]
        reporter = FailureReporter(self.job.plans[0], directories, ranks, hosts_of_ranks(self.ranks))
        lost = [
            reporter.lost(each.rank, each.loss, "node" if each.is_node else "killed")
            for each in self.ranks
            if each.loss
        ]
        with TemporaryDirectory(prefix="flexrlhf-") as directory:
            found = reporter.report({rank: _failure(rank, report, directory) for rank, report in failed.items()})
        self.record = reporter.record
        return [*lost, *found]


def _error_data(report: RankReport) -> dict[str, str]:
    data: dict[str, str] = json.loads(report.error) if report.error else {}
    return data


def _failure(rank: int, report: RankReport, directory: str) -> ProcessFailure:
    """Return the end of a rank as torch's agent describes it, from the file that the rank wrote on its machine."""
    file = Path(directory) / f"rank-{rank}.json"
    if report.error:
        file.write_text(report.error)
    return ProcessFailure(local_rank=rank, pid=0, exitcode=report.code or 0, error_file=str(file))
