"""Runs of the quick start that need not train again: finished, with the same config, and their models are there."""

from __future__ import annotations

from os.path import realpath
from pathlib import Path

from flexrlhf.config.spec_file import dump_spec, load_spec
from flexrlhf.errors import UserError
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.resumption import Resumption
from flexrlhf.runs.run_directory import read_status
from flexrlhf.weights.model_files import weight_files

CONFIG, MODEL_CONFIG = "config.yaml", "config.json"


def keep_runs(plans: tuple[Plan, ...]) -> list[Resumption]:
    """Return how the runs begin, of which the last one and all that follow a changed one train anew."""
    found: list[Resumption] = []
    for plan in plans:
        earlier_train = {path for each in found if not each.finished for path in each.plan.outputs}
        is_kept = plan is not plans[-1] and not _starts_from(plan, earlier_train) and is_kept_run(plan)
        found.append(Resumption(plan, finished=is_kept, continues=is_kept))
    return found


def is_kept_run(plan: Plan) -> bool:
    """Return whether the run in the directory of ``plan`` has finished with every setting as in ``plan``.

    A run that cannot be read is not kept: it trains anew, and its directory is renamed.
    """
    directory = plan.spec.directory
    try:
        status = read_status(directory)
        if status is None or status.state != "finished" or status.steps != plan.spec.steps:
            return False
        written = load_spec(directory / CONFIG)
        return dump_spec(written) == dump_spec(plan.spec) and all(map(_is_model, plan.outputs))
    except UserError:
        return False


def _starts_from(plan: Plan, outputs: set[Path]) -> bool:
    """Return whether a model of ``plan`` is one of ``outputs``, which an earlier run is about to write."""
    paths = (model.path for _, model in plan.spec.models if model is not None)
    return any(path is not None and Path(realpath(path)) in outputs for path in paths)


def _is_model(directory: Path) -> bool:
    """Return whether a directory has a model. Raises UserError for one without some of its files."""
    return (directory / MODEL_CONFIG).is_file() and bool(weight_files("a saved model", directory))
