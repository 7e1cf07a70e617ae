"""Episodes of one rank, in the processes that run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.environments.base import EpisodeCall, EpisodeReply, is_stale
from flexrlhf.environments.episode_process import EpisodeProcess, Key, make_process
from flexrlhf.user_code.deadline import Deadline


class Episodes:
    """Episodes of one rank, in its share of the processes. Nothing starts before the first call.

    A process replies to one call at a time, unless its episodes are ``async``.
    """

    def __init__(
        self,
        settings: EnvironmentSpec,
        num_processes: int,
        steps: int = 1,
        sampling: Mapping[str, float] | None = None,
    ) -> None:
        """
        steps:     in which an episode may have turns.
        sampling:  temperature, top_p and top_k of the policy, which a program may send with a call.
        """
        self._processes = tuple(make_process(settings, steps, sampling) for _ in range(num_processes))
        self._steps = steps
        self._places: dict[Key, EpisodeProcess] = {}
        # episodes that have ended, of which further sequences may still come
        self._over = set[Key]()
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
                    self._over.add(call.episode)
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
        self._over &= self._places.keys()
        counts = dict.fromkeys(self._processes, 0)
        for key, process in self._places.items():
            counts[process] += key not in self._over
        shares: dict[EpisodeProcess, list[int]] = {}
        for index, call in enumerate(calls):
            if call.episode not in self._places:
                self._places[call.episode] = min(self._processes, key=counts.__getitem__)
                counts[self._places[call.episode]] += 1
            process = self._places[call.episode]
            shares.setdefault(process, []).append(index)
        return shares
