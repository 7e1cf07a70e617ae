"""Rules that ship with flexrlhf: right is 1, wrong 0.

* ``exact_answer``: the response is the column's text, blanks around both aside.
* ``gsm8k``: the last number after ``####`` in the response is the one after ``####`` in the column (all of the column
  where it has none), as verl's strict mode of GSM8K reads them, but for signs, currencies, emphasis and separators of
  thousands, which are understood. Numbers are compared as numbers: 1,000 is 1000.0.
* ``math``: the answer of the response, in LaTeX or as a plain number, has the value of the column by math-verify,
  which TRL and verl use, too. A column without delimiters is LaTeX as a whole. Several boxed answers are a set.
* ``reasoning-gym``: the score, from 0 to 1, that the row's task gives to the text between the last ``<answer>`` and
  ``</answer>``.
* ``format``: the whole response, without blanks around it, matches a regular expression; a dot matches a line's end.
* ``length``: 1 at ``target_tokens``, falling by 1 / target with each token more or less, and 0 from twice as many on.

A row without a reference solution, or with one that its rule cannot read, has no score. A pattern, a comparison of
formulas and a task's score may take very long, so ``format``, ``math`` and ``reasoning-gym`` run in a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from flexrlhf.config.reward_sources import RuleSource
from flexrlhf.rewards.base import Sample, Score
from flexrlhf.rewards.solutions import final_number, missing_solution, solution_number, solution_text, unread_solution
from flexrlhf.rewards.worker_calls import match, same_value, task_score
from flexrlhf.rewards.workers import Workers, WorkerSource
from flexrlhf.user_code.call_failures import WarnOnce
from flexrlhf.user_code.deadline import Deadline

PATTERN_SECONDS, MATH_SECONDS = 10.0, 120.0
"""For a batch of responses; math-verify itself gives up on one after five seconds."""


class RowRule:
    """A rule that scores one sample at a time, in this process.

    ``rule``: returns None if the row has no reference solution in ``column``, or none that it reads.
    """

    def __init__(self, rule: Callable[[Sample], float | None], column: str, warn: WarnOnce) -> None:
        self._rule, self._column, self._warn = rule, column, warn

    def score(self, samples: Sequence[Sample], deadline: Deadline) -> list[Score]:
        """Return one score a sample, at once: the deadline does not matter."""
        return [self._scored(sample) for sample in samples]

    def _scored(self, sample: Sample) -> float | None:
        score = self._rule(sample)
        if score is None:
            solution = sample.columns.get(self._column)
            missing = missing_solution(self._column)
            self._warn(missing if solution is None else unread_solution(self._column, solution))
        return score

    def close(self) -> None:
        """Do nothing: no process runs."""


def make_rule(source: RuleSource, warn: WarnOnce) -> RowRule | WorkerSource:
    """Return the rule that ``source`` names."""
    if source.pattern is not None:
        return WorkerSource(partial(match, source.pattern), Workers(1, PATTERN_SECONDS), source.batch_size, warn)
    if source.rule == "math":
        return WorkerSource(partial(same_value, source.answer), Workers(1, MATH_SECONDS), source.batch_size, warn)
    if source.rule == "reasoning-gym":
        return WorkerSource(task_score, Workers(1, MATH_SECONDS), source.batch_size, warn)
    if source.target_tokens is not None:
        return RowRule(partial(length, source.target_tokens), source.answer, warn)
    rule = {"exact_answer": exact_match, "gsm8k": gsm8k}[source.rule]
    return RowRule(partial(rule, source.answer), source.answer, warn)


def exact_match(column: str, sample: Sample) -> float | None:
    """Return 1 where the response is the text of ``column``, blanks around both aside."""
    solution = _text(sample, column)
    return None if solution is None else float(sample.response.strip() == solution.strip())


def gsm8k(column: str, sample: Sample) -> float | None:
    """Return 1 where the final numbers of the response and of ``column`` are the same."""
    text = _text(sample, column)
    solution = None if text is None else solution_number(text)
    return None if solution is None else float(final_number(sample.response) == solution)


def length(target: int, sample: Sample) -> float:
    """Return max(0, 1 - |n - target| / target) for n tokens."""
    return max(0.0, 1 - abs(sample.num_tokens - target) / target)


def _text(sample: Sample, column: str) -> str | None:
    value = sample.columns.get(column)
    return None if value is None else solution_text(value)
