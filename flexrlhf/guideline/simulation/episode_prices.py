"""Episodes of a simulated plan: the rows that have a turn, its lengths, and the time of an environment's replies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, inf
from typing import NamedTuple

from flexrlhf.api import BatchShape, EnvironmentSpec, Plan, Run
from flexrlhf.guideline.costs.environment_times import EnvironmentTimes
from flexrlhf.guideline.simulation.calls import replica_rows
from flexrlhf.guideline.simulation.inputs import TextLengths
from flexrlhf.guideline.simulation.rounds import Segment

REPLIES = "environments"
"""Part of the time of an operator that plays episodes."""


class EpisodeRow(NamedTuple):
    """Turns of a row in one generation.

    context:  tokens before its first turn
    turns:    tokens that it samples in each turn
    reply:    tokens of each reply
    begins:   whether its episode begins; else it has been carried
    awaits:   whether its last turn has a reply; else the row is carried in the middle of that turn
    """

    context: float
    turns: tuple[float, ...]
    reply: float = 0.0
    begins: bool = True
    awaits: bool = True

    @property
    def num_replies(self) -> int:
        """Number of replies that it awaits."""
        return len(self.turns) - (not self.awaits)

    @property
    def contexts(self) -> Iterator[float]:
        """Tokens before each turn."""
        before = self.context
        for tokens in self.turns:
            yield before
            before += tokens + self.reply


def crowding(plan: Plan, computing: float) -> float:
    """Return how many times as long replies take where more processes compute than their machine has cores.

    ``computing``: share of its time in which a process computes. Machines without ``cores`` have enough.
    """
    cores = ((count, plan.cluster.cores(node)) for node, count in plan.processes.by_node().items())
    return max([1.0, *(count * computing / found for count, found in cores if found is not None)])


@dataclass(frozen=True)
class EpisodePrices:
    """Episodes of a plan.

    settings:  of its environment
    measured:  times of its calls; None: replies take ``settings.seconds``, and episodes begin at once
    batch:     rows of a step
    lengths:   of their texts
    crowding:  how many times as long replies take, since processes share the cores of their machine
    """

    settings: EnvironmentSpec
    measured: EnvironmentTimes | None
    batch: BatchShape
    lengths: TextLengths
    crowding: float = 1.0

    @cached_property
    def times(self) -> EnvironmentTimes:
        return self.measured or EnvironmentTimes(name=self.settings.name, resets=(), replies=(self.settings.seconds,))

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """Share of the rows that have each turn: as many episodes in a hundred end after the one as after the other."""
        most = self.settings.max_turns
        low, high = 0.0, 1.0
        for _ in range(60 if self.lengths.turns is not None and self.lengths.turns < most else 0):
            middle = (low + high) / 2
            is_more = sum(middle**turn for turn in range(most)) < (self.lengths.turns or most)
            low, high = (middle, high) if is_more else (low, middle)
        return tuple(high**turn for turn in range(most))

    def rows(self, rows: int, turn: int) -> int:
        """Return how many of ``rows`` have a turn, at least one."""
        return max(1, round(self.shares[turn] * rows))

    def lengths_of(self, turn: int) -> TextLengths:
        """Return the lengths of a turn: an equal part of the sampled tokens of a response, behind the parts before and
        the replies to them."""
        turns, cap = sum(self.shares), self.settings.turn_tokens or inf
        replies = self.lengths.replies / turns
        sampled = 1 - self.lengths.replies / self.lengths.mean_response
        parts = tuple(max(1.0, min(cap, sampled * length / turns)) for length in self.lengths.responses)
        prompt = self.lengths.prompt + turn * (sum(parts) / len(parts) + replies)
        return replace(self.lengths, prompt=prompt, responses=parts, prompts=())

    def waiting_seconds(self, run: Run) -> float:
        """Return the time of all calls to the environments of the rows of ``run``: resets, and replies to each turn."""
        return sum(self.reply_seconds(run, turn) for turn in (None, *range(self.settings.max_turns)))

    def reply_seconds(self, run: Run, turn: int | None) -> float:
        """Return the time of the replies to a ``turn`` of all rows of ``run``, or of their resets, on the slowest
        replica."""
        layout = run.layout
        return max(
            self.seconds(
                sum(rows) if turn is None else self.rows(sum(rows), turn),
                self.settings.processes_of(replica, layout.dp),
                is_reset=turn is None,
            )
            for replica, rows in replica_rows(self.batch, layout, run.mini_batches).items()
        )

    def seconds(self, calls: int, processes: int, is_reset: bool = False) -> float:
        """Return the time of so many calls that are made together."""
        return self.crowding * self.times.seconds(calls, processes, is_reset)

    def row_of(self, piece: Segment, carried: float) -> EpisodeRow:
        """Return the turns of a piece of a response, in which turns and replies of their mean lengths alternate.

        carried:  tokens of a piece that does not end its row
        """
        part, reply = self.lengths_of(0).mean_response, self.lengths.replies / sum(self.shares)
        period, end = part + reply, piece.start + piece.tokens
        places = range(int(piece.start // period), max(1, ceil(end / period)))
        bounds = [(max(piece.start, place * period), min(end, place * period + part)) for place in places]
        turns = tuple(high - low for low, high in bounds if high > low)
        ends_turn = piece.tokens < carried or end >= places[-1] * period + part
        return EpisodeRow(self.lengths.prompt + piece.start, turns, reply, not piece.start, ends_turn)
