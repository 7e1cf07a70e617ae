"""Prototype of one table of rows: each row's life from the data to training, free between planned cuts.

A cut is a weight update, the end of a batch, or a checkpoint. Between two cuts each row goes on by itself: it samples,
awaits the reply to its turn, samples on, until it has ended or has reached its limit. A limit follows from the table
alone, so that the clock changes the order of work and no token. Limits are planned by settings, or are the progress
that another run has recorded: then this run samples each token with the weights that the other one sampled it with.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple, Self

from flexrlhf.metrics import Outcome

RowKey = tuple[int, int]
"""Place of a row's prompt in the order of the data, and number of its sample."""


class Phase(IntEnum):
    """Phase of a row that is under way."""

    OPEN = 0
    AWAITING = 1
    ENDED = 2


class Progress(NamedTuple):
    """Progress of a row at a cut. ``place``: tokens that it has sampled; ``turn``: replies that it has received."""

    place: int = 0
    turn: int = 0
    phase: Phase = Phase.OPEN


class Limit(NamedTuple):
    """Most tokens that a row samples, and most turns that it begins, before the next cut; None: until it ends."""

    tokens: int | None = None
    turns: int | None = None


@dataclass(frozen=True)
class Life:
    """Settings of the lives of rows.

    tokens, turns:  limit of a row that is not due; of none: it ends in the interval that takes it.
    cuts:           cuts that a row may pass; the last interval has no limit.
    as_ended:       whether a row is trained on when its group has ended, else when it is due.
    together:       whether the samples of a prompt are trained on together.
    takes:          most times that a step takes prompts; more than one: in place of groups that are left out.
    """

    samples: int = 1
    tokens: int | None = None
    turns: int | None = None
    cuts: int = 0
    as_ended: bool = False
    together: bool = True
    takes: int = 1


@dataclass(frozen=True)
class Row:
    """A row that is under way. ``taken``: step that took it from the data."""

    taken: int
    progress: Progress = Progress()


@dataclass(frozen=True)
class Settled:
    """Result of a settlement: rows to train on, rows by reason that are left out, and prompts that the step lacks."""

    trained: tuple[RowKey, ...]
    left_out: Mapping[Outcome, tuple[RowKey, ...]]
    lacking: int


@dataclass(frozen=True)
class RowTable:
    """Rows that are under way, the same on every rank and in every checkpoint.

    step:      that is worked on.
    taken:     prompts that all steps have taken.
    useful:    prompts that the step trains on so far.
    num_takes: how often the step has taken prompts.
    counts:    rows by outcome.
    recorded:  progress of rows at the cut behind each step of another run, which this one repeats; None: as planned.
    """

    life: Life
    step: int = 0
    taken: int = 0
    useful: int = 0
    num_takes: int = 0
    rows: Mapping[RowKey, Row] = field(default_factory=dict)
    counts: Mapping[Outcome, int] = field(default_factory=dict)
    recorded: Sequence[Mapping[RowKey, Progress]] | None = None

    def take(self, prompts: int) -> Self:
        """Take the next prompts of the data."""
        numbers = range(self.taken, self.taken + prompts)
        rows = {(number, sample): Row(self.step) for number in numbers for sample in range(self.life.samples)}
        return replace(self, taken=numbers.stop, num_takes=self.num_takes + 1, rows={**self.rows, **rows})

    def is_due(self, key: RowKey) -> bool:
        """Whether a row ends before the next cut."""
        return self.step - self.rows[key].taken >= self.life.cuts

    def limit(self, key: RowKey) -> Limit:
        """Return the limit of a row up to the next cut."""
        if self.recorded is not None:
            return Limit(self.recorded[self.step][key].place - self.rows[key].progress.place)
        if self.is_due(key):
            return Limit()
        return Limit(self.life.tokens, self.life.turns)

    def advance(self, found: Mapping[RowKey, Progress]) -> Self:
        """Return the table with the progress of rows at a cut, gathered from all ranks.

        A row that was not worked on has none.
        """
        rows = {key: replace(row, progress=found.get(key, row.progress)) for key, row in self.rows.items()}
        return replace(self, rows=rows)

    def settle(self, is_useful: Callable[[int], bool], required: int) -> tuple[Self, Settled]:
        """Give outcomes to the rows that have ended and are to be trained on in this step.

        is_useful:  of a prompt whose rows have ended, from gathered values.
        required:     prompts that the step trains on.
        """
        groups = defaultdict(list)
        for key, row in self.rows.items():
            groups[key[0] if self.life.together else key].append((key, row))
        ended = [
            [key for key, _ in group]
            for _, group in sorted(groups.items())
            if all(row.progress.phase is Phase.ENDED for _, row in group)
            if self.life.as_ended or any(self.is_due(key) for key, _ in group)
        ]
        trained: list[RowKey] = []
        left_out: dict[Outcome, list[RowKey]] = defaultdict(list)
        useful = self.useful
        for group in ended:
            if not is_useful(group[0][0]):
                left_out[Outcome.ALIKE] += group
            elif self.life.takes > 1 and not self.life.as_ended and useful == required:
                left_out[Outcome.SURPLUS] += group
            else:
                trained += group
                useful += 1
        counts = Counter(self.counts)
        counts.update({Outcome.TRAINED: len(trained), **{name: len(keys) for name, keys in left_out.items()}})
        gone = {key for group in ended for key in group}
        rows = {key: row for key, row in self.rows.items() if key not in gone}
        lacking = max(0, required - useful) if self.num_takes < self.life.takes and not self.life.cuts else 0
        table = replace(self, useful=useful, rows=rows, counts={name: n for name, n in counts.items() if n})
        return table, Settled(tuple(trained), {name: tuple(keys) for name, keys in left_out.items()}, lacking)

    def next_step(self) -> Self:
        """Return the table of the next step."""
        return replace(self, step=self.step + 1, useful=0, num_takes=0)

    def written(self) -> list[Any]:
        """Return the table as lists of numbers, for a checkpoint."""
        rows = [[*key, row.taken, *map(int, row.progress)] for key, row in sorted(self.rows.items())]
        return [self.step, self.taken, self.useful, self.num_takes, rows, {str(k): n for k, n in self.counts.items()}]

    @classmethod
    def read(cls, life: Life, written: Sequence[Any]) -> Self:
        """Return the table of a checkpoint."""
        step, taken, useful, num_takes, rows, counts = written
        return cls(
            life,
            step,
            taken,
            useful,
            num_takes,
            {(p, s): Row(at, Progress(place, turn, Phase(phase))) for p, s, at, place, turn, phase in rows},
            {Outcome(name): n for name, n in counts.items()},
        )
