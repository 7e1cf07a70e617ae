"""Re-planning of runs while they train: after every so many steps, whether another placement would end the run sooner.

A thread of the launcher decides, by the run's own files. If so, the ranks save and end as on a signal, and start again
from that checkpoint under the new placement; otherwise they notice nothing.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from flexrlhf.api import (
    AUTO,
    Job,
    Plan,
    Preempted,
    RankFactory,
    RunDirectory,
    Spec,
    UserError,
    checked_job,
    load_plugin,
    make_plan,
    resume_runs,
)
from flexrlhf.api.engine import StopRequests
from flexrlhf.guideline.advice.replan import Replan, format_replan, places_text, replan, returns
from flexrlhf.guideline.simulation.measured_run import measured_run

LOOK_SECONDS = 0.5
"""Time between two looks at the files of a run."""
LAST_BYTES = 1 << 16
"""End of a file that has its last line."""
SEARCH_SECONDS = 5.0
"""Work of the searches of a decision, in seconds of an ordinary core, which ranks may use as well."""


class Replanner:
    """Decisions on the runs of a job, and the job that goes on after one.

    job:  with the plans that its runs have now.
    """

    def __init__(self, job: Job, written: Mapping[str, Spec], every: int, restart: float | None = None) -> None:
        """Decide nothing yet.

        written:  YAML of each run as its user wrote it, by name.
        every:    steps from one decision to the next.
        restart:  time that a restart takes; None: as measured.
        """
        self.job = job
        self._written, self._every, self._restart = written, every, restart
        self._turns: dict[tuple[str, int], int] = {}
        self._chosen: Plan | None = None
        self._is_stopped = False

    def start(self, max_restarts: int, factory: RankFactory | None) -> list[Plan]:
        """Start the job, again after each decision for another placement. Returns the plans of its runs when all have
        ended, with the last placement of each.

        Raises as ``Job.start``.
        """
        plans = {plan.spec.name: plan for plan in self.job.plans}
        while self.job.runs:
            plans |= {plan.spec.name: plan for plan in self.job.plans}
            self._chosen, self._is_stopped = None, False
            try:
                replace(self.job, watch=self._watching).start(max_restarts, factory)
                break
            except Preempted:
                if not self._is_stopped or self._chosen is None:
                    raise
                self.job = _continued(self.job, self._chosen)
        return list(plans.values())

    @contextmanager
    def _watching(self, stop: Path) -> Iterator[None]:
        """Decide in a thread while this is open. ``stop``: file whose existence makes the ranks save and end."""
        ended = threading.Event()
        # a search that is under way at the end of the job is of no use any more
        threading.Thread(target=self._watch, args=(stop, ended), name="replan", daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            self._is_stopped = stop.exists() and stop.read_text() == StopRequests.REPLAN

    def _watch(self, stop: Path, ended: threading.Event) -> None:
        while not ended.wait(LOOK_SECONDS):
            for plan in self.job.plans:
                if self._is_due(plan) and (chosen := self._decide(plan)) is not None and not ended.is_set():
                    self._chosen = chosen
                    with suppress(FileExistsError), stop.open("x") as file:
                        file.write(StopRequests.REPLAN)
                    return

    def _is_due(self, plan: Plan) -> bool:
        """Whether a run goes on, and so many further steps have been trained since its start or the last decision."""
        directory = RunDirectory(plan.spec.directory)
        status = directory.status
        if status is None or status.state != "running" or status.start_seconds is None:
            return False
        start = plan.spec.name, status.next_step
        turn = (last_step(directory) + 1 - status.next_step) // self._every
        before, self._turns[start] = self._turns.get(start, 0), turn
        return turn > before

    def _decide(self, plan: Plan) -> Plan | None:
        """Return the plan to go on with; None: the run goes on as it is. Writes and prints the decision."""
        name, directory = plan.spec.name, RunDirectory(plan.spec.directory)
        try:
            run = measured_run(load_plugin("functions", "read_record")(directory.path, plan))
            restart = run.restart_seconds if self._restart is None else self._restart
            found = replan(run, restart, self._written.get(name), SEARCH_SECONDS)
            goes = found.switches and not returns(found, directory.replans.read())
            chosen = make_plan(found.best.candidate.spec) if goes else None
        except UserError as error:
            print(f"{name}: not re-planned: {error}", flush=True)
            return None
        directory.replans.append(replan_row(found, goes))
        first, *_, last = lines = format_replan(found).splitlines()
        kept = ", which it has left at this length: go on as it is" if found.switches and not goes else ""
        print("\n".join(lines) if goes else f"{first}; {last}{kept}", flush=True)
        return chosen


def replan_row(found: Replan, switches: bool) -> dict[str, object]:
    """Return the line of a decision in ``replans.jsonl``: ``step`` is the last one that it is based on."""
    return {
        "step": found.run.next_step - 1,
        "switches": switches,
        "seconds": found.run.seconds,
        "predicted": found.run.simulation.seconds,
        "predicted_after": found.best.seconds,
        "response_length": found.run.lengths.mean_response,
        "remaining": found.remaining,
        "restart_seconds": found.restart_seconds,
        "before": places_text(found.run.record.plan),
        "after": places_text(found.best.plan),
    }


def _continued(job: Job, chosen: Plan) -> Job:
    """Return the job that goes on with ``chosen``, the plan of the run that has stopped, and with the runs after it."""
    place = next(index for index, run in enumerate(job.runs) if run.plan.spec.name == chosen.spec.name)
    # the directories of later runs are there already
    later = [replace(run, continues=True) for run in job.runs[place + 1 :]]
    runs = [run for run in (*resume_runs((chosen,), AUTO), *later) if not run.finished]
    return checked_job(runs, job.hosts) if runs else replace(job, runs=())


def last_step(directory: RunDirectory) -> int:
    """Return the last step of a run that has a row of metrics; -1 without any."""
    path = directory.metrics.path
    if not path.is_file():
        return -1
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_BYTES))
        lines = file.read().split(b"\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if lines else -1
