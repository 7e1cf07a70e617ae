"""Losses by hand, and the same for every split."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, get_args

import pytest
import torch
from pairwise import pairwise
from replicas import batch_of, mask_of
from scored_batches import context_of, ragged, scored_batch
from torch import Tensor

from flexrlhf.config.algorithms.base import ImportanceSpec, LossAggregation
from flexrlhf.config.algorithms.grpo import GrpoSpec
from flexrlhf.config.algorithms.policy_sections import KlSpec, PtxSpec
from flexrlhf.config.algorithms.ppo import AcShareSpec, PpoSpec
from flexrlhf.config.algorithms.supervised import DpoSpec, KtoSpec, OrpoSpec, RewardSpec, SftSpec, SimpoSpec
from flexrlhf.engines.base import Batch, Loss, Moments, Outputs, Totals, add_moments
from flexrlhf.metrics import METRICS, Outcome
from flexrlhf.objectives.functions import COMBINES, LOSSES
from flexrlhf.objectives.kl_penalty import kl_estimate, kl_penalty
from flexrlhf.objectives.losses import aggregate
from flexrlhf.objectives.surrogates import importance_weights
from flexrlhf.operators.named_functions import LOSSES as NAMED_LOSSES

AGGREGATIONS: tuple[LossAggregation, ...] = get_args(LossAggregation)


# --- losses


@dataclass(frozen=True)
class Case:
    """A loss with its inputs: ``quantity`` is what the model computes, whose gradient is compared.

    ``values``: of a trunk with both heads.
    """

    loss: Loss
    quantity: Tensor
    batch: Batch
    values: Tensor | None = None

    def totals(self) -> Totals:
        mask = self.batch.mask
        prompts = len(self.batch) / self.batch.samples_per_prompt
        return Totals(float(mask.sum()), float((mask.sum(1) > 0).sum()), prompts)

    def contributions(self, parts: list[slice]) -> tuple[float, Tensor, Moments]:
        """The sum of the parts' losses, the gradient that it gives, and the summed statistics."""
        quantity = self.quantity.clone().requires_grad_()
        entropy = -quantity if self.loss.quantity == "logprobs" else None
        total, statistics = 0.0, {}
        for part in parts:
            values = None if self.values is None else self.values[part]
            outputs = Outputs(quantity[part], None if entropy is None else entropy[part], values)
            value, moments = self.loss.function(outputs, self.batch.select(part), self.totals())
            value.backward(retain_graph=True)
            total += float(value.detach())
            add_moments(statistics, moments)
        assert quantity.grad is not None
        return total, quantity.grad, statistics


def case_of(name: str, how: LossAggregation, **settings: Any) -> Case:
    """16 rows of unequal length, some of them empty."""
    generator = torch.Generator().manual_seed(3)
    _, mask = ragged(16)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    columns = {
        "response_mask": mask,
        "logprobs": noise(16, 6),
        "ref_logprobs": ragged(16, seed=5)[0],
        "advantages": noise(16, 6) * mask,
        "values": noise(16, 7),
        "returns": noise(16, 6) * mask,
    }
    further = {"loss_aggregation": how} | settings
    match name:
        case "policy_loss" | "on_policy_loss":
            spec: Any = PpoSpec.model_validate({"entropy_coefficient": 0.1} | further)
            return Case(LOSSES[name](spec), noise(16, 6), batch_of(**columns))
        case "shared_loss" | "on_policy_shared_loss":
            spec = AcShareSpec.model_validate({"entropy_coefficient": 0.1} | further)
            return Case(LOSSES[name](spec), noise(16, 6), batch_of(**columns), noise(16, 7))
        case "value_loss":
            return Case(LOSSES[name](PpoSpec.model_validate(further)), noise(16, 7), batch_of(**columns))
        case "likelihood_loss":
            return Case(LOSSES[name](SftSpec.model_validate(further)), noise(16, 6), batch_of(**columns))
        case "ptx":
            spec = PpoSpec(ptx=PtxSpec(path="texts.jsonl", coefficient=0.5))
            return Case(LOSSES[name](spec), noise(16, 6), batch_of(**columns))
        case "preference_loss":
            return Case(LOSSES[name](DpoSpec()), noise(16, 6), batch_of(2, **columns))
        case "simpo_loss":
            return Case(LOSSES[name](SimpoSpec()), noise(16, 6), batch_of(2, **columns))
        case "orpo_loss":
            return Case(LOSSES[name](OrpoSpec()), -noise(16, 6).abs(), batch_of(2, **columns))
        case "kto_loss":
            return Case(LOSSES[name](KtoSpec()), noise(16, 6), batch_of(2, **columns, reference_point=noise(16)))
        case _:
            assert name == "pair_loss", f"give {name} a case of its own"
            return Case(LOSSES[name](RewardSpec()), noise(16), batch_of(2, **columns))


ONE_FORM = ("pair_loss", "preference_loss", "simpo_loss", "orpo_loss", "kto_loss", "ptx")
"""Losses with a fixed aggregation."""
CASES = [(name, how) for name in LOSSES for how in AGGREGATIONS if name not in ONE_FORM or how == "token-mean"]
PARTS = {
    2: [slice(0, 8), slice(8, 16)],
    4: [slice(0, 2), slice(2, 10), slice(10, 12), slice(12, 16)],
}


SETTINGS = {
    "k1": {"kl": {"place": "loss", "coefficient": 0.3, "estimator": "k1"}},
    "k2": {"kl": {"place": "loss", "coefficient": 0.3, "estimator": "k2", "clamp": 0.5}},
    "k3": {"kl": {"place": "loss", "coefficient": 0.3, "estimator": "k3"}},
    "dual clip": {"dual_clip": 1.5},
    "sequence": {"ratio": "sequence"},
    "all": {"kl": {"place": "loss", "estimator": "k3"}, "dual_clip": 2.0, "ratio": "sequence", "clip_high": 0.3},
}


@pytest.mark.parametrize(
    ("name", "how", "settings"),
    [
        *((name, how, {}) for name, how in CASES),
        *pairwise(("policy_loss", "shared_loss"), AGGREGATIONS, list(SETTINGS.values())),
    ],
)
def test_loss_gradient_and_statistics_add_up_over_any_parts(
    name: str, how: LossAggregation, settings: dict[str, Any]
) -> None:
    case = case_of(name, how, **settings)
    whole, _, _ = assert_adds_up(case)
    assert whole != 0
    if settings:
        plain = case_of(name, how).contributions([slice(0, 16)])[0]
        assert whole != pytest.approx(plain, rel=1e-3), "the setting must change something"


def assert_adds_up(case: Case) -> tuple[float, Tensor, Moments]:
    """Check each of ``PARTS``, and return loss, gradient and statistics of all rows at once."""
    whole, gradient, statistics = case.contributions([slice(0, 16)])
    assert set(statistics) == set(case.loss.statistics)
    for parts in PARTS.values():
        loss, split_gradient, split_statistics = case.contributions(parts)
        assert loss == pytest.approx(whole, rel=1e-5, abs=1e-6)
        assert torch.allclose(split_gradient, gradient, rtol=1e-5, atol=1e-7)
        for statistic, total in statistics.items():
            assert split_statistics[statistic].tolist() == pytest.approx(total.tolist(), rel=1e-9)
    return whole, gradient, statistics


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_single_rows_add_up_unless_they_compare_two(name: str) -> None:
    """A pass may have one response of a group for all losses but pairwise ones."""
    case, rows = case_of(name, "token-mean"), [slice(row, row + 1) for row in range(16)]
    if NAMED_LOSSES[name].compares:
        with pytest.raises(RuntimeError):
            case.contributions(rows)
        return
    whole, gradient, _ = case.contributions([slice(0, 16)])
    loss, split_gradient, _ = case.contributions(rows)
    assert loss == pytest.approx(whole, rel=1e-5)
    assert torch.allclose(split_gradient, gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "pair_loss"])
def test_what_lies_outside_the_mask_has_no_gradient(name: str) -> None:
    case = case_of(name, "token-mean")
    gradient = case.contributions([slice(0, 16)])[1]
    outside = case.batch["response_mask"] == 0
    assert not gradient[:, :6][outside].any()


ON_POLICY = [
    ("policy_loss", {}),
    ("policy_loss", {"dual_clip": 3.0, "clip_low": 1e-4, "clip_high": 1e-4}),
    ("policy_loss", {"surrogate": "cispo"}),
    ("policy_loss", {"ratio": "sequence"}),
    ("policy_loss", {"ratio": "sequence-token"}),
    ("policy_loss", {"kl": {"place": "loss", "coefficient": 0.3}}),
    ("policy_loss", {"importance": {"cap": 1.1}}),
    ("policy_loss", {"importance": {"level": "sequence", "outside": "mask", "cap": 1.1, "floor": 0.5}}),
    ("shared_loss", {}),
]
"""Losses, and settings of theirs, with what the only pass of a step computes."""


@pytest.mark.parametrize(("name", "settings"), ON_POLICY)
def test_the_only_pass_of_a_step_has_the_loss_of_its_own_log_probs(name: str, settings: dict[str, Any]) -> None:
    """To the last bit that of a forward pass before it: contribution, gradient and statistics."""
    plain, alone = (case_of(each, "token-mean", **settings) for each in (name, NAMED_LOSSES[name].on_policy))
    sampled = plain.quantity + 0.1 * plain.batch["logprobs"]
    before = plain.batch.with_columns({"logprobs": plain.quantity, "rollout_logprobs": sampled})
    without = {name: values for name, values in before.columns.items() if name != "logprobs"}
    expected = replace(plain, batch=before).contributions(PARTS[4])
    found = replace(alone, batch=Batch(without, before.rows, 1)).contributions(PARTS[4])
    assert found[0] == expected[0] and torch.equal(found[1], expected[1]) and expected[1].any()
    assert all(torch.equal(found[2][name], values) for name, values in expected[2].items())
    assert set(found[2]) == set(alone.loss.statistics)
    assert float(found[2]["update_kl"][1]) == float(found[2]["ratio_clipped"][1]) == 0


def test_the_only_pass_reports_the_kl_that_advantages_would_have_reported() -> None:
    """Where the penalty is part of the loss; else the log-probs that they read are another pass's."""
    settings = {"kl": {"place": "loss"}, "loss_aggregation": "token-mean"}
    case, spec = case_of("on_policy_loss", "token-mean", **settings), PpoSpec.model_validate(settings)
    counted = {**case.batch.columns, "loss_mask": case.batch["response_mask"], "logprobs": case.quantity}
    batch, state = Batch(counted, case.batch.rows, 1), {"kl_coefficient": 0.05}
    penalty, expected = kl_penalty(spec, batch, batch.mask, state)
    _, _, found = case.contributions([slice(0, 16)])
    assert {name: found[name].tolist() for name in ("kl", "kl_token")} == {
        name: pytest.approx(expected[name].tolist()) for name in ("kl", "kl_token")
    }
    left = Batch({"response_mask": batch["response_mask"]}, batch.rows, 1)
    nothing, used = kl_penalty(spec, left, batch.mask, state)
    assert torch.equal(nothing, penalty) and set(used) == {"kl_coefficient"}
    assert torch.equal(used["kl_coefficient"], expected["kl_coefficient"])
    assert "kl" not in case_of("on_policy_loss", "token-mean").loss.statistics


def test_aggregation_by_hand() -> None:
    """Rows of 1, 3 and 0 tokens; a width of 4."""
    per_token = torch.tensor([[6.0, 99, 99, 99], [1.0, 2.0, 3.0, 99], [99.0, 99, 99, 99]])
    mask, totals = mask_of("1000", "1110", "0000"), Totals(tokens=4, sequences=2, prompts=3)
    expected = {
        "token-mean": 12 / 4,
        "token-sum": 12,
        "seq-mean-token-sum": 12 / 2,
        "seq-mean-token-sum-norm": 12 / 2 / 4,
        "seq-mean-token-mean": (6 + 2) / 2,
    }
    assert {how: float(aggregate(per_token, mask, how, totals)) for how in AGGREGATIONS} == expected


def test_a_mini_batch_without_tokens_has_loss_zero() -> None:
    mask, totals = mask_of("00"), Totals(0, 0, 1)
    assert [float(aggregate(torch.ones(1, 2), mask, how, totals)) for how in AGGREGATIONS] == [0.0] * 5


def test_the_clipped_surrogate_by_hand() -> None:
    """Ratios 2, 2, 0.5, 0.5 with advantages +, -, +, -: the clip sets the loss where it is the more pessimistic."""
    new = torch.tensor([[2.0, 2.0, 0.5, 0.5, 1.1]]).log()
    batch = batch_of(
        response_mask=mask_of("11111"),
        logprobs=torch.zeros(1, 5),
        advantages=torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0]]),
    )
    loss, statistics = LOSSES["policy_loss"](PpoSpec(clip_low=0.2, clip_high=0.3)).function(
        Outputs(new, torch.ones(1, 5)), batch, Totals(5, 1, 1)
    )
    assert float(loss) == pytest.approx((-1.3 + 2.0 - 0.5 + 0.8 - 1.1) / 5)
    assert statistics["ratio_clipped"].tolist()[:2] == [5.0, 2.0]
    assert float(statistics["update_kl"][1]) == pytest.approx(sum(r - 1 - math.log(r) for r in (2, 2, 0.5, 0.5, 1.1)))
    assert statistics["entropy"].tolist()[:2] == [5.0, 5.0]


@pytest.mark.parametrize("how", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_truncated_responses_and_the_bonus_as_trl_has_them(how: LossAggregation) -> None:
    """``_compute_loss`` of TRL 1.16.0 with ``mask_truncated_completions`` and ``entropy_coef``: dapo, grpo, dr_grpo."""
    settings = {"truncation": "mask-loss", "entropy_coefficient": 0.1, "entropy_aggregation": "token-mean", "kl": None}
    spec = GrpoSpec.model_validate({**settings, "samples_per_prompt": 2, "loss_aggregation": how})
    batch = scored_batch(mask_of("1110", "1100", "1111", "1000"), [4.0, 1.0, 2.0, 3.0], [1, 1, 0, 1])
    batch = Batch(batch.columns, batch.rows, 2)
    columns, _ = COMBINES["group_advantages"](spec, batch, context_of(spec, batch))
    # rewards of the truncated response are a part of its group's mean and deviation
    expected = torch.tensor([1.5, -1.5, -0.5, 0.5]) / torch.tensor([4.5, 4.5, 0.5, 0.5]).sqrt()
    mask = mask_of("1110", "1100", "0000", "1000").float()
    assert torch.allclose(columns["advantages"], expected[:, None] * mask, atol=1e-5)
    assert columns["loss_mask"].equal(mask.to(torch.uint8)) and columns["outcome"].tolist() == [
        0,
        0,
        Outcome.TRUNCATED.code,
        0,
    ]
    generator = torch.Generator().manual_seed(0)
    new, entropy = (torch.randn(4, 4, generator=generator) * 0.1 for _ in range(2))
    found, _ = LOSSES["policy_loss"](spec).function(
        Outputs(new, entropy), batch.with_columns(columns), Totals(float(mask.sum()), 3.0, 2.0)
    )
    per_token = -torch.minimum(new.exp() * expected[:, None], new.exp().clamp(0.8, 1.2) * expected[:, None])
    theirs = {
        "token-mean": (per_token * mask).sum() / mask.sum(),
        "seq-mean-token-mean": ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean(),
        "seq-mean-token-sum-norm": (per_token * mask).sum() / (4 * 4),
    }
    bonus = (entropy * mask).sum() / mask.sum().clamp(min=1.0)
    assert torch.allclose(found, theirs[how] - 0.1 * bonus, atol=1e-5)


def test_the_clipped_value_loss_by_hand() -> None:
    """Old value 0, clip 0.2. Value 1: for return 2 plain (2-1)^2 < clipped (2-0.2)^2; for return 0 plain 1 > 0.04."""
    batch = batch_of(response_mask=mask_of("111"), values=torch.zeros(1, 4), returns=torch.tensor([[2.0, 0.0, 1.0]]))
    outputs = Outputs(torch.tensor([[1.0, 1.0, 0.1, 50.0]]))
    loss, statistics = LOSSES["value_loss"](PpoSpec(value_clip=0.2)).function(outputs, batch, Totals(3, 1, 1))
    assert float(loss) == pytest.approx(0.5 * (1.8**2 + 1.0 + 0.9**2) / 3)
    assert statistics["value_clipped"].tolist()[:2] == [3.0, 1.0]


def test_the_pair_loss_by_hand() -> None:
    batch = batch_of(2, response_mask=mask_of("1", "1", "1", "1"))
    outputs = Outputs(torch.tensor([2.0, 0.0, 1.0, 1.0]))
    loss, statistics = LOSSES["pair_loss"](RewardSpec()).function(outputs, batch, Totals(4, 4, 2))
    assert float(loss) == pytest.approx((math.log(1 + math.exp(-2)) + math.log(2)) / 2)
    assert statistics["pair_correct"].tolist()[:2] == [2.0, 1.0]


# --- responses sampled by another policy

LEVELS = ("token", "sequence")


def sampled_with(ratios: Tensor, mask: Tensor, **columns: Tensor) -> Batch:
    """Return responses whose tokens are ``ratios`` times as likely under the trained policy as when sampled."""
    old = torch.full(mask.shape, -3.0)
    return batch_of(response_mask=mask, logprobs=old + ratios.log(), rollout_logprobs=old, **columns)


def corrected(level: str, batch: Batch, cap: float = 3.0) -> tuple[Tensor, Moments]:
    return importance_weights(ImportanceSpec.model_validate({"level": level, "cap": cap}), batch)


def test_importance_weights_of_tokens_by_hand() -> None:
    batch = sampled_with(torch.tensor([[2.0, 0.5, 8.0], [1.0, 4.0, 9.0]]), mask_of("111", "110"))
    weights, statistics = corrected("token", batch)
    assert weights[batch["response_mask"].bool()].tolist() == pytest.approx([2, 0.5, 3, 1, 3])
    assert statistics["importance_weight"].tolist() == pytest.approx([5, 9.5, 4 + 0.25 + 9 + 1 + 9])
    assert statistics["importance_clipped"].tolist() == [5, 2, 2]
    # r - 1 - log r of r = 2, 1/2, 8, 1, 4
    k3 = (1 - 0.5 + 7 + 0 + 3) - math.log(2 * 0.5 * 8 * 1 * 4)
    assert statistics["behaviour_kl"].tolist()[:2] == pytest.approx([5, k3])


def test_importance_weights_of_responses_by_hand() -> None:
    """Products of 2 * 2 * 0.5 = 2, of 4 * 4 = 16 and of none; a response without tokens is not counted."""
    ratios = torch.tensor([[2.0, 2.0, 0.5], [4.0, 4.0, 1.0], [9.0, 9.0, 9.0]])
    weights, statistics = corrected("sequence", sampled_with(ratios, mask_of("111", "110", "000")))
    assert weights.tolist()[:2] == [pytest.approx([2.0] * 3), pytest.approx([3.0] * 3)]
    assert statistics["importance_weight"].tolist() == pytest.approx([2, 5, 13])
    assert statistics["importance_clipped"].tolist() == [2, 1, 1]


@pytest.mark.parametrize("level", LEVELS)
def test_gaps_of_the_mask_have_no_part_in_importance_weights(level: str) -> None:
    mask = mask_of("1011", "0110")
    ratios = torch.tensor([[0.5, 1e9, 2.0, 1.5], [1e-9, 1.25, 0.5, 1e9]])
    weights, statistics = corrected(level, sampled_with(ratios, mask))
    same, other = corrected(level, sampled_with(torch.where(mask.bool(), ratios, 1.0), mask))
    assert torch.equal(weights, same)
    assert all(torch.equal(statistics[name], other[name]) for name in other)


@pytest.mark.parametrize("level", LEVELS)
def test_importance_weights_stay_finite(level: str) -> None:
    batch = batch_of(
        response_mask=mask_of("111", "111"),
        logprobs=torch.tensor([[0.0] * 3, [-900.0] * 3]),
        rollout_logprobs=torch.tensor([[-900.0] * 3, [0.0] * 3]),
    )
    weights, statistics = corrected(level, batch, cap=2.0)
    assert weights[0].tolist() == [2.0] * 3
    assert (weights[1] < 1e-8).all() and all(total.isfinite().all() for total in statistics.values())


def test_without_correction_every_token_weighs_one() -> None:
    weights, statistics = importance_weights(None, batch_of(response_mask=mask_of("10")))
    assert weights.tolist() == [[1.0, 1.0]] and statistics == {}


def test_a_corrected_loss_by_hand() -> None:
    """Ratios 1.1 and 0.5 to the policy that training starts from; that one to the drawing one: 2 and 8, capped at 3."""
    batch = sampled_with(torch.tensor([[2.0, 8.0]]), mask_of("11"), advantages=torch.tensor([[1.0, -1.0]]))
    new = batch["logprobs"] + torch.tensor([[1.1, 0.5]]).log()
    spec = PpoSpec(clip_low=0.2, importance=ImportanceSpec(cap=3.0))
    loss, statistics = LOSSES["policy_loss"](spec).function(Outputs(new, torch.ones(1, 2)), batch, Totals(2, 1, 1))
    assert float(loss) == pytest.approx((-1.1 * 2 + 0.8 * 3) / 2)
    assert statistics["ratio_clipped"].tolist()[:2] == [2.0, 1.0]


@pytest.mark.parametrize("level", LEVELS)
def test_a_corrected_loss_adds_up_over_any_parts(level: str) -> None:
    case = case_of("policy_loss", "seq-mean-token-mean")
    old = case.batch["logprobs"] - 0.5 * case.quantity
    batch = batch_of(**case.batch.columns, rollout_logprobs=old)
    spec = PpoSpec.model_validate({"importance": {"level": level}})
    case = Case(LOSSES["policy_loss"](spec), case.quantity, batch)
    assert set(assert_adds_up(case)[2]) > {"importance_weight", "importance_clipped"}
    empty = case.loss.function(Outputs(case.quantity[:0], case.quantity[:0]), batch.select(slice(0, 0)), case.totals())
    assert set(empty[1]) == set(case.loss.statistics)


@pytest.mark.parametrize(("level", "share"), [("token", 16 / (4 * 6)), ("sequence", 9 / (2 * 5))])
def test_the_effective_sample_size_by_hand(level: str, share: float) -> None:
    """Of tokens 1, 2, 1 and 0: (sum)^2 / (number * sum of squares); of responses, which weigh 2 and 1."""
    batch = sampled_with(torch.tensor([[1.0, 2.0], [1.0, 1e-30]]), mask_of("11", "11"))
    if level == "sequence":
        batch = sampled_with(torch.tensor([[1.0, 2.0], [4.0, 0.25]]), mask_of("11", "11"))
    totals = {name: tuple(total.tolist()) for name, total in corrected(level, batch)[1].items()}
    assert METRICS.evaluate(totals)["effective_sample_size"] == pytest.approx(share)


# --- masks of the loss


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ONE_FORM])
def test_responses_that_do_not_count_change_nothing_of_the_others(name: str, how: LossAggregation) -> None:
    """Loss, gradient and statistics equal a mini-batch's without these rows, whatever models computed for them."""
    case = case_of(name, how)
    left_out = torch.tensor([0, 5, 6, 15])
    kept = torch.tensor([row for row in range(16) if row not in left_out.tolist()])
    mask = case.batch["response_mask"].clone()
    mask[left_out] = 0
    masked = batch_of(**case.batch.columns, loss_mask=mask)
    without = batch_of(**{column: values[kept] for column, values in case.batch.columns.items()})
    values = None if case.values is None else case.values[kept]
    loss, gradient, statistics = Case(case.loss, case.quantity, masked, case.values).contributions([slice(0, 16)])
    expected, its_gradient, its_statistics = Case(case.loss, case.quantity[kept], without, values).contributions(
        [slice(0, 12)]
    )
    assert loss == pytest.approx(expected, rel=1e-5)
    assert torch.allclose(gradient[kept], its_gradient, rtol=1e-5, atol=1e-7)
    assert not gradient[left_out].any()
    for statistic, total in its_statistics.items():
        assert statistics[statistic].tolist() == pytest.approx(total.tolist(), rel=1e-9)


# --- the penalty for leaving the reference

LOG_RATIOS = [-2.0, -0.5, 0.0, 0.25, 1.5]


def estimate_of(estimator: str, log_ratio: float, clamp: float | None) -> tuple[float, float]:
    """An estimate by its definition, and its derivative; nothing changes beyond the clamp."""
    r = log_ratio if clamp is None else min(max(log_ratio, -clamp), clamp)
    slope = float(r == log_ratio)
    value, derivative = {
        "k1": (r, 1.0),
        "k2": (0.5 * r * r, r),
        "k3": (math.exp(-r) - 1 + r, 1 - math.exp(-r)),
    }[estimator]
    return value, derivative * slope


@pytest.mark.parametrize("clamp", [None, 1.0])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_penalty_in_the_loss_and_its_gradient_by_definition(estimator: str, clamp: float | None) -> None:
    """Without advantages the penalty is all there is; its width has two tokens that do not count."""
    reference = torch.tensor([[-1.0, -2.0, -3.0, -0.5, -4.0, -9.0, -9.0]])
    logprobs = (reference + torch.tensor([[*LOG_RATIOS, 5.0, -5.0]])).requires_grad_()
    batch = batch_of(
        response_mask=mask_of("1111100"),
        logprobs=torch.zeros(1, 7),
        ref_logprobs=reference,
        advantages=torch.zeros(1, 7),
    )
    kl = {"place": "loss", "coefficient": 0.3, "estimator": estimator, "clamp": clamp}
    function = LOSSES["policy_loss"](PpoSpec.model_validate({"kl": kl})).function
    loss, _ = function(Outputs(logprobs, torch.zeros(1, 7)), batch, Totals(5, 1, 1))
    loss.backward()
    expected = [estimate_of(estimator, r, clamp) for r in LOG_RATIOS]
    assert float(loss.detach()) == pytest.approx(0.3 * sum(value for value, _ in expected) / 5)
    assert logprobs.grad is not None
    slopes = [0.3 * slope / 5 for _, slope in expected] + [0.0, 0.0]
    assert logprobs.grad[0].tolist() == pytest.approx(slopes, abs=1e-6)


def test_estimates_of_far_log_ratios_are_finite_and_k1_is_not_clamped() -> None:
    far = torch.tensor([-500.0, 500.0])
    assert kl_estimate(KlSpec(estimator="k1"), far).tolist() == [-500.0, 500.0]
    assert kl_estimate(KlSpec(estimator="k2"), far).tolist() == [125000.0, 125000.0]
    unlimited = KlSpec(estimator="k3", value_clamp=None)
    assert kl_estimate(unlimited, far).tolist() == pytest.approx([math.exp(20) - 21, 19.0])
    assert kl_estimate(KlSpec(estimator="k1", clamp=3.0), far).tolist() == [-3.0, 3.0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_what_the_gradient_of_an_estimate_is_in_expectation(estimator: str) -> None:
    """Over all tokens of a small vocabulary, sampled from the policy: that of k2 is the gradient of KL(policy || ref),
    of k3 that of KL(ref || policy), and of k1 nothing."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    estimates = kl_estimate(KlSpec.model_validate({"estimator": estimator}), policy - reference)
    (found,) = torch.autograd.grad((policy.exp().detach() * estimates).sum(), logits, retain_graph=True)
    divergence = {
        "k1": policy.sum() * 0,
        "k2": (policy.exp() * (policy - reference)).sum(),
        "k3": (reference.exp() * (reference - policy)).sum(),
    }[estimator]
    (expected,) = torch.autograd.grad(divergence, logits)
    assert torch.allclose(found, expected, atol=1e-12)
    assert (estimator == "k1") == (float(found.abs().max()) < 1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_what_an_estimate_is_in_expectation(estimator: str) -> None:
    """k1 and k3 are unbiased; k2 is close where the policies are."""
    logits = torch.tensor([0.1, -0.2, 0.3, 0.0], dtype=torch.float64)
    policy, reference = logits.log_softmax(0), (logits.flip(0) * 0.9).log_softmax(0)
    divergence = float((policy.exp() * (policy - reference)).sum())
    estimates = kl_estimate(KlSpec.model_validate({"estimator": estimator}), policy - reference)
    found = float((policy.exp() * estimates).sum())
    assert found == pytest.approx(divergence, rel=0.1 if estimator == "k2" else 1e-9)


# --- bounds and bonuses


def surrogate(spec: PpoSpec, ratios: list[float], advantages: list[float]) -> tuple[list[float], list[float]]:
    """Each token's own loss and its derivative by the log-prob."""
    found: list[tuple[float, float]] = []
    for ratio, advantage in zip(ratios, advantages, strict=True):
        logprob = torch.tensor([[ratio]]).log().requires_grad_()
        batch = batch_of(response_mask=mask_of("1"), logprobs=torch.zeros(1, 1), advantages=torch.tensor([[advantage]]))
        loss, _ = LOSSES["policy_loss"](spec).function(Outputs(logprob, torch.zeros(1, 1)), batch, Totals(1, 1, 1))
        loss.backward()
        assert logprob.grad is not None
        found.append((float(loss.detach()), float(logprob.grad)))
    return [loss for loss, _ in found], [slope for _, slope in found]


def test_a_dual_clip_bounds_what_a_negative_advantage_costs() -> None:
    """Ye et al. 2020, eq. 5 with c = 3: beyond ratio 3 nothing pulls any more; a positive advantage is as before."""
    ratios, advantages = [2.0, 4.0, 0.5, 4.0, 4.0], [-2.0, -2.0, -2.0, 2.0, 0.0]
    losses, slopes = surrogate(PpoSpec(kl=None, dual_clip=3.0), ratios, advantages)
    assert losses == pytest.approx([4.0, 6.0, 1.6, -2.4, 0.0])
    assert slopes == pytest.approx([4.0, 0.0, 0.0, 0.0, 0.0])
    losses, slopes = surrogate(PpoSpec(kl=None), ratios, advantages)
    assert losses == pytest.approx([4.0, 8.0, 1.6, -2.4, 0.0])
    assert slopes == pytest.approx([4.0, 8.0, 0.0, 0.0, 0.0])


def test_low_and_high_clip_are_two_numbers() -> None:
    spec = PpoSpec(kl=None, clip_low=0.1, clip_high=0.4)
    losses, slopes = surrogate(spec, [1.3, 1.5, 0.95, 0.8, 1.5, 0.8], [1.0, 1.0, -1.0, -1.0, -1.0, 1.0])
    assert losses == pytest.approx([-1.3, -1.4, 0.95, 0.9, 1.5, -0.8])
    assert slopes == pytest.approx([-1.3, 0.0, 0.95, 0.0, 1.5, -0.8])


def test_a_far_ratio_stays_finite() -> None:
    new = torch.tensor([[0.0, -900.0]], requires_grad=True)
    batch = batch_of(
        response_mask=mask_of("11"), logprobs=torch.tensor([[-900.0, 0.0]]), advantages=torch.tensor([[-1.0, -1.0]])
    )
    loss, statistics = LOSSES["policy_loss"](PpoSpec(kl=None)).function(
        Outputs(new, torch.zeros(1, 2)), batch, Totals(2, 1, 1)
    )
    loss.backward()
    assert loss.isfinite() and new.grad is not None and new.grad.isfinite().all()
    assert all(total.isfinite().all() for total in statistics.values())


@pytest.mark.parametrize("coefficient", [0.0, 0.25])
def test_an_entropy_bonus_pulls_at_the_entropy_of_tokens_that_count(coefficient: float) -> None:
    entropy = torch.tensor([[2.0, 4.0, 99.0]], requires_grad=True)
    batch = batch_of(response_mask=mask_of("110"), logprobs=torch.zeros(1, 3), advantages=torch.zeros(1, 3))
    loss = LOSSES["policy_loss"](PpoSpec(kl=None, entropy_coefficient=coefficient))
    assert loss.entropy == ("gradient" if coefficient else "value")
    value, statistics = loss.function(Outputs(torch.zeros(1, 3, requires_grad=True), entropy), batch, Totals(2, 1, 1))
    value.backward()
    assert float(value.detach()) == pytest.approx(-coefficient * 3.0)
    slopes = [0.0] * 3 if entropy.grad is None else entropy.grad[0].tolist()
    assert slopes == pytest.approx([-coefficient / 2, -coefficient / 2, 0.0])
    assert statistics["entropy"].tolist()[:2] == [2.0, 6.0]


# --- the ratio of a whole response


@pytest.mark.parametrize("seed", range(5))
def test_the_ratio_of_whole_responses_by_its_definition(seed: int) -> None:
    """GSPO, Zheng et al. 2025, eq. 5 to 7, answer by answer: s = (pi(y) / pi_old(y))^(1/|y|), one advantage an answer,
    mean over responses of min(s A, clip(s) A)."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(12, 6, generator=generator) < 0.6).to(torch.uint8)
    mask[3] = 0
    old, new = -torch.rand(12, 6, generator=generator), -torch.rand(12, 6, generator=generator)
    by_response = torch.randn(12, generator=generator)
    spec = PpoSpec(kl=None, ratio="sequence", clip_low=0.05, clip_high=0.08, loss_aggregation="seq-mean-token-mean")
    case = Case(
        LOSSES["policy_loss"](spec),
        new,
        batch_of(response_mask=mask, logprobs=old, advantages=by_response[:, None] * mask),
    )
    loss, gradient, statistics = case.contributions([slice(0, 12)])

    leaf = new.double().requires_grad_()
    objectives, clipped_tokens = [], 0
    for row in range(12):
        places = [place for place in range(6) if mask[row, place]]
        if not places:
            continue
        ratio = leaf.new_tensor(1.0)
        for place in places:
            ratio = ratio * leaf[row, place].exp() / old[row, place].double().exp()
        s, advantage = ratio ** (1 / len(places)), float(by_response[row])
        plain, bounded = s * advantage, min(max(float(s.detach()), 0.95), 1.08) * advantage
        objectives.append(plain if float(plain.detach()) <= bounded else leaf.new_tensor(bounded))
        clipped_tokens += len(places) * (bounded < float(plain.detach()))
    expected = -torch.stack(objectives).mean()
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert leaf.grad is not None and torch.allclose(gradient.double(), leaf.grad, rtol=1e-4, atol=1e-7)
    assert statistics["ratio_clipped"].tolist()[:2] == [float(mask.sum()), clipped_tokens]
    assert 0 < clipped_tokens < float(mask.sum())


# --- pretraining texts


def test_pretraining_texts_weigh_by_their_tokens_however_they_are_split() -> None:
    """SequenceLengths of 1, 3 and 0 tokens: 0.5 * (2 + 1 + 3 + 4) / 4, and half of the gradient over four tokens."""
    logprobs = -torch.tensor([[2.0, 9.0, 9.0], [1.0, 3.0, 4.0], [9.0, 9.0, 9.0]])
    loss = LOSSES["ptx"](PpoSpec(ptx=PtxSpec(path="texts.jsonl", coefficient=0.5)))
    case = Case(loss, logprobs, batch_of(response_mask=mask_of("100", "111", "000")))
    for parts in ([slice(0, 3)], [slice(0, 1), slice(1, 3)], [slice(0, 1), slice(1, 2), slice(2, 3)]):
        value, gradient, statistics = case.contributions(parts)
        assert value == pytest.approx(0.5 * 10 / 4)
        assert gradient.tolist() == [[-0.125, 0, 0], [-0.125] * 3, [0, 0, 0]]
        assert statistics["ptx_nll"].tolist() == [4.0, 10.0, 30.0]
    assert loss.entropy == "none"


# --- one trunk for actor and critic


def test_the_loss_of_a_shared_trunk_is_the_weighted_sum_of_both() -> None:
    shared = case_of("shared_loss", "token-mean", value_coefficient=0.3)
    policy, value = case_of("policy_loss", "token-mean"), case_of("value_loss", "token-mean")
    assert shared.values is not None
    of_policy = Case(policy.loss, shared.quantity, shared.batch).contributions([slice(0, 16)])
    of_values = Case(value.loss, shared.values, shared.batch).contributions([slice(0, 16)])
    both = shared.contributions([slice(0, 16)])
    assert both[0] == pytest.approx(of_policy[0] + 0.3 * of_values[0], rel=1e-5)
    assert torch.allclose(both[1], of_policy[1])
    outputs = Outputs(shared.quantity, shared.quantity, shared.values.clone().requires_grad_())
    shared.loss.function(outputs, shared.batch, shared.totals())[0].backward()
    assert outputs.values is not None and outputs.values.grad is not None
    assert torch.allclose(outputs.values.grad, 0.3 * of_values[1])
