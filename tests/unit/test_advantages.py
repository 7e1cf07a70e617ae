"""Advantages by hand, and the same for every split."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from replicas import Alone, Port, mask_of, on_replicas
from scored_batches import context_of, ragged, scored_batch
from torch import Tensor

from flexrlhf.config.algorithms.grpo import GrpoSpec, RaftSpec
from flexrlhf.config.algorithms.ppo import PpoSpec
from flexrlhf.config.algorithms.reinforce import ReinforceSpec
from flexrlhf.engines.base import Batch, Moments, add_moments
from flexrlhf.metrics import Outcome
from flexrlhf.objectives.advantages import gae, ppo_advantages, reinforce_advantages, whiten
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.objectives.functions import COMBINES
from flexrlhf.objectives.group_advantages import best_of_group, centre_in_groups, group_advantages
from flexrlhf.objectives.reward_shaping import shape_rewards
from flexrlhf.trainer.controllers import first_state

# --- advantages by hand


def test_a_truncated_response_bootstraps_with_the_value_behind_its_last_token() -> None:
    values = torch.tensor([[0.0, 0.0, 6.0], [0.0, 0.0, 6.0], [0.0, 6.0, 0.0]])
    batch = scored_batch(mask_of("11", "11", "10"), [4.0, 4.0, 4.0], [0, 1, 0], values=values)
    spec = PpoSpec(truncation="bootstrap", whiten="none", gae_lambda=1.0)
    columns, _ = ppo_advantages(spec, batch, context_of(spec, batch))
    assert columns["returns"].tolist() == [[6.0, 6.0], [4.0, 4.0], [6.0, 0.0]]


def gae_of(rewards: list[float], values: list[float], final: float, gamma: float, gae_lambda: float) -> list[float]:
    """Schulman et al. 2016, eq. 16 as a sum of discounted errors, of a response without gaps."""
    following = [*values, final][1:]
    deltas = [r + gamma * after - v for r, after, v in zip(rewards, following, values, strict=True)]
    return [
        sum((gamma * gae_lambda) ** k * delta for k, delta in enumerate(deltas[start:])) for start in range(len(deltas))
    ]


@pytest.mark.parametrize("seed", range(8))
def test_gae_is_the_sum_of_discounted_errors(seed: int) -> None:
    """Of random responses with gaps, some of them empty, with and without a value after the last token."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(10, 7, generator=generator) < 0.6).to(torch.uint8)
    mask[0] = 0
    rewards, values = torch.randn(10, 7, generator=generator) * mask, torch.randn(10, 8, generator=generator)
    final = torch.randn(10, generator=generator) * (seed % 2)
    gamma, gae_lambda = 0.3 + 0.1 * (seed % 8), 1 - 0.1 * seed
    advantages, returns = gae(rewards, values, mask, gamma, gae_lambda, final)
    for row in range(10):
        places = mask[row].bool()
        own = [each[row][places].tolist() for each in (rewards, values[:, :-1])]
        expected = gae_of(own[0], own[1], float(final[row]), gamma, gae_lambda)
        assert advantages[row][places].tolist() == pytest.approx(expected, abs=1e-5)
        assert returns[row][places].tolist() == pytest.approx(
            [a + v for a, v in zip(expected, own[1], strict=True)], abs=1e-5
        )
        assert not advantages[row][~places].any() and not returns[row][~places].any()


# --- baselines of groups

TURNS = torch.tensor([[0.0, 1.0, 0.0, 2.0], [3.0, 0.0, 0.0, 0.0], [0.5, 0.0, 0.5, 0.0], [0.0, 0.0, 1.0, 0.0]])
"""Rewards of turns; the first two responses sum to 3, the others to 1."""


@pytest.mark.parametrize("whitened", ["none", "batch"])
def test_a_baseline_of_whole_responses_is_compared_with_whole_responses(whitened: Any) -> None:
    """Equal episodes have no advantage, whichever of their turns were rewarded; others have the same in all turns."""
    spec = ReinforceSpec(baseline="group", samples_per_prompt=2, kl=None, whiten=whitened)
    mask = mask_of("1101", "1111", "1010", "1110")
    rewards = TURNS * mask
    batch = scored_batch(mask, rewards.sum(1).tolist(), token_scores=rewards)
    columns, _ = reinforce_advantages(spec, Batch(batch.columns, batch.rows, 2), context_of(spec, batch))
    assert not columns["advantages"].any()
    rewards = rewards * torch.tensor([[1.0], [3.0], [1.0], [1.0]])
    batch = scored_batch(mask, rewards.sum(1).tolist(), token_scores=rewards)
    spec = spec.model_copy(update={"whiten": "none"})
    columns, _ = reinforce_advantages(spec, Batch(batch.columns, batch.rows, 2), context_of(spec, batch))
    assert columns["advantages"].tolist() == [[-3, -3, 0, -3], [3, 3, 3, 3], [0] * 4, [0] * 4]


NEAR = torch.tensor([100.1] * 4 + [100.1 + 7.6e-6] * 4)
"""Scores that differ by one unit of float32."""


@pytest.mark.parametrize("baseline", ["mean", "others"])
@pytest.mark.parametrize("size", [1.0, 1e-4, -1e6])
def test_scores_that_differ_by_rounding_are_alike(baseline: str, size: float) -> None:
    assert NEAR[0] != NEAR[-1]
    for scores in (NEAR * size, NEAR.new_full((8,), 100.1) * size):
        centred, deviation = centre_in_groups(scores, torch.ones(8, dtype=torch.bool), 8, baseline)
        assert not centred.any() and not deviation.any()
    centred, _ = centre_in_groups(NEAR + torch.arange(8) * 1e-3, torch.ones(8, dtype=torch.bool), 8, baseline)
    assert centred.sum().abs() < 1e-10 and centred.abs().min() > 1e-4


@pytest.mark.parametrize("how", ["batch", "running"])
def test_normalised_scores_that_differ_by_rounding_are_about_zero(how: Any) -> None:
    batch = scored_batch(mask_of(*["1"] * 8), NEAR.tolist())
    spec = PpoSpec(normalise_scores=how, kl=None)
    state = {
        "score_count": 8.0,
        "score_mean": float(NEAR.double().mean()),
        "score_deviation": float(NEAR.double().std()),
    }
    assert shape_rewards(spec, batch, context_of(spec, batch, **state)).scores.abs().max() < 1e-5


def test_whitening_of_large_values_has_mean_zero() -> None:
    values = (NEAR + torch.arange(8) * 1e-5)[:, None]
    found = whiten(values, mask_of(*["1"] * 8), [slice(0, 8)], Alone())
    assert found.sum().abs() < 1e-5


# --- whitening


SPLITS = [(10,), (5, 5), (9, 1), (10, 0), (0, 4, 6), (3, 3, 2, 2)]


@pytest.mark.parametrize("seed", range(5))
def test_whitening_is_of_the_tokens_that_count(seed: int) -> None:
    """What lies outside the mask may be anything, and stays out."""
    values, mask = ragged(9, seed)
    inside = mask.bool()
    own = values[inside].tolist()
    expected = [(value - statistics.mean(own)) / statistics.stdev(own) for value in own]
    found = whiten(values.where(inside, 1e6), mask, [slice(0, 9)], Alone())
    assert found[inside].tolist() == pytest.approx(expected, abs=1e-5)
    assert not found[~inside].any()


@pytest.mark.parametrize("whitening", ["none", "mini_batch", "batch"])
def test_what_is_whitened_together_is_a_setting(whitening: str) -> None:
    """Two mini-batches of other sizes: apart, together, or not at all."""
    noise, mask = ragged(10)
    batch = scored_batch(mask, noise[:, 0].tolist(), values=torch.cat([noise, noise[:, :1]], 1))
    spec = PpoSpec.model_validate({"whiten": whitening})
    segments = [slice(0, 4), slice(4, 10)]
    context = CombineContext(segments, Alone(), first_state(spec))
    found = ppo_advantages(spec, batch, context)[0]["advantages"]
    plain = ppo_advantages(spec.model_copy(update={"whiten": "none"}), batch, context)[0]["advantages"]
    parts = {"none": [], "mini_batch": segments, "batch": [slice(0, 10)]}[whitening]
    assert torch.equal(found, plain) == (whitening == "none")
    for part in parts:
        own = found[part][mask[part].bool()].tolist()
        assert statistics.mean(own) == pytest.approx(0.0, abs=1e-6)
        assert statistics.stdev(own) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("mask", ["000", "100"])
def test_whitening_of_no_or_one_token_is_finite(mask: str) -> None:
    assert whiten(torch.ones(1, 3), mask_of(mask), [slice(0, 1)], Alone()).isfinite().all()


def test_returns_are_those_before_whitening() -> None:
    values, mask = ragged(8)
    batch = scored_batch(mask, values[:, 0].tolist(), values=torch.cat([values, values[:, :1]], 1))
    context = context_of(PpoSpec(), batch)
    plain, _ = ppo_advantages(PpoSpec(whiten="none"), batch, context)
    white, _ = ppo_advantages(PpoSpec(), batch, context)
    assert torch.equal(plain["returns"], white["returns"])
    assert not torch.allclose(plain["advantages"], white["advantages"])
    assert float(white["advantages"].sum()) == pytest.approx(0.0, abs=1e-4)


# --- data-parallel ranks without rows


def test_a_rank_without_rows_reports_the_same_statistics() -> None:
    batch = scored_batch(mask_of("1", "1"), [1.0, 2.0])
    spec = PpoSpec(reward_clip=1.0)
    full, empty = (COMBINES["ppo_advantages"](spec, b, context_of(spec, b)) for b in (batch, batch.select(slice(0, 0))))
    assert set(full[1]) == set(empty[1])
    assert all(not total.any() for total in empty[1].values())
    assert [len(column) for column in empty[0].values()] == [0, 0, 0, 0]


@pytest.mark.parametrize("sizes", SPLITS)
def test_advantages_are_the_same_for_any_split(sizes: tuple[int, ...]) -> None:
    """With every setting that looks over all rows, and a response that does not count."""
    noise, mask = ragged(10, seed=3)
    scores = noise[:, 1].tolist()
    scores[6] = math.nan
    batch = scored_batch(mask, scores, [1, 0] * 5, logprobs=noise, values=torch.cat([noise, noise[:, :1]], 1))
    spec = PpoSpec(normalise_scores="batch", truncation="mask", reward_clip=1.0)
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]

    def work(rank: int, port: Port) -> tuple[Columns, Moments]:
        part = batch.select(slice(ends[rank] - sizes[rank], ends[rank]))
        return ppo_advantages(spec, part, context_of(spec, part, port))

    whole, its_sums = ppo_advantages(spec, batch, context_of(spec, batch))
    found = on_replicas(len(sizes), work)
    for name, column in whole.items():
        assert torch.allclose(torch.cat([columns[name] for columns, _ in found]), column, atol=1e-5), name
    total: Moments = {}
    for _, part in found:
        add_moments(total, part)
    assert set(total) == set(its_sums)
    for name, sums in its_sums.items():
        assert total[name].tolist() == pytest.approx(sums.tolist(), rel=1e-6, abs=1e-6), name


def test_a_mini_batch_of_segments_trains_on_all_groups_that_differ_for_any_split() -> None:
    """Later steps replace the others, so that none is surplus, however few groups a replica has."""
    spec = GrpoSpec(samples_per_prompt=2, dynamic_sampling={"rounds": 2}, kl=None)  # type: ignore[arg-type]
    batch = scored_batch(torch.ones(8, 2, dtype=torch.uint8), [0.0, 1.0, 2.0, 2.0, 0.0, 1.0, 0.0, 1.0])
    batch = Batch(batch.columns, batch.rows, 2)

    def work(rank: int, port: Port) -> Tensor:
        part = batch.select(slice(6 * rank, 6 + 2 * rank))
        context = replace(context_of(spec, part, port), has_surplus=False)
        return group_advantages(spec, part, context)[0]["outcome"]

    found = [[*Outcome][code] for code in torch.cat(on_replicas(2, work))]
    assert found == ["trained", "trained", "alike", "alike", *["trained"] * 4]


def test_raft_trains_on_the_best_response_of_each_group() -> None:
    """Of equal ones on the first; a response without a score is none of them."""
    spec = RaftSpec(samples_per_prompt=3)
    batch = scored_batch(torch.ones(6, 2, dtype=torch.uint8), [1.0, 2.0, 2.0, float("nan"), -1.0, -3.0])
    batch = Batch(batch.columns, batch.rows, 3)
    columns, _ = best_of_group(spec, batch, context_of(spec, batch))
    assert columns["loss_mask"].any(1).tolist() == [False, True, False, False, True, False]
    assert columns["advantages"].tolist() == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    assert [[*Outcome][code] for code in columns["outcome"]] == [
        *("not_best", "trained", "not_best", "invalid_score", "trained", "not_best")
    ]
