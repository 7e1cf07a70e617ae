"""Rows of random runs that are stopped, killed and resumed: every prompt is trained, filtered, not counted or in flight
once, in order, and no token is sampled with weights that are too old.

Ranks walk the lists of their plans. The length of a response and its outcome follow from its row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from emulator import emulate
from random_specs import INIT
from symbolic import inference_version

from flexrlhf.config.spec_file import parse_spec
from flexrlhf.errors import UserError
from flexrlhf.operators.outcomes import CODES, FROZEN, IN_FLIGHT, OUTCOMES
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Run, Sync
from flexrlhf.strategies.schedule import checkpointed_models, rounds, walk_round
from flexrlhf.trainer.row_ledger import RowLedger, outcomes_of

NUM_RUNS, BY_DEFAULT, PER_TEST = 2000, 500, 50
"""Numbers of random runs, in total, in `make test` and in one test."""
GENERATED = ("ppo", "grpo", "raft", "remax", "safe-rlhf", "ac-share")
IN_SEGMENTS = ("ppo", "grpo", "raft", "ac-share", "safe-rlhf")
MODELS = {"ppo": 6, "grpo": 4, "raft": 3, "remax": 4, "ac-share": 4}
"""Models of a placement with inference on ranks of its own."""
LONGEST = 12
Row = tuple[int, int]
"""Step that took a row from the data, and its number there."""
Raw = dict[str, Any]


def random_settings(random: Random) -> Raw:
    """A run without its placement."""
    name = random.choice((*GENERATED, *GENERATED, "grpo", "sft", "dpo"))
    mini_batches = random.choice((1, 2, 4))
    prompts = random.randint(mini_batches, 9)
    algorithm: Raw = {"name": name, "prompts_per_step": prompts, "num_mini_batches": mini_batches}
    tokens = random.choice((None, 1, 2, 3, 5, 6, LONGEST)) if name in IN_SEGMENTS else None
    if name in GENERATED and tokens is None:
        algorithm["freeze_actor_steps"] = random.choice((0, 0, 2)) * (name != "ac-share")
    if name in ("grpo", "raft", "ppo"):
        algorithm["samples_per_prompt"] = random.randint(2, 4)
    if name == "grpo" and tokens is None and random.random() < 0.7:
        algorithm["dynamic_sampling"] = {"rounds": random.randint(2, 3)}
    is_apart = name in MODELS and random.random() < 0.7
    lag = random.choice((0, 1, 1, 2, 3, 4, 6, 8, 16)) if is_apart else 0
    models = ("actor", *(("reward",) if name in GENERATED else ()), *(("cost",) if name == "safe-rlhf" else ()))
    return {
        "name": "rows",
        "steps": random.randint(1, 8) + random.choice((0, lag)),
        "algorithm": algorithm,
        "models": {role: {"init": INIT} for role in models},
        "data": {"path": "rows.jsonl", "max_response_tokens": LONGEST},
        "schedule": {"lag": lag},
        "sync": {"every": random.choice((1, 2, 3)) if is_apart else 1},
        "rollout": {"segment_tokens": tokens, "max_segments": random.choice((None, 1, 2, 3)) if tokens else None},
    }


def placed(raw: Raw, random: Random) -> Plan | None:
    """The run on random devices and in random chunks; None for settings that no plan has."""
    name, mini_batches = raw["algorithm"]["name"], raw["algorithm"]["num_mini_batches"]
    is_apart = bool(raw["schedule"]["lag"] or raw["sync"]["every"] > 1 or (name in MODELS and random.random() < 0.3))
    chunks = random.choice([number for number in (1, 2, 4) if mini_batches % number == 0])
    placement = ["1/2"] * MODELS[name] if is_apart else random.choice((None, [1, 1, "1/2", "1/2"]))
    settings = {
        "cluster": {"devices": 2 * random.randint(1, 2)},
        "placement": placement,
        "schedule": {**raw["schedule"], "num_chunks": chunks},
    }
    try:
        return make_plan(parse_spec({**raw, **settings}))
    except UserError:
        return None


def plan_of(raw: Raw, random: Random) -> Plan | None:
    return next((plan for _ in range(5) if (plan := placed(raw, random)) is not None), None)


def length_of(row: Row) -> int:
    """Tokens of the response of a row, most of them few."""
    return Random(f"length {row}").choice((1, 2, 2, 3, 4, 6, LONGEST))


def outcome_of(row: Row) -> str:
    return Random(f"outcome {row}").choice([name for name in OUTCOMES if name != FROZEN])


def group_of(row: Row, samples: int) -> list[Row]:
    """Rows of the same prompt."""
    taken, number = row
    return [(taken, number // samples * samples + sample) for sample in range(samples)]


def last_age(plan: Plan, row: Row) -> int:
    """Steps from the one that took a row to the one that trains on it: that of the longest response to its prompt."""
    tokens, most = plan.spec.rollout.segment_tokens or LONGEST, plan.spec.rollout.max_segments or LONGEST
    longest = max(map(length_of, group_of(row, plan.batch.samples_per_prompt)))
    return min(-(-longest // tokens), most) - 1


@dataclass
class State:
    """All that a checkpoint has of a run.

    begun:        rows that have been generated, or read where nothing is generated.
    tokens:       weights versions of the tokens of each row so far.
    whole:        step in which the responses to a row's prompt were whole, which trains on it.
    ended:        outcome of each row that has been trained on.
    versions:     of the weights of models that train, and of their copies for inference.
    num_trained:  batches.
    account:      of the ledgers: rows by outcome, and rows that are carried.
    """

    begun: set[Row] = field(default_factory=set)
    tokens: dict[Row, list[int]] = field(default_factory=dict)
    whole: dict[Row, int] = field(default_factory=dict)
    ended: dict[Row, str] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    num_trained: int = 0
    account: tuple[dict[str, int], dict[str, list[int]]] = ({}, {})


class EmulatedRun:
    """A process of a run: ledgers of all ranks, which walk the list from ``next_step`` on."""

    def __init__(self, plan: Plan, state: State, next_step: int = 0) -> None:
        self.plan, self.shape, self.state, self.next_step = plan, plan.batch, state, next_step
        self.ledgers = [RowLedger(plan, rank) for rank in range(plan.placement.num_ranks)]
        training = plan.graph.accounting
        assert training is not None
        self.training = training
        if next_step:
            for ledger in self.ledgers:
                ledger.load(*state.account, next_step)
            kept = checkpointed_models(plan.placement, plan.spec)
            syncs = [each for each in plan.schedule.instructions if isinstance(each, Sync)]
            state.versions.update({each.destination: next_step for each in syncs if each.destination not in kept})
            self._check()

    def walk(self) -> Iterator[int]:
        """Execute the list round by round; yield the step that is trained on next."""
        steps, lag = self.plan.spec.steps, self.plan.schedule.lag
        for turn in rounds(self.plan.schedule, steps, self.next_step):
            self._walk_round(turn)
            self.next_step = min(steps, max(0, turn + 1 - lag))
            if self.next_step:
                self._check()
                yield self.next_step

    def _walk_round(self, turn: int) -> None:
        graph, steps = self.plan.graph, self.plan.spec.steps
        first = next((each for each in graph.operators if each.kind == "generate"), self.training)
        items = {
            position: (step, each)
            for rank in range(self.plan.placement.num_ranks)
            for position, step, each in walk_round(self.plan.schedule, rank, steps, turn)
            if isinstance(each, Run | Sync)
        }
        for _, (step, each) in sorted(items.items()):
            if isinstance(each, Sync):
                self.state.versions[each.destination] = step + each.after_training
                continue
            if each.operator == first:
                self._generate(step, each)
            if each.operator == self.training:
                self._train(step, each)
            if each.operator.kind == "train":
                self.state.versions[each.model] = step + 1

    def _generate(self, step: int, run: Run) -> None:
        """Continue each response that is under way by a segment, with the weights that its model has."""
        state, spec, model = self.state, self.plan.spec, self.plan.placement[run.model]
        if model.trained:
            frozen = min(step, self.plan.graph.first_step(model.role))
            state.versions[run.model] = max(state.versions.get(run.model, 0), frozen)
        version, lag, most = state.versions.get(run.model, 0), spec.schedule.lag, spec.rollout.segment_tokens or LONGEST
        assert version == inference_version(step, lag, spec.sync.every), f"step {step} with version {version}"
        assert step - state.num_trained <= lag, f"more than {lag + 1} batches in flight"
        rows = {(step - age, number): age for age, number in map(self.shape.as_taken, self._rows_of(run))}
        fresh = {row for row, age in rows.items() if not age}
        assert state.begun.isdisjoint(fresh), "a row is generated twice"
        state.begun |= fresh
        going = {row: age for row, age in rows.items() if row in state.begun and row not in state.whole}
        for row, age in going.items():
            before = state.tokens.setdefault(row, [])
            assert len(before) == min(age * most, length_of(row)), f"a segment of {row} is left out"
            before += [version] * min(most, length_of(row) - len(before))
        for row, age in going.items():
            group = group_of(row, self.shape.samples_per_prompt)
            if age == self.shape.segments - 1 or all(len(state.tokens[each]) == length_of(each) for each in group):
                state.whole[row] = step

    def _train(self, step: int, run: Run) -> None:
        """Give outcomes to the rows that the step trains on, the same on all ranks of the model."""
        state, keys = self.state, []
        for place in self._rows_of(run):
            age, number = self.shape.as_taken(place)
            row = step - age, number
            if state.whole.get(row) == step:
                assert row not in state.ended, f"{row} is trained on twice"
                assert age == last_age(self.plan, row), f"{row} is not trained on when the last of its prompt ends"
                stalest = step - min(state.tokens[row])
                assert stalest <= self.plan.spec.most_stale, f"a token of {row} is {stalest} batches old"
                state.ended[row] = outcome_of(row)
                keys.append(place * len(OUTCOMES) + CODES[state.ended[row]])
        is_last = run.mini_batches.stop == self.shape.num_mini_batches
        for rank in run.ranks:
            self.ledgers[rank].add(outcomes_of(keys))
            if is_last:
                self.ledgers[rank].complete(step)
        assert step == max(state.num_trained, self.training.first_step), "batches are trained on in another order"
        state.num_trained = step + is_last

    def _rows_of(self, run: Run) -> Sequence[int]:
        """Rows that all replicas of a Run work on."""
        layout = self.plan.placement[run.model].layout
        ranks = [rank for rank in run.ranks if layout.is_first_of_replica(rank)]
        rows = [row for rank in ranks for row in self.shape.rows(self.shape.prompts_on(layout, rank, run.mini_batches))]
        assert len(rows) == len(set(rows)), "two replicas have the same row"
        return rows

    def _check(self) -> None:
        """Compare the ledgers with the rows that were generated and trained on."""
        state, shape, next_step = self.state, self.shape, self.next_step
        frozen = min(next_step, self.training.first_step)
        state.num_trained = max(state.num_trained, frozen)
        reports = [(counts, ledger.carried) for ledger in self.ledgers if (counts := ledger.counts(next_step))]
        assert reports and all(each == reports[0] for each in reports)
        state.account = reports[0]
        in_flight = {(taken, number) for taken, number in state.begun - state.ended.keys() if taken >= frozen}
        rows = {FROZEN: frozen * shape.num_taken, IN_FLIGHT: len(in_flight)}
        assert state.account[0] == Counter(state.ended.values()) + Counter(rows)
        carried = sorted((taken, number) for taken, number in in_flight if taken < next_step)
        assert carried == sorted((int(taken), each) for taken, rows in state.account[1].items() for each in rows)
        oldest, newest = next_step - (shape.segments - 1), next_step + self.plan.schedule.lag - 1
        assert all(oldest <= taken <= newest for taken, _ in in_flight)


def check_run(random: Random) -> Plan:
    """Walk a run to its end, through stops, from which it goes on, and kills, from a checkpoint before."""
    raw, plan = next((raw, plan) for _ in range(99) if (plan := plan_of(raw := random_settings(random), random)))
    steps, run = plan.spec.steps, EmulatedRun(plan, State())
    saved = State(), 0
    while run.next_step < steps:
        for next_step in run.walk():
            is_stopped, is_killed = random.random() < 0.1, random.random() < 0.1
            if is_stopped or random.random() < 0.3:
                saved = deepcopy(run.state), next_step
            if next_step < steps and (is_stopped or is_killed):
                other = random.choice((plan, plan_of(raw, random) or plan))
                run = EmulatedRun(other, deepcopy(saved[0]), saved[1])
                break
    state, taken = run.state, plan.batch.num_taken
    assert state.begun == {(step, number) for step in range(steps) for number in range(taken)}
    frozen = min(steps, run.training.first_step)
    going = {row for row in state.begun if row[0] >= frozen and row[0] + last_age(plan, row) >= steps}
    assert state.ended.keys() == {row for row in state.begun if row[0] >= frozen} - going
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
