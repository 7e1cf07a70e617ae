"""Ledger of rows: the outcome of every row that is taken from the data, checked at each step and in each checkpoint.

The training of one role accounts for the rows of a step (``Graph.accounting``), on all of its ranks alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from flexrlhf.metrics import Outcome
from flexrlhf.operators.columns import Column
from flexrlhf.operators.outcomes import RowAccount
from flexrlhf.placement.layout import BatchShape
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Run
from flexrlhf.text import span_of
from flexrlhf.trainer.execution import Execution, Observer
from flexrlhf.trainer.open_steps import CalledSteps

Outcomes = dict[str, list[int]]
"""Outcome → rows of a step, in order."""
CARRIED = "carried"
"""In place of an outcome: rows that the next step goes on with (``rollout.segment_tokens``), a part of those in flight.
"""
ALL_TAKEN = "taken"
"""In place of an outcome: all rows that dynamic sampling has taken, with those in flight."""
UNRECORDED = "unrecorded"
"""In place of an outcome: rows of steps before a checkpoint of an older version."""


class RowLedger(Observer):
    """Ledger of a run's rows, on the ranks of the training that accounts for them."""

    def __init__(self, plan: Plan, rank: int, generated: int = 0, called: CalledSteps | None = None) -> None:
        """Begin without outcomes.

        generated:  first step without rows at the start of the run.
        called:     steps of a program, which completes them, and may leave rows out, or train on some again; None: the
                    last mini-batch completes a step.
        """
        self._generated, self._called = generated, called
        self._plan, training = plan, plan.graph.accounting
        runs = [each for each in plan.schedule.for_rank(rank) if isinstance(each, Run)]
        self._is_accounting = any(run.operator == training for run in runs)
        self._is_taking = any(run.operator.takes_prompts for run in runs)
        self._num_taken = 0
        self._first_step = plan.spec.steps
        """First step that training accounts for; all rows of the steps before are frozen."""
        if training is not None:
            self._first_step = 0 if training.accounts_frozen else training.first_step
        self._counts: Counter[str] = Counter()
        self._of_step: list[int] = []
        # rows without an outcome, and the steps that took them
        self._open: dict[int, int] = {}

    def load(self, counts: Mapping[str, int], carried: Mapping[str, Sequence[int]], next_step: int) -> None:
        """Go on from the ``counts`` and ``carried`` rows of a checkpoint before ``next_step``; one of an older version
        has none."""
        uncounted = RowAccount.IN_FLIGHT, *([Outcome.FROZEN] if self._first_step else [])
        self._counts = Counter({name: count for name, count in counts.items() if name not in uncounted})
        place_of = self._plan.batch.place_of
        self._open = {place_of(int(step), row): int(step) for step, rows in carried.items() for row in rows}
        self._num_taken = sum(counts.values())
        if not counts:
            self._counts[UNRECORDED] = self._due(next_step)
        self._check(next_step)

    def counts(self, next_step: int) -> dict[str, int]:
        """Return the part of this rank in ``merged_account``: the rows that were taken for the steps before
        ``next_step``, and those in flight, by outcome; none on ranks that neither account for rows nor take them."""
        taken = {ALL_TAKEN: self._num_taken} if self._is_taking else {}
        if not self._is_accounting:
            return taken
        if self._plan.batch.attempts > 1:
            return {**self._counts, **taken}
        in_flight_of = self._plan.steps_in_flight if self._called is None else self._called.in_flight
        taken_later = len(in_flight_of(next_step, self._generated)) * self._plan.batch.num_taken
        in_flight = taken_later + len(self._open)
        frozen = min(next_step, self._first_step) * self._plan.batch.num_taken
        # a sum leaves out zeros
        return dict(self._counts + Counter({Outcome.FROZEN: frozen, RowAccount.IN_FLIGHT: in_flight}))

    @property
    def carried(self) -> dict[str, list[int]]:
        """Rows that are carried, by the step that took them, as it numbered them; none where ``counts`` are none."""
        found: dict[str, list[int]] = {}
        for row, step in sorted(self._open.items()) if self._is_accounting else ():
            found.setdefault(str(step), []).append(self._plan.batch.as_taken(row, step)[1])
        return found

    def computed(self, execution: Execution) -> None:
        """Add the outcomes of the rows of a training, of all replicas; the last chunk completes the step.

        Of an attempt, the prompts that it has taken.
        """
        work, plan = execution.work, self._plan
        if execution.inner is None and work.operator.takes_prompts:
            execution.positions = _gathered_positions(execution)
            self.take(execution.step, execution.positions)
        training, operator = plan.graph.accounting, work.operator
        if execution.inner is not None or training is None or operator.name != training.name:
            return
        if operator.kind == "backward":
            return  # the optimizer step on its gradients decides
        rows = work.present_rows(execution.store, work.mini_batches)
        codes = execution.store.get(Column.FINAL_OUTCOME, rows).long()
        keys = codes.new_tensor(rows) * len(Outcome) + codes
        execution.outcomes = outcomes_of(work.model.dp.gather(keys).tolist())
        if Column.POSITION in work.operator.reads:
            self.open(execution.step, _gathered_positions(execution))
        if self._called is not None:
            known = set(self._of_step)
            new = {name: [row for row in rows if row not in known] for name, rows in execution.outcomes.items()}
            execution.outcomes = {name: rows for name, rows in new.items() if rows}
        self.add(execution.outcomes)
        if self._called is None and work.mini_batches.stop == plan.batch.num_mini_batches:
            carried = self.complete(execution.step)
            execution.outcomes = {**execution.outcomes, **({CARRIED: carried} if carried else {})}

    def leave_out(self, step: int, waiting: Iterable[int] = ()) -> Outcomes:
        """Complete ``step``, whose further rows a program does not train on; return these and the carried ones, on
        ranks that account for rows.

        waiting:  rows that the next step may go on with.
        """
        if not self._is_accounting or step < self._first_step:
            return {}
        rows = {*self._open, *self._rows_taken(step, self._plan.batch.new_prompts(step))}
        left_out: Outcomes = {Outcome.LEFT_OUT: sorted(rows.difference(self._of_step, waiting))}
        self.add(left_out)
        found = {**left_out, CARRIED: self.complete(step)}
        return {name: rows for name, rows in found.items() if rows}

    def take(self, step: int, prompts: Iterable[int]) -> None:
        """Add the prompts of an attempt, or the new ones among all that are under way."""
        self._num_taken += len(self._rows_taken(step, prompts))

    def open(self, step: int, prompts: Iterable[int]) -> None:
        """Add the new ones among the prompts of the step that is trained on."""
        self._open.update(dict.fromkeys(self._rows_taken(step, prompts), step))

    def _rows_taken(self, step: int, prompts: Iterable[int]) -> tuple[int, ...]:
        new = self._plan.batch.new_prompts(step)
        return self._plan.batch.rows(tuple(prompt for prompt in prompts if prompt in new))

    def add(self, outcomes: Mapping[str, Sequence[int]]) -> None:
        """Add rows of the step that is trained on."""
        self._counts.update({name: len(rows) for name, rows in outcomes.items()})
        self._of_step += [row for rows in outcomes.values() for row in rows]

    def complete(self, step: int) -> list[int]:
        """Return the rows of ``step`` that are carried to the next one.

        Check that each other row has one outcome, that none is carried further than it may be, and that the rows of all
        steps until now have an outcome or are carried.
        """
        shape = self._plan.batch
        found, self._of_step = sorted(self._of_step), []
        if shape.attempts == 1:
            self.open(step, shape.new_prompts(step))
        elif shape.segments == 1:
            self.open(step, prompts_of_attempts(shape, found))
        wrong = [row for row in found if self._open.pop(row, None) is None]
        # these have had their last segment
        wrong += [row for row, taken in self._open.items() if step - taken == shape.segments - 1]
        assert not wrong, f"step {step}: not one outcome each of rows {span_of(tuple(sorted(set(wrong))))}"
        self._check(step + 1)
        return sorted(self._open)

    def _check(self, next_step: int) -> None:
        counted, due = self._counts.total() + len(self._open), self._due(next_step)
        assert counted == due, f"{counted} rows have an outcome before step {next_step}, and {due} should"

    def _due(self, next_step: int) -> int:
        """Return the rows before ``next_step`` that training accounts for; with attempts a step has its own number."""
        if self._plan.batch.attempts > 1:
            return self._counts.total() + len(self._open)
        return max(next_step - self._first_step, 0) * self._plan.batch.num_taken


def prompts_of_attempts(shape: BatchShape, found: Sequence[int]) -> list[int]:
    """Return the prompts that a step with the rows ``found`` has: of each mini-batch those of its first attempts."""
    prompts = {row // shape.samples_per_prompt for row in found}
    expected: list[int] = []
    for mini_batch in shape.mini_batches:
        attempts = [prompt % shape.attempts for prompt in prompts.intersection(shape.prompts(mini_batch))]
        for number in range(max(attempts, default=0) + 1):
            expected += shape.prompts_of_attempt(mini_batch, number)
    return expected


def _gathered_positions(execution: Execution) -> dict[int, int]:
    """Return prompt → place in the order of the data, of the prompts of all replicas that have one."""
    work = execution.work
    firsts = work.rows[:: work.shape.samples_per_prompt]
    positions = execution.store.get(Column.POSITION, firsts).long()
    numbers = positions.new_tensor(firsts) // work.shape.samples_per_prompt
    keys = work.model.dp.gather((positions * work.shape.num_prompts + numbers)[positions >= 0]).tolist()
    return {key % work.shape.num_prompts: key // work.shape.num_prompts for key in keys}


def merged_account(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the rows of a run by outcome, and those in flight, from the ``counts`` of its ranks, which agree."""
    total = {name: count for part in parts for name, count in part.items()}
    if ALL_TAKEN in total:
        taken = total.pop(ALL_TAKEN)
        if in_flight := taken - sum(total.values()):
            total[RowAccount.IN_FLIGHT] = in_flight
    return total


def outcomes_of(keys: list[int]) -> Outcomes:
    """Return rows by outcome. ``keys``: row * number of outcomes + code, each."""
    found: Outcomes = {}
    names = tuple(Outcome)
    for key in sorted(keys):
        row, code = divmod(key, len(names))
        found.setdefault(names[code], []).append(row)
    return found
