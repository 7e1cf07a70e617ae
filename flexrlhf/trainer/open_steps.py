"""Steps of a session on one rank: what a program has called, of which no schedule has a list."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from flexrlhf.operators.graph import Operator
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.calls import CalledStep, CallsInFlight, OperatorCall
from flexrlhf.strategies.instructions import Instruction, Run
from flexrlhf.strategies.schedule import ANEW, RunStart
from flexrlhf.trainer.call_feed import CallMessage


@dataclass
class OpenStep:
    """A step that the program has begun and not ended.

    called:    its calls.
    messages:  of these, each with the number of batches that were newer.
    runs:      positions and runs of each call.
    """

    called: CalledStep
    messages: list[CallMessage] = field(default_factory=list)
    runs: list[list[tuple[int, Run]]] = field(default_factory=list)


class CalledSteps:
    """Instructions of the steps so far, by which reports are found. Positions count along the whole session.

    given:  steps whose prompts are the program's own.
    open:   steps in flight.
    """

    def __init__(self, plan: Plan, start: RunStart = ANEW, calls: CallsInFlight | None = None) -> None:
        """Begin with the steps in flight of ``start``, whose ``calls`` have been made; None: as in the schedule."""
        self._plan, self.given = plan, set[int]()
        self.open: dict[int, OpenStep] = {}
        self._listed: dict[int, list[tuple[int, Instruction]]] = defaultdict(list)
        self._num, self._num_whole, self._begun = 0, start.next_step, start.next_step
        # first step without rows, by the first step that had not ended then
        self._generated = {start.next_step: max(start.next_step, start.generated)}
        self._ended: CalledStep | None = None
        for step in range(start.next_step, start.generated):
            messages = (calls or {}).get(str(step))
            self.begin()
            for message in scheduled_calls(plan, start) if messages is None else messages:
                self.open[step].messages.append(message)
                for made in self.open[step].called.add_all([message]):
                    positions = ((self.add(step, each), each) for each in made)
                    self.open[step].runs.append([(at, each) for at, each in positions if isinstance(each, Run)])
        for step, opened in self.open.items():
            opened.called.builder.lag = start.generated - 1 - step

    def begin(self) -> list[tuple[int, Instruction]]:
        """Begin the next step; return what is due in open ones before it."""
        before = self.open.get(self._begun - 1)
        called = CalledStep.begin(
            self._plan.graph,
            self._plan.placement,
            self._plan.batch,
            self._ended if before is None else before.called,
            self._ended,
        )
        due = [(step, each) for step, opened in self.open.items() for each in opened.called.overtake()]
        self.open[self._begun] = OpenStep(called)
        self._begun += 1
        return due

    @property
    def next_step(self) -> int:
        """First step that has not ended."""
        return self._num_whole

    @property
    def begun(self) -> int:
        """First step that has not begun."""
        return self._begun

    def add(self, step: int, instruction: Instruction) -> int:
        """Add the next instruction of ``step`` and return its position."""
        self._listed[step].append((self._num, instruction))
        self._num += 1
        return self._num - 1

    def end(self) -> OpenStep:
        """End the first open step, which no instruction joins any more, and return it."""
        ended = self.open.pop(self._num_whole)
        ended.called.end()
        self._num_whole += 1
        self._generated[self._num_whole] = self.in_flight(self._num_whole).stop
        self._ended = ended.called
        return ended

    def drop(self) -> dict[int, OpenStep]:
        """Drop all open steps, and return them."""
        dropped, self.open, self._begun = self.open, {}, self._num_whole
        return dropped

    def messages_from(self, next_step: int) -> dict[str, list[CallMessage]]:
        """Return step → messages that its calls have sent, of the open steps from ``next_step`` on."""
        return {str(step): [*opened.messages] for step, opened in self.open.items() if step >= next_step}

    def columns(self, step: int, rank: int, is_own: bool) -> dict[str, set[int]]:
        """Return the rows that ``rank`` has of each column that calls of an open step have written.

        ``is_own``: rows of which it is the first rank; else all.
        """
        called, shape = self.open[step].called, self._plan.batch
        found: dict[str, set[int]] = {}
        for column in called.written:
            if is_own:
                numbers = [number for number in shape.mini_batches if called.has(column, range(number, number + 1))]
                parts = (called.owners(column, range(number, number + 1)).get(rank, ()) for number in numbers)
                prompts = {prompt for part in parts for prompt in part}
            else:
                prompts = called.builder.available[column].get(rank, set())
            found[column] = set(shape.rows(tuple(prompts)))
        return {column: rows for column, rows in found.items() if rows}

    def lacks(self, operator: Operator, step: int) -> bool:
        """Whether ``operator`` is yet to be called on mini-batches of a step."""
        return step not in self.open or bool(self.open[step].called.not_called(operator))

    # as of Steps

    def index(self, position: int) -> int:
        return position

    def due(self, step: int) -> Iterable[tuple[int, Instruction]]:
        return self._listed[step]

    def is_whole(self, step: int) -> bool:
        return step < self._num_whole

    def takes_data(self, step: int) -> bool:
        return step not in self.given

    def at(self, step: int, position: int) -> Instruction:
        return dict(self._listed[step])[position]

    def in_flight(self, next_step: int, _: int = 0) -> range:
        called = (step + 1 for step, opened in self.open.items() if opened.messages)
        return range(next_step, self._generated.get(next_step, max((next_step, *called))))

    def restored(self, step: int, _: RunStart) -> Iterator[tuple[int, Run]]:
        return ((at, each) for at, each in self._listed[step] if isinstance(each, Run))


def scheduled_calls(plan: Plan, start: RunStart) -> Iterator[CallMessage]:
    """Yield the messages of the calls that a schedule has made of a step in flight; each has its columns."""
    runs = (each for each in plan.schedule.instructions if isinstance(each, Run) and each.operator.writes)
    names = dict.fromkeys(run.operator.name for run in runs if run.lag < plan.schedule.lag and not start.brings(run))
    yield from ({**OperatorCall(name, plan.batch.mini_batches).message, "lag": 0} for name in names)
