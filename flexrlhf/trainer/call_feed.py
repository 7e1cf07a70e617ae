"""Calls of a program, which rank 0 receives from it and publishes to all ranks in the job's store."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from flexrlhf.comm.mailbox import Mailbox
from flexrlhf.comm.world import World

CallMessage = Mapping[str, Any]
"""Fields of a call; ``do`` names its kind."""
WAIT: CallMessage = {"do": "wait"}
CLOSE: CallMessage = {"do": "close"}
WAITS = 4
"""Messages in the time of a deadline that tell the ranks to wait on, while the program computes."""


class CallFeed:
    """Calls of a program on this rank, in their order, which is the same on all ranks."""

    def __init__(self, world: World, run: str, address: str, timeout_seconds: float) -> None:
        """Connect rank 0 to the program. ``address``: socket that it listens to."""
        self._num_readers, self._timeout = world.size, timeout_seconds
        self._mailbox = Mailbox(world, f"calls/{run}", timeout_seconds)
        self._number = 0
        self._program: Connection | None = None
        if world.rank == 0:
            channel = socket.socket(socket.AF_UNIX)
            channel.connect(address)
            self._program = Connection(channel.detach())
            mailbox = self._mailbox.of_another_thread()
            self._thread = threading.Thread(target=self._receive, args=(self._program, mailbox), daemon=True)
            self._thread.start()

    def next(self) -> CallMessage:
        """Wait for the next call of the program. Raises DeadlineError if rank 0 is lost."""
        while True:
            key = str(self._number)
            message: CallMessage = self._mailbox.receive(key, "rank 0", "the next call of the program")
            self._number += 1
            self._mailbox.clear([key], self._num_readers)
            if message != WAIT:
                return message

    def reply(self, parts: Sequence[bytes]) -> None:
        """Send a reply to the program, from rank 0: the number of its parts, then these."""
        assert self._program is not None, "rank 0 replies"
        # a program that has gone reads nothing; its end is the next message
        with suppress(OSError):
            for part in (str(len(parts)).encode(), *parts):
                self._program.send_bytes(part)

    def close(self) -> None:
        """End the connection, after the last call."""
        if self._program is not None:
            self._thread.join()
            self._program.close()

    def _receive(self, program: Connection, mailbox: Mailbox) -> None:
        """Publish what the program sends; its end is a last call."""
        number, message = 0, WAIT
        while message != CLOSE:
            try:
                message = json.loads(program.recv_bytes()) if program.poll(self._timeout / WAITS) else WAIT
            except (EOFError, OSError):
                message = CLOSE
            mailbox.publish(str(number), message)
            number += 1
