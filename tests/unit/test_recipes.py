"""Settings that a YAML leaves out: what ``docs/measurements.md`` says of them, by the cheapest rows of its tables."""

from __future__ import annotations

import pytest

from benchmarks.recipes import RECIPES, RUNS, Recipe, Run, chosen, fits, recipe_plan, step_seconds
from flexrlhf.config.spec import Spec
from flexrlhf.guideline.advice.advise import advise
from flexrlhf.guideline.costs.analytic import AnalyticCosts

MOST = 1.1
"""Seconds of a step over those of the settings that it is compared with."""


def runs(*titles: str) -> list[Run]:
    return [next(run for run in RUNS if run.title == title) for title in titles]


def recipes(*titles: str) -> list[Recipe]:
    return [next(recipe for recipe in RECIPES if recipe.run.title == title) for title in titles]


@pytest.mark.parametrize("run", runs("SFT 7B", "DPO 32B, LoRA", "GRPO 1.5B", "PPO 1.5B"), ids=lambda run: run.title)
def test_what_is_left_out_is_as_fast_as_what_advise_finds(run: Run) -> None:
    found, advice = chosen(run), advise(Spec.parse(run.sections, run.title), AnalyticCosts(), explains=False)
    assert fits(found.plan)
    assert step_seconds(found.plan) <= MOST * advice.comparable[0].seconds


@pytest.mark.parametrize(
    "recipe", recipes("SFT 4B, LoRA", "DPO 7B", "GRPO 7B, LoRA", "PPO 0.5B"), ids=lambda recipe: recipe.run.title
)
def test_what_is_left_out_is_no_slower_than_a_recipe(recipe: Recipe) -> None:
    theirs, ours = recipe_plan(recipe), chosen(recipe.run).plan
    assert fits(theirs) and fits(ours)
    assert (ours.spec.algorithm, ours.batch, ours.lengths) == (theirs.spec.algorithm, theirs.batch, theirs.lengths)
    assert step_seconds(ours) <= MOST * step_seconds(theirs)


def test_yamls_have_at_most_eight_lines_and_recipes_a_source() -> None:
    assert all(len(run.sections) <= 8 for run in (*RUNS, *(recipe.run for recipe in RECIPES)))
    assert len({(recipe.source, recipe.file) for recipe in RECIPES}) == len(RECIPES)


def test_an_optimizer_in_host_memory_fits_where_the_engine_has_it() -> None:
    """With DeepSpeed, in bfloat16 as soon as a ZeRO stage is chosen."""
    for run in runs("SFT 1.5B", "SFT 32B"):
        plan = chosen(run).plan
        assert fits(plan) and plan.model("actor").offload_optimizer and plan.model("actor").dtype == "bfloat16"
