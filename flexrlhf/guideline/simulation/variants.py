"""Runs of one plan with several lags and segments, in steps whose rows have lengths of their own.

Every variant walks the list of its own plan with the same lengths, as the trainer would: a call takes as long as on the
slowest replica of its round. Measured are steps after the pipeline has filled and before it drains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from flexrlhf.api import Plan, Run, Spec, make_plan
from flexrlhf.guideline.costs.cost_model import Cost, CostModel
from flexrlhf.guideline.simulation.episode_prices import REPLIES
from flexrlhf.guideline.simulation.inputs import TextLengths
from flexrlhf.guideline.simulation.pricing import Pricer
from flexrlhf.guideline.simulation.round_prices import RoundPricer, rounds_of
from flexrlhf.guideline.simulation.rounds import Round
from flexrlhf.guideline.simulation.simulate import Simulation, simulate
from flexrlhf.guideline.simulation.walk import PERIODS, Due, walk_steps

ROWS = 50_000
"""Rows of all measured steps together, but for the bounds of ``NUM_STEPS``."""
NUM_STEPS = (24, 96)
"""Fewest and most measured steps, where nothing else is given."""
StepSide = Literal["inference", "training"]


@dataclass(frozen=True)
class SideUse:
    """Devices of one side of a run.

    idle:    share of the time in which they neither run models nor exchange weights
    memory:  bytes of the fullest of them
    fits:    whether each has as many
    """

    idle: float
    memory: int
    fits: bool


@dataclass(frozen=True)
class BusyRanks:
    """Ranks that wait least: their models, and the idle share of their time."""

    models: str
    idle: float


@dataclass(frozen=True)
class Variant:
    """A simulated run.

    lag:        batches by which training is behind
    tokens:     tokens of a segment; None: rows are generated whole
    seconds:    mean time of a step
    samples:    responses that a second trains on
    sides:      their use, by name
    staleness:  batches between a token's weights and those that train on it, mean over tokens
    generation: mean time of generation in a step
    training:   mean time of training in a step, on the ranks where it is longest
    busiest:    the ranks that wait least
    """

    lag: int
    tokens: int | None
    seconds: float
    samples: float
    sides: Mapping[StepSide, SideUse]
    staleness: float
    generation: float
    training: float
    busiest: BusyRanks


@dataclass(frozen=True)
class RoundTimes:
    """One variant, priced in every round.

    simulation:  its plan with the expected lengths
    rounds:      rows of each round
    cost:        time of an instruction, by position and number of its round
    """

    simulation: Simulation
    rounds: Sequence[Round]
    cost: Callable[[int, int], Cost]

    def seconds(self, index: int, step: int) -> float:
        """Return the time of the instruction at a position in a round."""
        return self.cost(index, step).seconds

    def variant(self, measured: range) -> Variant:
        """Return the steps ``measured`` of the run."""
        spec, priced, blocks = self.simulation.plan.spec, self.simulation.priced, self.simulation.blocks
        lag = spec.schedule.lag
        steps = measured.stop + lag
        walk = walk_steps(
            self.simulation.instructions, len(self.simulation.blocks), steps, self._due(steps), self.seconds
        )
        first, last = walk.ends[measured.start - 1], walk.ends[measured.stop - 1]
        busy = [0.0] * len(blocks)
        for visit in walk.visits:
            if not priced[visit.index].instruction.proceeds_in_background:
                cost = self.cost(visit.index, visit.step)
                # less the time in which it waits for replies of environments
                share = 1 - cost.parts.get(REPLIES, 0.0) / cost.seconds if cost.seconds else 1.0
                busy[visit.block] += share * max(0.0, min(last, visit.end) - max(first, visit.start))
        waited, trained = map(sum, zip(*(self.rounds[step].staleness() for step in measured), strict=True))
        return Variant(
            lag=lag,
            tokens=spec.rollout.segment_tokens,
            seconds=(last - first) / len(measured),
            samples=sum(self.rounds[step].num_trained for step in measured) / (last - first),
            sides=self._sides([1 - each / (last - first) for each in busy]),
            staleness=lag + (spec.sync.every - 1) / 2 + waited / trained,
            generation=max(self.times(measured, _generates).values(), default=0.0),
            training=max(self.times(measured, _trains).values(), default=0.0),
            busiest=self._busiest(busy, last - first),
        )

    def _due(self, steps: int) -> Due:
        priced = self.simulation.priced
        return lambda index, step: not priced[index].is_rare and priced[index].instruction.due(step, steps)

    def _sides(self, idle: Sequence[float]) -> dict[StepSide, SideUse]:
        """Return the use of each side, from the idle share of each block."""
        plan, members = self.simulation.plan, dict[StepSide, list[tuple[int, float]]]()
        for ranks, share in zip(self.simulation.blocks, idle, strict=True):
            trains = any(model.trained for model in plan.placement.on_rank(ranks[0]))
            members.setdefault("training" if trains else "inference", []).extend((rank, share) for rank in ranks)
        return {side: self._use(ranks) for side, ranks in members.items()}

    def _use(self, ranks: Sequence[tuple[int, float]]) -> SideUse:
        """Return the use of ``ranks``, each with the idle share of its time."""
        plan = self.simulation.plan
        peaks = {rank: plan.memories[rank].peak_bytes for rank, _ in ranks}
        fits = all(peak <= (plan.device_bytes(rank) or peak) for rank, peak in peaks.items())
        return SideUse(sum(share for _, share in ranks) / len(ranks), max(peaks.values()), fits)

    def times(self, measured: range, counts: Callable[[Run], bool]) -> dict[int, float]:
        """Return the mean time in a step of the calls that count, by block of ranks."""
        by_block: dict[int, float] = defaultdict(float)
        for index, (item, timed) in enumerate(zip(self.simulation.priced, self.simulation.instructions, strict=True)):
            if not item.is_rare and isinstance(item.instruction, Run) and counts(item.instruction):
                seconds = sum(self.seconds(index, step) for step in measured) / len(measured)
                for block in timed.blocks:
                    by_block[block] += seconds
        return by_block

    def _busiest(self, busy: Sequence[float], seconds: float) -> BusyRanks:
        """Return the ranks that wait least. ``busy``: time of each block in ``seconds``."""
        block = max(range(len(busy)), key=lambda block: busy[block])
        ranks = self.simulation.blocks[block]
        models = [model.name for model in self.simulation.plan.placement.on_rank(ranks[0])]
        return BusyRanks(", ".join(models), 1 - busy[block] / seconds)


@dataclass
class Variants:
    """Variants of a run, all with the same lengths.

    spec:      the run; its lag and segments are ignored
    costs:     times of calls and transfers
    lengths:   response lengths, from which those of every row are sampled
    most_lag:  largest lag, after whose batches the pipeline is full
    num_steps: fewest and most measured steps
    """

    spec: Spec
    costs: CostModel
    lengths: TextLengths
    most_lag: int = 1
    num_steps: tuple[int, int] = NUM_STEPS
    _rounds: dict[int | None, list[Round]] = field(default_factory=dict)
    _costs: dict[Hashable, Cost] = field(default_factory=dict)

    def plan(self, lag: int, tokens: int | None = None) -> Plan:
        """Return the plan with ``lag`` and segments of ``tokens``. Raises UserError for those that the placement or the
        algorithm does not allow."""
        schedule = self.spec.schedule.model_copy(update={"lag": lag})
        rollout = self.spec.rollout.model_copy(update={"segment_tokens": tokens})
        # a lag has to be below the number of steps, on which the time of one does not depend
        steps = max(self.spec.steps, lag + 1)
        return make_plan(self.spec.model_copy(update={"schedule": schedule, "rollout": rollout, "steps": steps}))

    def simulate(self, lag: int, tokens: int | None = None) -> Variant:
        """Return the run with ``lag`` and segments of ``tokens``."""
        return self.simulate_plan(self.plan(lag, tokens))

    def simulate_plan(self, plan: Plan) -> Variant:
        """Return the run of ``plan``, which has the same rows."""
        return self.timing(plan).variant(self.measured(plan))

    def measured(self, plan: Plan) -> range:
        """Return the measured steps."""
        least, most = self.num_steps
        begin = PERIODS + self.most_lag + plan.batch.segments
        return range(begin, begin + max(least, min(most, ROWS // plan.batch.num_taken)))

    def timing(self, plan: Plan) -> RoundTimes:
        """Return the times of ``plan``."""
        tokens, expected = plan.spec.rollout.segment_tokens, Pricer(plan, self.costs, self.lengths)
        if tokens not in self._rounds:
            self._rounds[tokens] = rounds_of(plan, self.lengths, self.measured(plan).stop + self.most_lag)
        simulation = simulate(plan, self.costs, self.lengths, expected.price)
        pricer, priced = RoundPricer(expected, self._rounds[tokens]), simulation.priced

        def cost(index: int, step: int) -> Cost:
            item = priced[index]
            run = item.instruction
            if not isinstance(run, Run) or run.operator.call is None:
                return item.cost
            if run.only_accounts(step):
                return Cost()
            if tokens is None and run.operator.has_replies and not self.lengths.episodes:
                return item.cost
            # plans differ by their lag, not by the time of a call
            key = (run.operator.name, plan.placement[run.model], run.mini_batches, run.attempt, tokens, step)
            if key not in self._costs:
                self._costs[key] = pricer.cost(run, step)
            return self._costs[key]

        return RoundTimes(simulation, pricer.rounds, cost)


def _generates(run: Run) -> bool:
    return run.operator.call == "generate"


def _trains(run: Run) -> bool:
    return run.operator.call == "train"
