"""The losses of the reference, from lists of tensors: one for each response, as long as the response."""

from __future__ import annotations

import torch
from reference_models import Policy, Scorer
from reference_responses import CRITICS, Response
from reference_surrogates import ratio_of, surrogate
from reference_terms import Terms
from torch import Tensor

from flexrlhf.config.algorithms.policy import PolicySpec
from flexrlhf.config.algorithms.policy_sections import KlSpec
from flexrlhf.config.algorithms.ppo import AcShareSpec, PpoSpec
from flexrlhf.config.spec import Spec
from flexrlhf.data.examples import Example


def aggregate(losses: list[Tensor], how: str, longest: int) -> Tensor:
    """The loss of a mini-batch from its tokens' losses, sequence by sequence; sequences without tokens do not count."""
    losses = [loss for loss in losses if len(loss)]
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
        logprobs, entropy = map(response.of_sampled, actor.logprobs(response.prompt, response.text))
        kept = torch.tensor(response.kept or [True] * len(response.tokens))
        losses.append(counted(policy, surrogate(policy, response, logprobs, kept, terms), kept))
        entropies.append(counted(policy, entropy[kept], kept))
        terms.add("entropy", entropy[kept])
        if policy.kl is not None and policy.kl.place == "loss":
            penalty = kl_of_tokens(policy.kl, logprobs - torch.tensor(response.ref_logprobs))
            if policy.kl.corrected:
                # DeepSeek-V3.2, section 3.1
                penalty = penalty * ratio_of(policy, logprobs - torch.tensor(response.logprobs), kept)
            penalties.append(counted(policy, policy.kl.coefficient * penalty[kept], kept))
    how = policy.loss_aggregation
    of_entropy = how if policy.entropy_aggregation == "loss" else policy.entropy_aggregation
    bonus = policy.entropy_coefficient * aggregate(entropies, of_entropy, longest)
    return aggregate(losses, how, longest) - bonus + aggregate(penalties, how, longest)


def counted(policy: PolicySpec, values: Tensor, kept: Tensor) -> Tensor:
    """The values of the tokens that are kept, among zeros for the rejected ones if a mean divides by these, too."""
    reject = None if policy.importance is None else policy.importance.reject
    if reject is None or reject.denominators == "kept":
        return values
    return torch.zeros(len(kept)).masked_scatter(kept, values)


def kl_of_tokens(kl: KlSpec, log_ratio: Tensor) -> Tensor:
    """Schulman 2020, with gradients."""
    x = log_ratio if kl.clamp is None else log_ratio.clamp(-kl.clamp, kl.clamp)
    estimate = {"k1": x, "k2": x**2 / 2, "k3": (-x).exp() - 1 + x}[kl.estimator]
    return estimate if kl.value_clamp is None else estimate.clamp(-kl.value_clamp, kl.value_clamp)


def value_loss(spec: Spec, role: str, critic: Policy | Scorer, responses: list[Response], terms: Terms) -> Tensor:
    """Half of the squared error, the larger of plain and clipped, against the returns of critic ``role``."""
    ppo = spec.algorithm
    assert isinstance(ppo, PpoSpec) and role in CRITICS
    losses = []
    for response in responses:
        values = response.of_sampled(critic.everywhere(response.prompt, response.text)[:-1])
        returns, old = torch.tensor(response.returns[role]), torch.tensor(response.values[role][:-1])
        plain = clipped = (values - returns) ** 2
        moved_far = torch.zeros(len(values), dtype=torch.bool)
        if ppo.value_clip is not None:
            clipped = (old + (values - old).clamp(-ppo.value_clip, ppo.value_clip) - returns) ** 2
            moved_far = (values - old).abs() > ppo.value_clip
        losses.append(0.5 * torch.maximum(plain, clipped))
        if role == "actor" and response.kept:
            # one trunk: rejected tokens are left out of both losses
            kept = torch.tensor(response.kept)
            losses[-1], plain, clipped, moved_far = losses[-1][kept], plain[kept], clipped[kept], moved_far[kept]
        of = "cost_" if role == "cost_critic" else ""
        terms.add(f"{of}value_loss", losses[-1])
        terms.add(f"{of}value_clipped", moved_far.logical_and(clipped > plain).float())
    return aggregate(losses, ppo.loss_aggregation, spec.data.max_response_tokens)


def shared_loss(spec: Spec, actor: Policy, responses: list[Response], terms: Terms) -> Tensor:
    """Schulman et al. 2017, eq. 9: of both heads on one trunk."""
    assert isinstance(spec.algorithm, AcShareSpec)
    values = value_loss(spec, "actor", actor, responses, terms)
    return policy_loss(spec, actor, responses, terms) + spec.algorithm.value_coefficient * values


def pretraining_loss(policy: PolicySpec, actor: Policy, rows: list[Example], terms: Terms) -> Tensor:
    """Loss on pretraining data (Ouyang et al. 2022, section 3.5): the coefficient times the negative log-likelihood."""
    assert policy.ptx is not None
    losses = [-actor.logprobs(list(row.prompt), list(row.responses[0]), temperature=1.0)[0] for row in rows]
    for loss in losses:
        terms.add("ptx_nll", loss)
    return policy.ptx.coefficient * torch.cat(losses).mean()
