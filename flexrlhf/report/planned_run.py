"""Plan of a run from its directory: made again from its config, also where models or data are no longer there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flexrlhf.config.spec import Spec
from flexrlhf.data.hub import cached_snapshot, hub_name
from flexrlhf.errors import UserError
from flexrlhf.plan.models import model_shapes
from flexrlhf.plan.pipeline import ResolvedSpec, plan_on, resolve
from flexrlhf.plan.plan import Plan
from flexrlhf.report.run_contents import RunContents
from flexrlhf.weights.shapes import ModelShape


def plan_of_run(contents: RunContents) -> tuple[Plan | None, tuple[str, ...]]:
    """Return the plan of a run, and sentences on what it lacks; None where its config plans nothing."""
    if contents.spec is None:
        return None, ()
    spec = _with_present_paths(contents.spec, contents.directory)
    try:
        resolved = resolve(spec)
        shapes, missing = _known_shapes(resolved)
        return plan_on(resolved, resolved.place(), shapes), missing
    except UserError as error:
        return None, (f"the plan cannot be made again: {error}",)


def _known_shapes(resolved: ResolvedSpec) -> tuple[dict[str, ModelShape], tuple[str, ...]]:
    """Return the shapes of the models, or none and why."""
    try:
        return model_shapes(resolved.spec, resolved.graph, {}), ()
    except UserError as error:
        return {}, (f"planned memory, weights that move and predictions are left out: {error}",)


def _with_present_paths(spec: Spec, directory: Path) -> Spec:
    """Return ``spec`` with relative paths that lead from where the run was started, and without downloads."""
    start = _start_directory(spec, directory)

    def present(path: str | None) -> str | None:
        return None if path is None else _present(path, start, spec.snapshots)

    models = {role: model and model.model_copy(update={"path": present(model.path)}) for role, model in spec.models}
    update = {
        "models": spec.models.model_copy(update=models),
        "data": spec.data.model_copy(update={"tokenizer": present(spec.data.tokenizer)}),
        "snapshots": {},
    }
    return spec.model_copy(update=update)


def _start_directory(spec: Spec, directory: Path) -> Path | None:
    """Return the directory in which the run was started, by where its own one lies; None for one that was moved."""
    runs, parent = Path(spec.runs), directory.absolute().parent
    if runs.is_absolute() or not runs.parts or parent.parts[-len(runs.parts) :] != runs.parts:
        return None
    return Path(*parent.parts[: -len(runs.parts)])


def _present(path: str, start: Path | None, snapshots: Mapping[str, str]) -> str:
    """Return a path as it is found here; a name on the Hub that is not in the cache as a path that leads nowhere."""
    if Path(path).exists():
        return path
    if start is not None and (start / path).exists():
        return str(start / path)
    name = hub_name(snapshots.get(path, path))
    if name is None:
        return path
    cached = cached_snapshot(name, "model")
    return f"./{path}" if cached is None else str(cached)
