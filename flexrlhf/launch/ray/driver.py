"""Launcher of ranks in a Ray cluster: an actor for each planned node runs that node's launcher, driven from here."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from socket import gethostname
from types import FrameType
from typing import Any

from flexrlhf.api import (
    DirectoryFacts,
    Ending,
    HostPort,
    Hosts,
    Interrupted,
    Job,
    Plan,
    RankFactory,
    RankFailure,
    RunOrder,
    StopSignal,
    Terms,
    UserError,
    handled,
    ranks_text,
)
from flexrlhf.api.engine import FailureReporter, end_between_attempts
from flexrlhf.launch.ray.cluster import Bundle, connected, ray_device, require_ray, reserved
from flexrlhf.launch.ray.node import NodeEnd, NodeReport, RayNode

PREFIXES = (
    "FLEXRLHF_",
    "OMP_",
    "MKL_",
    "TORCH_",
    "GLOO_",
    "NCCL_",
    "HF_",
    "WANDB_",
    "MLFLOW_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
    "VLLM_",
    "DS_",
    "PYTORCH_",
    "CUDA_LAUNCH_",
)
"""Beginnings of the driver's variables that all ranks get."""
NAMES = ("PYTHONPATH", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTHONWARNINGS")
START_SECONDS = 120.0
"""Longest wait for the processes of all actors."""
COMPARE_SECONDS = 900.0
"""Longest wait for the digests of all machines."""
SILENCE_SECONDS = 20.0
"""Time without a response after which an actor counts as lost. One that is alive responds in half a second."""
WAIT_SECONDS = 0.2
GRACE_SECONDS = 25.0
"""Time in which the other nodes end by themselves, or are seen to be lost, once one has failed; then they are
interrupted."""
END_SECONDS = 30.0
"""Time after that in which they end; then they are killed."""


@dataclass(frozen=True)
class PlannedNode:
    """Node of the plan, and the actor that runs it.

    number:    in the plan.
    actor:     handle of Ray.
    host:      name of the actor's machine.
    address:   of its Ray node.
    ray_node:  identifier of that.
    port:      that was free there.
    """

    number: int
    actor: Any
    host: str
    address: str
    ray_node: str
    port: int

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"node {self.number} (host {self.host})"


class RayLauncher:
    """Start of all ranks in a Ray cluster, again from the newest checkpoint after a failure.

    Devices are reserved anew for each attempt, since a node may be lost with the ranks.
    """

    failures: tuple[type[Exception], ...] = ()

    def device(self, plan: Plan, hosts: Hosts) -> str:
        """Return the device of the ranks, by the devices of the Ray cluster."""
        require_ray()
        ranks = range(plan.placement.num_ranks)
        return ray_device(plan.spec.cluster.device, len(ranks), plan.cluster.planned_gpu(ranks))

    def __call__(self, job: Job, max_restarts: int, factory: RankFactory | None) -> bool:
        signals = _Signals()
        with connected(), handled(signals.handle):
            try:
                return _run(job, max_restarts, signals)
            except StopSignal as stop:
                raise end_between_attempts(stop, signals.failure) if signals.failure else stop from None
            except KeyboardInterrupt:
                raise Interrupted from None


def _run(job: Job, max_restarts: int, signals: _Signals) -> bool:
    terms = job.terms(max_restarts)
    with ExitStack() as stack:
        for attempt in range(max_restarts + 1):
            with (
                reserved(job.plans[0].cluster, job.device) as (bundles, group),
                _entered(bundles, group) as nodes,
            ):
                _compare_machines(nodes, job, terms)
                if attempt == 0:
                    stack.enter_context(job.directories(True))
                for node in nodes:
                    ranks = ranks_text(job.plans[0].cluster.ranks_on_node(node.number))
                    where = f"host {node.host} ({node.address}, Ray node {node.ray_node[:8]})"
                    print(f"node {node.number}: {ranks} on {where}", flush=True)
                end = _run_nodes(nodes, job, attempt, signals)
            if end.is_well:
                return end.kind == "stopped"
            if end.kind == "interrupted":
                raise Interrupted
            if attempt == max_restarts or end.kind == "refused":
                break
            signals.failure = end.sentence
            print(f"flexrlhf: {end.sentence}; restart {attempt + 1} of {max_restarts}", file=sys.stderr, flush=True)
    raise RankFailure(end.sentence)


@contextmanager
def _entered(bundles: Sequence[Bundle], group: Any) -> Iterator[list[PlannedNode]]:
    """Yield the planned nodes, each with an actor in its bundle; at the end all actors are killed.

    Raises UserError if one cannot run ranks, RankFailure if it does not start.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    actors = [
        ray.remote(RayNode)
        .options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            # Ray would give each rank as many threads as the node has ranks
            runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"} | passed_on(os.environ)},
            max_restarts=0,
            max_task_retries=0,
        )
        .remote()
        for number, bundle in enumerate(bundles)
    ]
    try:
        calls = {f"node {number}": actor.enter.remote(os.getcwd()) for number, actor in enumerate(actors)}
        nodes = []
        for number, place in enumerate(_results(calls, START_SECONDS)):
            if isinstance(place, str):
                raise UserError(place)
            nodes.append(PlannedNode(number, actors[number], *place))
        yield nodes
    finally:
        for actor in actors:
            ray.kill(actor)


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the driver that its actors, and so its ranks, get."""
    return {name: value for name, value in environment.items() if name in NAMES or name.startswith(PREFIXES)}


def _compare_machines(nodes: Sequence[PlannedNode], job: Job, terms: Terms) -> None:
    """Compare terms and directories of each node with the driver's. Raises UserError with a difference."""
    driver = f"the driver (host {gethostname()})"
    with DirectoryFacts.probed(job.plans, makes_probes=True) as directories:
        for each in directories:
            if each.problem:
                raise UserError(f"runs: {each.place} cannot be written ({each.problem})")
        shared = (RunOrder.to_json(job.orders), terms.json, tuple(directories))
        calls = {node.name: node.actor.compare.remote(*shared, node.number, driver) for node in nodes}
        sentence = next(filter(None, _results(calls, COMPARE_SECONDS)), "")
    if sentence:
        raise UserError(sentence)


def _results(calls: Mapping[str, Any], seconds: float) -> list[Any]:
    """Return the results of calls, by the name of the node. Raises RankFailure with a node whose actor is lost."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RuntimeEnvSetupError

    results = []
    deadline = time.monotonic() + seconds
    for node, call in calls.items():
        try:
            results.append(ray.get(call, timeout=max(0.0, deadline - time.monotonic())))
        except (RayActorError, RuntimeEnvSetupError) as error:
            raise RankFailure(f"{node}: its Ray actor has ended before it ran: {reason(error)}") from None
        except GetTimeoutError:
            raise RankFailure(f"{node}: its Ray actor has not responded for {seconds:g} s") from None
    return results


def reason(error: BaseException) -> str:
    """Return the line of an error of Ray that says most: the last one of a traceback inside it, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    inner = [line for line in lines if line.split(":")[0].endswith("Error")]
    return (inner or lines[:1] or [type(error).__name__])[-1]


def _run_nodes(nodes: Sequence[PlannedNode], job: Job, attempt: int, signals: _Signals) -> NodeEnd:
    """Run the launchers of all nodes, which end together, and return how."""
    host = Hosts.LOOPBACK if len({node.address for node in nodes}) == 1 else nodes[0].address
    endpoint, orders = str(HostPort(host, nodes[0].port)), RunOrder.to_json(job.orders)
    size = len(nodes)
    calls = {node.name: node.actor.start.remote(orders, size, node.number, endpoint, attempt) for node in nodes}
    _results(calls, START_SECONDS)
    ends: list[tuple[PlannedNode, NodeEnd]] = []
    urges, failed = [(GRACE_SECONDS, signal.SIGINT), (GRACE_SECONDS + END_SECONDS, signal.SIGKILL)], float("inf")
    with ThreadPoolExecutor(size) as threads, signals.collected() as pending:
        running = {threads.submit(_follow, node): node for node in nodes}
        while running:
            for future in wait(running, WAIT_SECONDS, FIRST_COMPLETED).done:
                node, end = running.pop(future), future.result()
                # an end that was urged explains nothing
                if len(urges) == 2:
                    ends.append((node, end))
                if not end.is_well:
                    failed = min(failed, time.monotonic())
            if urges and time.monotonic() > failed + urges[0][0]:
                pending.append(urges.pop(0)[1])
            while pending:
                number = pending.pop(0)
                for node in running.values():
                    node.actor.signal.remote(number)
    return end_of_job(ends, job)


def _follow(node: PlannedNode) -> NodeEnd:
    """Print the output of a node until its launcher has ended or its actor is lost, and return how."""
    import ray
    from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

    silent = NodeEnd("lost", f"its Ray actor has not responded for {SILENCE_SECONDS:g} s")
    heard = time.monotonic()
    while time.monotonic() - heard < SILENCE_SECONDS:
        try:
            report: NodeReport = ray.get(node.actor.poll.remote(), timeout=SILENCE_SECONDS)
            lines, end = report
        except GetTimeoutError:
            return silent
        except ActorUnavailableError:
            # Ray does not say yet whether it is lost
            time.sleep(WAIT_SECONDS)
            continue
        except RayActorError:
            has_node = any(each["NodeID"] == node.ray_node and each["Alive"] for each in ray.nodes())
            return NodeEnd("lost", "its Ray actor was killed" if has_node else "its Ray node was removed")
        heard = time.monotonic()
        for number, line in lines:
            stream = sys.stdout if number == 1 else sys.stderr
            print(f"[node {node.number}, host {node.host}] {line}", file=stream, flush=True)
        if end is not None:
            return end
    return silent


def end_of_job(ends: Sequence[tuple[PlannedNode, NodeEnd]], job: Job) -> NodeEnd:
    """Return how a job has ended: by the first node that did not end well, or by a loss that explains its failure.

    ``ends``: of the nodes, in their order in time.
    """
    bad = [end for _, end in ends if not end.is_well]
    if not bad:
        return max((end for _, end in ends), key=lambda end: end.kind == "stopped")
    lost = next(((node, end) for node, end in ends if end.kind == "lost"), None)
    if lost is None or bad[0].kind == "interrupted":
        return bad[0]
    node, end = lost
    ranks = job.plans[0].cluster.ranks_on_node(node.number)
    reporter = FailureReporter(job.plans[0], [plan.spec.directory for plan in job.plans], ranks)
    reporter.report({})
    name = f"node {node.number} (host {node.host}; {ranks_text(ranks)})"
    record = f"record: {reporter.record}" if reporter.record else ""
    sentence = "; ".join(filter(None, (f"{name} ended the run, {end.sentence}", reporter.place(), record)))
    return NodeEnd("failed", sentence)


class _Signals:
    """Signals to the driver: they end it before the nodes run, and are passed to these afterwards.

    failure: of the last attempt; empty before one has failed.
    """

    def __init__(self) -> None:
        self.failure = ""
        self._pending: list[int] | None = None
        self._end, self._silence_command = Ending(), Ending.silencer()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """End the driver, or add the signal to the ones for the nodes."""
        if self._pending is None:
            self._end(number, frame)
        else:
            # what is left of the driver then ends with the nodes
            self._end.is_over = True
            self._silence_command()
            self._pending.append(number)

    @contextmanager
    def collected(self) -> Iterator[list[int]]:
        """Yield a list to which signals are added."""
        self._pending = []
        try:
            yield self._pending
        finally:
            self._pending = None
