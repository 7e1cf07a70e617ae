"""Time of all ranks by kind of work, for the shares in the metrics of a step.

Every rank sets its times so far in the job's store after each Run, which waits for no reply; rank 0 reads them when it
writes a row of metrics. A rank whose last instructions are not counted yet has them in the next row.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Mapping

import torch.distributed as dist

from flexrlhf.comm.world import World
from flexrlhf.metrics import Triple
from flexrlhf.strategies.instructions import Instruction, Run, WorkKind
from flexrlhf.timeline import Span, Timeline
from flexrlhf.trainer.execution import Execution, Observer

KINDS = ("generate", "forward", "score", "train", "move", "sync", "wait", "other")
"""Counters: work that has no counter of its own is ``other``."""


def counter_of(instruction: Instruction) -> str:
    """Return the counter of an instruction's time."""
    work = WorkKind.of(instruction.kind, instruction.operator.kind if isinstance(instruction, Run) else None)
    return work if work in KINDS else "other"


class WorkClock:
    """Time of this rank by kind of work, from the spans of its timeline."""

    def __init__(self, timeline: Timeline, now: float) -> None:
        """Start at ``now``, in seconds since the epoch."""
        self._timeline = timeline
        self._end = now
        self._pending: deque[tuple[str, Span]] = deque()
        self.seconds: dict[str, float] = defaultdict(float)

    def add(self, instruction: Instruction, span: Span) -> None:
        """Count an instruction that has ended; on a GPU once the device has come to its end."""
        self._pending.append((counter_of(instruction), span))
        while len(self._pending) > self._timeline.num_unsettled:
            work, settled = self._pending.popleft()
            # a span starts when its columns have arrived
            self.seconds["wait"] += max(0.0, settled.start - self._end)
            self.seconds[work] += max(0.0, settled.end - max(settled.start, self._end))
            self._end = max(self._end, settled.end)

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


class WorkTime(Observer):
    """Times of all ranks in the store, a key each: this rank sets its own, rank 0 reads all."""

    def __init__(self, name: str, world: World, timeline: Timeline) -> None:
        """``name``: of the run."""
        self._store = dist.PrefixStore(f"work/{name}", world.store)
        self._clock = WorkClock(timeline, time.time())
        self._rank, self._num_ranks = world.rank, world.size
        self._total, self._before = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0)
        self._publish()

    def end(self, execution: Execution) -> None:
        """Count an instruction of this rank."""
        self.add(execution.instruction, execution.span)

    def add(self, instruction: Instruction, span: Span) -> None:
        """Count an instruction of this rank that has ended."""
        self._clock.add(instruction, span)
        if isinstance(instruction, Run):
            for kind, seconds in self._clock.take().items():
                self._total[kind] += seconds
            self._publish()

    def _publish(self) -> None:
        self._store.set(str(self._rank), json.dumps(self._total))

    def since_last(self) -> dict[str, float]:
        """Return the time of all ranks since the last call, in seconds, by kind of work. Rank 0 alone calls this."""
        ranks = [json.loads(text) for text in self._store.multi_get([str(rank) for rank in range(self._num_ranks)])]
        now = {kind: sum(times[kind] for times in ranks) for kind in KINDS}
        before, self._before = self._before, now
        return {kind: now[kind] - before[kind] for kind in KINDS}


def time_statistics(
    work: Mapping[str, float], seconds: float, num_rows: int, total: Mapping[str, Triple]
) -> dict[str, Triple]:
    """Return the statistics of the metrics of time.

    work:      time of all ranks by kind, in seconds
    seconds:   time of the step
    num_rows:  of the step
    total:     statistics of the step
    """
    elapsed = sum(work.values())
    shares = {f"time_{kind}": (elapsed, each, 0.0) for kind, each in work.items() if elapsed > 0}
    rates = {"samples_per_second": (seconds, float(num_rows), 0.0)}
    tokens = _tokens(total)
    if tokens is not None:
        rates["tokens_per_second"] = (seconds, tokens, 0.0)
    return {**rates, **shares}


def _tokens(total: Mapping[str, Triple]) -> float | None:
    """Return the response tokens of a step: the sum of the lengths, or the weight of a mean over tokens."""
    if "response_length" in total:
        return total["response_length"][1]
    return total["nll"][0] if "nll" in total else None
