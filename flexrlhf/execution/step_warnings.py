"""Warnings of a run's metrics, by rank 0: a KL that explodes, a loss or gradient norm that jumps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from math import isfinite
from statistics import median

from flexrlhf.config.guards import GuardsSpec
from flexrlhf.execution.finite_guard import RareWarnings

WINDOW, LEAST = 20, 5
"""Steps before, of which the median is taken: at most, and at least."""
NATS = ("policy_loss", "nll", "ptx_nll", "pair_loss", "preference_loss")
NORMS = tuple(f"{role}_grad_norm" for role in ("actor", "critic", "cost_critic", "reward"))
FLOORS = {**dict.fromkeys((*NATS, *NORMS), 1.0), "value_loss": 0.0, "cost_value_loss": 0.0}
"""Watched metrics, and what is no spike though the median may be almost 0: 1 nat or advantage, the default of
``max_grad_norm``."""


class StepWarnings:
    """Observer of the rows of metrics, in the order of steps.

    ``name``: of the run. The median is of the steps that this object has seen, so it begins anew with a resumed run.
    """

    def __init__(self, guards: GuardsSpec, name: str) -> None:
        self._guards = guards
        self._name = name
        self._warn = RareWarnings()
        self._before: dict[str, deque[float]] = {metric: deque(maxlen=WINDOW) for metric in FLOORS}

    def observe(self, step: int, row: Mapping[str, float]) -> None:
        """Write a line to stderr for each metric of ``row`` that is over its threshold, once in so many steps."""
        for metric, text in (*self._large(row), *self._spikes(row)):
            self._warn(metric, step, f"{self._name}: step {step}: {text}")

    def _large(self, row: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Yield the metrics of the KL that are over their limits; NaN is over any."""
        guards = self._guards
        limits = {"kl_token": ("max_kl", guards.max_kl), "update_kl": ("max_update_kl", guards.max_update_kl)}
        for metric, (setting, limit) in limits.items():
            if limit is not None and metric in row and not abs(row[metric]) <= limit:
                yield metric, f"{metric} {row[metric]:.4g} nats per token is beyond guards.{setting} {limit:g}"

    def _spikes(self, row: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Yield the losses and gradient norms that are far above those of the steps before."""
        for metric, before in self._before.items():
            if metric not in row:
                continue
            value, factor = abs(row[metric]), self._guards.loss_spike
            usual = median(before) if len(before) >= LEAST else 0.0
            if isfinite(value):
                before.append(value)
            if factor is not None and usual and value > max(factor * usual, FLOORS[metric]):
                limit = f"guards.loss_spike {factor:g} times its median {usual:.4g}"
                yield metric, f"{metric} {row[metric]:.4g} is over {limit}"
