"""One rank of a run: walk the schedule and execute every instruction that names this rank.

A round of the schedule is cut where training begins: ``generate_experience`` executes the part before,
``train_rlhf`` the rest, the two calls of FlexRLHF's trainer (Fig. 5). What overlaps in a schedule (chunks, a lag,
syncs) overlaps all the same, since the order of the list does not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flexrlhf.config.code_loading import load_function
from flexrlhf.operators.columns import Column
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
from flexrlhf.strategies.schedule import ANEW
from flexrlhf.trainer.checkpointer import Checkpointer, RunState
from flexrlhf.trainer.controllers import Controllers
from flexrlhf.trainer.evaluator import Evaluator
from flexrlhf.trainer.execution import Execution, OperatorRun
from flexrlhf.trainer.memory_meter import naming_exhaustion
from flexrlhf.trainer.model_saver import ModelSaver
from flexrlhf.trainer.observers import make_observers
from flexrlhf.trainer.open_steps import CalledSteps
from flexrlhf.trainer.operator_context import make_operator_context
from flexrlhf.trainer.rank_context import RankContext
from flexrlhf.trainer.restoration import StartingPoint, restore
from flexrlhf.trainer.results_writer import open_results
from flexrlhf.trainer.row_ledger import RowLedger
from flexrlhf.trainer.run_operator import run_operator
from flexrlhf.trainer.step_rows import StepRows
from flexrlhf.trainer.training_loop import Experiences, LoopCalls, PromptBatch, cut_round, is_training
from flexrlhf.trainer.weight_syncs import WeightSyncs
from flexrlhf.user_code.planning_calls import bounded_here


class Trainer:
    """One rank of a run: it executes instructions, which its observers record, measure and display.

    rows:         of the steps under way.
    results:      of all ranks.
    ledger:       outcomes of rows.
    controllers:  values that one step passes to the next.
    """

    def __init__(self, rank: RankContext, start: StartingPoint | None = None, steps: CalledSteps | None = None) -> None:
        """Go on from the checkpoint ``start``; None: begin with the first step.

        ``steps``: of a program, whose instructions are not known before they are executed; None: as in the plan.
        """
        self.plan, self._rank, self._models, self._copies = rank.plan, rank, rank.models, rank.copies
        self._start = ANEW if start is None else start.run_start(rank.plan)
        self._calls, self._is_planned = LoopCalls(), steps is None
        self._operators = make_operator_context(rank)
        self.rows, self._syncs = StepRows(rank, self._start, steps), WeightSyncs(rank, self._start)
        self.controllers = Controllers(rank.plan)
        self.results = open_results(rank, self._start, steps)
        self._saver = ModelSaver(rank, self.results.recorder)
        self.ledger = RowLedger(rank.plan, rank.rank, self._start.generated, steps)
        state = RunState(rank, self.rows, self.controllers, self.ledger, self.results.recorder)
        self._checkpointer = Checkpointer(state, self.results)
        self._observers = make_observers(rank, self.controllers, self.ledger, self.results, self._checkpointer)
        self._evaluator = Evaluator(rank, self._operators, self._observers)
        if start is not None:
            restore(state, self._syncs, start)
            rank.start_bytes["resume"] = rank.meter.peak()

    def run(self) -> int:
        """Execute the schedule to its end, or until a request to stop, by the training loop of the settings.

        Returns the first step that is not trained on. Raises UserError where a loop leaves batches out.
        """
        loop = self.plan.spec.algorithm.loop
        if loop is None:
            for batch in self.batches():
                self.train_rlhf(self.generate_experience(batch))
        else:
            with bounded_here(f"algorithm.loop: {loop}"):
                train = load_function(loop)
            train(self)
        next_step = self._calls.end_loop(loop)
        self.finish(next_step)
        return next_step

    def batches(self) -> Iterator[PromptBatch]:
        """Yield the batches of the run, in order, until a request to stop. Each is generated for and trained on once.

        Raises UserError where one was not.
        """
        steps, lag = self.plan.spec.steps, self.plan.schedule.lag
        for turn in self.plan.schedule.rounds(steps, self._start):
            self._calls.begin(turn)
            is_generated = self._start.generated <= turn < steps
            yield PromptBatch(turn, tuple(self.rows.taken(turn)) if is_generated else ())
            self._calls.end(turn)
            if self._rank.ends_after(turn):
                self._calls.next_step = min(steps, max(self._start.next_step, turn + 1 - lag))
                return
        self._calls.next_step = steps

    def generate_experience(self, batch: PromptBatch) -> Experiences:
        """Execute a round of the schedule up to its first training: generation, scores, advantages.

        Returns the rows that this rank trains on next; with a lag of k they are of the batch k before.
        """
        self._calls.take(batch.turn, "generate_experience")
        self.begin_round(batch.turn)
        before, after = cut_round(self.plan, self._rank.rank, batch.turn, self._start)
        for execution in before:
            self.execute(execution)
        due = [(each.step, each.instruction) for each in after if is_training(each.instruction)]
        works = [self.work(run, step) for step, run in due]
        return Experiences(batch.turn, self.rows.at(due[0][0]) if due else None, works)

    def train_rlhf(self, experiences: Experiences) -> None:
        """Execute the rest of the round, from its first training on."""
        self._calls.take(experiences.turn, "train_rlhf")
        _, after = cut_round(self.plan, self._rank.rank, experiences.turn, self._start)
        for execution in after:
            self.execute(execution)

    def begin_round(self, turn: int) -> None:
        """Begin to receive the weights that are due in a round."""
        self._copies.join()
        self._syncs.begin_round(turn)

    def execute(self, execution: Execution) -> None:
        """Execute one instruction under its deadline; observers receive its beginning and its end."""
        self._await_copies(execution.instruction)
        for observer in self._observers:
            observer.begin(execution)
        # an engine's library waits by itself, so a failed wait is named for the whole instruction
        instruction = execution.instruction
        where = f"step {execution.step}, {instruction.kind} {instruction.label} on rank {self._rank.rank}"
        with self._rank.flight.progress.deadline(instruction.ranks), naming_exhaustion(where):
            self._execute(execution)
            for observer in self._observers:
                observer.end(execution)

    def _await_copies(self, instruction: Instruction) -> None:
        """Have ``instruction`` wait for the models that it uses, and for the memory of those that left."""
        if not isinstance(instruction, Offload | Reload):
            self._copies.join()
            for name in instruction.touches:
                self._copies.arrive(name)

    def _execute(self, execution: Execution) -> None:
        instruction, step = execution.instruction, execution.step
        self._syncs.store_for(instruction)
        match instruction:
            case Run():
                self._run(instruction, execution)
            case Move():
                execution.span.bytes_sent = self.rows.move(instruction, step)
            case Sync():
                execution.span.bytes_sent = self._syncs.run(instruction, step)
            case Eval():
                self._evaluator.evaluate(instruction, execution)
            case Save():
                self._saver.save(instruction, step)
            case Checkpoint():
                self._checkpointer.write(step + 1)
            case Offload(model=name):
                with self._copies.overlapping(name):
                    self._models[name].offload(not instruction.is_refilled, not instruction.is_unchanged)
            case Reload(model=name):
                with self._copies.overlapping(name):
                    self._models[name].reload()
            case Release():
                self._models[instruction.model].release()

    def _run(self, run: Run, execution: Execution) -> None:
        """Run an operator on its rows, once they have arrived."""
        step, model = execution.step, self._models[run.model]
        if model.placed.trained:
            # batches that it is not to be trained on count as well
            model.version = max(model.version, min(step, self.plan.graph.first_step(model.placed.role)))
        work = execution.work = self.work(run, step)
        store = execution.store = self.rows.at(step)
        store.arrive(run.operator.reads, work.rows)
        if run.operator.reads_data and Column.POSITION in run.operator.reads:
            work = execution.work = replace(work, examples=self.rows.take_examples(work, step))
        for observer in self._observers:
            observer.arrived(execution)
        # a program may come to no later chunk, or train before it
        later_chunks = self.plan.ahead(run) if self._is_planned else []
        ahead = [replace(work, mini_batches=later) for later in later_chunks]
        before = self.rows.carried_to(step) if run.operator.carries else None
        execution.moments = run_operator(work, store, self._operators.at(step), ahead, before)
        if run.operator.kind in ("train", "step"):
            model.version = step + 1
        for observer in self._observers:
            observer.computed(execution)

    def work(self, run: Run, step: int) -> OperatorRun:
        """Return the operator of ``run`` on this rank."""
        operator, examples = run.operator, self.rows.examples(step) if run.operator.reads_texts else ()
        state = self.controllers.state(operator, step)
        model, rank = self._models[run.model], self._rank.rank
        shape = self.plan.batch
        return OperatorRun(
            *(operator, model, run.layout, shape, run.mini_batches, rank, examples, state),
            *(run.attempt, run.tokens),
        )

    def finish(self, next_step: int, saves: bool = True) -> None:
        """Await everything that is under way, and publish the timeline and memory usage.

        A run that ends before its last step writes a checkpoint, unless it has just written that one.

        saves:  whether the models are those of the end of a step, so that there can be a checkpoint.
        """
        rank = self._rank
        rank.show("writing what is left", next_step)
        copies = self._copies.finish()
        self._syncs.store_all()
        is_written = self._checkpointer.last_step == next_step
        if saves and self._start.next_step < next_step < self.plan.spec.steps and not is_written:
            self._checkpointer.write(next_step)
        if rank.rank == 0:
            self.results.write_until(next_step)
        self._checkpointer.finish()
        self.rows.finish()
        self._syncs.close()
        usage = {name: model.memory_usage() for name, model in self._models.items()}
        peaks = rank.meter.peak(), rank.meter.most_in_use
        seconds = {"seconds": copies.copying, "waited": copies.waiting}
        self.results.finish(rank.flight.timeline, usage, peaks, rank.start_bytes, self.rows.most_bytes, seconds)
