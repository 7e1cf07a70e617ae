"""Candidates that a plan rejects are proposed again without what was rejected, and nothing else is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexrlhf.errors import Alternative, SettingError, UserError
from flexrlhf.guideline.advice.advise import advise
from flexrlhf.guideline.advice.candidates import Candidate, FeasibleCandidate, RejectedCandidate, check
from flexrlhf.guideline.advice.choice import is_full
from flexrlhf.guideline.advice.limits import SpaceLimits
from flexrlhf.guideline.advice.model_options import OptionEnumerator
from flexrlhf.guideline.advice.refinement import refined
from flexrlhf.guideline.advice.refusal import lag_text
from flexrlhf.guideline.advice.request import AdviceOptions
from flexrlhf.guideline.advice.space import GAP, USABLE, make_space
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.search.branch_and_bound import search
from flexrlhf.guideline.search.evaluate import evaluate
from flexrlhf.guideline.search.problem import Choice, Option

GRPO = ("algorithm.name=grpo", "reward={rule: gsm8k}")


def test_a_refused_setting_is_left_out_for_its_part_alone() -> None:
    spec = AdviceOptions(model="qwen2.5-1.5b", gpus=4, response_tokens=8192).spec(None, GRPO)
    space = make_space(spec, AnalyticCosts(), None)
    part = next(each for each in space.problem.parts if each.name == "actor")
    shape = space.problem.shape_of(0, 4)
    options = part.options(shape)
    wide = next(each for each in options if each.settings.cp == 2)
    chosen = tuple(Choice(each.name, 0, 4, wide) for each in space.problem.parts)

    def left(error: SettingError | None) -> tuple[Option, ...]:
        limited = replace(space, limits=SpaceLimits().without(chosen, error)).problem
        return next(each for each in limited.parts if each.name == "actor").options(shape)

    def degrees(error: SettingError) -> set[int]:
        return {each.settings.cp for each in left(error)}

    def one_of(section: str) -> tuple[Alternative]:
        return (Alternative(section, "cp", (1,), is_all=True),)

    refused = SettingError.of("models.actor", "cp", "sliding attention; use 1, or engine x", one_of("models.actor"))
    assert degrees(refused) == {1}
    assert degrees(SettingError.of("models.actor", "cp", "2 does not divide 7 heads; use 1 or 4")) == {1, 4}
    assert left(SettingError.of("models.ref", "cp", "sliding attention; use 1", one_of("models.ref"))) == options
    # no setting is refused: all others of its degrees are left
    others = [each for each in options if each.settings.cp != 2 or each.settings.zero != wide.settings.zero]
    kept = left(None)
    assert all(each in kept for each in others) and wide not in kept and len(kept) < len(options)


def test_a_plan_names_the_setting_that_it_refuses() -> None:
    spec = AdviceOptions(model="qwen2.5-1.5b", gpus=4).spec(None, GRPO)
    space = make_space(spec, AnalyticCosts(), None)
    found = search(space.problem, 2.0, GAP).assignment
    assert found is not None

    def refused(part: str, **changes: object) -> SettingError:
        tried = []
        for each in found:
            settings = each.option.settings.model_copy(update=changes if each.part == part else {})
            tried.append(replace(each, option=replace(each.option, settings=settings)))
        checked = check(Candidate("search", "", space, tuple(tried)))
        assert isinstance(checked, RejectedCandidate) and checked.error is not None
        assert checked.reason.startswith(f"{checked.error.section}.{checked.error.setting}: ")
        return checked.error

    # devices, an engine, and devices of a rollout engine
    ranks, engine, rollout = refused("actor", tp=3), refused("ref", pp=2), refused("actor.rollout", tp=8)
    assert (ranks.section, ranks.setting, ranks.allowed) == ("models.actor", "tp", ())
    assert (engine.section, engine.setting, engine.allowed) == ("models.ref", "pp", (1,))
    assert (rollout.section, rollout.setting) == ("rollout", "tp")


def test_memory_that_a_search_counts_too_low_is_left_out_of_the_next_one() -> None:
    spec = AdviceOptions(model="qwen2.5-1.5b", gpus=4).spec(None, GRPO)
    space = make_space(spec, AnalyticCosts(), None)
    (before,) = space.pool.memory.values()
    limited = replace(space, limits=space.limits.below(1.25))
    (after,) = limited.pool.memory.values()
    assert after < before / 1.25 < after * 1.01
    (kind,) = space.pool.memory
    assert limited.memory_of(kind) == pytest.approx(space.memory_of(kind))


def test_a_lag_is_never_chosen_without_leave() -> None:
    spec = AdviceOptions(model="qwen2.5-1.5b", gpus=4).spec(None, GRPO)
    found = advise(spec, AnalyticCosts(), seconds_limit=0.5)
    lagging = [item for item in found.feasible if item.lag]
    assert lagging and found.best.lag == 0
    sentence = lag_text(make_space(spec, AnalyticCosts(), None), 1)
    alone = replace(found, feasible=tuple(lagging), refusal=sentence)
    with pytest.raises(UserError, match="--max-lag 1 allows it"):
        _ = alone.best
    assert replace(alone, may_lag=True).best is lagging[0]


def test_passes_and_caches_are_refined_between_those_of_the_search() -> None:
    spec = AdviceOptions(model="qwen2.5-3b", gpus=4, gpu_type="RTX4090-24G").spec(None, GRPO)
    space = make_space(spec, AnalyticCosts(), None)
    result = search(space.problem, 2.0, GAP)
    found = refined(space, result.assignment)
    assert evaluate(space.problem, found) < 0.99 * result.seconds
    assert [(each.start, each.size) for each in found] == [(each.start, each.size) for each in result.assignment]
    checked = check(Candidate("search", "", space, found))
    assert isinstance(checked, FeasibleCandidate) and checked.share <= USABLE
    assert checked.seconds == pytest.approx(evaluate(space.problem, found), rel=1e-9)
    assert refined(space, found) == found


def test_memory_stays_free_unless_nothing_else_fits() -> None:
    spec = AdviceOptions(model="qwen2.5-1.5b", gpus=2).spec(None, GRPO)
    found = advise(spec, AnalyticCosts(), seconds_limit=0.5)
    assert found.best.share <= USABLE and not is_full(found.best)
    full = replace(found.best, share=0.99, seconds=found.best.seconds / 2)
    assert replace(found, feasible=(full, *found.feasible)).best is found.best
    assert replace(found, feasible=(full,)).best is full


def test_of_many_devices_placements_that_may_be_the_fastest_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AdviceOptions(model="qwen2.5-1.5b", gpus=4).spec(None, GRPO)
    whole = advise(spec, AnalyticCosts(), seconds_limit=0.5, margin=0.0, max_lag=0)
    monkeypatch.setattr("flexrlhf.guideline.advice.advise.PLANS_SECONDS", 0.0)
    found = advise(spec, AnalyticCosts(), seconds_limit=0.5, margin=0.0, max_lag=0)
    left_out = [float(item.reason.split()[0]) for item in found.rejected if item.is_unplanned]
    assert left_out and len(found.feasible) + len(left_out) >= len(whole.feasible) > len(found.feasible)
    # a search counts two transfers for each use of an offloaded model, and a plan as many or fewer
    assert whole.best.seconds <= found.best.seconds <= min(left_out)


def test_spaces_share_options_whatever_their_schedules() -> None:
    spec, costs = AdviceOptions(model="qwen2.5-1.5b", gpus=4).spec(None, GRPO), AnalyticCosts()
    known: list[OptionEnumerator] = []
    first = make_space(spec, costs, None, known=known)
    lagging = spec.model_copy(update={"schedule": spec.schedule.model_copy(update={"lag": 1})})
    assert make_space(lagging, costs, None, known=known).enumerator is first.enumerator
    longer = spec.model_copy(update={"data": spec.data.model_copy(update={"max_prompt_tokens": 2048})})
    assert make_space(longer, costs, None, known=known).enumerator is not first.enumerator
