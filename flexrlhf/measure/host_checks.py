"""Checks of single machines: devices, memory, inputs, shared memory and open files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from flexrlhf.api import DeviceClass, Plan, UserError, bytes_text, check_fits, counted
from flexrlhf.api.engine import World
from flexrlhf.measure.facts import UNLIMITED, Check, HostFacts, JobFacts, RankFacts, united

SHARED_BYTES = 64 * 2**20
"""Shared memory that a rank may use: NCCL's buffers towards the ranks of its machine, or a worker's queues."""
SPARE_FILES = 256
"""Open files of a rank next to its connections: models, data, libraries, workers."""
SAME_MEMORY = 0.85
"""Share of the memory of its class that a device must have."""


def check_devices(plans: Sequence[Plan], job: JobFacts) -> Check:
    """Check that each host has the devices that the cluster of the plans gives it."""
    lines = [check for host in job.hosts for check in _host_devices(plans[0], host, job)]
    lines += [check for rank in job.ranks if rank.device for check in _rank_device(plans[0], rank)]
    return united("devices", lines)


def _host_devices(plan: Plan, host: HostFacts, job: JobFacts) -> Iterator[Check]:
    count = len(host.ranks)
    if host.problem:
        yield Check("devices", "FAILS", f"{host.name}: {host.problem}")
    elif host.device == "cuda":
        yield _gpus(host, job)
    elif host.devices and plan.spec.cluster.device == "auto":
        seen = f"{host.name}: {counted(count, 'rank')} and {counted(host.devices, 'CUDA device')}, so on CPUs"
        yield Check("devices", "warning", seen, f"use --devices {host.devices}, or cluster.device: cpu")
    elif host.cores < count:
        seen = f"{host.name}: {count} ranks share {host.cores} cores"
        yield Check("devices", "warning", seen, "use fewer devices, or expect slow steps")
    else:
        yield Check("devices", "ok", f"{host.name}: {counted(count, 'rank')} on {counted(host.cores, 'core')}")


def _gpus(host: HostFacts, job: JobFacts) -> Check:
    """Check that no rank shares a GPU; before the ranks have reported theirs, by the number that this host has."""
    gpus = [rank.gpu for rank in job.ranks if rank.gpu]
    own = {rank.gpu for rank in job.ranks if rank.gpu and rank.node == host.node}
    count, devices = len(host.ranks), len(own) or host.devices
    seen = f"{host.name}: {counted(count, 'rank')} on {counted(devices, 'CUDA device')}"
    if count > devices:
        return Check("devices", "warning", f"{seen}, over gloo", f"use --devices {devices}, unless it is a test")
    if World.backend_of(gpus) == "gloo":
        advice = "give each rank a GPU of its own, unless it is a test"
        return Check("devices", "warning", f"{seen}; the job has two ranks on one, so over gloo", advice)
    return Check("devices", "ok", seen)


def _rank_device(plan: Plan, rank: RankFacts) -> Iterator[Check]:
    """Check a CUDA device against the class that the cluster names."""
    name = plan.cluster.devices[rank.rank].device_class if rank.rank < len(plan.cluster.devices) else ""
    figures = DeviceClass.KNOWN.get(name)
    if figures is None:
        return
    is_named = name.partition("-")[0].lower() in rank.device.replace(" ", "").lower()
    if not is_named or rank.total < SAME_MEMORY * 1e9 * figures.memory_gb:
        seen = f"rank {rank.rank}: planned on {name}, is on {rank.device} with {bytes_text(rank.total)}"
        yield Check("devices", "warning", seen, "correct class and memory_gb in cluster.nodes")


def check_memory_plan(plans: Sequence[Plan]) -> Check:
    """Check the plans against the memory that the cluster gives to its devices."""
    name = "planned memory"
    try:
        for plan in plans:
            check_fits(plan)
    except UserError as error:
        return Check(name, "FAILS", str(error))
    highest = max(memory.peak_bytes for plan in plans for memory in plan.memories)
    known = all(memory.is_complete for plan in plans for memory in plan.memories)
    return Check(name, "ok", f"{'at most' if known else 'at least'} {bytes_text(highest)} on a device")


def check_memory_found(plans: Sequence[Plan], job: JobFacts) -> Check:
    """Check the plans against the memory that is free on hosts and devices."""
    lines = [_host_memory(plans, host) for host in job.hosts]
    lines += [_device_memory(plans, rank) for rank in job.ranks if rank.device]
    return united("free memory", lines)


def _host_memory(plans: Sequence[Plan], host: HostFacts) -> Check:
    need = max(sum(_host_bytes(plan, rank, host.device) for rank in host.ranks) for plan in plans)
    seen = f"{host.name}: {bytes_text(need)} planned, {bytes_text(host.memory)} free"
    if need > host.memory:
        return Check("free memory", "FAILS", seen, "end other processes, or use fewer ranks on this machine")
    return Check("free memory", "ok", seen)


def _host_bytes(plan: Plan, rank: int, device: str) -> int:
    if rank >= len(plan.memories):
        return 0
    return plan.memories[rank].host_bytes if device == "cuda" else plan.memories[rank].process_bytes


def _device_memory(plans: Sequence[Plan], rank: RankFacts) -> Check:
    need = max(plan.memories[rank.rank].peak_bytes for plan in plans if rank.rank < len(plan.memories))
    seen = f"rank {rank.rank} ({rank.device}): {bytes_text(need)} planned, {bytes_text(rank.free)} free"
    if need > rank.free:
        return Check("free memory", "FAILS", seen, "end other processes on this device, or see `flexrlhf plan`")
    return Check("free memory", "ok", seen)


def check_host_libraries(hosts: Iterable[HostFacts]) -> Check:
    """Check the libraries of every host; a failure has the host's name."""
    parts = [(host, host.libraries) for host in hosts]
    return united(
        "libraries",
        (part if part.result == "ok" else replace(part, seen=f"{host.name}: {part.seen}") for host, part in parts),
    )


def check_inputs(hosts: Iterable[HostFacts]) -> Check:
    """Check that every host can read models and data."""
    found = list(hosts)
    broken = [Check("inputs", "FAILS", f"{host.name}: {host.input_problem}") for host in found if host.input_problem]
    machines = "this machine" if len(found) == 1 else f"all {len(found)} machines"
    return united("inputs", broken or [Check("inputs", "ok", f"models and data can be read on {machines}")])


def check_shared_memory(host: HostFacts) -> Check:
    """Check the size of /dev/shm on a host."""
    if host.shared is None:
        return Check("shared memory", "warning", f"{host.name}: no /dev/shm", "mount a tmpfs there")
    seen = f"{host.name}: /dev/shm has {bytes_text(host.shared)} free"
    if host.shared < SHARED_BYTES * len(host.ranks):
        advice = f"give it {bytes_text(SHARED_BYTES * len(host.ranks))}, in a container with --shm-size"
        # NCCL ends if it cannot allocate; ranks on CPUs communicate by sockets
        return Check("shared memory", "FAILS" if host.device == "cuda" else "warning", seen, advice)
    return Check("shared memory", "ok", seen)


def check_open_files(host: HostFacts, used: int) -> Check:
    """Check the limit of open files. ``used``: by a rank with all its connections; 0 if not measured."""
    measured = f", a rank with its connections has {used}" if used else ""
    limit = "no limit" if host.open_files >= UNLIMITED else f"limit {host.open_files}"
    seen = f"{host.name}: {limit}{measured}"
    if host.open_files < used + SPARE_FILES:
        return Check("open files", "FAILS", seen, f"ulimit -n {max(4096, 2 * used)}")
    return Check("open files", "ok", seen)
