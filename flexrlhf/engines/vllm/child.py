"""vLLM in a process of its own: the child that decodes by itself, its weights mapped here, and how its end is told."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection
from tempfile import TemporaryDirectory
from typing import Any

import torch
import zmq
from torch import Tensor

from flexrlhf.engines.vllm.shared import open_views
from flexrlhf.errors import RunStopped

_SECONDS_TO_END = 10.0
_SECONDS_TO_LOOK = 1.0


class RolloutProcessError(RunStopped):
    """The process of a rollout engine ended by itself."""


class ChildProcess:
    """The process behind ``engine``, a vLLM engine that was started with one."""

    def __init__(self, name: str, engine: Any, timeout_seconds: float) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        self._timeout = timeout_seconds
        self._called: float | None = None
        self._name, self._client, self._error = name, engine.engine_core, EngineDeadError
        (self._process,) = self._client.resources.engine_manager.processes
        threading.Thread(target=self._await_end, name=f"{name} watch", daemon=True).start()

    @property
    def pid(self) -> int:
        pid: int = self._process.pid
        return pid

    def views(self) -> dict[str, Tensor]:
        """The child's weights by name: what is written to them is in its memory."""
        (shared,) = self._client.collective_rpc("share_weights")
        return open_views(shared)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Calls into the engine inside; the end of the child, or its silence, is told in one sentence."""
        self.heard()
        try:
            if self._process.exitcode is not None:
                raise self._error
            yield
        except (self._error, zmq.ZMQError) as error:
            raise RolloutProcessError(f"{self._name}: the vLLM process {self.pid} {self._how()}") from error
        finally:
            self._called = None

    def heard(self) -> None:
        """The child has answered: from here on it has all the time again."""
        self._called = time.monotonic()

    def close(self) -> None:
        """Kill it: it has nothing that would be lost."""
        self._client.resources.engine_manager.manager_stopped.set()
        self._process.kill()
        self._process.join()
        self._client.shutdown()

    def _how(self) -> str:
        """How it ended, which this thread may learn a little after the one that noticed."""
        if self._is_silent():
            return f"has not answered for {self._timeout:g} s"
        deadline = time.monotonic() + _SECONDS_TO_END
        while (code := self._process.exitcode) is None:
            if time.monotonic() > deadline:
                return "does not answer"
            time.sleep(0.01)
        return f"ended (killed by {signal.Signals(-code).name})" if code < 0 else f"ended (exit code {code})"

    def _is_silent(self) -> bool:
        called = self._called
        return called is not None and time.monotonic() - called > self._timeout

    def _await_end(self) -> None:
        """Wake up whoever waits for the child when it ends or says nothing: vLLM's client would wait on."""
        while not self._is_silent() and not connection.wait([self._process.sentinel], timeout=_SECONDS_TO_LOOK):
            pass
        self._client.outputs_queue.put_nowait(self._error())
        for future in list(self._client.utility_results.values()):
            if not future.done():
                future.set_exception(self._error())


@contextmanager
def child_environment(timeout_seconds: float) -> Iterator[dict[str, str]]:
    """Variables of the process that starts a child: it computes with as many threads as its rank.

    The sockets between the two have names while they are not connected yet.
    """
    with TemporaryDirectory() as sockets:
        yield {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_RPC_BASE_PATH": sockets,
            "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(timeout_seconds)),
            "PYTHONWARNINGS": "ignore::FutureWarning",
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
        }
