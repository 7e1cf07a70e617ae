"""The generator of the emulator's specs, made importable, and one directory of small inputs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "emulate"))


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with valid configs, data, models and a checkpoint; transformers is loaded when it is there."""
    from outcomes import Case, outcome
    from small_inputs import CONFIGS, write_inputs

    directory, before = tmp_path_factory.mktemp("small") / "inputs", Path.cwd()
    directory.mkdir()
    os.chdir(directory)
    try:
        write_inputs(directory)
        for name in CONFIGS:
            ended = outcome(Case(("run", "--dry-run", f"{name}.yaml"), "nothing"))
            assert ended.problem is None and ended.exit_code == (2 if name == "broken" else 0), (name, ended)
    finally:
        os.chdir(before)
    return directory
