"""Refusals between the machines of a job that has not begun: node 0's to the ones that join it, another's to node 0.

Nothing in the job's store is authenticated by itself. A machine that joins ends because node 0 says so, as it would by
any other word of the endpoint that its user has named; node 0 ends by the refusal of a machine with its secret alone.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from socket import gethostname

import torch.distributed as dist

from flexrlhf.comm.store import Endpoint
from flexrlhf.config.job_secret import JobSecret
from flexrlhf.errors import RunStopped, UserError, one_line

REFUSED = "refused"
"""Key of node 0's sentence."""
COUNT, REFUSAL, READ = "refusals", "refusal", "refusals-read"
"""Keys of the number of machines that could not join, of each one's refusal, and of the machines that know node 0's."""
LISTEN_SECONDS = 4.0
"""Time in which node 0 says to the machines that wait for it that it has ended; they look five times a second."""
MOST = 20
"""Refusals that node 0 prints."""


def agreement_store(store: dist.Store) -> dist.Store:
    """Return the part of a job's store in which its machines agree."""
    return dist.PrefixStore("agreement", store)


def refuse_others(endpoint: Endpoint, others: int, sentence: str) -> None:
    """Say on node 0, for LISTEN_SECONDS or until all ``others`` have read it, why the job does not begin."""
    with suppress(UserError):
        # where nothing can listen, nobody waits
        store = agreement_store(endpoint.serve(True, LISTEN_SECONDS))
        store.set(REFUSED, sentence)
        deadline = time.monotonic() + LISTEN_SECONDS
        while time.monotonic() < deadline and store.add(READ, 0) < others:
            time.sleep(0.05)


def check_refused(store: dist.Store) -> None:
    """Raise RunStopped, on a machine that joins, if node 0 has ended before the job began."""
    if store.check([REFUSED]):
        sentence = one_line(store.get(REFUSED).decode(errors="replace"))
        store.add(READ, 1)
        raise RunStopped(f"the first machine of the job has ended before it began: {sentence}")


def write_refusal(store: dist.Store, sentence: str) -> None:
    """Say to node 0 why this machine does not join."""
    store.set(f"{REFUSAL}/{store.add(COUNT, 1)}", JobSecret.here().signed(REFUSAL, f"{gethostname()}\n{sentence}"))


@dataclass
class Refusals:
    """Refusals of machines that could not join, as node 0 reads them. ``store``: of the agreement."""

    store: dist.Store
    _seen: int = field(default=0, init=False)

    def check(self) -> None:
        """Raise UserError with the refusal of a machine that has the secret of the job; print another's."""
        while self._seen < MOST and self.store.check([key := f"{REFUSAL}/{self._seen + 1}"]):
            self._seen += 1
            value = self.store.get(key).decode(errors="replace")
            host, _, words = value.partition("\n")[2].partition("\n")
            sentence = f"a machine that would join (host {host}) was refused: {words}"
            if JobSecret.here().value and _is_signed(value):
                raise UserError(sentence)
            line = f"flexrlhf: {sentence}; it has not the secret of this job, so node 0 waits for another"
            print(one_line(line), file=sys.stderr, flush=True)


def _is_signed(value: str) -> bool:
    try:
        JobSecret.here().verified(REFUSAL, value)
    except UserError:
        return False
    return True
