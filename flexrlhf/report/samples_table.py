"""Samples of a run for the page: the responses to a prompt over steps, and the responses of each step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flexrlhf.report.file_reader import LineFields
from flexrlhf.report.run_contents import RunContents

MOST_STEPS, MOST_PROMPTS, MOST_ROWS = 12, 12, 8
"""Steps, prompts of evaluations, and samples of a training step that are shown."""
MOST_CHARACTERS = 100_000
"""Characters of a text that are shown."""


@dataclass(frozen=True)
class SampleLine:
    """A response.

    step:      from 0
    prompt, response: as text
    score:     as text; empty if there is none
    length:    as text, and whether it was truncated
    turns:     (role, text, reward as text) of an episode, replies included; empty for a response of one turn
    """

    step: int
    prompt: str
    response: str
    score: str
    length: str
    turns: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True)
class SampleGroup:
    """Responses that are shown together.

    title:    the prompt, or the step
    lines:    in order of steps
    is_open:  whether they are shown at first
    by_step:  whether all have the same prompt, so that each line begins with its step
    """

    title: str
    lines: tuple[SampleLine, ...]
    is_open: bool
    by_step: bool


def sample_groups(contents: RunContents) -> list[SampleGroup]:
    """Return the evaluation samples by prompt, over steps, then the training samples by step."""
    steps: dict[bool, set[int]] = {True: set(), False: set()}
    for row in contents.samples:
        steps[_is_evaluation(row)].add(row["step"])
    shown = {kind: spread(sorted(found), MOST_STEPS) for kind, found in steps.items()}
    rows = [row for row in contents.samples if row["step"] in shown[_is_evaluation(row)]]
    evaluations, training = ([row for row in rows if _is_evaluation(row) == kind] for kind in (True, False))
    return [*_by_prompt(evaluations), *_by_step(training, shown[False], is_first=not evaluations)]


def _is_evaluation(row: LineFields) -> bool:
    return row.get("rows") == "evaluation"


def _by_prompt(rows: Sequence[LineFields]) -> list[SampleGroup]:
    groups: dict[tuple[int, str], list[LineFields]] = defaultdict(list)
    for row in rows:
        groups[row.get("row", 0), row.get("prompt", "")].append(row)
    shown = list(groups.items())[:MOST_PROMPTS]
    return [
        SampleGroup(prompt, tuple(map(_line, members)), index < 2, True)
        for index, ((_, prompt), members) in enumerate(shown)
    ]


def _by_step(rows: Sequence[LineFields], steps: Sequence[int], is_first: bool) -> list[SampleGroup]:
    groups = []
    for step in steps:
        members = [row for row in rows if row["step"] == step][:MOST_ROWS]
        is_open = is_first and step in (steps[0], steps[-1])
        groups.append(SampleGroup(f"step {step}", tuple(map(_line, members)), is_open, False))
    return groups


def spread(values: Sequence[int], most: int) -> list[int]:
    """Return at most so many of ``values``, evenly spaced, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[index * (len(values) - 1) // (most - 1)] for index in range(most)]


def _line(row: LineFields) -> SampleLine:
    score = [f"{row['score']:.4g}"] if row.get("score") is not None else []
    score += [f"cost {row['cost']:.4g}"] if row.get("cost") is not None else []
    prompt, response = (_cut(row.get(name, "")) for name in ("prompt", "response"))
    turns = tuple(_turn(turn) for turn in row.get("turns", ()))
    return SampleLine(row["step"], prompt, response, ", ".join(score), _length(row), turns)


def _turn(turn: LineFields) -> tuple[str, str, str]:
    reward = turn.get("reward")
    return str(turn.get("role")), _cut(turn.get("text", "")), f"{reward:+.4g}" if reward else ""


def _cut(text: str) -> str:
    """Return a text, without the end of a very long one."""
    left = len(text) - MOST_CHARACTERS
    return text if left <= 0 else f"{text[:MOST_CHARACTERS]} ... ({left:,} further characters)"


def _length(row: LineFields) -> str:
    length: Any = row.get("length")
    if length is None:
        return ""
    return f"{length} tokens" if row.get("finished", True) else f"{length} tokens, truncated"
