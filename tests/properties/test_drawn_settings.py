"""Random settings: the search has an option on a mesh exactly if a plan with these settings there is not refused."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from drawn_settings import Raw, draw_run

from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.guideline.advice.space import make_space
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.plan.pipeline import make_plan

SAMPLE, ALL = 150, 2000
SEED = 60


@pytest.mark.parametrize(
    "count", [SAMPLE, pytest.param(ALL, marks=[pytest.mark.full, pytest.mark.timeout(900)])], ids=str
)
def test_a_plan_and_the_search_refuse_the_same_settings(count: int) -> None:
    rng, allowed, differences = Random(SEED), 0, []
    for _ in range(count):
        raw = draw_run(rng)
        of_plan, of_search = plan_refusal(raw), search_refusal(raw)
        allowed += not of_plan
        if bool(of_plan) != bool(of_search):
            differences.append((of_plan, of_search, raw))
    assert not differences, (len(differences), *differences[:3])
    assert count / 5 < allowed < count / 2


def plan_refusal(raw: Raw) -> str:
    """Why a plan is refused, whatever memory it needs; empty: it is not."""
    try:
        make_plan(Spec.parse(raw))
    except UserError as error:
        return str(error)
    return ""


def search_refusal(raw: Raw) -> str:
    """Why the search has no option for one of the models on the devices that the vector gives it."""
    spec, has_shadows = Spec.parse(raw), raw["placement"][0] < 1
    try:
        space = make_space(spec.model_copy(update={"placement": None}), AnalyticCosts(), None)
    except UserError as error:
        return str(error)
    if has_shadows and not space.may_have_shadows:
        return "shadows"
    space = replace(space, has_shadows=has_shadows)
    problem, total = space.problem, space.pool.num_devices
    shape = problem.shape_of(0, total // 2 if has_shadows else total)
    return next((part.name for part in problem.parts if not part.options(shape)), "")
