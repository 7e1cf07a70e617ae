"""Actor of one rank. It runs the rank as a child process, with the same entry point as under other launchers.

A rank sets signal handlers and threads of its own, and loads torch; a process of its own ends for certain. The kernel
kills it when the actor ends, however that happens, so a lost driver or Ray node leaves none. Loads no torch.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import IO

from flexrlhf.errors import UserError
from flexrlhf.launch.rank_environment import child_environment
from flexrlhf.launch.shared_directories import DirectoryFacts, look_for_probes
from flexrlhf.launch.terms import Sides, difference, load_terms, terms_of
from flexrlhf.plan.pipeline import make_plans
from flexrlhf.runs.resume import ORDERS, SHARED

POLL_SECONDS = 0.5
"""Longest time that a poll waits for something to report."""
LINE_SECONDS = 0.05
"""Time in which lines are collected, so that one report has many."""
END_SECONDS = 10.0
"""Time that a rank has to end after SIGTERM, as under torch's agent."""


@dataclass(frozen=True)
class ActorPlace:
    """Machine of an actor.

    host:      name.
    address:   of its Ray node.
    ray_node:  identifier of that.
    gpus:      that Ray assigned to the actor.
    problem:   why no rank can run there, in one sentence; empty where it can.
    """

    host: str
    address: str
    ray_node: str
    gpus: tuple[str, ...]
    problem: str = ""


@dataclass(frozen=True)
class RankReport:
    """News of a rank since the last poll.

    lines:  of its output, each with the number of its stream: 1 or 2.
    code:   exit code, negative for a signal; None while it runs.
    error:  contents of the error file that the rank wrote, as JSON; may be empty.
    """

    lines: tuple[tuple[int, str], ...]
    code: int | None
    error: str


class RankActor:
    """Process that runs one rank and reports on it. All calls come from the driver, one after another."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._files = Path(mkdtemp(prefix="flexrlhf-"))
        self._lines: deque[tuple[int, str]] = deque()
        self._news = threading.Event()
        self._readers: list[threading.Thread] = []
        self._child: subprocess.Popen[str] | None = None

    def enter(self, directory: str) -> ActorPlace:
        """Change to the working directory of the driver, and return where this actor is."""
        import ray

        context, host, problem = ray.get_runtime_context(), socket.gethostname(), ""
        try:
            os.chdir(directory)
        except OSError as error:
            problem = (
                f"--launcher ray: {directory}, where the command was started, is missing on host {host} "
                f"({error.strerror}); start it in a directory that all Ray nodes have"
            )
        gpus = tuple(map(str, context.get_accelerator_ids().get("GPU", [])))
        return ActorPlace(host, ray.util.get_node_ip_address(), context.get_node_id(), gpus, problem)

    def free_port(self) -> int:
        """Return a port that is free on this machine."""
        with closing(socket.socket()) as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def compare(self, orders: str, terms: str, directories: Sequence[DirectoryFacts], node: int, first: str) -> str:
        """Return what differs between this machine and the driver's; empty where nothing does.

        orders, terms:  of the driver, as text.
        directories:    of the runs, with a probe of the driver in each.
        node:           number of the planned node.
        first:          name of the driver, for the sentence.
        """
        own, expected = ORDERS.validate_json(orders), load_terms(terms)
        sides = Sides(first, f"node {node} (host {socket.gethostname()})")
        try:
            plans = make_plans([order.spec for order in own])
            found = terms_of(plans, own[0].spec.cluster.device, expected.nodes, expected.restarts)
        except UserError as error:
            return f"{sides.other}: {error}"
        return difference(expected, found, sides) or _unseen(directories, node + 1, sides)

    def start(self, orders: str, variables: Mapping[str, str]) -> None:
        """Start the rank. ``variables``: of its environment, in addition to this process's."""
        orders_file = self._files / "orders.json"
        orders_file.write_text(orders)
        # this thread is the actor's main one, whose end is that of the process: the kernel kills the rank with it
        self._child = subprocess.Popen(
            [sys.executable, "-m", "flexrlhf.launch.rank", str(orders_file), str(self._stop_file), SHARED],
            env=child_environment(variables, str(os.getpid()), str(self._error_file)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        for number, stream in ((1, self._child.stdout), (2, self._child.stderr)):
            assert stream is not None, "both streams are pipes"
            reader = threading.Thread(target=self._read, args=(number, stream), daemon=True)
            reader.start()
            self._readers.append(reader)

    def poll(self) -> RankReport:
        """Return what has happened since the last call, or after a moment that nothing has."""
        assert self._child is not None, "a rank that has started is polled"
        if self._news.wait(POLL_SECONDS):
            time.sleep(LINE_SECONDS)
        code = self._child.poll()
        if code is not None:
            self._drain()
        self._news.clear()
        lines = tuple(self._lines.popleft() for _ in range(len(self._lines)))
        return RankReport(lines, code, self._error() if code else "")

    def request_stop(self, content: str) -> None:
        """Create the file of a request to save and end. ``content``: of the driver's."""
        self._stop_file.write_text(content)

    def stop(self) -> RankReport:
        """End the rank, in END_SECONDS or by force, and return its last report."""
        assert self._child is not None, "a rank that has started is stopped"
        with suppress(ProcessLookupError):
            self._child.terminate()
            # one that was stopped takes the signal as well
            self._child.send_signal(signal.SIGCONT)
        try:
            self._child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        return self.poll()

    def close(self) -> None:
        """Remove the files of this actor."""
        shutil.rmtree(self._files, ignore_errors=True)

    @property
    def _stop_file(self) -> Path:
        return self._files / "stop"

    @property
    def _error_file(self) -> Path:
        return self._files / "error.json"

    def _error(self) -> str:
        return self._error_file.read_text() if self._error_file.exists() else ""

    def _read(self, number: int, stream: IO[str]) -> None:
        for line in stream:
            self._lines.append((number, line.rstrip("\n")))
            self._news.set()
        self._news.set()

    def _drain(self) -> None:
        """Wait for the last lines; what a rank has started may keep a stream open."""
        for reader in self._readers:
            reader.join(1.0)


def _unseen(directories: Sequence[DirectoryFacts], number: int, sides: Sides) -> str:
    """Return what is wrong with the directories of the runs on this machine; empty where they are the driver's.

    Rank 0 need not be on the driver's machine, so files could not be sent to it there.
    """
    found = look_for_probes([(each.path, each.probe) for each in directories], number)
    if found.problem:
        return f"runs: {sides.other} {found.problem}"
    if found.shares:
        return ""
    paths = ", ".join(each.path for each in directories)
    return (
        f"runs: {paths} on {sides.other} is not that of {sides.first}; set runs: to a directory that all machines mount"
    )
