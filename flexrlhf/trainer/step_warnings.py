"""Warnings of a run on stderr, each kind once in so many steps.

Rank 0 warns of metrics: a KL that explodes, losses and norms that jump, equal scores, truncation.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from math import isfinite
from statistics import median

WINDOW, LEAST = 20, 5
"""Steps before, of which the median is taken: at most, and at least."""
NATS = ("policy_loss", "nll", "ptx_nll", "pair_loss", "preference_loss")
NORMS = tuple(f"{role}_grad_norm" for role in ("actor", "critic", "cost_critic", "reward"))
FLOORS = {**dict.fromkeys((*NATS, *NORMS), 1.0), "value_loss": 0.0, "cost_value_loss": 0.0}
"""Watched metrics, and values that are no spike though the median may be almost 0: 1 nat or advantage, the default of
``max_grad_norm``."""
SPIKE = 20.0
"""Loss or gradient norm over its median: the quick start has at most 11."""
MOST_NATS = {"kl_token": 2.0, "update_kl": 0.5}
"""Largest usual KL per token, in either direction."""
MOST_TRUNCATED = 0.5
"""Largest usual share of truncated responses."""
LOOK = "samples.jsonl shows some of them"
EQUAL = 1e-7
"""Standard deviation over mean, up to which scores are the same but for rounding."""


class RareWarnings:
    """Writer of lines to stderr, of each kind once in so many steps."""

    INTERVAL_STEPS = 20

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def __call__(self, kind: str, step: int, text: str) -> None:
        """Write ``text``, unless there was a line of this kind in the last steps."""
        if step >= self._next.get(kind, step):
            self._next[kind] = step + self.INTERVAL_STEPS
            print(f"flexrlhf: {text}", file=sys.stderr, flush=True)


class StepWarnings:
    """Observer of the rows of metrics, in the order of steps.

    ``name``: of the run. ``num_rows``: responses of a step. Medians and steps in a row are of the steps that this
    object has seen, so they begin anew with a resumed run.
    """

    def __init__(self, name: str, num_rows: int) -> None:
        self._name = name
        self._num_rows = num_rows
        self._equal_steps = 0
        self._warn = RareWarnings()
        self._before: dict[str, deque[float]] = {metric: deque(maxlen=WINDOW) for metric in FLOORS}

    def observe(self, step: int, row: Mapping[str, float]) -> None:
        """Write a line to stderr for each metric of ``row`` that is over its threshold, once in so many steps."""
        for metric, text in (*self._large(row), *self._spikes(row), *self._equal_scores(row), *self._truncated(row)):
            self._warn(metric, step, f"{self._name}: step {step}: {text}")

    def _large(self, row: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Yield the metrics of the KL that are over their limits; NaN is over any."""
        for metric, limit in MOST_NATS.items():
            if metric in row and not abs(row[metric]) <= limit:
                yield metric, f"{metric} {row[metric]:.4g} nats per token is beyond {limit:g}"

    def _spikes(self, row: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Yield the losses and gradient norms that are far above their medians in the steps before."""
        for metric, before in self._before.items():
            if metric not in row:
                continue
            value, usual = abs(row[metric]), median(before) if len(before) >= LEAST else 0.0
            if isfinite(value):
                before.append(value)
            if usual and value > max(SPIKE * usual, FLOORS[metric]):
                yield metric, f"{metric} {row[metric]:.4g} is over {SPIKE:g} times its median {usual:.4g}"

    def _equal_scores(self, row: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Yield a line if all scores that are compared are equal, with the number of such steps in a row."""
        equal = _equal_scores(row, self._num_rows)
        self._equal_steps = self._equal_steps + 1 if equal else 0
        if equal:
            steps = f", for {self._equal_steps} steps in a row" if self._equal_steps > 1 else ""
            yield "equal_scores", f"{equal}{steps}; {LOOK}"

    def _truncated(self, row: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Yield a line if more responses are truncated than usual."""
        share = row.get("truncated", 0.0)
        if share > MOST_TRUNCATED:
            number = "all responses" if share == 1 else f"{share:.0%} of the responses"
            yield "truncated", f"{number} are truncated at data.max_response_tokens; {LOOK}"


def _equal_scores(row: Mapping[str, float], num_rows: int) -> str:
    """Return in words which scores of a step are all the same; an empty text if some differ, or there is one."""
    several = min(num_rows, row.get("rows_trained", num_rows)) > 1
    if several and row.get("reward_std", 1.0) <= EQUAL * max(abs(row.get("reward_mean", 0.0)), EQUAL):
        meaning = "no gradient follows from it" if "group_alike" in row else "none is better than another"
        return f"all responses have the same score {row.get('reward_mean', 0.0):.4g}, so that {meaning}"
    if row.get("group_alike") == 1:
        return "in every group all responses have the same score, so that no gradient follows from the scores"
    return ""
