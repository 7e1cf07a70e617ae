"""The KL penalty as other engines have it: limited in value, counted per token, and after the baseline.

Their formulas are written out here: verl 0.9.1 (``trainer/ppo/core_algos.py``: ``kl_penalty_forward``,
``AdaptiveKLController``; ``ray_trainer.py``: ``apply_kl_penalty``) and OpenRLHF 0.11.2 (``models/utils.py``:
``compute_approx_kl``, ``compute_reward``; ``experience_maker.py``: ``compute_advantages_and_returns``).
"""

from __future__ import annotations

from itertools import product
from typing import Any, Literal

import pytest
import torch
from scored_batches import context_of, scored_batch
from torch import Tensor

from flexrlhf.config.algorithms.grpo import GrpoSpec, RlooSpec
from flexrlhf.config.algorithms.policy_sections import KlSpec
from flexrlhf.config.algorithms.ppo import PpoSpec, SafeRlhfSpec
from flexrlhf.engines.base import Batch, Outputs, Totals
from flexrlhf.objectives.advantages import ppo_advantages
from flexrlhf.objectives.group_advantages import group_advantages
from flexrlhf.objectives.kl_penalty import kl_estimate
from flexrlhf.objectives.losses import policy_loss
from flexrlhf.trainer.controllers import first_state, next_state


def of_verl(estimator: str, logprob: Tensor, ref: Tensor) -> Tensor:
    if estimator == "k1":
        return logprob - ref
    if estimator == "k2":
        return 0.5 * (logprob - ref).square()
    kl = torch.clamp(ref - logprob, min=-20, max=20)
    return torch.clamp(torch.exp(kl) - kl - 1, min=-10, max=10)


def of_openrlhf(estimator: str, logprob: Tensor, ref: Tensor) -> Tensor:
    log_ratio = logprob - ref
    limited = log_ratio.clamp(min=-10)
    estimates = {"k1": log_ratio, "k2": log_ratio**2 / 2.0, "k3": (-limited).exp() - 1 + limited}
    return estimates[estimator].clamp(min=-10, max=10)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize(("peer", "limit"), [(of_verl, None), (of_openrlhf, 10.0)])
def test_estimates_and_gradients_are_those_of_the_peers(peer: Any, limit: float | None, estimator: str) -> None:
    """Log-ratios up to 40, of which the default k3 is limited in both."""
    settings = {"estimator": estimator} if limit is None else {"estimator": estimator, "value_clamp": limit}
    values = torch.linspace(-40, 40, 801, dtype=torch.float64) + 1e-3
    mine, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
    ours = kl_estimate(KlSpec.model_validate(settings), mine)
    other = peer(estimator, theirs, torch.zeros_like(values))
    assert torch.allclose(ours, other, rtol=1e-12)
    assert torch.allclose(*(torch.autograd.grad(x.sum(), y)[0] for x, y in ((ours, mine), (other, theirs))), rtol=1e-12)


def test_no_token_of_grpo_costs_more_than_its_limit() -> None:
    """By default; without a limit a single token of log-ratio -20 costs 4.9e8."""
    far = torch.tensor([-20.0, 0.0, 20.0])
    assert GrpoSpec().kl is not None and kl_estimate(GrpoSpec().kl, far).tolist() == [10.0, 0.0, 10.0]
    unlimited = GrpoSpec(kl={"value_clamp": None}).kl  # type: ignore[arg-type]
    assert unlimited is not None and kl_estimate(unlimited, far)[0] > 4.8e8
    # an estimator that has no limit by itself does not inherit that of k3
    assert GrpoSpec(kl={"estimator": "k2"}).kl == KlSpec(place="loss", coefficient=0.04, estimator="k2")  # type: ignore[arg-type]


def group_batch(scores: list[float], mask: Tensor, log_ratio: Tensor, samples: int) -> Batch:
    batch = scored_batch(mask, scores, logprobs=log_ratio, ref_logprobs=torch.zeros_like(log_ratio))
    return Batch(batch.columns, batch.rows, samples)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_a_penalty_after_the_baseline_is_that_of_openrlhf(scale: Literal["group", "none"]) -> None:
    """``rloo`` and ``group_norm``: compared scores on the last token, less the penalty of each, summed to the end."""
    generator = torch.Generator().manual_seed(3)
    mask = (torch.arange(5) < torch.tensor([5, 2, 4, 1, 3, 5])[:, None]).to(torch.uint8)
    scores, ratios = torch.randn(6, generator=generator) * 4, torch.randn(6, 5, generator=generator)
    grouped = scores.view(2, 3)
    rewards = grouped - (grouped.sum(1, keepdim=True) - grouped) / 2
    baseline: Literal["mean", "others"] = "others"
    if scale == "group":
        rewards, baseline = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-6), "mean"
    by_token = -0.3 * of_openrlhf("k1", ratios, torch.zeros(6, 5)) * mask
    for row, reward in enumerate(rewards.reshape(-1)):
        by_token[row, int(mask[row].sum()) - 1] += reward
    expected = by_token.flip(1).cumsum(1).flip(1) * mask
    kl = {"place": "advantages", "coefficient": 0.3, "value_clamp": 10.0}
    spec = GrpoSpec(samples_per_prompt=3, scale=scale, baseline=baseline, kl=kl)  # type: ignore[arg-type]
    batch = group_batch(scores.tolist(), mask, ratios, 3)
    columns, _ = group_advantages(spec, batch, context_of(spec, batch))
    assert torch.allclose(columns["advantages"], expected, atol=1e-5)


@pytest.mark.parametrize("place", ["reward", "advantages"])
def test_the_gradient_is_that_of_the_mean_score_less_the_divergence(place: Literal["reward", "advantages"]) -> None:
    """All pairs of responses of two tokens out of three, each as often as the policy samples it."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 3, generator=generator, dtype=torch.float64).requires_grad_()
    ref = torch.randn(4, 3, generator=generator, dtype=torch.float64).log_softmax(1)
    pairs = list(product(range(3), repeat=2))
    scores, beta = torch.randn(9, generator=generator, dtype=torch.float64), 0.7
    first, second = torch.tensor(pairs).T
    # the second token's distribution depends on the first token

    def by_token(table: Tensor) -> Tensor:
        return torch.stack([table[0][first], table[1 + first, second]], 1)

    logprobs, ref_logprobs = by_token(logits.log_softmax(1)), by_token(ref)
    chances = logprobs.sum(1).exp()
    objective = (chances * (scores - beta * (logprobs - ref_logprobs).sum(1))).sum()
    expected = torch.autograd.grad(-objective, logits, retain_graph=True)[0]

    spec = RlooSpec(samples_per_prompt=2, kl=KlSpec(place=place, coefficient=beta))
    total = torch.zeros((), dtype=torch.float64)
    for one, other in product(range(9), repeat=2):
        rows = torch.tensor([one, other])
        columns = {"logprobs": logprobs[rows].detach(), "ref_logprobs": ref_logprobs[rows]}
        batch = scored_batch(torch.ones(2, 2, dtype=torch.uint8), scores[rows].tolist(), **columns)
        batch = Batch(batch.columns, batch.rows, 2)
        found, _ = group_advantages(spec, batch, context_of(spec, batch))
        trained = Batch({**batch.columns, **found}, batch.rows, 2)
        outputs = Outputs(logprobs[rows], torch.zeros(2, 2, dtype=torch.float64))
        total = total + chances[rows].prod().detach() * policy_loss(spec).function(outputs, trained, Totals(4, 2, 1))[0]
    # scores are float32
    assert torch.allclose(torch.autograd.grad(total, logits)[0], expected, atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_target_per_token_is_followed_as_verl_does(estimator: str) -> None:
    """The mean over responses of the mean over their tokens; responses without tokens are none."""
    mask = (torch.arange(4) < torch.tensor([4, 1, 3])[:, None]).to(torch.uint8)
    ratios = torch.tensor([[0.3, 0.1, -0.2, 0.4], [0.2, 9.0, 9.0, 9.0], [0.0, 0.1, 0.3, 9.0]])
    kld = of_verl(estimator, ratios, torch.zeros(3, 4)) * mask
    measured = float((kld.sum(1) / mask.sum(1)).mean())
    coefficient = 0.2 * (1 + max(-0.2, min(0.2, measured / 0.12 - 1)) * 3 / 30)
    kl = {"estimator": estimator, "coefficient": 0.2, "target": 0.12, "target_unit": "token", "horizon": 30}
    spec = PpoSpec(kl=kl)  # type: ignore[arg-type]
    batch = scored_batch(mask, [0.0] * 3, logprobs=ratios)
    _, statistics = ppo_advantages(spec, batch, context_of(spec, batch))
    sums = {name: tuple(map(float, moments)) for name, moments in statistics.items()}
    assert sums["kl_response_mean"][1] / 3 == pytest.approx(measured)
    assert next_state(spec, first_state(spec), sums)["kl_coefficient"] == pytest.approx(coefficient)  # type: ignore[arg-type]
    # per response it is another number
    whole = spec.model_copy(update={"kl": spec.kl.model_copy(update={"target_unit": "response"})})  # type: ignore[union-attr]
    _, statistics = ppo_advantages(whole, batch, context_of(whole, batch))
    assert "kl_response_mean" not in statistics


def test_a_multiplier_without_a_maximum_grows_on() -> None:
    spec = SafeRlhfSpec(lagrange={"maximum": None, "learning_rate": 1.0})  # type: ignore[arg-type]
    state, scored = first_state(spec) | {"lagrange": 6.0}, {"reward": (1.0, 0.0, 0.0)}
    state = next_state(spec, state, {"cost": (1.0, 0.5, 0.25), **scored})
    assert state["lagrange"] == pytest.approx(6.0 * 2.718281828459045**3)
    # far beyond any use, yet finite
    state = next_state(spec, state, {"cost": (1.0, 1e9, 1e18), **scored})
    assert state["lagrange"] == pytest.approx(2.718281828459045**20)
