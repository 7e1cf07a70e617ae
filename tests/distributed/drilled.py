"""``flexrlhf`` with a fault in one instruction of one rank, which the drill (drill.py) plans and injects.

``python -m drilled run ...`` is the command, whose ranks are ``python -m drilled ORDERS STOP DIRECTORIES``. The rank of
the fault writes the instruction that it has reached to ``reached.json``. Faults inside a process it then causes by
itself; for all others it waits in this instruction until the drill has acted, or goes on at once.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

VARIABLE = "FLEXRLHF_DRILL"
"""Variable with the directory of the planned fault; without it nothing happens."""
PLANNED, REACHED, GO = "fault.json", "reached.json", "go"
PLANTED = "planted fault"
SLOW_SECONDS, NUM_SLOW = 0.6, 8
"""Delay of an instruction of a slow rank, and how many it delays."""
_MOST_SECONDS = 60.0


@dataclass(frozen=True)
class Planned:
    """Place of a fault.

    action:  of the rank itself: ``exception``, ``socket`` or ``slow``; or ``none``.
    rank:    that it happens in.
    place:   rounds of the rank's instructions before it, with a fraction.
    waits:   whether the rank stays in the instruction until the drill has acted.
    choice:  from 0 to 1, of the sockets.
    """

    action: str
    rank: int
    place: float
    waits: bool
    choice: float

    def write(self, directory: Path) -> None:
        (directory / PLANNED).write_text(json.dumps(asdict(self)))


def connected_sockets() -> list[socket.socket]:
    """Copies of the TCP connections of this process, in order of their descriptors."""
    found = []
    for name in sorted(os.listdir("/proc/self/fd"), key=int):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
            copy.getpeername()
        except OSError:
            continue
        if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
            found.append(copy)
    return found


def close_a_socket(choice: float) -> str:
    """Shut a connection down. Returns the peer: ``store`` or ``ranks``."""
    sockets = connected_sockets()
    chosen = sockets[int(choice * len(sockets))]
    port = chosen.getpeername()[1]
    chosen.shutdown(socket.SHUT_RDWR)
    for each in sockets:
        each.close()
    return "store" if port == int(os.environ["MASTER_PORT"]) else "ranks"


class Fault:
    """A planned fault of this rank, checked before every instruction."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._planned = Planned(**json.loads((directory / PLANNED).read_text()))
        self._count = 0

    def before(self, trainer: Any, execution: Any) -> None:
        """Act before the planned instruction."""
        rank, instruction = trainer._rank.rank, execution.instruction
        if rank != self._planned.rank:
            return
        target = int(self._planned.place * len(trainer.plan.schedule.for_rank(rank)))
        self._count += 1
        if self._count == target:
            self._strike(f"{instruction.kind} {instruction.label}", execution.step)
        if self._planned.action == "slow" and 0 <= self._count - target < NUM_SLOW:
            time.sleep(SLOW_SECONDS)

    def _strike(self, instruction: str, step: int) -> None:
        closed = close_a_socket(self._planned.choice) if self._planned.action == "socket" else ""
        self._report(step=step, instruction=instruction, pid=os.getpid(), closed=closed)
        if self._planned.action == "exception":
            raise RuntimeError(PLANTED)
        limit = time.monotonic() + _MOST_SECONDS
        while self._planned.waits and not (self._directory / GO).exists() and time.monotonic() < limit:
            time.sleep(0.002)

    def _report(self, **values: Any) -> None:
        fresh = self._directory / f"{REACHED}.writing"
        fresh.write_text(json.dumps(values))
        fresh.replace(self._directory / REACHED)


def with_fault(execute: Callable[..., None]) -> Callable[..., None]:
    """``Trainer._execute`` with the planned fault."""
    fault = Fault(Path(os.environ[VARIABLE]))

    def executing(trainer: Any, execution: Any) -> None:
        fault.before(trainer, execution)
        execute(trainer, execution)

    return executing


def rank_main(orders_file: str, stop_file: str, directories: str) -> None:
    """Run the orders as flexrlhf/launch/rank.py does, but for the fault."""
    from flexrlhf.launch.lifetime import end_with_launcher

    end_with_launcher()
    from flexrlhf.launch import worker
    from flexrlhf.trainer.trainer import Trainer

    with patch.object(Trainer, "_execute", with_fault(Trainer._execute)):
        worker.main(orders_file, stop_file, directories)


def launcher_main() -> None:
    """Run the command with the ranks of this module."""
    from flexrlhf.launch.lifetime import quiet_torch

    quiet_torch()
    from flexrlhf.cli import main
    from flexrlhf.launch import start as launch

    start_ranks = launch.start_ranks

    def drilled(module: list[str], *arguments: Any, **further: Any) -> None:
        start_ranks(["drilled", *module[1:]], *arguments, **further)

    with patch.object(launch, "start_ranks", drilled):
        main()


if __name__ == "__main__":
    rank_main(*sys.argv[1:]) if sys.argv[1].endswith(".json") else launcher_main()
