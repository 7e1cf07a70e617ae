"""Engines of the field: those of the package and those of other systems alone, one row of constants each."""

from __future__ import annotations

from pathlib import Path

from flexrlhf.guideline.costs import decoders, engines
from flexrlhf.guideline.costs.analytic import AnalyticCosts

PROFILES = engines.PROFILES | engines.read_engines(Path(__file__).with_name("engines.csv"))
"""Engine name → profile of its forward and training passes."""
DECODERS = decoders.DECODERS | decoders.read_decoders(Path(__file__).with_name("decoders.csv"), PROFILES)
"""Engine name → profile of its generation."""
COSTS = AnalyticCosts(PROFILES, DECODERS)
