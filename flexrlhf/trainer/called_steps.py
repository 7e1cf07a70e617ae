"""One rank of a session: the calls of a program become instructions, which the trainer executes.

Every rank reads every call and derives the same instructions from it, so all ranks have one list, as with a schedule.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
from safetensors.torch import save
from torch import tensor

from flexrlhf.data.examples import Example
from flexrlhf.metrics import METRICS, Triple
from flexrlhf.operators.columns import Column
from flexrlhf.placement.groups import Group
from flexrlhf.runs.fingerprints import FunctionFiles
from flexrlhf.runs.recorded_columns import RecordedColumns
from flexrlhf.strategies.calls import OperatorCall
from flexrlhf.strategies.instructions import Checkpoint, Instruction, Move, Run
from flexrlhf.trainer.call_feed import CallFeed, CallMessage
from flexrlhf.trainer.execution import Execution
from flexrlhf.trainer.open_rows import carried_columns
from flexrlhf.trainer.open_steps import CalledSteps
from flexrlhf.trainer.rank_context import RankContext
from flexrlhf.trainer.recorder import make_report
from flexrlhf.trainer.trainer import Trainer


class CalledTrainer:
    """Executor of the calls of a program on this rank."""

    def __init__(self, trainer: Trainer, rank: RankContext, steps: CalledSteps, feed: CallFeed) -> None:
        """``steps``: with those in flight, which the program is sent with the step that it begins with."""
        self._trainer, self._rank, self._steps, self._feed = trainer, rank, steps, feed
        self._plan = rank.plan
        # values of the controllers before the newest step, and whether it has been called since a step has ended
        self._states, self._is_called = dict(trainer.controllers.states), False
        # first step without what stands before the calls of training
        self._next_opened = steps.next_step
        if rank.rank == 0:
            # of a program that was killed in the middle of a step
            RecordedColumns(rank.directory.path).remove(steps.begun)
            in_flight = {"next_step": steps.next_step, "calls": steps.messages_from(0)}
            feed.reply([json.dumps(in_flight).encode()])

    def run(self) -> int:
        """Execute calls until the program ends, or a request to stop; return the first step that it has not ended."""
        while (message := self._feed.next())["do"] != "close":
            match message["do"]:
                case "begin":
                    self._begin(message["step"], message["examples"])
                case "call":
                    self._call(message)
                case "column":
                    self._send_column(message)
                case "statistics":
                    self._send_statistics(message["step"], message["call"])
                case "end":
                    self._end(message)
                    if self._rank.ends_after(self._steps.next_step - 1):
                        break
        next_step, in_flight = self._steps.next_step, self._steps.in_flight(self._steps.next_step)
        is_between = not self._steps.open or (in_flight and not self._is_called)
        # weights in the middle of a step are those of no checkpoint
        saves = is_between or self._drop()
        self._trainer.finish(next_step, saves=saves)
        return next_step

    def _begin(self, step: int, prompts: Sequence[object] | None) -> None:
        """Begin a step, or go on with one in flight. ``prompts``: examples of the program's own, as JSON has them.

        Weights that a sync brings are received when it is executed, not from now on: the program may not come to it.
        """
        if step < self._steps.begun:
            self._take_prompts(step, prompts)
            self._open_training()
            return
        for of_step, move in self._steps.begin():
            self._execute(move, of_step)
        self._states = dict(self._trainer.controllers.states)
        self._take_prompts(step, prompts)
        for instruction in self._around(step, before=True):
            if not instruction.lag:
                self._execute(instruction, step)
        self._open_training()

    def _open_training(self) -> None:
        """Execute what stands before the calls that a schedule makes a lag behind, once the steps before have ended."""
        step = self._steps.next_step
        if self._next_opened == step < self._steps.begun:
            self._next_opened = step + 1
            for instruction in self._around(step, before=True):
                if instruction.lag:
                    self._execute(instruction, step)

    def _drop(self) -> bool:
        """Leave no trace of the calls of steps that the program has left in their middle, so that resumed ones repeat
        them; return whether there can be a checkpoint before them."""
        rank, step, dropped = self._rank, self._steps.next_step, self._steps.drop()
        changed = any(each.called.changes_models for each in dropped.values())
        self._trainer.controllers.load(self._states)
        for each in dropped:
            rank.flight.timeline.drop(each)
        is_alone = len(dropped) == 1 and not self._steps.in_flight(step)
        if is_alone:
            # others may be in flight in the last checkpoint
            RecordedColumns(rank.directory.path).remove(step, rank.rank)
        if rank.rank == 0:
            kept = (
                "nothing is kept of it" if is_alone else "rows of older weights are in the checkpoint before it alone"
            )
            then = "its updates are in no checkpoint" if changed else kept
            name = self._plan.spec.name
            print(f"flexrlhf: {name}: step {step} was left before its end; {then}", file=sys.stderr, flush=True)
        return is_alone and not changed

    def _take_prompts(self, step: int, prompts: Sequence[object] | None) -> None:
        """Take the program's prompts of a step; without any they are of the data."""
        if prompts is not None:
            self._trainer.rows.give(step, Example.from_data(prompts))
            self._steps.given.add(step)

    def _call(self, message: CallMessage) -> None:
        step, call = message["step"], OperatorCall.of(message)
        if message["code"]:
            where = f"rank {self._rank.rank} (host {self._rank.world.host})"
            FunctionFiles(call.loss, f"session: the loss of {call.operator}").check(message["code"], where)
        opened, self._is_called = self._steps.open[step], True
        opened.messages.append({**call.message, "lag": opened.called.builder.lag})
        runs: list[tuple[int, Run]] = []
        opened.runs.append(runs)
        for instruction in opened.called.add(call):
            if call.parts and isinstance(instruction, Run) and self._rank.rank in instruction.ranks:
                self._trainer.rows.put_inputs_of(instruction, step)
            position = self._execute(instruction, step)
            if isinstance(instruction, Run):
                runs.append((position, instruction))

    def _around(self, step: int, before: bool) -> Sequence[Instruction]:
        """Return what stands around the calls of a step and is due."""
        return list(self._plan.schedule.around_calls(step, self._plan.spec.steps, before))

    def _execute(self, instruction: Instruction, step: int) -> int:
        """Execute an instruction that names this rank; return its position."""
        if isinstance(instruction, Move):
            group = Group("move", instruction.ranks)
            self._rank.world.add_group(self._rank.groups, group, self._plan.spec.timeout_seconds)
        position = self._steps.add(step, instruction)
        if self._rank.rank in instruction.ranks:
            self._trainer.execute(Execution(position, step, instruction))
        if isinstance(instruction, Checkpoint):
            # a session that goes on from it has none, in whatever order this one generates
            for model in self._rank.models.values():
                model.engine.drop_kept_rows()
        return position

    def _end(self, message: CallMessage) -> None:
        """End the first open step: account for its rows, then sync, evaluate and save as the plan does after its last
        training."""
        step = self._steps.next_step
        self._put_uncarried(step)
        self._leave_out(step)
        due = self._around(step, before=False)
        for instruction in due:
            self._execute(instruction, step)
        if message["saves"] and not any(isinstance(each, Checkpoint) for each in due):
            self._execute(Checkpoint.of(self._plan.placement, self._plan.spec), step)
        ended, self._is_called = self._steps.end(), False
        if self._rank.rank == 0:
            self._rank.directory.calls.append({"step": step, "calls": ended.messages})
            self._trainer.results.collect()
        self._open_training()

    def _put_uncarried(self, step: int) -> None:
        """Put columns of rows that are left out where the program has not generated, or joined, what the next step
        would go on with; and where it has not scored rows, the scores of the steps before."""
        rows, called = self._trainer.rows, self._steps.open[step].called
        store, before = rows.at(step), rows.carried_to(step)
        for run in self._plan.schedule.for_rank(self._rank.rank):
            if isinstance(run, Run) and run.operator.carries:
                # a response without a part of what belongs to it is not gone on with
                source = None if run.operator.kind == "generate" else before
                for number in called.uncarried(run.operator, run.mini_batches):
                    work = self._trainer.work(replace(run, mini_batches=range(number, number + 1)), step)
                    for column, values in carried_columns(work, step, source, store).items():
                        store.put(column, work.rows, values)

    def _leave_out(self, step: int) -> None:
        """Report the rows that the program has not trained on, as a training of no mini-batch; of those that have not
        ended the next step goes on with some."""
        training = self._plan.graph.accounting
        if training is None or not training.is_due(step):
            return
        runs = (each for each in self._plan.schedule.instructions if isinstance(each, Run))
        run = next(each for each in runs if each.operator == training)
        waiting = self._waiting(run, step) if Column.PRESENT in training.reads else ()
        position = self._steps.add(step, replace(run, mini_batches=range(0)))
        outcomes = self._trainer.ledger.leave_out(step, waiting)
        if self._rank.rank == run.ranks[0]:
            self._trainer.results.recorder.publish(step, position, make_report(outcomes=outcomes))

    def _waiting(self, run: Run, step: int) -> Sequence[int]:
        """Return the rows of all replicas of ``run`` that have not ended; none on other ranks."""
        called, reader = self._steps.open[step].called, replace(run.operator, reads=(Column.PRESENT,))
        for move in called.moves_to(reader):
            self._execute(move, step)
        if self._rank.rank not in run.ranks:
            return ()
        work, shape = self._trainer.work(run, step), self._plan.batch
        numbers = [number for number in shape.mini_batches if called.has(Column.PRESENT, range(number, number + 1))]
        rows = [row for number in numbers for row in work.rows_of(range(number, number + 1))]
        present = self._trainer.rows.at(step).get(Column.PRESENT, rows)
        return [*map(int, work.model.dp.gather(present.new_tensor(rows, dtype=torch.int64)[present == 0]).tolist())]

    def _send_column(self, message: CallMessage) -> None:
        """Send the rows of a column to the program: each owner to rank 0 in the job's store, and rank 0 on."""
        step, name, number = (message[key] for key in ("step", "name", "number"))
        world, owners = self._rank.world, self._steps.open[step].called.owners(name, range(*message["mini_batches"]))
        mailbox = self._trainer.results.recorder.mailbox
        if prompts := owners.get(world.rank):
            rows = self._plan.batch.rows(prompts)
            values = self._trainer.rows.at(step).get(name, rows).cpu().contiguous()
            mailbox.put(f"column/{number}/{world.rank}", save({"rows": tensor(rows), "values": values}))
        if world.rank == 0:
            taken = (mailbox.take(f"column/{number}/{rank}", f"rank {rank}", f"column {name}") for rank in owners)
            self._feed.reply([*taken])

    def _send_statistics(self, step: int, number: int) -> None:
        """Send the metrics of a call of a step to the program, once its model's first rank has published those of
        each chunk."""
        if self._rank.rank == 0:
            found: dict[str, Triple] = {}
            for position, run in self._steps.open[step].runs[number]:
                METRICS.add(found, self._trainer.results.recorder.read(step, position, run))
            if run.operator.kind == "loss":
                found = {name.removeprefix(f"{run.operator.name}/"): value for name, value in found.items()}
            self._feed.reply([json.dumps(METRICS.evaluate(found)).encode()])
