"""What the processes of one test run share: files stay whole, and all users of the launches are one process."""

from __future__ import annotations

import pytest


# before xdist reads the groups
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests by file, as fixtures are; those that read the outcomes of common launches are one group."""
    for item in items:
        names = getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("launches" if "launches" in names else item.path.stem))
