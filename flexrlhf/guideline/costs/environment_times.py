"""Times of an environment, and how long some of its replies take in several processes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from random import Random

from pydantic import BaseModel, ConfigDict

TRIALS = 16
"""Times that calls are sampled, of which the mean is taken."""
MOST_SAMPLED = 4096
"""Calls beyond which each takes the mean."""


class EnvironmentTimes(BaseModel):
    """Times of an environment's calls, in seconds.

    name:           the environment, or its tools, as the YAML has it
    resets:         beginnings of episodes, ascending
    replies:        replies to turns, ascending
    around:         time around a call: to send it to its process and to read its reply
    is_concurrent:  whether a process runs its episodes at once (``async``), else one after the other
    computing:      share of these times in which a core computes; the rest it waits, for a network or a service
    failures:       failed calls, whose times are left out
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    resets: tuple[float, ...]
    replies: tuple[float, ...]
    around: float = 0.0
    is_concurrent: bool = False
    computing: float = 0.0
    failures: int = 0

    def seconds(self, calls: int, processes: int, is_reset: bool = False) -> float:
        """Return the expected time of so many calls that are made together, each process with an equal part."""
        times = self.resets if is_reset else self.replies
        if not calls or not times:
            return 0.0
        return _longest(times, calls, processes, self.is_concurrent) + self.around * -(-calls // processes)


@lru_cache(maxsize=1024)
def _longest(times: tuple[float, ...], calls: int, processes: int, is_concurrent: bool) -> float:
    """Return the mean time of the process that takes longest, of calls with times sampled from ``times``."""
    if len(set(times)) == 1 or calls > MOST_SAMPLED:
        return sum(times) / len(times) * (1 if is_concurrent else -(-calls // processes))
    random = Random(0)
    total = 0.0
    for _ in range(TRIALS):
        sampled = random.choices(times, k=calls)
        total += max(sampled) if is_concurrent else max(sum(sampled[first::processes]) for first in range(processes))
    return total / TRIALS


def share_below(times: Sequence[float], share: float) -> float:
    """Return the value that a ``share`` of ascending ``times`` does not exceed."""
    return times[min(len(times) - 1, int(share * len(times)))]
