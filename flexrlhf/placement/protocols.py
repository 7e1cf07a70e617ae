"""Transfer protocols: functions that split the prompts of a mini-batch over the replicas of a layout.

    def round_robin(replicas, prompts):
        return [prompts[number :: len(replicas)] for number in range(len(replicas))]

``replicas`` has the ranks of each replica, ``prompts`` is a range of numbers in the step's batch. The rows that an
operator reads come to these ranks from whichever ranks wrote them, and the rows that it writes leave from there: both
halves of a protocol of HybridFlow (Sheng et al. 2025, appendix B), distribute and collect, follow from one function.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from flexrlhf.config.code_checks import NamedErrors
from flexrlhf.errors import UserError
from flexrlhf.text import ranks_text, span_of

Replicas = tuple[tuple[int, ...], ...]
"""Ranks of each replica."""
Split = Callable[[Replicas, range], Sequence[Sequence[int]]]
"""Ranks of each replica and prompts → prompts of each replica."""
Parts = tuple[tuple[int, ...], ...]
"""Prompts of each replica, ascending."""


@dataclass(frozen=True, eq=False)
class TransferProtocol:
    """A function of (replicas, prompts) that returns the prompts of each replica, with its ``name`` for messages."""

    name: str
    function: Split

    def parts(self, replicas: Replicas, prompts: range) -> Parts:
        """Return the prompts of each replica, the same ones every time.

        Raises UserError for a function that fails, or that does not give each of ``prompts`` to one replica.
        """
        key = replicas, prompts
        if key not in self._known:
            with NamedErrors(f"protocol {self.name}"):
                found = [sorted(int(prompt) for prompt in part) for part in self.function(replicas, prompts)]
            parts = tuple(map(tuple, found))
            self._check(replicas, prompts, parts)
            self._known[key] = parts
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[Replicas, range], Parts]:
        return {}

    def _check(self, replicas: Replicas, prompts: range, parts: Parts) -> None:
        if len(parts) != len(replicas):
            raise UserError(
                f"protocol {self.name}: expected a list of prompts for each of {len(replicas)} replicas, found "
                f"{len(parts)} lists"
            )
        if sorted(chain.from_iterable(parts)) == list(prompts):
            return
        takers: dict[int, list[str]] = defaultdict(list)
        for ranks, part in zip(replicas, parts, strict=True):
            for prompt in part:
                takers[prompt].append(ranks_text(ranks))
        known, every = span_of(tuple(prompts)), ", ".join(map(ranks_text, replicas))
        for prompt in sorted({*prompts, *takers}):
            if prompt not in prompts:
                raise UserError(f"protocol {self.name}: prompt {prompt} of {takers[prompt][0]} is not in {known}")
            if not takers[prompt]:
                raise UserError(f"protocol {self.name}: prompt {prompt} of {known} is on none of {every}")
            if len(takers[prompt]) > 1:
                both = " and on ".join(takers[prompt])
                raise UserError(f"protocol {self.name}: prompt {prompt} is on {both}; each row is computed once")
