"""Time from a command to its first step and to its end, and of a restart after a killed rank; memory of the ranks.

    python -m benchmarks.start_up [--ranks 2] [--times 5]

Two steps of a toy PPO, one thread a rank; medians. Compare two versions of the package on one idle machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from benchmarks.many_ranks import write_config

ENDLESS = 10_000


@contextmanager
def command(ranks: int, *arguments: str, **changes: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a toy PPO with changed settings; at the end it is interrupted, if it runs."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        path = write_config(Path(directory), "co-located", ranks)
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))
        words = [sys.executable, "-m", "flexrlhf", "run", str(path), *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            yield process
            process.send_signal(signal.SIGINT)
            assert process.stdout is not None, "it is a pipe"
            process.stdout.read()


def await_line(process: subprocess.Popen[str], *signs: str) -> float:
    """Return when the command prints a line with all ``signs``."""
    assert process.stdout is not None, "it is a pipe"
    for line in process.stdout:
        if all(sign in line for sign in signs):
            return time.perf_counter()
    raise SystemExit(f"the command ended before it printed {' '.join(signs)}")


def ranks_of(pid: int) -> list[int]:
    """Return the processes of ranks and of their factory."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def first_step(ranks: int) -> float:
    """Return the seconds to the end of the first step."""
    began = time.perf_counter()
    with command(ranks, steps=ENDLESS) as process:
        return await_line(process, "  step ") - began


def whole_run(ranks: int) -> float:
    """Return the time of a run with one step, in seconds."""
    began = time.perf_counter()
    with command(ranks, steps=1) as process:
        assert process.stdout is not None, "it is a pipe"
        process.stdout.read()
        process.wait()
        return time.perf_counter() - began


def restart(ranks: int) -> float:
    """Return the seconds from the kill of the last rank to the end of the next step."""
    with command(ranks, "--max-restarts", "1", steps=ENDLESS, checkpoint={"every": 1}) as process:
        await_line(process, "  step 4/")
        os.kill(ranks_of(process.pid)[-1], signal.SIGKILL)
        killed = time.perf_counter()
        await_line(process, "restart 1")
        return await_line(process, "  step ") - killed


def memory(ranks: int) -> float:
    """Return the MB of all ranks and their factory, each shared page once."""
    with command(ranks, steps=ENDLESS) as process:
        await_line(process, "  step 5/")
        files = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in ranks_of(process.pid)]
    return sum(int(line.split()[1]) for text in files for line in text.splitlines() if line.startswith("Pss:")) / 1e3


FIGURES: dict[str, Callable[[int], float]] = {
    "first step, s": first_step,
    "run of one step, s": whole_run,
    "restart, s": restart,
    "memory, MB": memory,
}


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.start_up",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    for name, figure in FIGURES.items():
        found = [figure(options.ranks) for _ in range(options.times)]
        print(f"{name:20} {median(found):8.2f}   of {', '.join(f'{each:.2f}' for each in sorted(found))}", flush=True)


if __name__ == "__main__":
    main()
