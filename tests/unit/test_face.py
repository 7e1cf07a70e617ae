"""The face: satellites use nothing else of the core, the core uses none of them, and every name is there."""

from __future__ import annotations

from importlib import import_module

import pytest

from benchmarks.source_figures import SourceFile, read_package
from flexrlhf import api
from flexrlhf.api import engine, homes

FACES = {"flexrlhf.api": api, "flexrlhf.api.engine": engine}
FACE = ("api", "api.engine")
PLANNED = ("measure.", "report.")
"""Satellites that measure for the planner and show what it predicts."""
WITHOUT_PLANS = ("guideline.costs.", "guideline.search.")
"""Parts that are made from no plan."""


@pytest.fixture(scope="module")
def files() -> dict[str, SourceFile]:
    return read_package()


def test_satellites_use_the_face_and_themselves(files: dict[str, SourceFile]) -> None:
    found = [
        f"{file.name} uses {source}"
        for file in files.values()
        for source, _ in file.uses
        if file.satellite and source in files and source not in FACE and files[source].satellite != file.satellite
        if not (file.satellite in PLANNED and files[source].satellite == "guideline.")
    ]
    assert found == []


def test_the_core_uses_no_satellite(files: dict[str, SourceFile]) -> None:
    found = [
        f"{file.name} uses {source}"
        for file in files.values()
        for source, _ in file.uses
        if not file.satellite and source in files and files[source].satellite
    ]
    assert found == []


def test_costs_and_search_are_made_from_no_plan(files: dict[str, SourceFile]) -> None:
    rooms = {name: home.split(".")[1] for name, home in homes(str(api.__file__)).items()}
    found = [
        f"{file.name} uses {name}"
        for file in files.values()
        for source, name in file.uses
        if file.name.startswith(WITHOUT_PLANS) and source == "api" and rooms.get(name) in ("plan", "strategies")
    ]
    assert found == []


@pytest.mark.parametrize("name", FACES)
def test_every_name_of_the_face_is_there_and_used(name: str, files: dict[str, SourceFile]) -> None:
    face = FACES[name]
    names = homes(str(face.__file__))
    satellites = [file for file in files.values() if file.satellite]
    used = {each for file in satellites for source, each in file.uses if f"flexrlhf.{source}" == name}
    assert set(names) - FOR_OTHERS == used - FOR_OTHERS
    for each, home in names.items():
        assert getattr(face, each) is getattr(import_module(home), each)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = face.Nothing


FOR_OTHERS = {
    *("GrpoSpec", "PolicySpec", "TORCH", "LocalLauncher", "Engine", "StrictModel", "Turn", "RunLogger", "Launcher"),
}
"""Names for parts of other packages alone."""
