"""Time of a step if responses are trained in the order in which they end, as asynchronous trainers of the field do.

    python -m benchmarks.asynchrony.completion_order CONFIG --lengths heavy-tail [--lags 1,4] [--set KEY=VALUE]

A model by events, for comparison with batches in the order of submission: generation is always as full as the bound on
prompts in flight allows, rows that end leave room at once, and training takes the first prompts of which all samples
have ended. Its runs are not repeatable, and long responses are trained later than short ones.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf
from pathlib import Path

from flexrlhf.config.spec_file import load_spec
from flexrlhf.guideline.costs.cost_model import Call
from flexrlhf.guideline.simulation.asynchrony import read_lags
from flexrlhf.guideline.simulation.inputs import TextLengths, costs_for
from flexrlhf.guideline.simulation.lengths import batch_lengths, expected_lengths
from flexrlhf.guideline.simulation.pricing import Pricer
from flexrlhf.guideline.simulation.simulation_text import seconds_text
from flexrlhf.guideline.simulation.variants import Variants
from flexrlhf.strategies.instructions import Run

DECODED = 64
"""Decoding steps by which the time of one is found."""
StepSeconds = Callable[[float], float]
"""Time of one decoding step, by the number of rows that are decoded."""


@dataclass(frozen=True)
class Speeds:
    """Speeds of the two sides.

    step:      time of a decoding step with so many rows on all replicas
    at_once:   most rows that are decoded at a time, on all replicas
    prompt:    time of the pass over a prompt
    scoring:   time of a batch's forward passes, on the ranks where it is longest
    pause:     share of it in which generation stands still, on whose ranks they are
    training:  time of training a batch of so many tokens
    """

    step: StepSeconds
    at_once: int
    prompt: float
    scoring: float
    pause: float
    training: Callable[[int], float]


@dataclass
class _Generation:
    """Rows in generation: each ends when ``decoded``, steps so far, reaches its number.

    live:     (decoded at its end, prompt) of each row
    waiting:  (tokens, prompt) of rows that find no room
    """

    speeds: Speeds
    decoded: float = 0.0
    live: list[tuple[float, int]] = field(default_factory=list)
    waiting: deque[tuple[int, int]] = field(default_factory=deque)

    def enter(self) -> float:
        """Begin rows while there is room; return the time of their prompts' passes."""
        seconds = 0.0
        while self.waiting and len(self.live) < self.speeds.at_once:
            tokens, prompt = self.waiting.popleft()
            heappush(self.live, (self.decoded + tokens, prompt))
            seconds += self.speeds.prompt
        return seconds

    @property
    def next_end(self) -> float:
        """Time until the next row ends."""
        return (self.live[0][0] - self.decoded) * self.speeds.step(len(self.live)) if self.live else inf

    def advance(self, seconds: float) -> None:
        """Decode for ``seconds``, in which no row ends."""
        if self.live:
            self.decoded += seconds / self.speeds.step(len(self.live))

    def end_row(self) -> int:
        """End the next row; return its prompt."""
        self.decoded, prompt = heappop(self.live)
        return prompt


def completion_order_seconds(
    batches: Sequence[Sequence[int]], samples: int, lag: int, speeds: Speeds, measured: range
) -> float:
    """Return the mean time of the steps ``measured``.

    batches:  response length of each row of each batch, the ``samples`` of a prompt behind each other.
    lag:      prompts of at most ``lag`` + 1 batches are in flight, the one in training included.
    """
    per_batch = len(batches[0]) // samples
    prompts = [rows[first : first + samples] for rows in batches for first in range(0, len(rows), samples)]
    generation, left, ended = _Generation(speeds), [samples] * len(prompts), deque[int]()
    # tokens of batches that are scored, and when the calls under way end
    scored, scoring_ends, training_ends = deque[int](), inf, inf
    now, pause, submitted, ends = 0.0, 0.0, 0, list[float]()
    while len(ends) < measured.stop:
        while submitted < min(len(prompts), (len(ends) + lag + 1) * per_batch):
            generation.waiting.extend((tokens, submitted) for tokens in prompts[submitted])
            submitted += 1
        pause += generation.enter()
        if scoring_ends == inf and len(ended) >= per_batch:
            scoring_ends = now + speeds.scoring
            pause += speeds.pause * speeds.scoring
        if training_ends == inf and scored:
            training_ends = now + speeds.training(scored.popleft())
        row_ends = now + pause + generation.next_end
        after = min(scoring_ends, training_ends, row_ends)
        if after == row_ends:
            prompt = generation.end_row()
            left[prompt] -= 1
            pause = 0.0
            if not left[prompt]:
                ended.append(prompt)
        else:
            generation.advance(max(0.0, after - now - pause))
            pause = max(0.0, pause - (after - now))
            if after == scoring_ends:
                batch = [ended.popleft() for _ in range(per_batch)]
                scored.append(sum(sum(prompts[prompt]) for prompt in batch))
                scoring_ends = inf
            else:
                ends.append(after)
                training_ends = inf
        now = after
    return (ends[measured.stop - 1] - ends[measured.start - 1]) / len(measured)


def between(points: Sequence[tuple[float, float]]) -> StepSeconds:
    """Return the function that is straight between ``points`` (x ascending) and constant beyond them."""
    xs = [x for x, _ in points]

    def value(x: float) -> float:
        place = bisect_left(xs, x)
        if place in (0, len(xs)):
            return points[min(place, len(xs) - 1)][1]
        (x0, y0), (x1, y1) = points[place - 1], points[place]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)

    return value


def decoding_speeds(pricer: Pricer, run: Run) -> tuple[StepSeconds, int, float]:
    """Return the time of a decoding step by the number of rows, on all replicas of the slowest class; the most rows;
    and the time of a row's pass over its prompt."""
    model, lengths, dp = pricer.plan.placement[run.model], pricer.lengths, pricer.plan.placement[run.model].layout.dp
    # a row's tokens have half of its length before them
    context = lengths.prompt + sum(each**2 for each in lengths.responses) / sum(lengths.responses) / 2
    device = min(pricer.replicas_by_class(model), key=lambda device: device.memory_gb_s)
    mesh, shape = pricer.mesh(model, device), pricer.shape(model)

    def call(rows: int, prompt: float, tokens: int) -> Call:
        maker = replace(pricer.maker, lengths=TextLengths(prompt, (float(tokens),)))
        return replace(maker.call("generate", model, shape, [[rows]]), is_exact=True)

    at_once = call(-(-pricer.plan.batch.num_taken // dp), context, 1).decode_rows
    points = []
    for rows in sorted({at_once, *(2**power for power in range(at_once.bit_length()))}):
        parts = pricer.costs.call(call(rows, context, DECODED + 1), mesh).parts
        decode = sum(seconds for name, seconds in parts.items() if name != "prefill")
        points.append((float(rows * dp), decode / DECODED))
    first = pricer.costs.call(call(at_once, lengths.prompt, 1), mesh).parts.get("prefill", 0.0)
    return between(points), at_once * dp, first / (at_once * dp)


def modelled_seconds(variants: Variants, lag: int) -> float:
    """Return the mean time of a step by ``completion_order_seconds``, which knows no instructions."""
    plan = variants.plan(lag)
    samples, measured = plan.batch.samples_per_prompt, variants.measured(plan)
    timing, pricer = variants.timing(plan), Pricer(plan, variants.costs, variants.lengths)
    batches = batch_lengths(plan, variants.lengths, measured.stop + lag + 1)
    tokens = sum(sum(batches[step]) for step in measured) / len(measured)
    training = max(timing.times(measured, lambda run: run.operator.call == "train").values(), default=0.0)
    # forward passes of the inference side
    scores = timing.times(measured, lambda run: run.operator.call == "forward" and not run.lag)
    scoring = max(scores.values(), default=0.0)
    runs = (each for each in plan.schedule.instructions if isinstance(each, Run))
    generation = next(run for run in runs if run.operator.call == "generate")
    blocks = timing.simulation.blocks
    pause = sum(time for block, time in scores.items() if generation.ranks[0] in blocks[block]) / (scoring or 1.0)
    step, at_once, prompt = decoding_speeds(pricer, generation)
    speeds = Speeds(step, at_once, prompt, scoring, pause, lambda trained: training * trained / tokens)
    return completion_order_seconds(batches, samples, lag, speeds, measured)


def both_orders(variants: Variants, lags: Sequence[int]) -> Iterator[tuple[int, float, float]]:
    """Yield each lag from 1 on, and the mean time of a step in the order of submission and of completion."""
    # without a lag the order makes no difference, so there the two models are set equal
    scale = variants.simulate(0).seconds / modelled_seconds(variants, 0)
    for lag in lags:
        if lag:
            yield lag, variants.simulate(lag).seconds, scale * modelled_seconds(variants, lag)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--lengths", help="as of simulate")
    parser.add_argument("--lags", type=read_lags, default=[1, 4])
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    options = parser.parse_args()
    spec = load_spec(options.config, options.overrides)
    lengths = expected_lengths(spec, options.lengths)
    variants = Variants(spec, costs_for(spec, None).costs, lengths, max(options.lags))
    for lag, submission, completion in both_orders(variants, options.lags):
        print(
            f"order of submission with lag {lag}: {seconds_text(submission)} a step; of completion, which no run "
            f"repeats: {seconds_text(completion)} ({100 * (completion / submission - 1):+.0f}%)"
        )


if __name__ == "__main__":
    main()
