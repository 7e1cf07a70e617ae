"""Engine profiles: what differs between engines on the same device, one named set of constants for each.

Fitted on published measurements (``benchmarks/calibration``), never on one row of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineProfile:
    """``passes``: share of the kernels' speed that training and forward passes reach. ``decode``: share of the memory
    bandwidth that a decoding step reaches. ``launch_seconds``: of one layer in one decoding step, on the host.
    ``step_seconds``: of one decoding step besides."""

    name: str
    passes: float = 0.9
    decode: float = 0.65
    launch_seconds: float = 0.9e-3
    step_seconds: float = 1e-3


PROFILES = {
    profile.name: profile
    for profile in (
        EngineProfile("torch"),
        EngineProfile("deepspeed"),
        EngineProfile("megatron", launch_seconds=0.13e-3),
        EngineProfile("transformers"),
        EngineProfile("vllm", launch_seconds=0.13e-3),
    )
}
