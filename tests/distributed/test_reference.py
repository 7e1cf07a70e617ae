"""The reference itself: its cases have teeth, and its way around ties lets nothing but ties through."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from algorithm_settings import ALGORITHMS
from cases import DEFAULT, SUPERVISED, Case
from comparison import reference_of
from launcher import Launches
from reference import Reference
from reference_models import distance, learning_rate
from reference_sampling import NoTie, Sampler
from reference_supervised import Supervised
from torch import Tensor

from flexrlhf.config.algorithms.policy import PolicySpec
from flexrlhf.config.algorithms.policy_sections import KlSpec, LagrangeSpec
from flexrlhf.config.model_settings import OptimizerSpec
from flexrlhf.config.spec import Spec
from flexrlhf.plan.pipeline import make_plan

FOUR = Case("four", "co-located", 1)
Named = tuple[str, str]
"""Name of a case, and a share or a reason of its reference."""


def named(pairs: Sequence[Named]) -> list[object]:
    """Return parameters, in `make test-all` alone if no default case has their setting."""
    by_default = {case.setting for case in DEFAULT}
    return [
        pytest.param(*pair, id="-".join(pair), marks=[pytest.mark.full] * (pair[0].split("_")[0] not in by_default))
        for pair in pairs
    ]


def test_the_cases_have_teeth(launches: Launches) -> None:
    """Training moves weights far beyond the tolerance; some responses are cut, not all; clips bind for some tokens."""
    result = reference_of(launches.assets.spec(FOUR))
    assert min(result.moved.values()) > 1e-3, result.moved
    for step in result.steps:
        values = {name: metric.value for name, metric in step.metrics.items()}
        assert 0.1 < values["truncated"] < 0.9, values
        assert 0 < values["ratio_clipped"] < 1 and 0 < values["value_clipped"] < 1, values
        assert abs(values["kl_token"]) > 1e-3, values
        assert len({len(response.prompt) for response in step.responses}) > 2


@pytest.mark.parametrize("setting", ["scheduled", "adapters", "shared", "sft-adapters", "reward-adapters"])
def test_other_updates_have_teeth_too(launches: Launches, setting: str) -> None:
    """Updates move the trained weights far beyond the tolerance."""
    shape = "co-located" if setting in ("scheduled", "adapters", "shared") else "all"
    result = reference_of(launches.assets.spec(Case(setting, shape, 1)))
    assert min(result.moved.values()) > 1e-3, result.moved


OF_ALGORITHMS = [case for case in DEFAULT if case.setting in ALGORITHMS]


@pytest.mark.parametrize("case", OF_ALGORITHMS, ids=lambda case: case.name)
def test_algorithms_train(launches: Launches, case: Case) -> None:
    """Each moves the trained weights far beyond the tolerance."""
    result = reference_of(make_plan(launches.assets.spec(case)).spec)
    assert min(result.moved.values()) > 1e-3, result.moved


PARTLY = (
    *(("grpo_co-located_4", "ratio_clipped"), ("rloo_pairs_4", "ratio_clipped"), ("gspo_six_2", "ratio_clipped")),
    *(("reinforce_co-located_2", "ratio_clipped"), ("remax_tight_2", "ratio_clipped")),
    *(("one-trunk-uneven_halves_2", "ratio_clipped"), ("one-trunk-uneven_halves_2", "value_clipped")),
    *(("safe_co-located_2", "ratio_clipped"), ("safe_co-located_2", "value_clipped")),
    *(("grpo-counted_halves_2", "score_invalid"), ("grpo-counted_halves_2", "group_alike")),
    ("grpo-dapo_lag-chunks_2", "group_alike"),
    *(("unknown_real-7b-searched_4", "score_failed"), ("rloo-unknown_co-located_2", "score_failed")),
    ("normalised_six_2", "reward_clipped"),
    *(("dpo-smoothed_tight_2", "pair_accuracy"), ("dpo-smoothed_tight_2", "eval_accuracy")),
    *(("simpo_half_2", "pair_accuracy"), ("orpo_all_2", "pair_accuracy"), ("kto_halves_2", "pair_accuracy")),
    *(("grpo-cispo_co-located_2", "ratio_clipped"), ("gspo-token_halves_2", "ratio_clipped")),
    *(("grpo-clip-cov_halves_4", "covariance_selected"), ("grpo-kl-cov_six-chunks_2", "covariance_selected")),
    *(("episodes_co-located_2", "episode_failed"), ("episodes_co-located_2", "episode_ended")),
    *(("grpo-masked_lag_2", "importance_clipped"), ("grpo-rejected_lag-every-3_4", "importance_rejected")),
    *(("one-trunk-rejected_lag_2", "importance_rejected"), ("grpo-process-models_tight_2", "truncated")),
)
"""Shares that must be neither nothing nor all in some step: else nothing would be cut, masked or left out."""


@pytest.mark.parametrize(("name", "metric"), named(PARTLY))
def test_limits_and_masks_apply_in_part(launches: Launches, name: str, metric: str) -> None:
    setting, shape, ranks = name.split("_")
    shares = values_of(launches.assets.spec(Case(setting, shape, int(ranks))), metric)
    assert any(0 < share < 1 for share in shares), shares


LEFT_OUT = (
    *(
        ("episodes_co-located_2", "failed_episode"),
        ("safe-called_co-located_2", "invalid_score"),
        ("grpo-uneven_co-located_2", "truncated"),
    ),
    *(("masked-streaming_six-chunks_4", "truncated"), ("grpo-dapo_lag-chunks_2", "alike")),
    *(("grpo-dynamic_every-3_2", "surplus"), ("raft_halves_2", "not_best"), ("frozen_lag_2", "frozen")),
    *(("segments_halves_2", "frozen"), ("grpo-dynamic-segments_lag-2_2", "frozen")),
    *(("grpo-segments_co-located_2", "truncated"), ("grpo-as-ended_co-located_2", "truncated")),
)
"""Reasons for which rows of some step are left out, in runs in which others are trained on."""


@pytest.mark.parametrize(("name", "reason"), named(LEFT_OUT))
def test_rows_are_left_out_for_each_reason(launches: Launches, name: str, reason: str) -> None:
    setting, shape, ranks = name.split("_")
    spec = launches.assets.spec(Case(setting, shape, int(ranks)))
    assert any(values_of(spec, f"rows_{reason}")) and any(values_of(spec, "rows_trained"))


def values_of(spec: Spec, metric: str) -> list[float]:
    return [step.metrics[metric].value for step in reference_of(spec).steps if metric in step.metrics]


def test_steps_have_teeth(launches: Launches) -> None:
    """Responses have several steps, and their tokens several advantages."""
    result = reference_of(launches.assets.spec(Case("gspo-token", "halves", 2)))
    assert all(1 < step.metrics["response_steps"].value < 4 for step in result.steps)
    several = [len(set(response.advantages)) > 1 for response in result.steps[0].responses]
    assert 0.3 < sum(several) / len(several) < 1


def test_a_reference_point_has_teeth(launches: Launches) -> None:
    """Responses to other prompts are likelier than under the reference in some step, so that it is not 0."""
    assert max(values_of(launches.assets.spec(Case("kto", "halves", 2)), "reference_point")) > 0.01


@pytest.mark.parametrize(
    ("setting", "metric"), [("adaptive", "kl_coefficient"), ("adaptive-masked", "kl_coefficient"), ("safe", "lagrange")]
)
def test_controllers_have_teeth(launches: Launches, setting: str, metric: str) -> None:
    """Every step leaves another number to the next."""
    found = values_of(launches.assets.spec(Case(setting, "co-located", 2)), metric)
    assert len({round(value, 9) for value in found}) == len(found), found


def test_a_multiplier_stops_at_its_largest(launches: Launches) -> None:
    *_, last = values_of(launches.assets.spec(Case("safe-called", "co-located", 2)), "lagrange")
    assert last == 1.2


def test_a_frozen_actor_stays_while_its_critic_learns(launches: Launches) -> None:
    spec = launches.assets.spec(Case("frozen", "co-located", 2))
    assert len(values_of(spec, "critic_grad_norm")) == spec.steps
    assert len(values_of(spec, "actor_grad_norm")) == spec.steps - 2


WITHOUT: dict[str, dict[str, object]] = {
    "kl-k2": {"kl": KlSpec(coefficient=0.5)},
    "kl-clamped": {"kl": KlSpec(coefficient=0.5, estimator="k3")},
    "kl-k1-loss": {"kl": KlSpec(place="loss", coefficient=0.0)},
    "kl-k2-loss": {"kl": KlSpec(place="loss", estimator="k2", coefficient=0.5)},
    "kl-k3-loss": {"kl": KlSpec(place="loss", estimator="k1", coefficient=0.5)},
    "kl-limited": {"kl": KlSpec(coefficient=0.5)},
    "adaptive-token": {"kl": KlSpec(coefficient=0.6, target=0.09, horizon=8)},
    "dual": {"dual_clip": None},
    "no-kl": {"value_clip": 0.05},
    "running": {"normalise_scores": "none"},
    "normalised": {"normalise_scores": "none"},
    "masked": {"truncation": "none"},
    "overlong": {"overlong": None},
    "ptx": {"ptx": None},
    "frozen": {"freeze_actor_steps": 1},
    "one-trunk": {"value_coefficient": 0.0},
    "grpo": {"kl": KlSpec(place="loss", estimator="k3", coefficient=0.0)},
    "grpo-dr": {"scale": "group"},
    "grpo-segments": {"truncation": "mask"},
    "grpo-as-ended": {"ptx": None},
    "grpo-dapo": {"overlong": None},
    "grpo-limited": {"kl": KlSpec(place="loss", estimator="k3", coefficient=0.5)},
    "grpo-after": {"kl": KlSpec(coefficient=0.2, target=0.05, target_unit="token", horizon=30)},
    "rloo": {"scale": "group"},
    "rloo-after": {"kl": KlSpec(estimator="k2", coefficient=0.3)},
    "gspo": {"ratio": "token"},
    "reinforce-group": {"baseline": "none"},
    "remax": {"kl": KlSpec(coefficient=0.0)},
    "safe": {"lagrange": LagrangeSpec(learning_rate=0.0)},
    "dpo-ipo": {"loss": "sigmoid"},
    "dpo-smoothed": {"label_smoothing": 0.0},
    "dpo-robust": {"loss": "sigmoid"},
    "dpo-normalised": {"length_normalised": False},
    "simpo": {"gamma": 3.0},
    "orpo": {"beta": 0.1},
    "kto": {"undesirable_weight": 1.3},
    "gspo-token": {"ratio": "sequence"},
    "grpo-cispo": {"surrogate": "clip"},
    "grpo-clip-cov": {"surrogate": "clip"},
    "grpo-kl-cov": {"surrogate": "clip"},
    "grpo-as-ended-process": {"supervision": "outcome"},
    "grpo-process": {"supervision": "outcome"},
}
"""A setting → the change that makes another run."""


@pytest.mark.full
@pytest.mark.parametrize("setting", WITHOUT)
def test_settings_change_training(launches: Launches, setting: str) -> None:
    """Were the setting ignored, the equality of its cases would fail."""
    shape = "all" if setting in SUPERVISED else "co-located"
    spec = launches.assets.spec(Case(setting, shape, 2))
    other = spec.model_copy(update={"algorithm": spec.algorithm.model_copy(update=WITHOUT[setting])})
    found = reference_of(spec)
    is_sampled = isinstance(spec.algorithm, PolicySpec)
    left = (Reference if is_sampled else Supervised)(other).run()
    assert max(distance(left.weights[role], weights) for role, weights in found.weights.items()) > 1e-4


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, [8, 8, 8, 8, 8]),
        ({"warmup_steps": 4}, [0, 2, 4, 6, 8]),
        ({"schedule": "linear"}, [8, 6.4, 4.8, 3.2, 1.6]),
        ({"schedule": "linear", "warmup_steps": 1}, [0, 8, 6, 4, 2]),
        ({"schedule": "cosine", "warmup_steps": 1}, [0, 8, 4 + 8**0.5, 4, 4 - 8**0.5]),
        ({"schedule": "linear", "warmup_steps": 1, "final_ratio": 0.5}, [0, 8, 7, 6, 5]),
    ],
    ids=["constant", "warm-up", "linear", "warm-up-linear", "warm-up-cosine", "not-to-zero"],
)
def test_learning_rates_follow_the_formula(settings: dict[str, object], rates: list[float]) -> None:
    """Learning rate in five updates; a sixth would have 0."""
    spec = OptimizerSpec(learning_rate=8, **settings)
    assert [learning_rate(spec, update, 5) for update in range(5)] == pytest.approx(rates)
    assert spec.schedule == "constant" or learning_rate(spec, 5, 5) == pytest.approx(8 * spec.final_ratio)


def test_adapters_start_at_nothing_and_ref_never_follows_them(launches: Launches) -> None:
    """The first responses come from the base weights, whose log-probs are the shared ref's in every step."""
    first, second = reference_of(launches.assets.spec(Case("shared", "co-located", 1))).steps
    assert first.columns["logprobs"].equal(first.columns["ref_logprobs"])
    assert first.metrics["kl_token"].value == 0 and abs(second.metrics["kl_token"].value) > 1e-3


@pytest.mark.parametrize(("setting", "shape"), [("corrected", "lag-chunks"), ("corrected-sequences", "lag-every-3")])
def test_importance_has_teeth(launches: Launches, setting: str, shape: str) -> None:
    """Importance weights are 1 for fresh policies; for stale ones the cap cuts some, and others are below 1."""
    first, *stale = reference_of(launches.assets.spec(Case(setting, shape, 2))).steps
    assert first.metrics["importance_weight"].value == pytest.approx(1, abs=1e-6)
    assert first.metrics["effective_sample_size"].value == pytest.approx(1, abs=1e-6)
    for step in stale:
        assert 0 < step.metrics["staleness_mean"].value <= 3
        assert step.metrics["importance_weight"].value < 0.999
        assert step.metrics["effective_sample_size"].value < 0.999
        assert (step.columns["logprobs"] - step.columns["rollout_logprobs"]).abs().max() > 0.1
    assert 0 < max(step.metrics["importance_clipped"].value for step in stale) < 1


def test_max_staleness_has_teeth(launches: Launches) -> None:
    """With a lag of 1 and syncs after three batches, batches 0 to 4 are 0, 1, 2, 3 and 1 behind."""
    steps = reference_of(launches.assets.spec(Case("fresh", "lag-every-3", 2))).steps
    dropped = [step.metrics["staleness_dropped"].value for step in steps]
    assert dropped == [0, 0, 1, 1, 0]
    ages = [step.metrics["staleness_max"].value if "staleness_max" in step.metrics else None for step in steps]
    assert ages == [0, 1, None, None, 1]


def test_cuts_have_teeth(launches: Launches) -> None:
    """Tokens are sampled from few, whose log-probs rise; no response is short; both cuts remove tokens."""
    spec = launches.assets.spec(Case("nucleus", "halves", 2))
    reference = Reference(spec)
    for step in reference_of(spec).steps:
        inside = step.columns["response_mask"].bool()
        assert (step.columns["rollout_logprobs"] > step.columns["logprobs"] + 0.1)[inside].float().mean() > 0.5
        assert {len(response.tokens) for response in step.responses} <= {4, 5, 6, 7, 8}
    logits = reference.actor.next_logits([list(example.prompt) for example in reference.examples])
    reference.sampler.top_k = 0
    by_p = [allowed(reference.sampler, each) for each in logits]
    reference.sampler.top_k = spec.algorithm.top_k
    by_both = [allowed(reference.sampler, each) for each in logits]
    assert all(both < k and both < p for both, k, p in zip(by_both, [spec.algorithm.top_k] * 20, by_p, strict=True))


def allowed(sampler: Sampler, logits: Tensor) -> int:
    """Number of tokens that may be sampled first."""
    scores = sampler.scores(logits, 0)
    assert all(scores[end] == -math.inf for end in sampler.ends)
    return int(scores.isfinite().sum())


@pytest.mark.parametrize("setting", ["stopped", "stopped-late"])
def test_stop_strings_have_teeth(launches: Launches, setting: str) -> None:
    """Stop strings end some responses, not all; a response has at most one, after its shortest length and at its
    end."""
    spec = launches.assets.spec(Case(setting, "co-located", 2))
    sampler, responses = Reference(spec).sampler, [a for step in reference_of(spec).steps for a in step.responses]
    stopped = [response for response in responses if response.finished and response.tokens[-1] not in sampler.ends]
    assert 3 < len(stopped) < len(responses)
    for response in responses:
        late = [sampler.text(response.tokens[:end]) for end in range(sampler.shortest + 1, len(response.tokens) + 1)]
        early = sampler.text(response.tokens[: sampler.shortest])
        has_stopped = [any(text.count(stop) > early.count(stop) for stop in sampler.stop) for text in late]
        assert not any(has_stopped[:-1])
        assert (response in stopped) == has_stopped[-1] or response.tokens[-1] in sampler.ends
    if setting == "stopped":
        across_words = [stop for stop in sampler.stop if " " in stop]
        assert all(any(stop in sampler.text(response.tokens) for response in stopped) for stop in across_words)


def test_episodes_have_teeth(launches: Launches) -> None:
    """They end in each way, some before their first turn and some after several; rewards differ from turn to turn."""
    result = reference_of(launches.assets.spec(Case("episodes", "co-located", 2)))
    episodes = [response.episode for step in result.steps for response in step.responses if response.episode]
    assert {episode.outcome for episode in episodes} == {"ended", "last turn", "no room", "failed"}
    assert {len(episode.ends) for episode in episodes} == {0, 1, 2, 3}
    assert sum(len(set(episode.rewards)) > 1 for episode in episodes) > 3
    assert max(len(episode.text) - len(episode.positions) for episode in episodes) > 3


def test_stop_strings_end_turns(launches: Launches) -> None:
    """Some turns end with a stop string and are followed by one of several tokens."""
    spec = launches.assets.spec(Case("grpo-episodes", "halves", 2, "deepspeed-3"))
    sampler, found = Reference(spec).sampler, 0
    for response in [response for step in reference_of(spec).steps for response in step.responses]:
        ends = response.episode.ends if response.episode else []
        for first, end, following in zip([-1, *ends], ends, ends[1:], strict=False):
            turn = sampler.text(response.tokens[first + 1 : end + 1])
            found += any(stop in turn for stop in sampler.stop) and following - end > 1
    assert found > 3


def test_several_tokens_end_responses(launches: Launches) -> None:
    """Some responses are cut, and many others end with another token than the tokenizer's, none at once."""
    spec = launches.assets.spec(Case("ends", "halves", 2))
    responses = [response for step in reference_of(spec).steps for response in step.responses]
    ends = [response.tokens[-1] for response in responses if response.finished]
    assert 3 < len(ends) < len(responses) and len(set(ends)) > 2
    assert all(len(response.tokens) > 2 for response in responses)


@pytest.mark.parametrize(("setting", "shape", "sample"), [("sft-chats", "all", 0), ("dpo-chats", "halves", 1)])
def test_chats_are_trained_on_in_part(launches: Launches, setting: str, shape: str, sample: int) -> None:
    """Responses have several turns, whole and cut; the package's trained tokens are found here by their words."""
    reference = Supervised(launches.assets.spec(Case(setting, shape, 2)))
    found = [(example.is_trained(sample), reference._written(example, sample)) for example in reference.examples]
    assert all([place for place, yes in enumerate(is_trained) if yes] == written for is_trained, written in found)
    assert 3 < sum(all(is_trained) for is_trained, _ in found) < len(found) - 3
    assert sum(example.finished[sample] for example in reference.examples) > 0


def test_greedy_responses_repeat_themselves(launches: Launches) -> None:
    """Evaluation responses of the likeliest tokens are others than sampled ones; the rest of the run is the same."""
    greedy, sampled = (reference_of(launches.assets.spec(Case(s, "co-located", 2))).steps for s in ("greedy", "two"))
    tokens, longer = ([step.columns["tokens"].tolist() for step in steps] for steps in (greedy, sampled))
    assert tokens == longer[: len(tokens)]
    assert all(0 < step.metrics["eval_distinct_2"].value < 0.8 for step in greedy)


@pytest.mark.parametrize("shape", ["lag", "every-3", "lag-every-3"])
def test_stale_weights_give_other_results(launches: Launches, shape: str) -> None:
    """Were the version rule ignored, the equality of these cases would fail."""
    plain = reference_of(launches.assets.spec(Case("two", "six", 2)))
    stale = reference_of(launches.assets.spec(Case("two", shape, 2)))
    first, second = (
        float((a.columns["logprobs"] - b.columns["logprobs"]).abs().max())
        for a, b in zip(plain.steps[:2], stale.steps[:2], strict=True)
    )
    assert first == 0 and second > 0.1


@pytest.mark.parametrize(
    ("lag", "every", "versions"),
    [
        (0, 1, [0, 1, 2, 3, 4]),
        (1, 1, [0, 0, 1, 2, 3]),
        (3, 1, [0, 0, 0, 0, 1]),
        (0, 3, [0, 0, 0, 3, 3]),
        (1, 3, [0, 0, 0, 0, 3]),
        (2, 2, [0, 0, 0, 0, 2]),
    ],
)
def test_versions_follow_the_rule(launches: Launches, lag: int, every: int, versions: list[int]) -> None:
    spec = launches.assets.spec(FOUR)
    spec = spec.model_copy(
        update={
            "schedule": spec.schedule.model_copy(update={"lag": lag}),
            "sync": spec.sync.model_copy(update={"every": every}),
        }
    )
    assert [Reference(spec).version(step) for step in range(5)] == versions


def test_forcing_the_sampled_tokens_changes_nothing(launches: Launches) -> None:
    spec = launches.assets.spec(FOUR)
    sampled = reference_of(spec)
    forced = Reference(spec, [{"tokens": step.columns["tokens"]} for step in sampled.steps]).run()
    assert [step.metrics for step in forced.steps] == [step.metrics for step in sampled.steps]


def test_forcing_a_token_that_does_not_tie_is_refused(launches: Launches) -> None:
    spec = launches.assets.spec(FOUR)
    tokens = [step.columns["tokens"].clone() for step in reference_of(spec).steps]
    position = spec.data.max_prompt_tokens + 1
    tokens[1][2, position] = (tokens[1][2, position] + 1) % 64
    with pytest.raises(NoTie, match="step 1, row 2, position 1"):
        Reference(spec, [{"tokens": each} for each in tokens]).run()
