"""Metrics of the reference: the terms whose mean each metric is, and their means."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Metric:
    """``scale``: mean magnitude of the terms whose mean is ``value``; rounding is relative to it."""

    value: float
    scale: float


class Terms:
    """The terms that each metric of a step is the mean of."""

    def __init__(self) -> None:
        self._terms: dict[str, list[float]] = defaultdict(list)
        self._sizes: dict[str, list[float]] = defaultdict(list)
        self._left_out: set[str] = set()

    def add(self, name: str, terms: Tensor | Sequence[float], sizes: Sequence[float] | None = None) -> None:
        """``sizes``: for terms that are differences, the size of what was subtracted, which sets their rounding."""
        plain = terms.detach().tolist() if isinstance(terms, Tensor) else list(terms)
        self._terms[name] += plain
        self._sizes[name] += map(abs, plain) if sizes is None else sizes

    def take(self, other: Terms, name: str, own: str) -> None:
        """The terms of metric ``name`` of ``other``, under the name ``own``."""
        self.add(own, other._terms[name], other._sizes[name])

    def values(self, name: str) -> list[float]:
        """The terms of a metric."""
        return self._terms[name]

    def leave_out(self, name: str) -> None:
        """A metric of this step that rounding decides."""
        self._left_out.add(name)

    def mean(self, name: str) -> Metric:
        terms, sizes = self._terms[name], self._sizes[name]
        return Metric(sum(terms) / len(terms), sum(sizes) / len(sizes))

    def std(self, name: str) -> Metric:
        terms, mean = self._terms[name], self.mean(name).value
        return Metric(
            math.sqrt(sum((x - mean) ** 2 for x in terms) / len(terms)),
            math.sqrt(sum(x * x for x in terms) / len(terms)),
        )

    def metrics(self) -> dict[str, Metric]:
        """Means of all metrics that have terms."""
        metrics = {name: self.mean(name) for name, terms in self._terms.items() if terms and name not in self._left_out}
        if "importance_weight" in metrics:
            weights = self.values("importance_weight")
            share = sum(weights) ** 2 / sum(w * w for w in weights) / len(weights)
            metrics["effective_sample_size"] = Metric(share, 1.0)
        spread = {name: name.replace("mean", "std") for name in ("reward_mean", "eval_reward_mean", "advantage_mean")}
        return metrics | {std: self.std(mean) for mean, std in spread.items() if mean in metrics}
