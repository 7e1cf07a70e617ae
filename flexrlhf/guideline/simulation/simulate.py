"""Simulation of a run: the time of a plan's instructions, walked as the trainer walks them.

``seconds`` of a Simulation is the time of a settled step. Instructions that most steps do not have (Save, Eval,
a gate that is not due) are priced separately, in ``rare``. Not simulated: that a child process decodes the next chunk
while its rank does something else, and that vLLM samples rows of a later chunk along with rows of an earlier one.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from flexrlhf.api import CallKind, Instruction, ModelName, Move, NodeBytes, Plan, Run, Span, Trace, UserError
from flexrlhf.guideline.costs.cost_model import Cost, CostModel
from flexrlhf.guideline.costs.profiles import StepPart
from flexrlhf.guideline.simulation.inputs import TextLengths, costs_for, longest_lengths
from flexrlhf.guideline.simulation.pricing import Pricer
from flexrlhf.guideline.simulation.round_prices import price_of
from flexrlhf.guideline.simulation.timed_instructions import PricedInstruction, blocks_of, timed_instructions
from flexrlhf.guideline.simulation.walk import TimedInstruction, Visit, WalkResult, steady_seconds, walk_steps

PARTS: Mapping[CallKind, StepPart] = {"generate": "generation", "train": "training", "forward": "other calls"}
"""Part of a step that calls of each kind are in."""


@dataclass(frozen=True)
class TimeShares:
    """Shares of a step in which a device runs models, exchanges weights and waits; together 1."""

    running: float
    exchanging: float

    @property
    def waiting(self) -> float:
        """Share in which it waits: the bubble."""
        return 1.0 - self.running - self.exchanging


@dataclass(frozen=True)
class Simulation:
    """A simulated plan.

    plan:          the plan
    lengths:       lengths of its texts
    priced:        its instructions with their costs
    blocks:        ranks that execute the same instructions
    instructions:  ``priced`` as the walk takes them
    seconds:       time of a settled step
    computed:      tokens that forward and training passes compute for each token of their texts; None without passes
    copying:       longest time of a device's copies to host memory and back in a step, next to its work
    exposed:       time by which they lengthen the step
    """

    plan: Plan
    lengths: TextLengths
    priced: tuple[PricedInstruction, ...]
    blocks: tuple[tuple[int, ...], ...]
    instructions: tuple[TimedInstruction, ...]
    seconds: float
    computed: float | None = None
    copying: float = 0.0
    exposed: float = 0.0

    @property
    def samples_per_second(self) -> float:
        return self.plan.batch.num_taken / self.seconds if self.seconds else 0.0

    @property
    def regular(self) -> tuple[PricedInstruction, ...]:
        return tuple(item for item in self.priced if not item.is_rare)

    @property
    def rare(self) -> tuple[PricedInstruction, ...]:
        return tuple(item for item in self.priced if item.is_rare)

    @cached_property
    def shares(self) -> tuple[TimeShares, ...]:
        """Shares of each block."""
        return tuple(self._shares_of(ranks[0]) for ranks in self.blocks)

    def _shares_of(self, rank: int) -> TimeShares:
        """Shares of one rank; instructions in the background do not count."""
        busy = {True: 0.0, False: 0.0}
        for item, timed in zip(self.priced, self.instructions, strict=True):
            is_background = item.instruction.proceeds_in_background or timed.copies
            if rank in item.instruction.ranks and not item.is_rare and not is_background:
                busy[isinstance(item.instruction, Run)] += item.computing / item.every
        period = self.seconds or 1.0
        return TimeShares(busy[True] / period, busy[False] / period)

    @property
    def part_seconds(self) -> Mapping[StepPart, float]:
        """Longest time that a device runs models of each part in a step."""
        by_rank: dict[StepPart, dict[int, float]] = {part: defaultdict(float) for part in PARTS.values()}
        for item in self.regular:
            run = item.instruction
            if isinstance(run, Run) and run.operator.call is not None:
                for ranks in self.blocks:
                    if ranks[0] in run.ranks:
                        by_rank[PARTS[run.operator.call]][ranks[0]] += item.computing / item.every
        return {part: max(seconds.values()) for part, seconds in by_rank.items() if seconds}

    @cached_property
    def model_shares(self) -> Mapping[ModelName, float]:
        """Share of a step that each placed model runs, by name."""
        shares = {model.name: 0.0 for model in self.plan.placement.models}
        for item in self.regular:
            if isinstance(item.instruction, Run):
                shares[item.instruction.model] += item.computing / item.every / (self.seconds or 1.0)
        return shares

    @property
    def utilisation(self) -> float:
        """Share of all devices' time in which they run models; idle devices count."""
        return self._mean([share.running for share in self.shares])

    @property
    def bubble(self) -> float:
        """Share of all devices' time in which they wait."""
        return 1.0 - self.utilisation - self._mean([share.exchanging for share in self.shares])

    def _mean(self, values: Sequence[float]) -> float:
        """Return the mean over all ranks, from one value for each block."""
        total = sum(len(ranks) * value for ranks, value in zip(self.blocks, values, strict=True))
        return total / self.plan.placement.num_ranks

    @cached_property
    def node_bytes(self) -> Mapping[int, NodeBytes]:
        """Bytes of a step by node, of moves and syncs; exchanges inside a call are not included."""
        traffic = self.plan.traffic
        flows = ((flow, 1 / item.every) for item in self.regular for flow in traffic.flows(item.instruction))
        return traffic.by_node(flows)

    def walked(self, steps: int, with_rare: bool = True) -> WalkResult:
        """Walk a run of ``steps`` steps from its start, with Save and Eval when they are due."""

        def due(index: int, step: int) -> bool:
            item = self.priced[index]
            return (with_rare or not item.is_rare) and item.instruction.due(step, steps)

        def seconds(index: int, step: int) -> float:
            run = self.priced[index].instruction
            return 0.0 if isinstance(run, Run) and run.only_accounts(step) else self.instructions[index].seconds

        return walk_steps(self.instructions, len(self.blocks), steps, due, seconds)

    def spans(self, steps: int, ranks: Collection[int] | None = None) -> Iterator[Span]:
        """Yield the timeline of such a run on all ranks, or on given ``ranks``, as the trainer records it."""
        sent = {index: _sent(self.plan, item.instruction) for index, item in enumerate(self.priced)}
        for visit in self.walked(steps).visits:
            instruction = self.priced[visit.index].instruction
            for rank in self.blocks[visit.block]:
                if ranks is not None and rank not in ranks:
                    continue
                yield _span(instruction, visit, rank, sent[visit.index].get(rank, 0))

    @cached_property
    def reply_seconds(self) -> float:
        """Longest time of a step in which a rank waits for replies of environments."""
        waits: dict[int, float] = defaultdict(float)
        for item, timed in zip(self.priced, self.instructions, strict=True):
            for block in timed.blocks if not item.is_rare else ():
                waits[block] += item.awaiting / item.every
        return max(waits.values(), default=0.0)


def simulate(
    plan: Plan,
    costs: CostModel | None = None,
    lengths: TextLengths | None = None,
    price: Callable[[Instruction], Cost] | None = None,
) -> Simulation:
    """Price every instruction of ``plan`` and walk them; ``seconds`` of the result is the time of a step.

    costs:    time of calls and transfers; None: figures of the device classes, else this machine's profile.
    lengths:  tokens of prompts and responses; None: the longest.
    price:    the time of each instruction, if it is not that of ``costs``.

    Raises UserError where the costs of a device are not known.
    """
    costs = costs or costs_for(plan.spec, None).costs
    lengths = lengths or longest_lengths(plan)
    pricer = Pricer(plan, costs, lengths)
    price = price or price_of(pricer)
    priced = tuple(PricedInstruction(each, price(each)) for each in plan.schedule.instructions)
    blocks = blocks_of(plan.schedule.instructions, plan.placement.num_ranks)
    timed = tuple(timed_instructions(pricer, priced, blocks))
    regular = [item for item in priced if not item.is_rare]
    settled = timed_instructions(pricer, regular, blocks)
    seconds = steady_seconds(settled, len(blocks))
    copying = [
        sum(each.seconds for each in settled if each.copies and block in each.blocks) for block in range(len(blocks))
    ]
    free = [replace(each, seconds=0.0) if each.copies else each for each in settled]
    exposed = seconds - steady_seconds(free, len(blocks)) if any(copying) else 0.0
    computed = _computed(pricer, (item.instruction for item in regular))
    return Simulation(plan, lengths, priced, blocks, timed, seconds, computed, max(copying, default=0.0), exposed)


def _computed(pricer: Pricer, instructions: Iterable[Instruction]) -> float | None:
    """Return the tokens that the passes of ``instructions`` compute on all ranks for each token of their texts."""
    runs = [each for each in instructions if isinstance(each, Run) and each.operator.call is not None]
    calls = [(call.passes, mesh.copies) for run in runs for call, mesh in pricer.calls(run) if call.passes is not None]
    texts = sum(copies * passes.texts for passes, copies in calls)
    return sum(copies * passes.tokens for passes, copies in calls) / texts if texts else None


def is_simulated(text: str) -> bool:
    """Whether a text is a trace of ``write_timeline``, not one of a run."""
    try:
        trace = json.loads(text)
    except (ValueError, RecursionError):
        return False
    facts = trace.get("otherData") if isinstance(trace, dict) else None
    return isinstance(facts, dict) and facts.get("simulated") is True


MOST_SPANS = 1_000_000
"""Spans of a timeline that is written; one has some hundred bytes."""


def check_timeline(plan: Plan, steps: int) -> None:
    """Raise UserError for more steps of a timeline than it has room for."""
    of_step = sum(len(each.ranks) for each in plan.schedule.instructions)
    most = max(1, MOST_SPANS // max(1, of_step))
    if steps > most:
        raise UserError(
            f"--steps {steps}: a step has {of_step} spans in the timeline, which has room for {MOST_SPANS}; use at "
            f"most {most}"
        )


def write_timeline(simulation: Simulation, path: Path, steps: int) -> None:
    """Write the first ``steps`` steps as a Chrome trace. Raises UserError where it cannot be written."""
    check_timeline(simulation.plan, steps)
    classes = {device.rank: device.device_class for device in simulation.plan.cluster.devices}
    facts = {"simulated": True, "seconds_per_step": simulation.seconds, "device_class": classes}
    try:
        Trace([*simulation.spans(steps)], facts).write(path)
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror})") from None


def _sent(plan: Plan, instruction: Instruction) -> Mapping[int, int]:
    sent: dict[int, int] = defaultdict(int)
    if isinstance(instruction, Move):
        for flow in plan.traffic.flows(instruction):
            sent[flow.source] += flow.size
    return sent


def _span(instruction: Instruction, visit: Visit, rank: int, sent: int) -> Span:
    """Return a visit as the trainer records it: from when a rank reaches an instruction, so including waiting for other
    ranks; a Run from when its columns are there. What proceeds in the background ends at once."""
    kind, chunk = instruction.kind, instruction.chunk
    start, end, arrived = visit.arrived, visit.end, visit.arrived
    if isinstance(instruction, Run):
        start = max(arrived, visit.ready)
    if instruction.proceeds_in_background:
        return Span(rank, kind, instruction.label, visit.step, chunk, start, start, bytes_sent=sent)
    return Span(rank, kind, instruction.label, visit.step, chunk, start, end, waited=start - arrived)
