"""What vLLM takes for granted in its process, kept apart from the job's: swapped in around every call into it.

vLLM assumes that it owns the process. It lays its groups over torch's default process group and destroys that when it
closes, keeps them in globals, reseeds generators, replaces functions of torch and writes environment variables. Each
engine has a home of its own, so that several can live in one process and the job notices none of them.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import random
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupMember

from flexrlhf.engines.vllm.groups import PrivateGroups

_CPU_STANDINS = "vllm.v1.worker.cpu.shm"
"""The module that puts stand-ins into torch for what a CPU has not, when it is loaded."""
_TORCH: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (torch, ("set_num_threads", "Event")),
    (torch.cuda, ("Event", "Stream", "set_stream", "current_stream", "stream")),
    (torch.accelerator, ("synchronize", "empty_cache", "get_memory_info")),
    (torch.Tensor, ("pin_memory", "record_stream")),
    (dist, ("new_group", "destroy_process_group")),
    (GroupMember, ("WORLD",)),
)
"""What vLLM replaces in torch, or finds there."""

Place = tuple[Any, str]


class ProcessIsolation:
    """``environment``: variables that hold inside only. ``groups``: vLLM's world; None: it has one elsewhere."""

    def __init__(self, environment: Mapping[str, str], groups: PrivateGroups | None, device: torch.device) -> None:
        self._device = device
        self._environment = {**os.environ, **environment}
        self._places: list[Place] = [(owner, name) for owner, names in _TORCH for name in names]
        self._values = [getattr(owner, name) for owner, name in self._places]
        with self.active():
            _load(device)
            if groups is not None:
                dist.new_group, dist.destroy_process_group = groups.new_group, _keep  # type: ignore[assignment]
                GroupMember.WORLD = groups.world
        self._add_globals()

    def _add_globals(self) -> None:
        from vllm.distributed import parallel_state
        from vllm.v1.worker import workspace

        places: list[Place] = [(parallel_state, n) for n in vars(parallel_state) if re.fullmatch("_[A-Z_]+", n)]
        self._values += [True if name.startswith("_ENABLE") else None for _, name in places]
        self._places += [*places, (workspace, "_manager")]
        self._values.append(None)

    @contextmanager
    def active(self) -> Iterator[None]:
        outside = _swap(self._places, self._values)
        environment = dict(os.environ)
        _set_environment(self._environment)
        try:
            with _same_settings(), _same_generators(self._device), warnings.catch_warnings():
                # of names of torch that it still uses
                warnings.simplefilter("ignore", FutureWarning)
                yield
        finally:
            self._environment = dict(os.environ)
            _set_environment(environment)
            inside = self._places[: len(outside)]
            self._values[: len(outside)] = _swap(inside, outside)


def _keep(*_: Any, **__: Any) -> None:
    """Instead of what would reach beyond the engine: its groups end with it, not by its library."""


def _load(device: torch.device) -> None:
    """Import vLLM; on a CPU its stand-ins, which loading alone puts in place, for every engine anew."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
    import vllm._custom_ops  # noqa: F401 (fills torch.ops)

    if device.type == "cpu":
        if _CPU_STANDINS in sys.modules:
            importlib.reload(sys.modules[_CPU_STANDINS])
        else:
            importlib.import_module(_CPU_STANDINS)


def _swap(places: Sequence[Place], values: Sequence[Any]) -> list[Any]:
    """Put ``values`` there; returns what was there."""
    before = [getattr(owner, name) for owner, name in places]
    for (owner, name), value in zip(places, values, strict=True):
        setattr(owner, name, value)
    return before


def _set_environment(environment: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})


@contextmanager
def _same_settings() -> Iterator[None]:
    """The default type, the precision of float32 products and the number of threads are afterwards as before, and what
    the garbage collector passes over: vLLM lets it pass over all that it finds, which is the whole job."""
    num_frozen = gc.get_freeze_count()
    dtype, precision, threads = torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.get_num_threads()
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        if torch.get_num_threads() != threads:
            set_num_threads(threads)
        if not num_frozen:
            gc.unfreeze()


@contextmanager
def _same_generators(device: torch.device) -> Iterator[None]:
    plain, arrays = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(plain)
            numpy.random.set_state(arrays)
