"""Calls of a program, which rank 0 receives from it and puts into the job's store for all ranks.

The store has no authentication, and a call may name a file of code: each has a tag of the job's secret.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from flexrlhf.comm.mailbox import Mailbox
from flexrlhf.comm.world import World
from flexrlhf.config.job_secret import JobSecret
from flexrlhf.errors import UserError

CallMessage = Mapping[str, Any]
"""Fields of a call; ``do`` names its kind."""
WAIT, CLOSE = ('{"do": "wait"}', '{"do": "close"}')
WAITS = 4
"""Messages in the time of a deadline that tell the ranks to wait on, while the program computes."""


class CallFeed:
    """Calls of a program on this rank, in their order, which is the same on all ranks."""

    def __init__(self, world: World, run: str, address: str, timeout_seconds: float) -> None:
        """Connect rank 0 to the program. ``address``: socket that it listens to."""
        self._num_readers, self._timeout = world.size, timeout_seconds
        self._name, self._secret = f"calls/{run}", JobSecret.here()
        self._mailbox = Mailbox(world, self._name, timeout_seconds)
        self._number = 0
        self._program: Connection | None = None
        if world.rank == 0:
            self._channel = socket.socket(socket.AF_UNIX)
            self._channel.connect(address)
            self._program = Connection(os.dup(self._channel.fileno()))
            mailbox = self._mailbox.of_another_thread()
            self._thread = threading.Thread(target=self._receive, args=(self._program, mailbox), daemon=True)
            self._thread.start()

    def next(self) -> CallMessage:
        """Wait for the next call of the program. Raises DeadlineError if rank 0 is lost, UserError for a call that a
        process without the job's secret has put."""
        while True:
            data = self._mailbox.take(str(self._number), "rank 0", "the next call of the program", self._num_readers)
            try:
                text = self._secret.verified(f"{self._name}/{self._number}", data.decode(errors="replace"))
            except UserError:
                raise UserError(
                    f"session: call {self._number} in the job's store is of a process without the secret of the job, "
                    f"and is not made; keep strangers off the network of the job"
                ) from None
            self._number += 1
            if text != WAIT:
                found: CallMessage = json.loads(text)
                return found

    def reply(self, parts: Sequence[bytes]) -> None:
        """Send a reply to the program, from rank 0: the number of its parts, then these."""
        assert self._program is not None, "rank 0 replies"
        # a program that has gone reads nothing; its end is the next message
        with suppress(OSError):
            for part in (str(len(parts)).encode(), *parts):
                self._program.send_bytes(part)

    def close(self) -> None:
        """End the connection, after the last call or a request to stop, which the program reads as the end of its
        ranks."""
        if self._program is not None:
            with self._channel, suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._program.close()

    def _receive(self, program: Connection, mailbox: Mailbox) -> None:
        """Put what the program sends into the store; its end is a last call."""
        number, text = 0, WAIT
        while text != CLOSE:
            try:
                text = program.recv_bytes().decode() if program.poll(self._timeout / WAITS) else WAIT
            except (EOFError, OSError):
                text = CLOSE
            mailbox.put(str(number), self._secret.signed(f"{self._name}/{number}", text).encode())
            number += 1
