"""Fixtures of the tests that start ranks."""

from __future__ import annotations

import pytest
import torch
from cases import Assets, Case, make_assets
from launcher import Launches


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    """Models and data of the cases."""
    # a model this small is slower on several threads
    torch.set_num_threads(1)
    return make_assets(tmp_path_factory.mktemp("equality"))


@pytest.fixture(scope="session")
def launches(request: pytest.FixtureRequest, assets: Assets) -> Launches:
    """Outcomes of exactly the cases that selected tests need."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    needed = [value for item in items for value in item.callspec.params.values() if isinstance(value, Case)]
    return Launches(assets, needed)
