"""One rank of a preflight: join the job, collect facts with all other ranks; the first rank of every machine writes
them for its launcher, after each part, so that a failure loses no earlier fact."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

from flexrlhf.api import DirectoryFacts, RunStopped, Spec, UserError, make_plans, read_yaml
from flexrlhf.api.engine import BareRank, World, joined_rank
from flexrlhf.measure.facts import (
    HOST_FACTS,
    JOB_FACTS,
    RANK_FACTS,
    ClockFacts,
    HostFacts,
    JobFacts,
    RankFacts,
    SharedFacts,
)
from flexrlhf.measure.network import Network

NUM_PINGS = 5
"""Readings of a clock, of which the fastest counts."""
CPU_SIDE, CUDA_SIDE = 512, 4096
SECONDS = 0.5
"""Time for which products are repeated: a quota of a container is one of each tenth of a second."""
CONNECT_SECONDS = 5.0
"""Longest attempt to connect to a machine."""
_AT_ONCE = 16


class Survey:
    """Parts of a preflight on this rank, in order."""

    def __init__(self, world: World, host: HostFacts, nodes: int, seconds: float, result: Path) -> None:
        """Collect nothing yet.

        host:     facts of this machine
        nodes:    machines of the job
        seconds:  longest wait for another rank
        result:   file for the launcher of this machine
        """
        self._world, self._host, self._nodes, self._seconds, self._result = world, host, nodes, seconds, result
        self._store = dist.PrefixStore("preflight", world.store)
        self._part = 0

    def collect(self) -> None:
        """Collect facts, first those that need no connections between the ranks."""
        job = self._shared(self._gathered())
        job = self._shared(replace(job, clocks=self._clocks(job)))
        job = self._shared(replace(job, directories=self._directories(job)))
        job = self._shared(replace(job, unreachable=self._unreachable(job)))
        if job.unreachable:
            return
        same = not any(host.terms.specs for host in job.hosts[1:])
        plans = make_plans([Spec.parse(read_yaml(text)) for text in self._host.terms.specs]) if same else []
        rank = BareRank(self._world_of_device(job), "preflight", self._seconds)
        network = Network(rank, self._store, job.hosts)
        links = network.check_pairs() if self._world.size > 1 else []
        job = self._shared(replace(job, links=tuple(links)))
        self._shared(replace(job, groups=network.check_groups(plans)))

    def _shared(self, job: JobFacts) -> JobFacts:
        """Return the facts of rank 0 on every rank; the first rank of a machine writes them for its launcher."""
        self._part += 1
        key = f"facts/{self._part}"
        if self._world.rank == 0:
            self._store.set(key, JOB_FACTS.dump_json(job).decode())
        self._await({key: "rank 0"}, "the facts of rank 0", 2)
        text = self._store.get(key)
        if self._world.local_rank == 0:
            fresh = self._result.with_suffix(".writing")
            fresh.write_bytes(text)
            fresh.replace(self._result)
        return JOB_FACTS.validate_json(text)

    def _gathered(self) -> JobFacts:
        """Return the facts of all machines and ranks on rank 0, elsewhere of this machine."""
        host, rank = self._host, self._world.rank
        self._store.set(f"rank/{rank}", RANK_FACTS.dump_json(self._rank_facts()).decode())
        if self._world.local_rank == 0:
            self._store.set(f"host/{host.node}", HOST_FACTS.dump_json(host).decode())
        if rank != 0:
            return JobFacts((host,))
        nodes = {f"host/{node}": f"node {node}" for node in range(self._nodes)}
        ranks = {f"rank/{each}": f"rank {each}" for each in range(self._world.size)}
        self._await({**nodes, **ranks}, "the facts of all ranks")
        first, *others = (HOST_FACTS.validate_json(self._store.get(key)) for key in nodes)
        return JobFacts(
            (first, *(other.without_equals(first) for other in others)),
            tuple(RANK_FACTS.validate_json(self._store.get(key)) for key in ranks),
        )

    def _rank_facts(self) -> RankFacts:
        facts = RankFacts(self._world.rank, self._host.node)
        if self._host.device != "cuda":
            return replace(facts, tflops=measured_tflops(torch.device("cpu"), torch.float32))
        here = self._world.on_gpu
        torch.cuda.set_device(here.device)
        free, total = torch.cuda.mem_get_info()
        # a type that all classes compute in
        tflops = measured_tflops(here.device, torch.float16)
        name, gpu = torch.cuda.get_device_name(), here.gpu_number
        return replace(facts, device=name, gpu=gpu, total=total, free=free, tflops=tflops)

    def _world_of_device(self, job: JobFacts) -> World:
        """Return the world with the back end of the run, unless machines differ in their devices.

        Ranks that share a GPU send through host memory, by gloo.
        """
        are_gpus = all(host.device == "cuda" for host in job.hosts)
        have_own = World.backend_of([rank.gpu for rank in job.ranks]) == "nccl"
        return self._world.on_gpu if are_gpus and have_own else self._world

    def _clocks(self, job: JobFacts) -> tuple[ClockFacts, ...]:
        """Return the clocks of all other machines, on rank 0."""
        others = [host for host in job.hosts if host.node != 0]
        if self._world.rank == 0:
            return tuple(self._clock(host.node, host.ranks[0]) for host in others)
        if self._world.local_rank == 0 and self._host.node != 0:
            for number in range(NUM_PINGS):
                key = f"{self._host.node}/{number}"
                self._await({f"ping/{key}": "rank 0"}, "the clock of rank 0", 2)
                self._store.set(f"pong/{key}", repr(time.time()))
        return ()

    def _clock(self, node: int, rank: int) -> ClockFacts:
        """Return the clock of a node, read halfway between request and response; the fastest reading is the best."""
        readings = []
        for number in range(NUM_PINGS):
            before = time.time()
            self._store.set(f"ping/{node}/{number}", "")
            self._await({f"pong/{node}/{number}": f"rank {rank}"}, f"the clock of node {node}")
            after = time.time()
            theirs = float(self._store.get(f"pong/{node}/{number}"))
            readings.append(ClockFacts(node, theirs - (before + after) / 2, (after - before) / 2))
        return min(readings, key=lambda each: each.uncertainty)

    def _directories(self, job: JobFacts) -> SharedFacts:
        """Return, on rank 0, how the ranks see its directories."""
        probes = [
            replace(mine, probe=first.probe)
            for mine, first in zip(self._host.directories, job.hosts[0].directories, strict=False)
            if first.probe
        ]
        sharing = DirectoryFacts.look(probes, self._world.rank)
        self._store.set(f"seen/{self._world.rank}", json.dumps(asdict(sharing)))
        if self._world.rank != 0:
            return SharedFacts()
        keys = {f"seen/{rank}": f"rank {rank}" for rank in range(self._world.size)}
        self._await(keys, "the run directory")
        found = {rank: json.loads(self._store.get(key)) for rank, key in enumerate(keys)}
        wrong = {rank: each["problem"] for rank, each in found.items()}
        for rank in [rank for rank, each in found.items() if rank != 0 and each["shares"] and not each["problem"]]:
            if not all(each.sees_rank(rank) for each in probes):
                wrong[rank] = f"what it wrote is not seen by rank 0 in {job.hosts[0].directories[0].place}"
        apart = tuple(rank for rank, each in found.items() if not each["shares"])
        return SharedFacts({rank: problem for rank, problem in wrong.items() if problem}, apart)

    def _unreachable(self, job: JobFacts) -> tuple[str, ...]:
        """Return sentences about machines that do not reach each other, on rank 0."""
        host = self._host
        if len(job.hosts) == 1:
            return ()
        if self._world.local_rank == 0:
            problem = unreachable(self._world, self._store, host, job.hosts, self._seconds)
            self._store.set(f"reach/{host.node}", json.dumps(problem))
        if self._world.rank != 0:
            return ()
        keys = {f"reach/{each.node}": f"rank {each.ranks[0]}" for each in job.hosts}
        self._await(keys, "the connections between machines", 2)
        return tuple(filter(None, (json.loads(self._store.get(key)) for key in keys)))

    def _await(self, keys: Mapping[str, str], what: str, times: int = 1) -> None:
        """Wait for keys, ``times`` as long if rank 0 collects them first, so that it names who is missing."""
        self._world.wait_for(self._store, keys, what, times * self._seconds)


def main(host_file: str, nodes: str, wait: str, result: str) -> None:
    """Collect the facts of all machines with all other ranks, for the launcher of this one.

    host_file:  facts of this machine
    nodes:      machines of the job
    wait:       longest wait for another rank, in seconds
    result:     file for the facts
    """
    seconds = float(wait)
    try:
        with joined_rank("cpu", seconds) as world:
            host = HOST_FACTS.validate_json(Path(host_file).read_bytes())
            Survey(world, host, int(nodes), seconds, Path(result)).collect()
            world.meet("the end of the preflight", seconds)
    except (RunStopped, UserError):
        # the launcher prints the sentence
        sys.exit(1)


def measured_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Return TFLOP/s of products of square matrices of ``dtype`` on ``device``."""
    side = CUDA_SIDE if device.type == "cuda" else CPU_SIDE
    first, second = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    product = torch.empty(side, side, dtype=dtype, device=device)
    _multiply(first, second, product)
    began, times = time.monotonic(), 0
    while (passed := time.monotonic() - began) < SECONDS:
        _multiply(first, second, product)
        times += 1
    return 2 * side**3 * times / passed / 1e12


def _multiply(first: torch.Tensor, second: torch.Tensor, product: torch.Tensor) -> None:
    torch.mm(first, second, out=product)
    if product.is_cuda:
        torch.cuda.synchronize()


def unreachable(world: World, store: dist.Store, host: HostFacts, hosts: Sequence[HostFacts], seconds: float) -> str:
    """Return which of the other machines ``host`` does not reach, as one sentence; empty if it reaches all.

    Called by the first rank of every machine at the same time; none stops to listen before all have tried.
    """
    address = world.address
    with socket.create_server((address, 0), backlog=1024) as listener:
        store.set(f"listens/{host.node}", json.dumps([address, listener.getsockname()[1]]))
        others = [other for other in hosts if other.node != host.node]
        keys = {f"listens/{other.node}": f"rank {other.ranks[0]}" for other in others}
        world.wait_for(store, keys, "the addresses of all machines", seconds)
        targets = [json.loads(store.get(key)) for key in keys]
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            problems = list(threads.map(_problem, targets))
        store.set(f"tried/{host.node}", "")
        tried = {f"tried/{other.node}": f"rank {other.ranks[0]}" for other in others}
        world.wait_for(store, tried, "the connections between machines", 2 * seconds)
    return "; ".join(
        f"{host.name} does not reach {target[0]}:{target[1]} of {other.name} ({problem})"
        for other, target, problem in zip(others, targets, problems, strict=True)
        if problem
    )


def _problem(target: tuple[str, int]) -> str:
    """Return why no connection can be made; empty if one can."""
    try:
        with socket.create_connection((target[0], target[1]), timeout=CONNECT_SECONDS):
            return ""
    except TimeoutError:
        return "no response"
    except OSError as error:
        return (error.strerror or str(error)).lower()


if __name__ == "__main__":
    main(*sys.argv[1:])
