"""Episodes of a simulated plan: the rows that have a turn, its lengths, and the time of an environment's replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import ceil, inf
from random import Random

from flexrlhf.api import BatchShape, EnvironmentSpec, Layout, Plan, Run
from flexrlhf.guideline.costs.environment_times import EnvironmentTimes, share_below
from flexrlhf.guideline.simulation.calls import attempt_shape, mixed, replica_rows, spread
from flexrlhf.guideline.simulation.free_episodes import EpisodeRow, FollowedEpisodes, ReplyLanes, followed_rows
from flexrlhf.guideline.simulation.inputs import TextLengths
from flexrlhf.guideline.simulation.rounds import Segment

REPLIES = "environments"
"""Part of the time of an operator that plays episodes."""


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

    @property
    def reply_tokens(self) -> float:
        """Tokens of a reply, at least one."""
        return max(1.0, self.lengths.replies / sum(self.shares))

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
            for replica, rows in replica_rows(attempt_shape(self.batch, run), layout, run.mini_batches).items()
        )

    def seconds(self, calls: int, processes: int, is_reset: bool = False) -> float:
        """Return the time of so many calls that are made together."""
        return self.crowding * self.times.seconds(calls, processes, is_reset)

    def row_of(self, piece: Segment, carried: float, num_alike: int = 1, unread: float | None = None) -> EpisodeRow:
        """Return the turns of a piece of a response, in which turns and replies of their mean lengths alternate.

        carried:    tokens of a piece that does not end its row
        num_alike:  rows that read their prompt together
        unread:     tokens of a row's context that are to be read if it is carried; None: all
        """
        begins, context = not piece.start, self.lengths.prompt + piece.start
        num_alike, unread = (num_alike, None) if begins else (1, unread)
        if piece.turns:
            turns, appended = tuple(turn.sampled for turn in piece.turns), tuple(turn.reply for turn in piece.turns)
            awaits = piece.turns[-1].share is not None
            return EpisodeRow(context, turns, appended, begins, awaits, num_alike, unread, piece.goes_on)
        part, reply = self.lengths_of(0).mean_response, self.lengths.replies / sum(self.shares)
        period, end = part + reply, piece.start + piece.tokens
        places = range(int(piece.start // period), max(1, ceil(end / period)))
        bounds = [(max(piece.start, place * period), min(end, place * period + part)) for place in places]
        turns = tuple(high - low for low, high in bounds if high > low)
        ends_turn = piece.tokens < carried or end >= places[-1] * period + part
        appended = (reply,) * len(turns)
        return EpisodeRow(context, turns, appended, begins, ends_turn, num_alike, unread, piece.goes_on)

    def lanes(self, layout: Layout) -> ReplyLanes:
        """Return the processes that reply to a rank of ``layout``; ranks that share a replica's rows share these."""
        number = self.settings.processes // layout.dp // layout.dims.row_parts
        return ReplyLanes(max(1, number), self.crowding * self.times.around, self.times.is_concurrent)

    def followed(self, rows: int, num_alike: int) -> FollowedEpisodes:
        """Return some rows that stand for ``rows``, of which ``num_alike`` have a prompt."""
        turns, few = sum(self.shares), followed_rows(rows, round(sum(self.shares)))
        counts = [self.rows(few, turn) for turn in range(self.settings.max_turns)]
        parts = mixed(spread(self.lengths_of(0).responses, few))
        episodes = [
            EpisodeRow(
                self.lengths.prompt,
                (part,) * sum(count > place for count in counts),
                (self.lengths.replies / turns,) * sum(count > place for count in counts),
                num_alike=num_alike,
            )
            for place, part in enumerate(parts)
        ]
        return self.timed(episodes, rows / few)

    def timed(self, episodes: Sequence[EpisodeRow], scale: float) -> FollowedEpisodes:
        """Return ``episodes`` with times of their replies; these are spread over the known ones."""
        replies = iter(self._sampled(self.times.replies, sum(each.num_replies for each in episodes)))
        own = [tuple(islice(replies, each.num_replies)) for each in episodes]
        return self._begun(episodes, own, scale)

    def followed_pieces(self, pieces: Sequence[tuple[EpisodeRow, Segment]], scale: float) -> FollowedEpisodes:
        """Return rows with times of their replies: of turns that are known the times at their shares."""
        rows = [row for row, _ in pieces]
        if not all(piece.turns for _, piece in pieces):
            return self.timed(rows, scale)
        times = self.times.replies or (0.0,)
        own = [
            tuple(self.crowding * share_below(times, turn.share) for turn in piece.turns if turn.share is not None)
            for _, piece in pieces
        ]
        return self._begun(rows, own, scale)

    def _begun(
        self, rows: Sequence[EpisodeRow], replies: Sequence[tuple[float, ...]], scale: float
    ) -> FollowedEpisodes:
        resets = self._sampled(self.times.resets, len(rows)) or [0.0] * len(rows)
        return FollowedEpisodes(tuple(rows), tuple(resets), tuple(replies), scale)

    def _sampled(self, times: Sequence[float], count: int) -> list[float]:
        """Return ``count`` times that are spread over ``times``, in random order; none of no times."""
        sampled = [self.crowding * each for each in spread(times, count)] if times else []
        Random(0).shuffle(sampled)
        return sampled
