"""Episodes before and behind a run: the plan of turns, sums of rewards, and failures that stop a run."""

from __future__ import annotations

import math
import sys
from collections import Counter
from itertools import cycle

import pytest
import torch
from replicas import Alone, batch_of, mask_of, on_replicas
from small_runs import TINY, plan_of

from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.config.reward_sources import ModelSource
from flexrlhf.engines.base import Batch, Moments
from flexrlhf.errors import RunStopped
from flexrlhf.guideline.simulation.inputs import costs_for
from flexrlhf.guideline.simulation.simulate import simulate
from flexrlhf.guideline.simulation.simulation_text import format_simulation
from flexrlhf.metrics import EPISODE_FAILURES, FAILED_IN_A_ROW, METRICS, Triple
from flexrlhf.objectives.context import CombineContext, Reducer
from flexrlhf.objectives.episodes import episodes
from flexrlhf.objectives.reward_shaping import weighted_scores
from flexrlhf.operators.outcomes import EpisodeState
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.plan.schedule_text import schedule_table
from flexrlhf.strategies.instructions import Run
from flexrlhf.trainer.controllers import Controllers

GAME = "environment={path: game.py:Game, max_turns: 2}"


@pytest.mark.parametrize("name", ["reinforce++", "raft", "rloo", "safe-rlhf", "ac-share"])
def test_algorithms_that_generate_have_episodes(name: str) -> None:
    """One operator plays them, whatever number of turns they have; outcomes follow from the episodes."""
    samples = "" if name in ("safe-rlhf", "ac-share") else ", samples_per_prompt: 2"
    cost = (f"models.cost={{init: {TINY}}}",) if name == "safe-rlhf" else ()
    plan = plan_of(None, 4, GAME, f"algorithm={{name: {name}, prompts_per_step: 8{samples}}}", *cost)
    advantages = plan.graph.producers["outcome"]
    assert "episode" in advantages.reads and advantages.kind == "combine"
    playing = [each for each in plan.schedule.instructions if isinstance(each, Run) and each.operator.has_replies]
    assert [run.operator.name for run in playing] == ["generate"]
    algorithm = f"algorithm={{name: {name}, prompts_per_step: 8{samples}}}"
    longer = plan_of(None, 4, GAME.replace("2", "64"), algorithm, *cost)
    assert schedule_table(longer) == schedule_table(plan)


MANY = 64
H100S = "cluster={nodes: [{count: 1, devices: 4, class: H100-80G}]}"
SHADOW = {"actor": 0.5, "actor.shadow": 0.5, "ref": 0.5, "reward": 0.5}


@pytest.mark.parametrize("order", ["planned", "free"])
@pytest.mark.parametrize(("placement", "overrides"), [("1,1,0.5", ()), (SHADOW, ("schedule.lag=1", "steps=5"))])
def test_many_turns_are_planned_and_priced_in_linear_time(
    placement: object, overrides: tuple[str, ...], order: str
) -> None:
    """Calls of functions stand for time. The text has as many lines for any number of turns."""
    algorithm = "algorithm={name: grpo, prompts_per_step: 8, samples_per_prompt: 2, num_mini_batches: 4}"
    further = algorithm, "schedule.num_chunks=4", f"rollout.order={order}", H100S, *overrides

    def planned(turns: int) -> tuple[Plan, int]:
        game, calls = f"environment={{path: game.py:Game, max_turns: {turns}}}", Counter[str]()
        sys.setprofile(lambda frame, event, arg: calls.update([event]))
        try:
            plan = plan_of(placement, 4, game, *further)
            text = format_plan(plan) + format_simulation(simulate(plan), costs_for(plan.spec, None))
        finally:
            sys.setprofile(None)
        assert len(text.splitlines()) < 200
        return plan, calls["call"]

    few, few_calls = planned(MANY // 4)
    plan, calls = planned(MANY)
    assert calls < 4.2 * few_calls
    assert schedule_table(plan) == schedule_table(few)


TOGETHER = {
    "segments": ("rollout.segment_tokens=4",),
    "attempts": ("algorithm={name: grpo, prompts_per_step: 8, samples_per_prompt: 2, dynamic_sampling: {rounds: 2}}",),
}


@pytest.mark.parametrize("overrides", TOGETHER.values(), ids=list(TOGETHER))
def test_episodes_are_carried_on_and_sampled_again(overrides: tuple[str, ...]) -> None:
    """Whatever replies have written is carried with the tokens; an attempt plays episodes of its own."""
    plan = plan_of(None, 2, GAME, *overrides)
    runs = [each for each in plan.schedule.instructions if isinstance(each, Run) and each.operator.has_replies]
    assert {run.attempt for run in runs} == ({0, 1} if plan.batch.attempts > 1 else {None})
    if plan.batch.segments > 1:
        assert set(runs[0].operator.carries) == {*runs[0].operator.writes} and "replied" in runs[0].operator.writes


def test_rewards_of_turns_are_added_to_other_scores() -> None:
    """Those of the turns on the last tokens of these; the weighted score of a model on the last token of all."""
    mask = mask_of("110110", "111000", "000000")
    rewards = torch.tensor([[0, 1, 0, 0, 2, 0], [0, 0, math.nan, 0, 0, 0], [math.nan, 0, 0, 0, 0, 0]])
    columns = {"response_mask": mask, "token_scores.environment": rewards}
    context = CombineContext([slice(0, 3)], Alone(), {})
    alone, _ = weighted_scores(None, batch_of(**columns), context)
    assert alone["scores"].nan_to_num(9).tolist() == [3, 9, 9]
    assert alone["token_scores"].nan_to_num(9).tolist() == rewards.nan_to_num(9).tolist()
    sources = (ModelSource(model="reward", weight=0.5),)
    both, _ = weighted_scores(sources, batch_of(**columns, **{"scores.reward": torch.tensor([4.0, 2.0, 6.0])}), context)
    assert both["scores"].nan_to_num(9).tolist() == [5, 9, 9]
    assert both["token_scores"][0].tolist() == [0, 1, 0, 0, 4, 0]


def ended(outcomes: str, samples: int = 1) -> Batch:
    """Rows of which the ones with an x have failed, by failures of all kinds in turn."""
    kinds = cycle([*EPISODE_FAILURES, "load timeout", "start", "another"])
    states = [EpisodeState.of_failure(next(kinds)) if sign == "x" else "ended" for sign in outcomes]
    codes = [EpisodeState.NUMBERS[state] for state in states]
    mask = mask_of(*["1100"] * len(codes))
    numbers = {name: torch.ones(len(codes), dtype=torch.int32) for name in ("turns", "tool_calls", "failed_tool_calls")}
    context = torch.cat([mask_of(*["11"] * len(codes)), mask_of(*["1110"] * len(codes))], 1)
    codes_column = torch.tensor(codes, dtype=torch.uint8)
    return batch_of(samples, response_mask=mask, attention_mask=context, episode=codes_column, **numbers)


@pytest.mark.parametrize(
    ("outcomes", "most", "before", "last", "after"),
    [
        *(("..xxx...", 3, 0, 4, 3), ("..xx.xx.", 3, 0, None, 0), ("x...x...", 1, 0, 0, 1)),
        *(("xxxx", 100, 7, None, 11), ("xx..", 5, 3, 1, 5), (".xx.", 5, 4, None, 0), ("...x", 5, 4, None, 1)),
    ],
)
@pytest.mark.parametrize("sizes", [(1.0,), (0.5, 0.5), (0.0, 0.75, 0.25)])
def test_failures_in_a_row_stop_the_run(
    outcomes: str, most: int, before: int, last: int | None, after: int, sizes: tuple[float, ...]
) -> None:
    """Those ``before`` the step count. All ranks stop with the same sentence, however many rows each of them has."""
    settings = EnvironmentSpec(path="game.py:Game", max_failures=most)
    batch, ends = ended(outcomes), [int(len(outcomes) * sum(sizes[: index + 1])) for index in range(len(sizes))]

    def work(rank: int, port: Reducer) -> str | None:
        part = batch.select(slice(0 if rank == 0 else ends[rank - 1], ends[rank]))
        try:
            state = {FAILED_IN_A_ROW: float(before)}
            statistics = episodes(settings, part, CombineContext([slice(0, len(part))], port, state, step=7))[1]
        except RunStopped as error:
            return str(error)
        has_failed = part["episode"] >= EpisodeState.NUMBERS["failed"]
        assert statistics["episode_failed"].tolist()[:2] == [len(part), has_failed.sum()]
        assert statistics["reply_length"][0] == (~has_failed).sum()
        return str(statistics[FAILED_IN_A_ROW].tolist())

    found = set(on_replicas(len(sizes), work))
    sentence = (
        f"environment game.py:Game: {after} episodes in a row have failed up to step 7, row {last} "
        f"(environment.max_failures: {most}); the first of each kind is above"
    )
    assert found == {str([1.0, float(after), float(after) ** 2]) if last is None else sentence}


def test_failures_in_a_row_are_passed_to_the_next_step() -> None:
    plan = plan_of(None, 2, GAME)
    (run,) = (each for each in plan.schedule.instructions if isinstance(each, Run) and each.operator.name == "episodes")
    controls = Controllers(plan)
    assert controls.state(run.operator) == {FAILED_IN_A_ROW: 0}
    # two ranks with the same number
    controls.add(run, 0, {FAILED_IN_A_ROW: (2.0, 6.0, 18.0)})
    assert controls.state(run.operator) == {FAILED_IN_A_ROW: 3} == controls.changed["episodes"]


def test_failures_are_counted_by_kind() -> None:
    settings, rows = EnvironmentSpec(path="game.py:Game", max_failures=100), "x" * (len(EPISODE_FAILURES) + 3) + "."
    _, statistics = episodes(settings, ended(rows), CombineContext([slice(0, len(rows))], Alone(), {}, step=0))
    found = {
        name: value * len(rows)
        for name, value in METRICS.evaluate(tuples(statistics)).items()
        if name.startswith("episode_failed_")
    }
    # two further ones of loading, and one of a kind without a metric
    expected = {f"episode_failed_{kind}": 3 if kind == "load" else 1 for kind in EPISODE_FAILURES}
    assert found == pytest.approx(expected)


def tuples(statistics: Moments) -> dict[str, Triple]:
    return {name: (values[0].item(), values[1].item(), values[2].item()) for name, values in statistics.items()}


def test_an_evaluation_goes_on_with_failures() -> None:
    settings = EnvironmentSpec(path="game.py:Game", max_failures=1)
    _, statistics = episodes(settings, ended("xx.."), CombineContext([slice(0, 4)], Alone(), {}, step=-1))
    assert set(statistics) == {"turns", "episode_failed"} and statistics["turns"][0] == 2
