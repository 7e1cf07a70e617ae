"""Load of a rollout over a generation: how full its cache gets, which rows wait for room, how long the last responses
take, and what segments would bring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from flexrlhf.api import ModelName, Run, UserError
from flexrlhf.guideline.costs.cost_model import Call, CostModel, Pages
from flexrlhf.guideline.costs.decode_phases import DecodeSteps, decoding, length_bins
from flexrlhf.guideline.costs.profiles import DECODERS, profile_of
from flexrlhf.guideline.simulation.pricing import Pricer
from flexrlhf.guideline.simulation.simulate import Simulation
from flexrlhf.guideline.simulation.variants import Variant, Variants

FEW = 0.5
"""Share of the rows that are decoded at most below which the others count as ended."""
LONG_TAIL = 0.25
"""Share of the decoding steps with few rows from which on segments are tried."""
ALL = 0.995
"""Share of the rows that count as all of them."""
TRIED_PARTS = 4
"""Segments of the longest response that are tried."""
TRIED_STEPS = (4, 12)
"""Fewest and most steps in which they are."""


@dataclass(frozen=True)
class GenerationLoad:
    """Decoding of the rows of the fullest replica in a generation.

    model:  that generates
    call:   the generation
    steps:  its decoding steps, by the number of live rows
    """

    model: ModelName
    call: Call
    steps: DecodeSteps

    @property
    def most_rows(self) -> float:
        """Most rows that are live at a time."""
        return max(phase.rows for phase in self.steps.phases)

    @property
    def tail(self) -> float:
        """Share of the decoding steps in which less than ``FEW`` of these rows are live."""
        phases, few = self.steps.phases, FEW * self.most_rows
        return sum(phase.steps for phase in phases if phase.rows < few) / sum(phase.steps for phase in phases)

    @property
    def at_once(self) -> int:
        """Rows that would decode at once if the cache had room for them."""
        call = self.call
        return call.rows if call.pages is None else min(call.rows, call.pages.most_rows)

    @property
    def prompt(self) -> float:
        """Tokens of a row's prompt in the cache, which samples may share."""
        return self.call.prompt / self.call.prompt_samples

    @property
    def filled(self) -> float:
        """Largest share of the cache that is full."""
        # while rows begin as others end, their age stays the mean one
        steady = self.call.rows > self.at_once
        first, *others = self.steps.phases
        empty = self.prompt + self.pages.partly_filled
        used = [first.rows * (empty + first.age + (0 if steady else first.steps / 2))]
        used += [phase.rows * (empty + phase.age + phase.steps / 2) for phase in others]
        return 1.0 if self.steps.repeats else min(1.0, max(used) / self.pages.tokens)

    @property
    def pages(self) -> Pages:
        """Pages of the cache. Fails for an engine without them."""
        assert self.call.pages is not None, "a cache has pages"
        return self.call.pages

    @property
    def _page(self) -> float:
        return max(1.0, 2 * self.pages.partly_filled)

    def room(self, rows: int) -> float:
        """Return the tokens of a response up to which so many rows at once have room in the cache, in whole pages."""
        return max(0.0, self.pages.tokens / rows // self._page * self._page - self.prompt)

    def rows_of(self, tokens: float) -> int:
        """Return how many rows with responses of so many tokens have room in the cache, in whole pages."""
        return max(1, int(self.pages.tokens // (ceil((self.prompt + tokens) / self._page) * self._page)))

    @property
    def waits(self) -> bool:
        """Whether rows wait until others end."""
        begun = self.call.rows * next(iter(length_bins(self.call.responses))).alive
        return self.call.rows > self.at_once or self.most_rows < ALL * begun


def generation_load(simulation: Simulation, costs: CostModel) -> GenerationLoad | None:
    """Return the load of the first generation of a step that has most rows on a replica; None if there is none, and of
    episodes, whose rows leave their slots between turns."""
    plan, pricer = simulation.plan, Pricer(simulation.plan, costs, simulation.lengths)
    runs = [each.instruction for each in simulation.regular if isinstance(each.instruction, Run)]
    generations = [run for run in runs if run.operator.call == "generate"]
    calls = [(run.model, call) for run in generations for call, _ in pricer.calls(run)]
    if not calls or plan.spec.environment is not None:
        return None
    model, call = max(calls, key=lambda each: each[1].rows)
    # of rows that stay until the longest ends the ones that have not ended count
    batching = profile_of(DECODERS, call.engine).batching
    steps = decoding(call, "group" if batching == "static" else batching)
    return GenerationLoad(model, call, steps) if steps.phases else None


@dataclass(frozen=True)
class SegmentTrial:
    """A run with whole responses and in segments, by steps whose rows are sampled.

    tokens:  of a segment
    whole:   run without segments
    parts:   run with them
    """

    tokens: int
    whole: Variant
    parts: Variant

    @property
    def gain(self) -> float:
        """Share by which segments train on more samples a second."""
        return self.parts.samples / self.whole.samples - 1


def segment_trial(simulation: Simulation, costs: CostModel, load: GenerationLoad | None) -> SegmentTrial | None:
    """Return the run in ``TRIED_PARTS`` segments if its lengths have a long tail, and its algorithm allows them."""
    plan, lengths = simulation.plan, simulation.lengths
    tokens = -(-plan.lengths.response // TRIED_PARTS)
    if load is None or load.tail < LONG_TAIL or plan.batch.segments > 1 or len(set(lengths.responses)) == 1:
        return None
    variants = Variants(plan.spec, costs, lengths, plan.spec.schedule.lag, TRIED_STEPS)
    try:
        whole, parts = (variants.simulate(plan.spec.schedule.lag, each) for each in (None, tokens))
    except UserError:
        return None
    return SegmentTrial(tokens, whole, parts)


def load_lines(simulation: Simulation, costs: CostModel) -> Iterator[str]:
    """Yield lines on the cache of a generation, on its last responses, and on segments if they are tried."""
    load = generation_load(simulation, costs)
    if load is None:
        return
    if load.call.pages is not None:
        yield _cache(load)
        yield _room(load, simulation.plan.lengths.response)
    if len(set(simulation.lengths.responses)) > 1:
        longest = max(simulation.lengths.responses) / simulation.lengths.mean_response
        yield (
            f"less than half of the rows are left in the last {load.tail:.0%} of the decoding steps; the longest "
            f"response is {longest:.3g} times the mean"
        )
    trial = segment_trial(simulation, costs, load)
    if trial is not None:
        yield segments_text(trial)


def segments_text(trial: SegmentTrial) -> str:
    """Return how much faster a run is in segments."""
    return (
        f"rollout.segment_tokens={trial.tokens}: {trial.gain:+.0%} samples/s, on tokens {trial.parts.staleness:.2g} "
        f"batches old (rows sampled; --segments compares others)"
    )


def _cache(load: GenerationLoad) -> str:
    """Return how full the cache gets, and how many rows wait for room or lose it."""
    rows, repeats = load.call.rows, load.steps.repeats
    parts = [f"at most {load.most_rows:.0f} of {rows} rows of a replica decode at once, others wait"] * load.waits
    if repeats:
        again = load.steps.repeated / (rows * (load.prompt + load.call.mean_response))
        parts.append(f"{max(1, round(repeats))} are preempted ({again:.0%} more tokens)")
    states = ", ".join(parts) or f"none of the {rows} rows of a replica waits or is preempted"
    return f"cache of {load.model}: {load.filled:.0%} full at most; {states}"


def _room(load: GenerationLoad, limit: int) -> str:
    """Return from which lengths and numbers of rows on the cache is full. ``limit``: most tokens of a response."""
    rows, whole = load.call.rows, load.rows_of(limit)
    if whole >= rows:
        return f"  it has room for {whole} rows with responses of {limit} tokens"
    return f"  it has room for all rows up to {load.room(rows):.0f} tokens of a response, for {whole} up to {limit}"
