"""Losses of train operators, without communication.

Shapes: n rows, R response positions. ``batch.mask`` (n, R) is 1 on response tokens that count; it may have gaps. The
function of a loss returns the contribution of some rows; contributions add up to the loss of the mini-batch, however it
is split, because ``Totals`` count all of it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flexrlhf.config.algorithms.base import AlgorithmSpec, LossAggregation
from flexrlhf.config.algorithms.policy import PolicySpec
from flexrlhf.config.algorithms.ppo import AcShareSpec, PpoSpec
from flexrlhf.config.algorithms.supervised import SftSpec
from flexrlhf.engines.base import Batch, Loss, Moments, Outputs, Totals, moments
from flexrlhf.objectives.kl_penalty import kl_estimate, measured_kl
from flexrlhf.objectives.surrogates import clamped_log_ratio, surrogate_losses, used_ratio


def aggregate(per_token: Tensor, mask: Tensor, how: LossAggregation, totals: Totals) -> Tensor:
    """Aggregate losses (n, R) of tokens to the contribution () of these rows to the mini-batch's loss.

    token-mean:              mean over the tokens that count.
    token-sum:               sum over them.
    seq-mean-token-sum:      mean over responses of the sum over their tokens.
    seq-mean-token-sum-norm: the same, divided by R.
    seq-mean-token-mean:     mean over responses of the mean over their tokens.

    verl's ``loss_agg_mode`` has the same names.
    """
    weights = mask.to(per_token.dtype)
    match how:
        case "token-mean":
            return (per_token * weights).sum() / max(totals.tokens, 1)
        case "token-sum":
            return (per_token * weights).sum()
        case "seq-mean-token-sum":
            return (per_token * weights).sum() / max(totals.sequences, 1)
        case "seq-mean-token-sum-norm":
            return (per_token * weights).sum() / max(totals.sequences, 1) / mask.shape[1]
        case "seq-mean-token-mean":
            lengths = weights.sum(1).clamp(min=1)
            return ((per_token * weights).sum(1) / lengths).sum() / max(totals.sequences, 1)


def likelihood_loss(spec: SftSpec) -> Loss:
    """Return the negative log-likelihood of the responses, as in supervised fine-tuning."""

    def function(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Moments]:
        loss = aggregate(-outputs.quantity, batch.mask, spec.loss_aggregation, totals)
        return loss, {"nll": moments(-outputs.quantity, batch.mask)}

    return Loss("logprobs", function, ("nll",))


def ptx_loss(spec: PolicySpec) -> Loss:
    """Return the pretraining loss: coefficient x mean negative log-likelihood of tokens (Ouyang et al. 2022, eq. 2)."""
    assert spec.ptx is not None, "only graphs of algorithms with ptx have this loss"
    coefficient = spec.ptx.coefficient

    def function(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Moments]:
        loss = coefficient * aggregate(-outputs.quantity, batch.mask, "token-mean", totals)
        return loss, {"ptx_nll": moments(-outputs.quantity, batch.mask)}

    return Loss("logprobs", function, ("ptx_nll",), temperature=1.0)


def pair_loss(_: AlgorithmSpec) -> Loss:
    """Return the reward model's loss: -log sigmoid(chosen - rejected), mean over pairs (Ouyang et al. 2022, eq. 1)."""

    def function(outputs: Outputs, _: Batch, totals: Totals) -> tuple[Tensor, Moments]:
        chosen, rejected = pairs_of(outputs.quantity)
        losses = -torch.nn.functional.logsigmoid(chosen - rejected)
        statistics = {"pair_loss": moments(losses), "pair_correct": moments((chosen > rejected).float())}
        return losses.sum() / totals.prompts, statistics

    return Loss("scores", function, ("pair_loss", "pair_correct"))


def pairs_of(values: Tensor) -> tuple[Tensor, ...]:
    """Split ``values`` (n,) into the chosen and the rejected responses' (n / 2,): samples 0 and 1."""
    return values.view(len(values) // 2, 2).unbind(1)


def policy_loss(spec: PolicySpec) -> Loss:
    """Return the surrogate loss of the settings, by default the clipped one (Schulman et al. 2017, eq. 7).

    Less the entropy bonus and plus the KL penalty, if the settings have them.
    """

    def function(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Moments]:
        mask, how = batch.mask, spec.loss_aggregation
        if spec.counts_rejected:
            totals = replace(totals, tokens=totals.sampled_tokens, sequences=totals.sampled_sequences)
        if spec.truncation == "mask-loss":
            # all responses of the mini-batch: truncated ones have no tokens that count, and are counted; but for
            # groups that dynamic sampling leaves out
            used = totals.prompts * batch.samples_per_prompt - totals.unused
            totals = replace(totals, sequences=used if spec.attempts == 1 else totals.taken)
        losses, statistics = surrogate_losses(spec, outputs, batch)
        loss = aggregate(losses, mask, how, totals)
        assert outputs.entropy is not None
        if spec.entropy_coefficient:
            of_entropy = "token-mean" if spec.entropy_aggregation == "token-mean" else how
            loss = loss - spec.entropy_coefficient * aggregate(outputs.entropy, mask, of_entropy, totals)
        if spec.kl is not None and spec.kl.place == "loss":
            penalty = kl_estimate(spec.kl, outputs.quantity - batch["ref_logprobs"])
            if spec.kl.corrected:
                penalty = penalty * used_ratio(spec, clamped_log_ratio(outputs, batch), mask)
            loss = loss + spec.kl.coefficient * aggregate(penalty, mask, how, totals)
        return loss, statistics

    statistics: tuple[str, ...] = ("policy_loss", "ratio_clipped", "update_kl", "entropy")
    if spec.importance is not None:
        statistics += ("importance_weight", "importance_clipped", "behaviour_kl")
    return Loss("logprobs", function, statistics, "gradient" if spec.entropy_coefficient else "value")


def on_policy(spec: PolicySpec, loss: Loss) -> Loss:
    """Return ``loss`` for the only pass of a step, with that pass's log-probs in place of the column ``logprobs``.

    The step starts from the policy of this pass. So ratios are 1, with the gradient of the log-probs, and importance
    weights follow from the same log-probs. If the KL penalty is part of the loss, it also reports the KL.
    """
    reports = spec.reports_kl

    def function(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Moments]:
        own = outputs.quantity.detach()
        contribution, statistics = loss.function(outputs, batch.with_columns({"logprobs": own}), totals)
        if reports:
            statistics |= measured_kl((own - batch["ref_logprobs"]) * batch.mask, batch.mask, batch)
        return contribution, statistics

    return replace(loss, function=function, statistics=loss.statistics + (("kl", "kl_token") if reports else ()))


def on_policy_loss(spec: PolicySpec) -> Loss:
    """Return the policy loss for the only pass of a step."""
    return on_policy(spec, policy_loss(spec))


def on_policy_shared_loss(spec: AcShareSpec) -> Loss:
    """Return the loss of policy and values for the only pass of a step."""
    return on_policy(spec, shared_loss(spec))


def value_loss(spec: PpoSpec) -> Loss:
    """Return the value loss: half the squared error, the larger of plain and clipped (OpenAI Baselines' PPO2)."""

    def function(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Moments]:
        losses, statistics = clipped_value_errors(spec, outputs.quantity, batch["values"], batch["returns"], batch.mask)
        return aggregate(losses, batch.mask, spec.loss_aggregation, totals), statistics

    return Loss("values", function, ("value_loss", "value_clipped"))


def shared_loss(spec: AcShareSpec) -> Loss:
    """Return the policy loss plus ``value_coefficient`` times the value loss (Schulman et al. 2017, eq. 9)."""
    policy = policy_loss(spec)

    def function(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Moments]:
        assert outputs.values is not None
        loss, statistics = policy.function(outputs, batch, totals)
        errors, value_statistics = clipped_value_errors(
            spec, outputs.values, batch["values"], batch["returns"], batch.mask
        )
        loss = loss + spec.value_coefficient * aggregate(errors, batch.mask, spec.loss_aggregation, totals)
        return loss, statistics | value_statistics

    names = (*policy.statistics, "value_loss", "value_clipped")
    return replace(policy, function=function, statistics=names, with_values=True)


def clipped_value_errors(
    spec: PpoSpec, new: Tensor, old: Tensor, returns: Tensor, mask: Tensor
) -> tuple[Tensor, Moments]:
    """Return losses (n, R) of the values, and their statistics.

    new, old: (n, R+1), values now and when the responses were generated.
    returns:  (n, R).
    """
    values, before = new[:, :-1], old[:, :-1]
    plain = (values - returns) ** 2
    clipped = plain
    if spec.value_clip is not None:
        clipped = (torch.clamp(values, before - spec.value_clip, before + spec.value_clip) - returns) ** 2
    losses = 0.5 * torch.maximum(plain, clipped)
    statistics = {"value_loss": moments(losses, mask), "value_clipped": moments((clipped > plain).float(), mask)}
    return losses, statistics
