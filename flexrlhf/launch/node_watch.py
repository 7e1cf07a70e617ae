"""Signs of life and failures that the launchers of a job exchange, so that all end with the same sentence.

Each launcher writes one key of the job's store every second and reads the keys of all others.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist

from flexrlhf.comm.store import second_connection
from flexrlhf.launch.failures import Failure

BEAT_SECONDS = 1.0
SETTLE_SECONDS = 7.0
"""Time in which the other launchers publish their view of a failure."""
CLOSE_SECONDS = 5.0
CLOSING_BEAT_SECONDS = 0.1
GONE_SECONDS = 5.0
"""Silence of a launcher that counts as its end once ranks have failed."""


@dataclass
class _Peer:
    """Another node.

    name:     number, host and ranks.
    beat:     number that it wrote last.
    since:    when that changed, by this machine's clock.
    failure:  of its ranks.
    is_done:  whether its launcher has stopped its ranks and reads no more.
    """

    name: str
    beat: int = -1
    since: float = 0.0
    failure: Failure | None = None
    is_done: bool = False


class NodeWatch:
    """Thread of one attempt to run the ranks, which exchanges beats and failures with the other launchers.

    is_store_closed:  whether node 0, which serves the job's store, has ended.
    """

    def __init__(self, store: dist.Store, node_rank: int, names: Sequence[str], silence_seconds: float) -> None:
        """Start. ``names``: of all nodes; ``silence_seconds``: time without a sign of life that means loss."""
        self._store, self._node, self._limit = second_connection(store), node_rank, silence_seconds
        now = time.monotonic()
        self._peers = {n: _Peer(name, since=now) for n, name in enumerate(names) if n != node_rank}
        self._contact = now
        self._own: Failure | None = None
        self.is_store_closed = False
        self._wake, self._stop, self._posted = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._exchange, name="node watch", daemon=True)
        if self._peers:
            self._thread.start()

    def publish(self, failure: Failure) -> None:
        """Let the other launchers read a failure of this node."""
        self._own = failure
        self._wake.set()

    def problem(self) -> Failure | None:
        """Return a failure of another node, or the loss of one; None while all run."""
        now = time.monotonic()
        if failures := [peer.failure for peer in self._peers.values() if peer.failure is not None]:
            return failures[0]
        # node 0 serves the store
        if 0 in self._peers and self.is_store_closed:
            return self._lost(self._peers[0], "has ended: the job's store, which it serves, is closed")
        if 0 in self._peers and now - self._contact > self._limit:
            return self._lost(self._peers[0], f"has not responded for {self._limit:g} s")
        silent = [peer for peer in self._peers.values() if now - peer.since > self._limit]
        return self._lost(silent[0], f"has given no sign of life for {self._limit:g} s") if silent else None

    def settle(self) -> list[Failure]:
        """Wait a little until the other nodes have seen the failure of this one, and return their failures."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline and not all(map(self._is_settled, self._peers.values())):
            time.sleep(0.05)
        settled = filter(self._is_settled, self._peers.values())
        return [peer.failure or self._lost(peer, "has ended or is not reachable") for peer in settled]

    def close(self) -> None:
        """Write this node's failure, if any, once more and stop. Node 0 waits a little until the others have, too."""
        self._stop.set()
        self._wake.set()
        if self._peers:
            # on a lost connection the thread does not return; it ends with the process
            self._posted.wait(CLOSE_SECONDS)
            self._posted.set()
            self._thread.join(CLOSING_BEAT_SECONDS)

    def _is_settled(self, peer: _Peer) -> bool:
        """Whether a peer has published a failure or is gone."""
        return peer.failure is not None or self.is_store_closed or time.monotonic() - peer.since > GONE_SECONDS

    def _lost(self, peer: _Peer, how: str) -> Failure:
        return Failure("node", f"the launcher of {peer.name} {how}", time.time())

    def _exchange(self) -> None:
        beat = 0
        try:
            while not self._posted.is_set():
                beat += 1
                is_done, own = self._stop.is_set(), self._own
                self._store.set(f"beat/{self._node}", json.dumps([beat, own and asdict(own), is_done]))
                self._read()
                self._contact = time.monotonic()
                if is_done and (self._node != 0 or all(peer.is_done for peer in self._peers.values())):
                    break
                self._wake.wait(CLOSING_BEAT_SECONDS if is_done else BEAT_SECONDS)
                self._wake.clear()
        except RuntimeError:
            self.is_store_closed = True
        self._posted.set()

    def _read(self) -> None:
        """Read the keys of the others. None of the keys is missing: all launchers have met."""
        nodes = sorted((self._node, *self._peers))
        now = time.monotonic()
        for node, value in zip(nodes, self._store.multi_get([f"beat/{each}" for each in nodes]), strict=True):
            beat, failure, is_done = json.loads(value)
            peer = self._peers.get(node)
            if peer is not None and beat != peer.beat:
                peer.beat, peer.since, peer.is_done = beat, now, is_done
                peer.failure = Failure(**failure) if failure else None
