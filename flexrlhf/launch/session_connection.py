"""Ranks of a session in processes of their own, and the connection of the program to them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from flexrlhf import errors
from flexrlhf.config.code_loading import python_command
from flexrlhf.errors import Interrupted, Preempted, RankFailure, RunStopped, UserError
from flexrlhf.placement.hosts import Hosts
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.resume import RunOrder, resume_runs
from flexrlhf.strategies.calls import CallsInFlight
from flexrlhf.user_code.process_directories import process_directory

LOOK_SECONDS = 0.2
"""Time between two looks whether ranks that start have failed."""
END_SECONDS = 30.0
"""Time that the ranks have to end after a program that failed."""
_SENTENCES = (UserError, RankFailure, RunStopped, Interrupted, Preempted)
"""Errors that ranks end with, or that refuse a call before it is sent."""


class SessionRanks:
    """Ranks of a session, which receive the messages of a program through rank 0."""

    def __init__(self, hosts: Hosts) -> None:
        """Start nothing yet. ``hosts``: machines of the job, of which this one is the first."""
        self._hosts = hosts
        self._stack = ExitStack()
        self._process = os.getpid()
        self._channel: socket.socket | None = None
        self._launcher: subprocess.Popen[bytes] | None = None
        self._has_ended = threading.Event()
        self._lock = threading.RLock()
        self._is_called = self._is_cut = False

    def start(self, plan: Plan, resume: str | None) -> tuple[int, CallsInFlight]:
        """Start the ranks of ``plan``; return the step that they begin with, and the calls of steps in flight. Raises
        UserError and RankFailure."""
        self.check_process()
        if self._launcher is not None or self._has_ended.is_set():
            raise UserError("session: it has been entered before; make another one")
        (start,) = resume_runs((plan,), resume)
        for note in start.notes:
            print(note, file=sys.stderr)
        try:
            return self._start(RunOrder(plan.spec, start.candidates, start.continues))
        except BaseException:
            self.end(raises=False)
            raise

    def _start(self, order: RunOrder) -> tuple[int, CallsInFlight]:
        directory = self._stack.enter_context(process_directory())
        address, orders, self._outcome = (directory / name for name in ("program", "orders.json", "outcome.json"))
        orders.write_bytes(RunOrder.to_json([replace(order, program=str(address))]).encode())
        listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(address))
        listener.listen(1)
        listener.settimeout(LOOK_SECONDS)
        hosts = (str(self._hosts.nnodes), self._hosts.rdzv_endpoint)
        self._launcher = self._launched(
            python_command("flexrlhf.launch.session_ranks", str(orders), str(self._outcome), *hosts)
        )
        while self._channel is None:
            try:
                self._channel, _ = listener.accept()
            except TimeoutError:
                if self._launcher.poll() is not None:
                    self._raise_outcome()
        # a timeout of the listener is its connections', too
        self._channel.settimeout(None)
        # what another thread reads from is shut down, not closed
        self._program = self._stack.enter_context(Connection(os.dup(self._channel.fileno())))
        (reply,) = self._received()
        begin = json.loads(reply)
        return begin["next_step"], begin["calls"]

    def _launched(self, command: list[str]) -> subprocess.Popen[bytes]:
        """Start a process from a thread that stays: the kernel ends it with the thread that has started it.

        Ctrl-C is for the program, which then ends the ranks.
        """
        started: Future[subprocess.Popen[bytes]] = Future()

        def start() -> None:
            try:
                started.set_result(subprocess.Popen(command, start_new_session=True))
            except OSError as error:
                started.set_exception(error)
                return
            self._has_ended.wait()

        threading.Thread(target=start, daemon=True).start()
        return started.result()

    def end(self, raises: bool = True) -> None:
        """End the ranks, in the process that has started them.

        ``raises``: whether the error that has ended them is raised; else the program has failed, and waits END_SECONDS.
        """
        if os.getpid() != self._process or self._has_ended.is_set():
            return
        launcher, found = self._launcher, None
        try:
            if self._channel is not None:
                with suppress(OSError):
                    self._channel.shutdown(socket.SHUT_RDWR)
                self._channel.close()
            if launcher is not None and _end_of(launcher, None if raises else END_SECONDS):
                found = self._error()
        finally:
            self._has_ended.set()
            self._stack.close()
        # ranks that the program ends before the last step have stopped at its request
        if raises and found is not None and not isinstance(found, Preempted):
            raise found

    @contextmanager
    def call(self) -> Iterator[None]:
        """Make one call of the program at a time: calls of other threads wait.

        Raises UserError in another process, and in a signal handler in the middle of a call.
        """
        self.check_process()
        with self._lock:
            if self._is_called:
                raise UserError("session: called by a signal handler in the middle of another call; set a flag there")
            try:
                self._is_called = True
                yield
            finally:
                self._is_called = False

    def check_process(self) -> None:
        """Raise UserError in a fork of the program."""
        if os.getpid() != self._process:
            raise UserError(
                f"session: it is of process {self._process}, and this one is a fork of it; make calls there"
            )

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Notice what interrupts the program between a message and the end of its reply: none follows it.

        Raises UserError if ranks have not started or have ended, and behind an interrupt.
        """
        if self._has_ended.is_set():
            raise UserError("session: its ranks have ended; make another one")
        if self._channel is None:
            raise UserError("session: its ranks have not started; use it in a with statement")
        if self._is_cut:
            raise UserError("session: a call has been interrupted before its end; leave the session, and resume it")
        self._is_cut = True
        try:
            yield
        except _SENTENCES:
            self._is_cut = False
            raise
        self._is_cut = False

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to all ranks, in an ``exchange``. Raises the error that has ended them."""
        try:
            self._program.send_bytes(json.dumps(message).encode())
        except OSError:
            self._raise_outcome()

    def request(self, message: Mapping[str, Any]) -> list[bytes]:
        """Send a message, and return the parts of the reply of rank 0. Raises as ``send``."""
        with self.exchange():
            self.send(message)
            return self._received()

    def _received(self) -> list[bytes]:
        try:
            return [self._program.recv_bytes() for _ in range(int(self._program.recv_bytes()))]
        except (EOFError, OSError):
            self._raise_outcome()

    def _raise_outcome(self) -> NoReturn:
        """Wait for the ranks and raise the error that has ended them."""
        assert self._launcher is not None, "ranks that have started"
        self._launcher.wait()
        raise self._error()

    def _error(self) -> Exception:
        """Return the error that has ended the ranks."""
        assert self._launcher is not None, "ranks that have started"
        if self._launcher.returncode == 0:
            return UserError("session: its ranks have ended, as another thread has left it")
        if not self._outcome.exists():
            return RankFailure(f"the ranks of the session ended with exit status {self._launcher.returncode}")
        name, sentence = json.loads(self._outcome.read_text())
        error: Exception = getattr(errors, name)(sentence)
        return error


def _end_of(launcher: subprocess.Popen[bytes], seconds: float | None) -> int:
    """Wait for the end of the ranks, and end them after ``seconds`` or on an interrupt; return the exit status."""
    try:
        try:
            return launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            launcher.terminate()
            return launcher.wait()
    except BaseException:
        # its ranks end with it
        launcher.kill()
        launcher.wait()
        raise
