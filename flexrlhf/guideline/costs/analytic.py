"""The analytic cost model: every term from shapes, device figures and engine profiles. Nothing is measured."""

from __future__ import annotations

from collections.abc import Callable

from flexrlhf.guideline.costs.cost_model import Call, Cost, Kind, Links, Mesh, Traffic
from flexrlhf.guideline.costs.generation import generate_cost
from flexrlhf.guideline.costs.links import move_cost, sync_cost
from flexrlhf.guideline.costs.training import forward_cost, train_cost
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.placement.routes import Primitive

_CALLS: dict[Kind, Callable[[Call, Mesh], Cost]] = {
    "generate": generate_cost,
    "forward": forward_cost,
    "train": train_cost,
}


class AnalyticCosts:
    """A CostModel."""

    def call(self, call: Call, mesh: Mesh) -> Cost:
        return _CALLS[call.kind](call, mesh)

    def combine(self, rows: int, width: float) -> Cost:
        return Cost({"launch": 1e-3 + 1e-9 * rows * width})

    def move(self, primitive: Primitive, traffic: Traffic, links: Links) -> Cost:
        return move_cost(primitive, traffic, links)

    def sync(self, traffic: Traffic, gathered: Traffic, num_tensors: int, links: Links) -> Cost:
        return sync_cost(traffic, gathered, num_tensors, links)

    def switch(self, size: int, device: DeviceClass) -> Cost:
        return Cost({"host": size / (0.8 * device.host_gb_s * 1e9)})

    def save(self, size: int) -> Cost:
        return Cost({"write": size / 1e9})
