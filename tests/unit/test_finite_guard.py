"""Search for the first number that is not finite, over columns, losses, gradients and ranks; and what follows."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from replicas import on_replicas
from torch import Tensor
from torch.distributed import HashStore

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.engines.base import Batch, Loss, Moments, Outputs, Totals, moments
from flexrlhf.engines.non_finite import (
    NonFinite,
    NonFiniteStep,
    TrainingPass,
    forbid_update,
)
from flexrlhf.errors import RunStopped
from flexrlhf.trainer.operator_guards import FiniteGuard
from flexrlhf.trainer.step_warnings import RareWarnings

ROWS = torch.tensor([7, 3, 9, 5])
WRONG = (math.nan, math.inf, -math.inf)


def columns(**wrong: tuple[int, int]) -> dict[str, Tensor]:
    """Two columns of 4 rows x 3, one column of a number a row, and integers; ``wrong``: place of a NaN."""
    found = {"logprobs": torch.zeros(4, 3), "values": torch.zeros(4, 3), "scores": torch.zeros(4)}
    for name, (row, position) in wrong.items():
        if found[name].ndim == 1:
            found[name][row] = math.nan
        else:
            found[name][row, position] = math.nan
    return {**found, "tokens": torch.ones(4, 3, dtype=torch.int32)}


def test_nothing_is_found_where_all_is_finite() -> None:
    assert NonFinite.first_in_columns(columns(), ROWS) is None
    assert NonFinite.first_in_columns({name: column[:0] for name, column in columns().items()}, ROWS[:0]) is None


def test_the_first_row_by_its_number_is_found() -> None:
    assert NonFinite.first_in_columns(columns(logprobs=(0, 1), values=(1, 2)), ROWS) == NonFinite(3, 0, "values", 2)
    assert NonFinite.first_in_columns(columns(logprobs=(0, 1), values=(2, 0)), ROWS) == NonFinite(7, 0, "logprobs", 1)
    assert NonFinite.first_in_columns(columns(scores=(3, 0)), ROWS) == NonFinite(5, 0, "scores")


@pytest.mark.parametrize("wrong", WRONG)
def test_infinity_is_not_finite(wrong: float) -> None:
    column = torch.zeros(4, 3)
    column[1, 1:] = wrong
    assert NonFinite.first_in_columns({"values": column}, ROWS) == NonFinite(3, 0, "values", 1)


# --- losses and gradients

TOTALS = Totals(4.0, 4.0, 4.0)


def clamped(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Moments]:
    """A loss whose gradient hides what is not finite, as the clamp of a log-ratio does."""
    return (outputs.quantity - batch["old"]).clamp(-20, 20).exp().sum() / totals.tokens, {}


def roots(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Moments]:
    """A loss that is finite where its gradient is not."""
    return outputs.quantity.abs().sqrt().sum(), {}


def of_group(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Moments]:
    """A loss that is not finite where a text is missing."""
    return outputs.quantity.sum() / float(len(batch) == 2), {}


def batch_of(rows: list[int], **changed: Tensor) -> Batch:
    return Batch({"old": torch.zeros(len(rows), 2)} | changed, torch.tensor(rows), 1)


@pytest.mark.parametrize("wrong", [math.nan, 0.0])
def test_a_loss_that_is_not_finite_reaches_the_gradient_and_no_other_changes_a_bit(wrong: float) -> None:
    """A clamp alone would give the other tokens an update, and that one none."""
    old = torch.tensor([[0.1, 0.2], [wrong, 0.3]])
    gradients = []
    for guarded in (False, True):
        new = torch.tensor([[0.5, -0.0], [0.25, -1.0]], requires_grad=True)
        quantity = new * 1.0
        value, _ = clamped(Outputs(quantity), batch_of([0, 1], old=old), TOTALS)
        if guarded:
            forbid_update(value, [quantity])
        value.backward()
        gradients.append(new.grad)
    plain, found = gradients
    assert plain is not None and found is not None and plain.isfinite().all()
    assert (
        bool(found.isnan().all())
        if math.isnan(wrong)
        else torch.equal(found.view(torch.int32), plain.view(torch.int32))
    )


def found_by(
    batch: Batch, outputs: Outputs, function: Any = clamped, ranks: Any = None, compares: bool = True
) -> NonFinite | None:
    batch, loss = replace(batch, compares=compares), Loss("logprobs", function, ())
    passes = [TrainingPass(0, 2, batch, outputs, TOTALS)] if len(batch) else []
    return NonFinite.first_of(passes, [(batch, loss)], ranks or RankGroup(None, (0,), lambda work, ranks: None))


def test_training_names_what_was_wrong_first() -> None:
    """A column before what was computed of it, an output before the loss, a loss before its gradient."""
    fine, old = torch.ones(2, 2), torch.zeros(2, 2)
    old[1, 1] = math.nan
    assert found_by(batch_of([4, 2], old=old), Outputs(fine)) == NonFinite(2, 0, "old", 1, 2)
    assert found_by(batch_of([4, 2]), Outputs(fine + old)) == NonFinite(2, 0, "the computed log-probs", 1, 2)
    assert found_by(batch_of([4, 2]), Outputs(fine, entropy=old)) == NonFinite(2, 0, "the computed entropy", 1, 2)
    huge = lambda outputs, batch, totals: (outputs.quantity.sum() * math.inf, {})  # noqa: E731
    assert found_by(batch_of([4, 2]), Outputs(fine), huge) == NonFinite(2, 0, "the loss", None, 2)
    zero = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    assert found_by(batch_of([4, 2]), Outputs(zero), roots) == NonFinite(4, 0, "the gradient of the loss", 1, 2)
    assert found_by(batch_of([4, 2]), Outputs(fine)) is None


def test_rows_are_searched_together_where_a_loss_compares_them() -> None:
    """Else one by one: a pass may have some responses to a prompt."""
    pair = replace(batch_of([4, 5]), samples_per_prompt=2)
    assert found_by(pair, Outputs(torch.ones(2, 2)), of_group) is None
    alone = pair.select(slice(1, 2))
    assert found_by(alone, Outputs(torch.ones(1, 2)), compares=False) is None
    for batch in (pair, alone):
        found = found_by(batch, Outputs(torch.ones(len(batch), 2)), of_group, compares=False)
        assert found == NonFinite(int(batch.rows[0]), 0, "the loss", None, 2)


@pytest.mark.parametrize("sizes", [(4, 0), (2, 2), (0, 4), (1, 3)])
def test_all_ranks_find_the_same_row(sizes: tuple[int, ...]) -> None:
    """Rows 6 and 1 are wrong, wherever they are."""
    old = torch.tensor([[0.0, 0.0], [0.0, math.nan], [0.0, 0.0], [math.nan, 0.0]])
    rows = [3, 6, 8, 1]

    def on(rank: int, reducer: Any) -> NonFinite | None:
        part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        batch = batch_of(rows[part], old=old[part])
        return found_by(batch, Outputs(torch.ones(len(batch), 2)), ranks=reducer)

    assert on_replicas(len(sizes), on) == [NonFinite(1, 0, "old", 0, 2)] * len(sizes)


# --- stop or skip


def guard(policy: Any, store: HashStore | None = None, rank: int = 0) -> FiniteGuard:
    return FiniteGuard(policy, store or HashStore(), rank)


def check(each: FiniteGuard, wrong: dict[str, tuple[int, int]], ranks: tuple[int, ...] = (0,), more: int = 0) -> None:
    """``more``: is added to the numbers of the rows."""
    group = RankGroup(None, ranks, lambda work, ranks: None)
    each.check_columns("step 4, values on critic", 4, columns(**wrong), ROWS + more, group)


def test_a_column_stops_the_run_by_a_sentence() -> None:
    check(guard("stop"), {})
    with pytest.raises(RunStopped) as caught:
        check(guard("stop"), {"values": (1, 2)})
    assert str(caught.value) == (
        "step 4, values on critic: NaN or infinity in values of row 3 at response token 2; guards.non_finite: skip "
        "would go on without the optimizer steps that it spoils"
    )


def test_ranks_that_find_something_name_the_first_row_of_all() -> None:
    store = HashStore()

    def on(rank: int) -> str:
        with pytest.raises(RunStopped) as caught:
            check(guard("stop", store, rank), {"values": (1, 2)}, (0, 1), more=0 if rank else 10)
        return str(caught.value)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(on, (0, 1))
    assert first == second and "row 3 at" in first


def test_skipping_reports_once_in_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    each = guard("skip")
    for _ in range(3):
        check(each, {"values": (1, 2)})
    assert capsys.readouterr().err.count("no update will follow from it") == 1
    warn = RareWarnings()
    for step in range(2 * RareWarnings.INTERVAL_STEPS + 1):
        warn("one", step, "here")
        warn("other", step, "there")
    assert capsys.readouterr().err.count("here\n") == 6


NOTHING = torch.zeros(3, dtype=torch.float64)
SKIPPED = {"learning_rate": moments(torch.ones(1)), "grad_norm": NOTHING, "skipped": moments(torch.ones(1))}


def test_a_step_that_was_left_out_counts_for_nothing_but_itself(capsys: pytest.CaptureFixture[str]) -> None:
    loss = Loss("logprobs", clamped, ("policy_loss", "entropy"))
    error = NonFiniteStep(SKIPPED, NonFinite(3, 0, "the loss", None, 1))
    statistics = guard("skip").left_out("step 4, train_actor on actor, mini-batch 1", 4, error, [loss], True)
    assert statistics.keys() == {*SKIPPED, "policy_loss", "entropy"}
    assert torch.equal(statistics["policy_loss"], NOTHING) and statistics["skipped"].tolist() == [1, 1, 1]
    assert "mini-batch 1: the loss or its gradient is not finite, first in the loss of row 3" in capsys.readouterr().err
    with pytest.raises(RunStopped, match="is not finite, though every loss is; the weights were left as they were"):
        guard("stop").left_out("step 4", 4, NonFiniteStep(SKIPPED), [loss], True)


def test_steps_are_counted_only_where_they_may_be_skipped() -> None:
    made = {"grad_norm": moments(torch.ones(1))}
    assert guard("stop").counted(made) == made
    assert guard("skip").counted(made)["skipped"].tolist() == [1, 0, 0]
    assert guard("skip").counted(SKIPPED) is SKIPPED
