"""Preferences between two answers as log-probs tell them. Samples 0 and 1 of a prompt: chosen and rejected.

Shapes: n rows, R response positions, n / 2 pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from flexrlhf.config.algorithms import DpoSpec
from flexrlhf.engines.base import Batch, Loss, Moments, Outputs, Totals, moments
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.objectives.losses import pairs_of


def preference_loss(spec: DpoSpec) -> Loss:
    """Of every pair, mean over pairs: -log sigmoid(beta * h) with smoothed labels, or (h - 1 / (2 beta))^2."""

    def function(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Moments]:
        gap = _gap(outputs.quantity, batch)
        if spec.loss == "ipo":
            losses = (gap - 1 / (2 * spec.beta)) ** 2
        else:
            right, wrong = logsigmoid(spec.beta * gap), logsigmoid(-spec.beta * gap)
            losses = -(1 - spec.label_smoothing) * right - spec.label_smoothing * wrong
        return losses.sum() / totals.prompts, {
            "preference_loss": moments(losses),
            "preference_margin": moments(spec.beta * gap),
            "pair_correct": moments((gap > 0).float()),
        }

    return Loss("logprobs", function, ("preference_loss", "preference_margin", "pair_correct"))


def _gap(logprobs: Tensor, batch: Batch) -> Tensor:
    """h (n / 2,): log-ratio to the reference of the chosen answer less that of the rejected one."""
    ratios = ((logprobs - batch["ref_logprobs"]) * batch.mask).sum(1)
    chosen, rejected = pairs_of(ratios)
    return chosen - rejected


def preference_accuracy(spec: DpoSpec, batch: Batch, _: CombineContext) -> tuple[Columns, Moments]:
    """On held-out pairs."""
    gap = _gap(batch["logprobs"], batch)
    return {}, {
        "eval_accuracy": moments((gap > 0).to(torch.float32)),
        "eval_preference_margin": moments(spec.beta * gap),
    }
