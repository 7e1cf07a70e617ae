"""Parity gate between rollout engine and trainer: what it measures, what it stops, and that all ranks stop alike."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from replicas import Alone, Port, mask_of, on_replicas
from small_runs import spec_of
from torch import Tensor

from flexrlhf.config.spec import ParitySpec, RolloutSpec
from flexrlhf.engines.base import Batch, Moments
from flexrlhf.objectives.context import CombineContext
from flexrlhf.objectives.functions import COMBINES
from flexrlhf.objectives.parity import Difference, ParityError, naming_tokens
from flexrlhf.plan.pipeline import ResolvedSpec

STATISTICS = ("parity_mean", "parity_p999", "parity_max")
MASK = mask_of("1110", "1000", "0000", "1111")
TRAINER = -torch.tensor([[1.0, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
TOKENS = torch.arange(4 * 6, dtype=torch.int32).view(4, 6)
"""Two tokens of prompt before the response, so that position p of row r is token 6r + 2 + p."""


def gate(**limits: float) -> RolloutSpec:
    parity = ParitySpec.model_validate({"max_difference": 9.0, "mean_difference": 9.0} | limits)
    return RolloutSpec(engine="vllm", parity=parity)


def batch_with(
    differences: dict[tuple[int, int], float], names: tuple[str, str] = ("rollout_logprobs", "logprobs")
) -> Batch:
    """Return responses whose log-probs by the engine are larger by ``differences``, and by 50 outside of them."""
    more = torch.where(MASK.bool(), 0.0, 50.0)
    for (row, position), difference in differences.items():
        more[row, position] = difference
    columns = {names[0]: TRAINER + more, names[1]: TRAINER.clone(), "tokens": TOKENS, "response_mask": MASK.clone()}
    return Batch(columns, 100 + torch.arange(4), 1)


def compare(spec: RolloutSpec, batch: Batch, reducer: Any = None) -> Moments:
    columns, statistics = COMBINES["parity"](spec, batch, CombineContext([], reducer or Alone()))
    assert columns == {}
    return statistics


def failure(spec: RolloutSpec, batch: Batch, reducer: Any = None) -> ParityError:
    with pytest.raises(ParityError) as caught:
        compare(spec, batch, reducer)
    return caught.value


def means(statistics: Moments) -> dict[str, float]:
    return {name: float(total[1] / total[0]) for name, total in statistics.items()}


# --- what is measured


def test_the_mean_and_the_largest_amount_by_hand() -> None:
    """Eight tokens, of which three differ, one of them the other way; positions outside the responses do not count."""
    statistics = compare(gate(), batch_with({(0, 1): 0.5, (1, 0): -1.0, (3, 3): 0.25}))
    largest = pytest.approx(1.0)
    assert means(statistics) == {"parity_mean": pytest.approx(1.75 / 8), "parity_p999": largest, "parity_max": largest}


def test_one_token_of_a_thousand_may_differ_more() -> None:
    """Of 4,000 tokens those that differ most are on one rank; the fifth largest is the quantile."""
    difference = torch.full((40, 100), 0.001)
    difference[0, :5] = torch.tensor([9.0, 8.0, 7.0, 6.0, 0.5])
    columns = {"logprobs": torch.zeros(40, 100), "rollout_logprobs": difference, "response_mask": torch.ones(40, 100)}
    batch = Batch(columns | {"tokens": torch.zeros(40, 102, dtype=torch.int32)}, torch.arange(40), 1)

    def work(rank: int, port: Port) -> dict[str, float]:
        part = batch.select(slice(10 * rank, 10 * rank + 10))
        return means(compare(gate(max_difference=9.5, p999_difference=0.6), part, port))

    for found in on_replicas(4, work):
        assert found["parity_p999"] == pytest.approx(0.5) and found["parity_max"] == pytest.approx(9.0)
    assert "rollout.parity.p999_difference 0.4, found 0.5" in str(failure(gate(p999_difference=0.4), batch))


def test_without_an_inference_copy_the_engines_log_probs_are_compared_with_those_of_the_trained_copy() -> None:
    batch = batch_with({(0, 0): 0.5}, ("logprobs", "trainer_logprobs"))
    assert means(compare(gate(), batch))["parity_max"] == pytest.approx(0.5)


def test_responses_without_tokens_agree() -> None:
    batch = batch_with({})
    batch.columns["response_mask"][:] = 0
    for empty in (batch, batch_with({}).select(slice(0, 0))):
        assert means(compare(gate(max_difference=1e-9), empty)) == dict.fromkeys(STATISTICS, 0.0)


SPLITS = [(4,), (2, 2), (1, 0, 3), (0, 0, 4), (1, 1, 1, 1)]


@pytest.mark.parametrize("sizes", SPLITS)
def test_ranks_measure_the_same_however_rows_are_split(sizes: tuple[int, ...]) -> None:
    whole = batch_with({(0, 1): 0.5, (1, 0): -1.0, (3, 3): 0.25})
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    parts = [whole.select(slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    found = on_replicas(len(sizes), lambda rank, port: compare(gate(), parts[rank], port))
    assert all(means(each) == means(compare(gate(), whole)) for each in found)


# --- what stops a run


def test_a_token_beyond_the_largest_difference_stops_the_run() -> None:
    batch = batch_with({(0, 1): 0.5, (1, 0): -1.0})
    assert means(compare(gate(max_difference=1.0), batch))["parity_max"] == 1.0
    assert str(failure(gate(max_difference=0.9), batch)) == (
        "rollout engine and trainer disagree about the same tokens: rollout.parity.max_difference 0.9, found 1 nats "
        "(mean 0.188, largest 1)"
    )


def test_many_small_differences_stop_the_run() -> None:
    batch = batch_with({(0, 0): 0.5, (0, 1): 0.5, (0, 2): 0.5, (3, 0): 0.5})
    assert compare(gate(mean_difference=0.25), batch)
    assert "rollout.parity.mean_difference 0.2, found 0.25 nats" in str(failure(gate(mean_difference=0.2), batch))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["rollout_logprobs", "logprobs"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_what_is_no_number_stops_the_run(side: str, wrong: float, num_ranks: int) -> None:
    """On one rank or on several, whose sums must not overflow."""
    batch = batch_with({})
    batch.columns[side][0, 0] = batch.columns[side][3, 0] = wrong
    size = 4 // num_ranks

    def work(rank: int, port: Port) -> ParityError:
        return failure(gate(), batch.select(slice(rank * size, (rank + 1) * size)), port)

    for error in on_replicas(num_ranks, work):
        assert {(item.row, item.position) for item in error.worst} >= {(100, 0), (103, 0)}
        assert "-4.6e+" not in str(error) and "mean -" not in str(error)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_positions_outside_the_responses_hide_nothing(wrong: float) -> None:
    batch = batch_with({(3, 1): 2.0})
    for name in ("rollout_logprobs", "logprobs"):
        batch.columns[name][~MASK.bool()] = wrong
    statistics = means(compare(gate(), batch))
    assert statistics == {"parity_mean": pytest.approx(0.25), **dict.fromkeys(STATISTICS[1:], pytest.approx(2.0))}
    assert failure(gate(max_difference=1.0), batch).worst[0] == Difference(103, 1, 21, 0.0, -2.0)


# --- its sentence


def test_the_worst_tokens_come_in_order_with_their_rows_of_the_step() -> None:
    error = failure(gate(max_difference=0.1), batch_with({(0, 1): 0.5, (1, 0): -1.5, (3, 0): 0.25, (3, 3): 1.0}))
    assert error.worst == (
        Difference(row=101, position=0, token=8, engine=-2.5, trainer=-1.0),
        Difference(row=103, position=3, token=23, engine=-3.0, trainer=-4.0),
        Difference(row=100, position=1, token=3, engine=-1.5, trainer=-2.0),
    )


def test_no_token_outside_the_responses_is_named() -> None:
    batch = batch_with({(1, 0): -2.0}).select(slice(1, 3))
    assert failure(gate(max_difference=1.0), batch).worst == (Difference(101, 0, 8, -3.0, -1.0),)


@pytest.mark.parametrize("sizes", SPLITS)
def test_all_ranks_raise_the_same_sentence(sizes: tuple[int, ...]) -> None:
    whole = batch_with({(0, 1): 0.5, (1, 0): -1.5, (3, 0): 0.25, (3, 3): 1.0})
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]

    def work(rank: int, port: Port) -> ParityError:
        part = whole.select(slice(ends[rank] - sizes[rank], ends[rank]))
        return failure(gate(max_difference=0.1), part, port)

    alone = failure(gate(max_difference=0.1), whole)
    for error in on_replicas(len(sizes), work):
        assert str(error) == str(alone) and error.worst == alone.worst


def test_the_step_and_the_texts_are_named() -> None:
    batch = batch_with({(1, 0): -1.5})
    with pytest.raises(ParityError) as caught, naming_tokens(lambda ids: f"<{ids[0]}>", step=7):
        compare(gate(max_difference=0.1), batch.select(slice(1, 2)))
    message = str(caught.value)
    assert message.startswith("step 7: rollout engine and trainer disagree")
    assert message.endswith("worst tokens: '<8>' (row 101, token 0: engine -2.50000, trainer -1.00000)")
    assert "\n" not in message and caught.value.worst[0].row == 101


def test_other_errors_pass_as_they_are() -> None:
    with pytest.raises(KeyError, match="x"), naming_tokens(str, step=0):
        raise KeyError("x")


# --- what is allowed


@pytest.mark.parametrize(
    ("actor", "rollout", "limits"),
    [
        ("float32", "{}", (1e-3, None, 1e-4)),
        ("bfloat16", "{}", (None, 1.0, 0.05)),
        ("float32", "{dtype: bfloat16}", (None, 1.0, 0.05)),
        ("bfloat16", "{dtype: float32}", (None, 1.0, 0.05)),
        ("float16", "{dtype: float16}", (None, 1.0, 0.05)),
        ("float32", "{parity: {max_difference: 0.5}}", (0.5, None, 1e-4)),
        ("bfloat16", "{parity: {mean_difference: 0.5}}", (None, 1.0, 0.5)),
    ],
)
def test_what_the_gate_allows_follows_from_the_types(
    actor: str, rollout: str, limits: tuple[float | None, float | None, float]
) -> None:
    spec = spec_of(None, 1, f"rollout={rollout}", "rollout.engine=vllm", f"models.actor.dtype={actor}")
    parity = ResolvedSpec.of(spec).spec.rollout.parity
    assert parity is not None
    assert (parity.max_difference, parity.p999_difference, parity.mean_difference) == limits


def test_what_the_gate_allows_follows_from_types_that_are_not_written() -> None:
    """On devices that compute in it, models without a type are in bfloat16."""
    spec = spec_of(None, 1, "cluster={nodes: [{devices: 1, class: A100-80G}]}", "rollout.engine=vllm")
    parity = ResolvedSpec.of(spec).spec.rollout.parity
    assert parity is not None
    assert (parity.max_difference, parity.p999_difference, parity.mean_difference) == (None, 1.0, 0.05)


def test_no_gate_stays_none() -> None:
    spec = spec_of(None, 1, "rollout={engine: vllm, parity: null}")
    assert ResolvedSpec.of(spec).spec.rollout.parity is None


def test_16_bit_log_probs_are_compared_in_full() -> None:
    """The columns are float32, whatever the engines compute in."""
    batch = batch_with({(0, 0): 0.125})
    halves: dict[str, Tensor] = {name: batch[name].bfloat16() for name in ("rollout_logprobs", "logprobs")}
    assert means(compare(gate(), Batch(dict(batch.columns) | halves, batch.rows, 1)))["parity_max"] == 0.125
