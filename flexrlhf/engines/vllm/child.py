"""Child process of a rollout engine, in which vLLM decodes: its weights mapped here, its end detected.

The weights are in memory that both processes map, described by offsets and shapes instead of pickled tensors. On a CPU
it is one anonymous file: it needs no space in /dev/shm, and is freed with the last process that maps it. On a GPU the
tensors stay where they are, and their memory is opened by CUDA IPC handles.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import zmq
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from flexrlhf.api import exit_text, process_directory
from flexrlhf.api.engine import EngineContext
from flexrlhf.engines.vllm.restarts import RolloutProcessError

PARENT = "FLEXRLHF_ROLLOUT_PARENT"
"""Environment variable with the process that a child ends with."""
_SOCKETS, _WORDS = "VLLM_RPC_BASE_PATH", "start-error"
"""Environment variable with the directory of a child's sockets, and the file there with the error of its start."""
_EXIT_CODE_SECONDS = 10.0
"""Longest wait for the exit code of a child that was noticed to have ended."""
_POLL_SECONDS = 1.0
REPLACED_SHARE = 0.25
"""Share of a run's longest wait after which a child that does not respond is replaced."""


class ChildProcess:
    """Process behind ``engine``, a vLLM engine that was started with one.

    A thread watches the process: vLLM's client would wait for ever for one that has ended or does not respond.
    """

    def __init__(self, context: EngineContext, engine: Any) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        self._name, self._timeout = context.placed.name, response_seconds(context)
        self._waiting_since: float | None = None
        self._client, self._error = engine.engine_core, EngineDeadError
        (self._process,) = self._client.resources.engine_manager.processes
        threading.Thread(target=self._watch, name=f"{self._name} watch", daemon=True).start()

    @property
    def pid(self) -> int:
        pid: int = self._process.pid
        return pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, and with it its memory of a GPU."""
        return self._process.exitcode is not None

    def views(self) -> dict[str, Tensor]:
        """Return the child's weights by name: writing to them writes to its memory."""
        (shared,) = self._client.collective_rpc("share_weights")
        return open_views(shared)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Turn the errors of calls inside into RolloutProcessError, where the child has ended or does not respond."""
        self.restart_timeout()
        try:
            if self.has_ended:
                raise self._error
            yield
        except (self._error, zmq.ZMQError) as error:
            raise self.failure() from error
        finally:
            self._waiting_since = None

    def restart_timeout(self) -> None:
        """Start the timeout again, for a child that has responded."""
        self._waiting_since = time.monotonic()

    def close(self) -> None:
        """Kill the child, which has no state to save."""
        self._client.resources.engine_manager.manager_stopped.set()
        self._process.kill()
        self._process.join()
        self._client.shutdown()

    def close_on_error(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill the child where its start has failed."""
        if error is not None:
            self.close()

    def failure(self) -> RolloutProcessError:
        """Return the error of a child that has ended or does not respond."""
        return RolloutProcessError(f"{self._name}: the vLLM process {self.pid} {self._reason()}")

    def _reason(self) -> str:
        """Describe how the child ended. Its exit code may come a little after the error."""
        if self._is_timed_out():
            return f"has not responded for {self._timeout:g} s"
        deadline = time.monotonic() + _EXIT_CODE_SECONDS
        while (code := self._process.exitcode) is None:
            if time.monotonic() > deadline:
                return "does not respond"
            time.sleep(0.01)
        return f"ended ({exit_text(code)})"

    def _is_timed_out(self) -> bool:
        since = self._waiting_since
        return since is not None and time.monotonic() - since > self._timeout

    def _watch(self) -> None:
        """Wait until the child ends or times out, then wake up whoever waits for it, with an error."""
        while not self._is_timed_out() and not connection.wait([self._process.sentinel], timeout=_POLL_SECONDS):
            pass
        self._client.outputs_queue.put_nowait(self._error())
        for future in list(self._client.utility_results.values()):
            if not future.done():
                future.set_exception(self._error())


@contextmanager
def starting(name: str) -> Iterator[None]:
    """Raise RolloutProcessError where the child of an engine that is made inside does not start, with its end.

    name:  of the placed model.
    """
    from vllm.v1.engine import utils

    managers, processes = utils.CoreEngineProcManager, list[BaseProcess]()

    class NotedManager(managers):  # type: ignore[misc, valid-type]
        """Manager whose processes are at hand when vLLM has dropped it."""

        def __init__(self, *arguments: Any, **further: Any) -> None:
            super().__init__(*arguments, **further)
            processes.extend(self.processes)

    utils.CoreEngineProcManager = NotedManager  # type: ignore[misc]
    try:
        yield
    except RuntimeError as error:
        raise RolloutProcessError(f"{name}: {_failed_start(processes, error)}") from error
    finally:
        utils.CoreEngineProcManager = managers  # type: ignore[misc]


def _failed_start(processes: Sequence[BaseProcess], error: RuntimeError) -> str:
    """Describe how a child ended that was starting: also in the words of its error, if it had one."""
    code = None
    with suppress(IndexError, ValueError):
        # ValueError: it is closed
        code = processes[0].exitcode
    if not code:
        return f"its vLLM process did not start: {str(error).splitlines()[0]}"
    words, file = "", Path(os.environ[_SOCKETS], _WORDS)
    if file.is_file():
        words = f": {file.read_text(errors='replace')}"
    return f"the vLLM process {processes[0].pid} ended while it started ({exit_text(code)}){words}"


class StartErrors(logging.Handler):
    """Handler, in a child, of the error that ends its start, which is written for ``starting``."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the first error. The directory is gone once the child has started."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            with suppress(OSError), Path(os.environ[_SOCKETS], _WORDS).open("x") as file:
                file.write(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def response_seconds(context: EngineContext) -> float:
    """Return the longest wait for a response of a child, which decodes a token of each row between two.

    It is a part of a run's longest wait where the child is replaced: other ranks wait for this one meanwhile.
    """
    rollout = context.placed.rollout
    is_replaced = rollout is not None and rollout.max_restarts > 0
    return context.timeout_seconds * (REPLACED_SHARE if is_replaced else 1.0)


@contextmanager
def child_environment(timeout_seconds: float) -> Iterator[dict[str, str]]:
    """Environment variables for starting a child, which gets as many threads as its rank.

    The directory of its sockets exists until they are connected, inside the context.
    """
    with process_directory() as sockets:
        yield {
            # not among vLLM's arguments, by which it names what it has compiled
            PARENT: str(os.getpid()),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            _SOCKETS: str(sockets),
            "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(timeout_seconds)),
            "PYTHONWARNINGS": "ignore::FutureWarning",
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
        }


_ALIGNMENT = 64

SharedViews = dict[str, Any]
"""``dtype``; ``buffers``: (path or handle, bytes) of each; ``views``: name → (buffer, offset, shape, strides)."""


def move_to_shared(parameters: Sequence[Tensor]) -> str:
    """Move ``parameters`` (CPU, of one dtype) into one anonymous file. Returns the path by which others open it."""
    sizes = [-(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT for parameter in parameters]
    descriptor = os.memfd_create("flexrlhf-weights")
    os.ftruncate(descriptor, sum(sizes))
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    pieces = _open_file(path, sum(sizes), parameters[0].dtype).split([s // parameters[0].itemsize for s in sizes])
    for parameter, piece in zip(parameters, pieces, strict=True):
        target = piece[: parameter.numel()].view(parameter.shape)
        parameter.data = target.copy_(parameter.data)
    return path


def describe(views: Mapping[str, Tensor], path: str | None) -> SharedViews:
    """Describe ``views`` of shared tensors for ``open_views`` in another process.

    ``path``: the file that contains them; None: they are on a GPU.
    """
    first = next(iter(views.values()))
    buffers = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in views.values()}
    numbers = {address: number for number, address in enumerate(buffers)}
    if path is not None:
        assert len(buffers) == 1, "all weights are in one file"
        sources: list[Any] = [path]
    else:
        sources = [_handle(storage, first.dtype) for storage in buffers.values()]
    return {
        "dtype": str(first.dtype).removeprefix("torch."),
        "buffers": [(source, storage.nbytes()) for source, storage in zip(sources, buffers.values(), strict=True)],
        "views": {
            name: (numbers[v.untyped_storage().data_ptr()], v.storage_offset(), tuple(v.shape), v.stride())
            for name, v in views.items()
        },
    }


def open_views(shared: SharedViews) -> dict[str, Tensor]:
    """Return the views that another process has described: tensors in its memory."""
    dtype = getattr(torch, shared["dtype"])
    buffers = [_open(source, size, dtype) for source, size in shared["buffers"]]
    return {
        name: buffers[number].as_strided(tuple(shape), tuple(strides), offset)
        for name, (number, offset, shape, strides) in shared["views"].items()
    }


def _open(source: Any, size: int, dtype: torch.dtype) -> Tensor:
    """Map a buffer from its path or its CUDA handle."""
    if isinstance(source, str):
        return _open_file(source, size, dtype)
    rebuild, arguments = pickle.loads(source)
    tensor: Tensor = rebuild(*arguments)
    return tensor


def _open_file(path: str, size: int, dtype: torch.dtype) -> Tensor:
    """Map ``size`` bytes of a file as a tensor with one dimension."""
    storage = torch.UntypedStorage.from_file(path, True, size)
    return torch.empty(0, dtype=dtype).set_(storage)  # type: ignore[arg-type]


def _handle(storage: torch.UntypedStorage, dtype: torch.dtype) -> bytes:
    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage)  # type: ignore[arg-type]
    return pickle.dumps(reduce_tensor(tensor))
