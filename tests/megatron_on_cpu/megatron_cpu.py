"""CUDA as Megatron-Core addresses it, on CPUs: for tests of the engine on machines without a GPU.

Megatron-Core names the device "cuda", reads CUDA's random state around recomputed layers, and forks a tracker of it.
Here that device is the CPU, which has one random state; dropout is off, so that no number depends on it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Replaces the device "cuda" by "cpu" in calls of torch, and for Megatron-Core the names of types by CUDA's."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        result = function(*map(_on_cpu, args), **kwargs)
        if function is torch.Tensor.type and isinstance(result, str) and _is_megatron(sys._getframe(1)):
            return result.replace("torch.", "torch.cuda.")
        return result


def _on_cpu(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


def _is_megatron(frame: FrameType) -> bool:
    return frame.f_globals["__name__"].startswith("megatron.")


class NoTracker:
    """Tracker of random states that has their names alone."""

    def __init__(self) -> None:
        self._states: dict[str, int] = {}

    def add(self, name: str, seed: int) -> None:
        self._states[name] = seed

    def get_states(self) -> dict[str, int]:
        return self._states

    def set_states(self, states: dict[str, int]) -> None:
        assert states == self._states

    @contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        yield


def install() -> None:
    """Make this process one in which Megatron-Core computes on CPUs."""
    if torch.cuda.current_device is _current_device:
        return
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import layers, random

    OnCpu().__enter__()
    torch.cuda.current_device = _current_device
    torch.cuda.synchronize = _refuse
    torch.Tensor.cuda = lambda self, *_, **__: self
    tracker = NoTracker()
    for module in (random, layers, tensor_parallel):
        module.get_cuda_rng_tracker = lambda *_, **__: tracker
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _refuse(*_: Any) -> None:
    """No call waits for everything on the device: rows of other models may be on their way to it."""
    raise AssertionError("Megatron-Core waits for everything on the device")


def _current_device() -> torch.device:
    return torch.device("cpu")
