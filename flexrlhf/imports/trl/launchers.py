"""Options of accelerate, and a file of DeepSpeed, in the form of accelerate's file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OF_LAUNCHER = ("zero_stage", "use_deepspeed", "offload_optimizer_device", "use_fsdp", "config_file")
"""Options of accelerate that are read."""
OF_FILE = ("distributed_type", "num_processes")
"""Settings of its file that are read."""


def with_options(file: Mapping[str, Any], options: Mapping[str, str]) -> dict[str, Any]:
    """Return the configuration of accelerate under the options of its command.

    file:  accelerate's, or DeepSpeed's, which names a stage in ``zero_optimization``.
    """
    found, zero = dict(file), file.get("zero_optimization")
    if isinstance(zero, Mapping):
        offload = zero.get("offload_optimizer")
        device = offload.get("device") if isinstance(offload, Mapping) else None
        own = {"zero_stage": zero.get("stage", 0), "offload_optimizer_device": device}
        found = {"distributed_type": "DEEPSPEED", "deepspeed_config": own}
    if "use_deepspeed" in options or "zero_stage" in options:
        found["distributed_type"] = "DEEPSPEED"
        own = {"zero_stage": 2, **(found.get("deepspeed_config") or {})}
        stage, device = options.get("zero_stage", ""), options.get("offload_optimizer_device")
        own |= {"zero_stage": int(stage)} if stage in ("0", "1", "2", "3") else {}
        found["deepspeed_config"] = own | ({"offload_optimizer_device": device} if device else {})
    elif "use_fsdp" in options:
        found["distributed_type"] = "FSDP"
    return found
