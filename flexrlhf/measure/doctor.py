"""Checks before a run: facts of this machine, of its ranks and of the other machines, which are then judged."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from flexrlhf.api import (
    DirectoryFacts,
    DiskDemand,
    EngineFacts,
    Fingerprints,
    Hosts,
    Job,
    Plan,
    RankFactory,
    RankFailure,
    Resumption,
    RunStopped,
    UserError,
    check_device,
    check_runs,
    process_directory,
)
from flexrlhf.api.engine import LocalLauncher, NodeRendezvous, run_on_ranks
from flexrlhf.measure.facts import HOST_FACTS, JOB_FACTS, UNLIMITED, Check, HostFacts, JobFacts, united
from flexrlhf.measure.job_checks import check_disk, judge

END_SECONDS = 30.0
"""Longest wait for node 0 to end a preflight before its run begins."""
SHARED_MEMORY = Path("/dev/shm")
_MEMORY = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""Files with the limit of a container and its usage, of both versions of control groups."""
UNLIMITED_BYTES = 2**50
"""Bytes from which a limit of memory is none."""
SHOWN = ("torch", "transformers")
"""Libraries whose versions are always shown."""
NAME = "libraries"


def preflight(
    runs: Sequence[Resumption],
    hosts: Hosts,
    join_seconds: float,
    rank_seconds: float,
    factory: RankFactory | None = None,
) -> list[Check]:
    """Measure this machine, with its ranks all machines, and return the checks; no process and no file is left.

    join_seconds:  longest wait for the launchers of the other machines
    rank_seconds:  longest wait for a rank
    factory:       process that forks the ranks, if it has been started before; None: this call starts one

    Raises UserError under torchrun, and Interrupted on a signal.
    """
    if Hosts.under_torchrun():
        raise UserError("preflight: starts ranks by itself; under torchrun run `flexrlhf doctor` before, without it")
    job, failure = _survey(runs, hosts, NodeRendezvous(hosts, join_seconds), rank_seconds, factory)
    return judge([run.plan for run in runs], job, failure)


def measure_network(plan: Plan, hosts: Hosts) -> float:
    """Return the GB/s of the slowest link between two of the machines, all their ranks together, in one direction.

    Waits as long as a run does. Raises RunStopped if a machine is missing or cannot be reached.
    """
    job, failure = _survey([Resumption(plan)], hosts, NodeRendezvous(hosts), plan.spec.timeout_seconds)
    if failure or not job.links:
        raise RunStopped(f"network: {failure or 'no link was measured; flexrlhf doctor says why'}")
    return min(link.gb_s for link in job.links if link.ends[0] != link.ends[1])


def _survey(
    runs: Sequence[Resumption],
    hosts: Hosts,
    rendezvous: NodeRendezvous,
    rank_seconds: float,
    factory: RankFactory | None = None,
) -> tuple[JobFacts, str]:
    """Return the facts of all machines, and the sentence with which their ranks ended early, if they did."""
    plans, failure = [run.plan for run in runs], ""
    host = host_facts(runs, hosts)
    with DirectoryFacts.probed(plans, hosts.is_first_node) as directories, process_directory() as place:
        host = replace(host, directories=tuple(directories))
        own, result = place / "host.json", place / "facts.json"
        own.write_bytes(HOST_FACTS.dump_json(host))
        limited = plans[0].spec.model_copy(update={"timeout_seconds": rank_seconds})
        module = ["flexrlhf.measure.doctor_rank", str(own), str(hosts.nnodes), str(rank_seconds), str(result)]
        try:
            plan = replace(plans[0], spec=limited)
            run_on_ranks(module, plan, hosts, rendezvous, factory)
        except RankFailure as error:
            failure = str(error)
        finally:
            rendezvous.shutdown()
            # the store's server ends with the last reference to it
            gc.collect()
        if not failure:
            rendezvous.await_end(END_SECONDS)
        job = JOB_FACTS.validate_json(result.read_bytes()) if result.exists() else JobFacts((host,))
    return job, failure


def host_facts(runs: Sequence[Resumption], hosts: Hosts) -> HostFacts:
    """Return the facts of this machine for ``runs``."""
    plans = [run.plan for run in runs]
    device, devices, problem = _device(plans[0], hosts)
    return HostFacts(
        node=hosts.node_rank,
        host=socket.gethostname(),
        ranks=hosts.local_ranks(plans[0].cluster),
        terms=Job(tuple(runs), hosts, device, None).terms(),
        libraries=check_libraries(plans),
        input_problem=_input_problem(plans, device),
        device=device,
        devices=devices,
        problem=problem,
        cores=len(os.sched_getaffinity(0)),
        memory=available_memory(_MEMORY.read_text(), _CGROUP),
        shared=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None,
        open_files=_open_files(),
        disk=united("disk space", map(check_disk, DiskDemand.of(runs))),
    )


def available_memory(meminfo: str, cgroup: Path) -> int:
    """Return the bytes of host memory that are free, by the kernel and by the limit of this container."""
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    free = 1024 * int(fields["MemAvailable"].split()[0])
    for limit, usage in _LIMITS:
        most, used = _number(cgroup / limit), _number(cgroup / usage)
        if most is not None and used is not None and most < UNLIMITED_BYTES:
            free = min(free, max(0, most - used))
    return free


def _number(path: Path) -> int | None:
    """Return the number in a file of the kernel; None if it has none, such as ``max``."""
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdecimal() else None


def _open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _device(plan: Plan, hosts: Hosts) -> tuple[str, int, str]:
    """Return the device of the ranks of this machine, its number of CUDA devices, and why it cannot be that of the
    cluster."""
    count = torch.cuda.device_count()
    try:
        return LocalLauncher().device(plan, hosts), count, ""
    except UserError as error:
        return "cpu", count, str(error)


def _input_problem(plans: Sequence[Plan], device: str) -> str:
    """Return why a model or the data of a run cannot be used on this machine; empty if all can."""
    try:
        for plan in plans:
            check_device(plan.placement, plan.shapes, device)
        check_runs(plans)
    except UserError as error:
        return str(error)
    return ""


def check_libraries(plans: Sequence[Plan]) -> Check:
    """Check the libraries of this machine against the needs of ``plans``."""
    needed = Fingerprints(plans).requirements()
    if needed is None:
        return Check(NAME, "warning", "the ranges of versions are unknown", "install this package with pip")
    return judge_libraries(needed, {each.name: _installed(each.name) for each in needed})


def judge_libraries(needed: Sequence[Requirement], installed: Mapping[str, str | None]) -> Check:
    """Check versions: a missing or too old library fails, one newer than the admitted range is a warning."""
    older, newer = [], []
    for each in needed:
        found = installed[each.name]
        if found is None or _is_older(found, each):
            older.append(f"{each.name} {found or 'missing'}, needs {each.specifier or 'any version'}")
        elif not each.specifier.contains(found, prereleases=True):
            newer.append(f"{each.name} {found}, admitted {each.specifier}")
    if older:
        return Check(NAME, "FAILS", ", ".join(older), f"pip install {_command(needed, older)}")
    if newer:
        return Check(NAME, "warning", ", ".join(newer), f"pip install {_command(needed, newer)}")
    main = [each.name for each in needed if each.name in SHOWN or each.marker is not None]
    return Check(NAME, "ok", ", ".join(_as_tested(name, installed[name] or "", tested_versions()) for name in main))


def tested_versions() -> dict[str, str]:
    """Return the versions that the tests have passed with, by canonical name: ``constraints.txt``."""
    lines = files("flexrlhf").joinpath("constraints.txt").read_text().splitlines()
    return {canonicalize_name(name): found for name, found in (line.split("==") for line in lines)}


def _as_tested(name: str, found: str, tested: Mapping[str, str]) -> str:
    """Return a library with its version, and whether the tests have passed with it or with another one."""
    passed = tested.get(name, tested.get(EngineFacts.cpu_builds().get(name, name)))
    if passed is None:
        return f"{name} {found} (admitted, not tested)"
    same = passed == found.partition("+")[0]
    return f"{name} {found} ({'tested' if same else f'admitted, tested with {passed}'})"


def _command(needed: Sequence[Requirement], lines: Sequence[str]) -> str:
    names = {line.split(" ")[0] for line in lines}
    return " ".join(f"'{each.name}{each.specifier}'" for each in needed if each.name in names)


def _installed(name: str) -> str | None:
    """Return the version of a library, or of its build for CPUs."""
    for each in (name, EngineFacts.cpu_builds().get(name, name)):
        try:
            return version(each)
        except PackageNotFoundError:
            continue
    return None


def _is_older(found: str, needed: Requirement) -> bool:
    try:
        number = Version(found)
    except InvalidVersion:
        return False
    lower = [Version(each.version) for each in needed.specifier if each.operator in (">=", "==", ">", "~=")]
    return any(number.release < bound.release for bound in lower)
