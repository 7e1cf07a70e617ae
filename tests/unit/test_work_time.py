"""Time by kind of work: every second of a rank is one of the kinds, and the shares add up to 1."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from small_runs import plan_of

from flexrlhf.comm.world import World
from flexrlhf.metrics import METRICS
from flexrlhf.strategies.instructions import Instruction
from flexrlhf.timeline import Span, Timeline
from flexrlhf.trainer.work_time import KINDS, WorkClock, WorkTime, counter_of, time_statistics


def instructions() -> list[Instruction]:
    return list(plan_of([0.5] * 6, 2, "eval={path: held_out.jsonl, every: 1}").schedule.instructions)


def spans() -> Iterator[tuple[Instruction, Span]]:
    """Each instruction waits for a second and takes two."""
    for number, each in enumerate(instructions()):
        yield each, Span(0, each.kind, each.label, 0, None, 3.0 * number + 1, 3.0 * number + 3, waited=1.0)


def test_every_instruction_has_a_kind_of_work() -> None:
    found = {counter_of(each) for each in instructions()}
    assert {"generate", "forward", "train", "move", "sync", "other"} <= found <= set(KINDS)


def test_kinds_are_those_of_the_metrics() -> None:
    assert [f"time_{kind}" for kind in KINDS] == [m.name for m in METRICS if m.name.startswith("time_")]


def test_a_rank_works_or_waits_and_overlapping_spans_count_once() -> None:
    clock = WorkClock(Timeline(0, 10), 0.0)
    for instruction, span in spans():
        clock.add(instruction, span)
    seconds, number = clock.take(), len(instructions())
    assert seconds.pop("wait") == number and sum(seconds.values()) == 2 * number
    end = 3.0 * number
    clock.add(instructions()[0], Span(0, "run", "a", 0, None, end - 1, end + 1))
    assert clock.take() == {"wait": 0.0, "generate": 1.0}


def test_spans_count_once_the_device_has_come_to_their_ends() -> None:
    timeline = Timeline(0, 10)
    clock = WorkClock(timeline, 0.0)
    (first, span), (second, later), *_ = spans()
    timeline._unsettled.append(object())  # type: ignore[arg-type]
    clock.add(first, span)
    assert clock.take() == {}
    clock.add(second, later)
    assert sum(clock.take().values()) == 3.0


def test_rank_0_reads_the_shares_of_all_ranks_since_the_last_row() -> None:
    store = dist.HashStore()
    ranks = [WorkTime("run", World(rank, 2, store, torch.device("cpu"), "gloo"), Timeline(rank, 9)) for rank in (0, 1)]
    now = ranks[0]._clock._end
    run = instructions()[0]
    for rank, seconds in zip(ranks, (1.0, 3.0), strict=True):
        rank._clock._end = now
        rank.add(run, Span(0, "run", "a", 0, None, now + 3 - seconds, now + 3))
    # a key of each rank, which it sets once a Run and without waiting for a reply
    assert store.num_keys() == len(ranks)
    work = ranks[0].since_last()
    assert work["generate"] == pytest.approx(4.0) and work["wait"] == pytest.approx(2.0)
    assert set(ranks[0].since_last().values()) == {0.0}
    row = METRICS.evaluate(time_statistics(work, 4.0, 8, {"response_length": (8.0, 40.0, 0.0)}))
    assert row["time_generate"] == pytest.approx(2 / 3) and row["time_wait"] == pytest.approx(1 / 3)
    assert sum(value for name, value in row.items() if name.startswith("time_")) == pytest.approx(1.0)
    assert (row["samples_per_second"], row["tokens_per_second"]) == (2.0, 10.0)


def test_tokens_are_those_of_responses_or_trained_on() -> None:
    assert METRICS.evaluate(time_statistics({}, 2.0, 4, {"nll": (30.0, 1.0, 1.0)})) == {
        "samples_per_second": 2.0,
        "tokens_per_second": 15.0,
    }
    assert "tokens_per_second" not in METRICS.evaluate(time_statistics({}, 2.0, 4, {}))
