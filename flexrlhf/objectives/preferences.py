"""Preference losses on pairs of responses: DPO and its forms, SimPO, ORPO; and KTO on single responses.

Samples 0 and 1 of a prompt are chosen (desirable) and rejected (undesirable). Shapes: n rows, R response positions,
n / 2 pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from flexrlhf.config.algorithms.supervised import DpoSpec, KtoSpec, PreferenceSpec, SimpoSpec
from flexrlhf.engines.base import Batch, Loss, Moments, Outputs, Totals, moments
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.objectives.losses import pairs_of

PAIR_STATISTICS = (
    *("preference_loss", "preference_margin", "pair_correct", "chosen_reward", "rejected_reward"),
    *("chosen_logprob", "rejected_logprob"),
)
LARGEST_MEAN_LOGPROB = -1e-6
"""Bound of the mean log-prob in odds, which are infinite at 0."""


def preference_loss(spec: DpoSpec) -> Loss:
    """Return the loss of DPO, mean over pairs; the settings have the formulas.

    beta h is the difference of the implicit rewards of chosen and rejected response (Rafailov et al. 2023, eq. 5).
    """

    def function(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Moments]:
        rewards = implicit_rewards(spec, outputs.quantity, batch)
        losses = _losses_of_dpo(spec, _difference(rewards))
        return losses.sum() / totals.prompts, pair_statistics(losses, rewards, outputs.quantity, batch)

    return Loss("logprobs", function, PAIR_STATISTICS)


def _losses_of_dpo(spec: DpoSpec, margin: Tensor) -> Tensor:
    """Return the losses (n / 2,) of pairs. ``margin``: beta h."""
    if spec.loss == "ipo":
        return (margin / spec.beta - 1 / (2 * spec.beta)) ** 2
    right, wrong = logsigmoid(margin), logsigmoid(-margin)
    if spec.loss == "robust":
        return (-(1 - spec.label_smoothing) * right + spec.label_smoothing * wrong) / (1 - 2 * spec.label_smoothing)
    return -(1 - spec.label_smoothing) * right - spec.label_smoothing * wrong


def simpo_loss(spec: SimpoSpec) -> Loss:
    """Return the loss of SimPO, mean over pairs (Meng et al. 2024, eq. 6)."""

    def function(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Moments]:
        rewards = implicit_rewards(spec, outputs.quantity, batch)
        losses = -logsigmoid(_difference(rewards) - spec.gamma)
        return losses.sum() / totals.prompts, pair_statistics(losses, rewards, outputs.quantity, batch)

    return Loss("logprobs", function, PAIR_STATISTICS)


def orpo_loss(spec: PreferenceSpec) -> Loss:
    """Return the loss of ORPO, mean over pairs: NLL of the chosen response and odds ratio (Hong et al. 2024, eq. 6)."""

    def function(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Moments]:
        means = of_responses(outputs.quantity, batch.mask, is_mean=True)
        likelihood = -pairs_of(means)[0]
        odds_losses = -logsigmoid(_difference(_log_odds(means)))
        losses = likelihood + spec.beta * odds_losses
        rewards = implicit_rewards(spec, outputs.quantity, batch)
        statistics = pair_statistics(losses, rewards, outputs.quantity, batch)
        statistics |= {"odds_ratio_loss": moments(odds_losses), "chosen_nll": moments(likelihood)}
        return losses.sum() / totals.prompts, statistics

    return Loss("logprobs", function, (*PAIR_STATISTICS, "odds_ratio_loss", "chosen_nll"))


def _log_odds(logprobs: Tensor) -> Tensor:
    """Return log(P / (1 - P)) of log P, without loss of digits near P = 0 or 1 (Maechler 2012)."""
    bounded = logprobs.clamp(max=LARGEST_MEAN_LOGPROB)
    near_one = bounded > -torch.log(torch.tensor(2.0))
    # where, with an argument that is harmless on the side that is not taken: its gradient is 0 times a finite number
    of_small = torch.log1p(-bounded.where(~near_one, -1.0).exp())
    of_large = torch.log(-torch.expm1(bounded.where(near_one, -0.1)))
    return bounded - torch.where(near_one, of_large, of_small)


def implicit_rewards(spec: PreferenceSpec, logprobs: Tensor, batch: Batch) -> Tensor:
    """Return the implicit reward (n,) of each response: beta times a log-ratio to the reference, or a mean log-prob.

    SimPO and ORPO have no reference; their rewards are of mean log-probs (Meng et al. 2024, eq. 4).
    """
    compared = logprobs - batch["ref_logprobs"] if spec.HAS_REFERENCE else logprobs
    return spec.beta * of_responses(compared, batch.mask, spec.averages_tokens)


def of_responses(per_token: Tensor, mask: Tensor, is_mean: bool) -> Tensor:
    """Return the sum (n,) over the tokens of each response, or the mean; 0 for an empty one."""
    total = (per_token * mask).sum(1)
    return total / mask.sum(1).clamp(min=1) if is_mean else total


def _difference(values: Tensor) -> Tensor:
    """Return the values of chosen responses less the values of rejected ones (n / 2,)."""
    chosen, rejected = pairs_of(values)
    return chosen - rejected


def pair_statistics(losses: Tensor, rewards: Tensor, logprobs: Tensor, batch: Batch) -> Moments:
    """Return the statistics of PAIR_STATISTICS. ``rewards`` (n,), ``logprobs`` (n, R)."""
    chosen, rejected = pairs_of(rewards)
    chosen_logprob, rejected_logprob = pairs_of(of_responses(logprobs, batch.mask, is_mean=False))
    return {
        "preference_loss": moments(losses),
        "preference_margin": moments(chosen - rejected),
        "pair_correct": moments((chosen > rejected).float()),
        "chosen_reward": moments(chosen),
        "rejected_reward": moments(rejected),
        "chosen_logprob": moments(chosen_logprob),
        "rejected_logprob": moments(rejected_logprob),
    }


def preference_accuracy(spec: PreferenceSpec, batch: Batch, _: CombineContext) -> tuple[Columns, Moments]:
    """Return the share of evaluation pairs whose chosen response has the higher implicit reward, and the margins."""
    margins = _difference(implicit_rewards(spec, batch["logprobs"], batch))
    return {}, {
        "eval_accuracy": moments((margins > 0).to(torch.float32)),
        "eval_preference_margin": moments(margins),
    }


def kto_loss(spec: KtoSpec) -> Loss:
    """Return the loss of KTO, mean over responses (Ethayarajh et al. 2024, eq. 7). Reads ``reference_point`` (n,)."""

    def function(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Moments]:
        rewards = implicit_rewards(spec, outputs.quantity, batch)
        chosen, rejected = pairs_of(rewards - spec.beta * batch["reference_point"])
        # 1 - sigmoid(x) = sigmoid(-x)
        desirable = spec.desirable_weight * torch.sigmoid(-chosen)
        undesirable = spec.undesirable_weight * torch.sigmoid(rejected)
        losses = (desirable + undesirable) / 2
        return losses.sum() / totals.prompts, pair_statistics(losses, rewards, outputs.quantity, batch)

    return Loss("logprobs", function, PAIR_STATISTICS)


def reference_point(_: KtoSpec, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """Return ``reference_point`` (n,), an estimate of KL(policy || reference), at least 0, one for each mini-batch.

    It is the mean log-ratio of responses that belong to other prompts (Ethayarajh et al. 2024, section 4), over all
    rows of the mini-batch, on whichever rank they are.
    """
    log_ratios = of_responses(batch["logprobs"] - batch["ref_logprobs"], batch.mask, is_mean=False)
    sums = context.reducer.sum(torch.stack([moments(log_ratios[part]) for part in context.segments]))
    points = torch.zeros_like(log_ratios)
    for part, (count, total, _squares) in zip(context.segments, sums.tolist(), strict=True):
        points[part] = max(total / max(count, 1), 0.0)
    return {"reference_point": points}, {"reference_point": moments(points)}
