"""Execute a plan with one thread per rank and symbolic values: no torch, no sockets, every wait with a deadline.

``asynchronous`` follows comm/: sends are buffered, receives are awaited when a column is first read, the second next
send on an edge awaits its peers. ``rendezvous`` is stricter than any backend: all ranks that an instruction names meet
at it before one of them does it, and rows arrive at once. A plan that never blocks there blocks nowhere.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from threading import Thread
from typing import Literal

from fabric import Fabric, Stopped
from nccl_rules import Await, Call, Meet, Post, Synchronize, sync_calls
from pass_calls import PassCalls
from symbolic import (
    Cell,
    Value,
    digest,
    evaluation_value,
    initial_weights,
    input_value,
    num_evaluation_prompts,
    statistic,
    updated,
    whitening,
    written,
)

from flexrlhf.operators.columns import Column
from flexrlhf.placement.groups import (
    Group,
    GroupPurpose,
)
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.placement.transfer import Transfer
from flexrlhf.plan.plan import Plan
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
from flexrlhf.trainer.evaluation_batches import evaluation_shape, walk_evaluation
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.sync_plan import SyncPlan, sync_on_rank, transfers_of

Position = object
"""Position of an instruction in the walk; in an evaluation also in its list, and its batches."""
Mode = Literal["asynchronous", "rendezvous"]
Stream = Iterable[tuple[int, int, Instruction]]
"""Work of a rank: (position, step of the batch, instruction), as from ``walk``."""

DEADLINE_SECONDS = 20.0
"""Far beyond a pause of a busy machine; a plan that is right never waits for it."""


class EmulationError(AssertionError):
    """A rank that cannot proceed: it misses a row, breaks a rule of the schedule, or waits past the deadline."""


@dataclass
class Trace:
    """Record of one rank. ``seen``: every cell that it produced or received. ``looks``: (use, model, step, weights).

    ``begun``: responses of later chunks that its rollout engines could begin with. ``evaluated``, ``evaluations``:
    cells of evaluation rows that it saw, and that it produced. ``calls``: communication that it began and awaited.
    """

    seen: dict[Cell, Value] = field(default_factory=dict)
    produced: set[Cell] = field(default_factory=set)
    weights: dict[str, Value] = field(default_factory=dict)
    looks: list[tuple[str, str, int, Value]] = field(default_factory=list)
    begun: int = 0
    evaluated: dict[Cell, Value] = field(default_factory=dict)
    evaluations: set[Cell] = field(default_factory=set)
    calls: list[Call] = field(default_factory=list)


def emulate(
    plan: Plan,
    mode: Mode,
    streams: Mapping[int, Stream] | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    adds_groups: bool = False,
) -> dict[int, Trace]:
    """Run ``plan`` and return every rank's trace.

    streams:      replace the work of single ranks: to break a plan, or as a program calls it.
    adds_groups:  whether groups of moves are made when they are first used, as in a session.

    Raises EmulationError with the first failure, or with the wait of every blocked rank.
    """
    fabric = Fabric(deadline_seconds)
    ranks = [Rank(rank, plan, fabric, mode, adds_groups) for rank in range(plan.placement.num_ranks)]
    own = {rank.number: plan.schedule.walk(rank.number, plan.spec.steps) for rank in ranks}
    threads = [Thread(target=rank.run, args=((streams or {}).get(rank.number, own[rank.number]),)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if fabric.failure is not None:
        raise EmulationError(fabric.failure)
    return {rank.number: rank.trace for rank in ranks}


@dataclass
class Rows:
    """The cells of one step on one rank, with those that its data has given, and those that still travel."""

    values: dict[tuple[str, int], Value] = field(default_factory=dict)
    inputs: set[tuple[str, int]] = field(default_factory=set)
    num_bytes: int = 0
    arrivals: list[tuple[tuple[str, ...], Callable[[], None]]] = field(default_factory=list)

    def land(self, columns: Iterable[str] | None = None) -> None:
        """Await pending transfers of ``columns``; None: of all."""
        due = [a for a in self.arrivals if columns is None or set(columns) & set(a[0])]
        self.arrivals = [arrival for arrival in self.arrivals if arrival not in due]
        for _, arrive in due:
            arrive()


class Rank:
    """One rank: its rows by step, its weights by placed model, and one method for each kind of instruction."""

    def __init__(self, number: int, plan: Plan, fabric: Fabric, mode: Mode, adds_groups: bool = False) -> None:
        self.number, self._adds_groups = number, adds_groups
        here = [model for model in plan.placement.on_rank(number) if not model.is_transient]
        self.trace = Trace(weights={model.name: initial_weights(model.role) for model in here})
        self._plan = plan
        self._groups = {(group.purpose, group.ranks): group for group in plan.groups if not group.alone}
        self._fabric = fabric
        self._mode = mode
        self._rows: dict[int, Rows] = {}
        self._edges: dict[str, deque[tuple[Position, tuple[int, ...]]]] = defaultdict(deque)
        self._offloaded = set(plan.offloaded.get(number, ()))
        # by model and operator
        self._begun: dict[str, dict[str, list[range]]] = defaultdict(lambda: defaultdict(list))
        # of overlapping Syncs: transfers that are awaited before a copy is used, or the source sends again
        self._unawaited: dict[str, list[Call]] = {}
        self._sync_plans: dict[str, SyncPlan] = {}
        self._at = "start"
        # that this rank has, in the order of the plan
        self._connected: dict[object, tuple[int, ...]] = {}
        for group in plan.groups:
            self._connect(group)

    def _connect(self, group: Group) -> None:
        """Make the communicator of ``group`` with its other ranks, unless another group of these has made it."""
        if self.number in group.ranks and len(group.ranks) > 1 and group.communicator not in self._connected:
            self._connected[group.communicator] = group.ranks
            key = ("connect", group.communicator)
            self.trace.calls += [Meet(key, group.ranks), Post(key, group), Await(key, on_device=True)]

    def run(self, stream: Stream) -> None:
        """The body of the thread: never raises."""
        try:
            for position, step, instruction in stream:
                self._at = f"step {step}, {instruction.kind} {instruction.label} (#{position})"
                self._do(position, step, instruction)
            for rows in self._rows.values():
                rows.land()
            self._store(list(self._unawaited))
            # with NCCL all ranks of a communicator destroy it together
            self.trace.calls += [Meet(("close", each), ranks) for each, ranks in self._connected.items()]
        except Stopped:
            pass
        except Exception as error:
            self._fabric.fail(f"rank {self.number} at {self._at}: {error or type(error).__name__}")

    def _do(self, position: Position, step: int, instruction: Instruction) -> None:
        assert self.number in instruction.ranks, f"the instruction names only {instruction.ranks}"
        is_of_batch = not isinstance(instruction, Offload | Reload)
        assert not is_of_batch or 0 <= step < self._plan.spec.steps, "no such batch"
        if self._mode == "rendezvous":
            self._fabric.meet(self.number, ("all", position), instruction.ranks, self._at)
        if isinstance(instruction, Checkpoint | Eval):
            self._store(instruction.models)
        match instruction:
            case Run():
                self._run(position, step, instruction)
            case Move():
                self._move(position, step, instruction)
            case Sync():
                self._sync(position, instruction)
            case Eval():
                self._evaluate(position, step, instruction)
            case Save():
                is_writer = self.number == instruction.ranks[0]
                weights = self._gathered(position, instruction.model, instruction.ranks, instruction, is_writer)
                self._look("save", step, instruction, weights)
            case Offload():
                # if ranks forward to each other, a copy is not stored for one of them
                is_sent_on = instruction.model in self._sync_plans and self._sync_plans[instruction.model].is_sent_on
                # weights that are lent follow the others when they are given back
                self._weights(instruction.model, is_stored=not is_sent_on, is_whole=False)
                self._check_nothing_begun(instruction.model)
                self._offloaded.add(instruction.model)
                self._synchronize("offload", instruction.model)
            case Reload():
                assert instruction.model in self._offloaded, f"{instruction.model} is on the device already"
                self._offloaded.remove(instruction.model)
                self._synchronize("reload", instruction.model)
            case Release():
                self._weights(instruction.model)
                self._check_nothing_begun(instruction.model)
                del self.trace.weights[instruction.model]
            case _:
                raise AssertionError(f"unknown instruction {instruction}")

    def _rows_of(self, step: int) -> Rows:
        """Rows of a step; rows of steps that no instruction works on any more are dropped."""
        if step not in self._rows:
            for old in [each for each in self._rows if each < step - self._plan.num_steps_kept]:
                self._rows[old].land()
                del self._rows[old]
            self._rows[step] = Rows()
        return self._rows[step]

    def _count(self, step: int, column: str) -> None:
        """Add a cell to the memory that is planned for the rows of all steps but the newest."""
        self._rows_of(step).num_bytes += self._plan.lengths.row_bytes(column)
        *earlier, _ = sorted(self._rows)
        if earlier:
            found, planned = sum(self._rows[each].num_bytes for each in earlier), self._planned_bytes
            assert found <= planned, f"rows in flight: {found} bytes on rank {self.number}, planned are {planned}"

    @cached_property
    def _planned_bytes(self) -> int:
        return self._plan.row_bytes_in_flight(self.number)

    def _synchronize(self, kind: str, model: str) -> None:
        """Note a place where an engine's library may wait for the device: graphs are captured, memory is unmapped."""
        self.trace.calls.append(Synchronize((kind, self._plan.placement[model].engine)))

    # Run ---------------------------------------------------------------------------------------------------------

    def _run(self, position: Position, step: int, run: Run) -> None:
        model = self._plan.placement[run.model]
        assert model.ranks == run.ranks, f"{model.name} is on {model.ranks}, the run names {run.ranks}"
        match run.operator.kind:
            case "train":
                self._train(position, step, run, model)
            case "step":
                self.trace.calls += self._passes(("step", position), model).step()
                reads = self._all_reduce((position,), step, run, model, run.mini_batches)
                self.trace.weights[run.model] = updated(run.operator, self.trace.weights[run.model], reads)
            case "combine" if run.operator.function == "parity":
                self._compare(position, step, run, model)
            case "combine":
                self._combine(position, step, run, model)
            case _:
                if run.operator.kind == "generate":
                    self._begin(step, run)
                reads = self._reads(step, run, run.mini_batches)
                own = self._pass(("run", position), model, run, reads)
                weights = own if run.operator.adapters else initial_weights(model.role)
                for row, read in reads.items():
                    self._write(step, run, row, read, weights)
        # statistics are read
        self.trace.calls.append(Await())

    def _train(self, position: Position, step: int, run: Run, model: PlacedModel) -> None:
        assert not self._borrowers(run.model, "views"), (
            f"{run.model} trains under {self._borrowers(run.model, 'views')}"
        )
        for epoch in range(self._plan.spec.algorithm.epochs):
            for mini_batch in run.mini_batches:
                key = (position, epoch, mini_batch)
                part = range(mini_batch, mini_batch + 1)
                self._pass(("train", *key), model, run, self._reads(step, run, part))
                reads = self._all_reduce(key, step, run, model, part)
                self.trace.weights[run.model] = updated(run.operator, self.trace.weights[run.model], reads)
        if run.operator == self._plan.graph.accounting:
            for _ in self._reads(step, run, run.mini_batches):
                self._count(step, Column.FINAL_OUTCOME)

    def _begin(self, step: int, run: Run) -> None:
        """An engine that generates may begin with the batches ahead: so just these must come, with the same
        weights, and its prompts must be there."""
        begun = self._begun[run.model][run.operator.name]
        assert run.mini_batches == (begun.pop(0) if begun else run.mini_batches), f"begun {begun}"
        ahead = self._plan.ahead(run)
        assert begun == ahead[: len(begun)], f"{ahead} ahead, begun {begun}"
        self._begun[run.model][run.operator.name] = list(ahead)
        self.trace.begun += len(ahead)

    def _check_nothing_begun(self, model: str) -> None:
        begun = [mini_batches for each in self._begun[model].values() for mini_batches in each]
        assert not begun, f"{model} has begun mini-batches {begun}"

    def _compare(self, position: Position, step: int, run: Run, model: PlacedModel) -> None:
        """The gate: all rows of the step at once, of one and the same weights."""
        self._all_reduce((position,), step, run, model, run.mini_batches)
        self.trace.looks.append(("parity", run.model, step, self._weights(run.model)))

    def _combine(self, position: Position, step: int, run: Run, model: PlacedModel) -> None:
        """Rows by themselves, or with a statistic over the run (whiten: batch) or over each mini-batch."""
        for attempt in range(run.attempt or 0):
            # an attempt depends on the scores of those before
            earlier = replace(run, operator=replace(run.operator, reads=run.operator.earlier), attempt=attempt)
            self._reads(step, earlier, run.mini_batches)
        whiten = whitening(self._plan.spec, run.operator)
        parts = [run.mini_batches] if whiten == "batch" else [range(m, m + 1) for m in run.mini_batches]
        for part in parts:
            shared = 0
            if whiten != "none":
                shared = statistic(self._all_reduce((position, part.start), step, run, model, part))
            for row, read in self._reads(step, run, part).items():
                self._write(step, run, row, read, shared)

    def _all_reduce(
        self, key: tuple[Position, ...], step: int, run: Run, model: PlacedModel, mini_batches: range
    ) -> dict[int, Value]:
        """Cells of ``mini_batches`` that the replicas read, each row exactly once, in row order."""
        ranks = model.layout.dp_set(self.number)
        self._check_group(f"compute {model.name}", ranks, run)
        own = self._reads(step, run, mini_batches)
        self._collective(("reduce", ranks, *key), f"compute {model.name}", ranks)
        gifts = self._fabric.meet(self.number, ("reduce", ranks, *key), ranks, f"{self._at}, all-reduce", own)
        merged: dict[int, Value] = {}
        for rank, gift in gifts.items():
            assert isinstance(gift, dict)
            twice = sorted(merged.keys() & gift.keys())
            assert not twice, f"row {twice[:1]} reaches the reduction twice, also from rank {rank}"
            merged |= gift
        batch = self._plan.batch
        expected = batch.rows(tuple(prompt for m in mini_batches for prompt in batch.prompts(m)))
        missing = sorted(set(expected) - merged.keys())
        assert not missing, f"row {missing[:1]} reaches no replica of {model.name}"
        assert len(merged) == len(expected), f"rows {sorted(merged.keys() - set(expected))} are not of this mini-batch"
        return dict(sorted(merged.items()))

    def _reads(self, step: int, run: Run, mini_batches: range) -> dict[int, Value]:
        """Digest of this rank's rows of ``mini_batches`` in the columns that the operator reads and carries."""
        batch = self._plan.batch
        rows = batch.rows(batch.prompts_on(run.layout, self.number, mini_batches, run.attempt))
        moved = [column for column in run.operator.reads if column not in self._plan.graph.inputs]
        self._rows_of(step).land(moved)
        # further texts are as many in every step
        texts, with_texts = run.operator.extra_reads, set(batch.text_rows(batch.first_places))
        found = {row: [name for name in run.operator.reads if name not in texts or row in with_texts] for row in rows}
        return {
            row: digest(*(self._read(step, name, row) for name in read), *self._carried(step, run, row))
            for row, read in found.items()
        }

    def _carried(self, step: int, run: Run, row: int) -> list[Value]:
        """Columns that the operator has left in the step before, of a row of a prompt that was taken earlier."""
        is_new = self._plan.batch.as_taken(row, step)[0] == step
        if is_new or not step:
            return []
        return [self._read(step - 1, column, row) for column in run.operator.carries]

    def _read(self, step: int, column: str, row: int) -> Value:
        if column in self._plan.graph.inputs:
            if (column, row) not in self._rows_of(step).inputs:
                self._rows_of(step).inputs.add((column, row))
                self._count(step, column)
            return self._input(step, column, row)
        assert step in self._rows, f"rank {self.number} reads {column} of step {step}, whose rows are dropped"
        value = self._rows[step].values.get((column, row))
        assert value is not None, (
            f"rank {self.number} reads {column} of row {row}, step {step}, but neither produced nor received it"
        )
        return value

    def _input(self, step: int, column: str, row: int) -> Value:
        return input_value(step, column, row)

    def _write(self, step: int, run: Run, row: int, read: Value, context: Value) -> None:
        for column in run.operator.writes:
            value = written(run.operator, column, step, row, read, context)
            self._put(step, column, row, value)
            if run.layout.is_first_of_replica(self.number):
                self.trace.produced.add((step, column, row))

    def _put(self, step: int, column: str, row: int, value: Value) -> None:
        """Store a cell."""
        values = self._rows_of(step).values
        place = f"{column} of row {row}, step {step}"
        assert (column, row) not in values, f"rank {self.number} already has {place}"
        self._count(step, column)
        values[column, row] = value
        self.trace.seen[step, column, row] = value

    # Move --------------------------------------------------------------------------------------------------------

    def _move(self, position: Position, step: int, move: Move) -> None:
        if self._adds_groups:
            group = Group("move", move.ranks)
            self._connect(self._groups.setdefault((group.purpose, group.ranks), group))
        self._check_group("move", move.ranks, move)
        self._hold_back(position, move)
        parcels: dict[int, list[tuple[str, int, Value]]] = defaultdict(list)
        for transfer in move.transfers:
            if transfer.source == self.number:
                parcels[transfer.destination] += self._pack(step, transfer)
        for destination, parcel in parcels.items():
            self._fabric.send((step, position, self.number, destination), parcel)
        rows = self._rows_of(step)
        sources = dict.fromkeys(t.source for t in move.transfers if t.destination == self.number)
        at, moved = self._at, self._moved(move)

        key = ("move", position)
        links = [(t.source, t.destination) for t in move.transfers if self.number in (t.source, t.destination)]
        if move.primitive != "point_to_point":
            self.trace.calls.append(Post(key, self._group("move", move.ranks)))
        elif links:
            self.trace.calls.append(Post(key, self._group("move", move.ranks), tuple(dict.fromkeys(links))))

        def arrive() -> None:
            if sources:
                self.trace.calls.append(Await(key))
            self._fabric.await_presence(self.number, ("move", position), self._peers(move), f"{self._at}, after {at},")
            for source in sources:
                self._unpack(position, step, source, at)
            if move.primitive == "all_gather":
                self._check_everything(step, move, moved)

        rows.arrivals.append((move.columns, arrive))
        if self._mode == "rendezvous":
            rows.land()

    def _hold_back(self, position: Position, move: Move) -> None:
        """Two sends of an edge may be in flight; before the third the peers of the first must have come to it."""
        edge = self._edges[move.label]
        if len(edge) == 2:
            oldest, peers = edge.popleft()
            self.trace.calls.append(Await(("move", oldest)))
            self._fabric.await_presence(self.number, ("move", oldest), peers, f"{self._at}, two sends in flight,")
        self._fabric.arrive(self.number, ("move", position), move.ranks)
        edge.append((position, self._peers(move)))

    def _peers(self, move: Move) -> tuple[int, ...]:
        """Ranks that this rank's part of the Move joins: in a collective all."""
        if move.primitive != "point_to_point":
            return move.ranks
        pairs = [(t.source, t.destination) for t in move.transfers if self.number in (t.source, t.destination)]
        return tuple(sorted(set(chain.from_iterable(pairs))))

    def _pack(self, step: int, transfer: Transfer) -> list[tuple[str, int, Value]]:
        self._rows_of(step).land([transfer.column])
        rows = self._plan.batch.rows(transfer.prompts)
        return [(transfer.column, row, self._read(step, transfer.column, row)) for row in rows]

    def _unpack(self, position: Position, step: int, source: int, at: str) -> None:
        wait = f"{self._at} waits for rows from rank {source} of {at}"
        parcel = self._fabric.receive(self.number, (step, position, source, self.number), wait)
        assert isinstance(parcel, list)
        for column, row, value in parcel:
            self._put(step, column, row, value)

    def _moved(self, move: Move) -> range:
        return self._plan.batch.mini_batches if move.chunk is None else self._plan.batch.chunk(move.chunk)

    def _check_everything(self, step: int, move: Move, mini_batches: range) -> None:
        batch = self._plan.batch
        rows = batch.rows(tuple(prompt for m in mini_batches for prompt in batch.prompts(m)))
        present = self._rows_of(step).values
        missing = [(column, row) for column in move.columns for row in rows if (column, row) not in present]
        assert not missing, f"after the all_gather {move.label} rank {self.number} lacks {missing[0]}"

    # Sync --------------------------------------------------------------------------------------------------------

    def _sync(self, position: Position, sync: Sync) -> None:
        source, destination = (self._plan.placement[name] for name in (sync.source, sync.destination))
        ranks = next((ranks for ranks in sync.gathers if self.number in ranks), ())
        if ranks:
            self._gathered(position, sync.source, ranks, sync, True)
        shape, settings = self._plan.shapes[source.role], self._plan.spec.sync
        node_of = self._plan.cluster.node_of
        transfers = self._fabric.shared(
            ("transfers", sync.destination),
            lambda: transfers_of(
                source, destination, shape, settings.bucket_bytes, node_of, settings.dtype, sync.overlaps
            ),
        )
        plan = self._sync_plans.get(sync.destination) or sync_on_rank(
            transfers, source, destination, shape, self.number, settings.dtype
        )
        self._sync_plans[sync.destination] = plan
        receivers = {rank for bucket in plan.buckets for message in bucket.sends for rank in message.destinations}
        senders = {message.source for bucket in plan.buckets for message in bucket.receives}
        if self.number in destination.ranks and not sync.refills:
            self._weights(sync.destination)
        if receivers or senders:
            assert {*receivers, *senders} <= set(sync.ranks), f"{sync.label} leaves {sync.ranks}"
            self._check_group(f"sync {sync.source}", sync.ranks, sync)
            calls, later = sync_calls(
                plan, self._group(f"sync {sync.source}", sync.ranks), position, settings.checksum, sync.overlaps
            )
            self.trace.calls += [*self._unawaited.pop(sync.source, ()), *calls]
            self._unawaited[sync.source if self.number in source.ranks else sync.destination] = later
        own = {self._weights(sync.source)} if self.number in source.ranks else set()
        # ranks that nothing is left for, of fewer rows than ranks
        without = {rank for rank in destination.ranks if not _stores_something(destination, shape, rank)}
        if self.number == source.ranks[0]:
            for receiver in without:
                self._fabric.send(("sync", position, self.number, receiver, -1), *own)
        arrived = self._exchanged(plan, position, own)
        if self.number not in destination.ranks:
            return
        if sync.refills:
            assert sync.destination not in self.trace.weights, f"{sync.destination} has not been released"
        self._check_nothing_begun(sync.destination)
        if self.number in without:
            arrived |= {self._weights_of(source.ranks[0], position, -1)}
        arrived |= own if any(bucket.stays for bucket in plan.buckets) else set()
        (parcel,) = arrived
        assert isinstance(parcel, int)
        self.trace.weights[sync.destination] = parcel

    def _exchanged(self, plan: SyncPlan, position: Position, own: set[Value]) -> set[Value]:
        """Send and receive bucket by bucket; return the received weights."""
        arrived: set[Value] = set()
        for number, bucket in enumerate(plan.buckets):
            for is_sent_on, sent in ((False, own), (True, arrived)):
                messages = [message for message in bucket.sends if message.is_sent_on == is_sent_on]
                for receiver in {rank for message in messages for rank in message.destinations}:
                    self._fabric.send(("sync", position, self.number, receiver, number, is_sent_on), *sent)
            for sender, is_sent_on in {(message.source, message.is_sent_on) for message in bucket.receives}:
                arrived.add(self._weights_of(sender, position, number, is_sent_on))
        return arrived

    def _weights_of(self, sender: int, position: Position, *key: object) -> Value:
        wait = f"{self._at} waits for weights from rank {sender}"
        parcel = self._fabric.receive(self.number, ("sync", position, sender, self.number, *key), wait)
        assert isinstance(parcel, int)
        return parcel

    # Eval --------------------------------------------------------------------------------------------------------

    def _evaluate(self, position: Position, step: int, instruction: Eval) -> None:
        evaluation = EvaluationRank(self, instruction)
        evaluation.walk(position, step, instruction)
        self.trace.looks += evaluation.trace.looks
        self.trace.evaluated |= evaluation.trace.seen
        self.trace.evaluations |= evaluation.trace.produced

    # Weights -----------------------------------------------------------------------------------------------------

    def _weights(self, model: str, is_stored: bool = True, is_whole: bool = True) -> Value:
        """The weights that this rank's part belongs to.

        is_stored:  whether received weights are stored for this.
        is_whole:   whether all of them have to be there, also those that a copy may have borrowed.
        """
        if is_stored:
            self._store([model])
        assert model in self.trace.weights, f"{model} has no weights on rank {self.number}"
        assert model not in self._offloaded, f"{model} waits in host memory on rank {self.number}"
        borrowers = self._borrowers(model, "lent") if is_whole else []
        assert not borrowers, f"{model} has lent weights to {borrowers}"
        return self.trace.weights[model]

    def _borrowers(self, model: str, kind: Literal["views", "lent"]) -> list[str]:
        """Copies of ``model`` that exist, and store weights for it or have views of its own."""
        copies = [self._plan.placement[name] for name in self.trace.weights if name != model]
        reused = {copy.name: self._plan.sizing.reuse(copy, self.number) for copy in copies if copy.role == model}
        return [name for name, reuse in reused.items() if reuse is not None and getattr(reuse, kind)]

    def _store(self, models: Iterable[str]) -> None:
        """Await received weights of copies."""
        for model in models:
            if self._plan.placement[model].follows:
                self.trace.calls += self._unawaited.pop(model, ())

    def _pass(self, key: tuple[object, ...], model: PlacedModel, instruction: Run, reads: object = None) -> Value:
        """Compute with ``model``: ranks that share its weights exchange layers or activations.

        So all of them must come, with parts of the same weights; ranks of one replica with the same rows.
        """
        layout, weights = model.layout, self._weights(model.name)
        passes, kind = self._passes(key, model), instruction.operator.kind
        if kind == "generate":
            self._synchronize(kind, model.name)
        calls = {"generate": passes.generate, "train": passes.train, "backward": passes.backward}
        self.trace.calls += calls.get(kind, passes.forward)()
        if model.facts.groups_of_one:
            assert Group("alone", (self.number,), alone=True) in self._plan.groups, f"no group of {self.number} alone"
        if layout.dims.tp > 1:
            ranks = next(ranks for ranks in layout.sets("tp") if self.number in ranks)
            self._agree((*key, "tp"), f"tp {model.name}", ranks, instruction, (weights, reads))
        if layout.dims.cp > 1:
            self._agree(
                (*key, "cp"), f"cp {model.name}", layout.along("cp", self.number), instruction, (weights, reads)
            )
        if layout.dims.pp > 1:
            stages, ends = layout.along("pp", self.number), GroupPurpose.of_ends(layout.along("pp", self.number))
            self._agree((*key, "pp"), f"pp {model.name}", stages, instruction, (weights, reads))
            self._check_group(f"{ends[0]} {model.name}", ends[1], instruction)
        if model.split != "whole" or (layout.dims.cp > 1 and instruction.operator.kind == "train"):
            purpose, ranks = (
                GroupPurpose.WEIGHTS if layout.dims.cp > 1 else "compute",
                layout.of_weights.dp_set(self.number),
            )
            self._agree((*key, "dp"), f"{purpose} {model.name}", ranks, instruction, weights)
        if layout.dims.ep > 1:
            self._agree(
                (*key, "ep"),
                f"{GroupPurpose.EXPERTS} {model.name}",
                layout.along("ep", self.number),
                instruction,
                weights,
            )
            same = model.expert_copy_set(self.number)
            if instruction.operator.kind == "train":
                self._agree((*key, "same"), f"{GroupPurpose.SAME_EXPERTS} {model.name}", same, instruction, weights)
        if model.is_sharded_in_nodes:
            sets = {GroupPurpose.SHARD: model.shard_set(self.number), GroupPurpose.COPIES: model.copy_set(self.number)}
            for purpose, ranks in sets.items():
                if purpose == GroupPurpose.SHARD or instruction.operator.kind == "train":
                    self._agree((*key, purpose), f"{purpose} {model.name}", ranks, instruction, weights)
        return weights

    def _passes(self, key: tuple[object, ...], model: PlacedModel) -> PassCalls:
        """Calls inside the passes of a Run of ``model``, as its engine makes them."""
        sizes = self._plan.shapes[model.role].sizes
        is_ring = sizes is not None and model.settings.is_ring(sizes.heads)
        return PassCalls(
            model, self.number, key, is_ring, lambda purpose, ranks: self._group(f"{purpose} {model.name}", ranks)
        )

    def _group(self, purpose: str, ranks: tuple[int, ...]) -> Group:
        """The plan's group of ``ranks``; a rank alone has none, and ``_check_group`` reports one that is missing."""
        return self._groups.get((purpose, ranks), Group(purpose, ranks))

    def _agree(
        self, key: tuple[object, ...], purpose: str, ranks: tuple[int, ...], instruction: Instruction, gift: object
    ) -> None:
        self._check_group(purpose, ranks, instruction)
        gifts = self._fabric.meet(self.number, (*key, ranks), ranks, f"{self._at}, together,", gift)
        assert all(other == gift for other in gifts.values()), f"{purpose}: ranks {ranks} do not compute the same"

    def _gathered(
        self, position: Position, name: str, ranks: tuple[int, ...], instruction: Instruction, is_needed: bool
    ) -> Value:
        """The weights of ``name`` from the parts of ``ranks``; ``is_needed``: this rank must then have them whole."""
        self._check_group(f"gather {name}", ranks, instruction)
        model, weights = self._plan.placement[name], self._weights(name)
        own = (shard_of(model, self.number), weights)
        self._collective(("gather", position, ranks), f"gather {name}", ranks)
        gifts = self._fabric.meet(self.number, ("gather", position, ranks), ranks, f"{self._at}, gather", own)
        shards = {gift[0] for gift in gifts.values() if isinstance(gift, tuple)}
        assert set(gifts.values()) == {(shard, weights) for shard in shards}, f"{name}: parts of different weights"
        missing = sorted({shard_of(model, rank) for rank in model.ranks} - shards)
        assert not (is_needed and missing), f"ranks {ranks} have {name} without its parts {missing}"
        return weights

    def _collective(self, key: object, purpose: str, ranks: tuple[int, ...]) -> None:
        if len(ranks) > 1:
            self.trace.calls += [Post(key, self._group(purpose, ranks)), Await(key)]

    def _look(self, use: str, step: int, instruction: Run | Save, weights: Value) -> None:
        self.trace.looks.append((use, instruction.model, step, weights))

    def _check_group(self, purpose: str, ranks: tuple[int, ...], instruction: Instruction) -> None:
        """Ranks talk in a group that the plan made for this purpose and that the instruction names."""
        assert set(ranks) <= set(instruction.ranks), f"{purpose} of {ranks}, but {instruction.ranks} are named"
        assert len(ranks) == 1 or (purpose, ranks) in self._groups, f"no group {purpose!r} of {ranks}"


def _stores_something(model: PlacedModel, shape: ModelShape, rank: int) -> bool:
    return any(part.num_elements for part in shape.trained_parts(model, rank).values())


class EvaluationRank(Rank):
    """``rank`` while an evaluation lasts: its weights, with rows of their own."""

    def __init__(self, rank: Rank, instruction: Eval) -> None:
        batch, plan = instruction.batch, rank._plan
        shape = evaluation_shape(num_evaluation_prompts(batch.num_prompts), batch)
        graph = replace(plan.graph, operators=plan.graph.evaluation)
        super().__init__(rank.number, replace(plan, batch=shape, graph=graph), rank._fabric, rank._mode)
        self.trace = Trace(weights=rank.trace.weights, calls=rank.trace.calls)
        self._shape = shape
        self._offloaded = rank._offloaded
        self._above = rank._at
        self._batches = range(0)
        self._use = "first eval" if instruction.at_start else "eval"

    def walk(self, position: Position, step: int, instruction: Eval) -> None:
        for place, inner, batches in walk_evaluation(instruction, self._shape, self.number):
            self._at = f"{self._above}, batch {batches.start}, {inner.label}"
            self._batches = batches
            each = inner if isinstance(inner, Move) else replace(inner, mini_batches=batches)
            self._do((position, place, batches), step, each)
        for rows in self._rows.values():
            rows.land()

    def _run(self, position: Position, step: int, run: Run) -> None:
        super()._run(position, step, run)
        self._look(self._use, step, run, self._weights(run.model))

    def _begin(self, step: int, run: Run) -> None:
        """The trained copy generates responses batch by batch."""

    def _combine(self, position: Position, step: int, run: Run, model: PlacedModel) -> None:
        """Rows by themselves, or a statistic of all."""
        if run.is_statistic:
            assert run.mini_batches == self._shape.mini_batches, "a statistic of some rows"
            self._all_reduce((position,), step, run, model, run.mini_batches)
        for row, read in self._reads(step, run, run.mini_batches).items():
            self._write(step, run, row, read, 0)

    def _input(self, step: int, column: str, row: int) -> Value:
        return evaluation_value(column, row)

    def _moved(self, move: Move) -> range:
        return self._batches


def shard_of(model: PlacedModel, rank: int) -> tuple[int, int, int]:
    """Part of the weights on a rank: stage, tensor-parallel index, and shard or experts if it has only a part."""
    return model.position(rank)
