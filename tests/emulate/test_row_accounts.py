"""Rows of random runs that are stopped and resumed: every prompt is trained, filtered, not counted or in flight once.

Ranks walk their lists; rows begin where a plan generates them, and outcomes are drawn at random.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from random_specs import INIT

from flexrlhf.config.spec_file import parse_spec
from flexrlhf.errors import UserError
from flexrlhf.operators.outcomes import CODES, FROZEN, IN_FLIGHT, OUTCOMES
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Run
from flexrlhf.strategies.schedule import rounds, walk_round
from flexrlhf.trainer.row_ledger import RowLedger, outcomes_of

NUM_RUNS, BY_DEFAULT = 2000, 300
"""Numbers of random runs, in total and in `make test`."""
GENERATED = ("ppo", "grpo", "raft", "remax", "safe-rlhf", "ac-share")
Row = tuple[int, int]
"""Step that took a row from the data, and its number there."""


def random_plan(random: Random) -> Plan | None:
    """A run of random settings; None for settings that no plan has."""
    name = random.choice((*GENERATED, *GENERATED, "sft", "dpo"))
    mini_batches = random.choice((1, 2, 4))
    prompts = random.randint(mini_batches, 9)
    algorithm: dict[str, Any] = {"name": name, "prompts_per_step": prompts, "num_mini_batches": mini_batches}
    if name in GENERATED:
        algorithm["freeze_actor_steps"] = random.choice((0, 0, 2)) * (name != "ac-share")
    if name in ("grpo", "raft", "ppo"):
        algorithm["samples_per_prompt"] = random.randint(2, 4)
    if name == "grpo" and random.random() < 0.5:
        algorithm["dynamic_sampling"] = {"rounds": random.randint(2, 3)}
    shadowed = {"ppo": 6, "grpo": 4, "raft": 3, "remax": 4, "ac-share": 4}.get(name)
    is_apart = shadowed is not None and random.random() < 0.6
    tokens = random.choice((None, None, 2, 3)) if name in ("ppo", "grpo", "raft", "ac-share") else None
    raw = {
        "name": "rows",
        "steps": random.randint(1, 8),
        "algorithm": algorithm,
        "models": {role: {"init": INIT} for role in ("actor", "reward", "cost")},
        "data": {"path": "rows.jsonl", "max_response_tokens": 8},
        "cluster": {"devices": 2 * random.randint(1, 2)},
        "placement": ["1/2"] * (shadowed or 0) if is_apart else None,
        "schedule": {
            "lag": random.choice((0, 1, 1, 2, 4, 8)) if is_apart else 0,
            "num_chunks": random.choice([n for n in (1, 2, 4) if mini_batches % n == 0]),
        },
        "sync": {"every": random.choice((1, 2, 3)) if is_apart else 1},
        "rollout": {"segment_tokens": tokens, "max_segments": random.choice((None, 2)) if tokens else None},
    }
    for role in ("reward", "cost"):
        if name in ("sft", "dpo") or (role == "cost" and name != "safe-rlhf"):
            del raw["models"][role]
    try:
        return make_plan(parse_spec(raw))
    except UserError:
        return None


class EmulatedRun:
    """Ledgers of all ranks, which walk the list until a stop.

    begun:  rows that have been generated, or read where nothing is generated.
    ended:  rows with an outcome.
    """

    def __init__(self, plan: Plan, random: Random, before: EmulatedRun | None = None) -> None:
        """``before``: the process that wrote the checkpoint which this one goes on from."""
        self.plan, self.random = plan, random
        self.ledgers = [RowLedger(plan, rank) for rank in range(plan.placement.num_ranks)]
        self.begun: set[Row] = set() if before is None else before.begun
        self.ended: dict[Row, str] = {} if before is None else before.ended

    def walk(self, turn: int) -> None:
        """Execute a round of the list."""
        graph = self.plan.graph
        first = next((each for each in graph.operators if each.kind == "generate"), graph.accounting)
        items = {
            (position, step, each)
            for rank in range(self.plan.placement.num_ranks)
            for position, step, each in walk_round(self.plan.schedule, rank, self.plan.spec.steps, turn)
            if isinstance(each, Run)
        }
        for _, step, run in sorted(items, key=lambda item: item[0]):
            if run.operator == first:
                fresh = [(step, number) for age, number in map(self.plan.batch.as_taken, self.rows_of(run)) if not age]
                assert self.begun.isdisjoint(fresh), "a row is generated twice"
                self.begun.update(fresh)
            if run.operator == graph.accounting:
                self.train(step, run)

    def train(self, step: int, run: Run) -> None:
        """Draw outcomes of the rows that the step trains on, the same on all ranks of the model."""
        keys = []
        for row in self.rows_of(run):
            age, number = self.plan.batch.as_taken(row)
            if self.last_age(step - age, number) == age:
                name = self.random.choice([name for name in OUTCOMES if name != FROZEN])
                assert (step - age, number) in self.begun - self.ended.keys(), "a row is trained on twice, or too early"
                self.ended[step - age, number] = name
                keys.append(row * len(OUTCOMES) + CODES[name])
        for rank in run.ranks:
            self.ledgers[rank].add(outcomes_of(keys))
            if run.mini_batches.stop == self.plan.batch.num_mini_batches:
                self.ledgers[rank].complete(step)

    def last_age(self, taken: int, number: int) -> int | None:
        """Steps over which the responses of a row's prompt are generated, after the first one; None before the run."""
        prompt = number // self.plan.batch.samples_per_prompt
        return Random(f"{taken} {prompt}").randrange(self.plan.batch.segments) if taken >= 0 else None

    def rows_of(self, run: Run) -> Sequence[int]:
        """Rows that all replicas of a Run work on."""
        batch, layout = self.plan.batch, self.plan.placement[run.model].layout
        ranks = [rank for rank in run.ranks if layout.is_first_of_replica(rank)]
        return [row for rank in ranks for row in batch.rows(batch.prompts_on(layout, rank, run.mini_batches))]

    def account(self, next_step: int) -> tuple[dict[str, int], dict[str, list[int]]]:
        """Rows, and those carried, in a checkpoint before ``next_step``: reports of the ranks, which agree."""
        reports = [(counts, ledger.carried) for ledger in self.ledgers if (counts := ledger.counts(next_step))]
        assert reports and all(each == reports[0] for each in reports)
        return reports[0]

    def check(self, next_step: int) -> None:
        """Compare the account with the rows that were generated and trained on."""
        shape, training = self.plan.batch, self.plan.graph.accounting
        assert training is not None
        frozen = min(next_step, training.first_step)
        in_flight = {(taken, number) for taken, number in self.begun - self.ended.keys() if taken >= frozen}
        rows = {FROZEN: frozen * shape.num_taken, IN_FLIGHT: len(in_flight)}
        assert self.account(next_step)[0] == Counter(self.ended.values()) + Counter(rows)
        oldest, newest = next_step - (shape.segments - 1), next_step + self.plan.schedule.lag - 1
        assert all(oldest <= taken <= newest for taken, _ in in_flight)


def resumed(before: EmulatedRun, next_step: int) -> EmulatedRun:
    """Another process that goes on from a checkpoint."""
    run = EmulatedRun(before.plan, before.random, before)
    for ledger in run.ledgers:
        ledger.load(*before.account(next_step), next_step)
    return run


@pytest.mark.parametrize(
    "index", [pytest.param(n, marks=[pytest.mark.full] * (n >= BY_DEFAULT // 100)) for n in range(NUM_RUNS // 100)]
)
def test_every_row_has_one_outcome_or_is_in_flight(index: int) -> None:
    """A hundred runs each."""
    for number in range(100):
        random = Random(f"rows {index} {number}")
        plan = next(plan for _ in range(100) if (plan := random_plan(random)) is not None)
        run, next_step = EmulatedRun(plan, random), 0
        steps, lag = plan.spec.steps, plan.schedule.lag
        while next_step < steps:
            for turn in rounds(plan.schedule, steps, next_step):
                run.walk(turn)
                next_step = min(steps, max(0, turn + 1 - lag))
                if next_step:
                    run.check(next_step)
                if 0 < next_step < steps and random.random() < 0.2:
                    run = resumed(run, next_step)
                    break
        assert run.begun == {(step, number) for step in range(steps) for number in range(plan.batch.num_taken)}
