"""Instructions of a plan as the walk takes them: their times, blocks of ranks, and what each waits for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from flexrlhf.api import Instruction, ModelName, Move, Placement, Run, Sync
from flexrlhf.guideline.costs.cost_model import Cost
from flexrlhf.guideline.simulation.episode_prices import REPLIES
from flexrlhf.guideline.simulation.pricing import Pricer
from flexrlhf.guideline.simulation.walk import TimedInstruction

WAYS: Mapping[str, Literal["out", "back"]] = {"offload": "out", "reload": "back"}
"""Way of the copies between device and host memory of each kind of instruction that has such copies."""


@dataclass(frozen=True)
class PricedInstruction:
    """An instruction and its cost each time that it is due."""

    instruction: Instruction
    cost: Cost

    @property
    def is_rare(self) -> bool:
        return self.instruction.is_rare

    @property
    def every(self) -> int:
        return self.instruction.period

    @property
    def awaiting(self) -> float:
        """Time in which it waits for replies of environments, in seconds."""
        return self.cost.parts.get(REPLIES, 0.0)

    @property
    def computing(self) -> float:
        """Rest of its time."""
        return self.cost.seconds - self.awaiting


def blocks_of(instructions: Sequence[Instruction], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return groups of ranks that execute the same of ``instructions``; idle ranks are left out."""
    work: list[list[int]] = [[] for _ in range(num_ranks)]
    for index, instruction in enumerate(instructions):
        for rank in instruction.ranks:
            work[rank].append(index)
    blocks: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, mine in enumerate(work):
        if mine:
            blocks[tuple(mine)].append(rank)
    return tuple(map(tuple, blocks.values()))


def timed_instructions(
    pricer: Pricer, priced: Sequence[PricedInstruction], blocks: Sequence[tuple[int, ...]]
) -> list[TimedInstruction]:
    """Return ``priced`` as the walk takes them, at the same positions."""
    block_of = {rank: number for number, ranks in enumerate(blocks) for rank in ranks}
    writers = ColumnWriters([item.instruction for item in priced])
    background = (item.instruction for item in priced if item.instruction.proceeds_in_background)
    copies = list(dict.fromkeys(name for each in background for name in each.fills))
    timed = [_timed(pricer, item, block_of, writers, copies) for item in priced]
    if not pricer.has_copy_streams:
        return timed
    return [*_with_copies(timed, [item.instruction for item in priced], pricer.plan.placement)]


def _with_copies(
    timed: Sequence[TimedInstruction], instructions: Sequence[Instruction], placement: Placement
) -> Iterator[TimedInstruction]:
    """Yield ``timed`` with models that are copied to host memory and back while their devices go on.

    The library of a rollout engine makes its copies while others wait.
    """
    found = (name for each in instructions if each.kind in WAYS for name in each.uses)
    moved = [name for name in dict.fromkeys(found) if not placement[name].has_cache]
    for item, each in zip(timed, instructions, strict=True):
        models = tuple(moved.index(name) for name in each.touches if name in moved)
        if each.kind not in WAYS:
            yield replace(item, needs=models)
        elif models:
            yield replace(item, copies=WAYS[each.kind], model=models[0])
        else:
            yield item


def _timed(
    pricer: Pricer,
    item: PricedInstruction,
    block_of: Mapping[int, int],
    writers: ColumnWriters,
    copies: Sequence[ModelName],
) -> TimedInstruction:
    """Return ``item`` as the walk takes it. A Move is only its posting: a Run waits for its columns from the time that
    they were written. ``copies``: those that are filled in the background."""
    it = item.instruction
    used = tuple(copies.index(name) for name in it.uses if name in copies)
    ours = tuple(sorted({block_of[rank] for rank in it.ranks}))
    plain = TimedInstruction(ours, item.cost.seconds, lag=it.lag, every=item.every, uses=used)
    match it:
        case Run():
            awaited = {index: pricer.rows_cost(run, it).seconds for index, run in writers.of(it).items()}
            return replace(plain, after=tuple(awaited), delays=tuple(awaited.values()))
        case Move():
            return replace(plain, blocking=False)
        case Sync(overlaps=True):
            senders = {block_of[rank] for rank in pricer.plan.placement[it.source].ranks}
            copy = copies.index(it.destination)
            return replace(plain, fills=copy, after=writers.last_training(it.source), sends=tuple(sorted(senders)))
        case Sync():
            return replace(plain, together=not it.is_in_place or bool(it.gathers))
    return replace(plain, together=it.kind not in (*WAYS, "release"))


class ColumnWriters:
    """Runs of a list of instructions, by their columns."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self._runs = {index: each for index, each in enumerate(instructions) if isinstance(each, Run)}
        self._writers: dict[str, list[int]] = defaultdict(list)
        for index, run in self._runs.items():
            for column in run.operator.writes:
                self._writers[column].append(index)

    def of(self, reader: Run) -> dict[int, Run]:
        """Return the runs whose columns ``reader`` reads, by their places in the list, in its order."""
        columns = {*reader.operator.reads, *reader.operator.earlier}
        places = sorted({place for column in columns for place in self._writers.get(column, ())})
        return {place: self._runs[place] for place in places if reader.reads_from(self._runs[place])}

    def last_training(self, model: ModelName) -> tuple[int, ...]:
        """Return the place of the run that ends the training of ``model``, if one trains it."""
        places = [i for i, run in self._runs.items() if run.model == model and run.operator.kind == "train"]
        return tuple(places[-1:])
