"""Ranks of a session in processes of their own, and the connection of the program to them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from flexrlhf import errors
from flexrlhf.errors import Preempted, RankFailure, UserError
from flexrlhf.launch.lifetime import process_directory
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.resume import ORDERS, RunOrder, resume_runs

LOOK_SECONDS = 0.2
"""Time between two looks whether ranks that start have failed."""
END_SECONDS = 30.0
"""Time that the ranks have to end after a program that failed."""


class SessionRanks:
    """Ranks of a session, which receive the messages of a program through rank 0.

    directory:  for files of the program and the ranks, from ``start`` to ``end``.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._program: Connection | None = None

    def start(self, plan: Plan, resume: str | None) -> int:
        """Start the ranks of ``plan``; return the step that they begin with. Raises UserError and RankFailure."""
        (start,) = resume_runs((plan,), resume)
        for note in start.notes:
            print(note, file=sys.stderr)
        self.directory: Path = self._stack.enter_context(process_directory())
        address, orders, self._outcome = (self.directory / name for name in ("program", "orders.json", "outcome.json"))
        order = RunOrder(plan.spec, start.candidates, start.continues, str(address))
        orders.write_bytes(ORDERS.dump_json([order]))
        listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(address))
        listener.listen(1)
        listener.settimeout(LOOK_SECONDS)
        command = [sys.executable, "-m", "flexrlhf.launch.session_ranks", str(orders), str(self._outcome)]
        self._launcher = subprocess.Popen(command)
        while self._program is None:
            try:
                channel, _ = listener.accept()
                # a timeout of the listener is its connections', too
                channel.settimeout(None)
                self._program = Connection(channel.detach())
            except TimeoutError:
                if self._launcher.poll() is not None:
                    self._raise_outcome()
        return int(json.loads(self.receive())["next_step"])

    def end(self, error: BaseException | None) -> None:
        """End the ranks. ``error``: with which the program ends; without one that of the ranks is raised."""
        if self._program is not None:
            self._program.close()
        try:
            status = self._launcher.wait(None if error is None else END_SECONDS)
        except subprocess.TimeoutExpired:
            self._launcher.terminate()
            status = self._launcher.wait()
        found = self._error() if status else None
        self._stack.close()
        # ranks that the program ends before the last step have stopped at its request
        if found is not None and error is None and not isinstance(found, Preempted):
            raise found

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to all ranks. Raises the error that has ended them."""
        if self._program is None:
            raise UserError("session: its ranks have not started; use it in a with statement")
        try:
            self._program.send_bytes(json.dumps(message).encode())
        except OSError:
            self._raise_outcome()

    def receive(self) -> bytes:
        """Return the next part of a reply of rank 0. Raises the error that has ended the ranks."""
        assert self._program is not None, "messages follow the start"
        try:
            return self._program.recv_bytes()
        except (EOFError, OSError):
            self._raise_outcome()

    def _raise_outcome(self) -> NoReturn:
        """Wait for the ranks and raise the error that has ended them."""
        self._launcher.wait()
        raise self._error()

    def _error(self) -> Exception:
        """Return the error that has ended the ranks."""
        if not self._outcome.exists():
            return RankFailure(f"the ranks of the session ended with exit status {self._launcher.returncode}")
        name, sentence = json.loads(self._outcome.read_text())
        error: Exception = getattr(errors, name)(sentence)
        return error
