"""A run that goes on under another placement by its own decision has the results of one that never changed it."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import Case, make_assets
from commands import start
from comparison import deviations
from launcher import Outcome

from flexrlhf.config.output_settings import DebugSpec
from flexrlhf.config.placement_settings import PlacementEntry, PlacementMap
from flexrlhf.config.spec_file import load_spec
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.runs.run_directory import RunDirectory

STEPS = 9


def test_a_run_goes_on_under_the_faster_placement_with_the_same_results(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    case = Case("two", "co-located", 2)
    assets = make_assets(tmp_path_factory.mktemp("replan"))
    spec = assets.spec(case)
    roles = [role for role, model in spec.models if model is not None]
    first = spec.model_copy(
        update={
            "name": "replanned",
            "runs": str(tmp_path / "runs"),
            "steps": STEPS,
            # the other rank has nothing to do; a decision takes a second, in which such a run would end
            "placement": PlacementMap(models={role: PlacementEntry(ranks=(0,)) for role in roles}),
            "debug": DebugSpec(record_columns=True, run_delay_seconds=0.05),
        }
    )
    (tmp_path / "replanned.yaml").write_text(first.dump())
    process = start(["run", "replanned.yaml", "--replan", "every=3,restart=0"], tmp_path)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out[-3000:]
    directory = first.directory
    (switch, *_) = [each for each in RunDirectory(directory).replans.read() if each["switches"]]
    assert ": switch" in out and switch["before"].endswith("on rank 0"), switch
    assert switch["predicted_after"] < switch["predicted"] and 2 <= switch["step"] < STEPS - 1
    last = load_spec(directory / "config.yaml")
    assert last.placement != first.placement and RunDirectory(directory).status.state == "finished"  # type: ignore[union-attr]
    assert [row["step"] for row in RunDirectory(directory).metrics.read()] == [*range(STEPS)]
    wrong = next((each for each in deviations(Outcome(case, make_plan(last))) if not each.size <= each.limit), None)
    assert wrong is None, wrong
