"""Turns of episodes as tables list them: turns whose instructions repeat are one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from flexrlhf.strategies.instructions import Instruction, Run


@dataclass(frozen=True)
class ListedInstruction:
    """An instruction of a table.

    instruction:  that of the first of ``turns``
    turns:        that it stands for; none before and behind them
    """

    instruction: Instruction
    turns: range = range(0)

    @property
    def label(self) -> str:
        each = self.instruction
        if isinstance(each, Run) and each.operator.turns:
            return each.turns_label(self.turns[-1])
        return f"{each.label} in turns {self.turns[0]}-{self.turns[-1]}" if len(self.turns) > 1 else each.label


def repeated_turns(instructions: Sequence[Instruction]) -> Iterator[ListedInstruction]:
    """Yield ``instructions`` in their order, those of turns that repeat the turn before left out."""
    starts: list[int] = []
    for index, each in enumerate(instructions):
        if isinstance(each, Run) and each.operator.turns and each.turn == len(starts):
            starts.append(index)
    turns = [instructions[start:end] for start, end in pairwise([*starts, len(instructions)])]
    yield from map(ListedInstruction, instructions[: starts[0]] if starts else instructions)
    turn = 0
    while turn < len(turns):
        first, last = turns[turn], turn
        while last + 1 < len(turns) and _repeats(first, turns[last + 1], is_last=last + 2 == len(turns)):
            last += 1
        yield from (ListedInstruction(each, range(turn, last + 1)) for each in first)
        if last > turn:
            # what follows the last turn
            yield from map(ListedInstruction, turns[last][len(first) :])
        turn = last + 1


def _repeats(first: Sequence[Instruction], later: Sequence[Instruction], is_last: bool) -> bool:
    """Whether ``later`` is the same in a later turn; the last turn is followed by other instructions."""
    compared = later[: len(first)] if is_last else later
    return list(map(_in_any_turn, first)) == list(map(_in_any_turn, compared))


def _in_any_turn(instruction: Instruction) -> Instruction:
    return replace(instruction, turn=0) if isinstance(instruction, Run) else instruction
