"""Numbers that one step hands to the next: what they follow, and that chunks of a step change them once."""

from __future__ import annotations

import json
import math
import random
import statistics
from itertools import count
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from replicas import mask_of
from scored_batches import context_of, scored_batch
from small_runs import plan_of

from flexrlhf.config.algorithms.policy_sections import KlSpec
from flexrlhf.config.algorithms.ppo import PpoSpec, SafeRlhfSpec
from flexrlhf.errors import RunStopped
from flexrlhf.metrics import Triple
from flexrlhf.objectives.reward_shaping import shape_rewards
from flexrlhf.strategies.instructions import Run
from flexrlhf.trainer.controllers import Controllers, ControllerState, first_state, next_state


def triple(values: list[float]) -> Triple:
    return float(len(values)), sum(values), sum(value * value for value in values)


def after(spec: PpoSpec, state: ControllerState | None = None, **values: list[float]) -> ControllerState:
    statistics = {name: triple(numbers) for name, numbers in values.items()}
    return next_state(spec, first_state(spec) if state is None else state, statistics)


# --- the coefficient of the penalty

ADAPTIVE = PpoSpec(kl=KlSpec(coefficient=0.1, target=4.0, horizon=100))


@pytest.mark.parametrize(
    ("measured", "factor"),
    [
        ([4.0] * 10, 1.0),
        ([3.0, 5.0] * 5, 1.0),
        ([4.4] * 10, 1 + 0.1 * 10 / 100),
        ([3.8] * 10, 1 - 0.05 * 10 / 100),
        ([4.8] * 10, 1 + 0.2 * 10 / 100),
        ([400.0] * 10, 1 + 0.2 * 10 / 100),
        ([0.0] * 10, 1 - 0.2 * 10 / 100),
        ([-7.0] * 10, 1 - 0.2 * 10 / 100),
        ([400.0] * 50, 1 + 0.2 * 50 / 100),
        ([], 1.0),
    ],
)
def test_the_coefficient_follows_the_measured_kl(measured: list[float], factor: float) -> None:
    """Ziegler et al. 2019, section 2.2: at the target, above, below, and at most a fifth of an error."""
    assert after(ADAPTIVE, kl=measured)["kl_coefficient"] == pytest.approx(0.1 * factor, rel=1e-12)


def test_a_fixed_coefficient_stays() -> None:
    spec = PpoSpec(kl=KlSpec(coefficient=0.1))
    assert after(spec, kl=[400.0] * 10)["kl_coefficient"] == 0.1
    assert first_state(PpoSpec(kl=None))["kl_coefficient"] == 0.0
    assert after(PpoSpec(kl=None), kl=[4.0])["kl_coefficient"] == 0.0


def test_a_coefficient_cannot_change_its_sign() -> None:
    """A step of 512 responses with a horizon of 100 would turn 1 - 0.2 * 512 / 100 negative."""
    settings: dict[str, Any] = {"prompts_per_step": 512, "kl": {"target": 4.0, "horizon": 100}}
    with pytest.raises(ValidationError, match="kl.horizon 100 .* 512 responses.* use at least 103"):
        PpoSpec.model_validate(settings)
    smallest = PpoSpec.model_validate(settings | {"kl": {"target": 4.0, "horizon": 103}})
    assert after(smallest, kl=[0.0] * 512)["kl_coefficient"] > 0
    assert PpoSpec.model_validate(settings | {"kl": {"horizon": 100}}).kl is not None


# --- the multiplier of the cost


def test_the_multiplier_follows_the_cost() -> None:
    """Dai et al. 2024, eq. 12 on the logarithm: up while the mean cost exceeds its limit, down below, never beyond."""
    spec = SafeRlhfSpec.model_validate({"lagrange": {"limit": 1.0, "initial": 2.0, "learning_rate": 0.1, "maximum": 3}})
    for costs, expected in (
        ([2.0, 4.0], 2 * math.exp(0.1 * 2 * 2)),
        ([1.0, 1.0], 2.0),
        ([0.0, -1.0], 2 * math.exp(0.1 * 2 * -1.5)),
        ([1e308, 1e308], 3.0),
        ([], 2.0),
    ):
        state = next_state(spec, first_state(spec), {"cost": triple(costs)})
        assert state["lagrange"] == pytest.approx(expected)
    fallen = next_state(spec, first_state(spec), {"cost": triple([-1e6])})
    assert 0 < fallen["lagrange"] < 1e-6
    assert next_state(spec, fallen, {"cost": triple([1e12])})["lagrange"] > fallen["lagrange"]


# --- running statistics of scores


@pytest.mark.parametrize("first", [0, 1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_running_statistics_are_those_of_all_steps_before(seed: int, first: int) -> None:
    """In two passes over all scores so far, after steps of any size, the first one of none or one score included."""
    rng = random.Random(seed)
    spec = PpoSpec(normalise_scores="running")
    state, seen = first_state(spec), list[float]()
    for size in (first, 1, 4, 0, 7, 2):
        scores = [rng.gauss(100, 3) for _ in range(size)]
        state, seen = after(spec, state, shaped_score=scores), seen + scores
        assert state["score_count"] == len(seen)
        if len(seen) > 1:
            assert state["score_mean"] == pytest.approx(statistics.mean(seen), rel=1e-9)
            assert state["score_deviation"] == pytest.approx(statistics.stdev(seen), rel=1e-6)


def test_equal_scores_so_far_are_not_blown_up() -> None:
    state = after(PpoSpec(), shaped_score=[2.0, 2.0, 2.0])
    assert (state["score_mean"], state["score_deviation"]) == (2.0, 1.0)


def test_scores_are_normalised_by_the_steps_before_theirs() -> None:
    """The first step as it is; each further one by the scores before it alone, whatever it scores itself."""
    generator = torch.Generator().manual_seed(0)
    spec = PpoSpec(normalise_scores="running")
    state, seen = first_state(spec), list[float]()
    for step in range(4):
        scores = (torch.randn(6, generator=generator) * 5 + 20 + step).tolist()
        batch = scored_batch(mask_of(*["1"] * 6), scores)
        found = shape_rewards(spec, batch, context_of(spec, batch, **state))
        mean, deviation = (statistics.mean(seen), statistics.stdev(seen)) if seen else (0.0, 1.0)
        expected = [(score - mean) / deviation for score in scores]
        assert found.scores.tolist() == pytest.approx(expected, abs=1e-5)
        if not step:
            assert torch.equal(found.scores, batch["scores"])
        sums = {name: tuple(total.tolist()) for name, total in found.statistics.items()}
        state, seen = next_state(spec, state, sums), seen + scores


def test_a_step_without_responses_that_count_changes_nothing() -> None:
    before = after(ADAPTIVE, shaped_score=[1.0, 4.0], kl=[9.0])
    assert after(ADAPTIVE, before, shaped_score=[], kl=[]) == before


# --- the controllers of a run


def runs_of(num_chunks: int, *overrides: str) -> tuple[Any, list[Run]]:
    """The plan of a run, and the instructions that compute its advantages."""
    plan = plan_of(
        None,
        1,
        "algorithm.num_mini_batches=4",
        "algorithm.whiten=mini_batch",
        f"schedule.num_chunks={num_chunks}",
        *overrides,
    )
    found = [i for i in plan.schedule.instructions if isinstance(i, Run) and i.operator.name == "advantages"]
    return plan, found


@pytest.mark.parametrize("num_chunks", [1, 2, 4])
def test_all_chunks_of_a_step_change_the_numbers_once(num_chunks: int) -> None:
    """After the last of them, by the sum of their statistics, so every chunk computes with the same numbers."""
    kl = "algorithm.kl={target: 4.0, horizon: 100, coefficient: 0.1}"
    plan, runs = runs_of(num_chunks, kl, "algorithm.normalise_scores=running")
    assert len(runs) == num_chunks
    measured, scores = [9.0, 1.0, 5.0, 2.0, 8.0, 3.0, 7.0, 6.0], [float(row * row) for row in range(8)]
    controls, spec = Controllers(plan), plan.spec.algorithm
    expected = first_state(spec)
    for step in range(3):
        for run in runs:
            assert controls.state(run.operator, step) == pytest.approx(expected)
            part = slice(2 * run.mini_batches.start, 2 * run.mini_batches.stop)
            controls.add(run, step, {"kl": triple(measured[part]), "shaped_score": triple(scores[part])})
        expected = next_state(spec, expected, {"kl": triple(measured), "shaped_score": triple(scores)})
    assert controls.state(runs[0].operator) == pytest.approx(expected)
    assert expected["score_count"] == 24 and expected["kl_coefficient"] == pytest.approx(0.1 * 1.016**3)


def test_parts_of_steps_that_a_program_calls_in_turn_are_summed_by_step() -> None:
    """Each step computes with the values as it began."""
    plan, (one, two) = runs_of(2, "algorithm.normalise_scores=running")
    controls, first = Controllers(plan), {"shaped_score": triple([1.0, 3.0])}
    for run, step, scores in ((two, 0, [5.0]), (one, 1, [100.0]), (one, 0, [1.0, 3.0]), (two, 1, [200.0])):
        assert controls.state(run.operator, step)["score_count"] == 0
        controls.add(run, step, {"shaped_score": triple(scores)})
        if (run, step) == (one, 0):
            assert controls.state(run.operator)["score_mean"] == pytest.approx(3)
    assert controls.state(one.operator)["score_count"] == 5
    controls.add(one, 2, first)
    controls.load(controls.changed)
    for run in (one, two):
        controls.add(run, 2, first)
    assert controls.state(one.operator)["score_count"] == 9


def test_a_kl_that_is_no_number_leaves_the_coefficient() -> None:
    for wrong in (math.nan, math.inf, -math.inf):
        assert after(ADAPTIVE, kl=[4.0, wrong])["kl_coefficient"] == 0.1


# --- steps without a score

NO_SCORE, ONE_SCORE = triple([]), triple([1.0])


@pytest.mark.parametrize("num_chunks", [1, 4])
@pytest.mark.parametrize("limit", [1, 3, None])
def test_steps_in_a_row_without_a_score_end_the_run(limit: int | None, num_chunks: int) -> None:
    """A step with one score in any of its chunks begins anew."""
    shown = "null" if limit is None else limit
    plan, runs = runs_of(num_chunks, f"guards.max_failed_steps={shown}")
    controls, numbers = Controllers(plan), count()

    def step(last: Triple) -> None:
        number = next(numbers)
        for run in runs:
            controls.add(run, number, {"reward": last if run is runs[-1] else NO_SCORE})

    for _ in range(3):
        for _ in range((limit or 10) - 1):
            step(NO_SCORE)
        step(ONE_SCORE)
    if limit is None:
        return
    with pytest.raises(
        RunStopped, match=f"no response of {limit} steps in a row had a score.*max_failed_steps {limit}"
    ):
        for _ in range(limit):
            step(NO_SCORE)


def test_a_step_whose_operator_has_run_on_some_mini_batches_goes_on_from_a_checkpoint() -> None:
    """Of a program, which has called it on the others before; a step that has ended so is in none."""
    plan, runs = runs_of(4)
    whole, saved, resumed = (Controllers(plan) for _ in range(3))
    saved.add(runs[0], 0, {"shaped_score": triple([9.0])})
    for number, run in enumerate(runs):
        for controls in (whole, saved if number < 2 else resumed):
            controls.add(run, 1, {"shaped_score": triple([0.1 * number, 1 / 3])})
        if number == 1:
            resumed.load(saved.changed, json.loads(json.dumps(saved.begun_from(1))))
            assert resumed.begun_from(1) == saved.begun_from(1) and list(saved.begun_from(0)) == ["0", "1"]
            assert resumed.begun_from(0).keys() == {"1"}
    assert resumed.states == whole.states != Controllers(plan).states and not resumed.begun_from(0)


@pytest.mark.parametrize("missing", ["reward", "cost", "greedy_score"])
def test_every_kind_of_score_counts(missing: str) -> None:
    statistics = {name: ONE_SCORE for name in ("reward", "cost", "greedy_score")}
    state = next_state(PpoSpec(), first_state(PpoSpec()), statistics)
    assert state["failed_steps"] == 0
    assert next_state(PpoSpec(), state, statistics | {missing: NO_SCORE})["failed_steps"] == 1


def test_operators_without_controllers_have_no_numbers() -> None:
    plan, _ = runs_of(1)
    controls = Controllers(plan)
    train = next(operator for operator in plan.graph.operators if operator.kind == "train")
    assert controls.state(train) == {}
    assert set(controls.states) == {"advantages"}
    reward = plan_of(None, 1, "algorithm={name: reward, prompts_per_step: 8}", "models.actor=null")
    assert Controllers(reward).states == {}


@pytest.mark.parametrize(("first", "due"), [(0, [0, 1, 2, 3, 4]), (2, [2, 3, 4]), (4, [4]), (5, []), (9, [])])
def test_a_frozen_actor_is_trained_from_its_first_step_on(first: int, due: list[int]) -> None:
    plan = plan_of(None, 1, "steps=20", f"algorithm.freeze_actor_steps={first}")
    runs = {i.operator.name: i for i in plan.schedule.instructions if isinstance(i, Run)}
    assert [step for step in range(-1, 7) if runs["train_actor"].due(step, 5)] == due
    for name in ("train_critic", "advantages", "generate"):
        assert [step for step in range(-1, 7) if runs[name].due(step, 5)] == [0, 1, 2, 3, 4]
    assert plan.graph.first_step("actor") == first and plan.graph.first_step("critic") == 0


def test_a_step_of_segments_in_which_no_response_ends_is_no_failed_one() -> None:
    nothing = {name: NO_SCORE for name in ("reward", "score_invalid")}
    state = first_state(PpoSpec()) | {"failed_steps": 2.0}
    assert next_state(PpoSpec(), state, nothing)["failed_steps"] == 2
    assert next_state(PpoSpec(), state, nothing | {"score_invalid": triple([1.0])})["failed_steps"] == 3
