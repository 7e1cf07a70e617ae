"""Beginning of each run of a command, before ranks start: anew, from a checkpoint, or not at all if it is finished."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import realpath
from pathlib import Path
from typing import Annotated

from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import load_spec
from flexrlhf.errors import UserError, shown
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.checkpoint_directory import CheckpointDirectory
from flexrlhf.runs.fingerprints import Fingerprints
from flexrlhf.runs.manifest import Manifest, Progress
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.text import counted
from flexrlhf.weights.stored_model import StoredModel

AUTO = "auto"
MODEL_CONFIG = "config.json"
FREE = ("eval.",)
"""Settings that only evaluations depend on may change from one checkpoint to the next."""
DRAINED = ("schedule.lag", "rollout.segment_tokens", "rollout.max_segments")
"""Settings of which rows in flight may have other values than the run that trains on them, if that is accepted."""


@dataclass(frozen=True)
class RunOrder:
    """A run that the ranks execute.

    spec:        its settings.
    candidates:  checkpoints that it may go on from, the newest first.
    continues:   whether it goes on in its directory.
    program:     socket of a program that calls its operators, on rank 0's machine; empty: it executes its plan.
    """

    spec: Annotated[
        Spec,
        # each rank reads it, and YAML takes thirty times as long
        PlainSerializer(lambda spec: json.dumps(spec.written())),
        PlainValidator(lambda text: Spec.parse(json.loads(text))),
    ]
    candidates: tuple[Path, ...] = ()
    continues: bool = False
    program: str = ""

    @staticmethod
    def to_json(orders: Sequence[RunOrder]) -> str:
        """Return the JSON of orders, by which a command starts its ranks."""
        return _ORDERS.dump_json(orders).decode()

    @staticmethod
    def from_json(text: str) -> Sequence[RunOrder]:
        """Return the orders of a command."""
        return _ORDERS.validate_json(text)


_ORDERS = TypeAdapter(Sequence[RunOrder])


@dataclass(frozen=True)
class Resumption:
    """Beginning of a run of a command.

    plan:        of the run.
    candidates:  checkpoints, the first one that is undamaged is taken; none: it begins with its first step.
    finished:    whether all of it is done, so that it is skipped.
    continues:   whether it goes on in its directory, next to the files that are there.
    notes:       sentences on its inputs: changes that are accepted, or that they cannot be compared.
    program:     socket of a program that calls its operators; empty: it executes its plan.
    """

    plan: Plan
    candidates: tuple[Path, ...] = ()
    finished: bool = False
    continues: bool = False
    notes: tuple[str, ...] = ()
    program: str = ""

    @classmethod
    def ordered(cls, plan: Plan, order: RunOrder) -> Resumption:
        """Return how a run begins that another machine orders."""
        return cls(plan, order.candidates, continues=order.continues, program=order.program)

    @classmethod
    def kept(cls, plans: Sequence[Plan]) -> list[Resumption]:
        """Return how each run begins: finished ones are kept, except the last one and all behind a changed one."""
        found: list[Resumption] = []
        for plan in plans:
            earlier_train = {path for each in found if not each.finished for path in each.plan.outputs}
            is_kept = plan is not plans[-1] and not _starts_from(plan, earlier_train) and is_kept_run(plan)
            found.append(cls(plan, finished=is_kept, continues=is_kept))
        return found


def resume_runs(plans: tuple[Plan, ...], resume: str | None, accepts: bool = False) -> list[Resumption]:
    """Return how each run begins.

    resume:   ``auto``, a run's or a checkpoint's directory, or None: anew.
    accepts:  whether a run goes on with other types, models and code than before.

    Raises UserError for a checkpoint whose numbers another setting or input would change.
    """
    if resume is None:
        return [Resumption(plan) for plan in plans]
    if resume == AUTO:
        return [_automatic(plan, accepts) for plan in plans]
    return [*(_automatic(plan, accepts) for plan in plans[:-1]), _from_path(plans[-1], Path(resume), accepts)]


def _automatic(plan: Plan, accepts: bool) -> Resumption:
    """Return how a run begins by the contents of its directory."""
    directory = RunDirectory(plan.spec.directory)
    found = directory.checkpoints
    if directory.has_finished(plan.spec.steps):
        _check_settings(plan, load_spec(directory.config), directory, FREE)
        return Resumption(plan, finished=True, continues=True)
    if not found:
        return Resumption(plan)
    return _checked(plan, found, continues=True, accepts=accepts)


def _from_path(plan: Plan, path: Path, accepts: bool) -> Resumption:
    """Return how a run goes on from a checkpoint, or from the newest one of a run."""
    found = CheckpointDirectory.found_at(path)
    if not found:
        raise UserError(f"--resume {path}: {_without_checkpoint(path)}")
    continues = Path(realpath(path)).is_relative_to(realpath(plan.spec.directory))
    return _checked(plan, found, continues, accepts)


def _without_checkpoint(path: Path) -> str:
    """Return why nothing goes on from ``path``, and the advice."""
    if not path.is_dir():
        return "no such directory; give auto, a run's directory or a checkpoint's"
    config = RunDirectory(path).config
    if not config.is_file():
        return "no checkpoint in it; give a run's directory or checkpoints/step-<number>"
    every = load_spec(config).checkpoint.every
    why = "was not set in it" if every is None else f"is {every} steps, and it ended before the first one"
    return f"the run has no checkpoint: checkpoint.every {why}; begin it anew without --resume"


def _checked(plan: Plan, every: list[CheckpointDirectory], continues: bool, accepts: bool) -> Resumption:
    """Return how a run goes on from the first of ``every`` that has the rows of the steps that follow."""
    found = _with_rows(plan, every)
    manifest, notes = _first_readable(found), list[str]()
    if manifest is not None:
        before = manifest.settings
        _check_settings(plan, before, found[0], (*FREE, *DRAINED))
        _check_copies(plan, before, found[0])
        _check_steps(plan, before, manifest.progress.next_step, found[0])
        _check_drain(plan, before, found[0])
        changes = [*_drain(plan, before, manifest.progress), *_changes(plan, before, manifest.inputs)]
        notes = [f"{plan.spec.name}: {change}" for change in changes]
        if notes and not accepts and manifest.inputs is not None:
            more = f" ({len(notes) - 1} more changes)" if len(notes) > 1 else ""
            raise UserError(
                f"--resume {found[0]}: {notes[0]}, which would change the numbers of the run{more}; put it back, start "
                f"a new run under another name, or accept it with --accept-changes"
            )
    if len(found) < len(every):
        notes.append(
            f"{plan.spec.name}: goes on from {found[0]}, the latest checkpoint with rows for the steps that follow: "
            f"the run that wrote {every[0].path.name} ended with it and generated none for more"
        )
    if continues and manifest is not None:
        notes += _missing_rows(plan, manifest.progress.next_step)
    return Resumption(plan, tuple(each.path for each in found), continues=continues, notes=tuple(notes))


def _missing_rows(plan: Plan, next_step: int) -> Iterator[str]:
    """Yield a sentence on rows of metrics before a checkpoint that nothing writes again.

    A run that began in the middle of another has none before its first row.
    """
    file = RunDirectory(plan.spec.directory).metrics
    found = file.below("step", next_step)
    missing = sorted(set(range(min(found, default=0), next_step)) - found)
    if missing:
        steps = f"{counted(len(missing), 'step')} from {missing[0]} on"
        yield f"{plan.spec.name}: {file.path} has no rows of {steps}, before the checkpoint"


def _with_rows(plan: Plan, every: list[CheckpointDirectory]) -> list[CheckpointDirectory]:
    """Return the checkpoints without the newest ones that ``_lacks_rows`` names; all if no other can be read."""
    unread = []
    for number, path in enumerate(every):
        manifest = _first_readable([path])
        if manifest is None:
            unread.append(path)
        elif not _lacks_rows(plan, manifest.settings, manifest.progress.next_step):
            return [*unread, *every[number:]]
    return every


def _changes(plan: Plan, before: Spec, inputs: Mapping[str, str] | None) -> list[str]:
    """Return what differs from the run that wrote a checkpoint: types, files of models, a user's code.

    ``inputs``: digests in the checkpoint.
    """
    changes = [f"{key} was {was} and is {now}" for key, was, now in before.type_changes(plan.spec)]
    if inputs is None:
        return [*changes, "its checkpoint is of an older version, so that models and code are not compared"]
    found = Fingerprints([plan]).fixed()
    for name in {**inputs, **found}:
        if name not in found or name not in inputs:
            changes.append(f"{name} is {'missing' if name in inputs else 'new'}")
        elif inputs[name] != found[name]:
            changes.append(f"{name} has changed")
    return changes


def _check_copies(plan: Plan, before: Spec, where: CheckpointDirectory) -> None:
    """Raise UserError for a rollout engine whose own weights are in the checkpoint, with adapters in another form."""
    was, now = before.rollout.adapters, plan.spec.rollout.adapters
    if was != now and any(model.rollout is not None for model in plan.checkpointed):
        raise UserError(
            f"--resume {where}: rollout.adapters was {was} and is {now} now, and with schedule.lag or sync.every the "
            f"checkpoint has the engine's weights as they were stored; use {was}"
        )


def _first_readable(found: list[CheckpointDirectory]) -> Manifest | None:
    """Return the newest manifest that is not damaged; the ranks report damaged ones."""
    for path in found:
        try:
            return path.manifest
        except UserError:
            continue
    return None


def _drain(plan: Plan, before: Spec, progress: Progress) -> Iterator[str]:
    """Yield how rows in flight are trained on under another lag or other segments than they were generated with."""
    was, now = before.schedule.lag, plan.spec.schedule.lag
    if was != now:
        number = progress.first_generated(before) - progress.next_step
        yield (
            f"schedule.lag was {was} and is {now}: {counted(number, 'batch')} in flight, trained on as generated, then "
            f"lag {now} holds; no row is lost"
        )
    old, new = ((spec.num_segments, spec.rollout.segment_tokens) for spec in (before, plan.spec))
    if old != new:
        carried = sum(map(len, progress.carried.values()))
        yield (
            f"rollout.segment_tokens was {shown(old[1])} and is {shown(new[1])}: {counted(carried, 'row')} under way, "
            f"continued by segments of the new length; none is lost"
        )


def _check_drain(plan: Plan, before: Spec, where: CheckpointDirectory) -> None:
    """Raise UserError for another lag or other segments that rows in flight have no place under."""
    was, now = before.schedule.lag, plan.spec.schedule.lag
    if was != now and not (was and now):
        raise UserError(
            f"--resume {where}: schedule.lag was {was} and is {now} now, and without a lag other operators compute; "
            f"use {was}, or {'another lag from 1 on' if was else 'start a new run under another name'}"
        )
    limit = None if plan.spec.algorithm.importance is None else plan.spec.algorithm.importance.max_staleness
    if limit is not None and plan.spec.most_stale <= limit < before.most_stale:
        raise UserError(
            f"--resume {where}: tokens in flight may be {before.most_stale} batches old, and under schedule.lag {now} "
            f"nothing filters by algorithm.importance.max_staleness {limit}; use lag "
            f"{now + limit + 1 - plan.spec.most_stale}"
        )
    if plan.spec.num_segments < before.num_segments:
        tokens = plan.spec.rollout.segment_tokens or plan.spec.data.max_response_tokens
        raise UserError(
            f"--resume {where}: rows may be carried over {before.num_segments} steps, and now over "
            f"{plan.spec.num_segments}; use rollout.segment_tokens: {tokens} with rollout.max_segments: "
            f"{before.num_segments}, under which they end"
        )


def _lacks_rows(plan: Plan, before: Spec, next_step: int) -> bool:
    """Return whether the run that wrote a checkpoint ended without generating rows that this one trains on."""
    return min(next_step + before.schedule.lag, plan.spec.steps) > before.steps


def _check_steps(plan: Plan, before: Spec, next_step: int, where: CheckpointDirectory) -> None:
    """Raise UserError for fewer steps than there are, and for more where none generated their rows. ``before``:
    settings of the run that wrote the checkpoint."""
    if _lacks_rows(plan, before, next_step):
        raise UserError(
            f"--resume {where}: schedule.lag {before.schedule.lag} trains on rows that are generated steps before, and "
            f"the run of {before.steps} steps generated none for a later one; go on from the checkpoint of an earlier "
            f"step, {_earlier(plan, where)}"
        )
    if next_step > plan.spec.steps:
        raise UserError(
            f"--resume {where}: it comes after {next_step} steps, and this run has {plan.spec.steps}; "
            f"use steps: {next_step} or more"
        )


def _earlier(plan: Plan, where: CheckpointDirectory) -> str:
    """Return the clause with the checkpoint in the same folder that a run of more steps can go on from."""
    every = CheckpointDirectory.all_of(where.path.parent.parent)
    found = _with_rows(plan, every)
    if len(found) < len(every):
        return f"such as {found[0]}"
    return "of which there is none here, or begin it anew without --resume"


def _check_settings(plan: Plan, before: Spec, where: CheckpointDirectory | RunDirectory, free: tuple[str, ...]) -> None:
    """Raise UserError for a setting, none of those that begin with ``free``, whose change would change numbers."""
    changed = [each for each in before.differences(plan.spec) if not each.key.startswith(free)]
    if changed:
        each, more = changed[0], f" ({len(changed) - 1} more settings differ)" if len(changed) > 1 else ""
        raise UserError(
            f"--resume {where}: {each.key} was {shown(each.first)} and is {shown(each.second)} now, which would change "
            f"the numbers of the run{more}; use {shown(each.first)}, or start a new run under another name"
        )


def is_kept_run(plan: Plan) -> bool:
    """Return whether the run in the directory of ``plan`` has finished with every setting as in ``plan``.

    A run that cannot be read is not kept: it trains anew, and its directory is renamed.
    """
    directory = RunDirectory(plan.spec.directory)
    try:
        status = directory.status
        if status is None or status.state != "finished" or status.steps != plan.spec.steps:
            return False
        written = load_spec(directory.config)
        return written.dump() == plan.spec.dump() and all(map(_is_model, plan.outputs))
    except UserError:
        return False


def _starts_from(plan: Plan, outputs: set[Path]) -> bool:
    """Return whether a model of ``plan`` is one of ``outputs``, which an earlier run is about to write."""
    paths = (model.path for _, model in plan.spec.models if model is not None)
    return any(path is not None and Path(realpath(path)) in outputs for path in paths)


def _is_model(directory: Path) -> bool:
    """Return whether a directory has a model. Raises UserError for one without some of its files."""
    return (directory / MODEL_CONFIG).is_file() and bool(StoredModel(str(directory), "a saved model").files)
