"""Isolation of a vLLM engine from the process that it runs in, active around every call into it.

vLLM assumes that it owns the process. It creates its groups over torch's default process group and destroys that when
it closes, keeps them in globals, reseeds generators, replaces functions of torch and sets environment variables. Each
engine has its own copy of this state, so that several can run in one process without side effects on the run. Its
process groups are created on a store of its own.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import random
import re
import secrets
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupMember, _world

from flexrlhf.api.engine import EngineContext, new_group


class PrivateGroups:
    """Ranks of a replica as a world of ``size`` ranks, of which this is number ``rank``: stage after stage.

    vLLM creates some sixteen groups, each of which would have threads and sockets: here groups of the same ranks and
    backend are one.
    """

    def __init__(self, context: EngineContext) -> None:
        context.check_links()
        replica, device = context.ranks.replica, context.device
        self.rank = 0 if replica.group is None else replica.group.rank()
        self.size = len(replica.ranks)
        # differs from earlier engines on this store; the ranks of the replica agree on it
        number = replica.largest(secrets.randbits(48), device)
        self._name, self._store = f"vllm-{number:012x}", context.store
        self._seconds = context.timeout_seconds
        self._made: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}
        # that of the run; vLLM connects GPUs by NCCL in addition
        self._backend = "gloo" if replica.group is None else dist.get_backend(replica.group)
        self.world = self._group(tuple(range(self.size)), self._backend)

    def new_group(self, ranks: Sequence[int], *_: Any, backend: str | None = None, **__: Any) -> Any:
        """Replace ``torch.distributed.new_group``: make a group of ranks of this world, or of this rank alone."""
        if self.rank not in ranks:
            return GroupMember.NON_GROUP_MEMBER
        return self._group(tuple(ranks), self._backend if backend is None else str(backend))

    def close(self) -> None:
        """Destroy all groups."""
        for group in self._made.values():
            # destroy_process_group at the end of a run destroys all groups
            if group in _world.pg_map:
                dist.destroy_process_group(group)
        self._made.clear()
        del self.world

    def _group(self, ranks: tuple[int, ...], backend: str) -> dist.ProcessGroup:
        # a single rank does not communicate
        key = (ranks, backend if len(ranks) > 1 else "gloo")
        if key not in self._made:
            self._made[key] = self._make(*key)
        return self._made[key]

    def _make(self, ranks: tuple[int, ...], backend: str) -> dist.ProcessGroup:
        name = f"{self._name}-{backend}-{'.'.join(map(str, ranks))}"
        return new_group(ranks, self.rank, backend, self._store, name, self._seconds, "vllm", in_world=False)


_CPU_REPLACEMENTS = "vllm.v1.worker.cpu.shm"
"""Module of vLLM that, when loaded, replaces functions of torch which a CPU does not have."""
_SHARED: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (torch, ("set_num_threads", "Event")),
    (torch.cuda, ("Event", "Stream", "set_stream", "current_stream", "stream")),
    (torch.accelerator, ("synchronize", "empty_cache", "get_memory_info")),
    (torch.Tensor, ("pin_memory", "record_stream")),
    (dist, ("new_group", "destroy_process_group")),
    (GroupMember, ("WORLD",)),
    (gc, ("freeze", "unfreeze")),
)
"""Attributes of torch and Python that vLLM replaces, reads or calls."""
_freeze, _unfreeze = gc.freeze, gc.unfreeze

Attribute = tuple[Any, str]
"""An object and the name of one of its attributes."""


class ProcessIsolation:
    """Global state of one vLLM engine, swapped in while ``active``.

    environment: variables that are set only while active.
    groups:      process groups of the engine; None: the engine runs in a child process, with groups of its own.
    device:      device of this rank, whose random state is preserved.
    """

    def __init__(self, environment: Mapping[str, str], groups: PrivateGroups | None, device: torch.device) -> None:
        self._device = device
        self._environment = {**os.environ, **environment}
        self._attributes: list[Attribute] = [(owner, name) for owner, names in _SHARED for name in names]
        self._values = [getattr(owner, name) for owner, name in self._attributes]
        with self.active():
            _load(device)
            # it freezes and unfreezes all objects of the process: each later collection would take seconds
            gc.freeze = gc.unfreeze = _keep
            if groups is not None:
                dist.new_group, dist.destroy_process_group = groups.new_group, _keep  # type: ignore[assignment]
                GroupMember.WORLD = groups.world
        self._add_globals()

    def _add_globals(self) -> None:
        """Add vLLM's own globals, with the values that they have before an engine starts."""
        from vllm.distributed import parallel_state
        from vllm.v1.worker import workspace

        attributes: list[Attribute] = [(parallel_state, n) for n in vars(parallel_state) if re.fullmatch("_[A-Z_]+", n)]
        self._values += [True if name.startswith("_ENABLE") else None for _, name in attributes]
        self._attributes += [*attributes, (workspace, "_manager")]
        self._values.append(None)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Swap in the engine's state for calls inside, and the process's own back afterwards."""
        with _stream_of_vllm(self._device):
            before = _swap(self._attributes, self._values)
            environment = dict(os.environ)
            _set_environment(self._environment)
            try:
                with _same_settings(), _same_generators(self._device), warnings.catch_warnings():
                    # vLLM uses deprecated names of torch
                    warnings.simplefilter("ignore", FutureWarning)
                    yield
            finally:
                self._environment = dict(os.environ)
                _set_environment(environment)
                self._values = _swap(self._attributes, before)


@contextmanager
def _stream_of_vllm(device: torch.device) -> Iterator[None]:
    """Have vLLM's stream of a GPU as the current one inside, and the caller's afterwards.

    All engines of a process share one, which vLLM makes current when it first needs it. DeepSpeed relies on the default
    one.
    """
    if device.type != "cuda":
        yield
        return
    before, module = torch.cuda.current_stream(device), sys.modules.get("vllm.utils.torch_utils")
    stream = getattr(module and module._current_stream_tls, "value", None) or before
    stream.wait_stream(before)
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        before.wait_stream(torch.cuda.current_stream(device))
        torch.cuda.set_stream(before)


def _keep(*_: Any, **__: Any) -> None:
    """Replace functions of the process, such as ``destroy_process_group``: ``PrivateGroups.close`` destroys groups."""


def _load(device: torch.device) -> None:
    """Import vLLM; on a CPU load the module that replaces functions of torch, again for every engine."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
    import vllm._custom_ops  # noqa: F401 (fills torch.ops)

    if device.type == "cpu":
        if _CPU_REPLACEMENTS in sys.modules:
            importlib.reload(sys.modules[_CPU_REPLACEMENTS])
        else:
            importlib.import_module(_CPU_REPLACEMENTS)


def _swap(attributes: Sequence[Attribute], values: Sequence[Any]) -> list[Any]:
    before = [getattr(owner, name) for owner, name in attributes]
    for (owner, name), value in zip(attributes, values, strict=True):
        setattr(owner, name, value)
    return before


def _set_environment(environment: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})


@contextmanager
def _same_settings() -> Iterator[None]:
    """Restore the default dtype, the precision of float32 products, and the number of threads.

    torch's deterministic algorithms are those of training: vLLM's kernels have none, and its operations would be
    refused.
    """
    dtype, precision, threads = torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.get_num_threads()
    set_num_threads, is_deterministic = torch.set_num_threads, torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_deterministic)
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        if torch.get_num_threads() != threads:
            set_num_threads(threads)


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Have the garbage collector ignore all objects that exist while vLLM starts, which collects garbage many times.

    Objects that were frozen before stay so.
    """
    num_frozen = gc.get_freeze_count()
    _freeze()
    try:
        yield
    finally:
        if not num_frozen:
            _unfreeze()


@contextmanager
def _same_generators(device: torch.device) -> Iterator[None]:
    plain, arrays = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(plain)
            numpy.random.set_state(arrays)
