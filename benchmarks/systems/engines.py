"""Engines of the field: the package's and engines of only other systems, one row of constants each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flexrlhf.guideline.costs.analytic import OVERHEADS, AnalyticCosts, RunOverheads
from flexrlhf.guideline.costs.profiles import DECODERS as OWN_DECODERS
from flexrlhf.guideline.costs.profiles import PROFILES as OWN_PROFILES
from flexrlhf.guideline.costs.profiles import DecodeProfile, EngineProfile, read_decoders, read_engines

PROFILES = OWN_PROFILES | read_engines(Path(__file__).with_name("engines.csv"))
"""Engine name → profile of forward and training passes."""
DECODERS = OWN_DECODERS | read_decoders(Path(__file__).with_name("decoders.csv"), PROFILES)
"""Engine name → profile of generation."""


@dataclass(frozen=True)
class EngineTables:
    """Profiles of all engines.

    profiles:  engine name → profile of forward and training passes
    decoders:  engine name → profile of generation
    """

    profiles: Mapping[str, EngineProfile]
    decoders: Mapping[str, DecodeProfile]
    _costs: dict[RunOverheads, AnalyticCosts] = field(default_factory=dict)

    def costs(self, overheads: RunOverheads = OVERHEADS) -> AnalyticCosts:
        """Return the cost model of a system with these overheads."""
        if overheads not in self._costs:
            self._costs[overheads] = AnalyticCosts(self.profiles, self.decoders, overheads)
        return self._costs[overheads]


TABLES = EngineTables(PROFILES, DECODERS)
COSTS = TABLES.costs()
"""Costs of a system without its own overheads."""
