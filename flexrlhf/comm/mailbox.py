"""Messages between the ranks of a run through the job's store, which removes none by itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from flexrlhf.comm.store import second_connection
from flexrlhf.comm.world import World

PART_BYTES = 4_000_000
"""Bytes that one entry of the job's store has; it takes 8 MB."""


class Mailbox:
    """Messages under keys, as JSON. Readers clear up: the last of several, or the only one.

    store:  for other entries under the name of this mailbox.
    """

    def __init__(self, world: World, name: str, timeout_seconds: float) -> None:
        """``name``: prefix of the keys. ``timeout_seconds``: of each wait."""
        self._world, self._name, self._timeout = world, name, timeout_seconds
        self.store: dist.Store = dist.PrefixStore(name, world.store)

    def of_another_thread(self) -> Mailbox:
        """Return this mailbox for another thread: one that waits occupies its connection."""
        mailbox = Mailbox(self._world, self._name, self._timeout)
        mailbox.store = dist.PrefixStore(self._name, second_connection(self._world.store))
        return mailbox

    def publish(self, key: str, message: object) -> None:
        """Put a message, of which ``json.dumps`` makes a text."""
        self.store.set(key, json.dumps(message))

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether all ``keys`` are published, without waiting."""
        return bool(self.store.check(list(keys)))

    def wait(self, keys: Mapping[str, str], what: str) -> None:
        """Wait until ``keys`` are published: key → who publishes it. Raises DeadlineError with who has not."""
        self._world.wait_for(self.store, keys, what, self._timeout)

    def read(self, key: str) -> Any:
        """Return a message that is published."""
        return json.loads(self.store.get(key))

    def receive(self, key: str, who: str, what: str) -> Any:
        """Wait for the message that ``who`` publishes, and return it."""
        self.wait({key: who}, what)
        return self.read(key)

    def gather(self, keys: Mapping[str, str], what: str) -> list[Any]:
        """Wait for the messages under ``keys``, and return them in order. Raises as ``wait``."""
        self.wait(keys, what)
        return [self.read(key) for key in keys]

    def put(self, key: str, data: bytes) -> None:
        """Put bytes of any length, in as many entries as they need."""
        first, *further = [data[start : start + PART_BYTES] for start in range(0, max(1, len(data)), PART_BYTES)]
        for index, part in enumerate(further):
            self._set(f"{key}/{index}", part)
        # who sees it finds the others
        self._set(key, b"%d\n" % len(further) + first)

    def take(self, key: str, who: str, what: str, readers: int = 1) -> bytes:
        """Wait for the bytes that ``who`` puts, and return them; the last of their ``readers`` removes them."""
        self.wait({key: who}, what)
        number, _, first = self.store.get(key).partition(b"\n")
        further = [f"{key}/{index}" for index in range(int(number))]
        data = b"".join([first, *map(self.store.get, further)])
        self.clear([key, *further], readers)
        return data

    def _set(self, key: str, part: bytes) -> None:
        self.store.set(key, part)  # type: ignore[arg-type]  # stubs of str

    def clear(self, keys: Sequence[str], readers: int = 1) -> bool:
        """Remove messages once the last of their ``readers`` calls this, and return whether this is the last one."""
        count = f"{keys[0]}/read"
        if readers > 1 and self.store.add(count, 1) < readers:
            return False
        for key in (*keys, count) if readers > 1 else keys:
            self.store.delete_key(key)
        return True
