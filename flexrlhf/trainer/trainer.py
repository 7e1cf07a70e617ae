"""One rank of a run: walk the schedule and execute every instruction that names this rank.

A round of the schedule is cut where training begins: ``generate_experience`` executes what comes before,
``train_rlhf`` the rest, the two calls of FlexRLHF's trainer (Fig. 5). What overlaps in a schedule (chunks, a lag,
syncs) overlaps all the same, since the order of the list does not change.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial

import torch

from flexrlhf.comm.move import ColumnMover, RowPacking
from flexrlhf.comm.rows import RowStore
from flexrlhf.comm.world import World
from flexrlhf.config.code_loading import load_function
from flexrlhf.display.events import Doing, Note, Send
from flexrlhf.errors import UserError
from flexrlhf.loggers.run_loggers import RunLoggers, open_loggers
from flexrlhf.operators.graph import reads_texts
from flexrlhf.plan.memory_text import connected_memory
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.run_data import RunData
from flexrlhf.plan.run_tokenizer import load_tokenizer
from flexrlhf.runs.recorded_columns import replay_responses
from flexrlhf.runs.run_files import RunFiles
from flexrlhf.strategies.instructions import (
    Checkpoint,
    Eval,
    Instruction,
    Move,
    Offload,
    Release,
    Reload,
    Run,
    Save,
    Sync,
)
from flexrlhf.strategies.schedule import rounds, walk_round
from flexrlhf.timeline import Span
from flexrlhf.trainer.checkpointer import Checkpointer, RunState
from flexrlhf.trainer.column_files import record_arrivals, record_columns
from flexrlhf.trainer.controller_states import make_controller_states
from flexrlhf.trainer.evaluator import Evaluator
from flexrlhf.trainer.experiences import Experiences, PromptBatch, first_training, is_training
from flexrlhf.trainer.flight_record import FlightRecord
from flexrlhf.trainer.loaded_models import LoadedModel, load_models
from flexrlhf.trainer.memory_meter import MemoryMeter
from flexrlhf.trainer.model_saver import ModelSaver
from flexrlhf.trainer.operator_guards import make_finite_guard, make_sampled_check
from flexrlhf.trainer.rank_context import RankContext
from flexrlhf.trainer.recorder import Outlets, Recorder
from flexrlhf.trainer.restoration import StartingPoint, restore
from flexrlhf.trainer.run_operator import OperatorContext, OperatorRun, run_operator
from flexrlhf.trainer.samples import Part, collect_samples
from flexrlhf.trainer.sampling_settings import step_sampling
from flexrlhf.trainer.step_inputs import StepInputs, StepRows
from flexrlhf.trainer.stop_requests import StopRequests
from flexrlhf.trainer.text_operators import make_external_scorers, make_text_encoders
from flexrlhf.trainer.weight_syncs import WeightSyncs
from flexrlhf.trainer.work_time import WorkTime


def train_all(trainer: Trainer) -> None:
    """Train on every batch: the loop of a run without one of its own."""
    for batch in trainer.batches():
        trainer.train_rlhf(trainer.generate_experience(batch))


class Trainer:
    """One rank of a run: its loaded models, the rows of its steps, and whatever executes its instructions."""

    def __init__(
        self,
        plan: Plan,
        world: World,
        data: RunData,
        meter: MemoryMeter,
        stops: StopRequests,
        flight: FlightRecord,
        files: RunFiles,
        send: Send,
        start: StartingPoint | None = None,
    ) -> None:
        """Load the models of this rank.

        meter:   counts its memory from here on.
        stops:   requests to end the run before its last step.
        flight:  record of its instructions.
        files:   of the run.
        send:    to whatever displays what this rank does.
        start:   checkpoint that it goes on from; None: it begins with its first step.
        """
        self.plan = plan
        self._world = world
        self._meter = meter
        self._flight, self._progress = flight, flight.progress
        meter.reset_peak()
        self._groups = world.make_groups(plan.groups, plan.spec.timeout_seconds)
        if world.rank == 0 and world.device.type != "cpu":
            send(Note(plan.spec.name, connected_memory(plan, world.rank, *torch.accelerator.get_memory_info())))
        wait, decode = self._progress.wait, load_tokenizer(data.tokenizer, data.is_trusted).decode
        self._scorers = make_external_scorers(plan.graph, plan.spec, partial(decode, skip_special_tokens=True))
        self._models = load_models(plan, world, self._groups, wait, data.pad_token_id)
        self._start_bytes = {"load": meter.peak()}
        meter.reset_peak()
        sampling = step_sampling(plan, data, partial(decode, skip_special_tokens=True))
        guards = make_finite_guard(plan.spec, world), make_sampled_check(plan, decode)
        encoders = make_text_encoders(plan, self._models)
        self._operators = OperatorContext(plan.spec, sampling, world.device, self._scorers, decode, *guards, encoders)
        self._controllers = make_controller_states(plan)
        self._inputs = StepInputs(plan, data, world.rank, world.device)
        self._rows = StepRows(plan, self._inputs, world.device)
        self._mover = ColumnMover(world.rank, RowPacking(plan.batch, plan.lengths, world.device), wait)
        self._first_step = 0 if start is None else start.next_step
        self._next_step: int | None = None
        self._first_training = first_training(plan)
        self._pending: list[tuple[int, str]] = []
        directory = plan.spec.directory
        self._send, self._work = send, WorkTime(plan.spec.name, world, flight.timeline)
        if plan.spec.loggers:
            send(Doing(plan.spec.name, "opening the loggers"))
        loggers = open_loggers(plan.spec, directory) if world.rank == 0 else RunLoggers(directory)
        outlets = Outlets(send, loggers, self._work)
        self._recorder = Recorder(plan, world, directory, files, outlets, self._first_step)
        self._context = RankContext(plan, data, directory, files, world, self._groups, wait, self._models)
        self._syncs = WeightSyncs(self._context)
        self._evaluator = Evaluator(self._context, self._operators, self._recorder)
        self._saver = ModelSaver(self._context, self._recorder)
        self._stops = stops
        state = RunState(self._context, self._rows, self._controllers, self._recorder, flight.timeline)
        self._checkpointer = Checkpointer(state)
        if start is not None:
            restore(state, self._syncs, start)
            self._start_bytes["resume"] = meter.peak()

    def run(self) -> int:
        """Execute the schedule to its end, or until a request to stop, by the training loop of the settings.

        Returns the first step that is not trained on. Raises UserError where a loop leaves batches out.
        """
        loop = self.plan.spec.algorithm.loop
        if loop is None:
            train_all(self)
        else:
            load_function(loop)(self)
        if self._next_step is None:
            raise UserError(f"algorithm.loop: {loop or 'the loop'} has ended before its batches have; train on each")
        self._finish(self._next_step)
        return self._next_step

    def batches(self) -> Iterator[PromptBatch]:
        """Yield the batches of the run, in order, until a request to stop. Each is generated for and trained on once.

        Raises UserError where one was not.
        """
        plan = self.plan
        for turn in rounds(plan.schedule, plan.spec.steps, self._first_step):
            examples = self._inputs.examples(turn) if turn < plan.spec.steps else ()
            self._pending = [(turn, part) for part in ("generate_experience", "train_rlhf")]
            yield PromptBatch(turn, tuple(examples))
            if self._pending:
                raise UserError(f"algorithm.loop: no {self._pending[0][1]} of batch {turn}; call both for each batch")
            if self._is_last(turn):
                self._next_step = min(plan.spec.steps, max(0, turn + 1 - plan.schedule.lag))
                return
        self._next_step = plan.spec.steps

    def generate_experience(self, batch: PromptBatch) -> Experiences:
        """Execute a round of the schedule up to its first training: generation, scores, advantages.

        Returns what this rank trains on next; with a lag it is of the batch before.
        """
        self._take(batch.turn, "generate_experience")
        self._syncs.begin_round(batch.turn)
        for position, step, instruction in self._round(batch.turn):
            if position % len(self.plan.schedule.instructions) < self._first_training:
                self._walk(position, step, instruction)
        return self._experiences(batch.turn)

    def train_rlhf(self, experiences: Experiences) -> None:
        """Execute the rest of the round: training, and what follows it."""
        turn = experiences.turn
        self._take(turn, "train_rlhf")
        for position, step, instruction in self._round(turn):
            if position % len(self.plan.schedule.instructions) >= self._first_training:
                self._walk(position, step, instruction)

    def _round(self, turn: int) -> Iterator[tuple[int, int, Instruction]]:
        return walk_round(self.plan.schedule, self._world.rank, self.plan.spec.steps, turn)

    def _walk(self, position: int, step: int, instruction: Instruction) -> None:
        """Execute one instruction, with its deadline and its record."""
        self._progress.report(position, f"step {step}, {instruction.kind} {instruction.label}")
        self._send(_doing(self.plan.spec.name, instruction, step))
        # an engine's library waits by itself, so a failed wait is named for the whole instruction
        with self._progress.deadline(instruction.ranks):
            with self._flight.instruction(instruction, step) as span:
                self._execute(instruction, step, position, span)
                span.peak_bytes = self._meter.lap()
                if isinstance(instruction, Offload | Reload):
                    self._meter.leave_out(sum(each.engine.memory_usage().unmapped for each in self._models.values()))
            self._work.add(instruction, span)
            self._record()

    def _take(self, turn: int, part: str) -> None:
        """Refuse a part of a round that is not the next."""
        if self._pending[:1] != [(turn, part)]:
            due = f"{self._pending[0][1]} of batch {self._pending[0][0]}" if self._pending else "the next batch"
            raise UserError(f"algorithm.loop: {part} of batch {turn}, where {due} is due")
        self._pending.pop(0)

    def _experiences(self, turn: int) -> Experiences:
        due = [(step, each) for _, step, each in self._round(turn) if isinstance(each, Run) and is_training(each)]
        if not due:
            return Experiences(turn, None, (), ())
        rows = [row for _, run in due for row in self._operator_run(run).rows]
        store = self._rows.at(due[0][0])
        return Experiences(turn, store, rows, [name for _, run in due for name in run.operator.reads])

    def _operator_run(self, run: Run) -> OperatorRun:
        return OperatorRun(run.operator, self._models[run.model], self.plan.batch, run.mini_batches, self._world.rank)

    def _record(self) -> None:
        """Write what has been published of metrics and checkpoints, without waiting."""
        if self._world.rank == 0:
            self._recorder.collect()
        self._checkpointer.poll()

    def _is_last(self, turn: int) -> bool:
        """Return whether the run ends after this round of the list, by a request to stop."""
        spec = self.plan.spec
        if not spec.checkpoint.on_signal:
            return False
        moment = f"{spec.name}/{turn}"
        with self._progress.deadline(tuple(range(self._world.size))):
            if self._models:
                return self._stops.decide(moment)
            # a rank without models would decide all rounds before the others begin
            return self._stops.follow(moment, spec.timeout_seconds * len(self.plan.schedule.instructions))

    def close(self) -> None:
        """Free the models, what scores, and the process groups."""
        for model in self._models.values():
            model.engine.close()
        self._models.clear()
        self._scorers.close()
        # models keep groups in cycles of hooks and closures
        gc.collect()
        self._groups.close()

    def _execute(self, instruction: Instruction, step: int, position: int, span: Span) -> None:
        self._syncs.store_for(instruction)
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
            case Checkpoint():
                self._checkpointer.write(step + 1)
            case Offload():
                self._models[instruction.model].offload(keeps=not instruction.is_refilled)
            case Reload():
                self._models[instruction.model].reload()
            case Release():
                self._models[instruction.model].release()

    def _run(self, run: Run, step: int, position: int, span: Span) -> None:
        """Run an operator on its rows, once they have arrived; then report its statistics."""
        model, store = self._models[run.model], self._rows.at(step)
        self._count_frozen(model, step)
        work = self._operator_run(run)
        store.arrive(run.operator.reads, work.rows)
        record_arrivals(self._context, run, step, work.rows, store)
        self._flight.timeline.begin(span)
        time.sleep(self.plan.spec.debug.run_delay_seconds)
        examples = self._inputs.examples(step) if reads_texts(run.operator) else ()
        work = replace(work, examples=examples, state=self._controllers.state(run.operator))
        ahead = [replace(work, mini_batches=later) for later in self.plan.ahead(run)]
        context = replace(self._operators, sampling=replace(self._operators.sampling, step=step))
        moments = run_operator(work, store, context, ahead)
        if run.operator.kind == "generate" and self.plan.spec.debug.replay is not None:
            replay_responses(self.plan.spec.debug.replay, run.operator, step, work.rows, store)
        if run.operator.kind == "train":
            model.version = step + 1
        labels, samples = _labels(run, model), self._samples(step, work, store)
        statistics = self._recorder.report(step, position, model, run.operator.name, moments, labels, samples=samples)
        self._controllers.add(run, statistics)
        record_columns(self._context, run, step, work.rows, store)

    def _samples(self, step: int, work: OperatorRun, store: RowStore) -> list[Part]:
        """Return parts of the samples of a step in which some are kept."""
        spec = self.plan.spec
        if step % spec.samples.every and step != spec.steps - 1:
            return []
        return collect_samples(work, store, "training", spec.samples.count, self._operators.decode)

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

    def _finish(self, next_step: int) -> None:
        """Await everything that is under way, and publish the timeline and memory usage.

        A run that ends before its last step writes a checkpoint, unless it has just written that one.
        """
        self._send(Doing(self.plan.spec.name, "writing what is left", next_step))
        self._syncs.store_all()
        if 0 < next_step < self.plan.spec.steps and self._checkpointer.last_step != next_step:
            self._checkpointer.write(next_step)
        if self._world.rank == 0:
            self._recorder.write_until(next_step)
        self._checkpointer.finish()
        self._rows.finish()
        self._mover.close()
        self._syncs.close()
        usage = {name: asdict(model.memory_usage()) for name, model in self._models.items()}
        self._recorder.finish(self._flight.timeline, usage, self._meter.peak(), self._start_bytes)


VERBS = {"eval": "evaluating", "save": "saving", "checkpoint": "writing a checkpoint of"}
"""What a person reads of instructions that few steps have."""


def _doing(run: str, instruction: Instruction, step: int) -> Doing:
    """Return what a rank does with ``instruction``, in words."""
    verb = VERBS.get(instruction.kind)
    kind = "" if isinstance(instruction, Run) else f"{verb or instruction.kind} "
    return Doing(run, f"{kind}{instruction.label}", step, rare=verb is not None)


def _labels(run: Run, model: LoadedModel) -> dict[str, str]:
    """Return words for the step's row of metrics: the engine that sampled its responses, by its name in the YAML."""
    is_sampled = run.operator.kind == "generate" and not run.operator.is_greedy
    return {"rollout_engine": model.placed.engine} if is_sampled else {}
