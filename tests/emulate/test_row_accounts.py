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
"""Step and row."""


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
    raw = {
        "name": "rows",
        "steps": random.randint(1, 8),
        "algorithm": algorithm,
        "models": {role: {"init": INIT} for role in ("actor", "reward", "cost")},
        "data": {"path": "rows.jsonl"},
        "cluster": {"devices": 2 * random.randint(1, 2)},
        "placement": ["1/2"] * (shadowed or 0) if is_apart else None,
        "schedule": {
            "lag": random.choice((0, 1, 1, 2, 4)) if is_apart else 0,
            "num_chunks": random.choice([n for n in (1, 2, 4) if mini_batches % n == 0]),
        },
        "sync": {"every": random.choice((1, 2, 3)) if is_apart else 1},
    }
    for role in ("reward", "cost"):
        if name in ("sft", "dpo") or (role == "cost" and name != "safe-rlhf"):
            del raw["models"][role]
    try:
        return make_plan(parse_spec(raw))
    except UserError:
        return None


class EmulatedRun:
    """Ledgers of all ranks, which walk the list until a stop; ``begun``: rows that a rank has generated or read."""

    def __init__(self, plan: Plan, random: Random) -> None:
        self.plan, self.random = plan, random
        self.ledgers = [RowLedger(plan, rank) for rank in range(plan.placement.num_ranks)]
        self.begun: set[Row] = set()
        self.ended: dict[Row, str] = {}

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
                fresh = [(step, row) for row in self.rows_of(run)]
                assert self.begun.isdisjoint(fresh), "a row is generated twice"
                self.begun.update(fresh)
            if run.operator == graph.accounting:
                self.train(step, run)

    def train(self, step: int, run: Run) -> None:
        """Draw outcomes, which are the same on all ranks of the model."""
        drawn = {row: self.random.choice([name for name in OUTCOMES if name != FROZEN]) for row in self.rows_of(run)}
        keys = [row * len(OUTCOMES) + CODES[name] for row, name in drawn.items()]
        assert self.begun.issuperset((step, row) for row in drawn), "a row is trained on before it is generated"
        self.ended |= {(step, row): name for row, name in drawn.items()}
        for rank in run.ranks:
            self.ledgers[rank].add(outcomes_of(keys))
            if run.mini_batches.stop == self.plan.batch.num_mini_batches:
                self.ledgers[rank].complete(step)

    def rows_of(self, run: Run) -> Sequence[int]:
        """Rows that all replicas of a Run work on."""
        batch, layout = self.plan.batch, self.plan.placement[run.model].layout
        ranks = [rank for rank in run.ranks if layout.is_first_of_replica(rank)]
        return [row for rank in ranks for row in batch.rows(batch.prompts_on(layout, rank, run.mini_batches))]

    def account(self, next_step: int) -> dict[str, int]:
        """Rows in a checkpoint before ``next_step``: reports of the ranks, which agree."""
        counts = [found for ledger in self.ledgers if (found := ledger.counts(next_step))]
        assert counts and all(each == counts[0] for each in counts)
        return counts[0]

    def check(self, next_step: int) -> None:
        """Compare the account with the rows that were generated and trained on."""
        account, num_rows = self.account(next_step), self.plan.batch.num_rows
        training = self.plan.graph.accounting
        assert training is not None
        frozen = min(next_step, training.first_step)
        in_flight = {(step, row) for step, row in self.begun - self.ended.keys() if step >= frozen}
        expected = Counter(self.ended.values()) + Counter({FROZEN: frozen * num_rows, IN_FLIGHT: len(in_flight)})
        assert account == expected
        assert {step for step, _ in in_flight} <= set(range(next_step, next_step + self.plan.schedule.lag))


def resumed(before: EmulatedRun, next_step: int) -> EmulatedRun:
    """Another process that goes on from a checkpoint: rows in flight are in it, rows of later steps are not."""
    run = EmulatedRun(before.plan, before.random)
    for ledger in run.ledgers:
        ledger.load(before.account(next_step), next_step)
    run.begun = {(step, row) for step, row in before.begun if step < next_step + before.plan.schedule.lag}
    run.ended = {(step, row): name for (step, row), name in before.ended.items() if step < next_step}
    return run


@pytest.mark.parametrize(
    "index", [pytest.param(n, marks=[pytest.mark.full] * (n >= BY_DEFAULT // 100)) for n in range(NUM_RUNS // 100)]
)
def test_every_row_has_one_outcome_or_is_in_flight(index: int) -> None:
    """A hundred runs each."""
    for number in range(100):
        random = Random(f"rows {index} {number}")
        plan = random_plan(random)
        if plan is None:
            continue
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
        everything = {(step, row) for step in range(steps) for row in range(plan.batch.num_rows)}
        assert run.begun == everything
