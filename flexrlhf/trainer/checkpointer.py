"""Checkpoints of a run: every rank copies its pieces at the end of a step, and a thread writes them meanwhile.

A rank publishes the sizes and checksums of its files in the job's store. When those of all ranks and the metrics of all
steps before are there, rank 0 writes the manifest and renames the directory, which is what makes a checkpoint whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from flexrlhf.comm.mailbox import Mailbox
from flexrlhf.errors import RunStopped
from flexrlhf.runs.durable_files import FileEntry
from flexrlhf.runs.fingerprints import Fingerprints
from flexrlhf.runs.manifest import Progress
from flexrlhf.runs.tensor_files import Piece
from flexrlhf.trainer.checkpoint_pieces import (
    HostCopies,
    columns_in_flight,
    follower_pieces,
    trained_pieces,
)
from flexrlhf.trainer.controllers import Controllers
from flexrlhf.trainer.execution import Execution, Observer
from flexrlhf.trainer.rank_context import RankContext
from flexrlhf.trainer.recorder import Recorder
from flexrlhf.trainer.results_writer import ResultsWriter
from flexrlhf.trainer.row_ledger import RowLedger, merged_account
from flexrlhf.trainer.step_rows import StepRows

Value = TypeVar("Value")


@dataclass(frozen=True)
class RunState:
    """Parts of a trainer that a checkpoint is made of.

    context:      models and plan of this rank.
    rows:         rows of the steps under way.
    controllers:  values that one step passes on to the next.
    ledger:       outcomes of rows so far.
    recorder:     reports for steps in flight, and the best metrics.
    """

    context: RankContext
    rows: StepRows
    controllers: Controllers
    ledger: RowLedger
    recorder: Recorder


@dataclass(frozen=True)
class _Writing:
    """A checkpoint that this rank writes: the step after it, its files once they are written, and the progress."""

    next_step: int
    files: Future[dict[str, FileEntry]]
    progress: Progress


class Checkpointer(Observer):
    """Writes the checkpoints of this rank; on rank 0 it also completes them."""

    def __init__(self, state: RunState, results: ResultsWriter) -> None:
        """``results``: rows of metrics, which a checkpoint waits for."""
        self._state, self._results = state, results
        self._context = state.context
        spec, world = self._context.plan.spec, self._context.world
        self._mailbox = Mailbox(world, f"checkpoints/{spec.name}", spec.timeout_seconds)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._copies = HostCopies(state.context.world.device, state.context.copies)
        self._writing: _Writing | None = None
        self._pending: list[int] = []
        # as they are now: a file may be edited while the run reads it no more
        self._inputs = (
            self._thread.submit(Fingerprints([self._context.plan]).fixed) if self._context.rank == 0 else None
        )
        self.last_step: int | None = None
        """The step after the newest checkpoint that this rank has begun to write."""

    @cached_property
    def _digest(self) -> str:
        return self._context.data.digest

    def write(self, next_step: int) -> None:
        """Copy the state that ``next_step`` depends on, and start to write it. Waits for the checkpoint before.

        Raises RunStopped where that one could not be written.
        """
        self._publish_written(wait=True)
        self.last_step = next_step
        state, context = self._state, self._context
        pieces = self._copied_pieces()
        rows = self._copies.begin("rows", columns_in_flight(context.plan, context.rank, state.rows, next_step))
        self._copies.wait()
        write = context.files.write_checkpoint
        job = self._thread.submit(write, self._directory(next_step), context.rank, pieces, rows, self._configs())
        context.flight.append_spans(context.files, next_step)
        self._writing = _Writing(next_step, job, self._progress(next_step))
        if context.rank == 0:
            self._pending.append(next_step)

    def end(self, _: Execution) -> None:
        """Publish and complete the files that are written by now."""
        self.poll()

    def poll(self) -> None:
        """Publish this rank's files once they are written; on rank 0 complete the checkpoints that all have written."""
        self._publish_written(wait=False)
        while self._pending and self._results.next_step >= self._pending[0]:
            if not self._mailbox.has(list(self._keys(self._pending[0]))):
                return
            self._complete(self._pending.pop(0))

    def finish(self) -> None:
        """Wait until this rank's files, and on rank 0 the checkpoints of all ranks, are whole."""
        self._publish_written(wait=True)
        for next_step in self._pending:
            self._mailbox.wait(self._keys(next_step), f"the checkpoint before step {next_step}")
        self.poll()
        self._thread.shutdown()

    def _copied_pieces(self) -> dict[str, dict[str, Piece]]:
        """Return the pieces that this rank writes, by model, which are being copied to host memory."""
        context = self._context
        files: dict[str, dict[str, Piece]] = {}
        for name in context.plan.placement.checkpointed(context.plan.spec):
            model = context.models.get(name)
            if model is not None:
                if model.placed.trained:
                    files[name] = self._copies.begin_pieces(name, trained_pieces(model, context.rank))
                else:
                    with model.on_device():
                        files[name] = self._copies.begin_pieces(name, follower_pieces(model, context.rank))
        return {name: pieces for name, pieces in files.items() if pieces}

    def _configs(self) -> dict[str, str]:
        """Return the Hugging Face configs of trained models, by file; one rank writes each."""
        mine = [model for model in self._context.models.values() if model.placed.trained]
        return {
            f"{model.placed.name}.config.json": model.engine.config.to_json_string()
            for model in mine
            if self._context.rank == model.placed.ranks[0]
        }

    def _progress(self, next_step: int) -> Progress:
        state, models = self._state, self._context.models
        trained = {name: model for name, model in models.items() if model.placed.trained}
        return Progress(
            next_step=next_step,
            generated=state.rows.steps_in_flight(next_step).stop,
            calls={} if state.rows.called is None else state.rows.called.messages_from(next_step),
            prompts=state.rows.given_from(next_step) if self._context.rank == 0 else {},
            numbers={name: model.engine.training_state().numbers for name, model in trained.items()},
            versions={name: model.version for name, model in models.items()},
            controllers=state.controllers.changed,
            begun=state.controllers.begun_from(next_step),
            best=state.recorder.best,
            reports={str(step): of for step, of in state.recorder.reports_from(next_step).items()},
            rows=state.ledger.counts(next_step),
            carried=state.ledger.carried,
        )

    def _publish_written(self, wait: bool) -> None:
        writing = self._writing
        if writing is None or not (wait or writing.files.done()):
            return
        try:
            files = writing.files.result()
        except OSError as error:
            where = self._directory(writing.next_step)
            raise RunStopped(f"checkpoint {where}: cannot be written ({error.strerror or error})") from None
        self._writing = None
        report = {"files": {name: asdict(entry) for name, entry in files.items()}, "progress": asdict(writing.progress)}
        self._mailbox.publish(f"{writing.next_step}/{self._context.rank}", report)

    def _keys(self, next_step: int) -> dict[str, str]:
        """Return the keys under which ranks publish their files, and who publishes each."""
        return {f"{next_step}/{rank}": f"rank {rank}" for rank in range(self._context.plan.placement.num_ranks)}

    def _complete(self, next_step: int) -> None:
        """Write the manifest from the reports of all ranks, and rename the directory."""
        context, keys = self._context, list(self._keys(next_step))
        reports = [self._mailbox.read(key) for key in keys]
        self._mailbox.clear(keys)
        files = {name: FileEntry(**entry) for report in reports for name, entry in report["files"].items()}
        progress = merged_progress([Progress(**report["progress"]) for report in reports])
        inputs = self._inputs.result() if self._inputs is not None else {}
        try:
            context.directory.checkpoint(next_step).complete(context.plan.spec, self._digest, files, progress, inputs)
        except OSError as error:
            where = self._directory(next_step)
            raise RunStopped(f"checkpoint {where}: cannot be written ({error.strerror or error})") from None
        context.directory.drop_checkpoints(context.plan.spec.checkpoint.keep_last, next_step)

    def _directory(self, next_step: int) -> Path:
        return self._context.directory.checkpoint(next_step).unfinished


def merged_progress(reports: Sequence[Progress]) -> Progress:
    """Return the progress of a run from its ranks' reports, which agree if they overlap."""
    return Progress(
        next_step=reports[0].next_step,
        generated=reports[0].generated,
        numbers=_united(report.numbers for report in reports),
        versions=_united(report.versions for report in reports),
        controllers=_united(report.controllers for report in reports),
        best=_united(report.best for report in reports),
        begun=_united_by_step(report.begun for report in reports),
        reports=_united_by_step(report.reports for report in reports),
        rows=merged_account(report.rows for report in reports),
        carried=_united(report.carried for report in reports),
        calls=reports[0].calls,
        prompts=reports[0].prompts,
    )


def _united_by_step(reports: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for report in reports:
        for step, operators in report.items():
            found.setdefault(step, {}).update(operators)
    return found


def _united(mappings: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    return {key: value for mapping in mappings for key, value in mapping.items()}
