"""verl's core functions next to this project's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers.comparison import (
    LENGTH,
    ROWS,
    SAMPLES,
    Alone,
    Row,
    Sample,
    apart,
    context,
    make_sample,
    with_gradient,
)
from flexrlhf.config.algorithms.base import LossAggregation
from flexrlhf.config.algorithms.grpo import GrpoSpec, GspoSpec, RlooSpec
from flexrlhf.config.algorithms.policy_sections import KlSpec
from flexrlhf.config.algorithms.ppo import PpoSpec
from flexrlhf.config.algorithms.reinforce import ReinforceSpec, RemaxSpec
from flexrlhf.engines.base import Outputs
from flexrlhf.engines.language_head import token_logprobs
from flexrlhf.objectives.advantages import ppo_advantages, reinforce_advantages, remax_advantages, whiten
from flexrlhf.objectives.group_advantages import group_advantages
from flexrlhf.objectives.kl_penalty import kl_estimate, kl_penalty
from flexrlhf.objectives.losses import policy_loss, value_loss
from flexrlhf.objectives.reward_shaping import shape_rewards
from flexrlhf.trainer.controllers import next_state

AGGREGATIONS: tuple[LossAggregation, ...] = get_args(LossAggregation)
GROUPS = np.arange(ROWS) // SAMPLES
REWARDED = {"last tokens": None, "turns": 0.2, "steps": 0.5, "all tokens": 1.0}
"""Where rewards are: on the last tokens, or on a share of all."""


def rows() -> Iterator[Row]:
    """Yield the comparisons."""
    for seed, gaps in ((0, False), (1, True)):
        for where, share in REWARDED.items():
            sample = make_sample(seed, gaps)
            rewards = _by_token(sample) if share is None else _spread(sample, share)
            further = "" if share is None else f", rewards on {where}"
            yield from _advantages(sample, rewards, (", with gaps" if gaps else "") + further)
    yield from _losses(make_sample(2))
    yield from _kl(make_sample(3))
    yield from _statistics(make_sample(4))


def _spread(sample: Sample, share: float) -> Tensor:
    """Return rewards (ROWS, LENGTH) on a ``share`` of the tokens, multiples of 1/8, which are exact in float32."""
    generator = torch.Generator().manual_seed(8)
    rewards = torch.randint(-24, 25, (ROWS, LENGTH), generator=generator).double() / 8
    return rewards * sample.mask * (torch.rand(ROWS, LENGTH, generator=generator) < share)


def _by_token(sample: Sample) -> Tensor:
    """Return the scores (ROWS, LENGTH) on the last tokens."""
    last = (sample.mask * torch.arange(LENGTH)).argmax(1, keepdim=True)
    return torch.zeros(ROWS, LENGTH, dtype=torch.float64).scatter(1, last, sample.scores[:, None])


def _advantages(sample: Sample, rewards: Tensor, further: str) -> Iterator[Row]:
    from verl.trainer.ppo import core_algos

    scored = {"scores": rewards.sum(1).float(), "token_scores": rewards.float()}
    mask, batch = sample.mask.double(), sample.batch(**scored)
    common: dict[str, Any] = {"token_level_rewards": rewards, "response_mask": mask}
    spec = PpoSpec(like="verl", gae_lambda=0.9, gamma=0.97)
    ours, _ = ppo_advantages(spec, sample.batch(1, **scored), context(spec))
    theirs = core_algos.compute_gae_advantage_return(**common, values=sample.values[:, :-1], gamma=0.97, lam=0.9)
    both = apart(ours["advantages"], theirs[0] * mask), apart(ours["returns"], theirs[1] * mask)
    yield Row(f"`compute_gae_advantage_return`{further}", max(both))
    for scale in ("group", "none"):
        grpo = GrpoSpec(like="verl", scale=scale, samples_per_prompt=SAMPLES)  # type: ignore[arg-type]
        theirs = core_algos.compute_grpo_outcome_advantage(
            **common, index=GROUPS, norm_adv_by_std_in_grpo=scale == "group"
        )
        ours, _ = group_advantages(grpo, batch, context(grpo))
        yield Row(f"`compute_grpo_outcome_advantage`, scale {scale}{further}", apart(ours["advantages"], theirs[0]))
    rloo = RlooSpec(like="verl", samples_per_prompt=SAMPLES)
    ours, _ = group_advantages(rloo, batch, context(rloo))
    theirs = core_algos.compute_rloo_outcome_advantage(**common, index=GROUPS)
    yield Row(f"`compute_rloo_outcome_advantage`{further}", apart(ours["advantages"], theirs[0]))
    yield from _returns(sample, scored, common, further)


def _returns(sample: Sample, scored: dict[str, Tensor], common: dict[str, Any], further: str) -> Iterator[Row]:
    from verl.trainer.ppo import core_algos

    spec = ReinforceSpec(like="verl", gamma=0.95)
    ours, _ = reinforce_advantages(spec, sample.batch(1, **scored), context(spec))
    config = SimpleNamespace(gamma=0.95)
    theirs = core_algos.compute_reinforce_plus_plus_outcome_advantage(**common, config=config)
    yield Row(f"`compute_reinforce_plus_plus_outcome_advantage`{further}", apart(ours["advantages"], theirs[0]))
    spec = ReinforceSpec(like="verl", baseline="group", samples_per_prompt=SAMPLES)
    ours, _ = reinforce_advantages(spec, sample.batch(**scored), context(spec))
    theirs = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(**common, index=GROUPS)
    yield Row(
        f"`compute_reinforce_plus_plus_baseline_outcome_advantage`{further}", apart(ours["advantages"], theirs[0])
    )
    remax = RemaxSpec(like="verl")
    columns = {"response_mask": sample.mask.to(torch.uint8), "finished": torch.ones(ROWS, dtype=torch.uint8)}
    greedy = {f"{name}.greedy": column for name, column in {**columns, "scores": sample.greedy.float()}.items()}
    ours, _ = remax_advantages(remax, sample.batch(1, **scored, **greedy), context(remax))
    theirs = core_algos.compute_remax_outcome_advantage(**common, reward_baselines=sample.greedy)
    yield Row(f"`compute_remax_outcome_advantage`{further}", apart(ours["advantages"], theirs[0] * sample.mask))


def _losses(sample: Sample) -> Iterator[Row]:
    from verl.trainer.ppo import core_algos
    from verl.workers.config import FSDPActorConfig

    config = FSDPActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.1, clip_ratio_high=0.3
    )
    alike = replace(sample, advantages=sample.advantages[:, :1].expand(ROWS, LENGTH))
    """Advantages of whole responses, as in a group: verl weighs different tokens separately (GSPO-token)."""

    def theirs(name: str, how: str, sample: Sample = sample) -> Tensor:
        function = core_algos.get_policy_loss_fn(name)
        old, advantages, mask = sample.logprobs, sample.advantages, sample.mask.double()
        return with_gradient(lambda new: function(old, new, advantages, mask, how, config)[0], sample.new_logprobs)

    for how in AGGREGATIONS:
        settings: dict[str, Any] = {"clip_low": 0.1, "clip_high": 0.3, "loss_aggregation": how}
        ppo = PpoSpec(like="verl", **settings)
        difference = apart(_policy(ppo, sample), theirs("vanilla", how))
        yield Row(f"`compute_policy_loss_vanilla`, {how}, with gradient", difference)
        gspo = GspoSpec(like="verl", **settings)
        yield Row(
            f"`compute_policy_loss_gspo`, {how}, with gradient", apart(_policy(gspo, alike), theirs("gspo", how, alike))
        )
        other = with_gradient(
            lambda new, how=how: core_algos.compute_value_loss(*_values(new, sample), 0.5, how)[0],  # type: ignore[misc]
            sample.new_values[:, :-1],
        )
        yield Row(f"`compute_value_loss`, {how}, with gradient", apart(_value(ppo, sample), other))


def _policy(spec: PpoSpec | GspoSpec, sample: Sample) -> Tensor:
    function = policy_loss(spec).function
    entropy = torch.zeros_like(sample.logprobs)
    return with_gradient(
        lambda new: function(Outputs(new, entropy), sample.batch(), sample.counts)[0], sample.new_logprobs
    )


def _value(spec: PpoSpec, sample: Sample) -> Tensor:
    function = value_loss(spec).function
    last = sample.new_values[:, -1:]
    return with_gradient(
        lambda new: function(Outputs(torch.cat([new, last], 1)), sample.batch(), sample.counts)[0],
        sample.new_values[:, :-1],
    )


def _values(new: Tensor, sample: Sample) -> tuple[Tensor, ...]:
    """Return new values, returns, old values and mask."""
    return new, sample.returns, sample.values[:, :-1], sample.mask.double()


def _kl(sample: Sample) -> Iterator[Row]:
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty

    ratios = torch.arange(-30, 30, 0.25, dtype=torch.float64) + 0.125
    for estimator, name in (("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")):
        kl = KlSpec.model_validate({"estimator": estimator})
        ours = with_gradient(lambda x, kl=kl: kl_estimate(kl, x).sum(), ratios)  # type: ignore[misc]
        theirs = with_gradient(
            lambda x, name=name: core_algos.kl_penalty(x, torch.zeros_like(x), name).sum(),  # type: ignore[misc]
            ratios,
        )
        yield Row(f"`kl_penalty`, {name}, log-ratios up to 30, with gradient", apart(ours, theirs))
    from verl import DataProto

    penalty = {"target": 0.1, "horizon": 300}
    spec = PpoSpec(like="verl", kl={"place": "reward", **penalty})  # type: ignore[arg-type]
    batch, control = sample.batch(1), core_algos.AdaptiveKLController(0.001, 0.1, 300)
    shaped = shape_rewards(spec, batch, context(spec))
    taken, statistics = kl_penalty(spec, batch, shaped.mask, context(spec).state)
    tensors = {"response_mask": sample.mask, "token_level_scores": _by_token(sample)}
    tensors |= {"old_log_probs": sample.logprobs, "ref_log_prob": sample.ref_logprobs}
    data, _ = apply_kl_penalty(DataProto.from_dict(tensors), control)
    yield Row("`apply_kl_penalty`", apart(shaped.rewards - taken, data.batch["token_level_rewards"]))
    sums = {name: tuple(map(float, each)) for name, each in {**shaped.statistics, **statistics}.items()}
    after = next_state(spec, dict(context(spec).state), sums)["kl_coefficient"]  # type: ignore[arg-type]
    yield Row("`AdaptiveKLController`, per token", abs(after - control.value) / control.value)


def _statistics(sample: Sample) -> Iterator[Row]:
    from verl.utils import torch_functional

    mask = sample.mask
    ours = whiten(sample.advantages, mask, [slice(0, ROWS)], Alone())
    theirs = torch_functional.masked_whiten(sample.advantages, mask) * mask
    yield Row("`masked_whiten`", apart(ours, theirs))
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(ROWS, 50, generator=generator)
    targets = torch.randint(0, 50, (ROWS,), generator=generator)
    # an identity as head makes logits of hidden states
    logprobs, entropy = token_logprobs(logits, torch.eye(50), targets, entropy="value")
    yield Row("`entropy_from_logits`", apart(entropy, torch_functional.entropy_from_logits(logits)))
    theirs = torch_functional.logprobs_from_logits_naive(logits, targets)
    yield Row(
        "`logprobs_from_logits`",
        max(apart(logprobs, theirs), apart(logprobs, -F.cross_entropy(logits, targets, reduction="none"))),
    )
