"""Preference losses of the reference, pair by pair, as the papers write them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from reference_terms import Terms
from torch import Tensor

from flexrlhf.config.algorithms.supervised import DpoSpec, KtoSpec, OrpoSpec, PreferenceSpec, SimpoSpec


@dataclass(frozen=True)
class Compared:
    """Log-probs of the tokens of one response; ``ref_logprobs`` None: nothing is compared with a reference."""

    logprobs: Tensor
    ref_logprobs: Tensor | None

    def log_ratio(self) -> Tensor:
        assert self.ref_logprobs is not None
        return (self.logprobs - self.ref_logprobs).sum()


Pair = tuple[Compared, Compared]
"""Chosen and rejected."""


def reward_of(spec: PreferenceSpec, response: Compared) -> Tensor:
    """The implicit reward."""
    if isinstance(spec, SimpoSpec | OrpoSpec):
        return spec.beta * response.logprobs.mean()
    normalised = isinstance(spec, DpoSpec) and spec.length_normalised
    return spec.beta * response.log_ratio() / (len(response.logprobs) if normalised else 1)


def size_of(spec: PreferenceSpec, response: Compared) -> float:
    """Terms whose difference is the reward."""
    return spec.beta * float(response.logprobs.abs().sum())


def loss_of_pair(spec: PreferenceSpec, pair: Pair, point: float, terms: Terms) -> Tensor:
    """``point``: the reference point of KTO."""
    chosen, rejected = (reward_of(spec, response) for response in pair)
    match spec:
        case DpoSpec():
            return dpo(spec, chosen - rejected)
        case SimpoSpec():
            return -torch.sigmoid(chosen - rejected - spec.gamma).log()
        case OrpoSpec():
            return orpo(spec, pair, terms)
    assert isinstance(spec, KtoSpec)
    z = spec.beta * point
    desirable = spec.desirable_weight * (1 - torch.sigmoid(chosen - z))
    undesirable = spec.undesirable_weight * (1 - torch.sigmoid(z - rejected))
    return (desirable + undesirable) / 2


def dpo(spec: DpoSpec, margin: Tensor) -> Tensor:
    """Rafailov et al. 2023, eq. 7; its variant with a fraction of wrong labels; Azar et al. 2024, eq. 17."""
    share, right = spec.label_smoothing, torch.sigmoid(margin)
    if spec.loss == "ipo":
        return (margin / spec.beta - 0.5 / spec.beta).square()
    if spec.loss == "robust":
        return ((1 - share) * -right.log() - share * -(1 - right).log()) / (1 - 2 * share)
    return (1 - share) * -right.log() + share * -(1 - right).log()


def orpo(spec: OrpoSpec, pair: Pair, terms: Terms) -> Tensor:
    """Hong et al. 2024, eq. 6."""
    chosen, rejected = (response.logprobs.mean().exp() for response in pair)
    ratio = (chosen / (1 - chosen)) / (rejected / (1 - rejected))
    odds_loss = -torch.sigmoid(ratio.log()).log()
    terms.add("odds_ratio_loss", odds_loss[None])
    terms.add("chosen_nll", -chosen.log()[None])
    return -chosen.log() + spec.beta * odds_loss
