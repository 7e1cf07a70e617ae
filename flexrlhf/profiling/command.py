"""Start the ranks of a profile on this machine and keep what they found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from flexrlhf.config.output_path import check_output
from flexrlhf.config.spec_file import dump_spec
from flexrlhf.engines.capabilities import check_device, check_packages
from flexrlhf.execution import launch
from flexrlhf.guideline.costs.measurements import Measurements, read_measurements, write_measurements
from flexrlhf.placement.hosts import Hosts
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.profiling.subjects import rehearsed, subjects, text_sample


def profile(plans: Sequence[Plan], earlier: Sequence[Plan], seconds: float, path: Path) -> Measurements:
    """Measure the models of ``plans`` with as many ranks on this machine as its first node has, and write ``path``.

    ``earlier``: plans of the same command that write models which ``plans`` start from. ``seconds``: for which the
    calls of each model are repeated. Raises UserError, RankFailure or Interrupted; no process is left.
    """
    check_output(path, "-o", "profile.json", makes_directories=True)
    ranks = len(plans[0].cluster.ranks_on_node(0))
    device = launch.choose_device(plans[0].spec.cluster.device, ranks)
    made = [make_plan(rehearsed(plan, earlier, ranks, device)) for plan in plans]
    for plan in made:
        check_packages(plan.placement)
        check_device(plan.placement, plan.shapes, device)
        subjects(plan)
    with TemporaryDirectory(prefix="flexrlhf-") as directory:
        request, found = Path(directory) / "request.json", Path(directory) / "profile.json"
        samples = [asdict(text_sample(plan)) for plan in plans]
        runs = [{"spec": dump_spec(plan.spec), **sample} for plan, sample in zip(made, samples, strict=True)]
        request.write_text(json.dumps({"runs": runs, "seconds": seconds}))
        launch.start_ranks(["flexrlhf.profiling.rank", str(request), str(found)], made[0], Hosts())
        measured = read_measurements(found)
    write_measurements(path, measured)
    return measured
