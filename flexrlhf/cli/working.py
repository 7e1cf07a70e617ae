"""Sign of life on a terminal while a command works for longer than a second."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock, Timer

LONG = 1.0
"""Seconds after which it is shown."""


@contextmanager
def working(task: str) -> Iterator[None]:
    """Show ``task`` and the time on stderr once the body has taken a second, if that is a terminal; then remove it.

    The body prints nothing and starts no process that does.
    """
    if not sys.stderr.isatty():
        yield
        return
    with ExitStack() as stack:
        lock, is_over = Lock(), False

        def begin() -> None:
            # rich takes a while to load
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
            with lock:
                if not is_over:
                    progress = Progress(*columns, console=Console(stderr=True), transient=True)
                    stack.enter_context(progress).add_task(task, total=None)

        timer = Timer(LONG, begin)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            with lock:
                is_over = True
