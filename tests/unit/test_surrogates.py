"""Surrogates, selections and rejections by hand: as the papers have them, and as verl 0.9 computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replicas import Alone, Port, batch_of, mask_of, on_replicas
from small_runs import spec_of
from torch import Tensor

from flexrlhf.config.algorithms.base import ImportanceSpec, RejectionSpec
from flexrlhf.config.algorithms.grpo import GspoSpec
from flexrlhf.config.algorithms.ppo import PpoSpec
from flexrlhf.engines.base import Batch, Outputs, Totals
from flexrlhf.metrics import METRICS
from flexrlhf.objectives.context import CombineContext
from flexrlhf.objectives.functions import COMBINES, LOSSES
from flexrlhf.objectives.surrogates import importance_weights, staleness
from flexrlhf.operators.graph import Graph
from flexrlhf.plan.algorithm_graph import make_graph
from flexrlhf.plan.rollout_engine import with_rollout

GENERATOR = torch.Generator().manual_seed(4)
MASK = mask_of("111110", "111000", "111111", "100000")
OLD = -3 * torch.rand(4, 6, generator=GENERATOR, dtype=torch.float64)
NEW = OLD + 0.4 * torch.randn(4, 6, generator=GENERATOR, dtype=torch.float64)
ADVANTAGES = torch.randn(4, 6, generator=GENERATOR, dtype=torch.float64)
TOTALS = Totals(15, 4, 4)


def masked_mean(values: Tensor) -> Tensor:
    return (values * MASK).sum() / MASK.sum()


def loss_of(spec: Any, **columns: Tensor) -> tuple[float, Tensor, dict[str, float]]:
    """The loss, its gradient and its metrics."""
    new = NEW.clone().requires_grad_()
    batch = batch_of(response_mask=MASK, logprobs=OLD, advantages=ADVANTAGES, **columns)
    loss, statistics = LOSSES["policy_loss"](spec).function(Outputs(new, torch.zeros(4, 6)), batch, TOTALS)
    loss.backward()
    assert new.grad is not None
    return (
        float(loss.detach()),
        new.grad,
        METRICS.evaluate({name: tuple(each.tolist()) for name, each in statistics.items()}),
    )


def expected_of(losses_of: Any) -> tuple[float, Tensor]:
    """The mean over tokens of losses that are written out, and its gradient."""
    new = NEW.clone().requires_grad_()
    loss = masked_mean(losses_of(new))
    loss.backward()
    assert new.grad is not None
    return float(loss.detach()), new.grad


def assert_equal(spec: Any, losses_of: Any, **columns: Tensor) -> dict[str, float]:
    loss, gradient, metrics = loss_of(spec, **columns)
    value, its_gradient = expected_of(losses_of)
    assert loss == pytest.approx(value, abs=1e-6)
    assert torch.allclose(gradient, its_gradient, atol=1e-6)
    return metrics


def test_cispo_as_verl_has_it() -> None:
    """``compute_policy_loss_cispo``: the clipped ratio has no gradient, the log-prob has."""

    def losses(new: Tensor) -> Tensor:
        ratio = torch.exp(new - OLD)
        return -ratio.clamp(1 - 0.1, 1 + 0.3).detach() * ADVANTAGES * new

    metrics = assert_equal(PpoSpec(surrogate="cispo", clip_low=0.1, clip_high=0.3), losses)
    ratio = torch.exp(NEW - OLD)
    assert metrics["ratio_clipped"] == pytest.approx(float(masked_mean(((ratio < 0.9) | (ratio > 1.3)).double())))


def test_gspo_token_as_verl_has_it() -> None:
    """``compute_policy_loss_gspo``; its value is that of GSPO, its gradient is where advantages are one number."""

    def losses(new: Tensor) -> Tensor:
        mean = ((new - OLD) * MASK).sum(-1) / MASK.sum(-1).clamp(min=1)
        ratio = torch.exp(new - new.detach() + mean.detach().unsqueeze(-1))
        return torch.maximum(-ADVANTAGES * ratio, -ADVANTAGES * ratio.clamp(1 - 0.05, 1 + 0.08))

    bounds = {"clip_low": 0.05, "clip_high": 0.08, "loss_aggregation": "token-mean"}
    assert_equal(GspoSpec(ratio="sequence-token", **bounds), losses)
    token, sequence = (loss_of(GspoSpec(ratio=each, **bounds)) for each in ("sequence-token", "sequence"))
    assert token[0] == pytest.approx(sequence[0]) and not torch.allclose(token[1], sequence[1])


SELECTED = mask_of("010010", "001100", "000000", "100000")


def test_clip_cov_as_verl_has_it() -> None:
    """``compute_policy_loss_clip_cov``: tokens that are selected have no loss, and stay in the denominator.

    A token that the clip has taken the gradient of is none of them.
    """
    is_clipped = torch.zeros_like(SELECTED, dtype=torch.bool)

    def losses(new: Tensor) -> Tensor:
        ratio = torch.exp(new - OLD)
        plain, bounded = -ADVANTAGES * ratio, -ADVANTAGES * ratio.clamp(0.8, 1.2)
        is_clipped[:] = bounded > plain
        return torch.maximum(plain, bounded) * (1 - SELECTED * ~is_clipped)

    assert_equal(PpoSpec(surrogate="clip-cov"), losses, selected_tokens=SELECTED)
    assert (SELECTED.bool() & is_clipped).any() and (SELECTED.bool() & ~is_clipped).any()


def test_kl_cov_as_verl_has_it() -> None:
    """``compute_policy_loss_kl_cov``: no clip; a penalty on the tokens that are selected."""

    def losses(new: Tensor) -> Tensor:
        return -ADVANTAGES * torch.exp(new - OLD) + 0.7 * (new - OLD).abs() * SELECTED

    spec = PpoSpec.model_validate({"surrogate": "kl-cov", "covariance": {"coefficient": 0.7}})
    assert assert_equal(spec, losses, selected_tokens=SELECTED)["ratio_clipped"] == 0


def test_rounding_has_no_gradient_in_kl_cov() -> None:
    """Before the first update old and new differ by rounding alone, whose sign is nothing to follow."""
    new = (OLD + 1e-7).requires_grad_()
    batch = batch_of(response_mask=MASK, logprobs=OLD, advantages=0 * ADVANTAGES, selected_tokens=MASK)
    spec = PpoSpec(surrogate="kl-cov")
    LOSSES["policy_loss"](spec).function(Outputs(new, torch.zeros(4, 6)), batch, TOTALS)[0].backward()
    assert new.grad is not None and not new.grad.any()


def selected_of(settings: dict[str, Any], rows: slice, mini_batches: list[slice], reducer: Any = None) -> Tensor:
    spec = PpoSpec.model_validate(settings)
    batch = batch_of(response_mask=MASK, logprobs=OLD, advantages=ADVANTAGES).select(rows)
    context = CombineContext(mini_batches, reducer or Alone(), step=2, seed=5)
    return COMBINES["covariant_tokens"](spec, batch, context)[0]["selected_tokens"]


def covariances() -> Tensor:
    return (ADVANTAGES - masked_mean(ADVANTAGES)) * (OLD - masked_mean(OLD))


def test_kl_cov_selects_the_highest_covariances() -> None:
    """verl's topk of max(1, int(share x tokens)), over the whole mini-batch, of log-probs before the update."""
    for share, number in ((0.27, 4), (0.001, 1), (1.0, 15)):
        found = selected_of({"surrogate": "kl-cov", "covariance": {"share": share}}, slice(0, 4), [slice(0, 4)])
        highest = covariances().masked_fill(MASK == 0, -torch.inf).flatten().topk(number).indices
        assert sorted(found.flatten().nonzero().squeeze(1).tolist()) == sorted(highest.tolist())


def test_clip_cov_selects_between_its_bounds() -> None:
    """Not more than its share, of candidates by chance; all of few candidates; another step has other chances."""
    settings = {"surrogate": "clip-cov", "covariance": {"share": 0.2, "lower": -0.4, "upper": 1.5}}
    between = (covariances() > -0.4) & (covariances() < 1.5) & MASK.bool()
    assert between.sum() > 3
    found = selected_of(settings, slice(0, 4), [slice(0, 4)]).bool()
    assert found.sum() == 3 and not (found & ~between).any()
    settings["covariance"]["share"] = 1.0
    assert selected_of(settings, slice(0, 4), [slice(0, 4)]).bool().equal(between)


@pytest.mark.parametrize("surrogate", ["clip-cov", "kl-cov"])
def test_selections_do_not_depend_on_the_ranks(surrogate: str) -> None:
    """Of ranks with 1 and 3 rows, of which one has no row of the second mini-batch."""
    settings = {"surrogate": surrogate, "covariance": {"share": 0.3, "lower": -1.0, "upper": 1.5}}
    whole = selected_of(settings, slice(0, 4), [slice(0, 2), slice(2, 4)])
    parts = [(slice(0, 1), [slice(0, 1), slice(1, 1)]), (slice(1, 4), [slice(0, 1), slice(1, 3)])]

    def work(rank: int, port: Port) -> Tensor:
        return selected_of(settings, *parts[rank], port)

    assert whole.sum() > 2 and torch.cat(on_replicas(2, work)).equal(whole)


# --- importance sampling


def corrected_batch(ratios: Tensor, mask: Tensor) -> Batch:
    """Responses whose tokens are ``ratios`` times as likely under the trained policy as when sampled."""
    sampled = torch.full(mask.shape, -3.0)
    return batch_of(loss_mask=mask, response_mask=mask, logprobs=sampled + ratios.log(), rollout_logprobs=sampled)


RATIOS = torch.tensor([[2.0, 0.5, 0.9], [1.5, 1.2, 9.0], [0.4, 0.5, 1.1]])
LENGTHS = mask_of("111", "110", "111")


def test_masked_weights_as_verl_has_them() -> None:
    """``compute_rollout_correction_weights`` with a threshold lower_upper: 0 beyond the bounds (IcePop)."""
    token = ImportanceSpec(outside="mask", floor=0.5, cap=1.5)
    weights, statistics = importance_weights(token, corrected_batch(RATIOS, LENGTHS))
    assert weights[LENGTHS.bool()].tolist() == pytest.approx([0, 0.5, 0.9, 1.5, 1.2, 0, 0.5, 1.1])
    assert statistics["importance_clipped"].tolist()[:2] == [8, 2]
    sequence = ImportanceSpec(level="sequence", outside="mask", floor=0.5, cap=1.5)
    weights, statistics = importance_weights(sequence, corrected_batch(RATIOS, LENGTHS))
    assert weights[:, 0].tolist() == pytest.approx([0.9, 0, 0])
    assert statistics["importance_clipped"].tolist()[:2] == [3, 2]


@pytest.mark.parametrize(
    ("level", "kept"),
    [
        ("token", ["011", "110", "011"]),
        # products 0.9, 1.8 and 0.22; roots 0.97, 1.34 and 0.6
        ("sequence", ["111", "000", "000"]),
        ("geometric", ["111", "110", "111"]),
    ],
)
def test_rejection_as_verl_has_it(level: Any, kept: list[str]) -> None:
    """``compute_rollout_rejection_mask`` with token_k1, seq_sum_k1 and seq_mean_k1, bounds of the inverse ratio."""
    spec = PpoSpec(importance=ImportanceSpec(reject=RejectionSpec(level=level, lower=0.45, upper=1.6)))
    batch = corrected_batch(RATIOS, LENGTHS)
    columns, statistics = COMBINES["rejection"](spec, batch, CombineContext([slice(0, 3)], Alone()))
    assert columns["kept_mask"].equal(mask_of(*kept))
    share = 1 - float(columns["kept_mask"].sum()) / 8
    assert METRICS.evaluate(
        {"importance_rejected": tuple(statistics["importance_rejected"].tolist())}
    ) == pytest.approx({"importance_rejected": share})


def test_what_is_rejected_is_in_no_denominator() -> None:
    """The mask of the loss is that of the tokens that are kept; sums of whole responses are of all of their tokens."""
    kept = mask_of("011", "110", "000")
    batch = batch_of(**corrected_batch(RATIOS, LENGTHS).columns, kept_mask=kept)
    assert batch.mask.equal(kept) and batch.sampled_mask.equal(LENGTHS)
    weights, statistics = importance_weights(ImportanceSpec(level="sequence", cap=3.0), batch)
    assert weights[:2, 0].tolist() == pytest.approx([0.9, 1.8])
    assert statistics["importance_weight"].tolist()[:2] == pytest.approx([2, 2.7])


def test_decoupled_ppo_as_areal_has_it() -> None:
    """``ppo_actor_loss_fn`` with ``behav_imp_weight_cap``: the clip is around the proximal policy, whose ratio to the
    policy that sampled is the weight; a token above the cap has none, and stays in the mean."""
    rollout = OLD + 0.4 * torch.randn(4, 6, generator=GENERATOR, dtype=torch.float64)
    behaviour = (OLD - rollout).exp()
    weights = behaviour.where(behaviour <= 1.3, 0.0)
    assert ((weights == 0) & MASK.bool()).any() and (weights * MASK > 1).any()

    def losses(new: Tensor) -> Tensor:
        ratio = (new - OLD).exp()
        return torch.maximum(-ADVANTAGES * ratio, -ADVANTAGES * ratio.clamp(0.8, 1.2)) * weights

    spec = PpoSpec(importance=ImportanceSpec(outside="mask", cap=1.3), loss_aggregation="token-mean")
    assert_equal(spec, losses, rollout_logprobs=rollout)


VERSIONS = torch.tensor([[5, 5, 6], [4, 7, 0], [7, 7, 7]], dtype=torch.int32)
"""Weights versions that sampled the tokens of step 7: 2, 2, 1; 3, 0; 0, 0, 0 batches ago."""


def test_tokens_of_versions_that_are_too_old_are_left_out() -> None:
    """In addition to those whose ratio is out of bounds, here the first one of the third response."""
    reject = RejectionSpec(level="token", lower=0.45, upper=3.0)
    batch = batch_of(**corrected_batch(RATIOS, LENGTHS).columns, policy_version=VERSIONS)
    context = CombineContext([slice(0, 3)], Alone(), step=7)
    for settings, kept, dropped in (
        ({"max_staleness": 2}, ["111", "010", "111"], 1 / 8),
        ({"max_staleness": 1}, ["001", "010", "111"], 3 / 8),
        ({"max_staleness": 2, "reject": reject}, ["111", "010", "011"], 1 / 8),
    ):
        spec = PpoSpec(importance=ImportanceSpec.model_validate(settings))
        columns, statistics = COMBINES["rejection"](spec, batch, context)
        assert columns["kept_mask"].equal(mask_of(*kept)), settings
        assert METRICS.evaluate({"staleness_dropped": tuple(statistics["staleness_dropped"].tolist())}) == {
            "staleness_dropped": dropped
        }
        assert ("importance_rejected" in statistics) == ("reject" in settings)


def described(statistics: dict[str, Tensor]) -> dict[str, float]:
    return METRICS.evaluate({name: tuple(value.tolist()) for name, value in statistics.items()})


def test_the_staleness_of_the_tokens_that_are_trained_on_by_hand() -> None:
    kept = mask_of("111", "010", "111")
    batch = batch_of(response_mask=LENGTHS, loss_mask=LENGTHS, kept_mask=kept, policy_version=VERSIONS)
    expected = {"staleness_mean": 5 / 7, "staleness_max": 2, "staleness_0": 4 / 7, "staleness_1": 1 / 7}
    expected["staleness_2"] = 2 / 7
    assert described(staleness(batch, CombineContext([], Alone(), step=7))) == pytest.approx(expected)
    # the second rank has the third response alone
    parts = [batch.select(slice(0, 2)), batch.select(slice(2, 3))]
    found = on_replicas(2, lambda rank, port: staleness(parts[rank], CombineContext([], port, step=7)))
    assert described({name: found[0][name] + found[1][name] for name in found[0]}) == pytest.approx(expected)
    late = described(staleness(batch, CombineContext([], Alone(), step=23)))
    assert late == pytest.approx({"staleness_mean": 16 + 5 / 7, "staleness_max": 18, "staleness_16": 1.0}), (
        "from 16 on there is one share"
    )
    nothing = batch.with_columns({"kept_mask": torch.zeros_like(kept)})
    assert described(staleness(nothing, CombineContext([], Alone(), step=7))) == {}


def graph_of(*overrides: str) -> Graph:
    spec = spec_of(None, 1, "algorithm.name=grpo", "reward={rule: gsm8k}", "rollout.engine=transformers", *overrides)
    return with_rollout(make_graph(spec), spec, is_remote=False)


def test_selection_and_rejection_stand_between_advantages_and_training() -> None:
    graph = graph_of("algorithm.surrogate=kl-cov", "algorithm.importance={reject: {}}")
    names = [operator.name for operator in graph.operators]
    assert names[names.index("advantages") :] == ["advantages", "rejection", "covariance", "train_actor"]
    producers, operators = graph.producers, {operator.name: operator for operator in graph.operators}
    assert {"kept_mask", "logprobs", "advantages"} <= set(operators["covariance"].reads)
    assert {"kept_mask", "selected_tokens"} <= set(operators["train_actor"].reads)
    assert producers["kept_mask"].name == "rejection"
    assert not {"kept_mask", "selected_tokens"} & graph_of("algorithm.importance={}").producers.keys()


def test_what_writes_the_last_mask_reads_the_versions_of_tokens() -> None:
    """The staleness of a step is that of the tokens that it trains on; without a lag there is none."""
    apart, limited = ("schedule.lag=1", "sync.every=2"), "algorithm.importance={max_staleness: 1}"
    for overrides, writer in ((apart, "advantages"), ((*apart, limited), "rejection"), ((limited,), None)):
        graph = graph_of(*overrides)
        reading = [operator.name for operator in graph.operators if "policy_version" in operator.reads]
        assert reading == ([] if writer is None else [writer]), overrides
        assert ("kept_mask" in graph.producers) == (writer == "rejection")
    assert graph_of(*apart, "algorithm.importance={max_staleness: 2}").left_out[0] == (
        "kept_mask",
        "no token is staler than 2, so algorithm.importance.max_staleness 2 keeps all",
    )
