"""From scores to rewards: rules, normalising, clipping, scores of tokens, responses that do not count, the penalty."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from replicas import Alone, Port, batch_of, mask_of, on_replicas
from scored_batches import context_of, ragged, rewards_of, scored_batch
from torch import Tensor

from flexrlhf.config.algorithms.policy_sections import KlSpec
from flexrlhf.config.algorithms.ppo import PpoSpec
from flexrlhf.config.reward_sources import Sources
from flexrlhf.engines.base import Batch, Moments
from flexrlhf.errors import RunStopped
from flexrlhf.metrics import Outcome, Triple
from flexrlhf.objectives.advantages import ppo_advantages
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.objectives.reward_shaping import last_positions, shape_rewards, weighted_scores
from flexrlhf.operators.outcomes import EpisodeState
from flexrlhf.trainer.controllers import first_state, next_state


def advantages_of(spec: PpoSpec, batch: Batch, **state: float) -> tuple[Columns, Moments]:
    return ppo_advantages(spec, batch, context_of(spec, batch, **state))


@pytest.mark.parametrize(
    ("mask", "last"), [("1110", 2), ("1111", 3), ("1000", 0), ("0000", 0), ("1001", 3), ("0110", 2)]
)
def test_the_last_position_is_read_from_the_mask(mask: str, last: int) -> None:
    assert last_positions(mask_of(mask).bool()).tolist() == [last]


def test_the_score_lands_on_the_last_response_token_end_token_included() -> None:
    """Pad and end token may be one: only the mask defines where a response ends."""
    rewards = rewards_of(PpoSpec(), scored_batch(mask_of("1110", "1111", "1000", "0000"), [1.0, 2.0, 3.0, 4.0]))
    assert rewards.tolist() == [[0, 0, 1, 0], [0, 0, 0, 2], [3, 0, 0, 0], [0, 0, 0, 0]]


def test_the_kl_penalty_is_per_token_and_stays_inside_the_response() -> None:
    batch = scored_batch(mask_of("110"), [0.0], logprobs=torch.tensor([[-1.0, -2.0, -3.0]]))
    batch.columns["ref_logprobs"][:] = torch.tensor([[-2.0, -1.0, 5.0]])  # type: ignore[index]
    rewards = rewards_of(PpoSpec(kl=KlSpec(coefficient=0.5)), batch)
    assert rewards.tolist() == [[-0.5, 0.5, 0.0]]


def test_the_kl_penalty_is_not_clamped() -> None:
    batch = scored_batch(mask_of("1"), [0.0], logprobs=torch.tensor([[100.0]]))
    assert rewards_of(PpoSpec(kl=KlSpec(coefficient=1.0)), batch).tolist() == [[-100.0]]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [3.0, 4.0]),
        ({"reward_clip": 2.0}, [2.0, 2.0]),
        ({"truncation": {"penalty": 5.0}}, [3.0, -1.0]),
        ({"truncation": {"penalty": 9.0}, "reward_clip": 2.0}, [2.0, -2.0]),
        ({"truncation": "bootstrap"}, [3.0, 0.0]),
    ],
)
def test_the_score_of_a_truncated_response(settings: dict[str, Any], expected: list[float]) -> None:
    batch = scored_batch(mask_of("10", "11"), [3.0, 4.0], [1, 0])
    assert rewards_of(PpoSpec.model_validate(settings), batch).sum(1).tolist() == expected


def test_clipped_scores_are_counted() -> None:
    batch = scored_batch(mask_of("1", "1", "1", "1"), [3.0, -3.0, 1.0, 2.0])
    _, sums = advantages_of(PpoSpec(reward_clip=2.0), batch)
    assert sums["reward_clipped"].tolist()[:2] == [4.0, 2.0]
    _, sums = advantages_of(PpoSpec(), batch)
    assert "reward_clipped" not in sums


def test_statistics_by_hand() -> None:
    batch = scored_batch(
        mask_of("110", "100"), [1.0, 3.0], [1, 0], logprobs=torch.tensor([[-1.0, -2.0, -9.0], [-3.0, -9.0, -9.0]])
    )
    _, sums = advantages_of(PpoSpec(), batch)
    means = {name: float(total[1] / total[0]) for name, total in sums.items()}
    assert means["reward"] == 2.0
    assert means["kl"] == -3.0
    assert means["kl_token"] == -2.0
    assert means["response_length"] == 1.5
    assert means["truncated"] == 0.5


def test_the_penalty_in_the_reward_is_that_of_the_sampling_policy() -> None:
    columns = {
        "logprobs": torch.tensor([[-5.0, -5.0]]),
        "rollout_logprobs": torch.tensor([[-1.0, -2.0]]),
        "ref_logprobs": torch.tensor([[-2.0, -4.0]]),
    }
    batch = scored_batch(mask_of("11"), [0.0], **columns)
    assert rewards_of(PpoSpec(kl=KlSpec(coefficient=0.5)), batch).tolist() == [[-0.5, -1.0]]
    _, sums = advantages_of(PpoSpec(), batch)
    assert sums["kl"].tolist()[:2] == [1.0, 3.0]


# --- the penalty by its definition


@pytest.mark.parametrize("clamp", [None, 1.0])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_penalty_in_the_reward_by_definition(estimator: str, clamp: float | None) -> None:
    """The coefficient is that of the controller, which starts with the setting; every token pays for itself."""
    log_ratios = [-2.0, -0.5, 0.0, 0.25, 1.5]
    clamped = [r if clamp is None else min(max(r, -clamp), clamp) for r in log_ratios]
    estimates = [{"k1": r, "k2": r * r / 2, "k3": math.exp(-r) - 1 + r}[estimator] for r in clamped]
    batch = scored_batch(mask_of("111110"), [1.0], logprobs=torch.tensor([[*log_ratios, 9.0]]))
    kl = KlSpec.model_validate({"coefficient": 0.3, "estimator": estimator, "clamp": clamp})
    for coefficient, state in ((0.3, {}), (0.7, {"kl_coefficient": 0.7})):
        expected = [-coefficient * estimate for estimate in estimates] + [0.0]
        expected[4] += 1.0
        assert rewards_of(PpoSpec(kl=kl), batch, **state)[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_a_penalty_in_the_loss_leaves_the_reward_alone_and_is_measured_all_the_same() -> None:
    batch = scored_batch(mask_of("11", "10"), [1.0, 2.0], logprobs=torch.tensor([[1.0, 2.0], [5.0, 9.0]]))
    spec = PpoSpec(kl=KlSpec(place="loss", coefficient=0.5))
    assert rewards_of(spec, batch).tolist() == [[0, 1], [2, 0]]
    _, sums = advantages_of(spec, batch)
    assert sums["kl"].tolist() == [2.0, 8.0, 34.0]
    assert sums["kl_coefficient"].tolist() == [2.0, 1.0, 0.5]


def test_without_a_penalty_no_reference_is_read() -> None:
    batch = scored_batch(mask_of("11"), [1.0])
    without = Batch({n: c for n, c in batch.columns.items() if n != "ref_logprobs"}, batch.rows, 1)
    columns, sums = advantages_of(PpoSpec(kl=None, whiten="none", gae_lambda=1.0), without)
    assert columns["returns"].tolist() == [[1.0, 1.0]]
    assert not {"kl", "kl_token", "kl_coefficient"} & set(sums)


# --- rules for scores


def scores_of(spec: PpoSpec, batch: Batch, **state: float) -> list[float]:
    found: list[float] = shape_rewards(spec, batch, context_of(spec, batch, **state)).scores.tolist()
    return found


@pytest.mark.parametrize("penalty", [1.0, 0.5])
def test_overlong_responses_are_punished_by_their_length(penalty: float) -> None:
    """DAPO, Yu et al. 2025, eq. 13 with a largest length of 10 and a buffer of 4, for every length."""

    def punishment(length: int) -> float:
        if length <= 10 - 4:
            return 0.0
        return ((10 - 4) - length) / 4 if length <= 10 else -1.0

    mask = mask_of(*("1" * length + "0" * (10 - length) for length in range(11)))
    spec = PpoSpec.model_validate({"overlong": {"buffer_tokens": 4, "penalty": penalty}})
    expected = [2.0 + penalty * punishment(length) for length in range(11)]
    assert expected[6:] == pytest.approx([2.0 - penalty * share for share in (0, 0.25, 0.5, 0.75, 1)])
    assert scores_of(spec, scored_batch(mask, [2.0] * 11)) == pytest.approx(expected)


def test_replies_of_an_environment_take_up_room_too() -> None:
    spec = PpoSpec.model_validate({"overlong": {"buffer_tokens": 4, "penalty": 1.0}})
    assert scores_of(spec, scored_batch(mask_of("1100000011", "0000000000"), [2.0, 2.0])) == [1.0, 2.0]


@pytest.mark.parametrize(("width", "expected"), [(10, [0, 0, 0.5, 1]), (4, [0, 0, 0, 1]), (5, [0, 0, 0, 1])])
def test_the_buffer_is_a_fifth_unless_it_is_given(width: int, expected: list[float]) -> None:
    """DAPO's 4096 of 20480 tokens; at least one."""
    lengths = range(width - 3, width + 1)
    mask = mask_of(*("1" * length + "0" * (width - length) for length in lengths))
    found = scores_of(PpoSpec.model_validate({"overlong": {}}), scored_batch(mask, [0.0] * 4))
    assert found == pytest.approx([-share for share in expected])


def test_rules_come_before_normalising_and_that_before_the_clip() -> None:
    """5 - 2, being truncated, and 4 - 1, being long: less the mean, through the deviation; (9 - 1) / 2 is clipped."""
    spec = PpoSpec.model_validate(
        {
            "truncation": {"penalty": 2.0},
            "overlong": {"buffer_tokens": 1, "penalty": 1.0},
            "normalise_scores": "running",
            "reward_clip": 3.0,
        }
    )
    batch = scored_batch(mask_of("10", "11", "10"), [5.0, 4.0, 9.0], [0, 1, 1])
    state = {"score_count": 7.0, "score_mean": 1.0, "score_deviation": 2.0}
    assert scores_of(spec, batch, **state) == pytest.approx([1.0, 1.0, 3.0])
    _, sums = advantages_of(spec, batch, **state)
    assert sums["reward_clipped"].tolist()[:2] == [3.0, 1.0]
    assert sums["reward"].tolist()[:2] == [3.0, 18.0]
    assert sums["shaped_score"].tolist()[:2] == [3.0, 15.0]


def test_truncated_responses_may_be_left_out() -> None:
    batch = scored_batch(mask_of("11", "11", "10"), [3.0, 4.0, 5.0], [1, 0, 1])
    columns, sums = advantages_of(PpoSpec(truncation="mask"), batch)
    assert columns["loss_mask"].tolist() == [[1, 1], [0, 0], [1, 0]]
    assert columns["loss_mask"].dtype == torch.uint8
    assert columns["advantages"][1].tolist() == columns["returns"][1].tolist() == [0.0, 0.0]
    assert columns["outcome"].tolist() == [0, Outcome.TRUNCATED.code, 0]
    assert sums["shaped_score"].tolist()[:2] == [2.0, 8.0]
    assert sums["reward"].tolist()[:2] == [3.0, 12.0], "the mean of raw scores includes all of them"
    assert sums["kl"].tolist()[0] == 2.0


@pytest.mark.parametrize("normalise", ["none", "running", "batch"])
def test_a_bootstrapped_response_has_no_score_and_no_part_in_those_of_others(normalise: str) -> None:
    """Nothing comes in its place, also where 0 is far from the mean; it is trained on all the same."""
    spec = PpoSpec.model_validate({"truncation": "bootstrap", "normalise_scores": normalise, "reward_clip": 5.0})
    batch = scored_batch(mask_of("1", "1", "1", "1"), [11.0, 99.0, 12.0, 13.0], [1, 0, 1, 1])
    state = {"score_count": 5.0, "score_mean": 10.0, "score_deviation": 2.0}
    expected = {"none": [5.0, 0.0, 5.0, 5.0], "running": [0.5, 0.0, 1.0, 1.5], "batch": [-1.0, 0.0, 0.0, 1.0]}
    assert scores_of(spec, batch, **state) == pytest.approx(expected[normalise])
    columns, sums = advantages_of(spec, batch, **state)
    assert columns["loss_mask"].tolist() == [[1]] * 4 and not columns["outcome"].any()
    assert sums["shaped_score"].tolist()[:2] == [3.0, 36.0]
    assert sums["reward_clipped"].tolist()[:2] == [3.0, 3.0 * (normalise == "none")]


# --- normalising


def test_only_responses_that_count_normalise_a_batch() -> None:
    batch = scored_batch(mask_of(*["1"] * 5), [1.0, 100.0, 2.0, math.nan, 6.0], [1, 0, 1, 1, 1])
    spec = PpoSpec(normalise_scores="batch", truncation="mask")
    mean, deviation = 3.0, statistics.stdev([1.0, 2.0, 6.0])
    expected = [(1 - mean) / deviation, 0.0, (2 - mean) / deviation, 0.0, (6 - mean) / deviation]
    assert scores_of(spec, batch) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("scores", [[5.0], [0.1] * 7, [1e6 + 1 / 3] * 40, [math.nan] * 3])
def test_scores_without_a_spread_are_zero(scores: list[float]) -> None:
    batch = scored_batch(mask_of(*["1"] * len(scores)), scores)
    assert scores_of(PpoSpec(normalise_scores="batch"), batch) == [0.0] * len(scores)


@pytest.mark.parametrize("count", [0.0, 1.0])
def test_without_two_scores_before_it_a_step_is_left_as_it_is(count: float) -> None:
    batch = scored_batch(mask_of("1", "1"), [1.1, -3.3])
    found = scores_of(PpoSpec(normalise_scores="running"), batch, score_count=count, score_mean=4.0 * count)
    assert found == batch["scores"].tolist()


# --- scores that are no numbers

INVALID = [math.nan, math.inf, -math.inf]
OF_ALL_RESPONSES = {"score_invalid", "response_length", "truncated", "kl_coefficient"}


@pytest.mark.parametrize("normalise", ["none", "running", "batch"])
@pytest.mark.parametrize("wrong", INVALID)
def test_a_response_without_a_score_changes_nothing_of_the_others(wrong: float, normalise: str) -> None:
    """All columns of the others, and all that is summed, are those of a batch without it: losses and running
    statistics follow from these."""
    noise, mask = ragged(12, seed=2)
    scores = [float(score) for score in noise[:, 1]]
    left_out, kept = [2, 7, 11], [0, 1, 3, 4, 5, 6, 8, 9, 10]
    for row in left_out:
        scores[row] = wrong
    columns = {
        "logprobs": noise,
        "ref_logprobs": noise.flip(0),
        "values": torch.cat([noise.flip(1), noise[:, :1]], 1),
    }
    batch = scored_batch(mask, scores, [1, 0, 1] * 4, **columns)
    without = batch_of(**{name: column[kept] for name, column in batch.columns.items()})
    spec = PpoSpec.model_validate({"normalise_scores": normalise, "reward_clip": 1.0, "truncation": {"penalty": 0.5}})
    state = {"score_count": 5.0, "score_mean": 0.3, "score_deviation": 1.7}
    found, sums = advantages_of(spec, batch, **state)
    expected, its_sums = advantages_of(spec, without, **state)
    assert found.pop("outcome").tolist() == [Outcome.INVALID_SCORE.code if row in left_out else 0 for row in range(12)]
    assert not expected.pop("outcome").any()
    for name, column in expected.items():
        assert torch.allclose(found[name][kept].float(), column.float(), atol=1e-6), name
        assert not found[name][left_out].any(), name
    assert torch.equal(found["loss_mask"][kept], mask[kept])
    assert set(sums) == set(its_sums)
    for name in set(sums) - OF_ALL_RESPONSES:
        assert sums[name].tolist() == pytest.approx(its_sums[name].tolist(), abs=1e-5), name
    assert sums["score_invalid"].tolist()[:2] == [12.0, 3.0]
    assert sums["response_length"].tolist()[0] == 12.0
    fresh, its_fresh = (next_state(spec, first_state(spec), triples(each)) for each in (sums, its_sums))
    assert fresh == pytest.approx(its_fresh, rel=1e-6)


def triples(sums: Moments) -> dict[str, Triple]:
    return {name: (float(total[0]), float(total[1]), float(total[2])) for name, total in sums.items()}


@pytest.mark.parametrize("wrong", INVALID)
def test_a_run_may_stop_at_a_score_that_is_no_number(wrong: float) -> None:
    batch = scored_batch(mask_of("1", "1", "1"), [1.0, wrong, 2.0])
    numbered = Batch(batch.columns, torch.tensor([40, 41, 42]), 1)
    with pytest.raises(RunStopped) as caught:
        advantages_of(PpoSpec(invalid_scores="stop"), numbered)
    assert "(rows 41 of step 0)" in str(caught.value)
    assert "algorithm.invalid_scores: mask would go on" in str(caught.value)


def test_a_run_that_may_stop_goes_on_with_numbers() -> None:
    batch = scored_batch(mask_of("1", "1"), [1.0, -3e38])
    assert advantages_of(PpoSpec(invalid_scores="stop"), batch)[1]["score_invalid"].tolist()[1] == 0.0


@pytest.mark.parametrize("sizes", [(9,), (4, 5), (0, 9), (8, 0, 1)])
def test_all_replicas_stop_with_the_same_sentence(sizes: tuple[int, ...]) -> None:
    """Seven rows, of which five are named, whoever has them."""
    batch = scored_batch(mask_of(*["1"] * 9), [math.nan] * 5 + [1.0, math.inf, 2.0, -math.inf])
    spec = PpoSpec(invalid_scores="stop")
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]

    def work(rank: int, port: Port) -> str:
        part = batch.select(slice(ends[rank] - sizes[rank], ends[rank]))
        with pytest.raises(RunStopped) as caught:
            shape_rewards(spec, part, context_of(spec, part, port))
        return str(caught.value)

    (sentence,) = set(on_replicas(len(sizes), work))
    assert sentence.startswith("7 responses") and "rows 0, 1, 2, 3, 4 ... of step 0" in sentence


# --- scores of tokens


def token_scored(mask: Tensor, tokens: Tensor, finished: list[int] | None = None) -> Batch:
    totals = (tokens * mask).sum(1).tolist()
    return scored_batch(mask, totals, finished, token_scores=tokens)


def test_scores_of_tokens_land_on_their_tokens() -> None:
    tokens = torch.tensor([[1.0, -2.0, 4.0, 9.0], [3.0, 9.0, 5.0, 7.0], [9.0, 9.0, 9.0, 9.0]])
    batch = token_scored(mask_of("1110", "1011", "0000"), tokens)
    assert rewards_of(PpoSpec(), batch).tolist() == [[1, -2, 4, 0], [3, 0, 5, 7], [0, 0, 0, 0]]


def test_what_shaping_changes_lands_on_the_last_token() -> None:
    """Sums 3 and 15: clipped to 10, the second loses 5 on its last token; less 2 since the first was truncated."""
    tokens = torch.tensor([[1.0, -2.0, 4.0, 9.0], [3.0, 9.0, 5.0, 7.0]])
    batch = token_scored(mask_of("1110", "1011"), tokens, [0, 1])
    spec = PpoSpec.model_validate({"truncation": {"penalty": 2.0}, "reward_clip": 10.0})
    assert rewards_of(spec, batch).tolist() == [[1, -2, 2, 0], [3, 0, 5, 2]]


def test_a_response_without_a_score_has_none_of_its_tokens() -> None:
    tokens = torch.tensor([[1.0, math.nan, 4.0], [1.0, 2.0, math.nan]])
    batch = scored_batch(mask_of("111", "110"), [math.nan, 3.0], token_scores=tokens)
    assert rewards_of(PpoSpec(), batch).tolist() == [[0, 0, 0], [1, 2, 0]]


@pytest.mark.parametrize("seed", range(5))
def test_rewards_of_tokens_add_up_to_the_shaped_score(seed: int) -> None:
    noise, mask = ragged(12, seed)
    batch = token_scored(mask, noise, [1, 0] * 6)
    spec = PpoSpec.model_validate({"truncation": {"penalty": 0.5}, "normalise_scores": "batch", "reward_clip": 1.0})
    scores = torch.tensor(scores_of(spec, batch))
    rewards = rewards_of(spec, batch)
    has_tokens = mask.bool().any(1)
    assert torch.allclose(rewards.sum(1)[has_tokens], scores[has_tokens], atol=1e-5)
    inner = mask.bool().clone()
    inner[torch.arange(12), last_positions(mask.bool())] = False
    assert torch.equal(rewards[inner], noise[inner]) and not rewards[~mask.bool()].any()


# --- one score of several sources


def weighed(sources: list[dict[str, Any]], mask: Tensor, **columns: Tensor) -> tuple[list[float], list[list[float]]]:
    parsed = TypeAdapter(Sources).validate_python(sources)
    batch = batch_of(response_mask=mask, **{name.replace("__", "."): column for name, column in columns.items()})
    found, sums = weighted_scores(parsed, batch, CombineContext([], Alone()))
    assert sums == {} and set(found) == {"scores", "token_scores"}
    return found["scores"].tolist(), found["token_scores"].tolist()


def test_scores_of_responses_weigh_and_add_up() -> None:
    """Scores of functions and services are weighted already."""
    totals, tokens = weighed(
        [{"model": "reward", "weight": 2.0}, {"model": "reward_style", "weight": -0.5}, {"rule": "gsm8k", "weight": 9}],
        mask_of("10", "11"),
        scores__reward=torch.tensor([1.0, 2.0]),
        scores__reward_style=torch.tensor([4.0, 8.0]),
        scores__called=torch.tensor([10.0, 0.5]),
    )
    assert totals == [10.0, 0.5]
    assert tokens == [[10.0, 0.0], [0.0, 0.5]]


def test_scores_of_tokens_and_of_responses_add_up() -> None:
    """The model's tokens three times, beyond the response none; a response's score on its last token."""
    totals, tokens = weighed(
        [{"model": "reward", "weight": 3.0, "level": "token"}, {"model": "reward_b"}],
        mask_of("110", "111", "000"),
        token_scores__reward=torch.tensor([[1.0, 2.0, 50.0], [0.0, -1.0, 1.0], [9.0, 9.0, 9.0]]),
        scores__reward_b=torch.tensor([0.5, 0.25, 0.0]),
    )
    assert totals == [9.5, 0.25, 0.0]
    assert tokens == [[3.0, 6.5, 0.0], [0.0, -3.0, 3.25], [0.0, 0.0, 0.0]]


def test_scores_of_tokens_from_outside_the_models_are_counted_once() -> None:
    totals, tokens = weighed(
        [{"model": "reward"}, {"function": "a.py:f", "level": "token", "weight": 5.0}],
        mask_of("11"),
        scores__reward=torch.tensor([1.0]),
        scores__called=torch.tensor([7.0]),
        token_scores__called=torch.tensor([[3.0, 4.0]]),
    )
    assert (totals, tokens) == ([8.0], [[3.0, 5.0]])


@pytest.mark.parametrize("level", ["answer", "token"])
def test_a_source_without_a_number_leaves_the_response_without_one(level: str) -> None:
    """And no other response."""
    columns = {
        "scores__called": torch.tensor([math.nan, 1.0]),
        "scores__reward": torch.tensor([1.0, 1.0]),
        "token_scores__called": torch.tensor([[math.nan, math.nan], [1.0, 0.0]]),
    }
    if level == "answer":
        del columns["token_scores__called"]
    totals, _ = weighed([{"model": "reward"}, {"rule": "gsm8k"}], mask_of("11", "10"), **columns)
    assert math.isnan(totals[0]) and totals[1] == 2.0


def test_an_episode_that_failed_is_not_counted_whatever_the_rule_for_scores() -> None:
    """With turns before, with none, and next to a score that is not finite by itself."""
    failed, ended = EpisodeState.NUMBERS["failed"], EpisodeState.NUMBERS["ended"]
    batch = scored_batch(mask_of("1101", "0000", "1100", "1111"), [math.nan, math.nan, 1.0, 3.0], [0, 0, 1, 1])
    batch = batch.with_columns({"episode": torch.tensor([failed, failed, ended, ended], dtype=torch.uint8)})
    columns, statistics = advantages_of(PpoSpec(invalid_scores="stop", whiten="none", kl=None), batch)
    assert columns["outcome"].tolist() == [Outcome.FAILED_EPISODE.code] * 2 + [0, 0]
    assert columns["loss_mask"].sum(1).tolist() == [0, 0, 2, 4]
    assert columns["advantages"].isfinite().all()
    assert statistics["reward"][:2].tolist() == [2, 4] and statistics["score_invalid"][1] == 0
    invalid = batch.with_columns({"scores": torch.tensor([math.nan, 0.0, math.nan, 3.0])})
    codes = advantages_of(PpoSpec(), invalid)[0]["outcome"].tolist()
    assert codes == [*[Outcome.FAILED_EPISODE.code] * 2, Outcome.INVALID_SCORE.code, 0]
