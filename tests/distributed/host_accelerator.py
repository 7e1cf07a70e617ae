"""Register the accelerator made of host memory with torch, as the device NAME; ``torch.hostgpu`` is its module."""

from __future__ import annotations

import subprocess
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

NAME = "hostgpu"
SOURCE = Path(__file__).with_suffix(".cpp")


def built(folder: Path) -> Path:
    """The library of the source, which ``folder`` keeps."""
    content = sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = folder / f"host_accelerator-{content}.so"
    if not library.exists():
        new = library.with_suffix(".new")
        flags = ["-std=c++20", "-O1", "-fPIC", "-shared", *(f"-I{path}" for path in cpp_extension.include_paths())]
        torch_folder = f"-L{Path(torch.__file__).parent / 'lib'}"
        command = ["g++", *flags, str(SOURCE), "-o", str(new), torch_folder, "-lc10", "-ltorch_cpu"]
        subprocess.run(command, check=True)
        new.rename(library)
    return library


def register(library: Path) -> None:
    """Load the library of ``built``."""
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Module())
    torch.utils.generate_methods_for_privateuse1_backend()


def host_reads() -> int:
    """Count of the host's waits for the device."""
    return int(torch.ops.accelerator.host_reads())


def late_copies() -> int:
    """Count of copies on streams of their own, which are made as late, or as early, as they may be."""
    return int(torch.ops.accelerator.late_copies())


class _Module:
    """Replacement for ``torch.cuda`` whose calls return once their work is done."""

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
