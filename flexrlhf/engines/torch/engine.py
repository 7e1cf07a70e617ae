"""Engine on plain PyTorch and transformers: data parallel, FSDP2, tensor parallel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.engines.base import (
    Batch,
    EngineContext,
    Loss,
    MemoryUsage,
    Moments,
    RowSource,
    Sampling,
    StateTensor,
    TrainingState,
)
from flexrlhf.engines.experts import ExpertSplit
from flexrlhf.engines.host_offload import HostOffload, Lender
from flexrlhf.engines.language_head import LanguageHead
from flexrlhf.engines.model_ranks import ExpertRanks, ModelRanks
from flexrlhf.engines.models import DTYPES
from flexrlhf.engines.non_finite import NonFiniteStep
from flexrlhf.engines.optimizers import local
from flexrlhf.engines.passes import Passes
from flexrlhf.engines.skeletons import Skeleton, swap_values
from flexrlhf.engines.tensor_parallel import TensorParallelNames
from flexrlhf.engines.torch.fsdp import apply_fsdp, expert_mesh, free_gathered, read_shards, shard_mesh
from flexrlhf.engines.torch.update import Gradients, TrainedParameter, Update
from flexrlhf.operators.columns import Column
from flexrlhf.weights.parameters import ParameterName


class TorchEngine(Lender):
    """Part of a model on this rank; ``Engine`` in engines/base.py documents the methods.

    A trained 16-bit model that FSDP2 does not shard has float32 master weights next to its parameters.
    """

    def __init__(self, context: EngineContext) -> None:
        placed, settings = context.placed, context.placed.settings
        self.num_requests = 0
        self._is_sharded = placed.split != "whole"
        skeleton = Skeleton.of(context)
        self._model = skeleton.model
        self.config = self._model.config
        head = skeleton.use_kernels(context)
        names = _shard(skeleton, head, context)
        self._masters: dict[str, Tensor] = {}
        if not self._is_sharded:
            self._masters = _cast(self._model, DTYPES[settings.dtype])
        self._await_device = context.await_device
        self._shares_passes = placed.shares_passes
        self._passes = Passes.of(context, self._model, self._model, head, placed.in_lockstep)
        self._host_offload = HostOffload(context.device, context.copies)
        self._biases = self._passes.router_biases
        self._update = self._make_update(context, names) if placed.trained else None
        skeleton.checkpoint_layers(context)

    def _make_update(self, context: EngineContext, names: TensorParallelNames) -> Update:
        """Make the optimizer of the trained parameters, and hooks that add up 16-bit gradients in float32."""
        settings, ranks = context.placed.settings, context.ranks
        live = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        trained = [
            TrainedParameter(
                self._masters.get(name, live[name]),
                is_tp_shard=name in names.split,
                is_partial=name in names.partial,
                has_experts=ranks.experts is not None and ParameterName(name).is_of_experts,
            )
            for name in sorted(live)
        ]
        for name, master in self._masters.items():
            live[name].register_post_accumulate_grad_hook(_accumulate_into(master))
        return Update(
            settings.optimizer,
            Gradients(trained, ranks.same_part, ranks.tp, self._copies(ranks), self._expert_copies(ranks)),
            context.num_updates,
            is_scaled=settings.dtype == "float16",
            changed=self._updated,
            await_device=context.await_device,
        )

    def _copies(self, ranks: ModelRanks) -> RankGroup | None:
        """Ranks that store the same part of the model; None: this one alone."""
        if not self._is_sharded:
            return ranks.same_part
        return None if ranks.in_node is None else ranks.in_node.copies

    def _expert_copies(self, ranks: ModelRanks) -> ExpertRanks | None:
        """Ranks with other experts and with the same ones, where gradients of experts have to be summed over these;
        None: FSDP2 sums them, or every rank has all experts."""
        return None if self._is_sharded else ranks.experts

    def generate(self, batch: Batch, sampling: Sampling, ahead: Sequence[Batch] = ()) -> dict[str, Tensor]:
        self.num_requests += len(batch)
        with self._gathering():
            return self._passes.generate(batch, sampling)

    def advance(self, source: RowSource, sampling: Sampling) -> None:
        if self._shares_passes or not self._passes.pass_settings.slots:
            # other ranks take part in each pass, or a wave ends as a whole
            super().advance(source, sampling)
        else:
            self.num_requests += self._passes.advance(source, sampling)

    def drop_kept_rows(self) -> None:
        self._passes.drop_kept_rows()

    def forward(self, batch: Batch, columns: Sequence[Column], adapters: bool = True) -> dict[str, Tensor]:
        with self._gathering():
            computed = self._passes.forward(batch, columns, adapters)
        self._end_call()
        return computed

    def backward(self, parts: Sequence[tuple[Batch, Loss]]) -> Moments:
        update = self._update
        assert update is not None, "this placed model is not trained"
        with self._gathering(), self._passes.recomputing():
            return self._passes.backward(parts, lambda value, _: update.scaled(value).backward())

    def step(self, parts: Sequence[tuple[Batch, Loss]]) -> Moments:
        assert self._update is not None, "this placed model is not trained"
        try:
            return self._update.step()
        except NonFiniteStep as error:
            with self._gathering():
                error.first = self._passes.first_non_finite(parts)
            raise
        finally:
            self._passes.end_step()

    def losses(self, parts: Sequence[tuple[Batch, Loss]]) -> Moments:
        with self._gathering():
            statistics = self._passes.losses(parts)
        self._end_call()
        return statistics

    def _end_call(self) -> None:
        """Await the device if other ranks have taken part in the passes of a call."""
        if self._shares_passes:
            self._await_device()

    def weights(self) -> dict[str, Tensor]:
        return self._lendable() | {name: local(master) for name, master in self._masters.items()} | self._biases

    def _lendable(self) -> dict[str, Tensor]:
        return {name: local(parameter) for name, parameter in self._model.named_parameters()}

    def point_to(self, tensors: Mapping[str, Tensor]) -> None:
        own = dict(self._model.named_parameters())
        for name, values in tensors.items():
            parameter = own[name]
            if isinstance(parameter, DTensor):
                parameter._local_tensor = values
            else:
                parameter.data = values

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        own = dict(self._model.named_parameters()) | self._biases
        for name, values in weights.items():
            target = local(own[name])
            target.copy_(values.view(target.shape))

    def training_state(self) -> TrainingState:
        assert self._update is not None, "this placed model is not trained"
        tensors: dict[str, dict[str, StateTensor]] = defaultdict(dict)
        for name, live in self._model.named_parameters():
            if live.requires_grad:
                parameter = self._masters.get(name, live)
                for kind, tensor in {TrainingState.WEIGHTS: parameter, **self._update.moments(parameter)}.items():
                    tensors[kind][name] = StateTensor(self._host_offload.readable(local(tensor)))
        tensors[TrainingState.WEIGHTS] |= {name: StateTensor(bias) for name, bias in self._biases.items()}
        return TrainingState(tensors, self._update.numbers)

    def load_numbers(self, numbers: Mapping[str, float]) -> None:
        assert self._update is not None, "this placed model is not trained"
        self._update.load_numbers(numbers)

    def _usage(self) -> MemoryUsage:
        live = [local(parameter) for parameter in self._model.parameters()] + [*self._biases.values()]
        return MemoryUsage(
            weights=sum(tensor.nbytes for tensor in live),
            gradients=self._update.gradient_bytes if self._update else 0,
            optimizer=sum(tensor.nbytes for tensor in self._optimizer_tensors()),
        )

    def _tensors(self) -> list[Tensor]:
        return [*map(local, self._model.parameters()), *self._optimizer_tensors()]

    def close(self) -> None:
        del self._model, self._passes, self._update, self._masters, self._biases

    def _optimizer_tensors(self) -> list[Tensor]:
        masters = [local(master) for master in self._masters.values()]
        return masters + (self._update.state() if self._update else [])

    def _updated(self) -> None:
        """Copy the master weights into the 16-bit parameters, and balance experts."""
        self._passes.balance_experts()
        for name, parameter in self._model.named_parameters():
            if name in self._masters:
                local(parameter).copy_(local(self._masters[name]))

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Free the weights that the passes inside have gathered."""
        yield
        if self._is_sharded:
            free_gathered(self._model)


def _shard(skeleton: Skeleton, head: LanguageHead | None, context: EngineContext) -> TensorParallelNames:
    """Shard the model as placed, read this rank's part of it, and move it to its device.

    Trained parameters are float32 afterwards.
    """
    placed, settings, ranks, model = context.placed, context.placed.settings, context.ranks, skeleton.model
    dtype = DTYPES[settings.dtype]
    skeleton.replace_placeholders(
        lambda p: torch.empty(p.shape, dtype=torch.float32 if p.requires_grad else dtype, device="meta")
    )
    group, ep = ranks.tp.group, None if ranks.experts is None else ranks.experts.parts.group
    of_experts = frozenset[str]() if group is ep is None else ExpertSplit(ep, group).apply(model, model.config)
    names = skeleton.split_layers(head, group)
    if group is not None:
        names = replace(names, split=names.split | of_experts)
    if placed.split == "whole":
        read_shards(skeleton, context.device)
        model.to(context.device)
        return names
    mesh = shard_mesh(context)
    assert mesh is not None, "shards need several ranks"
    for parameter in [parameter for parameter in model.parameters() if not parameter.requires_grad]:
        swap_values(parameter, parameter.detach().to(dtype))
    # moves weights that are loaded to the device layer by layer, and keeps the shards there
    apply_fsdp(model, mesh, settings.zero, dtype, expert_mesh(context))
    read_shards(skeleton, context.device)
    return names


@torch.no_grad()
def _cast(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Cast the parameters, not the buffers, to ``dtype``. Returns the trained ones as they were, float32, by name."""
    if dtype == torch.float32:
        return {}
    masters = {}
    for name, parameter in list(model.named_parameters()):
        before = parameter.detach()
        if parameter.requires_grad:
            masters[name] = before
        swap_values(parameter, before.to(dtype))
    return masters


def _accumulate_into(master: Tensor) -> Callable[[Tensor], None]:
    """Return a hook that adds the 16-bit gradient of a parameter to the float32 one of ``master``, and frees it."""

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        # exact: each 16-bit number is a float32 one
        master.grad = parameter.grad.float() if master.grad is None else master.grad.add_(parameter.grad)
        parameter.grad = None

    return hook
