"""Ledger of rows: the outcome of every row that is taken from the data, checked at each step and in each checkpoint.

The training of one role accounts for the rows of a step (``Graph.accounting``), on all of its ranks alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from flexrlhf.operators.columns import FINAL_OUTCOME
from flexrlhf.operators.outcomes import FROZEN, IN_FLIGHT, OUTCOMES, UNRECORDED
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Run
from flexrlhf.text import span_of
from flexrlhf.trainer.execution import Execution, Observer

Outcomes = dict[str, list[int]]
"""Outcome → rows of a step, in order."""


class RowLedger(Observer):
    """Ledger of a run's rows, on the ranks of the training that accounts for them."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan, training = plan, plan.graph.accounting
        runs = [each for each in plan.schedule.for_rank(rank) if isinstance(each, Run)]
        self._is_accounting = any(run.operator == training for run in runs)
        self._first_step = plan.spec.steps if training is None else training.first_step
        self._counts: Counter[str] = Counter()
        self._of_step: list[int] = []

    def load(self, counts: Mapping[str, int], next_step: int) -> None:
        """Go on from the ``counts`` of a checkpoint before ``next_step``; one of an older version has none."""
        self._counts = Counter({name: count for name, count in counts.items() if name not in (FROZEN, IN_FLIGHT)})
        if not counts:
            self._counts[UNRECORDED] = self._due(next_step)
        self._check(next_step)

    def counts(self, next_step: int) -> dict[str, int]:
        """Return the rows that were taken for the steps before ``next_step``, and those in flight, by outcome.

        None on ranks that do not account for rows.
        """
        if not self._is_accounting:
            return {}
        num_rows, in_flight = self._plan.batch.num_rows, self._plan.rows_in_flight(next_step)
        further = {FROZEN: min(next_step, self._first_step) * num_rows, IN_FLIGHT: in_flight}
        return {name: count for name, count in {**self._counts, **further}.items() if count}

    def computed(self, execution: Execution) -> None:
        """Add the outcomes of the rows of a training, of all replicas; the last chunk completes the step."""
        work, plan = execution.work, self._plan
        if execution.inner is not None or work.operator != plan.graph.accounting:
            return
        codes = execution.store.get(FINAL_OUTCOME, work.rows).long()
        keys = codes.new_tensor(work.rows) * len(OUTCOMES) + codes
        execution.outcomes = outcomes_of(work.model.dp.gather(keys).tolist())
        self.add(execution.outcomes)
        if work.mini_batches.stop == plan.batch.num_mini_batches:
            self.complete(execution.step)

    def add(self, outcomes: Mapping[str, Sequence[int]]) -> None:
        """Add rows of the step that is trained on."""
        self._counts.update({name: len(rows) for name, rows in outcomes.items()})
        self._of_step += [row for rows in outcomes.values() for row in rows]

    def complete(self, step: int) -> None:
        """Check that each row of ``step`` has one outcome, and that the rows of all steps until now have."""
        found, self._of_step = Counter(self._of_step), []
        expected = Counter(range(self._plan.batch.num_rows))
        wrong = sorted((found - expected).keys() | (expected - found).keys())
        assert not wrong, f"step {step}: not one outcome each of rows {span_of(tuple(wrong))}"
        self._check(step + 1)

    def _check(self, next_step: int) -> None:
        counted, due = self._counts.total(), self._due(next_step)
        assert counted == due, f"{counted} rows have an outcome before step {next_step}, and {due} should"

    def _due(self, next_step: int) -> int:
        """Return the rows before ``next_step`` that training accounts for."""
        return max(next_step - self._first_step, 0) * self._plan.batch.num_rows


def outcomes_of(keys: list[int]) -> Outcomes:
    """Return rows by outcome. ``keys``: row * number of outcomes + code, each."""
    found: Outcomes = {}
    for key in sorted(keys):
        row, code = divmod(key, len(OUTCOMES))
        found.setdefault(OUTCOMES[code], []).append(row)
    return found
