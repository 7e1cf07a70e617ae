"""A proof without threads that a schedule does not block: all ranks' streams are replayed with rendezvous semantics.

An instruction is done when every rank that it names has reached it. If no instruction can be done and some rank is not
finished, the schedule deadlocks there, whatever the timing: rendezvous replay has no races, so one replay decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flexrlhf.strategies.instructions import Instruction

Item = tuple[int, int, Instruction]
"""(position along the list of all ranks, step of the batch, instruction)."""


@dataclass(frozen=True)
class Deadlock:
    """``done``: how many items of its stream each rank has finished when no rank can proceed."""

    streams: dict[int, list[Item]]
    done: dict[int, int]

    def next_item(self, rank: int) -> Item | None:
        items, done = self.streams[rank], self.done[rank]
        return items[done] if done < len(items) else None

    def grid(self) -> str:
        """Step x rank: how much of a batch's instructions each rank has done; the cell where it is stuck is marked."""
        steps = sorted({step for items in self.streams.values() for _, step, _ in items})
        lines = ["step  " + "".join(f"rank {rank}".ljust(10) for rank in self.streams)]
        lines += [f"{step:<6}" + "".join(self._cell(rank, step).ljust(10) for rank in self.streams) for step in steps]
        return "\n".join([*(line.rstrip() for line in lines), *(self._position(rank) for rank in self.streams)])

    def _cell(self, rank: int, step: int) -> str:
        items = self.streams[rank]
        done = sum(1 for _, other, _ in items[: self.done[rank]] if other == step)
        total = sum(1 for _, other, _ in items if other == step)
        stuck = self.next_item(rank)
        return f"{done}/{total}" + (" <<" if stuck is not None and stuck[1] == step else "")

    def _position(self, rank: int) -> str:
        stuck = self.next_item(rank)
        if stuck is None:
            return f"rank {rank} has finished"
        position, step, instruction = stuck
        absent = [r for r in instruction.ranks if (self.next_item(r) or (None,))[0] != position]
        kind = instruction.kind
        return f"rank {rank} stands at step {step}, {kind} {instruction.label} (#{position}) without rank {absent}"


def find_deadlock(streams: Mapping[int, Iterable[Item]]) -> Deadlock | None:
    """Replay ``streams``; None if every rank finishes."""
    items = {rank: list(stream) for rank, stream in streams.items()}
    done = dict.fromkeys(items, 0)
    state = Deadlock(items, done)
    advanced = True
    while advanced:
        advanced = False
        for rank in items:
            while (item := state.next_item(rank)) is not None and _all_there(state, item):
                for other in item[2].ranks:
                    done[other] += 1
                advanced = True
    return None if all(state.next_item(rank) is None for rank in items) else state


def _all_there(state: Deadlock, item: Item) -> bool:
    waiting = (state.next_item(rank) for rank in item[2].ranks)
    return all(other is not None and other[0] == item[0] for other in waiting)
