"""Generations whose rows go on by themselves, with times computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from flexrlhf.guideline.costs.profiles import Batching
from flexrlhf.guideline.simulation.free_episodes import (
    EpisodeRow,
    FollowedEpisodes,
    FreeTimes,
    ReplyLanes,
    followed_rows,
    free_times,
)

STEP, ROW, READ = 1.0, 0.25, 0.5
LANES = ReplyLanes(8)


class Line:
    """Steps of ``STEP`` and ``ROW`` for each row, and passes of ``READ`` for each context."""

    def step(self, rows: float, context: float) -> float:
        return STEP + ROW * rows

    def prefill(self, rows: float, context: float, num_alike: float = 1.0) -> float:
        return READ * rows / num_alike


def times(
    rows: Sequence[tuple[tuple[float, ...], tuple[float, ...]]],
    lanes: ReplyLanes = LANES,
    slots: int = 64,
    batching: Batching = "refill",
    scale: float = 1.0,
) -> FreeTimes:
    """Return the times of rows, each with the tokens and the replies of its turns."""
    episodes = tuple(EpisodeRow(10.0, turns) for turns, _ in rows)
    followed = FollowedEpisodes(episodes, (0.0,) * len(rows), tuple(replies for _, replies in rows), scale)
    return free_times(followed, lanes, slots, Line(), batching)


def test_one_row_samples_and_waits_in_turn() -> None:
    """The first token of a turn comes with the pass over its context."""
    found = times([((5, 3), (2.0, 7.0))])
    assert found == FreeTimes(prefill=2 * READ, decode=(4 + 2) * (STEP + ROW), waiting=2.0 + 7.0)


@pytest.mark.parametrize("batching", ["refill", "group"])
def test_without_waiting_rows_decode_as_in_plain_generation(batching: Batching) -> None:
    """Of rows with the same turns none leaves its slot; a row alone has the tokens of its turns, one after another."""
    alike = times([((4, 4, 4), (0.0, 0.0, 0.0))] * 6, batching=batching)
    assert alike == FreeTimes(prefill=18 * READ, decode=9 * (STEP + 6 * ROW), waiting=0.0)
    mixed = times([((5, 5), (0.0, 0.0)), ((3, 3), (0.0, 0.0))])
    # both for the shorter one's tokens, then the longer one alone
    assert mixed.decode == 4 * (STEP + 2 * ROW) + 4 * (STEP + ROW)


def test_long_replies_take_their_sum() -> None:
    """Of the row that waits most: rows await their replies at the same time, in processes of their own."""
    found = times([((2, 2), (1000.0, 2000.0)), ((2, 2), (1500.0, 1000.0))])
    assert found.waiting == pytest.approx(3000, rel=0.01)


def test_a_process_replies_to_one_row_after_the_other() -> None:
    rows = [((2,), (10.0,))] * 4
    assert times(rows, ReplyLanes(4)).waiting == 10
    assert times(rows, ReplyLanes(2)).waiting == 20
    assert times(rows, ReplyLanes(1)).waiting == 40
    assert times(rows, ReplyLanes(1, around=1.0)).waiting == 44
    # a process that awaits all replies at once exchanges with one row after the other
    assert times(rows, ReplyLanes(1, around=1.0, concurrent=True)).waiting == 14
    # each row stands for four, in as many processes
    assert times(rows[:1], ReplyLanes(2), scale=4.0).waiting == 20
    assert times(rows[:1], ReplyLanes(1, around=1.0, concurrent=True), scale=4.0).waiting == 14


def test_a_row_whose_reply_is_there_takes_the_slot_of_one_that_waits() -> None:
    """Two rows in one slot: each decodes while the other one waits."""
    rows = [((5, 5), (10.0, 0.0))] * 2
    one, two = times(rows, slots=1), times(rows, slots=2)
    turn = READ + 4 * (STEP + ROW)
    # first turns behind each other; the reply to the first comes while the second row decodes or waits
    assert one.seconds == pytest.approx(turn + 10 + 2 * turn)
    assert one.waiting == pytest.approx(10 - turn)
    assert two.seconds < one.seconds


def test_a_group_goes_on_when_all_have_ended_their_turns() -> None:
    """A static group also computes rows that have ended."""
    rows = [((9, 2), (0.0, 0.0)), ((2, 2), (0.0, 0.0))]
    refill, group, static = (times(rows, batching=batching).decode for batching in ("refill", "group", "static"))
    both, alone = STEP + 2 * ROW, STEP + ROW
    assert group == both + 7 * alone + both
    assert static == 8 * both + both
    assert refill == both + both + 6 * alone + alone


def test_carried_rows_await_no_reply_to_the_turn_that_is_cut() -> None:
    rows = (EpisodeRow(10.0, (3.0,), awaits=False), EpisodeRow(30.0, (3.0,), begins=False))
    found = free_times(FollowedEpisodes(rows, (5.0, 5.0), ((), (4.0,))), ReplyLanes(2), 4, Line())
    # the second row decodes while the first one's episode begins
    carried = READ + 2 * (STEP + ROW)
    assert found.seconds == pytest.approx(max(5 + carried, carried + 4))


def test_a_turn_reads_the_reply_alone_if_keys_and_values_are_kept() -> None:
    class Tokens(Line):
        def prefill(self, rows: float, context: float, num_alike: float = 1.0) -> float:
            return rows * context / num_alike

    row = EpisodeRow(10.0, (5.0, 3.0, 2.0), appended=(4.0, 0.0, 1.0))
    episodes = FollowedEpisodes((row,), (0.0,), ((0.0, 0.0, 0.0),))
    assert free_times(episodes, LANES, 4, Tokens()).prefill == 10 + 19 + 22
    # at least the last token of the turn before
    assert free_times(episodes, LANES, 4, Tokens(), keeps=True).prefill == 10 + 4 + 1
    carried = replace(episodes, rows=(row._replace(unread=2.0),))
    assert free_times(carried, LANES, 4, Tokens(), keeps=True).prefill == 2 + 4 + 1


def test_late_rows_are_carried_when_nothing_is_left_to_decode() -> None:
    """Behind a twentieth of the time so far. They go on in the next generation, once the rest of the reply's time is
    over; a row in its last one is waited for."""
    rows = (
        EpisodeRow(10.0, (3.0, 3.0), appended=(6.0, 1.0), goes_on=True),
        EpisodeRow(10.0, (3.0, 3.0), (5.0, 5.0)),
    )
    episodes = FollowedEpisodes(rows, (0.0, 0.0), ((900.0, 7.0), (8.0, 0.0)))
    found = free_times(episodes, LANES, 4, Line(), carries=True)
    assert found.waiting - 8.0 == pytest.approx(found.seconds / 21)
    (late,) = found.late
    assert late.row == EpisodeRow(19.0, (3.0,), (1.0,), goes_on=True) and late.replies == (7.0,)
    assert late.seconds == pytest.approx(900.0 - found.seconds + 2 * (READ + STEP + 2 * ROW), abs=2 * READ)
    after = free_times(FollowedEpisodes((), (), ()).with_late(found.late), LANES, 4, Line())
    assert after.waiting == pytest.approx(late.seconds + 7.0)
    assert free_times(episodes, LANES, 4, Line()).waiting > 880


def test_free_rows_take_at_most_the_time_of_rounds() -> None:
    """A round takes its longest turn, in slots for all rows, and its longest reply; at any number of rows that stand
    for all of them."""
    random = Random(3)
    for number in (1, 7, 40):
        turns = [tuple(random.randint(1, 40) for _ in range(6)) for _ in range(number)]
        replies = [tuple(random.choice((0.0, 1.0, 5.0, 60.0)) for _ in range(6)) for _ in range(number)]
        rounds = sum(
            READ * number
            + (max(row[turn] for row in turns) - 1) * (STEP + ROW * number)
            + max(row[turn] for row in replies)
            for turn in range(6)
        )
        found = times(list(zip(turns, replies, strict=True)), ReplyLanes(number))
        assert found.seconds <= rounds
        # each row for two, in as many slots and processes, is as long
        twice = times(list(zip(turns, replies, strict=True)), ReplyLanes(2 * number), slots=128, scale=2.0)
        assert twice.waiting == pytest.approx(found.waiting, rel=0.5)
        assert found.decode < twice.decode < 2 * found.decode + 1
    assert (followed_rows(4, 9), followed_rows(10_000, 8), followed_rows(10_000, 1024)) == (4, 64, 8)
