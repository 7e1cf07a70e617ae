"""What runs inside vLLM: an executor that is told its rank, plain weights, a sampler with the program's noise."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.model_executor.layers import utils as layer_utils
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from flexrlhf.engines.sampling import gumbel_noise
from flexrlhf.engines.vllm.shared import Shared, describe, move_to_shared
from flexrlhf.engines.vllm.weights import named_views

_PR_SET_PDEATHSIG = 1


class RankExecutor(UniProcExecutor):
    """The one worker of this process. ``additional_config`` tells its place in its set, and of a child its parent."""

    def _init_executor(self) -> None:
        if "parent" in self.vllm_config.additional_config:
            _end_with(self.vllm_config.additional_config["parent"])
            # locks have no file then, which a process that is killed would leave
            multiprocessing.set_start_method("fork", force=True)
            # a world of its own without files or ports
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with _plainly():
            super()._init_executor()

    def _distributed_args(self) -> tuple[str, int, int]:
        """Where the world is met, which is there already; rank and device.

        That the address differs from rank to rank keeps vLLM from its all-reduce in shared memory, of which a rank
        that is killed would leave files.
        """
        place = self.vllm_config.additional_config
        return f"rank:{place['rank']}", place["rank"], place["local_rank"]


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, however that does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(f"process {parent}, which started this one, has ended")


@contextmanager
def _plainly() -> Iterator[None]:
    """vLLM without some of its habits while it starts.

    Its ranks have no queue in shared memory, which nobody here uses and which a rank that is killed would leave. On a
    CPU, linear layers multiply by their weights as they lie, since packed copies could not be overwritten, and the
    memory of the process is not bound to one node.
    """
    with ExitStack() as changes:
        changes.enter_context(_replaced(MessageQueue, "create_from_process_group", staticmethod(_nothing)))
        if current_platform.is_cpu():
            changes.enter_context(_replaced(layer_utils, "dispatch_cpu_unquantized_gemm", _multiply_plainly))
            changes.enter_context(_replaced(torch.ops._C, "init_cpu_memory_env", _nothing))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    getattr(owner, name)  # operators of torch are there once they are asked for
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _nothing(*_: Any, **__: Any) -> None:
    """Instead of what shall not be done."""


def _multiply_plainly(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


class WorkerExtension:
    """Methods that vLLM adds to its worker; the engine calls them by name."""

    model_runner: Any

    def use_rollout_sampler(self, is_exact: bool) -> None:
        self.model_runner.sampler = RolloutSampler(self.model_runner, is_exact)

    def weight_views(self) -> dict[str, Tensor]:
        return named_views(self.model_runner.model)

    def share_weights(self) -> Shared:
        """Where the weights are, told to another process."""
        model = self.model_runner.model
        parameters = list(model.parameters())
        path = None if parameters[0].is_cuda else move_to_shared(parameters)
        return describe(named_views(model), path)

    def parameters(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.model_runner.model.parameters()]

    def caches(self) -> list[Tensor]:
        return list(self.model_runner.kv_caches)


class RolloutSampler(Sampler):
    """vLLM's sampler, which tells of a token its log-prob alone. ``is_exact``: it draws with the program's noise."""

    def __init__(self, runner: Any, is_exact: bool) -> None:
        super().__init__("processed_logprobs")
        if is_exact:
            self.topk_topp_sampler = NoiseSampler(runner)

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """Without the rank of each token, for which vLLM compiles a kernel first."""
        assert num_logprobs == 0, "nobody asks for further tokens"
        tokens = token_ids[:, None]
        return LogprobsTensors(tokens.int(), logprobs.gather(-1, tokens), torch.zeros_like(token_ids))


class NoiseSampler(torch.nn.Module):
    """argmax(logits + noise), where noise is that of every other engine: a hash of (seed, step, row, position)."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = runner

    def forward(self, logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of logits (n, vocabulary) / temperature: tokens (n,) and the log-probs that they are drawn by."""
        logits = apply_top_k_top_p(logits, k, p)
        return (logits.double() + self._noise(logits)).argmax(-1), logits.log_softmax(-1, dtype=torch.float32)

    def _noise(self, logits: Tensor) -> Tensor:
        noise = torch.empty(logits.shape, dtype=torch.float64, device=logits.device)
        for (seed, step), told in self._by_step().items():
            slots, rows, positions = torch.tensor(told, device=logits.device).unbind(1)
            noise[slots] = gumbel_noise(seed, step, rows, positions, logits.shape[1])
        return noise

    def _by_step(self) -> dict[tuple[int, int], list[tuple[int, int, int]]]:
        """(seed, step) → of each request its slot in the batch, its row and how many tokens its answer has."""
        told: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for slot, name in enumerate(self._runner.input_batch.req_ids):
            request = self._runner.requests[name]
            further = request.sampling_params.extra_args
            place = (slot, further["row"], len(request.output_token_ids))
            told.setdefault((further["seed"], further["step"]), []).append(place)
        return told
