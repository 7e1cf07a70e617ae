"""Episodes of one rank, in the processes that run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.environments.base import EpisodeCall, EpisodeReply
from flexrlhf.environments.episode_process import EpisodeProcess, Key, make_process
from flexrlhf.environments.sessions import is_stale
from flexrlhf.user_code.deadline import Deadline


class Episodes:
    """Episodes of one rank, in its share of the processes. Nothing starts before the first call.

    A process replies to one call at a time, unless its episodes are ``async``.
    """

    def __init__(self, settings: EnvironmentSpec, num_processes: int, steps: int = 1) -> None:
        """``steps``: of training in which an episode may have turns."""
        self._processes = tuple(make_process(settings, steps) for _ in range(num_processes))
        self._steps = steps
        self._places: dict[Key, EpisodeProcess] = {}
        self._lock = Lock()

    def replies(self, calls: Sequence[EpisodeCall], seconds: float) -> list[EpisodeReply]:
        """Return one reply a call, in order, within ``seconds`` and a few more to end processes.

        Raises nothing for what an environment does: a reply then has a failure, and its episode is over.
        """
        if not calls:
            return []
        with self._lock:
            shares = self._shares(calls)
        deadline = Deadline.after(seconds, "replies of environments")
        given = {
            index: reply
            for process, places in shares.items()
            for index, reply in zip(places, process.submit([calls[index] for index in places], deadline), strict=True)
        }
        replies = [given[index].result() for index in range(len(calls))]
        with self._lock:
            for call, reply in zip(calls, replies, strict=True):
                if call.ends_with(reply):
                    del self._places[call.key]
        return replies

    @property
    def are_concurrent(self) -> bool:
        """Whether a process runs its episodes at once, since they are ``async``; stored with the first reply."""
        return any(process.is_async for process in self._processes)

    @property
    def cpu_seconds(self) -> float:
        """Time that all steps together computed."""
        return sum(process.cpu_seconds for process in self._processes)

    def close(self) -> None:
        """End all processes, within a few seconds."""
        with ThreadPoolExecutor(max(1, len(self._processes))) as threads:
            list(threads.map(lambda process: process.close(), self._processes))

    def _shares(self, calls: Sequence[EpisodeCall]) -> Mapping[EpisodeProcess, list[int]]:
        """Return the places of the calls by process: an episode's own, or the one with the fewest episodes."""
        step = max(call.key[0] for call in calls)
        self._places = {key: process for key, process in self._places.items() if not is_stale(key, step, self._steps)}
        counts = dict.fromkeys(self._processes, 0)
        for process in self._places.values():
            counts[process] += 1
        shares: dict[EpisodeProcess, list[int]] = {}
        for index, call in enumerate(calls):
            if call.key not in self._places:
                self._places[call.key] = min(self._processes, key=counts.__getitem__)
                counts[self._places[call.key]] += 1
            process = self._places[call.key]
            shares.setdefault(process, []).append(index)
        return shares
