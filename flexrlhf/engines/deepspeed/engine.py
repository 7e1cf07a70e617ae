"""Engine on DeepSpeed: ZeRO 0 to 3 on any subgroup of ranks, several engines in one process.

DeepSpeed assumes that it owns the world and that there is one ``mpu``: it counts the world's ranks, waits for them in
barriers, and overwrites a module global at every ``initialize``. So around every call into it the subgroup is the
default process group and ``mpu`` is the engine's own (``_as_world``); ranks are then numbers inside the group.
Stage 3 also replaces torch's linear function, by one that takes longer: around these calls alone, too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from flexrlhf.api import Column
from flexrlhf.api.engine import (
    DTYPES,
    Batch,
    EngineContext,
    HostOffload,
    Lender,
    Loss,
    MemoryUsage,
    Moments,
    NonFiniteStep,
    Passes,
    Sampling,
    ScheduledOptimizer,
    Skeleton,
    StateTensor,
    TrainingState,
    as_world,
    storage_bytes,
)
from flexrlhf.engines.deepspeed.config import clips_itself, deepspeed_config, partitions_plainly
from flexrlhf.engines.deepspeed.state import load_loss_scale, loss_scale, partition, shard, state_tensors_by_kind

_MASTERS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat")
_GRADIENTS = ("averaged_gradients", "fp32_groups_gradients_flat", "grad_partitions_flat_buffer")
"""Attributes of DeepSpeed's optimizers with float32 weights and gradients, by stage."""


@dataclass(frozen=True)
class _Mpu:
    """Model-parallel unit with Megatron's interface.

    dp:  data-parallel group.
    tp:  tensor-parallel group, of one rank where the model is whole.
    """

    dp: dist.ProcessGroup
    tp: dist.ProcessGroup

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.dp

    def get_data_parallel_world_size(self) -> int:
        return self.dp.size()

    def get_data_parallel_rank(self) -> int:
        return self.dp.rank()

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.tp

    def get_model_parallel_world_size(self) -> int:
        return self.tp.size()

    def get_model_parallel_rank(self) -> int:
        return self.tp.rank()

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank


def _import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for ``device``, without its log messages and without kernels that compile on first use."""
    os.environ["DS_ACCELERATOR"] = device.type
    import deepspeed
    from deepspeed.ops import __compatible_ops__
    from deepspeed.runtime import bf16_optimizer

    # its all-reduce in shared memory compiles for most of a minute and ignores process groups
    __compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.ERROR)
    # printed past the logger for every model in bfloat16
    bf16_optimizer.see_memory_usage = lambda *_, **__: None
    return deepspeed


@contextmanager
def device_of_local_rank(device: torch.device) -> Iterator[None]:
    """Have LOCAL_RANK be the number of the GPU, by which DeepSpeed finds it: several ranks may share one."""
    if device.type != "cuda":
        yield
        return
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    try:
        yield
    finally:
        del os.environ["LOCAL_RANK"]
        if before is not None:
            os.environ["LOCAL_RANK"] = before


class DeepSpeedEngine(Lender):
    """Copy of a model on this rank, or a ZeRO shard of one; ``Engine`` in engines/base.py documents the methods.

    ``weights`` of a 16-bit model are in 16 bits: the float32 masters are in flat partitions without parameter names.
    """

    def __init__(self, context: EngineContext) -> None:
        ranks = context.ranks
        assert ranks.alone is not None, "the plan has a group of one rank for every rank of a DeepSpeed model"
        placed, self._settings = context.placed, context.placed.settings
        self.num_requests = 0
        self._mpu = _Mpu(ranks.dp.group or ranks.alone, ranks.tp.group or ranks.alone)
        self._device, self._await_device = context.device, context.await_device
        self._linear = torch.nn.functional.linear
        self._deepspeed = _import_deepspeed(context.device)
        skeleton = _skeleton(context)
        self._model = skeleton.model
        self.config = self._model.config
        head = skeleton.use_kernels(context)
        skeleton.checkpoint_layers(context)
        self._tp = ranks.tp
        if ranks.tp.group is not None:
            skeleton.replace_placeholders(lambda parameter: torch.empty(parameter.shape, device="meta"))
        names = skeleton.split_layers(head, ranks.tp.group)
        self._allocate(skeleton, context.device)
        self._split = names.split
        self._mark(names.partial)
        self._optimizer = self._make_optimizer(context.num_updates) if placed.trained else None
        self._align_counters(context)
        if self._settings.zero == 3 and self._settings.tiled_mlp:
            # its weights are then gathered for all tiles, not for each product of one
            self._deepspeed.utils.set_z3_leaf_modules_by_suffix(self._model, [".mlp"])
        with self._as_world():
            if self._settings.zero == 3 and skeleton.stored:
                self._partition(skeleton, context.device)
            self._engine = self._initialize()
        # gradients are reduced during backward, and weights of stage 3 gathered layer by layer
        lockstep = placed.trained or placed.in_lockstep
        self._passes = Passes.of(context, self._model, self._engine, head, lockstep)
        self._host_offload = HostOffload(context.device, context.copies)
        self._gradient_bytes = 0

    def _make_optimizer(self, num_updates: int) -> ScheduledOptimizer:
        settings = self._settings.optimizer
        trained = sorted((name, p) for name, p in self._model.named_parameters() if p.requires_grad)
        return ScheduledOptimizer.of(settings, [p for _, p in trained], num_updates)

    def _align_counters(self, context: EngineContext) -> None:
        """Set DeepSpeed's counters of modules and parameters to the same numbers on all ranks.

        ZeRO-3 compares these numbers between ranks, and the counters of a process go on from one engine to the next.
        """
        from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
        from deepspeed.runtime.zero.partition_parameters import Init

        defaults = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
        assert len(defaults) == 1, "DeepSpeed 0.19.8 counts modules in the only default of this method"
        (modules,) = defaults
        modules[0] = context.ranks.dp.largest(modules[0], context.device)
        Init.param_id = context.ranks.dp.largest(Init.param_id, context.device)

    def _allocate(self, skeleton: Skeleton, device: torch.device) -> None:
        """Give placeholders the type that DeepSpeed computes in, and read a model that is not partitioned."""
        dtype = DTYPES[self._settings.dtype]
        if self._settings.zero == 3:
            skeleton.cast_placeholders(dtype)
            return
        skeleton.replace_placeholders(lambda parameter: torch.empty(parameter.shape, dtype=dtype, device=device))
        for name in skeleton.stored:
            skeleton.read(name, self._model.get_parameter(name).detach())

    def _mark(self, partial: Set[str]) -> None:
        """Mark the parameters that are split, by which DeepSpeed takes norms, and sum ``partial`` gradients."""
        for name, parameter in self._model.named_parameters():
            parameter.tensor_model_parallel = name in self._split
            if name in partial and parameter.requires_grad:
                parameter.register_hook(lambda gradient: self._tp.sum_in_order(gradient.float()).to(gradient.dtype))

    def _partition(self, skeleton: Skeleton, device: torch.device) -> None:
        """Partition the model as stage 3 does, and read this rank's part of it."""
        for name, parameter in self._model.named_parameters():
            if name not in skeleton.stored:
                parameter.data = parameter.data.to(DTYPES[self._settings.dtype])
        for buffer in self._model.buffers():
            buffer.data = buffer.data.to(device)
        partition(self._model, self._mpu, self._config())
        for name in skeleton.stored:
            skeleton.read(name, shard(self._model.get_parameter(name), self._mpu.dp.rank()))

    def _config(self) -> dict[str, Any]:
        return deepspeed_config(self._settings, trained=self._optimizer is not None)

    def _initialize(self) -> Any:
        buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        engine, *_ = self._deepspeed.initialize(
            model=self._model,
            optimizer=None if self._optimizer is None else self._optimizer.optimizer,
            config=self._config(),
            mpu=self._mpu,
            dist_init_required=False,
        )
        engine.eval()
        if self._settings.zero == 3 and self._tp.group is not None and self._optimizer is not None:
            # it compares ranks of both groups, which in the world of one are numbers inside it
            engine.optimizer._partition_group_spans_model_parallel[id(self._mpu.dp)] = False
        # DeepSpeed casts buffers with the weights; rotary frequencies in 16 bits would shift positions
        for name, buffer in self._model.named_buffers():
            buffer.data = buffers[name].to(buffer.device)
        return engine

    @contextmanager
    def _as_world(self) -> Iterator[None]:
        """Make the subgroup the world, and this engine's mpu and linear function the global ones."""
        groups, functional = self._deepspeed.utils.groups, torch.nn.functional
        before, groups.mpu = groups.mpu, self._mpu
        linear, functional.linear = functional.linear, self._linear
        try:
            with as_world(self._mpu.dp), device_of_local_rank(self._device):
                yield
        finally:
            groups.mpu = before
            self._linear, functional.linear = functional.linear, linear

    def generate(self, batch: Batch, sampling: Sampling, ahead: Sequence[Batch] = ()) -> dict[str, Tensor]:
        self.num_requests += len(batch)
        with self._as_world(), self._gathering():
            return self._passes.generate(batch, sampling)

    def drop_kept_rows(self) -> None:
        self._passes.drop_kept_rows()

    def forward(self, batch: Batch, columns: Sequence[Column], adapters: bool = True) -> dict[str, Tensor]:
        with self._as_world(), self._gathering():
            return self._passes.forward(batch, columns, adapters)

    def train(self, parts: Sequence[tuple[Batch, Loss]]) -> Moments:
        assert self._optimizer is not None, "this placed model is not trained"
        with self._as_world(), self._passes.recomputing():
            return self._passes.backward(parts, self._backward) | self._finish_step(parts)

    def backward(self, parts: Sequence[tuple[Batch, Loss]]) -> Moments:
        with self._as_world(), self._passes.recomputing():
            return self._passes.backward(parts, lambda value, _: self._backward(value, False))

    def step(self, parts: Sequence[tuple[Batch, Loss]]) -> Moments:
        with self._as_world(), self._passes.recomputing():
            # DeepSpeed sums gradients over ranks in the last backward pass of a step, here one that adds nothing
            self._backward(self._passes.idle_loss(parts[0][1]), True)
            return self._finish_step(parts)

    def losses(self, parts: Sequence[tuple[Batch, Loss]]) -> Moments:
        with self._as_world(), self._gathering():
            return self._passes.losses(parts)

    def _backward(self, value: Tensor, is_last: bool) -> None:
        """Run backward of one contribution to the loss. DeepSpeed averages over ranks, and contributions add up."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(value * self._mpu.dp.size())
        if not is_last:
            self._engine.step()

    def _finish_step(self, parts: Sequence[tuple[Batch, Loss]]) -> Moments:
        """Clip and update; return the statistics of the update. Raises NonFiniteStep."""
        try:
            return self._update()
        except NonFiniteStep as error:
            with self._gathering():
                error.first = self._passes.first_non_finite(parts)
            raise
        finally:
            self._passes.end_step()

    def _update(self) -> Moments:
        assert self._optimizer is not None, "this placed model is not trained"
        self._gradient_bytes = storage_bytes(self._gradients())
        self._await_device()
        rate = self._optimizer.learning_rate
        norm = self._clip() if clips_itself(self._settings) else None
        if norm is None or torch.isfinite(norm):
            self._engine.step()
            skipped = bool(getattr(self._engine.optimizer, "overflow", False))
        else:
            # the bare optimizer of this stage would step
            self._engine.zero_grad()
            skipped = True
        if not skipped:
            self._optimizer.end_update()
            self._passes.balance_experts()
        norm = torch.as_tensor(self._engine.get_global_grad_norm() if norm is None else norm, device=self._device)
        is_scaled = self._settings.dtype == "float16"
        # DeepSpeed reports some norms that are not finite as -1
        if not is_scaled and not (torch.isfinite(norm) and norm >= 0):
            assert skipped, "DeepSpeed makes no step with such a norm"
            raise NonFiniteStep(self._optimizer.statistics(rate, norm, is_scaled=True, skipped=True))
        return self._optimizer.statistics(rate, norm, is_scaled, skipped)

    def _clip(self) -> Tensor:
        """Clip the gradients; return their norm () before."""
        limit = self._settings.optimizer.max_grad_norm
        trained = {name: p for name, p in self._model.named_parameters() if p.grad is not None}
        whole, split = (
            get_total_norm([p.grad for name, p in trained.items() if (name in self._split) == is_split])
            for is_split in (False, True)
        )
        norm = (whole**2 + self._tp.sum(split**2)).sqrt() if self._split else whole
        clip_grads_with_norm_(trained.values(), limit if limit is not None else float("inf"), norm)
        return norm

    def weights(self) -> dict[str, Tensor]:
        shards = {name: shard(parameter, self._mpu.dp.rank()) for name, parameter in self._model.named_parameters()}
        return shards | self._passes.router_biases

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        own = self.weights()
        for name, values in weights.items():
            own[name].copy_(values.view(own[name].shape))

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Free the weights that the passes inside have gathered, which DeepSpeed would keep for a next pass."""
        yield
        if self._settings.zero == 3:
            # that of the engine would also collect garbage: over half of a step's time with small models
            self._engine.optimizer.empty_partition_cache()

    def training_state(self) -> TrainingState:
        assert self._optimizer is not None, "this placed model is not trained"
        trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        wrapper = self._engine.optimizer
        live = state_tensors_by_kind(wrapper, self._optimizer, trained, self._mpu.dp.rank())
        for tensors in live.values():
            for name, each in tensors.items():
                tensors[name] = replace(each, values=self._host_offload.readable(each.values))
        biases = {name: StateTensor(bias) for name, bias in self._passes.router_biases.items()}
        if biases:
            live[TrainingState.WEIGHTS] |= biases
        return TrainingState(live, {"updates": float(self._optimizer.num_updates), **loss_scale(wrapper)})

    def load_numbers(self, numbers: Mapping[str, float]) -> None:
        assert self._optimizer is not None, "this placed model is not trained"
        self._optimizer.num_updates = int(numbers["updates"])
        load_loss_scale(self._engine.optimizer, numbers)

    def _usage(self) -> MemoryUsage:
        weights, optimizer = storage_bytes(self._stored()), storage_bytes(self._optimizer_tensors())
        host = weights * self._settings.offload_parameters + optimizer * self._settings.offload_optimizer
        return MemoryUsage(weights, self._gradient_bytes, optimizer, host)

    def _tensors(self) -> list[Tensor]:
        return [*self._stored(), *self._optimizer_tensors(), *self._gradients()]

    def close(self) -> None:
        with self._as_world():
            self._engine.destroy()
        del self._engine, self._model, self._passes, self._optimizer

    def _stored(self) -> list[Tensor]:
        return [getattr(parameter, "ds_tensor", parameter).detach() for parameter in self._model.parameters()]

    def _optimizer_tensors(self) -> list[Tensor]:
        if self._optimizer is None:
            return []
        return [*_tensors_of(self._engine.optimizer, _MASTERS), *self._optimizer.tensors()]

    def _gradients(self) -> list[Tensor]:
        if self._optimizer is None:
            return []
        own = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        return [*own, *_tensors_of(self._engine.optimizer, _GRADIENTS)]


def _skeleton(context: EngineContext) -> Skeleton:
    if partitions_plainly(context.placed.settings):
        return Skeleton.of(context)
    return Skeleton.of_whole_model(context)


def _tensors_of(owner: Any, names: tuple[str, ...]) -> list[Tensor]:
    """Return the tensors in the named attributes of ``owner``: tensors, or lists or mappings of such."""
    tensors: list[Tensor] = []
    pending = [getattr(owner, name, None) for name in names]
    while pending:
        match pending.pop():
            case Tensor() as tensor:
                tensors.append(tensor.detach())
            case dict() as mapping:
                pending += mapping.values()
            case list() as items:
                pending += items
    return tensors
