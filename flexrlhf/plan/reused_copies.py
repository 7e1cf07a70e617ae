"""Copies that have the weights of their source while they exist."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flexrlhf.placement.placed import ModelName
from flexrlhf.placement.placement import Placement
from flexrlhf.strategies.instructions import Eval, Instruction, Release, Run, Sync


def copies_that_reuse(instructions: Sequence[Instruction], placement: Placement) -> dict[ModelName, str]:
    """Return the copies that exist only during their calls and have their source's weights meanwhile, each with an
    instruction that uses the source, or another copy of it, in that time on ranks of the copy; empty if none does.

    ``instructions``: of a step, as ``with_refills`` returns them.
    """
    found: dict[ModelName, str] = {}
    for copy in (model for model in placement.models if model.is_transient):
        others = {model.name for model in placement.models if model.role == copy.role} - {copy.name}
        between = [
            each
            for start, stop in _lives(instructions, copy.name)
            for each in instructions[start + 1 : stop]
            if others.intersection(each.touches) and set(each.ranks) & set(copy.ranks)
        ]
        if not any(isinstance(each, Run) and each.operator.kind == "train" for each in between):
            inner = (run for each in between for run in (each.runs if isinstance(each, Eval) else (each,)))
            found[copy.name] = next((each.label for each in inner if others.intersection(each.touches)), "")
    return found


def _lives(instructions: Sequence[Instruction], name: ModelName) -> Iterator[tuple[int, int]]:
    """Yield the positions of each Sync that fills the copy ``name``, and of the Release that follows it."""
    start = 0
    for index, each in enumerate(instructions):
        if isinstance(each, Sync) and each.destination == name:
            start = index
        elif isinstance(each, Release) and each.model == name:
            yield start, index
