"""Time of a step if responses are trained in the order in which they end, as asynchronous trainers of the field do.

A model by events, for comparison with batches in the order of submission: generation is always as full as the bound on
prompts in flight allows, rows that end leave room at once, and training takes the first prompts of which all samples
have ended. Its runs are not repeatable, and long responses are trained later than short ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

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
