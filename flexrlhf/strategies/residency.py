"""Insert Offload and Reload where a rank's memory would overflow: evict the model that is used farthest in the future.

That rule moves least when all uses are known (Belady 1966), and a schedule knows them. The list repeats every step, so
it is walked until what is resident at its start repeats, too; models that are not resident then start offloaded.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from flexrlhf.memory.budget import Phase, Sizing
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.layout import BatchShape
from flexrlhf.placement.names import ModelName
from flexrlhf.placement.placed import Placement
from flexrlhf.strategies.instructions import Eval, Instruction, Offload, Reload, Run, Save, Sync
from flexrlhf.strategies.workload import first_alike, works_of

TRAINING = ("train", "update")
Change = tuple[type[Offload] | type[Reload], ModelName]
"""Put a model away or take it back."""
MAX_ROUNDS = 8
"""Walks after which the resident set must have repeated; two are usual."""


@dataclass(frozen=True)
class Memory:
    """Bytes on the ranks of a plan."""

    sizing: Sizing
    cluster: Cluster
    batch: BatchShape

    def capacity(self, rank: int) -> int | None:
        """What the device has for models that come and go; None when nobody says, and then nothing is evicted."""
        size = self.cluster.memory_bytes(rank)
        states = [self.sizing.state(model, rank) for model in self.sizing.placement.on_rank(rank)]
        return (
            None if size is None else size - sum(state.resting - state.freed for state in states if state is not None)
        )

    def state(self, rank: int, model: ModelName) -> int:
        """What a model holds between instructions, and does not hold while it is offloaded."""
        state = self.sizing.state(self.sizing.placement[model], rank)
        return 0 if state is None else state.freed

    def needed_for(self, rank: int, instruction: Instruction) -> int:
        """What an instruction takes besides what the resident models hold between instructions."""
        works = works_of(instruction, self.sizing.placement, self.batch, rank)
        phases = [phase for work in works for phase in self.sizing.phases(work, rank)]
        return max((phase.besides + self._gradients(phase, rank) for phase in phases), default=0)

    def _gradients(self, phase: Phase, rank: int) -> int:
        state = self.sizing.state(self.sizing.placement[phase.model], rank) if phase.kind in TRAINING else None
        return 0 if state is None else state.training - state.resting


@dataclass(frozen=True)
class Residency:
    """``instructions`` with Offload and Reload among them. ``offloaded``: rank → models that start in host memory."""

    instructions: tuple[Instruction, ...]
    offloaded: dict[int, tuple[ModelName, ...]]


def models_of(instruction: Instruction, placed: Iterable[ModelName]) -> tuple[ModelName, ...]:
    """Those of a rank's ``placed`` models that an instruction touches there."""
    match instruction:
        case Run(model=name) | Save(model=name):
            touched: tuple[ModelName, ...] = (name,)
        case Eval(models=names):
            touched = names
        case Sync(source=source, destination=destination):
            touched = (source, destination)
        case _:
            touched = ()
    return tuple(name for name in placed if name in touched)


def _is_rare(instruction: Instruction) -> bool:
    """Whether most steps do without it; what is evicted for it comes back right after it."""
    return isinstance(instruction, Eval | Save) or (isinstance(instruction, Sync) and instruction.every > 1)


def _generates(instruction: Instruction, name: ModelName) -> bool:
    return isinstance(instruction, Run) and instruction.operator.kind == "generate" and instruction.model == name


@dataclass
class _Walk:
    """One rank's walk over the list. ``before``, ``after``, ``closing``: what to put away and take back at an index,
    and at the end of a step."""

    rank: int
    placed: tuple[ModelName, ...]
    instructions: Sequence[Instruction]
    memory: Memory
    capacity: int
    sleepers: frozenset[ModelName] = frozenset()
    resident: set[ModelName] = field(default_factory=set)
    before: dict[int, list[Change]] = field(default_factory=dict)
    after: dict[int, list[Change]] = field(default_factory=dict)
    closing: list[Change] = field(default_factory=list)

    @property
    def away(self) -> tuple[ModelName, ...]:
        return tuple(name for name in self.placed if name not in self.resident)

    def walk(self) -> None:
        self.before, self.after = defaultdict(list), defaultdict(list)
        for index, instruction in enumerate(self.instructions):
            needed = models_of(instruction, self.placed) if self.rank in instruction.ranks else ()
            missing = [name for name in needed if name not in self.resident]
            room = self.capacity - self.memory.needed_for(self.rank, instruction) if needed else self.capacity
            victims = self._victims(index, needed, missing, room) if needed else []
            if _is_rare(instruction):
                self._visit(index, missing, victims)
            else:
                self._change(self.before[index], victims, missing)
                self.resident = self.resident - set(victims) | set(missing)
                tired = [name for name in needed if name in self.sleepers and self._sleeps_after(index, name)]
                self._change(self.after[index], tired, [])
                self.resident -= set(tired)

    def _victims(
        self, index: int, needed: Sequence[ModelName], missing: Sequence[ModelName], room: int
    ) -> list[ModelName]:
        """Models to evict so that those needed fit, farthest next use first."""
        total = sum(self.memory.state(self.rank, name) for name in self.resident.union(missing))
        movable = (name for name in self.resident - set(needed) if self.memory.state(self.rank, name))
        idle = sorted(movable, key=lambda name: (-self._next_use(index, name), name))
        victims: list[ModelName] = []
        while total > room and idle:
            victims.append(idle.pop(0))
            total -= self.memory.state(self.rank, victims[-1])
        return victims

    def _next_use(self, index: int, name: ModelName) -> int:
        """Instructions until ``name`` is touched again, going round."""
        length = len(self.instructions)
        for distance in range(1, length + 1):
            instruction = self.instructions[(index + distance) % length]
            touched = self.rank in instruction.ranks and name in models_of(instruction, self.placed)
            if touched and not _is_rare(instruction):
                return distance
        return length + 1

    def _sleeps_after(self, index: int, name: ModelName) -> bool:
        """Whether another model works before ``name`` does; not between two chunks of one batch that it generates."""
        length = len(self.instructions)
        for later in range(index + 1, index + length):
            instruction = self.instructions[later % length]
            if self.rank not in instruction.ranks or _is_rare(instruction):
                continue
            if name in models_of(instruction, self.placed):
                return False
            if models_of(instruction, self.placed):
                return not any(_generates(each, name) for each in self.instructions[index + 1 :])
        return False

    def _visit(self, index: int, missing: Sequence[ModelName], victims: Sequence[ModelName]) -> None:
        self._change(self.before[index], victims, missing)
        self._change(self.after[index], missing, victims)

    @staticmethod
    def _change(into: list[Change], out: Sequence[ModelName], back: Sequence[ModelName]) -> None:
        into += [(Offload, name) for name in out] + [(Reload, name) for name in back]


def _sleepers(placement: Placement) -> frozenset[ModelName]:
    """Rollout engines that give their memory to the models beside them whenever they do not generate."""
    beside_training = [model for model in placement.followers if model not in placement.shadows]
    return frozenset(model.name for model in beside_training if model.rollout is not None and model.rollout.sleep)


def with_residency(instructions: Sequence[Instruction], memory: Memory) -> Residency:
    """``instructions`` with the evictions that every rank needs."""
    walks: dict[int, _Walk] = {}
    alike = first_alike(instructions, memory.sizing.placement, memory.batch, memory.cluster)
    for rank in sorted(set(alike.values())):
        names = tuple(model.name for model in memory.sizing.placement.on_rank(rank))
        capacity = memory.capacity(rank)
        sleepers = _sleepers(memory.sizing.placement) & set(names)
        if names and (capacity is not None or sleepers):
            room = sys.maxsize if capacity is None else capacity
            walks[rank] = _settled(_Walk(rank, names, instructions, memory, room, sleepers))
    each = [(rank, walks[first]) for rank, first in alike.items() if first in walks]
    out: list[Instruction] = []
    for index, instruction in enumerate(instructions):
        out += _merged(instruction, [(rank, walk.before.get(index, [])) for rank, walk in each])
        out.append(instruction)
        out += _merged(instruction, [(rank, walk.after.get(index, [])) for rank, walk in each])
    out += _merged(None, [(rank, walk.closing) for rank, walk in each])
    return Residency(tuple(out), {rank: walk.away for rank, walk in each if walk.away})


def _settled(walk: _Walk) -> _Walk:
    """Walk until the resident set at the start of the list is the one that a walk over it ends with."""
    walk.resident = set(walk.placed)
    for _ in range(MAX_ROUNDS):
        seen = frozenset(walk.resident)
        walk.walk()
        if walk.resident == seen:
            return walk
    # a set that keeps changing: put all away at the end of every step
    stuck = {name for name in walk.placed if not walk.memory.state(walk.rank, name)}
    walk.resident = set(stuck)
    walk.walk()
    walk.closing = [(Offload, name) for name in sorted(walk.resident - stuck)]
    walk.resident = stuck
    return walk


def _merged(beside: Instruction | None, changes: Iterable[tuple[int, list[Change]]]) -> list[Instruction]:
    """One instruction for all ranks that put the same model away, or take it back, at the same place."""
    ranks: dict[Change, list[int]] = defaultdict(list)
    for rank, wanted in changes:
        for change in wanted:
            ranks[change].append(rank)
    made: list[Offload | Reload] = [kind(ranks=tuple(members), model=name) for (kind, name), members in ranks.items()]
    # what is freed comes first
    made.sort(key=lambda item: isinstance(item, Reload))
    if isinstance(beside, Eval | Save | Sync) and _is_rare(beside):
        made = [replace(i, rare=True, every=beside.every, at_end=beside.at_end, lag=beside.lag) for i in made]
    return list(made)
