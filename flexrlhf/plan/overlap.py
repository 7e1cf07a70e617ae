"""Overlap: operators that may run at the same time, since neither a shared rank nor a column orders them.

The schedule is unrolled over three steps; an instruction comes after the one before it on each of its ranks, and after
whatever writes the columns that it reads. Two runs may overlap when neither comes after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from flexrlhf.strategies.instructions import Run, Sync
from flexrlhf.strategies.schedule import Schedule

STEPS = 3


@dataclass
class _UnrolledInstruction:
    """Instruction of one step. ``after``: bit set of the indices of all nodes that must end before it starts."""

    instruction: Run | Sync
    step: int
    after: int = 0


@dataclass
class _Order:
    """Partial order of the unrolled instructions."""

    nodes: list[_UnrolledInstruction] = field(default_factory=list)
    last_on_rank: dict[int, int] = field(default_factory=dict)
    writers: dict[tuple[int, str, int], int] = field(default_factory=dict)
    filled: dict[str, int] = field(default_factory=dict)

    def add(self, instruction: Run | Sync, step: int) -> None:
        index, node = len(self.nodes), _UnrolledInstruction(instruction, step)
        before = [self.last_on_rank[rank] for rank in instruction.ranks if rank in self.last_on_rank]
        if isinstance(instruction, Sync) and instruction.overlaps:
            self._add_background(node, instruction, index)
            return
        if isinstance(instruction, Run):
            before += [self.filled[instruction.model]] if instruction.model in self.filled else []
            cells = [(step, c, m) for c in instruction.operator.reads for m in instruction.mini_batches]
            before += [self.writers[cell] for cell in cells if cell in self.writers]
            written = ((step, c, m) for c in instruction.operator.writes for m in instruction.mini_batches)
            # those before it are on the same ranks, so in order
            self.writers.update(dict.fromkeys(written, index))
        for earlier in before:
            node.after |= self.nodes[earlier].after | 1 << earlier
        self.nodes.append(node)
        self.last_on_rank.update({rank: index for rank in instruction.ranks})

    def _add_background(self, node: _UnrolledInstruction, sync: Sync, index: int) -> None:
        """Add a Sync that comes after the training of its source, and before the next use of its copy."""
        trained = [i for i, each in enumerate(self.nodes) if _trains(each.instruction, sync.source)]
        for earlier in trained[-1:]:
            node.after = self.nodes[earlier].after | 1 << earlier
        self.nodes.append(node)
        self.filled[sync.destination] = index


def _trains(instruction: Run | Sync, model: str) -> bool:
    return isinstance(instruction, Run) and instruction.model == model and instruction.operator.kind == "train"


def _unroll(schedule: Schedule) -> list[_UnrolledInstruction]:
    order = _Order()
    for loop in range(STEPS + schedule.lag):
        for instruction in schedule.instructions:
            step = loop - instruction.lag
            if isinstance(instruction, Run | Sync) and instruction.due(step, STEPS):
                order.add(instruction, step)
    return order.nodes


def overlapping_operators(schedule: Schedule) -> list[str]:
    """Return lines such as ``ref_logprobs with scores`` or ``train_actor with generate of the next step``."""
    partners: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for first, second, steps_ahead in _unordered_runs(_unroll(schedule)):
        if first.operator.name != second.operator.name:
            partners[first.operator.name, _relation(first, second, steps_ahead, schedule.lag)][second.operator.name] = (
                None
            )
    groups: dict[tuple[tuple[str, ...], str], list[str]] = defaultdict(list)
    for (name, relation), names in partners.items():
        groups[tuple(names), relation].append(name)
    return [f"{', '.join(names)} with {', '.join(others)}{relation}" for (others, relation), names in groups.items()]


def _unordered_runs(nodes: list[_UnrolledInstruction]) -> Iterator[tuple[Run, Run, int]]:
    """Yield runs of the middle step with later ones that may overlap them, and the number of steps between the two."""
    for index, node in enumerate(nodes):
        for other, candidate in enumerate(nodes):
            first, second = node.instruction, candidate.instruction
            if not isinstance(first, Run) or not isinstance(second, Run) or node.step != 1:
                continue
            later = (candidate.step, second.chunk or 0, other) > (node.step, first.chunk or 0, index)
            ordered = node.after >> other & 1 or candidate.after >> index & 1
            if later and not ordered:
                yield first, second, candidate.step - node.step


def _relation(first: Run, second: Run, steps_ahead: int, lag: int) -> str:
    if steps_ahead:
        return " of the next step" if lag < 2 else " of a later step"
    return "" if first.chunk == second.chunk else " of a later chunk"
