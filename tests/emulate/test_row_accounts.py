"""Rows of random runs that are stopped, killed and resumed: every prompt is trained, filtered, not counted or in flight
once, in order, and no token is sampled with weights that are too old.

Ranks walk the lists of their plans. The length of a response and its outcome follow from its row; which rows are late
at a cut is random, where no earlier process has recorded it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random

import pytest
from emulator import emulate
from random_runs import LONGEST, other_plan, plan_of, random_settings
from symbolic import inference_version

from flexrlhf.metrics import Outcome
from flexrlhf.operators.columns import Column
from flexrlhf.operators.outcomes import RowAccount
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Run, Sync
from flexrlhf.strategies.schedule import ANEW, RunStart
from flexrlhf.trainer.prompt_attempts import LACKING, TAKEN, next_taken, replacing_positions, taken_positions
from flexrlhf.trainer.row_ledger import RowLedger, merged_account, outcomes_of

NUM_RUNS, BY_DEFAULT, PER_TEST = 2000, 250, 50
"""Numbers of random runs, in total, in `make test` and in one test."""
Row = tuple[int, int]
"""Step that took a row from the data, and its number there."""


Cuts = dict[tuple[int, Row], tuple[int, bool]]
"""Step and row → tokens of the row at the cut, and whether its reply was late; outlives a process."""
ON_TIME = 0, False


def length_of(row: Row) -> int:
    """Tokens of the response of a row, most of them few."""
    return Random(f"length {row}").choice((1, 2, 2, 3, 4, 6, LONGEST))


def outcome_of(row: Row) -> str:
    return Random(f"outcome {row}").choice([name for name in Outcome if name != Outcome.FROZEN])


def group_of(plan: Plan, row: Row) -> list[Row]:
    """Rows that are trained on together: those of the same prompt, or of the same response."""
    (taken, number), rows = row, plan.batch.samples_per_prompt
    if plan.spec.rollout.groups == "as-ended":
        rows = plan.spec.num_sequences
    return [(taken, number // rows * rows + each) for each in range(rows)]


def last_age(plan: Plan, row: Row) -> int:
    """Steps from the one that took a row to the one that trains on it: that of the longest response of its group."""
    tokens, most = plan.spec.rollout.segment_tokens or LONGEST, plan.spec.rollout.max_segments or LONGEST
    longest = max(map(length_of, group_of(plan, row)))
    return min(-(-longest // tokens), most) - 1


def is_taken(plan: Plan, state: State, row: Row) -> bool:
    """Whether a step has taken a row; without attempts it takes all."""
    step, number = row
    return plan.batch.attempts == 1 or (step, number // plan.batch.samples_per_prompt) in state.prompts


@dataclass
class State:
    """All that a checkpoint has of a run.

    begun:        rows that have been generated, or read where nothing is generated.
    tokens:       weights versions of the tokens of each row so far.
    whole:        step in which the responses of a row's group were whole, which trains on it.
    ended:        outcome of each row that has been trained on.
    versions:     of the weights of models that train, and of their copies for inference.
    num_trained:  batches.
    most_stale:   bound of the age of tokens, under the largest lag and segments so far.
    is_changed:   whether segments have changed since some rows began.
    account:      of the ledgers: rows by outcome, and rows that are carried.
    taken:        step and attempt → mini-batches that take prompts in it.
    prompts:      step and number there of each prompt that dynamic sampling has taken.
    positions:    places of these prompts in the order of the data.
    replaced:     numbers by which prompts are taken in place of groups that were left out.
    """

    begun: set[Row] = field(default_factory=set)
    tokens: dict[Row, list[int]] = field(default_factory=dict)
    whole: dict[Row, int] = field(default_factory=dict)
    ended: dict[Row, str] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    num_trained: int = 0
    most_stale: int = 0
    is_changed: bool = False
    account: tuple[dict[str, int], dict[str, list[int]]] = ({}, {})
    taken: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    prompts: set[tuple[int, int]] = field(default_factory=set)
    positions: list[int] = field(default_factory=list)
    replaced: dict[str, float] = field(default_factory=lambda: {TAKEN: 0.0})


class EmulatedRun:
    """A process of a run: ledgers of all ranks, which walk the list from ``start`` on."""

    def __init__(self, plan: Plan, state: State, start: RunStart = ANEW, cuts: Cuts | None = None) -> None:
        self.cuts: Cuts = {} if cuts is None else cuts
        self.clock = Random(f"clock {len(self.cuts)}")
        self.plan, self.shape, self.state, self.start, self.next_step = plan, plan.batch, state, start, start.next_step
        self.ledgers = [RowLedger(plan, rank, start.generated) for rank in range(plan.placement.num_ranks)]
        training = plan.graph.accounting
        assert training is not None
        self.training = training
        # with segments or attempts training accounts for the rows of frozen steps, too
        self.first_step = 0 if Column.PRESENT in training.reads else training.first_step
        state.most_stale = max(state.most_stale, plan.spec.most_stale)
        if start != ANEW:
            for ledger in self.ledgers:
                ledger.load(*state.account, start.next_step)
            kept = plan.placement.checkpointed(plan.spec)
            syncs = [each for each in plan.schedule.instructions if isinstance(each, Sync)]
            state.versions.update({each.destination: start.next_step for each in syncs if each.destination not in kept})

    def resumed(self, plan: Plan) -> EmulatedRun:
        """Another process, which goes on from a checkpoint that this one writes now."""
        state, generated = deepcopy(self.state), self.plan.steps_in_flight(self.next_step, self.start.generated).stop
        state.is_changed |= plan.spec.rollout != self.plan.spec.rollout
        state.most_stale += max(0, plan.batch.segments - self.shape.segments)
        return EmulatedRun(plan, state, RunStart(self.next_step, generated), self.cuts)

    def walk(self) -> Iterator[int]:
        """Execute the list round by round; yield the step that is trained on next."""
        steps, lag = self.plan.spec.steps, self.plan.schedule.lag
        for turn in self.plan.schedule.rounds(steps, self.start):
            self._walk_round(turn)
            self.next_step = min(steps, max(self.start.next_step, turn + 1 - lag))
            if self.next_step > self.start.next_step:
                self._check()
                yield self.next_step

    def _walk_round(self, turn: int) -> None:
        graph, steps = self.plan.graph, self.plan.spec.steps
        first = next((each for each in graph.operators if each.kind == "generate"), self.training)
        items = {
            position: (step, each)
            for rank in range(self.plan.placement.num_ranks)
            for position, step, each in self.plan.schedule.walk_round(rank, steps, turn, self.start)
            if isinstance(each, Run | Sync)
        }
        for _, (step, each) in sorted(items.items()):
            if isinstance(each, Sync):
                self.state.versions[each.destination] = step + each.after_training
                continue
            if each.operator.takes_prompts:
                self._take(step, each)
            if each.operator == first:
                self._generate(step, each)
            if each.operator == self.training:
                self._train(step, each)
            if each.operator.kind == "train":
                self.state.versions[each.model] = step + 1

    def _take(self, step: int, run: Run) -> None:
        """Take prompts for some of the mini-batches of the attempt before, or in place of some groups that ended."""
        state, number, left_out = self.state, run.attempt, None
        if number is None:
            firsts = {group_of(self.plan, row)[0] for row, whole in state.whole.items() if whole == step - 1}
            left_out = sum(Random(f"left out {first}").random() < 0.4 for first in firsts)
            wanted = self.shape.num_new + int(state.replaced.get(LACKING, 0)) + left_out
            positions = replacing_positions(self.shape, step, wanted, int(state.replaced[TAKEN]))
            assert len(positions) == min(wanted, self.shape.num_new * self.shape.attempts)
        else:
            before = state.taken[step, number - 1] if number else self.shape.mini_batches
            chosen = [m for m in before if not number or Random(f"attempt {step} {number} {m}").random() < 0.5]
            state.taken[step, number] = chosen
            positions = taken_positions(self.shape, number, chosen, len(state.positions))
        state.replaced = next_taken(self.shape, state.replaced, len(positions), left_out)
        state.positions += positions.values()
        state.prompts |= {(step, prompt // self.shape.segments) for prompt in positions}
        for rank in run.ranks:
            self.ledgers[rank].take(step, positions)

    def _generate(self, step: int, run: Run) -> None:
        """Continue each response that is under way by a segment, with the weights that its model has."""
        state, spec, model = self.state, self.plan.spec, self.plan.placement[run.model]
        if model.trained:
            frozen = min(step, self.plan.graph.first_step(model.role))
            state.versions[run.model] = max(state.versions.get(run.model, 0), frozen)
        version, lag, most = state.versions.get(run.model, 0), spec.schedule.lag, spec.rollout.segment_tokens or LONGEST
        # after a change of the lag weights are not older than those that the run has gone on with
        expected = inference_version(max(step - lag, self.start.next_step), 0, spec.sync.every)
        assert version == expected, f"step {step} with version {version}"
        assert step - state.num_trained <= lag, f"more than {lag + 1} batches in flight"
        taken = (self.shape.as_taken(place, step) for place in self._rows_of(run))
        rows = {row: step - row[0] for row in taken if row[0] >= 0}
        rows = {row: age for row, age in rows.items() if is_taken(self.plan, state, row)}
        fresh = {row for row, age in rows.items() if not age}
        assert state.begun.isdisjoint(fresh), "a row is generated twice"
        state.begun |= fresh
        going = {row: age for row, age in rows.items() if row in state.begun and row not in state.whole}
        for row, age in going.items():
            before, carries = state.tokens.setdefault(row, []), spec.rollout.carries_late
            is_next = len(before) == min(age * most, length_of(row))
            assert is_next or state.is_changed or carries, f"a segment of {row} is left out"
            further = min(max(most, (age + 1) * most - len(before)) if carries else most, length_of(row) - len(before))
            if carries and age < self.shape.segments - 1:
                further = self._until_late(step, row, len(before), further)
            before += [version] * further
            is_whole = len(before) == min((age + 1) * most, length_of(row))
            assert is_whole or state.is_changed or (step, row) in self.cuts, f"{row} has not made up for its lateness"
        for row, age in going.items():
            group = group_of(self.plan, row)
            has_ended = all(
                len(state.tokens[each]) == length_of(each) and not self.cuts.get((step, each), ON_TIME)[1]
                for each in group
            )
            if age == self.shape.segments - 1 or has_ended:
                state.whole[row] = step

    def _until_late(self, step: int, row: Row, before: int, most: int) -> int:
        """Return how many of ``most`` tokens a row with ``before`` samples until the cut: as an earlier process has
        recorded, or by the clock fewer if a reply is late, which may be the one to its last token."""
        if (step, row) not in self.cuts:
            is_late = self.clock.random() < 0.3
            self.cuts[step, row] = before + (self.clock.randint(0, most) if is_late else most), is_late
        place, _ = self.cuts[step, row]
        assert self.state.is_changed or before <= place <= before + most, f"{row} is not where it was in step {step}"
        return max(0, min(most, place - before))

    def _train(self, step: int, run: Run) -> None:
        """Give outcomes to the rows that the step trains on, the same on all ranks of the model."""
        state, keys = self.state, []
        for place in self._rows_of(run):
            row = self.shape.as_taken(place, step)
            if state.whole.get(row) == step:
                assert row not in state.ended, f"{row} is trained on twice"
                age, last = step - row[0], last_age(self.plan, row)
                is_last = age == last or (self.plan.spec.rollout.carries_late and age > last)
                assert is_last or state.is_changed, f"{row} is not trained on when the last of its prompt ends"
                stalest = step - min(state.tokens[row])
                assert stalest <= state.most_stale, f"a token of {row} is {stalest} batches old"
                state.ended[row] = Outcome.FROZEN if step < self.training.first_step else outcome_of(row)
                keys.append(place * len(Outcome) + Outcome(state.ended[row]).code)
        ends_batch = run.mini_batches.stop == self.shape.num_mini_batches
        for rank in run.ranks:
            self.ledgers[rank].add(outcomes_of(keys))
            if ends_batch:
                taken = (number for of_step, number in state.prompts if of_step == step)
                places = [number * self.shape.segments + step % self.shape.segments for number in taken]
                self.ledgers[rank].open(step, places)
                self.ledgers[rank].complete(step)
        assert step == max(state.num_trained, self.first_step), "batches are trained on in another order"
        state.num_trained = step + ends_batch

    def _rows_of(self, run: Run) -> Sequence[int]:
        """Rows that all replicas of a Run work on."""
        ranks = [rank for rank in run.ranks if run.layout.is_first_of_replica(rank)]
        parts = [self.shape.prompts_on(run.layout, rank, run.mini_batches, run.attempt) for rank in ranks]
        rows = [row for prompts in parts for row in self.shape.rows(prompts)]
        assert len(rows) == len(set(rows)), "two replicas have the same row"
        return rows

    def _check(self) -> None:
        """Compare the ledgers with the rows that were generated and trained on."""
        state, shape, next_step = self.state, self.shape, self.next_step
        frozen = min(next_step, self.first_step)
        state.num_trained = max(state.num_trained, frozen)
        counts, carried = [each.counts(next_step) for each in self.ledgers], [each.carried for each in self.ledgers]
        for reports in (counts, carried):
            names = {name for report in reports for name in report}
            found = {name: {repr(report[name]) for report in reports if name in report} for name in names}  # type: ignore[index]
            assert all(len(values) == 1 for values in found.values()), f"ranks differ: {found}"
        state.account = merged_account(counts), {step: rows for report in carried for step, rows in report.items()}
        state.ended |= {row: Outcome.FROZEN for row in state.begun if row[0] < frozen}
        in_flight = state.begun - state.ended.keys()
        assert state.account[0] == Counter(state.ended.values()) + Counter({RowAccount.IN_FLIGHT: len(in_flight)})
        carried = sorted((taken, number) for taken, number in in_flight if taken < next_step)
        assert carried == sorted((int(taken), each) for taken, rows in state.account[1].items() for each in rows)
        steps = range(next_step - (shape.segments - 1), max(next_step + self.plan.schedule.lag, self.start.generated))
        assert all(taken in steps for taken, _ in in_flight)


def check_run(random: Random) -> Plan:
    """Walk a run to its end, through stops and kills, after which other processes go on from its checkpoints."""
    raw, plan = next((raw, plan) for _ in range(99) if (plan := plan_of(raw := random_settings(random), random)))
    steps, run, saved = plan.spec.steps, EmulatedRun(plan, State()), None
    while run.next_step < steps:
        for next_step in run.walk():
            is_stopped, is_killed = random.random() < 0.1, random.random() < 0.1
            if next_step < steps and (is_stopped or random.random() < 0.3):
                saved = run.resumed(run.plan)
            if is_stopped or is_killed:
                break
        if run.next_step < steps:
            run = EmulatedRun(plan, State()) if saved is None else saved.resumed(other_plan(saved.plan, raw, random))
    state = run.state
    taken = plan.batch.num_rows // plan.batch.segments
    everything = {(step, number) for step in range(steps) for number in range(taken)}
    assert state.begun == {row for row in everything if is_taken(plan, state, row)}
    # no prompt of the data is left out, and none is taken twice
    assert state.positions == list(range(len(state.begun) // plan.batch.samples_per_prompt * (plan.batch.attempts > 1)))
    going = state.begun - state.ended.keys()
    assert going.isdisjoint(state.whole)
    may_be_late = state.is_changed or plan.spec.rollout.carries_late
    assert may_be_late or all(row[0] + last_age(plan, row) >= steps for row in going)
    return plan


@pytest.mark.parametrize(
    "index",
    [pytest.param(n, marks=[pytest.mark.full] * (n >= BY_DEFAULT // PER_TEST)) for n in range(NUM_RUNS // PER_TEST)],
)
def test_every_row_has_one_outcome_or_is_in_flight(index: int) -> None:
    """Some of the runs are emulated in threads, too, where no rank may wait for ever nor store more than is planned."""
    for number in range(PER_TEST):
        plan = check_run(Random(f"rows {index} {number}"))
        if number % 10 == 0:
            emulate(plan, "rendezvous")
