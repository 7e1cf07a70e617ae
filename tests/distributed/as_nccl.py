"""A command whose ranks destroy process groups as NCCL does, and a loop in which a rank fails.

``python -m as_nccl MODULE ...`` is ``python -m MODULE ...``, with this module before the modules of the ranks that it
starts. NCCL's destroy ends messages first, and is called by all ranks of a machine together; torch's watchdog aborts a
process in which it takes too long.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

VARIABLE, FAULT = "FLEXRLHF_TEST_DESTROYED", "FLEXRLHF_TEST_FAULT"
"""Variables with the directory where ranks meet that destroy a group, and with the fault of rank 1 in step 1."""
COLLECTIVE = 3
"""Sum over ranks that rank 1 fails in with the fault ``collective``."""
ABORT_SECONDS = 90.0
POLL_SECONDS = 0.02


def failing(trainer: Any) -> None:
    """Fail in step 1 on rank 1, before it trains."""
    import torch

    for step, batch in enumerate(trainer.batches()):
        experiences = trainer.generate_experience(batch)
        fault = os.environ[FAULT] if (step, os.environ["RANK"]) == (1, "1") else ""
        if (step, os.environ["RANK"]) == (1, "0") and "apart" in os.environ[FAULT]:
            # no connection that closes wakes it, as with NCCL
            time.sleep(ABORT_SECONDS)
        match fault:
            case "exception" | "apart":
                raise RuntimeError("planted")
            case "memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            case "deadline":
                time.sleep(ABORT_SECONDS)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stopped" | "stopped apart":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "nan":
                experiences["advantages"] = experiences["advantages"] * float("nan")
        trainer.train_rlhf(experiences)


def destroy_together() -> None:
    """Have the process groups of this rank destroyed by all their ranks together."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    destroy, place = dist.destroy_process_group, Path(os.environ[VARIABLE])

    def destroyed(group: dist.ProcessGroup | None = None) -> None:
        for each in [group] if group is not None else list(_world.pg_map):
            if _world.pg_map[each][0] == "gloo":
                _meet(place / _world.pg_names[each].replace("/", "-"), len(_world.pg_group_ranks[each]))
        destroy(group)

    dist.destroy_process_group = destroyed  # type: ignore[assignment]


def fail_in_a_sum() -> None:
    """Have this rank fail in its third sum over ranks."""
    import torch.distributed as dist

    reduce, numbers = dist.all_reduce, count(1)

    def reduced(*arguments: Any, **further: Any) -> Any:
        if next(numbers) == COLLECTIVE:
            raise RuntimeError("planted")
        return reduce(*arguments, **further)

    dist.all_reduce = reduced


def _meet(place: Path, number: int) -> None:
    place.mkdir(exist_ok=True)
    (place / os.environ["RANK"]).touch()
    limit = time.monotonic() + ABORT_SECONDS
    while len(list(place.iterdir())) < number:
        if time.monotonic() > limit:
            os.abort()
        time.sleep(POLL_SECONDS)


def main() -> None:
    """Run the module that is the first argument."""
    from flexrlhf.launch.lifetime import quiet_torch

    quiet_torch()
    from flexrlhf.launch import start as launch

    start_ranks = launch.start_ranks

    def start_as_nccl(module: list[str], *arguments: Any, **further: Any) -> None:
        start_ranks(["as_nccl", *module], *arguments, **further)

    launch.start_ranks = start_as_nccl
    start = subprocess.Popen

    def start_session(command: list[str], **further: Any) -> Any:
        return start([*command[:2], "as_nccl", *command[2:]], **further)

    if sys.argv[1] == "called":
        subprocess.Popen = start_session  # type: ignore[assignment,misc]
    if "RANK" in os.environ:
        destroy_together()
    if (os.environ.get("RANK"), os.environ[FAULT]) == ("1", "collective"):
        fail_in_a_sum()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
