"""Reload models before they are due: as early as memory allows, so that calls of other models hide the copies.

Models that nothing has changed since they were reloaded leave early to make room, which copies nothing: host memory has
their copy. The order of reloads stays, as the device copies one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flexrlhf.placement.placed import ModelName
from flexrlhf.strategies.instructions import Instruction, Offload, Release, Reload, Run, Sync


class Transition(NamedTuple):
    """An Offload or a Reload of one rank."""

    kind: type[Offload] | type[Reload]
    model: ModelName
    is_unchanged: bool = False


Transitions = dict[int, list[Transition]]
"""Transitions next to instructions, by their index."""


@dataclass
class Residence:
    """The models on one rank's device along the list, and the changes between them.

    instructions:  the list that every rank walks.
    used:          models that each instruction uses on this rank.
    rare:          whether most steps skip an instruction: what changes for it is undone after it.
    before, after: changes around an index.
    on_device:     models at the start of the list.
    movable:       models that may be reloaded early.
    engines:       rollout engines, whose cache has the memory that others leave.
    """

    rank: int
    instructions: Sequence[Instruction]
    used: Sequence[Collection[ModelName]]
    rare: Sequence[bool]
    before: Transitions
    after: Transitions
    on_device: frozenset[ModelName]
    movable: frozenset[ModelName]
    engines: frozenset[ModelName]
    present: list[set[ModelName]] = field(default_factory=list)

    def __post_init__(self) -> None:
        now = set(self.on_device)
        for index, instruction in enumerate(self.instructions):
            now = _changed(now, self.before.get(index, ())) | set(self.used[index])
            self.present.append(now)
            now = _changed(now, self.after.get(index, ()))
            if isinstance(instruction, Release) and self.rank in instruction.ranks:
                now = now - {instruction.model}

    def mark_unchanged(self) -> None:
        """Mark each Offload of a movable model that nothing has changed since it was reloaded."""
        for changes, is_after in ((self.before, False), (self.after, True)):
            for index, listed in changes.items():
                changes[index] = [
                    each._replace(is_unchanged=each.model in self.movable and self._is_unchanged(index, each, is_after))
                    if each.kind is Offload
                    else each
                    for each in listed
                ]

    def _is_unchanged(self, index: int, change: Transition, is_after: bool) -> bool:
        if self.rare[index] and is_after:
            return not self._is_changed_by(index, change.model)
        for place in self._back(index, is_after):
            if self._is_changed_by(place, change.model):
                return False
            if not self.rare[place] and (Reload, change.model) in [each[:2] for each in self.before.get(place, ())]:
                return True
        return True

    def _back(self, index: int, is_after: bool) -> Iterator[int]:
        """Yield the indices from an Offload back to itself, going round."""
        length = len(self.instructions)
        for distance in range(0 if is_after else 1, length + 1):
            yield (index - distance) % length

    def _is_changed_by(self, index: int, model: ModelName) -> bool:
        each = self.instructions[index]
        trains = isinstance(each, Run) and each.operator.kind == "train" and each.model == model
        return self.rank in each.ranks and (trains or model in each.fills)

    def leaving(self, first: int, due: int) -> dict[ModelName, int]:
        """Return unchanged models that leave by ``due`` and are not used from ``first`` on, with the index at which
        they leave."""
        return {
            each.model: index
            for index in range(first + 1, due + 1)
            for each in (() if self.rare[index] else self.before.get(index, ()))
            if each.is_unchanged and not any(each.model in self.used[later] for later in range(first, index))
        }

    def bring_forward(self, change: Transition, due: int, first: int) -> None:
        """List a Reload of ``due`` before ``first``, and before it the models that leave."""
        for model, index in self.leaving(first, due).items():
            self._move(Transition(Offload, model, is_unchanged=True), index, first)
            for between in range(first, index):
                self.present[between].discard(model)
        self._move(change, due, first)
        for between in range(first, due):
            self.present[between].add(change.model)

    def _move(self, change: Transition, index: int, first: int) -> None:
        self.before[index].remove(change)
        self.before.setdefault(first, []).append(change)


def _changed(models: set[ModelName], changes: Sequence[Transition]) -> set[ModelName]:
    gone = {each.model for each in changes if each.kind is Offload}
    return models - gone | {each.model for each in changes if each.kind is Reload}


def bring_forward(residence: Residence, fits: Callable[[int, set[ModelName]], bool]) -> None:
    """List each Reload as early as memory allows. ``fits``: whether an instruction does with given models on the
    device."""
    last = 0
    for due in range(len(residence.instructions)):
        for change in [each for each in residence.before.get(due, ()) if each.kind is Reload]:
            first = due if residence.rare[due] else _earliest(residence, change.model, due, last, fits)
            if first < due:
                residence.bring_forward(change, due, first)
            last = first


def _earliest(
    residence: Residence, model: ModelName, due: int, last: int, fits: Callable[[int, set[ModelName]], bool]
) -> int:
    """Return the index of the first call before which ``model`` can be reloaded that is due at ``due``: not before the
    reload at ``last``."""
    first = due
    for index in range(due - 1, last - 1, -1):
        instruction, present = residence.instructions[index], residence.present[index]
        is_for_rare = residence.rare[index] and (residence.before.get(index) or residence.after.get(index))
        if model not in residence.movable or is_for_rare or present & {model, *residence.engines}:
            break
        if residence.used[index]:
            if not fits(index, present - residence.leaving(index, due).keys() | {model}):
                break
            if isinstance(instruction, Run) and instruction.operator.call is not None:
                first = index
    return first


def stored_late(instructions: Sequence[Instruction]) -> frozenset[ModelName]:
    """Return the copies whose overlapping Sync stores new weights only when they are used next.

    The instruction list does not show when their weights change.
    """
    return frozenset(each.destination for each in instructions if isinstance(each, Sync) and each.overlaps)
