"""Episodes whose rows go on by themselves (``rollout.order: free``), event by event: a row decodes a turn in a slot,
awaits its reply, and decodes again as soon as a slot is free."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import ceil, inf
from typing import NamedTuple, Protocol

from flexrlhf.guideline.costs.profiles import Batching

MOST_EVENTS = 512
"""Turns that are followed, of fewer rows if these have more; so many need a few milliseconds."""
LATE_SHARE = 1 / 20
"""Share of the time of a generation so far for which it waits for replies before it carries their rows."""
LEAST_ROWS = 8
"""Rows that are followed at least."""


class EpisodeRow(NamedTuple):
    """Turns of a row in one generation.

    context:    tokens before its first turn
    turns:      tokens that it samples in each turn
    appended:   tokens of the reply to each turn; empty: none
    begins:     whether its episode begins; else it has been carried
    awaits:     whether its last turn has a reply; else the row is carried in the middle of that turn
    num_alike:  rows that read the context of their first turn together: samples of a prompt
    unread:     last tokens of this context that are to be read; None: all of them
    goes_on:    whether it has a later generation
    """

    context: float
    turns: tuple[float, ...]
    appended: tuple[float, ...] = ()
    begins: bool = True
    awaits: bool = True
    num_alike: int = 1
    unread: float | None = None
    goes_on: bool = False

    @property
    def num_replies(self) -> int:
        """Number of replies that it awaits."""
        return len(self.turns) - (not self.awaits)

    @property
    def contexts(self) -> Iterator[float]:
        """Tokens before each turn."""
        before = self.context
        for tokens, reply in zip(self.turns, self.appended or [0.0] * len(self.turns), strict=True):
            yield before
            before += tokens + reply

    def read(self, turn: int, context: float, keeps: bool) -> float:
        """Return the tokens of ``context`` that are read before a turn. ``keeps``: whether those before have been."""
        if turn == 0:
            return context if self.unread is None else self.unread
        return max(1.0, self.appended[turn - 1] if self.appended else 0.0) if keeps else context


class Pace(Protocol):
    """Speed of a replica that generates, in seconds."""

    def step(self, rows: float, context: float) -> float:
        """Return the time of a decoding step of ``rows`` rows of ``context`` tokens."""

    def prefill(self, rows: float, context: float, num_alike: float = 1.0) -> float:
        """Return the time of the passes over the contexts of ``rows`` rows, of ``context`` tokens, which each so many
        rows have together."""


@dataclass(frozen=True)
class ReplyLanes:
    """Processes of an environment, each with an equal part of the rows.

    number:      processes
    around:      time around a call, in which its process does nothing else
    concurrent:  whether a process awaits all of its replies at once, else one after the other
    """

    number: int
    around: float = 0.0
    concurrent: bool = False


@dataclass(frozen=True)
class FollowedEpisodes:
    """Rows of a replica that are followed.

    rows:     their turns
    resets:   time in which each row's episode begins, if it does
    replies:  time of each reply to each row
    scale:    rows of the replica that each stands for
    """

    rows: tuple[EpisodeRow, ...]
    resets: tuple[float, ...]
    replies: tuple[tuple[float, ...], ...]
    scale: float = 1.0

    def with_late(self, late: Sequence[LateRow]) -> FollowedEpisodes:
        """Return these and ``late`` rows, whose first turns begin with their replies."""
        rows, resets, replies = (tuple(each) for each in zip(*late, strict=True)) if late else ((), (), ())
        return replace(self, rows=self.rows + rows, resets=self.resets + resets, replies=self.replies + replies)


class LateRow(NamedTuple):
    """Row that is carried before its reply is there.

    row:      turns that are left
    seconds:  time in which the reply comes
    replies:  times of the replies to these turns
    """

    row: EpisodeRow
    seconds: float
    replies: tuple[float, ...]


@dataclass(frozen=True)
class FreeTimes:
    """Time of a generation whose rows go on by themselves, in seconds.

    prefill:  passes over contexts
    decode:   decoding steps
    waiting:  time in which all rows await replies
    late:     rows that a later generation goes on with, of turns that are left
    """

    prefill: float
    decode: float
    waiting: float
    late: tuple[LateRow, ...] = ()

    @property
    def seconds(self) -> float:
        return self.prefill + self.decode + self.waiting


def followed_rows(rows: int, turns: int) -> int:
    """Return how many of ``rows`` with so many turns are followed."""
    return min(rows, max(LEAST_ROWS, MOST_EVENTS // max(1, turns)))


def free_times(
    episodes: FollowedEpisodes,
    lanes: ReplyLanes,
    slots: int,
    pace: Pace,
    batching: Batching = "refill",
    keeps: bool = False,
    carries: bool = False,
) -> FreeTimes:
    """Return the time in which all rows of ``episodes`` have come to their ends.

    slots:     most rows of the replica that decode at once
    batching:  ``refill``: a row takes a slot whenever one is free; else rows decode in groups, and each of a group goes
               on when all have ended their turns
    keeps:     whether keys and values are kept from turn to turn, so that a turn reads the reply alone
    carries:   whether it ends when nothing is left but rows whose replies are late and that have a later generation
    """
    return _FreeWalk(episodes, lanes, slots, pace, batching, keeps, carries).run()


@dataclass
class _FreeWalk:
    """State of a generation.

    now:      time in seconds
    steps:    decoding steps so far
    live:     (step in which its turn ends, row) of each row that decodes
    before:   sum of the live rows' contexts, less the steps before each came
    size:     rows of the group that decodes
    ended:    rows of a group that have ended their turns
    ready:    rows that have their replies, and no slot
    awaited:  (time, row) of replies
    busy:     time until which each process replies
    turn:     number of each row's turn
    context:  tokens before each row's turn
    """

    episodes: FollowedEpisodes
    lanes: ReplyLanes
    slots: int
    pace: Pace
    batching: Batching
    keeps: bool
    carries: bool
    now: float = 0.0
    steps: float = 0.0
    live: list[tuple[float, int]] = field(default_factory=list)
    before: float = 0.0
    size: int = 0
    ended: list[int] = field(default_factory=list)
    ready: deque[int] = field(default_factory=deque)
    awaited: list[tuple[float, int]] = field(default_factory=list)
    prefill: float = 0.0
    decode: float = 0.0
    waiting: float = 0.0

    def __post_init__(self) -> None:
        self.rows, self.replies, self.scale = self.episodes.rows, self.episodes.replies, self.episodes.scale
        self.turn, self.context = [0] * len(self.rows), [row.context for row in self.rows]
        self.slots = max(1, round(self.slots / self.scale))
        # a followed row has its process for as long as all rows of the process that it stands for
        real = self.lanes.number / self.scale
        self.busy = [0.0] * max(1, round(real))
        self.stretch = len(self.busy) / real

    def run(self) -> FreeTimes:
        """Follow all rows to their ends."""
        for row, its in enumerate(self.rows):
            if its.begins and self.episodes.resets[row]:
                self._call(row, self.episodes.resets[row])
            else:
                self.ready.append(row)
        while self.ready or self.live or self.awaited:
            self._arrive()
            self._admit()
            if self.live:
                self._decode()
            elif not self.ready and self.awaited:
                until = (1 + LATE_SHARE) * self.now
                are_late = self.carries and all(self.rows[row].goes_on for _, row in self.awaited)
                if are_late and self.awaited[0][0] > until:
                    self.waiting, self.now = self.waiting + until - self.now, until
                    break
                self.waiting += max(0.0, self.awaited[0][0] - self.now)
                self.now = max(self.now, self.awaited[0][0])
        return FreeTimes(self.prefill, self.decode, self.waiting, tuple(self._late()))

    def _late(self) -> Iterator[LateRow]:
        """Yield the rows whose replies are not there yet, and that have turns left."""
        for end, row in self.awaited:
            its, turn = self.rows[row], self.turn[row]
            if turn < len(its.turns):
                unread = None if its.unread is None else its.read(turn, self.context[row], keeps=True)
                left = its._replace(
                    context=self.context[row],
                    turns=its.turns[turn:],
                    appended=its.appended[turn:],
                    begins=True,
                    num_alike=1,
                    unread=unread,
                )
                yield LateRow(left, end - self.now, tuple(self.replies[row][turn:]))

    def _call(self, row: int, seconds: float) -> None:
        """Call the environment of ``row``."""
        process, lanes = row % len(self.busy), self.lanes
        begin = max(self.now, self.busy[process]) + lanes.around * self.stretch
        end = begin + (seconds if lanes.concurrent else seconds * self.stretch)
        self.busy[process] = begin if lanes.concurrent else end
        heappush(self.awaited, (end, row))

    def _arrive(self) -> None:
        """Take the replies that are there."""
        while self.awaited and self.awaited[0][0] <= self.now:
            _, row = heappop(self.awaited)
            if self.turn[row] < len(self.rows[row].turns):
                self.ready.append(row)

    def _admit(self) -> None:
        """Give free slots to rows; a pass over their contexts yields the first token of each."""
        if self.live and self.batching != "refill":
            return
        new = [self.ready.popleft() for _ in range(min(len(self.ready), self.slots - len(self.live)))]
        if not new:
            return
        shares = [1.0 if self.turn[row] else 1 / self.rows[row].num_alike for row in new]
        tokens = [self.rows[row].read(self.turn[row], self.context[row], self.keeps) for row in new]
        read = sum(share * each for share, each in zip(shares, tokens, strict=True)) / sum(shares)
        seconds = self.pace.prefill(self.scale * len(new), read, len(new) / sum(shares))
        self.prefill += seconds
        self.now += seconds
        self.size = len(new)
        for row in new:
            sampled = self.rows[row].turns[self.turn[row]]
            heappush(self.live, (self.steps + sampled - 1, row))
            self.before += self.context[row] + 1 - self.steps

    def _decode(self) -> None:
        """Decode until the next row has ended its turn, or a reply is there for a free slot."""
        number = len(self.live)
        left = self.live[0][0] - self.steps
        if left > 0:
            context = self.before / number + self.steps + left / 2
            each = self.pace.step(self.scale * (self.size if self.batching == "static" else number), context)
            is_free = self.batching == "refill" and number < self.slots
            arrival = self.awaited[0][0] - self.now if self.awaited and is_free else inf
            if each > 0 and arrival < left * each:
                left = min(left, max(1.0, ceil(arrival / each)))
            self.steps += left
            self.decode += left * each
            self.now += left * each
        while self.live and self.live[0][0] <= self.steps:
            end, row = heappop(self.live)
            self.context[row] += self.rows[row].turns[self.turn[row]]
            self.before -= self.context[row] - end
            appended = self.rows[row].appended
            self.context[row] += appended[self.turn[row]] if appended else 0.0
            self._end(row)

    def _end(self, row: int) -> None:
        """End a turn of ``row``, which then awaits the reply to it."""
        self.ended.append(row)
        if self.live and self.batching != "refill":
            return
        for each in self.ended:
            number = self.turn[each]
            self.turn[each] += 1
            if number < self.rows[each].num_replies:
                self._call(each, self.replies[each][number])
        self.ended = []
