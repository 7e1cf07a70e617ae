"""Insert Offload and Reload where a rank's memory would overflow: evict the model that is used farthest in the future.

That rule moves least when all uses are given in advance (Belady 1966), as a schedule does. The list repeats every step,
so it is walked until the set of models on the device at its start repeats, too; the other models start offloaded.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from flexrlhf.memory.budget import Phase, Sizing
from flexrlhf.memory.states import reused_bytes
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.layout import BatchShape
from flexrlhf.placement.placed import ModelName
from flexrlhf.placement.placement import Placement
from flexrlhf.strategies.instructions import Eval, Instruction, Offload, Release, Reload, Run, Save, Sync
from flexrlhf.strategies.prefetch import Residence, Transition, Transitions, bring_forward, stored_late
from flexrlhf.strategies.workload import works_of

TRAINING = ("train", "update")
MAX_ROUNDS = 8
"""Walks after which the set of models on the device must have repeated; two are usual."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the ranks of a plan.

    communicators:  the most that one of them has.
    in_flight:      bytes of a rank's rows that are generated and not trained on yet.
    prefetches:     whether models are reloaded before they are due.
    """

    sizing: Sizing
    cluster: Cluster
    batch: BatchShape
    communicators: int = 0
    in_flight: Callable[[int], int] = lambda rank: 0
    prefetches: bool = True

    def capacity(self, rank: int) -> int | None:
        """Return the bytes for models that may be offloaded; None for a device of unknown size, where nothing is
        evicted.
        """
        size = self.cluster.memory_bytes(rank, self.communicators)
        states = [self.sizing.state(model, rank) for model in self.sizing.placement.on_rank(rank)]
        if size is None:
            return None
        return size - self.in_flight(rank) - sum(state.resting - state.freed for state in states if state is not None)

    def state(self, rank: int, model: ModelName) -> int:
        """Return the bytes of a model between instructions that offloading frees."""
        if (rank, model) not in self._freed:
            state = self.sizing.state(self.sizing.placement[model], rank)
            self._freed[rank, model] = 0 if state is None else state.freed
        return self._freed[rank, model]

    @cached_property
    def _freed(self) -> dict[tuple[int, ModelName], int]:
        return {}

    def states(self, rank: int, on_device: Collection[ModelName]) -> int:
        """Return the bytes of models on the device that offloading frees, and of weights of others that their copies
        keep there."""
        total = sum(self.state(rank, name) for name in on_device)
        if not self.sizing.reusing:
            return total
        known = {model.name: self.sizing.state(model, rank) for model in self.sizing.placement.on_rank(rank)}
        return total + reused_bytes(known, known.keys() - set(on_device))

    def needed_for(self, rank: int, instruction: Instruction, missing: Collection[ModelName] = ()) -> int:
        """Return the bytes of an instruction in addition to the models on the device.

        missing:  models that come there for it: a rollout engine has no cache before it generates.
        """
        if isinstance(instruction, Sync) and instruction.destination in missing:
            return self.needed_for(rank, instruction) - self._cache(rank, instruction.destination)
        works = works_of(instruction, self.batch, rank)
        phases = [phase for work in works for phase in self.sizing.phases(work, rank)]
        return max((phase.part_bytes + self._gradients(phase, rank) for phase in phases), default=0)

    def _cache(self, rank: int, model: ModelName) -> int:
        state = self.sizing.state(self.sizing.placement[model], rank)
        return 0 if state is None else state.cache

    def _gradients(self, phase: Phase, rank: int) -> int:
        state = self.sizing.state(self.sizing.placement[phase.model], rank) if phase.kind in TRAINING else None
        return 0 if state is None else state.training - state.resting

    def with_residency(
        self, instructions: Sequence[Instruction], alike: Mapping[int, int], only: int | None = None
    ) -> tuple[tuple[Instruction, ...], dict[int, tuple[ModelName, ...]]]:
        """Return ``instructions`` with the evictions that every rank needs, and by rank the models that start
        offloaded.

        alike:  rank → first rank with the same work on the same kind of device.
        only:   the rank whose evictions are wanted; those of others are left out.
        """
        walks: dict[int, _Walk] = {}
        walked: dict[object, _Walk] = {}
        late = stored_late(instructions)
        if only is not None:
            alike = {only: alike[only]}
        for rank in sorted(set(alike.values())):
            names = tuple(model.name for model in self.sizing.placement.on_rank(rank))
            capacity = self.capacity(rank)
            asleep = self.sizing.placement.sleepers & set(names)
            if names and (capacity is not None or asleep):
                room = sys.maxsize if capacity is None else capacity
                transient = frozenset(name for name in names if self.sizing.placement[name].is_transient)
                walk = _Walk(rank, names, instructions, self, room, asleep, transient)
                if (inputs := walk.inputs) not in walked:
                    walked[inputs] = _settled(walk)
                    walk.bring_forward(late)
                walks[rank] = walked[inputs]
        each = [(rank, walks[first]) for rank, first in alike.items() if first in walks]
        out: list[Instruction] = []
        for index, instruction in enumerate(instructions):
            out += _merged(instruction, [(rank, walk.before.get(index, [])) for rank, walk in each])
            out.append(instruction)
            out += _merged(instruction, [(rank, walk.after.get(index, [])) for rank, walk in each])
        out += _merged(None, [(rank, walk.closing) for rank, walk in each])
        offloaded = {rank: walk.offloaded for rank, walk in each if walk.offloaded}
        return tuple(_with_next_use(out, self.sizing.placement)), offloaded


def resident_models(instruction: Instruction, placed: Iterable[ModelName]) -> tuple[ModelName, ...]:
    """Return the models among ``placed`` that an instruction needs on the device: a checkpoint also copies from host
    memory."""
    touched = (*instruction.uses, *instruction.fills) if isinstance(instruction, Run | Save | Eval | Sync) else ()
    return tuple(name for name in placed if name in touched)


def _is_rare(instruction: Instruction) -> bool:
    """Whether most steps skip it; a model that is evicted for it comes back right after it."""
    return isinstance(instruction, Eval | Save) or (
        isinstance(instruction, Sync) and (instruction.every > 1 or instruction.at_start)
    )


def _generates(instruction: Instruction, name: ModelName) -> bool:
    return isinstance(instruction, Run) and instruction.operator.kind == "generate" and instruction.model == name


@dataclass
class _Walk:
    """One rank's walk over the list.

    sleepers:   models that are offloaded whenever another one computes.
    transient:  models that a Sync refills and a Release frees, so that they are never offloaded.
    on_device:  models that are neither offloaded nor released.
    before, after, closing: changes around an index, and at the end of a step.
    needs:      bytes of an instruction, by its index and the missing models: walks repeat the list.
    """

    rank: int
    placed: tuple[ModelName, ...]
    instructions: Sequence[Instruction]
    memory: DeviceMemory
    capacity: int
    sleepers: frozenset[ModelName] = frozenset()
    transient: frozenset[ModelName] = frozenset()
    on_device: set[ModelName] = field(default_factory=set)
    before: Transitions = field(default_factory=dict)
    after: Transitions = field(default_factory=dict)
    closing: list[Transition] = field(default_factory=list)
    needs: dict[tuple[int, frozenset[ModelName]], int] = field(default_factory=dict)

    @cached_property
    def used(self) -> list[tuple[ModelName, ...]]:
        """Models that each instruction needs on the device of this rank."""
        return [resident_models(each, self.placed) if self.rank in each.ranks else () for each in self.instructions]

    @property
    def inputs(self) -> object:
        """All that the walk depends on, of a rank: others with the same walk alike."""
        sizing = self.memory.sizing
        states = tuple(sizing.state(sizing.placement[name], self.rank) for name in self.placed)
        needs = tuple(self._needed_for(index, frozenset()) if used else None for index, used in enumerate(self.used))
        named = tuple(self.rank in each.ranks for each in self.instructions)
        return self.placed, self.capacity, states, needs, named

    @cached_property
    def rare(self) -> list[bool]:
        """Whether most steps skip an instruction."""
        return [_is_rare(each) for each in self.instructions]

    @property
    def offloaded(self) -> tuple[ModelName, ...]:
        return tuple(name for name in self.placed if name not in self.on_device | self.transient)

    def walk(self) -> None:
        self.before, self.after = defaultdict(list), defaultdict(list)
        for index, instruction in enumerate(self.instructions):
            needed = self.used[index]
            missing = [name for name in needed if name not in self.on_device]
            room = self.capacity - self._needed_for(index, frozenset(missing)) if needed else self.capacity
            victims = self._victims(index, needed, missing, room) if needed else []
            reloaded = [name for name in missing if name not in self.transient]
            if self.rare[index]:
                self._change(self.before[index], victims, reloaded)
                self._change(self.after[index], reloaded, victims)
            else:
                self._change(self.before[index], victims, reloaded)
                self.on_device = self.on_device - set(victims) | set(missing)
                tired = [name for name in needed if name in self.sleepers and self._sleeps_after(index, name)]
                self._change(self.after[index], tired, [])
                self.on_device -= set(tired)
            if isinstance(instruction, Release):
                self.on_device.discard(instruction.model)

    def _needed_for(self, index: int, missing: frozenset[ModelName]) -> int:
        if (index, missing) not in self.needs:
            self.needs[index, missing] = self.memory.needed_for(self.rank, self.instructions[index], missing)
        return self.needs[index, missing]

    def _victims(
        self, index: int, needed: Sequence[ModelName], missing: Sequence[ModelName], room: int
    ) -> list[ModelName]:
        """Return the models to evict so that those needed fit, farthest next use first."""
        present = self.on_device.union(missing)
        if self.memory.states(self.rank, present) <= room:
            return []
        others = self.on_device - set(needed) - self.transient
        movable = (name for name in others if self.memory.state(self.rank, name))
        idle = sorted(movable, key=lambda name: (-self._next_use(index, name), name))
        victims: list[ModelName] = []
        while idle and self.memory.states(self.rank, present.difference(victims)) > room:
            victims.append(idle.pop(0))
        return victims

    def _next_use(self, index: int, name: ModelName) -> int:
        """Return the number of instructions until ``name`` is used again, going round."""
        length = len(self.instructions)
        for distance in range(1, length + 1):
            place = (index + distance) % length
            if name in self.used[place] and not self.rare[place]:
                return distance
        return length + 1

    def _sleeps_after(self, index: int, name: ModelName) -> bool:
        """Whether another model computes before ``name`` does; not between two chunks of one batch that it
        generates.
        """
        length = len(self.instructions)
        for later in range(index + 1, index + length):
            used = self.used[later % length]
            if not used or self.rare[later % length]:
                continue
            return name not in used and not any(_generates(each, name) for each in self.instructions[index + 1 :])
        return False

    @staticmethod
    def _change(into: list[Transition], out: Sequence[ModelName], back: Sequence[ModelName]) -> None:
        into += [Transition(Offload, name) for name in out] + [Transition(Reload, name) for name in back]

    def bring_forward(self, late: frozenset[ModelName]) -> None:
        """Reload models before they are due where that fits, and mark what need not be copied.

        late:  copies that a reload must not be moved for.

        Three kinds of models are not moved either: engines that sleep, engines whose library copies weights itself,
        and models that lend weights to copies.
        """
        lenders = {self.memory.sizing.placement[name].role for name in self.memory.sizing.reusing}
        engines = frozenset(name for name in self.placed if self.memory.sizing.placement[name].has_cache)
        residence = Residence(
            *(self.rank, self.instructions, self.used, self.rare, self.before, self.after),
            on_device=frozenset(self.on_device),
            movable=frozenset(self.placed) - engines - self.sleepers - self.transient - late - lenders,
            engines=engines,
        )
        residence.mark_unchanged()

        def fits(index: int, models: set[ModelName]) -> bool:
            return self.memory.states(self.rank, models) + self._needed_for(index, frozenset()) <= self.capacity

        if self.memory.prefetches:
            bring_forward(residence, fits)


def _with_next_use(instructions: Sequence[Instruction], placement: Placement) -> Iterator[Instruction]:
    """Yield ``instructions`` with facts of the next use of a model: whether a Reload overlaps calls before it, and
    whether a rollout engine sleeps until its Sync, so that it leaves no copy of its weights.

    With adapters it leaves one: a Sync brings the adapters alone, merged into the weights that they change.
    """
    for index, each in enumerate(instructions):
        if not isinstance(each, Offload | Reload):
            yield each
            continue
        ranks, model = set(each.ranks), placement[each.model]
        between: list[Instruction] = []
        for use in (*instructions[index + 1 :], *instructions[:index]):
            if ranks.intersection(use.ranks):
                between.append(use)
                if resident_models(use, [each.model]):
                    break
        if model.has_cache:
            is_whole, use = placement[model.role].settings.lora is None, between[-1]
            yield replace(each, is_refilled=is_whole and isinstance(use, Sync) and not _is_rare(use))
        elif isinstance(each, Reload):
            calls = (run for run in between[:-1] if isinstance(run, Run) and run.operator.call is not None)
            yield replace(each, overlaps=any(not run.is_rare for run in calls))
        else:
            yield each


def _settled(walk: _Walk) -> _Walk:
    """Walk until the models on the device at the start of the list are those at its end. Returns ``walk``."""
    walk.on_device = set(walk.placed) - walk.transient
    for _ in range(MAX_ROUNDS):
        seen = frozenset(walk.on_device)
        walk.walk()
        if walk.on_device == seen:
            return walk
    # a set that keeps changing: offload all at the end of every step
    movable = {name for name in walk.placed if walk.memory.state(walk.rank, name)} - walk.transient
    stuck = set(walk.placed) - movable - walk.transient
    walk.on_device = set(stuck)
    walk.walk()
    walk.closing = [Transition(Offload, name) for name in sorted(walk.on_device - stuck)]
    walk.on_device = stuck
    return walk


def _merged(neighbour: Instruction | None, changes: Iterable[tuple[int, list[Transition]]]) -> list[Instruction]:
    """Return one instruction for all ranks that offload, or reload, the same model next to ``neighbour``."""
    ranks: dict[Transition, list[int]] = defaultdict(list)
    for rank, mine in changes:
        for change in mine:
            ranks[change].append(rank)
    made: list[Offload | Reload] = []
    for change, members in ranks.items():
        facts = {"is_unchanged": True} if change.is_unchanged else {}
        made.append(change.kind(ranks=tuple(members), model=change.model, **facts))
    # memory is freed first
    made.sort(key=lambda item: isinstance(item, Reload))
    if isinstance(neighbour, Eval | Save | Sync) and _is_rare(neighbour):
        made = [replace(i, rare=True, **neighbour.turns) for i in made]
    return list(made)
