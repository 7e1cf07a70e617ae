"""One rank of a session: the calls of a program become instructions, which the trainer executes.

Every rank reads every call and derives the same instructions from it, so all ranks have one list, as with a schedule.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save
from torch import tensor

from flexrlhf.data.examples import EXAMPLES
from flexrlhf.metrics import METRICS, Triple
from flexrlhf.placement.groups import Group
from flexrlhf.runs.recorded_columns import RecordedColumns
from flexrlhf.strategies.calls import CalledStep, OperatorCall
from flexrlhf.strategies.instructions import Checkpoint, Instruction, Move, Run
from flexrlhf.trainer.call_feed import CallFeed, CallMessage
from flexrlhf.trainer.execution import Execution
from flexrlhf.trainer.rank_context import RankContext
from flexrlhf.trainer.recorder import make_report
from flexrlhf.trainer.trainer import Trainer

PART_BYTES = 4_000_000
"""Bytes of a column that one entry of the job's store has; it takes 8 MB."""


class CalledSteps:
    """Instructions of the steps so far, by which reports are found. Positions count along the whole session.

    given:  steps whose prompts are the program's own.
    """

    def __init__(self) -> None:
        self.given: set[int] = set()
        self._listed: dict[int, list[tuple[int, Instruction]]] = defaultdict(list)
        self._num = 0
        self._num_whole = 0

    def add(self, step: int, instruction: Instruction) -> int:
        """Add the next instruction of ``step`` and return its position."""
        self._listed[step].append((self._num, instruction))
        self._num += 1
        return self._num - 1

    def end(self, step: int) -> None:
        """End ``step``: no instruction joins it or an earlier one."""
        self._num_whole = step + 1

    def index(self, position: int) -> int:
        return position

    def due(self, step: int) -> Iterable[tuple[int, Instruction]]:
        return self._listed[step]

    def is_whole(self, step: int) -> bool:
        return step < self._num_whole

    def takes_data(self, step: int) -> bool:
        return step not in self.given


class CalledTrainer:
    """Executor of the calls of a program on this rank."""

    def __init__(self, trainer: Trainer, rank: RankContext, steps: CalledSteps, feed: CallFeed, next_step: int) -> None:
        """``next_step``: that the program begins with, which is told."""
        self._trainer, self._rank, self._steps, self._feed = trainer, rank, steps, feed
        self._plan, self._next_step = rank.plan, next_step
        self._called = self._new_step(None)
        # whether the program is in the middle of a step, and values of the controllers before it
        self._is_open, self._states = False, dict(trainer.controllers.states)
        # positions and runs of each call of the step, and its message
        self._runs: list[list[tuple[int, Run]]] = []
        self._messages: list[CallMessage] = []
        if rank.rank == 0:
            # of a program that was killed in the middle of a step
            RecordedColumns(rank.directory.path).remove(next_step)
            feed.reply([json.dumps({"next_step": next_step}).encode()])

    def run(self) -> int:
        """Execute calls until the program ends, or a request to stop; return the first step that it has not ended."""
        while (message := self._feed.next())["do"] != "close":
            match message["do"]:
                case "begin":
                    self._begin(message["examples"])
                case "call":
                    self._messages.append(message)
                    self._call(OperatorCall.of(message))
                case "column":
                    self._send_column(message["name"], message["number"], range(*message["mini_batches"]))
                case "statistics":
                    self._send_statistics(message["call"])
                case "end":
                    self._end(message)
                    if self._rank.ends_after(self._next_step - 1):
                        break
        if self._is_open:
            self._drop()
        # weights in the middle of a step are those of no checkpoint
        self._trainer.finish(self._next_step, saves=not (self._is_open and self._called.changes_models))
        return self._next_step

    def _begin(self, prompts: str | None) -> None:
        """Begin a step. ``prompts``: file of the program's own.

        Weights that a sync brings are received when it is executed, not from now on: the program may not come to it.
        """
        self._called, self._runs, self._messages = self._new_step(self._called), [], []
        self._is_open, self._states = True, dict(self._trainer.controllers.states)
        self._take_prompts(prompts)
        self._around(before=True)

    def _drop(self) -> None:
        """Leave no trace of a step that the program has left in its middle, so that a resumed one repeats it."""
        step, rank = self._next_step, self._rank
        self._trainer.controllers.load(self._states)
        rank.flight.timeline.drop(step)
        RecordedColumns(rank.directory.path).remove(step, rank.rank)
        if rank.rank == 0:
            then = "its updates are in no checkpoint" if self._called.changes_models else "nothing is kept of it"
            name = self._plan.spec.name
            print(f"flexrlhf: {name}: step {step} was left before its end; {then}", file=sys.stderr, flush=True)

    def _new_step(self, before: CalledStep | None) -> CalledStep:
        return CalledStep.begin(self._plan.graph, self._plan.placement, self._plan.batch, before)

    def _take_prompts(self, path: str | None) -> None:
        """Take the prompts of a step from a file of the program's; without one they are of the data."""
        if path is None:
            return
        self._trainer.rows.give(self._next_step, EXAMPLES.validate_json(Path(path).read_bytes()))
        self._steps.given.add(self._next_step)
        mailbox = self._trainer.results.recorder.mailbox
        if mailbox.clear([f"prompts/{self._next_step}"], self._rank.world.size):
            Path(path).unlink()

    def _call(self, call: OperatorCall) -> None:
        self._runs.append([])
        for instruction in self._called.add(call):
            if isinstance(instruction, Move):
                group = Group("move", instruction.ranks)
                self._rank.world.add_group(self._rank.groups, group, self._plan.spec.timeout_seconds)
            if call.parts and isinstance(instruction, Run) and self._rank.rank in instruction.ranks:
                self._trainer.rows.put_inputs_of(instruction, self._next_step)
            position = self._execute(instruction)
            if isinstance(instruction, Run):
                self._runs[-1].append((position, instruction))

    def _around(self, before: bool) -> bool:
        """Execute what stands around the calls of a step; return whether a checkpoint was among it."""
        due = list(self._plan.schedule.around_calls(self._next_step, self._plan.spec.steps, before))
        for instruction in due:
            self._execute(instruction)
        return any(isinstance(instruction, Checkpoint) for instruction in due)

    def _execute(self, instruction: Instruction) -> int:
        """Execute an instruction that names this rank; return its position."""
        position = self._steps.add(self._next_step, instruction)
        if self._rank.rank in instruction.ranks:
            self._trainer.execute(Execution(position, self._next_step, instruction))
        return position

    def _end(self, message: CallMessage) -> None:
        """End a step: account for its rows, then sync, evaluate and save as the plan does after its last training."""
        step = self._next_step
        self._leave_out(step)
        is_saved = self._around(before=False)
        if message["saves"] and not is_saved:
            self._execute(Checkpoint.of(self._plan.placement, self._plan.spec))
        self._steps.end(step)
        self._next_step, self._is_open = step + 1, False
        if self._rank.rank == 0:
            self._rank.directory.calls.append({"step": step, "calls": self._messages})
            self._trainer.results.collect()

    def _leave_out(self, step: int) -> None:
        """Report the rows that the program has not trained on, as a training of no mini-batch."""
        training = self._plan.graph.accounting
        if training is None or step < training.first_step:
            return
        runs = (each for each in self._plan.schedule.instructions if isinstance(each, Run))
        run = next(each for each in runs if each.operator == training)
        position = self._steps.add(step, replace(run, mini_batches=range(0)))
        outcomes = self._trainer.ledger.leave_out(step)
        if self._rank.rank == run.ranks[0]:
            self._trainer.results.recorder.publish(step, position, make_report(outcomes=outcomes))

    def _send_column(self, name: str, number: int, mini_batches: range) -> None:
        """Send the rows of a column to the program: each owner to rank 0 in the job's store, and rank 0 on."""
        world, owners = self._rank.world, self._called.owners(name, mini_batches)
        mailbox = self._trainer.results.recorder.mailbox
        if prompts := owners.get(world.rank):
            rows = self._plan.batch.rows(prompts)
            values = self._trainer.rows.at(self._next_step).get(name, rows).cpu().contiguous()
            parts = _cut(save({"rows": tensor(rows), "values": values}))
            for index, part in enumerate(parts):
                mailbox.store.set(f"column/{number}/{world.rank}/{index}", part)  # type: ignore[arg-type]  # stubs of str
            mailbox.publish(f"column/{number}/{world.rank}", len(parts))
        if world.rank == 0:
            blobs = []
            for rank in owners:
                key = f"column/{number}/{rank}"
                number_of_parts = mailbox.receive(key, f"rank {rank}", f"column {name}")
                keys = [f"{key}/{index}" for index in range(number_of_parts)]
                blobs.append(b"".join(mailbox.store.get(each) for each in keys))
                mailbox.clear([key, *keys])
            self._feed.reply(blobs)

    def _send_statistics(self, number: int) -> None:
        """Send the metrics of a call of this step to the program, once its model's first rank has published those of
        each chunk."""
        if self._rank.rank == 0:
            found: dict[str, Triple] = {}
            for position, run in self._runs[number]:
                METRICS.add(found, self._trainer.results.recorder.read(self._next_step, position, run))
            if run.operator.kind == "loss":
                found = {name.removeprefix(f"{run.operator.name}/"): value for name, value in found.items()}
            self._feed.reply([json.dumps(METRICS.evaluate(found)).encode()])


def _cut(data: bytes) -> Sequence[bytes]:
    return [data[start : start + PART_BYTES] for start in range(0, len(data), PART_BYTES)]
