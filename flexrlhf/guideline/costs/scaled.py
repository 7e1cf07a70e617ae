"""Costs of another cost model, scaled by the times that a run has measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from flexrlhf.api import CallKind, DeviceClass, Primitive
from flexrlhf.guideline.costs.cost_model import Call, Cost, CostModel, Links, Mesh, Traffic, Transformer
from flexrlhf.guideline.costs.environment_times import EnvironmentTimes

CallWork = tuple[CallKind, str, Transformer]
"""Kind of a call, its engine, its model."""
ScaledWork = CallWork | Literal["combine", "sync", "switch"]


@dataclass(frozen=True)
class ScaledCosts:
    """CostModel of a run.

    costs:    cost model that is scaled
    factors:  measured over predicted time of each work that the run has timed
    usual:    the same of all its calls together, for all other work
    replies:  times of its environment; None: it has none
    """

    costs: CostModel
    factors: Mapping[ScaledWork, float]
    usual: float
    replies: EnvironmentTimes | None = None

    def call(self, call: Call, mesh: Mesh) -> Cost:
        return _scaled(self.costs.call(call, mesh), self._factor_of(call))

    def combine(self, rows: int, width: float) -> Cost:
        return _scaled(self.costs.combine(rows, width), self.factors.get("combine", self.usual))

    def move(self, primitive: Primitive, traffic: Traffic, links: Links) -> Cost:
        return _scaled(self.costs.move(primitive, traffic, links), self.usual)

    def sync(self, traffic: Traffic, gathered: Traffic, num_tensors: int, links: Links) -> Cost:
        cost = self.costs.sync(traffic, gathered, num_tensors, links)
        return _scaled(cost, self.factors.get("sync", self.usual))

    def switch(self, size: int, device: DeviceClass) -> Cost:
        return _scaled(self.costs.switch(size, device), self.factors.get("switch", self.usual))

    def save(self, size: int) -> Cost:
        return self.costs.save(size)

    def environment(self, name: str) -> EnvironmentTimes | None:
        return self.replies if self.replies and self.replies.name == name else self.costs.environment(name)

    def _factor_of(self, call: Call) -> float:
        """Return the factor of the calls most like ``call``: of its kind, engine and model; else the mean of its kind
        and engine, or of its kind."""
        work = call.kind, call.engine, call.model
        for common in (3, 2, 1):
            if found := [factor for each, factor in self.factors.items() if each[:common] == work[:common]]:
                return sum(found) / len(found)
        return self.usual


def _scaled(cost: Cost, factor: float) -> Cost:
    return Cost({name: factor * seconds for name, seconds in cost.parts.items()})
