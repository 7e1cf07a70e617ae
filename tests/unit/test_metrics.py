"""Metrics from moments: definitions, sums over parts, what is printed."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest
from replicas import mask_of
from scored_batches import context_of, scored_batch

from flexrlhf.config.algorithms import KINDS
from flexrlhf.config.algorithms.base import AlgorithmSpec, ImportanceSpec
from flexrlhf.config.algorithms.policy_sections import KlSpec, PtxSpec
from flexrlhf.config.algorithms.ppo import AcShareSpec, PpoSpec
from flexrlhf.metrics import METRICS, Triple
from flexrlhf.objectives.functions import COMBINES, LOSSES

SPECS: dict[str, AlgorithmSpec] = {
    operator.function: kind()
    for kind in reversed(KINDS.values())
    for operator in kind().step_graph().operators
    if operator.kind == "train"
} | {
    "on_policy_loss": PpoSpec(kl=KlSpec(place="loss")),
    "on_policy_shared_loss": AcShareSpec(),
    "ptx": PpoSpec(ptx=PtxSpec(path="texts.jsonl")),
}


def moments(values: list[float]) -> Triple:
    return float(len(values)), sum(values), sum(value * value for value in values)


def test_mean_and_standard_deviation() -> None:
    row = METRICS.evaluate({"reward": moments([1.0, 2.0, 6.0])})
    assert set(row) == {"reward_mean", "reward_std"}
    assert row["reward_mean"] == pytest.approx(3.0)
    assert row["reward_std"] == pytest.approx(statistics.pstdev([1.0, 2.0, 6.0]))


def test_a_metric_does_not_depend_on_how_its_rows_are_split() -> None:
    draw = random.Random(0)
    values = [draw.gauss(3, 2) for _ in range(50)]
    total: dict[str, Triple] = {}
    for part in (values[:7], [], values[7:30], values[30:]):
        METRICS.add(total, {"reward": moments(part)})
    assert METRICS.evaluate(total) == pytest.approx(METRICS.evaluate({"reward": moments(values)}))


def test_statistics_without_rows_give_no_metric() -> None:
    assert METRICS.evaluate({"reward": (0.0, 0.0, 0.0)}) == {}
    assert METRICS.evaluate({}) == {}


def test_a_constant_has_no_negative_variance() -> None:
    assert METRICS.evaluate({"reward": moments([0.1] * 1000)})["reward_std"] == pytest.approx(0.0, abs=1e-6)


def test_names_are_unique_and_defined() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(metric.definition for metric in METRICS)
    assert "reward_mean" in names


def test_a_loss_reports_defined_statistics_only() -> None:
    assert set(SPECS) == set(LOSSES)
    corrected = ("policy_loss", PpoSpec(importance=ImportanceSpec()))
    for name, spec in (*SPECS.items(), corrected):
        for statistic in LOSSES[name](spec).statistics:
            assert METRICS.statistic_name("train_actor", statistic) == statistic


@pytest.mark.parametrize(
    "settings", [{}, {"kl": None}, {"kl": {"place": "loss"}, "reward_clip": 1.0, "normalise_scores": "batch"}]
)
def test_statistics_of_an_experience_are_defined(settings: dict[str, Any]) -> None:
    spec = PpoSpec.model_validate(settings)
    batch = scored_batch(mask_of("11", "10"), [1.0, 2.0])
    reported = COMBINES["ppo_advantages"](spec, batch, context_of(spec, batch))[1]
    assert {"reward", "score_invalid", "advantage", "return"} <= set(reported)
    for statistic in reported:
        assert METRICS.statistic_name("advantages", statistic) == statistic


def test_a_sum_is_no_mean() -> None:
    """Two engines report 3 and 5 responses."""
    assert METRICS.evaluate({"rollout_requests": moments([3.0, 5.0])}) == {"rollout_requests": 8.0}


@pytest.mark.parametrize(
    ("weights", "share"), [([1.0, 1.0, 1.0], 1.0), ([1.0, 0.0, 0.0, 0.0], 0.25), ([2.0, 1.0], 9 / 10), ([0.0], 0.0)]
)
def test_the_effective_share_of_weighted_samples(weights: list[float], share: float) -> None:
    """Kong 1992: (sum of weights)^2 / sum of squares is a number of samples."""
    row = METRICS.evaluate({"importance_weight": moments(weights)})
    assert set(row) == {"importance_weight", "effective_sample_size"}
    assert row["effective_sample_size"] == pytest.approx(share)


def test_what_the_gate_found_is_a_mean() -> None:
    total: dict[str, Triple] = {}
    for _ in range(2):
        METRICS.add(total, {"parity_mean": moments([0.25]), "parity_max": moments([2.0])})
    assert METRICS.evaluate(total) == {"parity_mean": 0.25, "parity_max": 2.0}


def test_a_maximum_is_the_largest_of_all_chunks_and_a_share_of_nothing_is_left_out() -> None:
    """Two ranks report the maximum of their group for each chunk; a chunk without tokens has none."""
    total: dict[str, Triple] = {}
    for largest in ([2.0, 2.0], [5.0, 5.0], [], [3.0, 3.0]):
        METRICS.add(
            total, {"staleness_max": moments(largest), "staleness_2": moments([1.0, 0.0]), "staleness_3": (2.0, 0, 0)}
        )
    assert METRICS.evaluate(total) == {"staleness_max": 5.0, "staleness_2": 0.5}


def test_every_kind_of_metric_is_used() -> None:
    assert {metric.kind for metric in METRICS} == {"mean", "std", "sum", "max", "share", "effective_share"}


def test_train_operators_put_their_name_before_what_all_of_them_report() -> None:
    assert METRICS.statistic_name("train_critic", "grad_norm") == "train_critic/grad_norm"


def test_a_statistic_without_definition_is_its_mean_under_the_name_of_its_operator() -> None:
    name = METRICS.statistic_name("advantages", "disagreement")
    assert METRICS.evaluate({name: (4.0, 6.0, 10.0)}) == {"advantages/disagreement": 1.5}
    assert METRICS.evaluate({name: (0.0, 0.0, 0.0)}) == {}
