"""Rules that ship with flexrlhf: right is 1, wrong 0.

* ``exact_answer``: the response is the column's text, blanks around both aside.
* ``gsm8k``: the last number behind ``####`` in the response is that behind ``####`` in the column (all of the column
  where it has none), as verl's strict mode of GSM8K reads them. Numbers are compared as numbers: 1,000 is 1000.0.
* ``format``: the whole response, without blanks around it, matches a regular expression; a dot matches a line's end.
* ``length``: 1 at ``target_tokens``, falling by 1 / target with each token more or less, and 0 from twice as many on.

A row without a right answer scores nothing. A pattern may take exponential time, so ``format`` runs in a worker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from functools import partial

from flexrlhf.config.reward_sources import RuleSource
from flexrlhf.rewards.base import Answer, Entry, Problem, batches_of
from flexrlhf.rewards.limits import Deadline
from flexrlhf.rewards.warn_once import Told
from flexrlhf.rewards.worker_calls import match
from flexrlhf.rewards.workers import Workers

PATTERN_SECONDS = 10.0
_FINAL = re.compile(r"####\s*\$?\s*(-?\s*\$?[\d.,]+)")


class Rule:
    """A rule that looks at one answer at a time, here. ``rule`` returns None where the row has no right answer."""

    def __init__(self, rule: Callable[[Answer], float | None], column: str, told: Told) -> None:
        self._rule, self._told = rule, told
        self._missing = Problem("column", f"a row has no right answer in its column {column!r}")

    def ask(self, answers: Sequence[Answer], deadline: Deadline) -> list[Entry]:
        """At once, so no deadline matters."""
        entries: list[Entry] = [self._rule(answer) for answer in answers]
        self._told(self._missing if None in entries else None)
        return entries

    def close(self) -> None:
        """Nothing runs."""


class Format:
    """A regular expression, in a worker process."""

    def __init__(self, pattern: str, batch_size: int, told: Told) -> None:
        self._match, self._batch_size, self._told = partial(match, pattern), batch_size, told
        self._workers = Workers(1, PATTERN_SECONDS)

    def ask(self, answers: Sequence[Answer], deadline: Deadline) -> list[Entry]:
        """Bounded as ``Workers.replies``, and by PATTERN_SECONDS for each batch."""
        replies = self._workers.replies(self._match, batches_of(answers, self._batch_size), deadline)
        for reply in replies:
            self._told(reply.problem)
        return [entry for reply in replies for entry in reply.entries]

    def close(self) -> None:
        self._workers.close()


def make_rule(source: RuleSource, told: Told) -> Rule | Format:
    if source.pattern is not None:
        return Format(source.pattern, source.batch_size, told)
    if source.target_tokens is not None:
        return Rule(partial(length, source.target_tokens), source.answer, told)
    return Rule(
        partial({"exact_answer": exact_answer, "gsm8k": gsm8k}[source.rule], source.answer), source.answer, told
    )


def exact_answer(column: str, answer: Answer) -> float | None:
    right = _text(answer, column)
    return None if right is None else float(answer.response.strip() == right.strip())


def gsm8k(column: str, answer: Answer) -> float | None:
    text = _text(answer, column)
    right = None if text is None else (final_number(text) if "####" in text else _number(text))
    return None if right is None else float(final_number(answer.response) == right)


def length(target: int, answer: Answer) -> float:
    """max(0, 1 - |n - target| / target) for n tokens."""
    return max(0.0, 1 - abs(answer.num_tokens - target) / target)


def final_number(text: str) -> Decimal | None:
    """The last number behind ``####``; None where there is none."""
    found = _FINAL.findall(text)
    return _number(found[-1]) if found else None


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(re.sub(r"[,$\s]", "", text).removesuffix("."))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _text(answer: Answer, column: str) -> str | None:
    value = answer.columns.get(column)
    return value if isinstance(value, str) or value is None else json.dumps(value, ensure_ascii=False)
