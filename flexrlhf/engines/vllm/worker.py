"""Classes that run inside vLLM: an executor for one rank, methods of its worker, a sampler with our noise.

Low-rank adapters are stored by vLLM's layers, in the only slot of each, and added in every pass.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.distributed.parallel_state import get_pp_group
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.fused_moe.oracle import unquantized
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from flexrlhf.api import LoraSpec, ParameterName
from flexrlhf.api.engine import gumbel_noise
from flexrlhf.engines.vllm.child import PARENT, SharedViews, StartErrors, describe, move_to_shared

_PR_SET_PDEATHSIG = 1
_EXPERTS = dict(zip(("w13_weight", "w2_weight", "w13_bias", "w2_bias"), ParameterName.OF_EXPERTS, strict=True))
"""Ends of names of the experts of a layer, by vLLM's: gate and up together, and down."""
_OF_SINKS = ((".attn.", ".self_attn."), (".embedding.", ".embed_tokens."))
"""Parts of names that vLLM has for gpt-oss, and transformers'."""


class RankExecutor(UniProcExecutor):
    """Executor of the one worker of this process.

    ``additional_config`` has the ``rank`` in the replica, the ``local_rank`` (index of the device), and of a copy with
    adapters their settings (``lora``), and switches.
    """

    supports_pp = True

    def _init_executor(self) -> None:
        if parent := os.environ.get(PARENT):
            _end_with(int(parent))
            logging.getLogger("vllm.v1.engine.core").addHandler(StartErrors())
            # its locks have no files, which a process that is killed would leave
            multiprocessing.set_start_method("fork", force=True)
            # a world of one rank without files or ports
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with _patched_vllm(self.vllm_config.additional_config["float32_routers"]):
            super()._init_executor()
        if (lora := lora_of(self.vllm_config)) is not None:
            # before it is compiled
            add_in_every_pass(self.driver_worker.worker.model_runner.model, lora.scale)

    def _distributed_args(self) -> tuple[str, int, int]:
        """Return the rendezvous address of the world, which exists already, the rank and the device index.

        The address differs from rank to rank, which disables vLLM's all-reduce in shared memory: a rank that is killed
        would leave its files.
        """
        config = self.vllm_config.additional_config
        return f"rank:{config['rank']}", config["rank"], config["local_rank"]


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, however that does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(f"process {parent}, which started this one, has ended")


@contextmanager
def _patched_vllm(float32_routers: bool) -> Iterator[None]:
    """Patch vLLM while it starts.

    Its ranks create no queue in shared memory, which is not used here and which a rank that is killed would leave.
    Routers compute in float32, as those of ``engines/routing.py``, with ``float32_routers``. On a CPU, linear layers
    and experts multiply by their own weights, since packed copies could not be overwritten, and the memory of the
    process is not bound to one NUMA node.
    """
    with ExitStack() as patches:
        patches.enter_context(_replaced(MessageQueue, "create_from_process_group", staticmethod(_nothing)))
        if float32_routers:
            patches.enter_context(
                _replaced(GateLinear, "__init__", partialmethod(GateLinear.__init__, out_dtype=torch.float32))
            )
        if current_platform.is_cpu():
            from flexrlhf.engines.vllm.cpu_experts import OwnWeightExperts

            use_own_weight = partial(_use_own_weight, float32_routers)
            patches.enter_context(_replaced(layer_utils, "dispatch_cpu_unquantized_gemm", use_own_weight))
            patches.enter_context(_replaced(unquantized, "backend_to_kernel_cls", OwnWeightExperts.classes))
            patches.enter_context(_replaced(torch.ops._C, "init_cpu_memory_env", _nothing))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    getattr(owner, name)  # an operator of torch becomes an attribute on first access
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _nothing(*_: Any, **__: Any) -> None:
    """Replace a function that must not run."""


def _use_own_weight(float32_routers: bool, layer: Any, remove_weight: bool) -> None:
    is_wide = float32_routers and isinstance(layer, GateLinear)
    layer.cpu_linear = _float32_linear if is_wide else torch.nn.functional.linear


def _float32_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float())


def lora_of(config: Any) -> LoraSpec | None:
    """Return the adapters of a copy from its VllmConfig."""
    found = config.additional_config.get("lora")
    return None if found is None else LoraSpec(**found)


class WorkerExtension:
    """Methods that vLLM adds to its worker; ``VllmEngine`` calls them by name."""

    model_runner: Any
    vllm_config: Any

    def use_rollout_sampler(self, is_exact: bool) -> None:
        """Replace vLLM's sampler."""
        self.model_runner.sampler = RolloutSampler(self.model_runner, is_exact)

    def join_stages(self) -> None:
        """Let all stages get the logits of the last one, so that each samples the same tokens.

        vLLM does so for a launcher of its own, and makes the buffer of a stage in a profiling run, which is left out.
        """
        runner, stages = self.model_runner, get_pp_group()
        runner.broadcast_pp_output = True
        if not stages.is_first_rank:
            size, dtype = runner.max_num_tokens, runner.model_config.dtype
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(size, dtype, runner.device)

    def weight_views(self) -> dict[str, Tensor]:
        """Return the weights by their Hugging Face names."""
        return named_views(self.model_runner.model, lora_of(self.vllm_config))

    def share_weights(self) -> SharedViews:
        """Move the weights to shared memory; describe them for another process."""
        weights = [*self.model_runner.model.parameters(), *stored_adapters(self.model_runner.model)]
        path = None if weights[0].is_cuda else move_to_shared(weights)
        return describe(self.weight_views(), path)

    def parameters(self) -> list[Tensor]:
        """Return vLLM's own parameters and adapters, fused and padded."""
        model = self.model_runner.model
        return [*(parameter.detach() for parameter in model.parameters()), *stored_adapters(model)]

    def padding_bytes(self) -> int:
        """Return the bytes of adapters that no name has: of padded ranks, and of layers next to adapted ones."""
        named = (view.nbytes for name, view in self.weight_views().items() if ParameterName(name).without_adapter[1])
        return sum(each.nbytes for each in stored_adapters(self.model_runner.model)) - sum(named)

    def caches(self) -> list[Tensor]:
        """Return the tensors of the KV cache."""
        return list(self.model_runner.kv_caches)


class RolloutSampler(Sampler):
    """vLLM's sampler, with the log-prob of the sampled token alone.

    ``is_exact``: whether the noise is ours (engines/sampling.py) instead of vLLM's.
    """

    def __init__(self, runner: Any, is_exact: bool) -> None:
        super().__init__("processed_logprobs")
        self._runner, self._is_exact = runner, is_exact
        if is_exact:
            self.topk_topp_sampler = NoiseSampler(runner)

    def sample(self, logits: Tensor, *arguments: Any, **further: Any) -> tuple[Tensor, Tensor | None]:
        """Return tokens (n,) and log-probs: with vLLM's own noise of the tokens that requests may have alone."""
        if not self._is_exact and (num_ids := _num_ids(self._runner)) is not None:
            logits[:, num_ids:] = -torch.inf
        sampled: tuple[Tensor, Tensor | None] = super().sample(logits, *arguments, **further)
        return sampled

    def greedy_sample(self, logits: Tensor) -> Tensor:
        """Return the likeliest tokens (n,) that requests may have."""
        num_ids = _num_ids(self._runner)
        return super().greedy_sample(logits if num_ids is None else logits[:, :num_ids].contiguous())

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """Return log-probs without the rank of each token, for which vLLM would compile a kernel."""
        assert num_logprobs == 0, "requests have no log-probs of other tokens"
        tokens = token_ids[:, None]
        return LogprobsTensors(tokens.int(), logprobs.gather(-1, tokens), torch.zeros_like(token_ids))


def _num_ids(runner: Any) -> int | None:
    """Return ``Sampling.num_ids`` of the requests of a step, which have the same."""
    names = runner.input_batch.req_ids
    return runner.requests[names[0]].sampling_params.extra_args["ids"] if names else None


class NoiseSampler(torch.nn.Module):
    """Sampler by argmax(logits + noise), with the noise of every other engine (engines/sampling.py)."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner, self._has_kernel = runner, runner.vllm_config.additional_config["noise_kernel"]

    def forward(self, logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return tokens (n,), and log-probs (n, vocabulary) that they are sampled from.

        ``logits`` (n, vocabulary) are divided by the temperature; ``k`` and ``p`` (n,): top-k and top-p.
        """
        num_ids = _num_ids(self._runner)
        if num_ids is not None and (k is not None or p is not None):
            # a cut among other tokens might leave none of these
            logits[:, num_ids:] = -torch.inf
        logits = apply_top_k_top_p(logits, k, p)
        tokens = (logits.double() + self._noise(logits))[:, :num_ids].argmax(-1)
        return tokens, logits.log_softmax(-1, dtype=torch.float32)

    def _noise(self, logits: Tensor) -> Tensor:
        """Gumbel noise, float64 (n, vocabulary)."""
        noise = torch.empty(logits.shape, dtype=torch.float64, device=logits.device)
        for (seed, step), requests in self._requests_by_step().items():
            slots, rows, positions = torch.tensor(requests, device=logits.device).unbind(1)
            noise[slots] = gumbel_noise(seed, step, rows, positions, logits.shape[1], self._has_kernel)
        return noise

    def _requests_by_step(self) -> dict[tuple[int, int], list[tuple[int, int, int]]]:
        """Return (seed, step) → (slot in the batch, row, number of response tokens so far) of each request."""
        requests: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for slot, name in enumerate(self._runner.input_batch.req_ids):
            request = self._runner.requests[name]
            arguments = request.sampling_params.extra_args
            entry = (slot, arguments["row"], arguments["first"] + len(request.output_token_ids))
            requests.setdefault((arguments["seed"], arguments["step"]), []).append(entry)
        return requests


def named_views(model: torch.nn.Module, lora: LoraSpec | None = None) -> dict[str, Tensor]:
    """Return this rank's part of every parameter, by name, without the rows that vLLM pads the vocabulary with.

    ``lora``: adapters that vLLM adds; their parameters, like the layers that they change, have peft's names.
    """
    modules = dict(model.named_modules())
    has_sinks = any(name.endswith(".sinks") for name in dict(model.named_parameters()))
    views: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        if kind in _EXPERTS:
            of_experts = parameter.detach()
            if of_experts.dim() == 3 and has_sinks:  # matrices are transposed there
                of_experts = of_experts.transpose(1, 2)
            views[f"{owner.partition('.experts')[0]}{_EXPERTS[kind]}"] = of_experts
            continue
        path, is_wrapped = owner.removesuffix(ParameterName.BASE[:-1]), owner.endswith(ParameterName.BASE[:-1])
        for own, part in _parts(model, modules[owner], path, parameter.detach()):
            views[f"{own}{ParameterName.BASE if is_wrapped and _has_adapter(own, lora) else '.'}{kind}"] = part
    for path, layer in adapted_layers(model):
        for own, a, b in zip(_fused(model, path), layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
            if lora is not None and _has_adapter(own, lora):
                _, name_a, name_b = ParameterName(f"{own}.weight").merged_from
                views |= {name_a: a[0, 0, : lora.rank], name_b: b[0, 0, :, : lora.rank]}
    renamed = _OF_SINKS if has_sinks else (ParameterName.MIXTRAL_BLOCK[::-1],)
    for theirs, own in renamed:
        views = {name.replace(theirs, own): view for name, view in views.items()}
    return views


def _has_adapter(path: str, lora: LoraSpec | None) -> bool:
    """Whether the layer at ``path``, one with room for an adapter, has one."""
    return lora is not None and (lora.targets is None or path.rpartition(".")[2] in lora.targets)


def _fused(model: torch.nn.Module, path: str) -> list[str]:
    """Return the names of the layers that are fused in the one at ``path``: itself where it is one."""
    parent, _, last = path.rpartition(".")
    # models with experts name the layers of their MLPs only if they have some
    fused = {"gate_up_proj": ["gate_proj", "up_proj"], **getattr(model, "packed_modules_mapping", {})}.get(last)
    return [f"{parent}.{own}" for own in fused] if fused else [path]


def _parts(model: torch.nn.Module, module: torch.nn.Module, path: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split one parameter of ``module`` into (layer, view) of each layer that is fused in it.

    ``path``: the name of ``module``.
    """
    layers = _fused(model, path)
    if isinstance(module, VocabParallelEmbedding):
        yield path, tensor[: module.shard_indices.num_org_elements]
    elif len(layers) > 1:
        yield from zip(layers, tensor.split(module.output_partition_sizes), strict=True)  # type: ignore[arg-type]
    else:
        yield path, tensor


def adapted_layers(model: torch.nn.Module) -> Iterator[tuple[str, BaseLinearLayerWithLoRA]]:
    """Yield the layers that store adapters, by their names in vLLM."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, BaseLinearLayerWithLoRA))


def stored_adapters(model: torch.nn.Module) -> list[Tensor]:
    """Return all adapters as vLLM stores them: (1, 1, rank, inputs) and (1, 1, outputs, rank), with padded ranks."""
    return [each for _, layer in adapted_layers(model) for each in (*layer.lora_a_stacked, *layer.lora_b_stacked)]


def add_in_every_pass(model: torch.nn.Module, scale: float) -> None:
    """Let every layer add ``scale`` times its adapters, whatever a request names.

    vLLM's kernels look up the adapter of every token: on CPUs they copy it for each, on GPUs they have no float32.
    """
    for _, layer in adapted_layers(model):
        layer.punica_wrapper.add_lora_linear = partial(_add_adapters, scale)


def _add_adapters(
    scale: float,
    outputs: Tensor,
    inputs: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    _: float,
    widths: Sequence[int],
    **__: Any,
) -> None:
    """Add the adapters of the layers that are fused to one, of which ``outputs`` has ``widths`` features each.

    It takes the arguments of vLLM's method that it replaces.
    """
    for part, down, up in zip(outputs.split(list(widths), -1), a, b, strict=True):
        part.addmm_(linear(inputs, down[0, 0]), up[0, 0].t(), alpha=scale)
