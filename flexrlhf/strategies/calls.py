"""Instructions of calls: a program calls operators of a graph in an order of its own, and each call becomes the moves
of what it reads and the run itself, by the same builder as a schedule's.

A program calls much the same in every step. So the columns that a call writes leave at once for the calls of the step
before that read them, as in a schedule; for calls that were made behind the next batch they leave where that is taken.
Other rows move when they are first read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

from flexrlhf.errors import UserError, nearest
from flexrlhf.operators.columns import Qualifier
from flexrlhf.operators.graph import Graph, Operator, TrainPart, is_own
from flexrlhf.operators.named_functions import LOSSES
from flexrlhf.placement.layout import BatchShape, common_range
from flexrlhf.placement.placement import Placement
from flexrlhf.placement.protocols import PromptParts, TransferProtocol
from flexrlhf.strategies.instructions import Instruction
from flexrlhf.strategies.schedule import Builder, OperatorTask
from flexrlhf.text import mini_batches_text

CallsInFlight = Mapping[str, Sequence[Mapping[str, Any]]]
"""Step in flight → messages of its calls."""


@dataclass(frozen=True)
class OperatorCall:
    """A call of an operator.

    operator:      its name in the graph.
    mini_batches:  those that it works on.
    loss:          of a training, in place of the graph's; empty: that.
    part:          of a training; empty: an optimizer step on each mini-batch.
    parts:         numbers of the prompts of each replica of the operator's model, among those that a step takes; empty:
                   as planned.
    """

    operator: str
    mini_batches: range
    loss: str = ""
    part: TrainPart | Literal[""] = ""
    parts: PromptParts = ()

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> OperatorCall:
        """Return the call that ``message`` has."""
        numbers, parts = range(*message["mini_batches"]), tuple(map(tuple, message["parts"]))
        return cls(message["operator"], numbers, message["loss"], message["part"], parts)

    @property
    def message(self) -> dict[str, Any]:
        """Fields for JSON."""
        return {**vars(self), "mini_batches": [self.mini_batches.start, self.mini_batches.stop]}


@dataclass
class CalledStep:
    """Calls of one step, in the order of the program. Its builder has as lag the number of newer batches.

    expected:      readers of columns as they are written: calls of the step before, as far as its batch was the newest.
    later:         readers of columns once a newer batch is taken: calls of an earlier step behind that.
    before:        the step before, whose rows calls go on with, until that ends.
    written:       column → the tasks that have written it, each in some mini-batches.
    called:        tasks on planned ranks so far, in order, and the number of newer batches.
    added:         role → the training and the mini-batches whose gradients await an optimizer step.
    updated:       training → the mini-batches with an optimizer step.
    instructions:  of the calls so far.
    num_calls:     number of these.
    has_ended:     whether no call joins them.
    """

    graph: Graph
    builder: Builder
    expected: Sequence[OperatorTask] = ()
    later: Sequence[OperatorTask] = ()
    before: CalledStep | None = None
    written: dict[str, list[OperatorTask]] = field(default_factory=dict)
    called: dict[OperatorTask, int] = field(default_factory=dict)
    added: dict[str, tuple[str, range]] = field(default_factory=dict)
    updated: dict[str, set[int]] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    num_calls: int = 0
    has_ended: bool = False

    @classmethod
    def begin(
        cls,
        graph: Graph,
        placement: Placement,
        shape: BatchShape,
        before: CalledStep | None = None,
        ended: CalledStep | None = None,
    ) -> CalledStep:
        """Return a step without calls.

        before:  the step before it; None: the first of a session.
        ended:   the last step that has ended; None: that one, or none.
        """
        expected = () if before is None else tuple(task for task, lag in before.called.items() if not lag)
        ended = ended or before
        later = () if ended is None else tuple(task for task, lag in ended.called.items() if lag)
        return cls(graph, Builder(placement, shape), expected, later, before)

    def overtake(self) -> list[Instruction]:
        """Return the moves that are due where a newer batch is taken: to calls that are expected behind that."""
        moves: list[Instruction] = []
        if not self.builder.lag:
            moves += self.builder.moves(dict.fromkeys(chain.from_iterable(self.written.values())), self.later)
        self.builder.lag += 1
        self.instructions += moves
        return moves

    def end(self) -> None:
        """End the step: no later one goes on with its rows but as they are."""
        self.has_ended, self.before = True, None

    def add(self, call: OperatorCall) -> list[Instruction]:
        """Return the instructions of a call: for each chunk of it moves to it, its run, and moves from it to calls that
        are expected.

        Raises UserError for a call that this step cannot have.
        """
        operator = self.operator(call)
        self._check_columns(operator, call)
        self._count_gradients(operator, call)
        added = [
            each for chunk in self._chunks(call) for each in self._added(operator, replace(call, mini_batches=chunk))
        ]
        if operator.kind in ("train", "step"):
            self.updated.setdefault(call.operator, set()).update(call.mini_batches)
        self.instructions += added
        self.num_calls += 1
        return added

    def _chunks(self, call: OperatorCall) -> list[range]:
        """Return the mini-batches of a call by chunks, as in a schedule (``schedule.num_chunks``): ranks that read one
        work while the next is computed."""
        placement, shape = self.builder.placement, self.builder.shape
        if call.parts or call.part == "step" or call.operator in placement.whole_step(self.graph):
            return [call.mini_batches]
        chunks = (common_range(shape.chunk(index), call.mini_batches) for index in range(shape.num_chunks))
        return [chunk for chunk in chunks if chunk]

    def _added(self, operator: Operator, call: OperatorCall) -> list[Instruction]:
        """Return the instructions of a call without cuts."""
        task = OperatorTask(operator, self.graph.waves[call.operator], None, 0, called=call.mini_batches)
        tasks = chain.from_iterable(self.written.get(name, ()) for name in operator.reads)
        writers = dict.fromkeys(
            each for each in tasks if common_range(self.builder.mini_batches(each), call.mini_batches)
        )
        planned = self.builder.placement
        if call.parts:
            self.builder.placement = self._with_parts(operator, call)
        moves = self.builder.moves(writers, [task])
        # files of columns are named by operator and chunk
        chunk = None if call.mini_batches == self.builder.shape.mini_batches else call.mini_batches.start
        run = replace(self.builder.run(task), chunk=chunk)
        self.builder.placement = planned
        for name in operator.writes:
            self.written.setdefault(name, []).append(task)
        if not call.parts:
            self.called[task] = self.builder.lag
        readers = [*(self.later if self.builder.lag else self.expected), *self._carrying(operator)]
        return [*moves, run, *self.builder.moves([task], readers)]

    def _carrying(self, writer: Operator) -> list[OperatorTask]:
        """Return the operators that carry columns of ``writer`` to the next step, in which no row of this one moves."""
        shape, found = self.builder.shape, (each for each in self.graph.operators if {*each.carries} & {*writer.writes})
        return [OperatorTask(each, 0, None, 0, called=shape.mini_batches) for each in found]

    def has(self, column: str, mini_batches: range) -> bool:
        """Whether ``column`` of all of ``mini_batches`` is of the data or written."""
        return column in self.graph.inputs or not self._lacking(column, mini_batches)

    def _lacking(self, column: str, mini_batches: range) -> list[int]:
        """Return those of ``mini_batches`` in which nothing has written ``column``."""
        written = {number for task in self.written.get(column, ()) for number in self.builder.mini_batches(task)}
        return [number for number in mini_batches if number not in written]

    def _check_columns(self, operator: Operator, call: OperatorCall) -> None:
        """Raise UserError for a call that reads what is not there, writes what is there, or needs other rows, too."""
        shape = self.builder.shape
        if missing := [name for name in operator.reads if not self.has(name, call.mini_batches)]:
            writer = self.graph.producers.get(missing[0])
            lacking = self._lacking(missing[0], call.mini_batches)
            where = "this batch does" if len(lacking) == len(shape.mini_batches) else f"mini-batch {lacking[0]} does"
            first = "no operator of the graph writes it" if writer is None else f"call {writer.name} first"
            raise UserError(f"session: {operator.name} reads {missing[0]}, which {where} not have; {first}")
        if operator.carries:
            self._check_carried(operator, call)
        # a program decides which rows a training has
        if operator.barrier and operator.kind == "combine" and call.mini_batches != shape.mini_batches:
            raise UserError(
                f"session: {operator.name} needs all rows of a step at once, found "
                f"{mini_batches_text(call.mini_batches)}; call it on the whole batch"
            )
        if again := [
            name for name in operator.writes if len(self._lacking(name, call.mini_batches)) < len(call.mini_batches)
        ]:
            raise UserError(f"session: {operator.name} has written {again[0]} of this batch; use it")

    def _check_carried(self, operator: Operator, call: OperatorCall) -> None:
        """Raise UserError for a call whose rows are not where, or not as, the step before leaves them."""
        if call.parts:
            raise UserError(
                f"session: {operator.name} goes on with rows of the step before, which stay on their ranks; call it "
                f"without a protocol"
            )
        if self.before is None or self.before.has_ended:
            return
        for name in operator.carries:
            if lacking := self.before._lacking(name, call.mini_batches):
                raise UserError(
                    f"session: {operator.name} goes on with rows of the step before, for which "
                    f"{self.graph.producers[name].name} has not been called on mini-batch {lacking[0]}; call it there "
                    f"first, or end that step by end_step()"
                )

    def not_called(self, operator: Operator) -> list[int]:
        """Return the mini-batches that ``operator``, which writes columns, has not been called on."""
        return self._lacking(operator.writes[0], self.builder.shape.mini_batches)

    def uncarried(self, operator: Operator, mini_batches: range) -> set[int]:
        """Return those of ``mini_batches`` in which nothing has written a column that ``operator`` carries."""
        return {number for name in operator.carries for number in self._lacking(name, mini_batches)}

    def moves_to(self, operator: Operator) -> list[Instruction]:
        """Return the moves of all rows of what ``operator`` reads, as far as it is written, to its ranks."""
        task = OperatorTask(operator, 0, None, 0, called=self.builder.shape.mini_batches)
        writers = chain.from_iterable(self.written.get(name, ()) for name in operator.reads)
        return [*self.builder.moves(dict.fromkeys(writers), [task])]

    def added_to(self, operator: str) -> range:
        """Return the mini-batches whose gradients await an optimizer step. Raises UserError if there are none."""
        found = next((numbers for name, numbers in self.added.values() if name == operator), None)
        if found is None:
            raise UserError(f"session: optim_step({operator!r}) without a loss; call forward_backward before it")
        return found

    @property
    def changes_models(self) -> bool:
        """Whether a training has added gradients, or updated weights."""
        return bool(self.added or self.updated)

    def is_trained(self, step: int) -> bool:
        """Return whether each training that is due at ``step`` has an optimizer step on every mini-batch."""
        due = [each for each in self.graph.operators if each.kind == "train" and each.is_due(step)]
        everything = set(self.builder.shape.mini_batches)
        return not self.added and all(self.updated.get(each.name, set()) >= everything for each in due)

    def check_ended(self) -> None:
        """Raise UserError if gradients await an optimizer step."""
        for name, numbers in self.added.values():
            raise UserError(
                f"session: the step ends with gradients of {name} on {mini_batches_text(numbers)}; call "
                f"optim_step({name!r}) before"
            )

    def _count_gradients(self, operator: Operator, call: OperatorCall) -> None:
        """Keep track of gradients without an optimizer step. Raises UserError for a call that would mix them."""
        name, before = self.added.get(operator.role, (call.operator, None))
        numbers = call.mini_batches
        if operator.kind == "step":
            del self.added[operator.role]
        elif operator.kind == "backward":
            if before is not None:
                if name != call.operator or numbers.start > before.stop or numbers.stop < before.start:
                    raise UserError(
                        f"session: gradients of {name} on {mini_batches_text(before)}, and of {call.operator} on "
                        f"{mini_batches_text(numbers)}; add neighbouring parts, or call optim_step({name!r}) before"
                    )
                numbers = range(min(before.start, numbers.start), max(before.stop, numbers.stop))
            self.added[operator.role] = (call.operator, numbers)
        elif operator.kind == "train" and before is not None:
            raise UserError(
                f"session: {call.operator} with gradients of {name} on {mini_batches_text(before)}; call "
                f"optim_step({name!r}) before"
            )

    def _with_parts(self, operator: Operator, call: OperatorCall) -> Placement:
        """Return the placement with the prompts that a program gives each replica; of other mini-batches the planned
        ones."""
        placement, shape = self.builder.placement, self.builder.shape
        layout, others = placement.layout_of(operator), set(shape.mini_batches).difference(call.mini_batches)
        whole = [
            {*part, *(number for m in others for number in shape.numbers_on(layout, replica, m))}
            for replica, part in enumerate(call.parts)
        ]
        protocol = TransferProtocol(
            f"of {operator.name}", lambda _, numbers: [sorted(part.intersection(numbers)) for part in whole]
        )
        layouts = {**placement.layouts, operator.name: replace(layout, protocol=protocol)}
        return replace(placement, layouts=layouts)

    def operator(self, call: OperatorCall) -> Operator:
        """Return the operator of a call, with the loss that it names. Raises UserError."""
        known = {operator.name: operator for operator in self.graph.operators}
        if call.operator not in known:
            named = f"{nearest(call.operator, known)}; there are {', '.join(known)}"
            raise UserError(f"session: the graph has no operator {call.operator!r}{named}")
        operator = known[call.operator]
        if operator.kind != "train" and (call.loss or call.part):
            found = f", found {call.loss!r}" if call.loss else ""
            raise UserError(f"session: {operator.name} has no loss{found}; a training has one")
        if call.part:
            name = f"{operator.name}_loss" if call.part == "loss" else operator.name
            operator = replace(operator, name=name, kind=call.part, on_trained=True)
        if not call.loss:
            return operator
        if call.loss == Qualifier.PTX:
            return _of_texts(operator)
        if call.loss not in LOSSES and not is_own(call.loss):
            raise UserError(
                f"session: no loss {call.loss!r}{nearest(call.loss, LOSSES)}; there are {', '.join(LOSSES)}, and "
                f"path/to/file.py:name"
            )
        return replace(operator, function=call.loss)

    def owners(self, column: str, mini_batches: range) -> dict[int, tuple[int, ...]]:
        """Return rank → prompts of ``column`` that it sends to a program: each by the first that has computed it, or of
        an input by the first that reads it. Raises UserError for a column that ``mini_batches`` do not have."""
        if not self.has(column, mini_batches):
            known = (*self.graph.inputs, *(name for name in self.written if self.has(name, mini_batches)))
            raise UserError(
                f"session: this batch has no column {column!r}{nearest(column, known)}; it has {', '.join(known)}"
            )
        owned: dict[int, tuple[int, ...]] = {}
        left = {prompt for number in mini_batches for prompt in self.builder.shape.prompts(number)}
        holders = self.builder.produced[column] if column in self.written else self._readers(column)
        for rank, prompts in sorted(holders.items()):
            if own := tuple(sorted(prompts & left)):
                owned[rank] = own
                left -= prompts
        return owned

    def _readers(self, column: str) -> dict[int, set[int]]:
        """Return rank → prompts of an input column that its first reader has there."""
        layout = self.builder.layout_of(next(each for each in self.graph.operators if column in each.reads))
        shape = self.builder.shape
        return {rank: set(shape.prompts_on(layout, rank, shape.mini_batches)) for rank in layout.ranks}

    @classmethod
    def again(
        cls, steps: Iterable[Iterable[Mapping[str, Any]]], graph: Graph, placement: Placement, shape: BatchShape
    ) -> list[Instruction]:
        """Return the instructions of the last of ``steps`` by the messages of their calls, in a row."""
        step: CalledStep | None = None
        for messages in steps:
            step = CalledStep.begin(graph, placement, shape, step)
            if step.before is not None:
                step.before.end()
            step.add_all(messages)
        return [] if step is None else step.instructions

    def add_all(self, messages: Iterable[Mapping[str, Any]]) -> list[list[Instruction]]:
        """Return the instructions of calls by their messages, each with the number of batches that were newer."""
        made = []
        for message in messages:
            if self.builder.lag < (lag := message.get("lag", 0)):
                self.overtake()
                self.builder.lag = lag
            made.append(self.add(OperatorCall.of(message)))
        return made


def _of_texts(operator: Operator) -> Operator:
    """Return the loss of ``operator`` on pretraining texts alone. Raises UserError if it has none, or is a training."""
    if operator.extra_loss != Qualifier.PTX:
        raise UserError(f"session: {operator.name} has no pretraining texts; set algorithm.ptx")
    if operator.kind != "loss":
        raise UserError(f"session: {operator.name} adds the loss ptx to its own; compute_loss computes it alone")
    return replace(operator, function=Qualifier.PTX, reads=operator.extra_reads)
