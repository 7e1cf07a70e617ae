"""Timeline of the instructions on every rank, as a Chrome trace (chrome://tracing, ui.perfetto.dev).

One lane per rank, one span per instruction; ``args`` are the step, the chunk, of moves and syncs the bytes sent, and on
a GPU the peak of its memory. There a span lasts from where the device begins the work of the instruction to where it
ends it.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter


@dataclass
class Span:
    """One instruction on one rank.

    rank:        where it ran
    kind:        kind of the instruction, such as ``run`` or ``move``
    label:       text of the instruction
    step:        training step
    chunk:       number of the chunk; None for an instruction of the whole step
    start, end:  seconds since the epoch
    bytes_sent:  by this rank, of a move or a sync
    waited:      seconds that a Run waited for its columns before ``start``
    peak_bytes:  most memory of this rank's device until its end; None on a CPU
    """

    rank: int
    kind: str
    label: str
    step: int
    chunk: int | None
    start: float
    end: float = 0.0
    bytes_sent: int | None = None
    waited: float = 0.0
    peak_bytes: int | None = None

    def begin(self) -> None:
        """Start now: the columns have arrived, and the time until now was waiting."""
        now = time.time()
        self.waited, self.start = now - self.start, now


SPANS = TypeAdapter(list[Span])
"""JSON of spans, by which ranks report them."""
KEPT_STEPS = 1000
"""Steps that timeline.json has, up to the last."""


class Instant(Protocol):
    """A moment of a device, which may come to it later than the host."""

    def is_reached(self) -> bool:
        """Return whether the device has come to it."""

    def seconds(self) -> float:
        """Wait for the device; return the time at which it came here, in seconds since the epoch."""


class Clock(Protocol):
    """Clock of a device whose work is queued."""

    def now(self) -> Instant:
        """Return the instant behind what is queued now."""


@dataclass
class _OnDevice:
    """Instants of a span whose times are the host's until the device has come to them.

    start:  of the instruction
    begun:  where its columns had arrived; None: they are not awaited
    end:    of the instruction
    """

    span: Span
    start: Instant
    end: Instant
    begun: Instant | None = None

    def settle(self) -> None:
        """Give the span the times of the device."""
        start = self.start.seconds()
        self.span.start = start if self.begun is None else self.begun.seconds()
        self.span.waited = self.span.start - start if self.begun is not None else 0.0
        self.span.end = self.end.seconds()


class Timeline:
    """Spans of one rank, of the last ``keep_steps`` steps: a long run would fill the memory with them."""

    def __init__(self, rank: int, keep_steps: int, clock: Clock | None = None) -> None:
        """Start without spans. ``clock``: of the device of this rank; None: the host's serves."""
        self.rank = rank
        self.spans: deque[Span] = deque()
        self._keep_steps = keep_steps
        self._clock = clock
        self._start: Instant | None = None
        self._begun: Instant | None = None
        self._unsettled: deque[_OnDevice] = deque()

    def open(self, kind: str, label: str, step: int, chunk: int | None) -> Span:
        """Return the span of an instruction that starts now; one at a time is open."""
        span = Span(self.rank, kind, label, step, chunk, time.time())
        self._start, self._begun = self._clock.now() if self._clock else None, None
        return span

    @property
    def num_unsettled(self) -> int:
        """Number of the last spans whose times are the host's until the device has come to their ends."""
        return len(self._unsettled)

    def begin(self, span: Span) -> None:
        """Start ``span`` now: its columns have arrived."""
        span.begin()
        self._begun = self._clock.now() if self._clock else None

    def close(self, span: Span) -> None:
        """End ``span`` now, and keep it."""
        span.end = time.time()
        if self._clock and self._start:
            self._unsettled.append(_OnDevice(span, self._start, self._clock.now(), self._begun))
        self._settle(waits=False)
        self.spans.append(span)
        while self.spans[0].step <= span.step - self._keep_steps:
            self.spans.popleft()

    def drop(self, step: int) -> None:
        """Forget the spans of ``step``."""
        self._settle(waits=True)
        self.spans = deque(each for each in self.spans if each.step != step)

    def take(self) -> list[Span]:
        """Return the spans since the last call, and forget them."""
        self._settle(waits=True)
        taken = list(self.spans)
        self.spans.clear()
        return taken

    def _settle(self, waits: bool) -> None:
        """Give spans the times of the device, in order, as far as it has come, or all."""
        while self._unsettled and (waits or self._unsettled[0].end.is_reached()):
            self._unsettled.popleft().settle()


def saved_spans(folder: Path) -> Iterator[Span]:
    """Yield the spans that ``append_spans`` has written, by this process and those that the run goes on from."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            yield from SPANS.validate_json(json.loads(line)["spans"])


def write_trace(path: Path, spans: Iterable[Span], facts: dict[str, Any], ranks: int | None = None) -> None:
    """Write a Chrome trace; ``facts`` (weights of each rank, device classes) go to ``otherData``.

    ``ranks``: rows from this one on are of environments; None: none are.
    """
    spans = sorted(spans, key=lambda span: (span.start, span.rank))
    origin = spans[0].start if spans else 0.0
    events = [_event(span, origin) for span in spans]
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": _row_name(rank, ranks)}}
        for rank in sorted({span.rank for span in spans})
    ]
    path.write_text(json.dumps({"traceEvents": names + events, "otherData": facts}))


def _row_name(rank: int, ranks: int | None) -> str:
    return f"rank {rank}" if ranks is None or rank < ranks else f"environments {rank - ranks}"


def _event(span: Span, origin: float) -> dict[str, Any]:
    """Return a span as an event of a Chrome trace, in microseconds after ``origin``."""
    waited = round(span.waited, 6) if span.waited else None
    optional = {
        "chunk": span.chunk,
        "bytes_sent": span.bytes_sent,
        "waited_seconds": waited,
        "peak_bytes": span.peak_bytes,
    }
    return {
        "ph": "X",
        "name": span.label,
        "cat": span.kind,
        "pid": 0,
        "tid": span.rank,
        "ts": round((span.start - origin) * 1e6),
        "dur": round((span.end - span.start) * 1e6),
        "args": {"step": span.step, **{key: value for key, value in optional.items() if value is not None}},
    }


def read_trace(path: Path) -> list[Span]:
    """Return the spans of a file of ``write_trace``, in seconds from the first one's start."""
    return spans_of(json.loads(path.read_text()))


def spans_of(trace: Any) -> list[Span]:
    """Return the spans of what ``write_trace`` has written. Raises ValueError or another error for other values."""
    spans = [_read(event) for event in trace["traceEvents"] if event["ph"] == "X"]
    damaged = next((span for span in spans if not is_sound(span)), None)
    if damaged is not None:
        raise ValueError(f"a span with other values: {damaged}")
    return spans


MOST = 2**53
"""Number up to which a float is exact."""


def is_sound(span: Span) -> bool:
    """Whether the values of a span have their types, and its times are finite."""
    counts = (span.rank, span.step, span.chunk or 0, span.bytes_sent or 0, span.peak_bytes or 0)
    times = (span.start, span.end, span.waited)
    return (
        isinstance(span.kind, str)
        and isinstance(span.label, str)
        and all(isinstance(each, int) and abs(each) <= MOST for each in counts)
        and all(isinstance(each, int | float) and abs(each) <= MOST for each in times)
        and span.rank >= 0
    )


def _read(event: dict[str, Any]) -> Span:
    args, start = event["args"], event["ts"] / 1e6
    return Span(
        rank=event["tid"],
        kind=event["cat"],
        label=event["name"],
        step=args["step"],
        chunk=args.get("chunk"),
        start=start,
        end=start + event["dur"] / 1e6,
        bytes_sent=args.get("bytes_sent"),
        waited=args.get("waited_seconds", 0.0),
        peak_bytes=args.get("peak_bytes"),
    )
