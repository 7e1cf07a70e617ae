"""Constants that all RLHF systems share: overheads of a step, launches of decoding without graphs, DeepSpeed's gathers.

A system of which nothing else is known has these alone; so do the plans of this package, but for the launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from benchmarks.systems.engines import DECODERS, PROFILES, EngineTables
from benchmarks.systems.profiles import CONTROLLER_SECONDS, SYNC_SECONDS, SYSTEMS, System
from flexrlhf.guideline.costs.analytic import OVERHEADS, RunOverheads
from flexrlhf.guideline.costs.profiles import DecodeProfile, EngineProfile

Constants = Mapping[str, float]
"""Name of a constant → its value."""

_OVERHEADS = tuple(item.name for item in fields(RunOverheads))
_LAUNCHES = ("launch_seconds", "launch_tp_seconds")
_LAUNCHED = ("launched", "deepspeed-kernels")
_GATHERS = ("gather_gb_s", "gather_within_gb_s")
_GATHERING = ("deepspeed", "deepspeed-2021")
_CONTROLLED = {"controller_seconds": CONTROLLER_SECONDS, "sync_seconds": SYNC_SECONDS}


ASSUMED: Constants = {
    "passes": 1.0,
    "decode": 1.0,
    "tensor": 1.0,
    "sync": 1.0,
    "launch_seconds": 0.2e-3,
    "launch_tp_seconds": 0.2e-3,
    "gather_gb_s": 25.0,
    "gather_within_gb_s": 150.0,
    "controller_seconds": 0.2,
    "sync_seconds": 1.0,
}
"""Values before any step of RLHF has been seen: engines and messages at their own speed."""


def present() -> dict[str, float]:
    """Return the present values of all shared constants."""
    values = {name: getattr(OVERHEADS, name) for name in _OVERHEADS}
    values |= {name: getattr(DECODERS[_LAUNCHED[0]], name) for name in _LAUNCHES}
    values |= {name: getattr(PROFILES[_GATHERING[0]], name) for name in _GATHERS}
    return values | _CONTROLLED


def systems_with(values: Constants) -> dict[str, System]:
    """Return all systems with these constants, without any of their own."""
    overheads = RunOverheads(**{name: values[name] for name in _OVERHEADS})
    controlled = {name: values[name] for name in _CONTROLLED}
    return {
        name: replace(system, overheads=overheads, **(controlled if system.controller_seconds else {}))
        for name, system in SYSTEMS.items()
    }


def tables_with(values: Constants) -> EngineTables:
    """Return the profiles of all engines with these constants."""
    profiles = {name: _gathering(profile, values) for name, profile in PROFILES.items()}
    return EngineTables(profiles, {name: _launched(decoder, values, profiles) for name, decoder in DECODERS.items()})


def _gathering(profile: EngineProfile, values: Constants) -> EngineProfile:
    return replace(profile, **{name: values[name] for name in _GATHERS}) if profile.name in _GATHERING else profile


def _launched(decoder: DecodeProfile, values: Constants, profiles: Mapping[str, EngineProfile]) -> DecodeProfile:
    own = {name: values[name] for name in _LAUNCHES} if decoder.name in _LAUNCHED else {}
    return replace(decoder, passes=profiles[decoder.passes.name], **own)
