"""Transfer protocols: functions that split the prompts of a mini-batch over the replicas of a layout.

    def round_robin(replicas, prompts):
        return [prompts[number :: len(replicas)] for number in range(len(replicas))]

``replicas`` has the ranks of each replica, ``prompts`` is a range of numbers of the prompts that a step takes. The rows
that an operator reads come to these ranks from whichever ranks wrote them, and the rows that it writes leave from
there: both halves of a protocol of HybridFlow (Sheng et al. 2025, appendix B), distribute and collect, follow from one
function.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from operator import index
from typing import Any, ClassVar

from flexrlhf.config.code_loading import NamedErrors, changed_ns, load_function
from flexrlhf.errors import UserError, one_line, shown
from flexrlhf.text import ranks_text, span_of
from flexrlhf.user_code.planning_calls import run_apart, serve_call

Replicas = tuple[tuple[int, ...], ...]
"""Ranks of each replica."""
Arguments = tuple[Replicas, range]
"""Arguments of a protocol."""
SplitPrompts = Callable[[Replicas, range], Sequence[Sequence[int]]]
"""Ranks of each replica and prompts → prompts of each replica."""
PromptParts = tuple[tuple[int, ...], ...]
"""Prompts of each replica, ascending."""


def _read(returned: Sequence[Sequence[int]], name: str) -> PromptParts:
    return tuple(tuple(sorted(_number(prompt, name) for prompt in part)) for part in returned)


def _number(prompt: object, name: str) -> int:
    # numpy's integers have an index, too
    if isinstance(prompt, bool) or not hasattr(prompt, "__index__"):
        raise UserError(f"{name}: expected whole numbers of prompts, found {shown(prompt)}")
    return index(prompt)


@dataclass(frozen=True, eq=False)
class TransferProtocol:
    """A function of (replicas, prompts) that returns the prompts of each replica, with its ``name`` for messages."""

    name: str
    function: SplitPrompts

    PURE: ClassVar = (
        "its result may depend on its arguments alone, not on random numbers, earlier calls, time or process"
    )

    def parts(self, replicas: Replicas, prompts: range) -> PromptParts:
        """Return the prompts of each replica, the same ones every time.

        Raises UserError for a function that fails, or that does not give each of ``prompts`` to one replica.
        """
        key = replicas, prompts
        if key not in self._known:
            with NamedErrors(f"protocol {self.name}"):
                parts = _read(self.function(replicas, prompts), f"protocol {self.name}")
            self._check(replicas, prompts, parts)
            self._known[key] = parts
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[Replicas, range], PromptParts]:
        return {}

    def _check(self, replicas: Replicas, prompts: range, parts: PromptParts) -> None:
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

    @staticmethod
    def read(reference: str, expected: tuple[Arguments, ...], processes: int) -> TransferProtocol:
        """Return the protocol of a user's file.

        expected:   arguments that a run of the plan has.
        processes:  in which it is called, to compare what it returns.

        Raises UserError for a function that fails, does not return, or returns other splits of the same arguments.
        """

        def split(replicas: Replicas, prompts: range) -> PromptParts:
            call = (replicas, prompts)
            keys = expected if call in expected else (call,)
            changed = changed_ns(reference.rpartition(":")[0])
            return _splits(reference, keys, processes, changed)[keys.index(call)]

        return TransferProtocol(reference, split)


@cache
def _splits(reference: str, keys: tuple[Arguments, ...], processes: int, changed: int) -> list[PromptParts]:
    """Return the splits for all of ``keys``, once in a process: a run goes on with those that it began with.

    ``changed``: when the file was written.
    """
    name = f"protocol {reference}"
    calls = [[replicas, [prompts.start, prompts.stop, prompts.step]] for replicas, prompts in keys]
    task = {"reference": reference, "name": name, "calls": calls}
    found = [splits for passes in run_apart(__name__, task, name, processes) for splits in passes]
    for number, (_, prompts) in enumerate(keys):
        first = found[0][number]
        other = next((each[number] for each in found if each[number] != first), None)
        if other is not None:
            raise UserError(
                f"{name} returns {one_line(str(first))} and {one_line(str(other))} for the same prompts "
                f"{span_of(tuple(prompts))}; {TransferProtocol.PURE}"
            )
    return [tuple(map(tuple, parts)) for parts in found[0]]


def _called(task: dict[str, Any]) -> list[list[PromptParts]]:
    """Return the splits of each of three passes over the calls of ``task``."""
    function = load_function(task["reference"])
    calls = [(tuple(map(tuple, replicas)), range(*prompts)) for replicas, prompts in task["calls"]]
    # right behind each other, and behind those of all others
    twice = [[_read(function(*call), task["name"]) for _ in range(2)] for call in calls]
    again = [_read(function(*call), task["name"]) for call in reversed(calls)]
    return [[first for first, _ in twice], [second for _, second in twice], again[::-1]]


if __name__ == "__main__":
    serve_call(_called)
