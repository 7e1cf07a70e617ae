"""Preference losses by hand: as the papers write them, and as TRL 1.9 computes them (the formulas written out)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replicas import Alone, Port, batch_of, mask_of, on_replicas
from torch import Tensor
from torch.nn.functional import logsigmoid

from flexrlhf.config.algorithms.supervised import DpoSpec, KtoSpec, OrpoSpec, SimpoSpec
from flexrlhf.engines.base import Batch, Outputs, Totals
from flexrlhf.metrics import METRICS
from flexrlhf.objectives.context import CombineContext
from flexrlhf.objectives.functions import COMBINES, LOSSES

MASK = mask_of("11100", "11110", "10000", "11111")
"""Two pairs: chosen and rejected of 3 and 4, of 1 and 5 tokens."""
LENGTHS = torch.tensor([3.0, 4.0, 1.0, 5.0])
POLICY = torch.tensor(
    [
        [-0.5, -1.0, -0.25, 9.0, 9.0],
        [-2.0, -0.5, -0.75, -2.5, 9.0],
        [-0.1, 9.0, 9.0, 9.0, 9.0],
        [-1.5, -0.2, -0.9, -2.5, -0.4],
    ],
    dtype=torch.float64,
)
REFERENCE = torch.tensor(
    [
        [-0.75, -1.5, -0.5, 7.0, 7.0],
        [-1.0, -0.25, -0.5, -1.5, 7.0],
        [-2.6, 7.0, 7.0, 7.0, 7.0],
        [-1.0, -0.3, -1.9, -2.0, -0.4],
    ],
    dtype=torch.float64,
)
LOGPS, REF_LOGPS = (POLICY * MASK).sum(1), (REFERENCE * MASK).sum(1)
RATIOS = LOGPS - REF_LOGPS


def loss_of(spec: Any, function: str, point: float = 0.0) -> tuple[float, dict[str, float]]:
    """The loss of both pairs as one mini-batch, and its metrics."""
    columns = {"response_mask": MASK, "ref_logprobs": REFERENCE, "reference_point": torch.full((4,), point)}
    loss, statistics = LOSSES[function](spec).function(Outputs(POLICY), batch_of(2, **columns), Totals(13, 4, 2))
    return float(loss), METRICS.evaluate({name: tuple(each.tolist()) for name, each in statistics.items()})


def pairs(numbers: Tensor) -> tuple[Tensor, Tensor]:
    return numbers[::2], numbers[1::2]


def test_dpo_as_trl_has_it() -> None:
    """``_compute_loss`` of DPOTrainer: sigmoid, robust, ipo (a mean over tokens) and sigmoid_norm."""
    beta, e = 0.3, 0.2
    delta = RATIOS[::2] - RATIOS[1::2]
    mean_delta = (RATIOS / LENGTHS)[::2] - (RATIOS / LENGTHS)[1::2]
    clean, flipped = -(1 - e) * logsigmoid(beta * delta), -e * logsigmoid(-beta * delta)
    expected = {
        "sigmoid": (DpoSpec(beta=beta), -logsigmoid(beta * delta)),
        "robust": (DpoSpec(beta=beta, loss="robust", label_smoothing=e), (clean - flipped) / (1 - 2 * e)),
        "ipo": (DpoSpec(beta=beta, loss="ipo", length_normalised=True), (mean_delta - 1 / (2 * beta)) ** 2),
        "sigmoid_norm": (DpoSpec(beta=beta, length_normalised=True), -logsigmoid(beta * mean_delta)),
        # not in TRL: the paper's, of sums
        "ipo of sums": (DpoSpec(beta=beta, loss="ipo"), (delta - 1 / (2 * beta)) ** 2),
    }
    for name, (spec, losses) in expected.items():
        assert loss_of(spec, "preference_loss")[0] == pytest.approx(float(losses.mean()), abs=1e-6), name


def test_robust_losses_are_unbiased() -> None:
    """With labels that are wrong for a share e of the pairs its mean is the loss of right labels (eq. of rDPO)."""
    e, h = 0.2, torch.tensor([0.7, -1.3])
    robust = (-(1 - e) * logsigmoid(h) + e * logsigmoid(-h)) / (1 - 2 * e)
    swapped = (-(1 - e) * logsigmoid(-h) + e * logsigmoid(h)) / (1 - 2 * e)
    assert torch.allclose((1 - e) * robust + e * swapped, -logsigmoid(h))


def test_rewards_margins_and_logprobs_are_logged() -> None:
    """As TRL logs rewards/chosen, rewards/rejected, rewards/margins, rewards/accuracies, logps/chosen and rejected."""
    metrics = loss_of(DpoSpec(beta=0.3), "preference_loss")[1]
    (chosen, rejected), (logp, other) = pairs(0.3 * RATIOS), pairs(LOGPS)
    expected = {
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "preference_margin": chosen - rejected,
        "pair_accuracy": (chosen > rejected).double(),
        "chosen_logprob": logp,
        "rejected_logprob": other,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(
        {n: float(v.mean()) for n, v in expected.items()}
    )


def test_simpo_as_trl_has_it() -> None:
    """``cpo_loss`` of CPOTrainer with loss_type simpo and cpo_alpha 0: its margin is simpo_gamma / beta."""
    beta, gamma = 2.5, 1.4
    chosen, rejected = pairs(LOGPS / LENGTHS)
    losses = -logsigmoid(beta * (chosen - rejected - gamma / beta))
    loss, metrics = loss_of(SimpoSpec(beta=beta, gamma=gamma), "simpo_loss")
    assert loss == pytest.approx(float(losses.mean()), abs=1e-6)
    assert metrics["chosen_reward"] == pytest.approx(beta * float(chosen.mean()))


def test_orpo_as_trl_has_it() -> None:
    """``odds_ratio_loss`` of ORPOTrainer; the likelihood is of responses alone, where there it is of prompts, too."""
    beta = 0.4
    chosen, rejected = pairs(LOGPS / LENGTHS)
    log_odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    loss, metrics = loss_of(OrpoSpec(beta=beta), "orpo_loss")
    assert loss == pytest.approx(float((-chosen - beta * logsigmoid(log_odds)).mean()), abs=1e-6)
    assert metrics["chosen_nll"] == pytest.approx(-float(chosen.mean()))
    assert metrics["odds_ratio_loss"] == pytest.approx(-float(logsigmoid(log_odds).mean()))


def test_odds_of_certain_and_impossible_responses_are_finite() -> None:
    quantity = torch.tensor([[0.0], [-300.0]], requires_grad=True)
    columns = {"response_mask": mask_of("1", "1")}
    loss, _ = LOSSES["orpo_loss"](OrpoSpec()).function(Outputs(quantity), batch_of(2, **columns), Totals(2, 2, 1))
    loss.backward()
    assert loss.isfinite() and quantity.grad is not None and quantity.grad.isfinite().all()


@pytest.mark.parametrize("point", [0.0, 0.35])
def test_kto_as_trl_has_it(point: float) -> None:
    """``_compute_loss`` of KTOTrainer with loss_type kto: mean over all responses."""
    beta, good, bad = 0.3, 1.3, 0.7
    chosen, rejected = pairs(RATIOS)
    losses = torch.cat(
        (
            good * (1 - torch.sigmoid(beta * (chosen - point))),
            bad * (1 - torch.sigmoid(beta * (point - rejected))),
        )
    )
    loss, _ = loss_of(KtoSpec(beta=beta, desirable_weight=good, undesirable_weight=bad), "kto_loss", point)
    assert loss == pytest.approx(float(losses.mean()), abs=1e-6)


def reference_points(batch: Batch, segments: list[slice], reducer: Any = None) -> list[float]:
    context = CombineContext(segments, reducer or Alone())
    return COMBINES["reference_point"](KtoSpec(), batch, context)[0]["reference_point"].tolist()


def kto_batch(rows: slice = slice(0, 4)) -> Batch:
    return batch_of(2, response_mask=MASK, logprobs=POLICY, ref_logprobs=REFERENCE).select(rows)


def test_reference_points_are_means_that_are_not_negative() -> None:
    first, second = RATIOS[:2].mean(), RATIOS[2:].mean()
    assert first < 0 < second
    assert reference_points(kto_batch(), [slice(0, 4)]) == pytest.approx([float(RATIOS.mean())] * 4)
    assert reference_points(kto_batch(), [slice(0, 2), slice(2, 4)]) == pytest.approx([0, 0, *[float(second)] * 2])


def test_a_reference_point_is_of_the_mini_batch_on_all_ranks() -> None:
    def work(rank: int, port: Port) -> list[float]:
        return reference_points(kto_batch(slice(2 * rank, 2 * rank + 2)), [slice(0, 2)], port)

    assert on_replicas(2, work) == [pytest.approx([float(RATIOS.mean())] * 2)] * 2
