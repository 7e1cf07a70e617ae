"""OpenRLHF's core functions next to this project's."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.comparison import ROWS, SAMPLES, Row, Sample, apart, context, make_sample, with_gradient
from flexrlhf.config.algorithms.grpo import GrpoSpec, GspoSpec, RlooSpec
from flexrlhf.config.algorithms.policy import PolicySpec
from flexrlhf.config.algorithms.policy_sections import KlSpec
from flexrlhf.config.algorithms.ppo import PpoSpec
from flexrlhf.config.algorithms.reinforce import ReinforceSpec
from flexrlhf.config.algorithms.supervised import DpoSpec, RewardSpec, SftSpec
from flexrlhf.engines.base import Outputs
from flexrlhf.engines.language_head import token_logprobs
from flexrlhf.objectives.advantages import ppo_advantages, reinforce_advantages
from flexrlhf.objectives.group_advantages import group_advantages
from flexrlhf.objectives.kl_penalty import kl_estimate
from flexrlhf.objectives.losses import likelihood_loss, pair_loss, policy_loss, value_loss
from flexrlhf.objectives.preferences import preference_loss
from flexrlhf.trainer.controllers import next_state

ESTIMATORS: tuple[tuple[str, PolicySpec, Any], ...] = (
    ("gae", PpoSpec(like="openrlhf", gae_lambda=0.9, gamma=0.97), ppo_advantages),
    ("reinforce", ReinforceSpec(like="openrlhf", gamma=0.97), reinforce_advantages),
    (
        "reinforce_baseline",
        ReinforceSpec(like="openrlhf", baseline="group", samples_per_prompt=SAMPLES),
        reinforce_advantages,
    ),
    ("rloo", RlooSpec(like="openrlhf", samples_per_prompt=SAMPLES), group_advantages),
    ("group_norm", GrpoSpec(like="openrlhf", samples_per_prompt=SAMPLES), group_advantages),
)


def rows() -> Iterator[Row]:
    """Yield the comparisons."""
    sample = make_sample(0)
    for name, spec, function in ESTIMATORS:
        yield _advantages(name, spec, function, sample)
    yield from _losses(make_sample(2))
    yield from _kl()
    yield from _supervised(make_sample(6))


def _advantages(name: str, spec: PolicySpec, function: Any, sample: Sample) -> Row:
    """Compare ``compute_advantages_and_returns``: scores and log-probs to advantages, with its KL penalty."""
    from openrlhf.models.utils import compute_approx_kl
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
    from openrlhf.trainer.ppo_utils.kl_controller import FixedKLController

    samples = spec.samples_per_prompt
    maker = RemoteExperienceMaker.__new__(RemoteExperienceMaker)
    maker.strategy = SimpleNamespace(args=_arguments(name, samples))
    maker.args, maker.advantage_estimator, maker.kl_ctl = maker.strategy.args, name, FixedKLController(0.01)
    experience = Experience(
        action_mask=sample.mask.bool(),
        values=sample.values[:, :-1].clone(),
        rewards=sample.scores.clone(),
        kl=compute_approx_kl(sample.logprobs, sample.ref_logprobs),
        index=list(range(ROWS)),
    )
    (found,) = maker.compute_advantages_and_returns([experience])
    theirs = found.advantages.double() * sample.mask
    ours = function(spec, sample.batch(samples), context(spec))[0]["advantages"].double()
    function_name = f"`compute_advantages_and_returns`, {name}"
    if getattr(spec, "whiten", "none") == "none":
        named = "a deviation plus 1e-9, here 1e-6" if name == "group_norm" else ""
        return Row(function_name, apart(ours, theirs), named)
    tokens = int(sample.mask.sum())
    factor = (tokens / (tokens - 1)) ** 0.5
    return Row(
        function_name, apart(ours, theirs), "variance over N tokens, here over N - 1", apart(ours * factor, theirs)
    )


def _arguments(estimator: str, samples: int) -> SimpleNamespace:
    """Return the arguments that are read, with their defaults but for gamma and lambda."""
    gamma = 0.97 if estimator in ("gae", "reinforce") else 1.0
    advantage = SimpleNamespace(estimator=estimator, gamma=gamma, lambd=0.9, no_std_norm=False)
    return SimpleNamespace(
        algo=SimpleNamespace(advantage=advantage),
        rollout=SimpleNamespace(n_samples_per_prompt=samples),
        reward=SimpleNamespace(clip_range=(-10, 10)),
    )


def _losses(sample: Sample) -> Iterator[Row]:
    from openrlhf.models.loss import PolicyLoss, ValueLoss

    mask, entropy = sample.mask, torch.zeros_like(sample.logprobs)
    cases = [
        (PpoSpec, "ppo", {"loss_aggregation": how, "dual_clip": dual})
        for how in ("token-mean", "seq-mean-token-mean")
        for dual in (None, 1.5)
    ]
    for kind, name, settings in [*cases, (GspoSpec, "gspo", {"loss_aggregation": "seq-mean-token-mean"})]:
        spec = kind(like="openrlhf", clip_low=0.1, clip_high=0.3, **settings)  # type: ignore[arg-type]
        loss = PolicyLoss(0.1, 0.3, spec.dual_clip, spec.loss_aggregation == "token-mean", name)
        function = policy_loss(spec).function
        ours = with_gradient(
            lambda new, f=function: f(Outputs(new, entropy), sample.batch(), sample.counts)[0],  # type: ignore[misc]
            sample.new_logprobs,
        )
        theirs = with_gradient(
            lambda new, f=loss: f(new, sample.logprobs, sample.advantages, action_mask=mask)[0],  # type: ignore[misc]
            sample.new_logprobs,
        )
        yield Row(
            f"`PolicyLoss`, {name}, {spec.loss_aggregation}, dual clip {spec.dual_clip}, with gradient",
            apart(ours, theirs),
        )
    ppo, last, old = PpoSpec(like="openrlhf"), sample.new_values[:, -1:], sample.values[:, :-1]
    ours = with_gradient(
        lambda new: value_loss(ppo).function(Outputs(torch.cat([new, last], 1)), sample.batch(), sample.counts)[0],
        sample.new_values[:, :-1],
    )
    theirs = with_gradient(lambda new: ValueLoss(0.5)(new, old, sample.returns, mask), sample.new_values[:, :-1])
    yield Row("`ValueLoss`, with gradient", apart(ours, theirs))


def _kl() -> Iterator[Row]:
    from openrlhf.models.utils import compute_approx_kl, compute_entropy
    from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController

    ratios = torch.arange(-30, 30, 0.25, dtype=torch.float64) + 0.125
    for estimator in ("k1", "k2", "k3"):
        kl = KlSpec.model_validate({"estimator": estimator, "value_clamp": 10.0})
        ours = with_gradient(lambda x, kl=kl: kl_estimate(kl, x).sum(), ratios)  # type: ignore[misc]
        theirs = with_gradient(
            lambda x, e=estimator: compute_approx_kl(x, torch.zeros_like(x), kl_estimator=e).double().sum(),  # type: ignore[misc]
            ratios,
        )
        yield Row(f"`compute_approx_kl`, {estimator}, log-ratios up to 30, with gradient", apart(ours, theirs))
    spec = PpoSpec(like="openrlhf", kl={"target": 0.05, "horizon": 300})  # type: ignore[arg-type]
    control = AdaptiveKLController(0.01, 0.05, 300)
    control.update(0.06, ROWS)
    state = next_state(spec, dict(context(spec).state), {"kl_response_mean": (float(ROWS), 0.06 * ROWS, 0.0)})
    yield Row("`AdaptiveKLController`", abs(state["kl_coefficient"] - control.value) / control.value)
    logits = torch.randn(ROWS, 50, generator=torch.Generator().manual_seed(5))
    _, entropy = token_logprobs(logits, torch.eye(50), torch.zeros(ROWS, dtype=torch.long), entropy="value")
    yield Row("`compute_entropy`", apart(entropy, compute_entropy(logits)))


def _supervised(sample: Sample) -> Iterator[Row]:
    from openrlhf.models.loss import DPOLoss, PairWiseLoss, SFTLoss

    batch, entropy = sample.batch(2), torch.zeros_like(sample.logprobs)
    counts = sample.counts.__class__(int(sample.mask.sum()), ROWS, ROWS // 2)

    def sums(logprobs: Tensor) -> tuple[Tensor, Tensor]:
        return tuple((logprobs * sample.mask).sum(1).view(-1, 2).unbind(1))  # type: ignore[return-value]

    for settings, args in (({}, (0.1,)), ({"label_smoothing": 0.2}, (0.1, 0.2)), ({"loss": "ipo"}, (0.1, 0.0, True))):
        function = preference_loss(DpoSpec(like="openrlhf", **settings)).function  # type: ignore[arg-type]
        ours = with_gradient(
            lambda new, f=function: f(Outputs(new, entropy), batch, counts)[0],  # type: ignore[misc]
            sample.new_logprobs,
        )
        theirs = with_gradient(
            lambda new, a=args: DPOLoss(*a)(*sums(new), *sums(sample.ref_logprobs))[0],  # type: ignore[misc]
            sample.new_logprobs,
        )
        named = "".join(f", {key} {value}" for key, value in settings.items())
        yield Row(f"`DPOLoss`{named}, with gradient", apart(ours, theirs))
    ours = with_gradient(
        lambda scores: pair_loss(RewardSpec()).function(Outputs(scores), batch, counts)[0], sample.values[:, 0]
    )
    theirs = with_gradient(lambda scores: PairWiseLoss()(*scores.view(-1, 2).unbind(1)), sample.values[:, 0])
    yield Row("`PairWiseLoss`, with gradient", apart(ours, theirs))
    ours = with_gradient(
        lambda new: likelihood_loss(SftSpec()).function(Outputs(new, entropy), batch, counts)[0], sample.new_logprobs
    )
    theirs = with_gradient(lambda new: SFTLoss()(new, sample.mask), sample.new_logprobs)
    yield Row("`SFTLoss`, with gradient", apart(ours, theirs))
