"""Price of a generation whose rows go on by themselves, from the prices of whole generations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import floor

from flexrlhf.guideline.costs.cost_model import Call, Cost, CostModel, Mesh
from flexrlhf.guideline.costs.profiles import DECODERS, profile_of
from flexrlhf.guideline.simulation.episode_prices import REPLIES
from flexrlhf.guideline.simulation.free_episodes import FollowedEpisodes, LateRow, ReplyLanes, free_times

CONTEXTS = 4
"""Parts of the longest context, between whose bounds prices are straight."""
AROUND = "bookkeeping"
"""Part of the cost of a call that does not depend on its tokens."""
FIRST_TOKEN = (1.0,)
"""Lengths of responses that end with the pass over their prompt."""


@dataclass(frozen=True)
class CallPace:
    """Speed of the replicas of a generation, in seconds; more than 32 rows are rounded to five bits.

    costs:    prices of calls
    call:     generation of the rows of a replica
    mesh:     on which it runs
    longest:  most tokens of a context
    """

    costs: CostModel
    call: Call
    mesh: Mesh
    longest: float
    _known: dict[tuple[bool, int, int, int], float] = field(default_factory=dict)

    def step(self, rows: float, context: float) -> float:
        """Return the time of a decoding step of ``rows`` rows of ``context`` tokens."""
        return self._along(rows, context, 1, True)

    def prefill(self, rows: float, context: float, num_alike: float = 1.0) -> float:
        """Return the time of the passes over the contexts of ``rows`` rows, of ``context`` tokens, which each so many
        rows have together."""
        return self._along(rows, context, num_alike, False)

    @cached_property
    def around(self) -> float:
        """Time of a call in addition, however many tokens it generates."""
        return self._cost(1, self.call.prompt, 1, FIRST_TOKEN).parts.get(AROUND, 0.0)

    def _along(self, rows: float, context: float, num_alike: float, steps: bool) -> float:
        place = context / self.longest * CONTEXTS
        first = min(floor(place), CONTEXTS - 1)
        unit = 1 << max(0, round(rows).bit_length() - 5)
        number, alike = max(1, unit * round(rows / unit)), max(1, round(num_alike))
        low, high = (self._at(number, each, alike, steps) for each in (first, first + 1))
        return low + (place - first) * (high - low)

    def _at(self, rows: int, part: int, num_alike: int, steps: bool) -> float:
        key = steps, rows, part, num_alike
        if key not in self._known:
            context = self.longest * part / CONTEXTS
            if steps:
                first = self._at(rows, part, num_alike, False)
                self._known[key] = max(0.0, self._priced(rows, context, num_alike, (3.0,)) - first) / 2
            else:
                self._known[key] = self._priced(rows, context, num_alike, FIRST_TOKEN)
        return self._known[key]

    def _priced(self, rows: int, context: float, num_alike: int, responses: tuple[float, ...]) -> float:
        return self._cost(rows, context, num_alike, responses).seconds - self.around

    def _cost(self, rows: int, context: float, num_alike: int, responses: tuple[float, ...]) -> Cost:
        return self.costs.call(
            replace(
                self.call,
                rows=rows,
                decode_rows=rows,
                prompt=max(1.0, context),
                prompt_samples=num_alike,
                responses=responses,
                pages=None,
                is_exact=True,
            ),
            self.mesh,
        )


def free_generation(
    costs: CostModel,
    call: Call,
    mesh: Mesh,
    episodes: FollowedEpisodes,
    lanes: ReplyLanes,
    keeps: bool = False,
    carries: bool = False,
) -> tuple[Cost, tuple[LateRow, ...]]:
    """Return the time of a generation of ``episodes``, and the rows that it carries before their replies.

    call:     generation of whole responses by the replica.
    keeps:    whether keys and values are kept from turn to turn, so that a turn reads the reply alone.
    carries:  whether it ends when nothing is left but rows whose replies are late and that have a later generation.
    """
    pace = CallPace(costs, call, mesh, call.prompt + max(call.responses))
    batching = profile_of(DECODERS, call.engine).batching
    found = free_times(episodes, lanes, call.decode_rows, pace, batching, keeps, carries)
    parts = {"prefill": found.prefill, "decode": found.decode, REPLIES: found.waiting, AROUND: pace.around}
    return Cost({name: seconds for name, seconds in parts.items() if seconds}), found.late
