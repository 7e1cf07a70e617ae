"""``like``: settings of other engines and papers, each against numbers that are worked out by hand.

The example: one truncated response of two tokens, score 12; log-probs -1, -2, of the reference -1.5, -2.4; values
1, 0.5. Rewards are -beta * (0.5, 0.4), and the shaped score on the second token.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scored_batches import context_of, rewards_of, scored_batch

from flexrlhf.config.algorithms.grpo import GrpoSpec
from flexrlhf.config.algorithms.ppo import PpoSpec
from flexrlhf.config.algorithms.reinforce import ReinforceSpec
from flexrlhf.engines.base import Batch, Outputs, Totals
from flexrlhf.metrics import METRICS, Outcome
from flexrlhf.objectives.advantages import ppo_advantages, reinforce_advantages
from flexrlhf.objectives.group_advantages import group_advantages
from flexrlhf.objectives.losses import policy_loss, value_loss

ENGINES = ("verl", "openrlhf", "trl", "deepspeed-chat", "safe-rlhf")


def example() -> Batch:
    return scored_batch(
        torch.ones(1, 2, dtype=torch.uint8),
        [12.0],
        [0],
        logprobs=torch.tensor([[-1.0, -2.0]]),
        ref_logprobs=torch.tensor([[-1.5, -2.4]]),
        values=torch.tensor([[1.0, 0.5, 0.2]]),
    )


@pytest.mark.parametrize(
    ("like", "rewards", "advantages"),
    [
        # no penalty; lambda 1: 12 - 0.5, and 0.5 - 1 + 11.5
        ("verl", [0.0, 12.0], [11.0, 11.5]),
        # beta 0.01, scores to 10; lambda 1: 9.996 - 0.5, and -0.005 + 0.5 - 1 + 9.496
        ("openrlhf", [-0.005, 9.996], [8.991, 9.496]),
        # beta 0.05; lambda 0.95: 11.98 - 0.5, and -0.525 + 0.95 * 11.48
        ("trl", [-0.025, 11.98], [10.381, 11.48]),
        # beta 0.1, scores to 5; lambda 0.95: 4.96 - 0.5, and -0.55 + 0.95 * 4.46
        ("deepspeed-chat", [-0.05, 4.96], [3.687, 4.46]),
        # beta 0.02, scores to 50; lambda 0.95: 11.992 - 0.5, and -0.51 + 0.95 * 11.492
        ("safe-rlhf", [-0.01, 11.992], [10.4074, 11.492]),
    ],
)
def test_rewards_and_advantages_by_hand(like: Any, rewards: list[float], advantages: list[float]) -> None:
    # whitening the two tokens of one response would hide the rest
    spec = PpoSpec(like=like, whiten="none")
    assert rewards_of(spec, example())[0].tolist() == pytest.approx(rewards, abs=1e-5)
    columns, _ = ppo_advantages(spec, example(), context_of(spec, example()))
    assert columns["advantages"][0].tolist() == pytest.approx(advantages, abs=1e-5)


@pytest.mark.parametrize(("like", "bound"), list(zip(ENGINES, (3.0, 4.0, 4.0, 4.0, 4.0), strict=True)))
def test_the_loss_of_a_bad_token_that_became_likely(like: Any, bound: float) -> None:
    """Advantage -1, ratio 4: verl's dual clip bounds the loss at 3."""
    batch = Batch(
        {
            "loss_mask": torch.ones(1, 1),
            "logprobs": torch.zeros(1, 1),
            "ref_logprobs": torch.zeros(1, 1),
            "advantages": -torch.ones(1, 1),
        },
        torch.arange(1),
        1,
    )
    outputs = Outputs(torch.full((1, 1), 4.0).log(), torch.zeros(1, 1))
    loss, _ = policy_loss(PpoSpec(like=like)).function(outputs, batch, Totals(1, 1, 1))
    assert float(loss) == pytest.approx(bound)


@pytest.mark.parametrize(("like", "expected"), list(zip(ENGINES, (0.5, 0.5, 0.845, 0.845, 0.125), strict=True)))
def test_the_loss_of_a_value_that_ran_ahead(like: Any, expected: float) -> None:
    """Old value 0.5, new 1.5, return 2: clipped at 0.5 it is 1 and its error 1, at 0.2 it is 0.7 and its error 1.69.

    At 5 it is not clipped.
    """
    batch = Batch(
        {"loss_mask": torch.ones(1, 1), "values": torch.tensor([[0.5, 0.0]]), "returns": torch.tensor([[2.0]])},
        torch.arange(1),
        1,
    )
    loss, _ = value_loss(PpoSpec(like=like)).function(Outputs(torch.tensor([[1.5, 0.0]])), batch, Totals(1, 1, 1))
    assert float(loss) == pytest.approx(expected)


def test_openrlhf_limits_the_estimate() -> None:
    """A token of log-ratio 30 costs 0.01 * 10, and so does one of 5 with k2, where r^2 / 2 would be 12.5."""
    batch = scored_batch(torch.ones(1, 2, dtype=torch.uint8), [0.0], logprobs=torch.tensor([[30.0, 0.0]]))
    assert rewards_of(PpoSpec(like="openrlhf"), batch)[0].tolist() == pytest.approx([-0.1, 0.0])
    squared = PpoSpec(like="openrlhf", kl={"estimator": "k2"})  # type: ignore[arg-type]
    batch = scored_batch(torch.ones(1, 2, dtype=torch.uint8), [0.0], logprobs=torch.tensor([[5.0, 0.0]]))
    assert rewards_of(squared, batch)[0].tolist() == pytest.approx([-0.1, 0.0])


def test_dr_grpo_divides_by_neither_deviation_nor_length() -> None:
    """Scores 1 and 0: advantages 0.5 and -0.5; the loss of 3 tokens at ratio 1 is -(3 * 0.5 - 2 * 0.5) / 2 / R."""
    spec = GrpoSpec(like="dr-grpo", samples_per_prompt=2)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.uint8)
    batch = scored_batch(mask, [1.0, 0.0])
    batch = Batch(batch.columns, batch.rows, 2)
    columns, _ = group_advantages(spec, batch, context_of(spec, batch))
    assert columns["advantages"].tolist() == [[0.5, 0.5, 0.5, 0.0], [-0.5, -0.5, 0.0, 0.0]]
    trained = Batch({**batch.columns, **columns}, batch.rows, 2)
    loss, _ = policy_loss(spec).function(Outputs(torch.zeros(2, 4), torch.zeros(2, 4)), trained, Totals(5, 2, 1))
    assert float(loss) == pytest.approx(-0.5 / 2 / 4)


def test_dapo_penalises_overlong_responses() -> None:
    """Of 10 tokens the last fifth, 2: a response of 9 loses half a point, one of 10 a whole one (eq. 13)."""
    spec = GrpoSpec(like="dapo", samples_per_prompt=3)
    mask = (torch.arange(10) < torch.tensor([[8], [9], [10]])).to(torch.uint8)
    rewards = rewards_of(spec, scored_batch(mask, [1.0, 1.0, 1.0]))
    assert rewards.sum(1).tolist() == pytest.approx([1.0, 0.5, 0.0])
    assert (spec.clip_low, spec.clip_high, spec.kl, spec.num_prompts) == (0.2, 0.28, None, 3 * spec.prompts_per_step)


def test_what_is_written_wins() -> None:
    spec = PpoSpec(like="openrlhf", value_clip=0.2, kl={"coefficient": 0.3})  # type: ignore[arg-type]
    assert spec.value_clip == 0.2 and spec.kl is not None
    assert (spec.kl.coefficient, spec.kl.value_clamp) == (0.3, 10.0)
    assert PpoSpec(like="openrlhf", kl=None).kl is None


def test_what_an_algorithm_has_not_is_left_out() -> None:
    assert ReinforceSpec(like="openrlhf").reward_clip == 10.0


def test_a_part_of_a_penalty_is_over_the_algorithms_own() -> None:
    changed = GrpoSpec(kl={"coefficient": 0.1}).kl  # type: ignore[arg-type]
    assert changed is not None and (changed.place, changed.estimator, changed.coefficient) == ("loss", "k3", 0.1)
    adaptive = ReinforceSpec(kl={"target": 6.0}).kl  # type: ignore[arg-type]
    assert adaptive is not None and (adaptive.coefficient, adaptive.target) == (0.01, 6.0)


@pytest.mark.parametrize("like", [None, "openrlhf", "verl"])
def test_a_penalty_that_is_put_elsewhere_has_the_estimator_of_that_place(like: Any) -> None:
    in_loss = PpoSpec(like=like, kl={"place": "loss"}).kl  # type: ignore[arg-type]
    in_reward = GrpoSpec(like=like, kl={"place": "reward"}).kl  # type: ignore[arg-type]
    assert in_loss is not None and in_loss.estimator == "k3"
    assert in_reward is not None and in_reward.estimator == "k1"


def test_groups_are_filtered_by_their_raw_scores() -> None:
    """All responses of the first group are wrong and differ in length alone; one of the second is right."""
    spec = GrpoSpec(like="dapo", samples_per_prompt=2, prompts_per_step=1, dynamic_sampling={"rounds": 2})  # type: ignore[arg-type]
    mask = (torch.arange(10) < torch.tensor([[10], [9], [3], [3]])).to(torch.uint8)
    batch = scored_batch(mask, [0.0, 0.0, 1.0, 0.0])
    batch = Batch(batch.columns, batch.rows, 2)
    columns, statistics = group_advantages(spec, batch, context_of(spec, batch))
    assert columns["loss_mask"].any(1).tolist() == [False, False, True, True]
    assert [[*Outcome][code] for code in columns["outcome"]] == ["alike", "alike", "trained", "trained"]
    # 3 tokens a response that is kept, 25 / 4 a response in all
    assert (
        METRICS.evaluate({name: tuple(sums.tolist()) for name, sums in statistics.items()})["kept_length_ratio"] == 0.48
    )


def test_groups_beyond_the_share_and_responses_without_a_score_have_their_reasons() -> None:
    """Three of four groups differ; two are trained on."""
    spec = GrpoSpec(like="dapo", samples_per_prompt=2, prompts_per_step=2, dynamic_sampling={"rounds": 2})  # type: ignore[arg-type]
    scores = [0.0, 1.0, math.nan, 1.0, 2.0, 1.0, 3.0, 1.0]
    batch = scored_batch(torch.ones(8, 2, dtype=torch.uint8), scores)
    batch = Batch(batch.columns, batch.rows, 2)
    columns, _ = group_advantages(spec, batch, context_of(spec, batch))
    # a response that is compared with no other is in a group whose scores are all the same
    expected = ["trained", "trained", "invalid_score", "alike", "trained", "trained", "surplus", "surplus"]
    assert [[*Outcome][code] for code in columns["outcome"]] == expected


def test_a_group_baseline_is_discounted_as_the_score_is() -> None:
    """Scores 3 and 1 over their mean 2, gamma 0.5, two tokens: 0.5 and 1, and as much below."""
    spec = ReinforceSpec(baseline="group", samples_per_prompt=2, gamma=0.5, whiten="none", kl=None)
    batch = scored_batch(torch.ones(2, 2, dtype=torch.uint8), [3.0, 1.0])
    batch = Batch(batch.columns, batch.rows, 2)
    columns, _ = reinforce_advantages(spec, batch, context_of(spec, batch))
    assert columns["advantages"].tolist() == [[0.5, 1.0], [-0.5, -1.0]]
