"""The analytic cost model: every term from shapes, device figures and engine profiles. Nothing is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from flexrlhf.api import DeviceClass, Primitive
from flexrlhf.guideline.costs.cost_model import Call, Cost, Links, Mesh, Traffic
from flexrlhf.guideline.costs.environment_times import EnvironmentTimes
from flexrlhf.guideline.costs.generation import generate_cost
from flexrlhf.guideline.costs.links import sync_cost, travel_seconds
from flexrlhf.guideline.costs.profiles import DECODERS, PROFILES, DecodeProfile, EngineProfile, profile_of, read_table
from flexrlhf.guideline.costs.training import forward_cost, train_cost


@dataclass(frozen=True)
class RunOverheads:
    """Overheads of the calls and weight syncs of a step of RLHF, in addition to the kernels of its engines.

    One set of constants for all systems of the field (``overheads.csv``).

    passes:  share of a training engine's own speed that forward and training passes reach
    decode:  share of a generating engine's own speed that generation reaches
    tensor:  share of the speed of tensor-parallel collectives
    sync:    share of the speed of messages between nodes that a weight sync reaches
    """

    passes: float = 1.0
    decode: float = 1.0
    tensor: float = 1.0
    sync: float = 1.0

    def of_engine(self, profile: EngineProfile) -> EngineProfile:
        """Return ``profile`` at the speed that it reaches in a step."""
        return replace(profile, reached=self.passes, tensor_reached=self.tensor)

    def of_decoder(self, profile: DecodeProfile) -> DecodeProfile:
        """Return ``profile`` at the speed that it reaches in a step."""
        passes = replace(profile.passes, reached=self.decode, tensor_reached=self.tensor)
        return replace(profile, passes=passes, reached=self.decode, tensor_reached=self.tensor)


_OVERHEAD_ROWS = read_table(Path(__file__).with_name("overheads.csv"))
OVERHEADS = RunOverheads(**{row["name"]: float(row["value"]) for row in _OVERHEAD_ROWS})
"""Overheads where nothing is measured."""
NO_OVERHEADS = RunOverheads()
"""Engines alone."""


@dataclass(frozen=True)
class AnalyticCosts:
    """CostModel of the engines in ``engines`` (forward and training passes) and ``decoders`` (generation), with the
    ``overheads`` of a step."""

    engines: Mapping[str, EngineProfile] = field(default_factory=lambda: PROFILES)
    decoders: Mapping[str, DecodeProfile] = field(default_factory=lambda: DECODERS)
    overheads: RunOverheads = OVERHEADS

    def call(self, call: Call, mesh: Mesh) -> Cost:
        match call.kind:
            case "generate":
                return generate_cost(call, mesh, profile_of(self._decoders_in_step, call.engine))
            case "forward":
                return forward_cost(call, mesh, profile_of(self._in_step, call.engine))
            case "train":
                cost = train_cost(call, mesh, profile_of(self._in_step, call.engine))
                return cost.after(self.call(call.counting, mesh), "routers") if call.counts_experts else cost

    @cached_property
    def _in_step(self) -> Mapping[str, EngineProfile]:
        """Engine name → its profile at the speed that it reaches in a step."""
        return {name: self.overheads.of_engine(profile) for name, profile in self.engines.items()}

    @cached_property
    def _decoders_in_step(self) -> Mapping[str, DecodeProfile]:
        """Engine name → its profile of generation at the speed that it reaches in a step."""
        return {name: self.overheads.of_decoder(profile) for name, profile in self.decoders.items()}

    def combine(self, rows: int, width: float) -> Cost:
        return Cost({"launch": 1e-3 + 1e-9 * rows * width})

    def move(self, primitive: Primitive, traffic: Traffic, links: Links) -> Cost:
        return Cost({} if primitive == "none" else {primitive: travel_seconds(traffic, links)})

    def sync(self, traffic: Traffic, gathered: Traffic, num_tensors: int, links: Links) -> Cost:
        reached = replace(links, node_gb_s=self.overheads.sync * links.node_gb_s)
        return sync_cost(traffic, gathered, num_tensors, reached)

    def switch(self, size: int, device: DeviceClass) -> Cost:
        return Cost({"host": size / (0.8 * device.host_gb_s * 1e9)})

    def save(self, size: int) -> Cost:
        return Cost({"write": size / 1e9})

    def environment(self, name: str) -> EnvironmentTimes | None:
        return None
