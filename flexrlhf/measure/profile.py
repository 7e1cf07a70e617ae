"""Start the ranks of a profile on this machine and save their measurements."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from flexrlhf.config.spec_file import dump_spec
from flexrlhf.config.user_paths import check_output
from flexrlhf.display.live_display import is_terminal, live_display
from flexrlhf.guideline.costs.measurements import Measurements, are_measurements, read_measurements, write_measurements
from flexrlhf.launch import start as launch
from flexrlhf.measure.profiled_models import length_sample, profiled_models, profiling_spec
from flexrlhf.placement.hosts import Hosts
from flexrlhf.plan.model_checks import check_device, check_packages
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.text import counted


def profile(
    plans: Sequence[Plan],
    command_plans: Sequence[Plan],
    seconds: float,
    path: Path,
    inputs: Sequence[Path] = (),
    network_gb_s: float | None = None,
) -> Measurements:
    """Measure the models of ``plans`` with as many ranks as the cluster's first node has devices, and write ``path``.

    command_plans:  plans of the same command that write models which ``plans`` start from
    seconds:        time for which the calls of each model are repeated
    inputs:         files that the command reads; ``path`` is none of them
    network_gb_s:   of the slowest link between two machines, where there are several

    Raises UserError, RankFailure or Interrupted; no process is left.
    """
    check_output(path, "-o", "profile.json", are_measurements, inputs, makes_directories=True)
    ranks = len(plans[0].cluster.ranks_on_node(0))
    device = launch.choose_device(plans[0].spec.cluster.device, ranks)
    measured_plans = [make_plan(profiling_spec(plan, command_plans, ranks, device)) for plan in plans]
    for plan in measured_plans:
        check_packages(plan.placement)
        check_device(plan.placement, plan.shapes, device)
        # raises UserError where a shape is unknown
        profiled_models(plan)
    with TemporaryDirectory(prefix="flexrlhf-") as directory:
        request, output = Path(directory) / "request.json", Path(directory) / "profile.json"
        lengths = [asdict(length_sample(plan)) for plan in plans]
        runs = [{"spec": dump_spec(plan.spec), **sample} for plan, sample in zip(measured_plans, lengths, strict=True)]
        request.write_text(json.dumps({"runs": runs, "seconds": seconds}))
        with _displayed(Path(directory) / "events.jsonl", ranks):
            launch.start_ranks(["flexrlhf.measure.profile_rank", str(request), str(output)], measured_plans[0], Hosts())
        measurements = read_measurements(output).model_copy(update={"network_gb_s": network_gb_s})
    write_measurements(path, measurements)
    return measurements


@contextmanager
def _displayed(events: Path, ranks: int) -> Iterator[None]:
    """Show on a terminal for how long ``ranks`` ranks have measured, below what they print."""
    if not is_terminal():
        yield
        return
    with live_display(events, f"measuring with {counted(ranks, 'rank')}"):
        yield
