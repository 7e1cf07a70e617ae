"""Timeline of the instructions on every rank, as a Chrome trace (chrome://tracing, ui.perfetto.dev).

One lane per rank, one span per instruction; ``args`` are the step, the chunk, of moves and syncs the bytes sent, and on
a GPU the peak of its memory. There a span lasts from where the device begins the work of the instruction to where it
ends it.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from pydantic import TypeAdapter

MOST = 2**53
"""Number up to which a float is exact."""


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

    @staticmethod
    def to_json(spans: Sequence[Span]) -> str:
        """Return the JSON of spans, by which ranks report them."""
        return _SPANS.dump_json([*spans]).decode()

    @staticmethod
    def from_json(text: str) -> list[Span]:
        """Return the spans of a report."""
        return _SPANS.validate_json(text)

    def begin(self) -> None:
        """Start now: the columns have arrived, and the time until now was waiting."""
        now = time.time()
        self.waited, self.start = now - self.start, now

    @property
    def is_sound(self) -> bool:
        """Whether the values have their types, and the times are finite."""
        counts = (self.rank, self.step, self.chunk or 0, self.bytes_sent or 0, self.peak_bytes or 0)
        times = (self.start, self.end, self.waited)
        return (
            isinstance(self.kind, str)
            and isinstance(self.label, str)
            and all(isinstance(each, int) and abs(each) <= MOST for each in counts)
            and all(isinstance(each, int | float) and abs(each) <= MOST for each in times)
            and self.rank >= 0
        )


_SPANS = TypeAdapter(list[Span])


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

    KEPT_STEPS = 1000
    """Steps that timeline.json has, up to the last."""

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


@dataclass(frozen=True)
class Trace:
    """Chrome trace of a run's instructions.

    spans:  of all ranks; those of a file are in seconds from the first one's start
    facts:  weights of each rank, device classes, ...: its ``otherData``
    """

    spans: Sequence[Span]
    facts: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the trace of a file. Raises ValueError or another error for other files."""
        return cls.of_json(json.loads(path.read_text()))

    @classmethod
    def of_json(cls, trace: Any) -> Self:
        """Return the trace of a file's content. Raises ValueError or another error for other values."""
        spans = [_read(event) for event in trace["traceEvents"] if event["ph"] == "X"]
        damaged = next((span for span in spans if not span.is_sound), None)
        if damaged is not None:
            raise ValueError(f"a span with other values: {damaged}")
        return cls(spans, trace.get("otherData", {}))

    def write(self, path: Path) -> None:
        """Write the trace to a file."""
        spans = sorted(self.spans, key=lambda span: (span.start, span.rank))
        origin = spans[0].start if spans else 0.0
        events = [_event(span, origin) for span in spans]
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": self._row_name(rank)}}
            for rank in sorted({span.rank for span in spans})
        ]
        path.write_text(json.dumps({"traceEvents": names + events, "otherData": self.facts}))

    def _row_name(self, rank: int) -> str:
        return f"rank {rank}"


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
