"""One rank of a run: walk the schedule and execute every instruction that names this rank."""

from __future__ import annotations

import gc
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from flexrlhf.comm.move import ColumnMover, RowPacking
from flexrlhf.comm.world import RankProgress, World
from flexrlhf.execution.column_files import record_columns
from flexrlhf.execution.controller_states import make_controller_states
from flexrlhf.execution.evaluator import Evaluator
from flexrlhf.execution.external_scores import make_external_scorers
from flexrlhf.execution.loaded_models import LoadedModel, load_models
from flexrlhf.execution.memory_meter import MemoryMeter
from flexrlhf.execution.model_saver import ModelSaver
from flexrlhf.execution.rank_context import RankContext
from flexrlhf.execution.recorder import Recorder
from flexrlhf.execution.run_operator import OperatorContext, OperatorRun, run_operator
from flexrlhf.execution.sampling_settings import step_sampling
from flexrlhf.execution.step_inputs import StepInputs, StepRows
from flexrlhf.execution.weight_syncs import WeightSyncs
from flexrlhf.plan.inputs import RunData, load_tokenizer
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Eval, Instruction, Move, Offload, Reload, Run, Save, Sync
from flexrlhf.strategies.schedule import walk
from flexrlhf.timeline import Span, Timeline


class Trainer:
    """One rank of a run: its loaded models, the rows of its steps, and whatever executes its instructions."""

    def __init__(self, plan: Plan, world: World, data: RunData, directory: Path, meter: MemoryMeter) -> None:
        """Load the models of this rank. ``meter``: counts its memory from here on."""
        self.plan = plan
        self._world = world
        self._meter = meter
        self._progress = RankProgress(world, plan.spec.name)
        self._groups = world.make_groups(plan.groups, plan.spec.timeout_seconds)
        wait, decode = self._progress.wait, load_tokenizer(data.tokenizer).decode
        self._scorers = make_external_scorers(plan.graph, plan.spec, partial(decode, skip_special_tokens=True))
        self._models = load_models(plan, world, self._groups, wait)
        meter.reset_peak()
        sampling = step_sampling(plan, data, partial(decode, skip_special_tokens=True))
        self._operators = OperatorContext(plan.spec, sampling, world.device, self._scorers, decode)
        self._controllers = make_controller_states(plan)
        self._inputs = StepInputs(plan, data, world.rank, world.device)
        self._rows = StepRows(plan, self._inputs, world.device)
        self._mover = ColumnMover(world.rank, RowPacking(plan.batch, plan.lengths, world.device), wait)
        self._recorder = Recorder(plan, world, directory)
        self._context = RankContext(plan, data, directory, world, self._groups, wait, self._models)
        self._syncs = WeightSyncs(self._context)
        self._evaluator = Evaluator(self._context, self._operators, self._recorder)
        self._saver = ModelSaver(self._context, self._recorder)
        self.timeline = Timeline(world.rank, plan.spec.timeline_steps)

    def run(self) -> None:
        """Execute the schedule to its end; all of the loop."""
        for position, step, instruction in walk(self.plan.schedule, self._world.rank, self.plan.spec.steps):
            self._progress.report(position, f"step {step}, {instruction.kind} {instruction.label}")
            # an engine's library waits by itself, so a failed wait is named for the whole instruction
            with self._span(instruction, step) as span, self._progress.deadline(instruction.ranks):
                self._execute(instruction, step, position, span)
            if self._world.rank == 0:
                self._recorder.collect()
        self._finish()

    def close(self) -> None:
        """Free the models, what scores, and the process groups."""
        for model in self._models.values():
            model.engine.close()
        self._models.clear()
        self._scorers.close()
        # models keep groups in cycles of hooks and closures
        gc.collect()
        self._groups.close()

    def _span(self, instruction: Instruction, step: int) -> AbstractContextManager[Span]:
        return self.timeline.span(instruction.kind, instruction.label, step, instruction.chunk)

    def _execute(self, instruction: Instruction, step: int, position: int, span: Span) -> None:
        match instruction:
            case Run():
                self._run(instruction, step, position, span)
            case Move():
                span.bytes_sent = self._move(instruction, step)
            case Sync():
                span.bytes_sent = self._syncs.run(instruction, step)
            case Eval():
                self._evaluator.evaluate(instruction, step, position)
            case Save():
                self._saver.save(instruction, step)
            case Offload():
                self._models[instruction.model].engine.offload()
            case Reload():
                self._models[instruction.model].engine.reload()

    def _run(self, run: Run, step: int, position: int, span: Span) -> None:
        """Run an operator on its rows, once they have arrived; then report its statistics."""
        model, store = self._models[run.model], self._rows.at(step)
        self._count_frozen(model, step)
        work = OperatorRun(run.operator, model, self.plan.batch, run.mini_batches, self._world.rank)
        store.arrive(run.operator.reads, work.rows)
        span.begin()
        time.sleep(self.plan.spec.debug.run_delay_seconds)
        examples = self._inputs.examples(step) if run.operator.kind == "score" else ()
        work = replace(work, examples=examples, state=self._controllers.state(run.operator))
        ahead = [replace(work, mini_batches=later) for later in self.plan.ahead(run)]
        context = replace(self._operators, sampling=replace(self._operators.sampling, step=step))
        moments = run_operator(work, store, context, ahead)
        if run.operator.kind == "train":
            model.version = step + 1
        statistics = self._recorder.report(step, position, model, run.operator.name, moments, _labels(run, model))
        self._controllers.add(run, statistics)
        record_columns(self._context, run, step, work.rows, store)

    def _count_frozen(self, model: LoadedModel, step: int) -> None:
        """Raise the version of a trained model by the batches that it is not to be trained on."""
        if model.placed.trained:
            frozen = min(step, self.plan.graph.first_step(model.placed.role))
            model.version = max(model.version, frozen)

    def _move(self, move: Move, step: int) -> int:
        """Start a move of columns and return the bytes sent; its rows are awaited when they are read."""
        group = self._groups.get("move", move.ranks)
        assert group is not None, "a move joins at least two ranks"
        return self._mover.start(move, self._rows.at(step), group)

    def _finish(self) -> None:
        """Await everything that is under way, and publish the timeline and memory usage."""
        self._rows.finish()
        self._mover.close()
        self._syncs.close()
        usage = {name: asdict(model.engine.memory_usage()) for name, model in self._models.items()}
        self._recorder.finish(self.timeline, usage, self._meter.peak())


def _labels(run: Run, model: LoadedModel) -> dict[str, str]:
    """Return words for the step's row of metrics: the engine that sampled its responses."""
    is_sampled = run.operator.kind == "generate" and not run.operator.is_greedy
    return {"rollout_engine": type(model.engine).__name__} if is_sampled else {}
