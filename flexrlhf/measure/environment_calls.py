"""Measure the environments of runs: some episodes in their processes, within their limits."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from statistics import median
from typing import Any

from flexrlhf.api import (
    EnvironmentSpec,
    EnvironmentTools,
    EpisodeCall,
    EpisodeReply,
    Episodes,
    Plan,
    ProgramTurn,
    UserError,
)
from flexrlhf.guideline.costs.environment_times import EnvironmentTimes

MOST_EPISODES, MOST_TIMES = 64, 256
"""Episodes that run at the same time, and times of a kind that are kept."""
EXAMPLES: dict[str, Any] = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
"""Arguments of tools by type; of other types a text."""
PER_PROCESS = 4
"""Episodes of a process that runs one after the other. One with ``async`` episodes has as many as in the run, since all
share what an exchange with their process takes."""

EpisodeStart = tuple[Mapping[str, Any], str]
"""Columns of a prompt's row, and a text of the policy."""


def measure_environments(plans: Sequence[Plan], seconds: float) -> tuple[EnvironmentTimes, ...]:
    """Return the times of the environment of each of ``plans``, in ``seconds`` for each, or for one turn.

    Raises UserError for an environment all of whose calls fail.
    """
    found: dict[str, EnvironmentTimes] = {}
    for plan in plans:
        environment = plan.spec.environment
        if environment is not None and environment.name not in found and (rows := _rows(plan)):
            calls = [example_call(tool["function"]) for tool in EnvironmentTools(environment).schemas()]
            if environment.has_known_format:
                # tools take the same time however their calls are written
                environment = environment.model_copy(update={"tool_format": "hermes"})
            if calls and environment.has_known_format:
                rows = [(columns, calls[place % len(calls)]) for place, (columns, _) in enumerate(rows)]
            together = plan.processes.most_episodes
            if environment.api is not None:
                rows = [(columns, ProgramTurn(text).as_json) for columns, text in rows]
            episodes = Episodes(environment, environment.processes, sampling=plan.sampled_from)
            found[environment.name] = _measured(episodes, environment, rows, together, plan.spec.seed, seconds)
    return tuple(found.values())


def _rows(plan: Plan) -> list[EpisodeStart]:
    return [(example.columns, text) for example, text in plan.data.first_rows(MOST_EPISODES)]


def _measured(
    episodes: Episodes,
    environment: EnvironmentSpec,
    rows: Sequence[EpisodeStart],
    together: int,
    seed: int,
    seconds: float,
) -> EnvironmentTimes:
    """Run episodes of ``rows`` until the time is over. ``together``: ``async`` ones of a process at the same time."""
    end = time.monotonic() + seconds
    all_rows, rows = rows, rows[: PER_PROCESS * environment.processes]
    times: dict[bool, list[float]] = {True: [], False: []}
    around: list[float] = []
    failures: list[str] = []

    def timed_replies(calls: Sequence[EpisodeCall], is_reset: bool) -> list[EpisodeReply]:
        """Return the replies to calls, whose times are kept."""
        began = time.monotonic()
        replies = episodes.replies(calls, environment.timeout_seconds * len(calls))
        took = time.monotonic() - began
        failures.extend(reply.failure.text for reply in replies if reply.failure is not None)
        found = [reply.seconds for reply in replies if reply.failure is None]
        times[is_reset] += found
        if len(found) == len(calls):
            around.append(_around(found, took, environment.processes, episodes.are_concurrent))
        return replies

    try:
        # processes load the environment's code in their first call
        episodes.replies(_resets(rows, 0, seed), seconds + environment.timeout_seconds * len(rows))
        if episodes.are_concurrent:
            rows = [*islice(cycle(all_rows), together * environment.processes)]
        step, began = 0, episodes.cpu_seconds
        while time.monotonic() < end or not (times[False] or failures or step):
            step += 1
            calls = _resets(rows, step, seed)
            replies = timed_replies(calls, is_reset=True)
            while time.monotonic() < end or not (times[False] or failures):
                calls = [
                    replace(
                        call,
                        turns=(*call.turns, rows[call.key[1]][1]),
                        is_last=len(call.turns) + 1 == environment.max_turns,
                    )
                    for call, reply in zip(calls, replies, strict=True)
                    if not call.ends_with(reply)
                ]
                if not calls:
                    break
                replies = timed_replies(calls, is_reset=False)
        is_concurrent, computed = episodes.are_concurrent, episodes.cpu_seconds - began
    finally:
        episodes.close()
    if not times[False]:
        reason = failures[0] if failures else "its episodes end when they begin"
        raise UserError(f"environment {environment.name}: no reply could be measured: {reason}")
    return EnvironmentTimes(
        name=environment.name,
        resets=_kept(times[True]),
        replies=_kept(times[False]),
        around=median(around) if around else 0.0,
        is_concurrent=is_concurrent,
        computing=min(1.0, computed / max(computed, sum(times[True]) + sum(times[False]), 1e-9)),
        failures=len(failures),
    )


def example_call(function: Mapping[str, Any]) -> str:
    """Return a call of a tool in the form hermes, by its schema, with a value of the type of each of its arguments."""
    properties = function["parameters"].get("properties", {})
    arguments = {name: EXAMPLES.get(str(schema.get("type")), "1") for name, schema in properties.items()}
    return f"<tool_call>{json.dumps({'name': function['name'], 'arguments': arguments})}</tool_call>"


def _resets(rows: Sequence[EpisodeStart], step: int, seed: int) -> list[EpisodeCall]:
    """Return the calls that begin the episodes of ``rows``."""
    return [EpisodeCall((step, row), columns, seed + step + row) for row, (columns, _) in enumerate(rows)]


def _around(times: Sequence[float], took: float, processes: int, is_concurrent: bool) -> float:
    """Return the time around each call, of calls that are dealt to the processes in turn and took ``took``."""
    own = max(times) if is_concurrent else max(sum(times[first::processes]) for first in range(processes))
    return max(0.0, took - own) / -(-len(times) // processes)


def _kept(times: Sequence[float]) -> tuple[float, ...]:
    """Return ``times`` in ascending order, or as many of them at equal distances as are kept."""
    ordered = sorted(times)
    count = min(len(ordered), MOST_TIMES)
    return tuple(ordered[(2 * place + 1) * len(ordered) // (2 * count)] for place in range(count))
