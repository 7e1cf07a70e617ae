"""Streams for copies between a device and host memory, one in each direction, next to the stream that computes.

The host waits for none of them. The computing stream waits at once, so that callers need no streams; inside
``overlapping`` it waits in ``join`` and ``arrive``. On a CPU, and without ``debug.copy_streams``, copies are made by
the call.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexrlhf.config.output_settings import NO_SWITCHES, Switches

Pairs = Sequence[tuple[torch.UntypedStorage, Tensor]]
"""Storages of a device, each with host memory of its size."""


@dataclass(frozen=True)
class _Leaving:
    """Device memory that is free once ``event`` is reached: until then its bytes are copied out."""

    start: int
    stop: int
    event: torch.Event


@dataclass
class CopyTimes:
    """Times of copies, and of the computing stream's waits for them, in seconds."""

    copying: float = 0.0
    waiting: float = 0.0
    _spans: deque[tuple[str, torch.Event, torch.Event]] = field(default_factory=deque)

    def add(self, kind: str, start: torch.Event, end: torch.Event) -> None:
        """Add a span, and count those that have ended."""
        self._spans.append((kind, start, end))
        while self._spans and self._spans[0][2].query():
            self._count()

    def finish(self) -> None:
        """Count all spans, which have ended."""
        while self._spans:
            self._count()

    def _count(self) -> None:
        kind, start, end = self._spans.popleft()
        setattr(self, kind, getattr(self, kind) + start.elapsed_time(end) / 1e3)


class CopyStreams:
    """Copies of one rank. Storages are allocated and freed for its computing stream, whose order makes reuse safe."""

    def __init__(self, device: torch.device, switches: Switches = NO_SWITCHES) -> None:
        self._device, self._is_cpu = device, device.type == "cpu"
        self._pins = device.type == "cuda" and switches.pinned_memory
        has_streams = not self._is_cpu and switches.copy_streams
        self._out: torch.Stream | None = torch.Stream(device) if has_streams else None
        self._back: torch.Stream | None = torch.Stream(device) if has_streams else None
        self._owner: str | None = None
        self._arrivals: dict[str, list[torch.Event]] = {}
        self._leaving: list[_Leaving] = []
        # when the computing stream last freed memory, if it has done nothing since
        self._freed: torch.Event | None = None
        self.times = CopyTimes()

    def host_memory(self, size: int) -> Tensor:
        """Return ``size`` bytes of host memory, uint8; copies are slower where the driver does not pin them."""
        memory = torch.empty(size, dtype=torch.uint8)
        if self._pins:
            runtime = torch.cuda.cudart()
            if int(runtime.cudaHostRegister(memory.data_ptr(), size, 0)) == 0:
                weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
        return memory

    @contextmanager
    def overlapping(self, owner: str) -> Iterator[None]:
        """Let copies of ``owner`` overlap what the computing stream does until ``join`` and ``arrive``."""
        self._owner = owner
        try:
            yield
        finally:
            self._owner = None

    def copy_out(self, pairs: Pairs) -> torch.Event | None:
        """Copy storages to host memory; the caller then frees them. Returns when host memory has them."""
        if self._out is None:
            for storage, host in pairs:
                host.untyped_storage().copy_(storage)
            return None
        self._freed = freed = self._computing.record_event()
        last = None
        self._out.wait_event(freed)
        with self._timed("copying", self._out), self._out:
            for storage, host in pairs:
                host.untyped_storage().copy_(storage, non_blocking=True)
                start, last = storage.data_ptr(), self._out.record_event()
                self._leaving.append(_Leaving(start, start + storage.nbytes(), last))
        if self._owner is None:
            self.join()
        return last

    def copy_back(self, pairs: Pairs, copied: torch.Event | None) -> torch.Event | None:
        """Copy host memory, which is complete at ``copied``, to storages just allocated. Returns when they have it.

        A storage whose memory is still copied out waits for that alone, so that both directions are used.
        """
        if self._back is None:
            for storage, host in pairs:
                storage.copy_(host.untyped_storage())
            return None
        self._back.wait_event(self._freed or self._computing.record_event())
        if copied is not None:
            self._back.wait_event(copied)
        with self._timed("copying", self._back), self._back:
            begun = -1
            for last, (storage, host) in sorted(((self._last_in(pair[0]), pair) for pair in pairs), key=lambda x: x[0]):
                if last > begun:
                    self._back.wait_event(self._leaving[last].event)
                    begun = last
                storage.copy_(host.untyped_storage(), non_blocking=True)
        arrival = self._back.record_event()
        if self._owner is None:
            self.join()
            self.wait_for(arrival)
        else:
            self._arrivals.setdefault(self._owner, []).append(arrival)
        return arrival

    def copy(self, source: Tensor, target: Tensor, after: torch.Event | None = None) -> torch.Event | None:
        """Copy a tensor to host memory or back, once the computing stream is here and ``after`` is reached.

        Returns when ``target`` has it; until then the caller keeps both, which are contiguous and of one type.
        """
        stream = self._out if target.device.type == "cpu" else self._back
        if stream is None:
            target.copy_(source)
            return None
        stream.wait_event(self._computing.record_event())
        if after is not None:
            stream.wait_event(after)
        with self._timed("copying", stream), stream:
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def join(self) -> None:
        """Have the computing stream wait until freed memory is copied out, so that it may be used."""
        if self._leaving:
            self.wait_for(self._leaving[-1].event)
            self._leaving.clear()
        self._freed = None

    def arrive(self, owner: str) -> None:
        """Have the computing stream wait for the copies of ``owner`` back to the device."""
        for event in self._arrivals.pop(owner, ()):
            self.wait_for(event)

    def finish(self) -> CopyTimes:
        """Wait for all copies; return their times."""
        self.join()
        for owner in list(self._arrivals):
            self.arrive(owner)
        if not self._is_cpu:
            torch.accelerator.synchronize(self._device)
        self.times.finish()
        return self.times

    def wait_for(self, event: torch.Event) -> None:
        """Have the computing stream wait for ``event``."""
        with self._timed("waiting", self._computing):
            self._computing.wait_event(event)

    @property
    def _computing(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)

    def _last_in(self, storage: torch.UntypedStorage) -> int:
        """Return the index of the last copy out of the memory that ``storage`` now has; -1: there is none."""
        start = storage.data_ptr()
        stop = start + storage.nbytes()
        found = (index for index, each in enumerate(self._leaving) if each.start < stop and start < each.stop)
        return max(found, default=-1)

    @contextmanager
    def _timed(self, kind: str, stream: torch.Stream) -> Iterator[None]:
        start, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        stream.record_event(start)
        yield
        stream.record_event(end)
        self.times.add(kind, start, end)
