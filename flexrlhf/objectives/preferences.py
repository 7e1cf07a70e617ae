"""Preference losses on pairs of responses: DPO and IPO. Samples 0 and 1 of a prompt are chosen and rejected.

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
    """Return the preference loss, mean over pairs, with h the log-ratio of chosen over rejected (``_log_ratio_gap``).

    sigmoid (DPO): -log sigmoid(beta h), with smoothed labels (Rafailov et al. 2023, eq. 7; cDPO, Mitchell 2023).
    ipo:           (h - 1 / (2 beta))^2 (Azar et al. 2024, eq. 17).
    """

    def function(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Moments]:
        gap = _log_ratio_gap(outputs.quantity, batch)
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


def _log_ratio_gap(logprobs: Tensor, batch: Batch) -> Tensor:
    """Return h (n / 2,): log(policy / reference) of the chosen response less that of the rejected one."""
    log_ratios = ((logprobs - batch["ref_logprobs"]) * batch.mask).sum(1)
    chosen, rejected = pairs_of(log_ratios)
    return chosen - rejected


def preference_accuracy(spec: DpoSpec, batch: Batch, _: CombineContext) -> tuple[Columns, Moments]:
    """Return the share of pairs in the evaluation set with h > 0, and the mean of beta h."""
    gap = _log_ratio_gap(batch["logprobs"], batch)
    return {}, {
        "eval_accuracy": moments((gap > 0).to(torch.float32)),
        "eval_preference_margin": moments(spec.beta * gap),
    }
