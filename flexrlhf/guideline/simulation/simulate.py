"""A run on paper: the seconds of a plan's instructions, played as the trainer plays them.

``seconds`` of a Simulation are those of a step of a settled run. What most steps do without (Save, Eval, a gate that
is not due) is priced beside it, in ``rare``. Not simulated: that a child process decodes the next chunk while its rank
does something else, and that vLLM draws rows of a later chunk along with those of an earlier one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from flexrlhf.errors import UserError
from flexrlhf.guideline.costs.cost_model import Cost, CostModel
from flexrlhf.guideline.simulation.pricing import Pricer, TextLengths, longest_texts, synced_weights
from flexrlhf.guideline.simulation.traffic import Flow, NodeBytes, bytes_by_node, gather_flows, move_flows, sync_flows
from flexrlhf.guideline.simulation.walk import Node, Visit, Walked, steady_seconds, walk_nodes
from flexrlhf.operators.graph import Operator
from flexrlhf.placement.names import ModelName
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Eval, Instruction, Move, Offload, Reload, Run, Save, Sync
from flexrlhf.timeline import Span, write_trace


@dataclass(frozen=True)
class Priced:
    """An instruction and what it costs each time that it is due."""

    instruction: Instruction
    cost: Cost

    @property
    def is_rare(self) -> bool:
        return is_rare(self.instruction)

    @property
    def every(self) -> int:
        return every_of(self.instruction)


@dataclass(frozen=True)
class Shares:
    """Of a step, how much a device computes, sends or is sent weights, and waits; together 1."""

    running: float
    exchanging: float

    @property
    def waiting(self) -> float:
        """The bubble."""
        return 1.0 - self.running - self.exchanging


@dataclass(frozen=True)
class Simulation:
    """``blocks``: ranks that do the same instructions. ``nodes``: what the walk knows of ``priced``. ``seconds``: of a
    step, settled."""

    plan: Plan
    lengths: TextLengths
    priced: tuple[Priced, ...]
    blocks: tuple[tuple[int, ...], ...]
    nodes: tuple[Node, ...]
    seconds: float

    @property
    def samples_per_second(self) -> float:
        return self.plan.batch.num_rows / self.seconds if self.seconds else 0.0

    @property
    def regular(self) -> tuple[Priced, ...]:
        return tuple(item for item in self.priced if not item.is_rare)

    @property
    def rare(self) -> tuple[Priced, ...]:
        return tuple(item for item in self.priced if item.is_rare)

    @cached_property
    def shares(self) -> tuple[Shares, ...]:
        """Of each block."""
        return tuple(self._shares_of(ranks[0]) for ranks in self.blocks)

    def _shares_of(self, rank: int) -> Shares:
        """Moves travel beside what a device does."""
        busy = {True: 0.0, False: 0.0}
        for item in self.regular:
            if rank in item.instruction.ranks and not isinstance(item.instruction, Move):
                busy[isinstance(item.instruction, Run)] += item.cost.seconds / item.every
        period = self.seconds or 1.0
        return Shares(busy[True] / period, busy[False] / period)

    @cached_property
    def model_shares(self) -> Mapping[ModelName, float]:
        """Placed model → of a step, how long it runs."""
        shares = {model.name: 0.0 for model in self.plan.placement.models}
        for item in self.regular:
            if isinstance(item.instruction, Run):
                shares[item.instruction.model] += item.cost.seconds / item.every / (self.seconds or 1.0)
        return shares

    @property
    def utilisation(self) -> float:
        """The share of all devices' time in which they run models; idle ones count."""
        return self._mean([share.running for share in self.shares])

    @property
    def bubble(self) -> float:
        """The share of all devices' time in which they wait."""
        return 1.0 - self.utilisation - self._mean([share.exchanging for share in self.shares])

    def _mean(self, values: Sequence[float]) -> float:
        """Of all ranks, from one value for each block."""
        total = sum(len(ranks) * value for ranks, value in zip(self.blocks, values, strict=True))
        return total / self.plan.placement.num_ranks

    @cached_property
    def node_bytes(self) -> Mapping[int, NodeBytes]:
        """Node → bytes of a step, of moves and syncs; what engines exchange inside a call is not among them."""
        return bytes_by_node(self._flows(), self.plan.cluster)

    def _flows(self) -> Iterator[tuple[Flow, float]]:
        for item in self.regular:
            for flow in flows_of(self.plan, item.instruction):
                yield flow, 1 / item.every

    def walked(self, steps: int) -> Walked:
        """A run of ``steps`` steps, from its start; Save and Eval as they are due in it."""
        instructions = [item.instruction for item in self.priced]
        return walk_nodes(self.nodes, len(self.blocks), steps, lambda index, step: instructions[index].due(step, steps))

    def spans(self, steps: int) -> Iterator[Span]:
        """The timeline of such a run on all ranks, as the trainer records it."""
        sent = {index: _sent(self.plan, item.instruction) for index, item in enumerate(self.priced)}
        for visit in self.walked(steps).visits:
            instruction = self.priced[visit.node].instruction
            for rank in self.blocks[visit.block]:
                yield _span(instruction, visit, rank, sent[visit.node].get(rank, 0))


def simulate(plan: Plan, costs: CostModel, lengths: TextLengths | None = None) -> Simulation:
    """Price every instruction of ``plan`` and play them. ``lengths``: as long as texts may be where not given."""
    lengths = lengths or longest_texts(plan)
    pricer = Pricer(plan, costs, lengths)
    priced = tuple(Priced(each, pricer.price(each)) for each in plan.schedule.instructions)
    blocks = blocks_of(plan.schedule.instructions, plan.placement.num_ranks)
    nodes = tuple(make_nodes(pricer, priced, blocks))
    return Simulation(plan, lengths, priced, blocks, nodes, _steady(pricer, priced, blocks))


def evaluate(plan: Plan, costs: CostModel, lengths: TextLengths | None = None) -> float:
    """Seconds of a step of ``plan``, settled."""
    lengths = lengths or longest_texts(plan)
    pricer = Pricer(plan, costs, lengths)
    regular = [each for each in plan.schedule.instructions if not is_rare(each)]
    priced = [Priced(each, pricer.price(each)) for each in regular]
    return _steady(pricer, priced, blocks_of(regular, plan.placement.num_ranks))


def write_timeline(simulation: Simulation, path: Path, steps: int) -> None:
    """The first ``steps`` steps as a Chrome trace. Raises UserError where it cannot be written."""
    classes = {device.rank: device.device_class for device in simulation.plan.cluster.devices}
    facts = {"simulated": True, "seconds_per_step": simulation.seconds, "device_class": classes}
    try:
        write_trace(path, simulation.spans(steps), facts)
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror})") from None


def _steady(pricer: Pricer, priced: Sequence[Priced], blocks: Sequence[tuple[int, ...]]) -> float:
    regular = [item for item in priced if not item.is_rare]
    return steady_seconds(make_nodes(pricer, regular, blocks), len(blocks))


def is_rare(instruction: Instruction) -> bool:
    """Whether it is no part of a usual step: looking at and writing models, and the gate between engines."""
    match instruction:
        case Save() | Eval():
            return True
        case Run():
            return is_rare_operator(instruction.operator)
        case Offload() | Reload():
            return instruction.at_end
    return False


def is_rare_operator(operator: Operator) -> bool:
    return operator.every > 1


def every_of(instruction: Instruction) -> int:
    """Steps from one time that it is due to the next."""
    if isinstance(instruction, Run):
        return instruction.operator.every
    return int(getattr(instruction, "every", 1))


def blocks_of(instructions: Sequence[Instruction], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Ranks that do the same of ``instructions``; those that do nothing are left out."""
    work: list[list[int]] = [[] for _ in range(num_ranks)]
    for index, instruction in enumerate(instructions):
        for rank in instruction.ranks:
            work[rank].append(index)
    blocks: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, mine in enumerate(work):
        if mine:
            blocks[tuple(mine)].append(rank)
    return tuple(map(tuple, blocks.values()))


def make_nodes(pricer: Pricer, priced: Sequence[Priced], blocks: Sequence[tuple[int, ...]]) -> list[Node]:
    """What the walk knows of ``priced``, at the same positions."""
    home = {rank: number for number, ranks in enumerate(blocks) for rank in ranks}
    runs = [(index, item.instruction) for index, item in enumerate(priced) if isinstance(item.instruction, Run)]
    return [_node(pricer, item, home, [(i, run) for i, run in runs if isinstance(run, Run)]) for item in priced]


def _node(pricer: Pricer, item: Priced, home: Mapping[int, int], runs: Sequence[tuple[int, Run]]) -> Node:
    """A Move is only the time when a rank comes to it: what it brings, a Run waits for since it was written."""
    it = item.instruction
    plain = Node(_blocks(it.ranks, home), item.cost.seconds, lag=it.lag, every=item.every)
    match it:
        case Run():
            awaited = {index: pricer.rows_cost(run, it).seconds for index, run in runs if _writes_for(run, it)}
            return replace(plain, after=tuple(awaited), delays=tuple(awaited.values()))
        case Move():
            return replace(plain, holds=False)
        case Sync():
            return replace(plain, together=not it.is_local or bool(it.gathers))
        case Offload() | Reload():
            return replace(plain, together=False)
    return plain


def _writes_for(writer: Run, reader: Run) -> bool:
    """Whether ``reader`` reads, of the rows that both work on, what ``writer`` writes."""
    common = set(writer.mini_batches) & set(reader.mini_batches)
    return bool(common) and not set(writer.operator.writes).isdisjoint(reader.operator.reads)


def _blocks(ranks: Iterable[int], home: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(sorted({home[rank] for rank in ranks}))


def flows_of(plan: Plan, instruction: Instruction) -> Iterator[Flow]:
    """The bytes that an instruction sends from rank to rank."""
    match instruction:
        case Move():
            yield from move_flows(plan, instruction)
        case Sync():
            destination = plan.placement[instruction.destination]
            weights = synced_weights(destination, plan.shapes[destination.role], plan.spec)
            yield from sync_flows(instruction, weights)
            yield from gather_flows(instruction, weights)


def _sent(plan: Plan, instruction: Instruction) -> Mapping[int, int]:
    sent: dict[int, int] = defaultdict(int)
    if isinstance(instruction, Move):
        for flow in move_flows(plan, instruction):
            sent[flow.source] += flow.size
    return sent


def _span(instruction: Instruction, visit: Visit, rank: int, sent: int) -> Span:
    """As the trainer records it: from when a rank comes to an instruction, so with waiting for other ranks; a Run from
    when its columns are there. A Move is under way by itself at once."""
    kind, chunk = instruction.kind, instruction.chunk
    start, end, came = visit.came, visit.end, visit.came
    if isinstance(instruction, Run):
        start = max(came, visit.ready)
    if isinstance(instruction, Move):
        return Span(rank, kind, instruction.label, visit.step, chunk, start, start, bytes_sent=sent)
    return Span(rank, kind, instruction.label, visit.step, chunk, start, end, waited=start - came)
