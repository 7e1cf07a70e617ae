"""The default cases of the equality suite represent the whole product."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import (
    COMPUTE,
    DEFAULT,
    NOT_COMPARED,
    ROLES,
    ROLLOUTS,
    SHAPES,
    SWITCHED,
    Case,
    algorithm_of,
    every_case,
    make_assets,
)
from covering import choices, covering, pairs

from flexrlhf.plan.pipeline import make_plan

IN_FULL_ALONE = {
    # rounded weights have other tolerances (test_precision.py); further layouts of operators
    *("six-rounded", "six-apart", "classes-six", "span"),
    # on four ranks as "pairs" on two; device classes as in "shares"
    *("quarter", "classes"),
    *("operators-lanes", "operators-stages", "operators-apart", "operators-resharded"),
    *("real-7b-heuristic", "real-70b-heuristic", "real-70b-searched"),
    *("deepspeed-0-tp", "deepspeed-3-tp", "uncrossed"),
    *("ep", "ep-3", "ep-tp", "ep-recomputed", *(f"experts-deepspeed-{stage}" for stage in range(4))),
    *("cp-3", "cp-4", "cp-tp-3", "cp-ring-2", "cp-ring-4", "megatron-cp"),
    *("vllm-pp", "vllm-tp-pp", "vllm-narrow", "vllm-awake", "torch-awake", "vllm-engine"),
}
"""Shapes, engines and rollouts of `make test-all`."""


def test_every_pair_of_choices_is_a_default_case() -> None:
    assert sorted(pairs(every_case()).keys() - pairs(DEFAULT).keys()) == []


def test_every_choice_is_a_default_case() -> None:
    found = {name for case in DEFAULT for name in (case.shape, case.compute, case.rollout)}
    assert sorted({*SHAPES, *COMPUTE, *ROLLOUTS} - found - IN_FULL_ALONE) == []
    assert {algorithm_of(case.setting) for case in DEFAULT} == set(ROLES)
    # all switches are thrown in one case alone
    apart = {case.setting for case in DEFAULT if case != SWITCHED} & set(NOT_COMPARED)
    assert not IN_FULL_ALONE & found and not apart


def test_four_ranks_are_an_exception() -> None:
    assert sum(case.ranks == 4 for case in DEFAULT) <= 15 and sum(case.has_vllm for case in DEFAULT) <= 5


def test_a_missing_pair_is_noticed() -> None:
    without = [case for case in DEFAULT if choices(case)["lag"] == "lag 0"]
    assert (("lag", "lag 1"), ("weights", "adapters")) in pairs(every_case()).keys() - pairs(without).keys()
    assert pairs([Case("adapters", "lag", 2)])[("lag", "lag 1"), ("weights", "adapters")] == 1


@pytest.mark.full
def test_few_cases_have_every_triple() -> None:
    """`make test-all` ends in hours."""
    others = [case for case in every_case() if case not in DEFAULT]
    chosen = covering(others, DEFAULT)
    assert len(chosen) < 650 and covering(others, [*DEFAULT, *chosen]) == []
    assert {case.setting for case in chosen} | {case.setting for case in DEFAULT} >= {case.setting for case in others}


@pytest.mark.full
def test_every_case_has_a_plan(tmp_path: Path) -> None:
    """One that has none would end the launch of all others."""
    assets = make_assets(tmp_path)
    for case in every_case():
        make_plan(assets.spec(case))
