"""Fixtures of the tests that start ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from cases import Case, make_assets
from launcher import Launches


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of runs that share a launch share a process of pytest-xdist, and with it the references of their runs."""
    for item in items:
        has_group = item.get_closest_marker("xdist_group") is not None
        if "launches" in getattr(item, "fixturenames", ()) and not has_group:
            item.add_marker(pytest.mark.xdist_group(_group(cases_of([item]))))


def _group(cases: Sequence[Case]) -> str:
    if any(case.has_rollout_engine for case in cases):
        return "vllm"
    return "four ranks" if any(case.ranks == 4 for case in cases) else "few ranks"


def cases_of(items: Sequence[pytest.Item]) -> list[Case]:
    calls = [item.callspec for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    return [value for call in calls for value in call.params.values() if isinstance(value, Case)]


@pytest.fixture(scope="session")
def launches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """Outcomes of exactly the cases that selected tests need."""
    # a model this small is slower on several threads
    torch.set_num_threads(1)
    return Launches(make_assets(tmp_path_factory.mktemp("equality")), cases_of(request.session.items))
