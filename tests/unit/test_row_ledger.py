"""Ledger of rows: every row that is taken from the data has one outcome, at each step and in each checkpoint."""

from __future__ import annotations

import pytest
from small_runs import plan_of, spec_of

from flexrlhf.metrics import METRICS, Outcome
from flexrlhf.operators.outcomes import RowAccount
from flexrlhf.trainer.row_ledger import RowLedger, outcomes_of


def ledger_of(*overrides: str, rank: int = 0) -> RowLedger:
    return RowLedger(plan_of(None, 2, *overrides), rank)


def test_rows_of_a_step_come_in_chunks_and_add_up() -> None:
    ledger = ledger_of()
    for step in range(2):
        ledger.add({"trained": range(0, 3), "alike": [3]})
        ledger.add({"trained": range(4, 7), "invalid_score": [7]})
        ledger.complete(step)
    assert ledger.counts(2) == {"trained": 12, "alike": 2, "invalid_score": 2}


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [(range(7), "7"), ([*range(8), 3], "3"), ([0, 1, 2, 3, 4, 5, 6, 6], "6-7"), (range(2, 9), "0-1,8")],
)
def test_a_row_without_an_outcome_or_with_two_ends_a_run(rows: range, wrong: str) -> None:
    ledger = ledger_of()
    ledger.add({"trained": rows})
    with pytest.raises(AssertionError, match=f"^step 0: not one outcome each of rows {wrong}$"):
        ledger.complete(0)


def test_a_resumed_ledger_goes_on_and_a_wrong_one_ends_the_run() -> None:
    ledger = ledger_of()
    ledger.load({"trained": 10, "truncated": 6}, {}, 2)
    ledger.add({"trained": range(8)})
    ledger.complete(2)
    assert ledger.counts(3) == {"trained": 18, "truncated": 6}
    with pytest.raises(AssertionError, match="15 rows have an outcome before step 2, and 16 should"):
        ledger.load({"trained": 15}, {}, 2)


def test_a_checkpoint_of_an_older_version_has_rows_without_record() -> None:
    ledger = ledger_of()
    ledger.load({}, {}, 2)
    assert ledger.counts(2) == {"unrecorded": 16}


def test_rows_of_frozen_steps_and_in_flight_are_part_of_the_account() -> None:
    """Batch 2 of three is generated before batch 1 is trained on; the actor is trained from step 1 on."""
    lagging = plan_of([0.5] * 6, 2, "schedule.lag=1", "algorithm.freeze_actor_steps=1")
    (rank,) = lagging.placement["actor"].ranks
    ledger = RowLedger(lagging, rank)
    assert ledger.counts(1) == {"frozen": 8, "in_flight": 8}
    ledger.load({"frozen": 8, "in_flight": 8}, {}, 1)
    ledger.add({"trained": range(8)})
    ledger.complete(1)
    assert ledger.counts(2) == {"frozen": 8, "trained": 8, "in_flight": 8}
    # ranks that do not train the actor would report what they do not see
    other = RowLedger(lagging, 1 - rank)
    other.load({"frozen": 8, "trained": 7, "in_flight": 9}, {"1": [3]}, 2)
    assert other.counts(2) == other.carried == {}


def test_outcomes_follow_from_keys_of_all_ranks() -> None:
    keys = [row * len(Outcome) + Outcome(name).code for row, name in ((5, "alike"), (1, "trained"), (0, "alike"))]
    assert outcomes_of(keys) == {"alike": [0, 5], "trained": [1]}


def test_every_outcome_has_a_metric() -> None:
    assert {*RowAccount.METRICS.values()} <= {metric.name for metric in METRICS}


def test_the_training_of_the_first_role_accounts_for_rows() -> None:
    for name, operator in (("ppo", "train_actor"), ("reward", "train_reward"), ("dpo", "train_actor")):
        spec = spec_of(None, 1, "models={actor: {init: {model_type: llama}}}", f"algorithm={{name: {name}}}")
        training = spec.algorithm.step_graph().accounting
        assert training is not None and training.name == operator


def test_an_account_in_words() -> None:
    rows = [{"rows_trained": 40.0, "rows_alike": 8.0, "rows_in_flight": 64.0}, {"rows_trained": 1000.0}]
    rows[1] |= {"rows_surplus": 2.0, "rows_invalid_score": 1.0, "rows_in_flight": 8.0}
    assert str(RowAccount.of(rows)) == (
        "1,059 taken = 1,040 trained + 8 filtered (8 alike) + 3 not counted (2 surplus, 1 invalid score) + 8 in flight"
    )
    assert RowAccount.of([{"step": 0}]).counts == RowAccount.of([]).counts == {}
