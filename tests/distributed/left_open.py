"""Program of a session that nothing leaves: python left_open.py CONFIG; an error of a handler interrupts a read."""

from __future__ import annotations

import signal
import sys
import threading

from flexrlhf import Session
from flexrlhf.errors import UserError
from flexrlhf.launch.session import CalledBatch


class AlarmError(Exception):
    """Error of a handler."""


def interrupt(*_: object) -> None:
    raise AlarmError


def entered(config: str) -> CalledBatch:
    """Return the first batch of a session that a thread enters, which then ends."""
    found: list[CalledBatch] = []
    thread = threading.Thread(target=lambda: found.append(next(iter(Session(config).__enter__().prompts()))))
    thread.start()
    thread.join()
    return found[0]


def main(config: str) -> None:
    batch = entered(config)
    batch.session.generate(batch)
    print(len(batch["tokens"]), "rows")
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.0007)
    try:
        while True:
            batch["tokens"].sum()
    except AlarmError:
        signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        for _ in range(3):
            print(len(batch["tokens"]), "rows")
    except UserError as error:
        print(error)


if __name__ == "__main__":
    main(sys.argv[1])
