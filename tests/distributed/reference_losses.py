"""The losses of the reference, from lists of tensors: one for each response, as long as the response."""

from __future__ import annotations

import math

import torch
from reference_models import Policy, Scorer
from reference_responses import CRITICS, Response
from reference_terms import Terms
from torch import Tensor

from flexrlhf.config.algorithms import AcShareSpec, ImportanceSpec, KlSpec, PolicySpec, PpoSpec
from flexrlhf.config.spec import Spec
from flexrlhf.data.examples import Example


def aggregate(losses: list[Tensor], how: str, longest: int) -> Tensor:
    """The loss of a mini-batch from the losses of its tokens, sequence by sequence."""
    if not losses:
        return torch.tensor(0.0)
    match how:
        case "token-mean":
            return torch.cat(losses).mean()
        case "token-sum":
            return torch.cat(losses).sum()
        case "seq-mean-token-sum":
            return torch.stack([loss.sum() for loss in losses]).mean()
        case "seq-mean-token-sum-norm":
            return torch.stack([loss.sum() for loss in losses]).mean() / longest
        case "seq-mean-token-mean":
            return torch.stack([loss.mean() for loss in losses]).mean()
    raise AssertionError(how)


def policy_loss(spec: Spec, actor: Policy, responses: list[Response], terms: Terms) -> Tensor:
    """The clipped surrogate, less the entropy bonus, with the penalties that are in the loss."""
    policy, longest = spec.algorithm, spec.data.max_response_tokens
    assert isinstance(policy, PolicySpec)
    losses, entropies, penalties = [], [], []
    for response in responses:
        logprobs, entropy = actor.logprobs(response.prompt, response.tokens)
        losses.append(surrogate(policy, response, logprobs, terms))
        entropies.append(entropy)
        terms.add("entropy", entropy)
        if policy.kl is not None and policy.kl.place == "loss":
            log_ratio = logprobs - torch.tensor(response.ref_logprobs)
            penalties.append(policy.kl.coefficient * kl_of_tokens(policy.kl, log_ratio))
    how = policy.loss_aggregation
    bonus = policy.entropy_coefficient * aggregate(entropies, how, longest)
    return aggregate(losses, how, longest) - bonus + aggregate(penalties, how, longest)


def surrogate(policy: PolicySpec, response: Response, logprobs: Tensor, terms: Terms) -> Tensor:
    """The loss of every token."""
    advantages, log_ratio = torch.tensor(response.advantages), logprobs - torch.tensor(response.logprobs)
    # GSPO, eq. 7: the geometric mean over the response stands for each of its tokens
    ratio = log_ratio.exp() if policy.ratio == "token" else log_ratio.mean().exp().expand(len(log_ratio))
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - policy.clip_low, 1 + policy.clip_high)
    losses = torch.maximum(plain, clipped)
    if policy.dual_clip is not None:
        # Ye et al. 2020, eq. 5
        bounded = torch.minimum(losses, -policy.dual_clip * advantages)
        losses = torch.stack([b if a < 0 else x for a, b, x in zip(advantages, bounded, losses, strict=True)])
    losses = losses * importance_of(policy, response, terms)
    terms.add("policy_loss", losses)
    terms.add("ratio_clipped", (clipped > plain).float())
    terms.add("update_kl", log_ratio.exp() - 1 - log_ratio, [1.0] * len(ratio))
    return losses


def kl_of_tokens(kl: KlSpec, log_ratio: Tensor) -> Tensor:
    """Schulman 2020, with gradients."""
    x = log_ratio if kl.clamp is None else log_ratio.clamp(-kl.clamp, kl.clamp)
    estimate = {"k1": x, "k2": x**2 / 2, "k3": (-x).exp() - 1 + x}[kl.estimator]
    return estimate if kl.value_clamp is None else estimate.clamp(-kl.value_clamp, kl.value_clamp)


def importance_of(policy: PolicySpec, response: Response, terms: Terms) -> Tensor:
    """Weight of each token's loss; of one number all tokens have it."""
    settings = policy.importance
    if settings is None:
        return torch.tensor([1.0])
    ratios = importance_ratios(settings, response)
    weights = [min(ratio, settings.cap) for ratio in ratios]
    terms.add("importance_weight", weights)
    terms.add("importance_clipped", [float(ratio > settings.cap) for ratio in ratios])
    return torch.tensor(weights)


def importance_ratios(spec: ImportanceSpec, response: Response) -> list[float]:
    """pi_old / pi_rollout of every token, or of the response as one."""
    log_ratios = [old - sampled for old, sampled in zip(response.logprobs, response.rollout_logprobs, strict=True)]
    return [math.exp(x) for x in (log_ratios if spec.level == "token" else [sum(log_ratios)])]


def value_loss(spec: Spec, role: str, critic: Policy | Scorer, responses: list[Response], terms: Terms) -> Tensor:
    """Half of the squared error, the larger of plain and clipped, against the returns of critic ``role``."""
    ppo = spec.algorithm
    assert isinstance(ppo, PpoSpec) and role in CRITICS
    losses = []
    for response in responses:
        values = critic.everywhere(response.prompt, response.tokens)[:-1]
        returns, old = torch.tensor(response.returns[role]), torch.tensor(response.values[role][:-1])
        plain = clipped = (values - returns) ** 2
        moved_far = torch.zeros(len(values), dtype=torch.bool)
        if ppo.value_clip is not None:
            clipped = (old + (values - old).clamp(-ppo.value_clip, ppo.value_clip) - returns) ** 2
            moved_far = (values - old).abs() > ppo.value_clip
        losses.append(0.5 * torch.maximum(plain, clipped))
        of = "cost_" if role == "cost_critic" else ""
        terms.add(f"{of}value_loss", losses[-1])
        terms.add(f"{of}value_clipped", moved_far.logical_and(clipped > plain).float())
    return aggregate(losses, ppo.loss_aggregation, spec.data.max_response_tokens)


def shared_loss(spec: Spec, actor: Policy, responses: list[Response], terms: Terms) -> Tensor:
    """Schulman et al. 2017, eq. 9: of both heads on one trunk."""
    assert isinstance(spec.algorithm, AcShareSpec)
    values = value_loss(spec, "actor", actor, responses, terms)
    return policy_loss(spec, actor, responses, terms) + spec.algorithm.value_coefficient * values


def text_loss(policy: PolicySpec, actor: Policy, texts: list[Example], terms: Terms) -> Tensor:
    """Of further texts (Ouyang et al. 2022, section 3.5): the coefficient times their negative log-likelihood."""
    assert policy.ptx is not None
    losses = [-actor.logprobs(list(text.prompt), list(text.responses[0]), temperature=1.0)[0] for text in texts]
    for loss in losses:
        terms.add("ptx_nll", loss)
    return policy.ptx.coefficient * torch.cat(losses).mean()
