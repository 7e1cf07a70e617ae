"""Losses of routers: one balances the experts of a model, the other keeps logits small; over a whole mini-batch.

Auxiliary loss: E * sum_i f_i P_i (Fedus et al. 2021, eq. 4), over the tokens of all layers, as transformers'
``load_balancing_loss_func``: f_i are the tokens that take expert i over all, P_i is its mean probability. f_i has no
gradient; of a part of a mini-batch it would be another one, and so would the loss, so a pass without gradients counts
it first. Balance over more tokens also lets experts specialise (Qiu et al. 2025).

z-loss: mean of the squared logarithm of the sum of exponentials of a token's logits (Zoph et al. 2022, eq. 5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.engines.base import Moments

AUXILIARY, SQUARES = "router_aux_loss", "router_z_loss"
"""Statistics of the losses, before their coefficients."""


@dataclass(frozen=True)
class RouterTotals:
    """Sizes of a mini-batch over all ranks; denominators of the losses.

    tokens:  float64 (), tokens of all sequences in all layers.
    taken:   float32 (E,), of them that each expert computes, over ``tokens``.
    """

    tokens: Tensor
    taken: Tensor


class RouterLosses:
    """Losses of the routers of a model with ``layers`` layers of ``experts``, by their ``coefficients``."""

    def __init__(self, coefficients: Mapping[str, float], layers: int, experts: int) -> None:
        self._coefficients, self._experts = coefficients, experts
        # of the last pass, by layer: probabilities of experts (E,) and squares (), both summed over tokens
        self._probabilities = [torch.zeros(())] * layers
        self._squares = [torch.zeros(())] * layers
        self._values: Tensor | float = 0.0
        self._mini_batches: Tensor | int = 0

    @property
    def counts_first(self) -> bool:
        """Whether the tokens of each expert are needed before a loss."""
        return AUXILIARY in self._coefficients

    def read(self, layer: int, logits: Tensor, scores: Tensor, counts: Tensor) -> None:
        """Add up what a layer's router computes over the tokens of a pass; once more where the layer is recomputed.

        logits:  (T, E).
        scores:  (T, E), from which probabilities follow: they add up to 1.
        counts:  (T,), sequences that have the token.
        """
        weights = counts.float()
        if AUXILIARY in self._coefficients:
            self._probabilities[layer] = weights @ (scores / scores.sum(-1, keepdim=True))
        if SQUARES in self._coefficients:
            self._squares[layer] = weights @ logits.float().logsumexp(-1).square()

    def begin(self, is_counted: Tensor) -> None:
        """Begin a mini-batch. ``is_counted``: whether a sequence of it is trained on, bool ()."""
        self._mini_batches = self._mini_batches + is_counted.double()

    def clear(self) -> None:
        """Discard the values since the last ``statistics``."""
        self._values, self._mini_batches = 0.0, 0

    def value(self, totals: RouterTotals) -> Tensor:
        """Return the contribution () of the last pass to the losses of its mini-batch."""
        of_each = {}
        if AUXILIARY in self._coefficients:
            of_each[AUXILIARY] = self._experts * (totals.taken @ torch.stack(self._probabilities).sum(0))
        if SQUARES in self._coefficients:
            of_each[SQUARES] = torch.stack(self._squares).sum()
        values = torch.stack([of_each[name] for name in self._coefficients]) / totals.tokens.float()
        self._values = self._values + values.detach().double()
        return values @ values.new_tensor([*self._coefficients.values()])

    def statistics(self, over_ranks: Callable[[Tensor], Tensor], reports: bool, device: torch.device) -> Moments:
        """Return the statistics of the mini-batches since the last call, of which one rank ``reports`` the whole."""
        none = torch.zeros(len(self._coefficients), dtype=torch.float64, device=device)
        values, number = over_ranks(none + self._values), none + self._mini_batches
        self.clear()
        moments = torch.stack([number, values, values * values], 1) * reports
        return dict(zip(self._coefficients, moments.unbind(), strict=True))

    def weighted(self, statistics: Moments) -> Tensor:
        """Return the sum () of the losses in ``statistics``, by their coefficients."""
        return torch.stack([factor * statistics[name][1] for name, factor in self._coefficients.items()]).sum()


def loss_coefficients(settings: ModelSpec) -> dict[str, float]:
    """Return the coefficients of the losses that a model has, by their statistics."""
    both = {AUXILIARY: settings.router_aux_loss_coef, SQUARES: settings.router_z_loss_coef}
    return {name: coefficient for name, coefficient in both.items() if coefficient}
