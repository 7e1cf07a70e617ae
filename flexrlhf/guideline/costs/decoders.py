"""Decode profiles: what differs between engines that generate on the same device, one named set of constants for each.

Fitted on published measurements (``benchmarks/calibration/generation.py``), never on one row of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from flexrlhf.guideline.costs.engines import PROFILES, EngineProfile
from flexrlhf.placement.devices import DeviceClass

SERVING = EngineProfile("serving", elements=0.5, pass_launch_seconds=0.0)
"""Forward passes of inference engines: fused element-wise kernels."""

Batching = Literal["refill", "group", "static"]


@dataclass(frozen=True)
class DecodeProfile:
    """Constants of one engine in one era. Seconds on the host are those of a node with PCIe 5 (see ``host_factor``).

    ``batching``: ``refill``, rows enter as others end (continuous batching); ``group``, groups of ``decode_rows``
    that shrink as rows end; ``static``, groups that run whole until their longest row ends.
    ``cache``: share of the memory bandwidth at which attention reads keys and values. ``reread``: part of them that
    each further query head that shares them reads again (0: kernels of grouped-query attention, 1: copies for each).
    ``layer_seconds``: of a layer in one step, besides matrices, attention and collectives: small kernels on the device
    or, if ``host_paced``, what the host lets it wait.
    ``launch_seconds``: of a layer in one step, on the host that launches its kernels one by one; they run beside the
    device's. 0: a graph is launched whole.
    ``step_seconds``: of a step, on the host, while the device waits. ``row_seconds``: the same, of each live row.
    ``entry_seconds``: of a row that enters, on the host. ``one_shot_seconds``: latency of the engine's own all-reduce
    kernel for small messages; 0: it has none.
    ``passes``: its forward passes over prompts.
    """

    name: str
    batching: Batching = "refill"
    cache: float = 0.8
    reread: float = 0.0
    layer_seconds: float = 0.05e-3
    host_paced: bool = False
    launch_seconds: float = 0.0
    step_seconds: float = 0.0
    row_seconds: float = 0.0
    entry_seconds: float = 0.0
    one_shot_seconds: float = 0.0
    passes: EngineProfile = SERVING


HOST_FACTORS = ((50.0, 1.0), (25.0, 1.9), (0.0, 3.0))
"""From so many GB/s between host and device: how much slower hosts are than in nodes with PCIe 5; the bus dates a node.
Fitted for PCIe 4 (A100 beside H100 under vLLM 0.5 and 0.6), assumed for PCIe 3."""


def host_factor(device: DeviceClass) -> float:
    return next(factor for least, factor in HOST_FACTORS if device.host_gb_s >= least)


_ONE_SHOT = 12.3e-6
_EAGER = DecodeProfile(
    "transformers",
    batching="static",
    cache=0.155,
    reread=1.0,
    launch_seconds=0.47e-3,
    passes=PROFILES["transformers"],
)
_VLLM = DecodeProfile(
    "vllm-0.6", cache=0.515, host_paced=True, step_seconds=0.187e-3, entry_seconds=7e-3, one_shot_seconds=_ONE_SHOT
)
_TENSORRT = DecodeProfile(
    "tensorrt-llm", cache=0.92, layer_seconds=54e-6, row_seconds=5.2e-6, one_shot_seconds=_ONE_SHOT
)

DECODERS = {
    profile.name: profile
    for profile in (
        _EAGER,
        replace(_EAGER, name="torch", batching="group", passes=PROFILES["torch"]),
        replace(_EAGER, name="deepspeed", launch_seconds=0.6e-3, passes=PROFILES["deepspeed"]),
        DecodeProfile("megatron", batching="group", cache=0.515, step_seconds=0.187e-3, passes=PROFILES["megatron"]),
        replace(_VLLM, name="vllm-0.3", launch_seconds=_EAGER.launch_seconds, one_shot_seconds=0.0),
        replace(_VLLM, name="vllm-0.5", row_seconds=123e-6, entry_seconds=11.4e-3),
        _VLLM,
        replace(_VLLM, name="vllm", layer_seconds=38e-6, host_paced=False, entry_seconds=2e-3),
        DecodeProfile(
            "lmdeploy",
            cache=0.854,
            layer_seconds=52e-6,
            row_seconds=32e-6,
            passes=replace(SERVING, pass_launch_seconds=0.64e-3),
        ),
        replace(
            _TENSORRT,
            name="tensorrt-llm-0.6",
            batching="static",
            cache=0.906,
            reread=0.697,
            layer_seconds=111e-6,
            row_seconds=0.0,
        ),
        _TENSORRT,
        DecodeProfile("gpt-fast", batching="static", layer_seconds=38e-6, one_shot_seconds=_ONE_SHOT),
    )
}
"""Engine name → profile.

``transformers``: Hugging Face's ``generate``. ``torch``: this package's own decoding on such models. ``deepspeed``:
DeepSpeed-Chat without its inference kernels; its launches from 42 and 39.5 ms a step, 7B and 13B on the A800, in
OpenRLHF's benchmark. ``megatron``: CUDA graphs over a training engine's own weights, as ReaL has them. ``vllm``: 0.7
and later, compiled. Assumed, not fitted: ``entry_seconds`` of ``vllm``; what ``megatron`` has, as vLLM 0.6.
"""
