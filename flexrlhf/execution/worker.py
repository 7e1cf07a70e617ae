"""One rank: join the job, then execute its runs one after another.

Started by ``launch`` through torch's elastic agent, or by torchrun. Every rank makes the plan again; it is a pure
function of the spec.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from flexrlhf.comm.world import World, open_world
from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import parse_spec
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.errors import RunStopped, UserError
from flexrlhf.execution.memory_meter import MemoryMeter
from flexrlhf.execution.trainer import Trainer
from flexrlhf.plan.inputs import load_run_data
from flexrlhf.plan.pipeline import make_plan


def work(specs: Sequence[Spec]) -> None:
    """Execute the runs of ``specs`` in order on this rank; all runs of a command share the job's ranks."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    with open_world(specs[0].cluster.device, specs[0].timeout_seconds) as world:
        meter = MemoryMeter(world.device)
        for spec in specs:
            # between runs most objects are those of libraries: a run's collections of garbage need not search them
            gc.collect()
            gc.freeze()
            _run(spec, world, meter)
            # the next run may read what a rank of this one has just written
            world.meet(f"the end of {spec.name}", spec.timeout_seconds)


def _run(spec: Spec, world: World, meter: MemoryMeter) -> None:
    """Plan and execute one run; afterwards nothing refers to its trainer."""
    plan = make_plan(spec)
    trainer = Trainer(plan, world, load_run_data(plan), spec.directory, meter)
    trainer.run()
    trainer.close()


@record
def main(specs_file: str) -> None:
    """Execute the runs of a file of specs; ``launch`` reports an error by its first line."""
    # Ctrl-C reaches every process of the terminal; a rank that waits inside a collective could not handle it in Python
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.excepthook = _print_traceback
    # extensions report objects that are frozen at the exit as leaks
    atexit.register(gc.unfreeze)
    # FSDP2 and DeepSpeed use names of torch that it has renamed: nothing that a user could correct
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    work([parse_spec(read_yaml(text)) for text in json.loads(Path(specs_file).read_text())])


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback, except for errors that the launcher prints as one sentence."""
    if not issubclass(kind, UserError | RunStopped):
        sys.__excepthook__(kind, error, trace)
