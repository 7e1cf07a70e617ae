"""Overheads of a step of RLHF, in addition to the kernels of its engines: shares of their speed that its calls reach,
and seconds between them. One set of constants for all systems of the field (``overheads.csv``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flexrlhf.guideline.costs.constants import read_rows
from flexrlhf.guideline.costs.cost_model import Cost, Traffic
from flexrlhf.guideline.costs.decoders import DecodeProfile
from flexrlhf.guideline.costs.engines import EngineProfile


@dataclass(frozen=True)
class RunOverheads:
    """Overheads of the calls and weight syncs of a step.

    passes:        share of a training engine's own speed that forward and training passes reach
    decode:        share of a generating engine's own speed that generation reaches
    tensor:        share of the speed of tensor-parallel collectives
    sync_seconds:  start of a weight sync between nodes
    sync_gb_s:     most GB/s of a node in a weight sync to others
    """

    passes: float = 1.0
    decode: float = 1.0
    tensor: float = 1.0
    sync_seconds: float = 0.0
    sync_gb_s: float = float("inf")

    def of_engine(self, profile: EngineProfile) -> EngineProfile:
        """Return ``profile`` at the speed that it reaches in a step."""
        return replace(profile, reached=self.passes, tensor_reached=self.tensor)

    def of_decoder(self, profile: DecodeProfile) -> DecodeProfile:
        """Return ``profile`` at the speed that it reaches in a step."""
        passes = replace(profile.passes, reached=self.decode, tensor_reached=self.tensor)
        return replace(profile, passes=passes, reached=self.decode, tensor_reached=self.tensor)

    def of_sync(self, cost: Cost, traffic: Traffic) -> Cost:
        """Return the seconds of a weight sync that takes ``cost`` at the speed of the links."""
        if not traffic.across:
            return cost
        send = max(cost.parts.get("send", 0.0), traffic.across / (self.sync_gb_s * 1e9))
        return Cost({**cost.parts, "send": send, "start": self.sync_seconds})


def read_overheads(path: Path) -> Mapping[str, float]:
    """Return the constants of a table, by name."""
    return {row["name"]: float(row["value"]) for row in read_rows(path)}


OVERHEADS = RunOverheads(**read_overheads(Path(__file__).with_suffix(".csv")))
"""Overheads where nothing is measured."""
NONE = RunOverheads()
"""Engines alone."""
