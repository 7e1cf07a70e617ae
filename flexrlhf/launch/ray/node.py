"""Planned node of a job in a Ray cluster: an actor, whose child process is the launcher of that node's ranks.

    driver ── one actor for each planned node ── launcher ── ranks, as on several machines

The launcher sets signal handlers, and loads torch; a process of its own ends for certain. The kernel kills it when the
actor ends, however that happens, and the ranks with it, so a lost driver or Ray node leaves none. Loads no torch.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import IO, Literal

from flexrlhf.api import (
    LAUNCHER,
    DirectoryFacts,
    Interrupted,
    RankFailure,
    RunOrder,
    Sides,
    Terms,
    UserError,
    end_with_launcher,
    make_plan,
    make_plans,
    python_command,
    quiet_torch,
)

POLL_SECONDS = 0.5
"""Longest time that a poll waits for something to report."""
LINE_SECONDS = 0.05
"""Time in which lines are collected, so that one report has many."""


@dataclass(frozen=True)
class NodeEnd:
    """End of the ranks of a node.

    kind:      ``stopped`` after a request to save and end; ``interrupted`` by a signal; ``failed``; ``refused`` for a
               cause that a user must mend, so that another attempt fails as well; ``lost`` with its launcher or actor.
    sentence:  for the user; of a loss, how it came.
    """

    kind: Literal["finished", "stopped", "interrupted", "failed", "refused", "lost"]
    sentence: str = ""

    @property
    def is_well(self) -> bool:
        """Whether the ranks have finished, or saved on request."""
        return self.kind in ("finished", "stopped")


RayPlace = tuple[str, str, str, int]
"""Machine of an actor: its name, address, identifier in Ray, and a free port."""
NodeReport = tuple[tuple[tuple[int, str], ...], NodeEnd | None]
"""Lines of output, each with the number of its stream (1 or 2), and the end of the launcher; None while it runs."""


class RayNode:
    """Actor of one planned node. All calls come from the driver, one after another."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._files = Path(mkdtemp(prefix="flexrlhf-"))
        self._lines: deque[tuple[int, str]] = deque()
        self._news = threading.Event()
        self._readers: list[threading.Thread] = []
        self._launcher: subprocess.Popen[str] | None = None

    def enter(self, directory: str) -> RayPlace | str:
        """Change to the working directory of the driver; return where this actor is, or why no rank can run there."""
        import ray

        host = socket.gethostname()
        try:
            os.chdir(directory)
        except OSError as error:
            return (
                f"--launcher ray: {directory}, where the command was started, is missing on host {host} "
                f"({error.strerror}); start it in a directory that all Ray nodes have"
            )
        with closing(socket.socket()) as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        return host, ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), port

    def compare(self, orders: str, terms: str, directories: Sequence[DirectoryFacts], node: int, first: str) -> str:
        """Return the difference between this machine and the driver's; empty without any.

        orders, terms:  of the driver, as text.
        directories:    of the runs, with a probe of the driver in each.
        node:           number of the planned node.
        first:          name of the driver, for the sentence.
        """
        own, expected = RunOrder.from_json(orders), Terms.of_json(terms)
        sides = Sides(first, f"node {node} (host {socket.gethostname()})")
        try:
            plans = make_plans([order.spec for order in own])
            found = Terms.of(plans, own[0].spec.cluster.device, expected.nodes, expected.restarts)
        except UserError as error:
            return f"{sides.other}: {error}"
        sharing = expected.compare_machine(found, sides, directories, node + 1)
        if sharing.problem or sharing.shares:
            return sharing.problem
        paths = ", ".join(each.path for each in directories)
        # rank 0 need not be on the driver's machine, so files could not be sent to it there
        mounted = "set runs: to a directory that all machines mount"
        return f"runs: {paths} on {sides.other} is not that of {sides.first}; {mounted}"

    def start(self, orders: str, nodes: int, node: int, endpoint: str, attempt: int) -> None:
        """Start the launcher of this node. ``endpoint``: where the launchers meet. ``attempt``: its number,
        from 0."""
        (self._files / "orders.json").write_text(orders)
        # this thread is the actor's main one, which ends with the process: the kernel kills the launcher with it
        self._launcher = subprocess.Popen(
            python_command(__name__, str(self._files), *map(str, (nodes, node, endpoint, attempt))),
            env={**os.environ, LAUNCHER: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        for number, stream in ((1, self._launcher.stdout), (2, self._launcher.stderr)):
            assert stream is not None, "both streams are pipes"
            reader = threading.Thread(target=self._read, args=(number, stream), daemon=True)
            reader.start()
            self._readers.append(reader)

    def poll(self) -> NodeReport:
        """Return the news since the last call, after a moment without any."""
        assert self._launcher is not None, "a node that has started is polled"
        if self._news.wait(POLL_SECONDS):
            time.sleep(LINE_SECONDS)
        code, end = self._launcher.poll(), None
        if code is not None:
            # the last lines; a process that a rank has started may keep a stream open
            for reader in self._readers:
                reader.join(1.0)
            end = _read_end(self._files, code)
            shutil.rmtree(self._files, ignore_errors=True)
        self._news.clear()
        return tuple(self._lines.popleft() for _ in range(len(self._lines))), end

    def signal(self, number: int) -> None:
        """Pass a signal of the driver to the launcher."""
        assert self._launcher is not None, "a node that has started gets signals"
        with suppress(ProcessLookupError):
            self._launcher.send_signal(number)

    def _read(self, number: int, stream: IO[str]) -> None:
        for line in stream:
            self._lines.append((number, line.rstrip("\n")))
            self._news.set()
        self._news.set()


def _read_end(files: Path, code: int) -> NodeEnd:
    """Return how a launcher has ended that had ``files``. ``code``: exit code, negative for a signal."""
    if (file := files / "end.json").exists():
        return NodeEnd(*json.loads(file.read_text()))
    if -code in (signal.SIGTERM, signal.SIGINT):
        return NodeEnd("interrupted")
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"
    return NodeEnd("lost", f"its launcher {how}")


def launch_node(files: Path, nodes: int, node: int, endpoint: str, attempt: int) -> NodeEnd:
    """Run the ranks of a planned node, once, as the launcher of one of several machines does.

    files:     directory with the orders of the driver
    endpoint:  HOST:PORT of planned node 0; empty with one node
    attempt:   number of the attempt, from 0; the driver makes them
    """
    from flexrlhf.api import Hosts, RankFactory
    from flexrlhf.api.engine import NodeRendezvous, launch

    hosts = Hosts(nodes, node, endpoint)
    try:
        orders = RunOrder.from_json((files / "orders.json").read_text())
        with RankFactory(is_copied=True) as factory:
            rendezvous = NodeRendezvous(hosts, attempt=attempt)
            stopped = launch(orders, make_plan(orders[0].spec), hosts, rendezvous=rendezvous, factory=factory)
        return NodeEnd("stopped" if stopped else "finished")
    except UserError as error:
        return NodeEnd("refused", str(error))
    except RankFailure as error:
        return NodeEnd("refused" if error.is_final else "failed", str(error))
    except (Interrupted, KeyboardInterrupt):
        return NodeEnd("interrupted")


def main(directory: str, nodes: str, node: str, endpoint: str, attempt: str) -> None:
    """Be the launcher that an actor has started."""
    end_with_launcher()
    # Ray's processes block it, and so those that they start
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    quiet_torch()
    end = launch_node(Path(directory), int(nodes), int(node), endpoint, int(attempt))
    (Path(directory) / "end.json").write_text(json.dumps([end.kind, end.sentence]))


if __name__ == "__main__":
    main(*sys.argv[1:])
