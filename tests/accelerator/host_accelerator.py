"""Register the accelerator made of host memory with torch, as the device NAME; ``torch.hostgpu`` is its module."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

NAME = "hostgpu"
SOURCE = Path(__file__).with_suffix(".cpp")


def register() -> None:
    """Build the extension, unless it has been built from this source, and load it."""
    cpp_extension.load(
        "flexrlhf_host_accelerator", [str(SOURCE)], extra_cflags=["-O1"], is_python_module=False, verbose=False
    )
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Module())
    torch.utils.generate_methods_for_privateuse1_backend()


def host_reads() -> int:
    """Times that the host has waited for what the device computes."""
    return int(torch.ops.accelerator.host_reads())


class _Module:
    """What torch and its users look for in ``torch.cuda``, where a call returns once its work is done."""

    Stream, Event = torch.Stream, torch.Event

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(device: Any) -> None: ...

    @staticmethod
    def synchronize(device: Any = None) -> None: ...

    @staticmethod
    def manual_seed_all(seed: int) -> None: ...

    @staticmethod
    def current_stream(device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    @staticmethod
    def stream(stream: torch.Stream) -> Any:
        return nullcontext(stream)

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]
