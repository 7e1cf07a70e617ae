"""Ranks of one attempt, each in an actor of its own: the driver starts, polls and ends them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flexrlhf.errors import RankFailure, UserError
from flexrlhf.launch.rank_environment import Meeting, RankPlace, passed_on, rank_variables
from flexrlhf.launch.ray_job.actor import END_SECONDS, ActorPlace, RankActor, RankReport
from flexrlhf.launch.ray_job.cluster import is_alive
from flexrlhf.placement.ray_bundles import NodeBundles

START_SECONDS = 120.0
"""Longest wait for the processes of all actors."""
SILENCE_SECONDS = 20.0
"""Time without a response after which an actor counts as lost. One that is alive responds in half a second."""
WAIT_SECONDS = 0.2
LOOPBACK = "127.0.0.1"


@dataclass
class ActorRank:
    """One rank and its actor.

    position:  among the ranks.
    node:      number of its planned node.
    actor:     handle of Ray.
    place:     machine of the actor.
    poll:      report under way, if any.
    heard:     when the actor responded last, by this machine's clock.
    report:    last report, of a rank that has ended.
    loss:      how the actor was lost; empty while it is there.
    is_node:   whether it was lost with its Ray node.
    """

    position: RankPlace
    node: int
    actor: Any
    place: ActorPlace = field(default_factory=lambda: ActorPlace("", "", "", ()))
    poll: Any = None
    heard: float = 0.0
    report: RankReport | None = None
    loss: str = ""
    is_node: bool = False

    @property
    def rank(self) -> int:
        """Number in the job."""
        return self.position.rank

    @property
    def is_running(self) -> bool:
        """Whether neither its end nor its loss has been seen."""
        return self.report is None and not self.loss

    @property
    def has_failed(self) -> bool:
        """Whether it was lost, or ended with an error."""
        return bool(self.loss) or (self.report is not None and self.report.code != 0)


@contextmanager
def actor_ranks(reserved: Sequence[tuple[NodeBundles, Any]]) -> Iterator[list[ActorRank]]:
    """Yield the ranks in order, each with an actor in its bundle; at the end all actors are killed.

    Raises UserError where one cannot run a rank, RankFailure where it does not start.
    """
    import ray

    made = [rank for group, handle in reserved for rank in _actors_of(group, handle, _size(reserved))]
    ranks = sorted(made, key=lambda each: each.rank)
    try:
        _enter(ranks)
        yield ranks
    finally:
        for each in ranks:
            ray.kill(each.actor)


def _size(reserved: Sequence[tuple[NodeBundles, Any]]) -> int:
    return sum(len(group.ranks) for group, _ in reserved)


def _actors_of(group: NodeBundles, handle: Any, size: int) -> Iterator[ActorRank]:
    """Yield the ranks of a planned node; their actors start by themselves."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    for number, (rank, bundle) in enumerate(zip(group.ranks, group.bundles, strict=True)):
        options = {
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(handle, placement_group_bundle_index=number),
            "runtime_env": {"env_vars": passed_on(os.environ)},
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        actor = ray.remote(RankActor).options(**options).remote()
        yield ActorRank(RankPlace(rank, size, number, len(group.ranks)), group.node, actor)


def _enter(ranks: Sequence[ActorRank]) -> None:
    """Wait until all actors are there, in the driver's directory."""
    places = gathered([(each, each.actor.enter.remote(os.getcwd())) for each in ranks], START_SECONDS)
    for each, place in zip(ranks, places, strict=True):
        if place.problem:
            raise UserError(place.problem)
        each.place = place


def gathered(calls: Sequence[tuple[ActorRank, Any]], seconds: float) -> list[Any]:
    """Return the results of calls. Raises RankFailure with the first actor that has ended or does not respond."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RuntimeEnvSetupError

    results = []
    deadline = time.monotonic() + seconds
    for rank, call in calls:
        on = f" (host {rank.place.host})" if rank.place.host else ""
        try:
            results.append(ray.get(call, timeout=max(0.0, deadline - time.monotonic())))
        except (RayActorError, RuntimeEnvSetupError) as error:
            raise RankFailure(f"rank {rank.rank}{on}: its Ray actor has ended before it ran: {reason(error)}") from None
        except GetTimeoutError:
            raise RankFailure(f"rank {rank.rank}{on}: its Ray actor has not responded for {seconds:g} s") from None
    return results


def reason(error: BaseException) -> str:
    """Return the line of an error of Ray that says most: the last one of a traceback inside it, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    inner = [line for line in lines if line.split(":")[0].endswith("Error")]
    return (inner or lines[:1] or [type(error).__name__])[-1]


def start_ranks(ranks: Sequence[ActorRank], orders: str, attempt: int, max_restarts: int) -> None:
    """Start all ranks. The job's store listens on the loopback address where all are on one machine."""
    addresses = {each.place.address for each in ranks}
    address = LOOPBACK if len(addresses) == 1 else ranks[0].place.address
    (port,) = gathered([(ranks[0], ranks[0].actor.free_port.remote())], START_SECONDS)
    meeting = Meeting(address, port, attempt, max_restarts)
    calls = []
    for each in ranks:
        gpus = [gpu for other in ranks if other.node == each.node for gpu in other.place.gpus]
        calls.append((each, each.actor.start.remote(orders, rank_variables(each.position, meeting, gpus))))
    gathered(calls, START_SECONDS)
    for each in ranks:
        each.heard = time.monotonic()


def poll_ranks(ranks: Sequence[ActorRank]) -> None:
    """Print what the ranks have written since the last call, and see which have ended or are lost."""
    import ray

    running = [each for each in ranks if each.is_running]
    for each in running:
        each.poll = each.poll if each.poll is not None else each.actor.poll.remote()
    waited = [each.poll for each in running]
    ray.wait(waited, num_returns=1, timeout=WAIT_SECONDS)
    ready, _ = ray.wait(waited, num_returns=len(waited), timeout=0)
    for each in running:
        if each.poll in ready:
            _take(each)
        elif time.monotonic() - each.heard > SILENCE_SECONDS:
            each.loss, each.is_node = f"its Ray actor has not responded for {SILENCE_SECONDS:g} s", True


def _take(rank: ActorRank) -> None:
    """Take the report of a poll that has ended."""
    import ray
    from ray.exceptions import ActorUnavailableError, RayActorError

    call, rank.poll = rank.poll, None
    try:
        report: RankReport = ray.get(call)
    except ActorUnavailableError:
        # Ray does not say yet whether it is lost
        time.sleep(WAIT_SECONDS)
        if time.monotonic() - rank.heard > SILENCE_SECONDS:
            rank.loss, rank.is_node = f"its Ray actor has not responded for {SILENCE_SECONDS:g} s", True
    except RayActorError:
        rank.is_node = not is_alive(rank.place.ray_node)
        rank.loss = "its Ray node was removed" if rank.is_node else "its Ray actor was killed"
    else:
        rank.heard = time.monotonic()
        take_report(rank, report)


def take_report(rank: ActorRank, report: RankReport) -> None:
    """Print the lines of a report, and store it where the rank has ended."""
    for number, line in report.lines:
        stream = sys.stdout if number == 1 else sys.stderr
        print(f"[rank {rank.rank}, host {rank.place.host}] {line}", file=stream, flush=True)
    if report.code is not None:
        rank.report = report


def end_ranks(ranks: Sequence[ActorRank]) -> dict[int, RankReport]:
    """End all ranks that run, and return how each of these ended; actors that do not respond are left to Ray."""
    import ray
    from ray.exceptions import RayActorError

    calls = {each.rank: each.actor.stop.remote() for each in ranks if each.is_running}
    ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=END_SECONDS + 5) if calls else ([], [])
    ended = {}
    for each in ranks:
        if each.is_running and calls[each.rank] in ready:
            try:
                take_report(each, ray.get(calls[each.rank]))
            except RayActorError:
                continue
            ended[each.rank] = each.report
    return {rank: report for rank, report in ended.items() if report is not None}


def close_ranks(ranks: Sequence[ActorRank]) -> None:
    """Have the actors that are there remove their files."""
    import ray

    calls = [each.actor.close.remote() for each in ranks if not each.loss]
    if calls:
        ray.wait(calls, num_returns=len(calls), timeout=END_SECONDS)


def hosts_of_ranks(ranks: Sequence[ActorRank]) -> Mapping[int, str]:
    """Return the host of each rank."""
    return {each.rank: each.place.host for each in ranks}
