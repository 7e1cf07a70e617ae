"""The timeline: one span per instruction, there and back, and as a Chrome trace."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from small_runs import plan_of

from flexrlhf.strategies.instructions import Move
from flexrlhf.timeline import Span, Timeline, Trace

CHUNKS = ("algorithm.num_mini_batches=2", "schedule.num_chunks=2")


def test_a_span_has_the_instruction_its_step_and_its_chunk() -> None:
    plan = plan_of([1, 1, 0.5, 0.5], 2, *CHUNKS)
    timeline = Timeline(rank=1, keep_steps=100)
    for instruction in plan.schedule.instructions[:2]:
        span = timeline.open(instruction.kind, instruction.label, 3, instruction.chunk)
        if isinstance(instruction, Move):
            span.bytes_sent = 7
        timeline.close(span)
    run, move = timeline.spans
    assert (run.rank, run.kind, run.label, run.step, run.chunk) == (1, "run", "generate on actor", 3, 0)
    assert (move.kind, move.bytes_sent, run.bytes_sent) == ("move", 7, None)
    assert run.start <= run.end <= move.start <= move.end


def test_an_instruction_that_does_not_end_leaves_no_span() -> None:
    timeline = Timeline(rank=0, keep_steps=100)
    timeline.open("save", "actor", 0, None)
    assert not timeline.spans


def test_spans_survive_the_way_to_another_process() -> None:
    timeline = Timeline(rank=0, keep_steps=100)
    timeline.spans.extend([Span(0, "run", "a", 1, None, 1.5, 2.5), Span(0, "move", "b", 1, 0, 2.5, 3.0, 12)])
    assert Span.from_json(Span.to_json(list(timeline.spans))) == list(timeline.spans)


def test_the_trace_has_a_lane_for_each_rank_and_microseconds_from_the_first_span(tmp_path: Path) -> None:
    spans = [Span(1, "move", "b", 0, 2, 100.5, 101.0, 12), Span(0, "run", "a", 0, None, 100.0, 100.25)]
    Trace(spans, {"device_class": {"0": "any"}}).write(tmp_path / "timeline.json")
    trace = json.loads((tmp_path / "timeline.json").read_text())
    assert trace["otherData"] == {"device_class": {"0": "any"}}
    names = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    assert [(event["tid"], event["args"]["name"]) for event in names] == [(0, "rank 0"), (1, "rank 1")]
    first, second = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert (first["name"], first["cat"], first["tid"], first["ts"], first["dur"]) == ("a", "run", 0, 0, 250_000)
    assert first["args"] == {"step": 0}
    assert (second["ts"], second["dur"]) == (500_000, 500_000)
    assert second["args"] == {"step": 0, "chunk": 2, "bytes_sent": 12}


def test_no_span_gives_an_empty_trace(tmp_path: Path) -> None:
    Trace([], {}).write(tmp_path / "timeline.json")
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"] == []


def test_a_long_run_keeps_the_spans_of_its_last_steps() -> None:
    timeline = Timeline(rank=0, keep_steps=2)
    for step in range(5):
        timeline.close(timeline.open("save", "actor", step, None))
    assert [span.step for span in timeline.spans] == [3, 4]


class QueuedWork:
    """A device that comes to an instant some seconds after the host."""

    def __init__(self, late: float) -> None:
        self.late, self.done = late, False

    def now(self) -> QueuedInstant:
        return QueuedInstant(self, time.time() + self.late)


class QueuedInstant:
    def __init__(self, work: QueuedWork, at: float) -> None:
        self._work, self._at = work, at

    def is_reached(self) -> bool:
        return self._work.done

    def seconds(self) -> float:
        return self._at


@pytest.mark.parametrize("done", [False, True])
def test_spans_have_the_times_of_a_device_once_it_has_come_to_them(done: bool) -> None:
    work = QueuedWork(late=100.0)
    timeline, began = Timeline(rank=0, keep_steps=100, clock=work), time.time()
    span = timeline.open("run", "a", 0, None)
    timeline.begin(span)
    timeline.close(span)
    assert span.start < began + 100 and span.end < began + 100
    work.done = done
    timeline.close(timeline.open("save", "b", 0, None))
    assert (span.start >= began + 100) == done
    first, second = timeline.take()
    assert began + 100 <= first.start <= first.end <= second.start <= second.end
    assert 0 <= first.waited < 1 and second.waited == 0
