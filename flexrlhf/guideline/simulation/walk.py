"""The trainer's loop on a clock: when every instruction begins and ends, if each takes a given time.

Ranks with the same models do the same at the same time, so they are one *block*. The simulator walks the instructions
of a plan, the search the calls of a candidate. A copy has memory for one transfer of weights in the background: it
begins once those before it are stored, and their source sends the next ones once it has ended. Copies between a device
and host memory are made next to its work, one after the other in each direction. Not simulated is that a
sender of rows waits before the third Move on an edge whose first has not arrived.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

PERIODS = 3
"""Periods that are walked before some are measured: by then every step has the same batches in flight."""


@dataclass(frozen=True)
class SteadySteps:
    """Batches of a run on which the time of a settled step is measured.

    With a lag long and short steps may alternate for ever, since the cycle of waits goes through as many batches as are
    in flight: that many periods are measured.

    lag:     steps by which some instructions run behind others
    period:  steps after which the same instructions are due again
    """

    lag: int
    period: int

    @classmethod
    def of(cls, lags: Iterable[int], every: Iterable[int]) -> Self:
        """Return the batches for a list of instructions, each with its lag and the steps between its turns."""
        return cls(max(lags, default=0), math.lcm(*every))

    @property
    def measured(self) -> int:
        """Batches that are measured."""
        return (1 + self.lag) * self.period

    @property
    def walked(self) -> int:
        """Batches that are walked: some to settle, those that are measured, those that drain."""
        return PERIODS * self.period + self.measured + self.lag

    @property
    def last(self) -> int:
        """The last measured batch: while later ones drain nothing new is generated."""
        return self.walked - 1 - self.lag


@dataclass(frozen=True, slots=True)
class TimedInstruction:
    """One instruction of the list, with its duration.

    blocks:    blocks that execute it
    seconds:   its duration
    after:     positions of instructions of the same batch whose results it reads
    together:  whether its blocks begin at the same time
    blocking:  False for a Move, which proceeds while its blocks go on
    lag:       steps by which it runs behind generation
    every:     steps from one time that it is due to the next
    delays:    seconds that the result of each of ``after`` takes to arrive; empty: none
    fills:     number of a copy whose weights it brings while its blocks go on; -1: of none
    uses:      copies by number, whose weights must have come before it begins
    sends:     blocks that send the weights that it brings, and wait for the end of the transfer before
    copies:    whether it copies a model out to host memory or back, while its blocks go on; empty: neither
    model:     number of that model
    needs:     models by number, which must be on the device before it begins
    """

    blocks: tuple[int, ...]
    seconds: float
    after: tuple[int, ...] = ()
    together: bool = True
    blocking: bool = True
    lag: int = 0
    every: int = 1
    delays: tuple[float, ...] = ()
    fills: int = -1
    uses: tuple[int, ...] = ()
    sends: tuple[int, ...] = ()
    copies: Literal["", "out", "back"] = ""
    model: int = -1
    needs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Visit:
    """One execution of an instruction by one block; times in seconds from the start of the run.

    index:    position of the instruction
    step:     number of the batch
    block:    the block
    start:    beginning
    end:      end
    arrived:  when the block reached it
    ready:    when all that it reads was there
    """

    index: int
    step: int
    block: int
    start: float
    end: float
    arrived: float = 0.0
    ready: float = 0.0


@dataclass(frozen=True)
class WalkResult:
    """All visits of a walk. ``ends``: when each batch was done, by step."""

    visits: tuple[Visit, ...]
    ends: tuple[float, ...]


Due = Callable[[int, int], bool]
"""Whether the instruction at a position is due for a batch (its step may be outside the run)."""
Durations = Callable[[int, int], float]
"""Time of the instruction at a position for a batch."""


@dataclass
class _Clock:
    """State of a walk.

    seconds: time of each instruction
    free:    when each block has ended its last instruction
    done:    when results of (step, position) are there
    filled:  when the newest weights of each copy are there that come in the background
    link:    when the last weights have come so; they share a link
    stored:  when a copy that the last weights have come to was used first, which stores them
    copiers: when the copies of a block in a direction are done, which are made one after the other
    left:    when the memory of models that leave a block is free
    moved:   when a model is copied in a direction
    visits:  visits so far
    """

    instructions: Sequence[TimedInstruction]
    seconds: Durations
    free: list[float]
    done: dict[tuple[int, int], float] = field(default_factory=dict)
    filled: dict[int, float] = field(default_factory=dict)
    link: float = 0.0
    stored: dict[int, float] = field(default_factory=dict)
    copiers: dict[tuple[int, str], float] = field(default_factory=dict)
    left: dict[int, float] = field(default_factory=dict)
    moved: dict[tuple[int, str, int], float] = field(default_factory=dict)
    visits: list[Visit] = field(default_factory=list)

    def execute(self, index: int, step: int) -> float:
        """Execute the instruction at ``index`` for batch ``step``; return when the last of its blocks has ended."""
        instruction = self.instructions[index]
        if instruction.copies:
            last = max(self._copy(index, instruction, step, block) for block in instruction.blocks)
            self.done[step, index] = last
            return last
        self._await_copies(instruction)
        if instruction.fills >= 0:
            last = self._in_background(index, instruction, step)
        elif instruction.together or not instruction.blocking:
            last = self._jointly(index, instruction, step)
        else:
            last = max(self._alone(index, instruction, step, block) for block in instruction.blocks)
        self.done[step, index] = last
        return last

    def _copy(self, index: int, instruction: TimedInstruction, step: int, block: int) -> float:
        """Begin to copy a model in one direction; the block goes on."""
        way, now, seconds = instruction.copies, self.free[block], self.seconds(index, step)
        self.visits.append(Visit(index, step, block, now, now, now, now))
        if not seconds:
            return now
        start = max(now, self.copiers.get((block, way), 0.0), self.moved.get((block, "out", instruction.model), 0.0))
        self.copiers[block, way] = self.moved[block, way, instruction.model] = end = start + seconds
        if way == "out":
            self.left[block] = end
        return end

    def _await_copies(self, instruction: TimedInstruction) -> None:
        """Let the blocks of an instruction wait for memory that models leave, and for the models that it needs."""
        for block in instruction.blocks if self.copiers else ():
            arrivals = (self.moved.get((block, "back", model), 0.0) for model in instruction.needs)
            self.free[block] = max(self.free[block], self.left.get(block, 0.0), *arrivals)

    def _jointly(self, index: int, instruction: TimedInstruction, step: int) -> float:
        ready = self._ready(instruction, step)
        start = max(ready, *(self.free[block] for block in instruction.blocks))
        end = start + self.seconds(index, step)
        self._store(instruction, start)
        for block in instruction.blocks:
            self.visits.append(Visit(index, step, block, start, end, self.free[block], ready))
            if instruction.blocking:
                self.free[block] = end
        return end

    def _in_background(self, index: int, instruction: TimedInstruction, step: int) -> float:
        copy = instruction.fills
        for block in instruction.sends:
            self.free[block] = max(self.free[block], self.filled.get(copy, 0.0))
        begin = max(self._ready(instruction, step), self.link, self.stored.pop(copy, 0.0))
        self.link = self.filled[copy] = end = begin + self.seconds(index, step)
        for block in instruction.blocks:
            now = self.free[block]
            self.visits.append(Visit(index, step, block, now, now, now, now))
        return end

    def _alone(self, index: int, instruction: TimedInstruction, step: int, block: int) -> float:
        arrived, ready = self.free[block], self._ready(instruction, step)
        start = max(arrived, ready)
        self.free[block] = end = start + self.seconds(index, step)
        self._store(instruction, start)
        self.visits.append(Visit(index, step, block, start, end, arrived, ready))
        return end

    def _store(self, instruction: TimedInstruction, start: float) -> None:
        """Note that ``instruction`` has stored the weights of the copies that it uses."""
        for copy in instruction.uses:
            self.stored.setdefault(copy, start)

    def _ready(self, instruction: TimedInstruction, step: int) -> float:
        """Return when all that ``instruction`` reads is there."""
        ready = 0.0
        for place, earlier in enumerate(instruction.after):
            delay = instruction.delays[place] if instruction.delays else 0.0
            ready = max(ready, self.done.get((step, earlier), 0.0) + delay)
        return max(ready, *(self.filled.get(copy, 0.0) for copy in instruction.uses)) if instruction.uses else ready


def executions(lags: Sequence[int], steps: int, due: Due) -> Iterator[tuple[int, int]]:
    """Yield (position, batch) of every execution in a run of ``steps`` batches, in the trainer's order."""
    for turn in range(steps + max(lags, default=0)):
        for index, lag in enumerate(lags):
            if due(index, turn - lag):
                yield index, turn - lag


def due_after(every: Sequence[int], steps: int) -> Due:
    """Return when instructions are due that each have their turn after ``every`` so many batches."""
    return lambda index, step: 0 <= step < steps and not (step + 1) % every[index]


def walk_steps(
    instructions: Sequence[TimedInstruction],
    num_blocks: int,
    steps: int,
    due: Due | None = None,
    seconds: Durations | None = None,
) -> WalkResult:
    """Walk ``steps`` batches.

    due:      when instructions are due, if not all as their ``every`` says.
    seconds:  their time for each batch, if it is not always the same.
    """
    seconds = seconds or (lambda index, step: instructions[index].seconds)
    clock, ends = _Clock(instructions, seconds, [0.0] * num_blocks), [0.0] * steps
    lags = [instruction.lag for instruction in instructions]
    due = due or due_after([instruction.every for instruction in instructions], steps)
    for index, step in executions(lags, steps, due):
        end, batch = clock.execute(index, step), min(step, steps - 1)
        ends[batch] = max(ends[batch], end)
    return WalkResult(tuple(clock.visits), tuple(ends))


def steady_seconds(instructions: Sequence[TimedInstruction], num_blocks: int) -> float:
    """Return the time of one step of a settled run."""
    steady = SteadySteps.of((each.lag for each in instructions), (each.every for each in instructions))
    ends = walk_steps(instructions, num_blocks, steady.walked).ends
    return (ends[steady.last] - ends[steady.last - steady.measured]) / steady.measured
