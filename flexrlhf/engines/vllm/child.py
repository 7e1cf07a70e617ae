"""Child process of a rollout engine, in which vLLM decodes: its weights mapped here, its end detected."""

from __future__ import annotations

import math
import os
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

from flexrlhf.engines.vllm.shared_memory import open_views
from flexrlhf.errors import RunStopped

PARENT = "FLEXRLHF_ROLLOUT_PARENT"
"""Environment variable with the process that a child ends with."""
_EXIT_CODE_SECONDS = 10.0
"""Longest wait for the exit code of a child that was noticed to have ended."""
_POLL_SECONDS = 1.0


class RolloutProcessError(RunStopped):
    """The process of a rollout engine ended by itself, or did not start or respond."""


class ChildProcess:
    """Process behind ``engine``, a vLLM engine that was started with one.

    A thread watches the process: vLLM's client would wait for ever for one that has ended or does not respond.
    """

    def __init__(self, name: str, engine: Any, timeout_seconds: float) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        self._timeout = timeout_seconds
        self._waiting_since: float | None = None
        self._name, self._client, self._error = name, engine.engine_core, EngineDeadError
        (self._process,) = self._client.resources.engine_manager.processes
        threading.Thread(target=self._watch, name=f"{name} watch", daemon=True).start()

    @property
    def pid(self) -> int:
        pid: int = self._process.pid
        return pid

    def views(self) -> dict[str, Tensor]:
        """Return the child's weights by name: writing to them writes to its memory."""
        (shared,) = self._client.collective_rpc("share_weights")
        return open_views(shared)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Turn the errors of calls inside into RolloutProcessError, where the child has ended or does not respond."""
        self.restart_timeout()
        try:
            if self._process.exitcode is not None:
                raise self._error
            yield
        except (self._error, zmq.ZMQError) as error:
            raise RolloutProcessError(f"{self._name}: the vLLM process {self.pid} {self._reason()}") from error
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

    def _reason(self) -> str:
        """Describe how the child ended. Its exit code may come a little after the error."""
        if self._is_timed_out():
            return f"has not responded for {self._timeout:g} s"
        deadline = time.monotonic() + _EXIT_CODE_SECONDS
        while (code := self._process.exitcode) is None:
            if time.monotonic() > deadline:
                return "does not respond"
            time.sleep(0.01)
        return f"ended (killed by {signal.Signals(-code).name})" if code < 0 else f"ended (exit code {code})"

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
def child_environment(timeout_seconds: float) -> Iterator[dict[str, str]]:
    """Environment variables for starting a child, which gets as many threads as its rank.

    The directory of its sockets exists until they are connected, inside the context.
    """
    with TemporaryDirectory() as sockets:
        yield {
            # not among vLLM's arguments, by which it names what it has compiled
            PARENT: str(os.getpid()),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_RPC_BASE_PATH": sockets,
            "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(timeout_seconds)),
            "PYTHONWARNINGS": "ignore::FutureWarning",
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
        }
