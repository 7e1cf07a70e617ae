"""Lifetime of a process: a rank lives no longer than its launcher, however that ends. Loads no torch."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from flexrlhf.signals import StopSignal
from flexrlhf.user_code.processes import is_killed_with_parent, keep_output

LAUNCHER = "FLEXRLHF_LAUNCHER"
"""Variable with the process of the launcher of this machine, for its ranks."""


def end_with_launcher() -> None:
    """Have the kernel kill this rank when its launcher dies. The ranks of other launchers are theirs to end."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    is_killed_with_parent()
    # it may have died before
    if os.getppid() != int(launcher):
        os._exit(1)


def has_launcher() -> bool:
    """Return whether ``flexrlhf`` started this rank, and not torchrun or the like."""
    return LAUNCHER in os.environ


def quiet_torch() -> None:
    """Have torch's C++ log errors alone, in this process and its ranks: its warnings of closed connections are pages.

    Before torch is loaded; a level that the user has set stays.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@contextmanager
def ending() -> Iterator[None]:
    """End this process when the body has ended, with the interpreter's exit code and after its exit functions.

    As multiprocessing ends a process: modules are not cleared one by one, which takes a second once torch is loaded.
    """
    keep_output()
    code: object = 0
    try:
        yield
    except SystemExit as end:
        code = end.code or 0
    except KeyboardInterrupt as error:
        code = StopSignal.exit_code(error.number if isinstance(error, StopSignal) else signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    # nothing is left that a Ctrl-C could end in a better way
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)


@contextmanager
def changed_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables, then restore them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
