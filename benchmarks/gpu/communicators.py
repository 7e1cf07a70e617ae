"""Memory of communicators, and the time of an all-reduce: ``python -m benchmarks.gpu.communicators DEVICE`` is one rank
of torchrun."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.clock import TimeBudget, Unfinished
from benchmarks.gpu.job import Job
from benchmarks.gpu.results import Found, LeftOut, Row, printed_rows

STAGE = "communicators"
SECONDS = 60
"""Limit of the ranks of one measurement."""
NVLS: dict[str, Mapping[str, str]] = {"": {}, ", without NVLS": {"NCCL_NVLS_ENABLE": "0"}}
"""Variables by measurement: NCCL takes memory for sums in NVLink's switches, where GPUs have them."""
SUMMED_BYTES = {"cuda": 2**28, "cpu": 2**20}


def run_communicators(job: Job, budget: TimeBudget) -> Iterator[Row | LeftOut]:
    """Measure groups of 2, 4 and 8 ranks."""
    for ranks in (2, 4, 8):
        if reason := job.lacks(ranks):
            yield LeftOut(STAGE, f"communicators of {ranks} ranks", reason)
            continue
        for name, variables in NVLS.items() if job.device == "cuda" else (("", NVLS[""]),):
            yield from _measured(ranks, name, variables, job.device, budget)


def _measured(
    ranks: int, name: str, variables: Mapping[str, str], device: str, budget: TimeBudget
) -> Iterator[Row | LeftOut]:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    try:
        printed = budget.run([*launcher, "-m", __name__, device], variables, most=SECONDS)
    except Unfinished as error:
        yield Row(STAGE, f"communicators of {ranks} ranks{name}", f"failed: {error}", {"failed": 1})
        return
    for row in printed_rows(STAGE, printed):
        yield Row(STAGE, row.measurement + name, row.found, row.figures)


def of_one_rank() -> Iterator[Found]:
    """Device memory of communicators of this process alone."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=SECONDS))
    yield from _memory(torch.device("cuda", 0), 8)
    dist.destroy_process_group()


def _memory(device: torch.device, most: int) -> Iterator[Found]:
    """Yield the memory of 1, 2, 4, ... groups of all ranks, at most ``most``, which have each sent something."""
    before, size = _used(device), dist.get_world_size()
    for number in range(1, most + 1):
        began = time.perf_counter()
        dist.all_reduce(torch.zeros(1, device=device), group=dist.new_group(list(range(size))))
        used, seconds = _used(device) - before, time.perf_counter() - began
        # a power of two
        if number & (number - 1) == 0:
            found = f"{used / 1e6:.0f} MB, the last one in {seconds:.2f} s"
            measurement = f"{number} communicators of {size} rank{'s' if size > 1 else ''}"
            yield measurement, found, {"bytes": used, "seconds": seconds}


def _all_reduce(device: torch.device) -> Found:
    """Return the time of a large sum over all ranks, the second one."""
    data = torch.zeros(SUMMED_BYTES[device.type] // 4, device=device)
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        dist.all_reduce(data)
        _used(device)
        seconds = time.perf_counter() - began
    found = f"{1e3 * seconds:.2f} ms, {data.nbytes / seconds / 1e9:.3g} GB/s"
    return f"all-reduce of {data.nbytes / 1e6:.0f} MB over {dist.get_world_size()} ranks", found, {"seconds": seconds}


def _used(device: torch.device) -> int:
    """Return the bytes in use on the GPU once it has nothing to do, on a CPU the bytes of this process."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main(kind: str) -> None:
    """Measure as one rank; the first one prints."""
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timedelta(seconds=SECONDS))
    for found in (*_memory(device, 4), _all_reduce(device)):
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
