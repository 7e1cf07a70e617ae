"""Schedule: the ordered list of instructions of one step, from operators and placed models.

Every rank walks the same list and executes the instructions that name it, so the earliest unfinished instruction always
has all its ranks at it: no circular wait by construction. A tick is what may run at the same time: wave + chunk. Inside
a tick generation comes first, since it feeds all others; then the deepest wave, so that training never waits for a
later chunk. Columns leave for all their readers right after the runs of the wave that wrote them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby

from flexrlhf.config.data_settings import EvalSpec
from flexrlhf.config.spec import Spec
from flexrlhf.operators.graph import Graph, Operator
from flexrlhf.placement.layout import BatchShape, Layout, common_range
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.placement.placement import Placement
from flexrlhf.placement.transfer import Transfer
from flexrlhf.strategies.instructions import (
    Checkpoint,
    Eval,
    Instruction,
    Move,
    Offload,
    Run,
    Save,
    Sync,
)
from flexrlhf.strategies.routes import PromptsByRank, primitive_of, route


@dataclass(frozen=True)
class RunStart:
    """First batches of a run that goes on; after a change of ``schedule.lag`` as many are in flight as before it.

    next_step:  first batch that is not trained on yet.
    generated:  first batch that is not generated yet.
    missing:    columns that batches in flight lack, since another placement computes them with training.
    """

    next_step: int = 0
    generated: int = 0
    missing: frozenset[str] = frozenset()

    def begins(self, instruction: Instruction, lag: int) -> int:
        """Return the first batch that ``instruction`` is executed for, in a list of the largest lag ``lag``."""
        if instruction.is_of_every_round:
            return 0
        return self.next_step if instruction.lag == lag or self.brings(instruction) else self.generated

    def brings(self, instruction: Instruction) -> bool:
        """Whether ``instruction`` computes or moves columns that batches in flight lack."""
        columns: tuple[str, ...] = ()
        match instruction:
            case Run(operator=operator):
                columns = operator.writes
            case Move():
                columns = instruction.columns
        return not self.missing.isdisjoint(columns)


ANEW = RunStart()


@dataclass(frozen=True)
class Schedule:
    """Instructions of one step. ``lag``: the largest lag among them."""

    instructions: tuple[Instruction, ...]
    lag: int

    def for_rank(self, rank: int) -> tuple[Instruction, ...]:
        """Return the instructions that name ``rank``."""
        return tuple(instruction for instruction in self.instructions if rank in instruction.ranks)

    def rounds(self, steps: int, start: RunStart = ANEW) -> range:
        """Return the rounds of the list in a run that begins with ``start``; the last batch takes ``lag`` more.

        More batches in flight than the lag are trained on first; with fewer the first rounds generate alone. Columns
        that batches in flight lack are computed in the rounds that generated these.
        """
        first = start.next_step + (0 if start.missing else self.lag)
        return range(min(first, start.generated) if start.generated < steps else first, steps + self.lag)

    def walk_round(
        self, rank: int, steps: int, turn: int, start: RunStart = ANEW
    ) -> Iterator[tuple[int, int, Instruction]]:
        """Yield the instructions of ``rank`` in one round: (position, step of the batch, instruction), in order.

        ``position`` counts along the list that all ranks walk, so that ranks can be compared.
        """
        length = len(self.instructions)
        for index, instruction in enumerate(self.instructions):
            step = turn - instruction.lag
            is_due = instruction.due(step, steps) and step >= start.begins(instruction, self.lag)
            if is_due and rank in instruction.ranks:
                yield turn * length + index, step, instruction

    def walk(self, rank: int, steps: int) -> Iterator[tuple[int, int, Instruction]]:
        """Yield the instructions of ``rank`` in a whole run, as ``walk_round`` does."""
        for turn in self.rounds(steps):
            yield from self.walk_round(rank, steps, turn)

    def later_chunks(self, run: Run) -> list[range]:
        """Return the mini-batches of the chunks that follow ``run`` in ``instructions`` before its model is offloaded;
        none for a run that a program calls.

        Rows of a later attempt depend on the scores of an earlier one; episodes of a later chunk begin when those of
        an earlier one have ended.
        """
        chunks: list[range] = []
        is_alone = run.attempt is not None or run.operator.has_replies or run not in self.instructions
        for instruction in () if is_alone else self.instructions[self.instructions.index(run) + 1 :]:
            if isinstance(instruction, Offload) and instruction.model == run.model:
                break
            if isinstance(instruction, Run) and (instruction.operator, instruction.model) == (run.operator, run.model):
                chunks.append(instruction.mini_batches)
        return chunks

    def around_calls(self, step: int, steps: int, before: bool) -> Iterator[Instruction]:
        """Yield the instructions around the calls of a step that are due in it: syncs, evaluations, saves and
        checkpoints.

        ``before``: those of the weights that the step starts from; else those behind its calls.
        """
        first = next((index for index, each in enumerate(self.instructions) if isinstance(each, Run)), 0)
        for index, each in enumerate(self.instructions):
            if isinstance(each, Run | Move) or not each.due(step, steps):
                continue
            is_first = not each.after_training if isinstance(each, Sync) else isinstance(each, Eval) and index < first
            if is_first == before:
                yield each

    def as_called(self, called: Sequence[Instruction], step: int) -> Schedule:
        """Return the schedule of a step as it was called, with what stands around the calls in ``instructions``."""
        steps = step + 2  # neither the last step nor the only one
        lag = max((each.lag for each in called), default=0)
        opening, closing = (
            [replace(each, lag=min(each.lag, lag)) for each in self.around_calls(step, steps, before)]
            for before in (True, False)
        )
        return Schedule((*opening, *called, *closing), lag)


@dataclass(frozen=True)
class OperatorTask:
    """An operator on one chunk.

    chunk:       None for the whole step; or an attempt of dynamic sampling.
    tick:        wave + chunk: tasks of one tick may overlap.
    is_awaited:  a child process computes it.
    is_attempt:  whether its chunk is an attempt.
    called:      mini-batches that a program calls it on; None: by its chunk.
    """

    operator: Operator
    wave: int
    chunk: int | None
    tick: int
    is_awaited: bool = False
    is_attempt: bool = False
    called: range | None = None

    @property
    def attempt(self) -> int | None:
        """Attempt of dynamic sampling; None for the rows of all attempts."""
        return self.chunk if self.is_attempt else None

    @property
    def order(self) -> tuple[int, bool, int]:
        feeds_others = self.wave == 0
        return self.tick, feeds_others == self.is_awaited, -self.wave


def make_tasks(
    graph: Graph, placement: Placement, shape: BatchShape, operators: Iterable[Operator]
) -> list[OperatorTask]:
    """Return tasks in schedule order: by tick, inside it generation, then the deepest wave, then in graph order.

    Attempts of dynamic sampling follow one another, and all other operators the last of them.
    """
    whole = placement.whole_step(graph)
    chunks = shape.num_chunks
    taken = [graph.waves[operator.name] for operator in graph.operators if operator.is_repeated]
    depth = max(taken, default=-1) + 1
    tasks = []
    for operator in operators:
        wave, awaited = graph.waves[operator.name], _is_awaited(operator, placement)
        if operator.is_repeated:
            ticks = enumerate(range(wave, wave + shape.attempts * depth, depth))
            tasks += [OperatorTask(operator, wave, attempt, tick, awaited, is_attempt=True) for attempt, tick in ticks]
            continue
        if depth:
            last = (shape.attempts - 1) * depth
            tasks.append(OperatorTask(operator, wave, None, wave + last, awaited))
            continue
        is_whole = operator.name in whole or chunks == 1
        for chunk in (None,) if is_whole else range(chunks):
            number = chunks - 1 if chunk is None else chunk
            tasks.append(OperatorTask(operator, wave, chunk, wave + number, awaited))
    return sorted(tasks, key=lambda task: task.order)


def _is_awaited(operator: Operator, placement: Placement) -> bool:
    """Whether a child process generates: then its rank computes what it can before it waits for the next chunk."""
    if operator.kind != "generate":
        return False
    rollout = placement.copy_for(operator).rollout
    return rollout is not None and rollout.process == "child"


Readers = tuple[tuple[ModelName, Layout], ...]
"""Models that read columns, with the layout of the rows that they read."""


@dataclass
class Builder:
    """Emitter of runs and the moves that they need.

    produced:   column → rank → prompts that the rank computed.
    available:  column → rank → prompts that the rank has, computed or received.
    known:      prompts of mini-batches by rank, for each layout that was needed so far.
    """

    placement: Placement
    shape: BatchShape
    lag: int = 0
    produced: dict[str, PromptsByRank] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))
    available: dict[str, PromptsByRank] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))
    known: dict[object, Mapping[int, tuple[int, ...]]] = field(default_factory=dict)

    def emit(self, tasks: list[OperatorTask]) -> list[Instruction]:
        """Return, wave by wave and chunk by chunk, the runs, then the moves of their columns to later readers."""
        out: list[Instruction] = []
        for _, wave in groupby(tasks, key=lambda task: task.order):
            members = list(wave)
            out += [self.run(task) for task in members]
            out += self.moves(members, tasks)
        return out

    def run(self, task: OperatorTask) -> Run:
        """Return the Run of ``task`` and record the columns that its ranks now have."""
        model, layout = self.model_of(task.operator), self.layout_of(task.operator)
        mini_batches = self.mini_batches(task)
        prompts = self._prompts(layout, mini_batches, task.attempt)
        for column in task.operator.writes:
            for holdings in (self.produced[column], self.available[column]):
                for rank in model.ranks:
                    holdings[rank].update(prompts[rank])
        return Run(
            ranks=model.ranks,
            lag=self.lag,
            operator=task.operator,
            model=model.name,
            layout=layout,
            mini_batches=mini_batches,
            chunk=task.chunk,
            attempt=task.attempt,
            tokens=self.placement.pass_tokens_of(task.operator),
        )

    def moves(self, writers: Iterable[OperatorTask], readers: Iterable[OperatorTask]) -> list[Move]:
        """Return the moves of what ``writers`` wrote to the models of ``readers`` that lack it.

        Columns of one chunk for the same models and rows travel together.
        """
        bundles: dict[tuple[int | None, Readers], list[tuple[str, OperatorTask]]] = defaultdict(list)
        for writer in writers:
            for column in writer.operator.writes:
                lacking = [r for r in readers if self._lacks(column, r, writer)]
                if lacking:
                    found = ((self.model_of(each.operator).name, self.layout_of(each.operator)) for each in lacking)
                    bundles[writer.chunk, tuple(dict.fromkeys(found))].append((column, writer))
        return [self._move(columns, readers, chunk) for (chunk, readers), columns in bundles.items()]

    def model_of(self, operator: Operator) -> PlacedModel:
        """Return the placed model that runs ``operator``."""
        return self.placement.copy_for(operator)

    def layout_of(self, operator: Operator) -> Layout:
        """Return the layout of the rows of ``operator``."""
        return self.placement.layout_of(operator)

    def mini_batches(self, task: OperatorTask) -> range:
        """Return the mini-batches of ``task``."""
        if task.called is not None:
            return task.called
        return self.shape.mini_batches if task.chunk is None or task.is_attempt else self.shape.chunk(task.chunk)

    def _needs(self, layouts: tuple[Layout, ...], writer: OperatorTask) -> PromptsByRank:
        needed: PromptsByRank = defaultdict(set)
        for layout in layouts:
            for rank, prompts in self._prompts(layout, self.mini_batches(writer), writer.attempt).items():
                needed[rank].update(prompts)
        return needed

    def _prompts(self, layout: Layout, mini_batches: range, attempt: int | None) -> Mapping[int, tuple[int, ...]]:
        """Return the prompts of ``mini_batches`` on each rank under ``layout``, also of one ``attempt``; the ranks of a
        replica share them."""
        key = layout, mini_batches, attempt
        if key not in self.known:
            firsts = {layout.replica(rank): rank for rank in reversed(layout.ranks)}
            parts = {at: self.shape.prompts_on(layout, rank, mini_batches, attempt) for at, rank in firsts.items()}
            self.known[key] = {rank: parts[layout.replica(rank)] for rank in layout.ranks}
        return self.known[key]

    def _lacks(self, column: str, reader: OperatorTask, writer: OperatorTask) -> bool:
        """Whether a rank of the reader misses prompts of the mini-batches that both work on, of what it reads."""
        reads = reader.operator.columns_read(reader.attempt, writer.attempt)
        if column not in (*reads, *reader.operator.carries):
            return False
        both = common_range(self.mini_batches(reader), self.mini_batches(writer))
        layout, available = self.layout_of(reader.operator), self.available[column]
        needed = self._prompts(layout, both, writer.attempt)
        return any(not available.get(rank, set()).issuperset(prompts) for rank, prompts in needed.items())

    def _all_have(self, columns: list[tuple[str, OperatorTask]], ranks: tuple[int, ...]) -> bool:
        """Whether each of ``ranks`` has all rows that the writers of ``columns`` wrote."""
        return all(
            self.available[column][rank].issuperset(self.shape.prompts_of_attempt(mini_batch, writer.attempt))
            for column, writer in columns
            for mini_batch in self.mini_batches(writer)
            for rank in ranks
        )

    def _move(self, columns: list[tuple[str, OperatorTask]], readers: Readers, chunk: int | None) -> Move:
        transfers: list[Transfer] = []
        layouts = tuple(dict.fromkeys(layout for _, layout in readers))
        routed: list[tuple[OperatorTask, str, list[Transfer]]] = []
        for column, writer in columns:
            # columns of one operator travel alike, unless some ranks have received one before
            alike = (
                found
                for other, first, found in routed
                if other is writer and all(each[column] == each[first] for each in (self.produced, self.available))
            )
            found = next(alike, None)
            if found is None:
                found = route(column, self.produced[column], self.available[column], self._needs(layouts, writer))
                routed.append((writer, column, found))
            transfers += [Transfer(column, each.source, each.destination, each.prompts) for each in found]
        for transfer in transfers:
            self.available[transfer.column][transfer.destination].update(transfer.prompts)
        ranks = tuple(sorted({rank for t in transfers for rank in (t.source, t.destination)}))
        return Move(
            ranks=ranks,
            lag=self.lag,
            columns=tuple(column for column, _ in columns),
            sources=tuple(dict.fromkeys(self.model_of(writer.operator).name for _, writer in columns)),
            destinations=tuple(dict.fromkeys(name for name, _ in readers)),
            primitive=primitive_of(transfers, ranks, self._all_have(columns, ranks)),
            transfers=tuple(transfers),
            chunk=chunk,
        )


@dataclass(frozen=True)
class _Emission:
    """Input of a builder, equal to any with the same tasks on the same ranks.

    places:  copy of each task's operator, its ranks, the layout of the rows, and the tokens of its passes.
    """

    tasks: tuple[OperatorTask, ...]
    shape: BatchShape
    places: tuple[tuple[ModelName, Layout, Layout, int | None], ...]
    placement: Placement = field(compare=False)


def emitted(placement: Placement, shape: BatchShape, tasks: Sequence[OperatorTask]) -> tuple[Instruction, ...]:
    """Return the runs of ``tasks`` and their moves, from a cache: plans that differ in other settings have the same."""
    copies = [(placement.copy_for(task.operator), task.operator) for task in tasks]
    places = tuple(
        (copy.name, copy.layout, placement.layout_of(operator), placement.pass_tokens_of(operator))
        for copy, operator in copies
    )
    return _emitted(_Emission(tuple(tasks), shape, places, placement))


@lru_cache(maxsize=16)
def _emitted(emission: _Emission) -> tuple[Instruction, ...]:
    return tuple(Builder(emission.placement, emission.shape).emit([*emission.tasks]))


def checkpoints(placement: Placement, spec: Spec, lag: int) -> list[Instruction]:
    """Return the Checkpoint that ends a step, if the run writes some."""
    every = spec.checkpoint.every
    return [] if every is None else [Checkpoint.of(placement, spec, lag, every)]


def closing(graph: Graph, placement: Placement, shape: BatchShape, spec: Spec, lag: int) -> list[Instruction]:
    """Return Eval and Save of the trained models, which end a step."""
    out: list[Instruction] = []
    if spec.eval is not None and graph.evaluation:
        every = spec.eval.every or spec.steps
        out.append(replace(_evaluation(graph, placement, shape, spec.eval), lag=lag, every=every, at_end=True))
        if spec.save.best is not None:
            out += [replace(save, best=spec.save.best) for save in _saves(graph, placement, lag, every)]
    return out + _saves(graph, placement, lag, spec.save.every or spec.steps)


def opening(graph: Graph, placement: Placement, shape: BatchShape, spec: Spec) -> list[Instruction]:
    """Return the Eval of the models that a run starts from, if it is set and the first step has none of its own."""
    if spec.eval is None or not spec.eval.before or not graph.evaluation or 1 in (spec.steps, spec.eval.every):
        return []
    return [replace(_evaluation(graph, placement, shape, spec.eval), at_start=True)]


def _evaluation(graph: Graph, placement: Placement, shape: BatchShape, settings: EvalSpec) -> Eval:
    # a batch has as many prompts as a step
    k = shape.sequences
    samples = k * settings.num_samples(shape.samples_per_prompt // k)
    batch = BatchShape(shape.num_new, samples, num_blocks=shape.num_blocks, sequences=k)
    inner = evaluation_of(graph, placement, batch)
    return Eval(ranks=tuple(sorted({rank for each in inner for rank in each.ranks})), instructions=inner, batch=batch)


def evaluation_of(graph: Graph, placement: Placement, batch: BatchShape) -> tuple[Run | Move, ...]:
    """Return the instructions of one batch of an evaluation, whose rows no protocol splits."""
    own = replace(graph, operators=graph.evaluated, evaluation=())
    placed = replace(placement, layouts={})
    instructions = emitted(placed, batch, make_tasks(own, placed, batch, graph.evaluated))
    return tuple(each for each in instructions if isinstance(each, Run | Move))


def _saves(graph: Graph, placement: Placement, lag: int, every: int) -> list[Save]:
    models = [placement[role] for role in graph.trained]
    return [Save(ranks=m.gather_sets[0], lag=lag, every=every, at_end=True, model=m.name) for m in models]
