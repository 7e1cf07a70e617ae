"""Optimizer step of a stage by Megatron-Core: float32 weights and moments, with zero 1 a range of them on each rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from flexrlhf.api import ModelSpec
from flexrlhf.api.engine import (
    HostOffload,
    Moments,
    NonFiniteStep,
    ScheduledOptimizer,
    StateTensor,
    TrainingState,
    as_world,
    storage_bytes,
)
from flexrlhf.engines.megatron.config import optimizer_config, torch_optimizers
from flexrlhf.engines.megatron.stage import Named


class StageUpdate:
    """Optimizer, learning-rate schedule and gradients of the stage on this rank.

    settings:     of the placed model.
    module:       the stage, with buffers of its gradients.
    groups:       of this rank.
    world:        all ranks of the model.
    num_updates:  optimizer steps of the run.
    copies:       ranks of a replica that have the same part of the model.

    ``gradient_bytes``: bytes of the gradients of the last optimizer step; 0 before the first.
    """

    def __init__(
        self,
        settings: ModelSpec,
        module: DistributedDataParallel,
        groups: ProcessGroupCollection,
        world: dist.ProcessGroup,
        num_updates: int,
        copies: int = 1,
    ) -> None:
        # the norm is over a replica, or with zero 1 over ranges of all ranks, each once
        self._copies = 1 if settings.zero == 1 else copies
        self._settings, self._module, self._groups = settings, module, groups
        with as_world(world), torch_optimizers():
            chained = get_megatron_optimizer(
                optimizer_config(settings),
                [module],
                # weights of one dimension decay, too, as in every engine
                config_overrides={},
                use_gloo_process_groups=False,
                pg_collection=groups,
            )
        (self._wrapper,) = chained.chained_optimizers
        for group in self._wrapper.optimizer.param_groups if settings.optimizer.name != "sgd" else ():
            # torch's fused kernel, as in every engine
            group["fused"] = True
        self._optimizer = ScheduledOptimizer(settings.optimizer, self._wrapper.optimizer, num_updates)
        self._released, self.gradient_bytes = HostOffload(self.gradients[0].device), 0
        self._free()

    def release(self) -> None:
        """Free the gradients until ``allocate``; Megatron would keep their buffers."""
        self.gradient_bytes = storage_bytes(self.gradients)
        self._free()

    def _free(self) -> None:
        self._released.offload(self.gradients, keeps=False)
        self._is_released = True

    def allocate(self) -> None:
        """Allocate the gradients as 0, unless some have been added since the last step."""
        if not self._is_released:
            return
        self._released.reload()
        self._is_released = False
        self._module.zero_grad_buffer()
        self._wrapper.zero_grad()

    @torch.no_grad()
    def step(self) -> Moments:
        """Reduce and clip the gradients, update the parameters; return the statistics of the update.

        For a gradient that is not finite it changes no parameter and raises NonFiniteStep.
        """
        # losses are divided already, so that no number of tokens divides the sums over ranks
        finalize_model_grads([self._module], None, self._groups)
        self._wrapper.prepare_grads()
        counted = float(self._wrapper.get_grad_norm()) / self._copies**0.5
        norm = torch.tensor(counted, device=self.gradients[0].device)
        rate = self._optimizer.learning_rate
        if not torch.isfinite(norm):
            raise NonFiniteStep(self._optimizer.statistics(rate, norm, is_scaled=True, skipped=True))
        self._clip(norm)
        self._wrapper.step_with_ready_grads()
        self._optimizer.end_update()
        return self._optimizer.statistics(rate, norm, is_scaled=False, skipped=False)

    def _clip(self, norm: Tensor) -> None:
        limit = self._settings.optimizer.max_grad_norm
        factor = 1.0 if limit is None else min(1.0, limit / (float(norm) + 1e-6))
        for parameter in self._wrapper.get_parameters() if factor < 1 else ():
            parameter.grad.mul_(factor)

    @property
    def gradients(self) -> list[Tensor]:
        """Buffers of the gradients."""
        return [buffer.grad_data for buffer in self._module.buffers]

    def state_tensors(self) -> list[Tensor]:
        """Master weights and moments on this rank."""
        masters = [each.detach() for each in self._wrapper.get_parameters()]
        own = {parameter.untyped_storage().data_ptr() for parameter in self._module.parameters()}
        apart = [master for master in masters if master.untyped_storage().data_ptr() not in own]
        return [*apart, *self._optimizer.tensors()]

    def tensors(self, named: Named) -> dict[str, dict[str, StateTensor]]:
        """Return the training state on this rank: kind → parameter → tensor."""
        tensors: dict[str, dict[str, StateTensor]] = defaultdict(dict)
        by_parameter: dict[nn.Parameter, list[str]] = defaultdict(list)
        for name, rows in named.items():
            if rows.parameter.requires_grad:
                by_parameter[rows.parameter].append(name)
        for parameter, names in by_parameter.items():
            master, inside = self._master(parameter)
            moments = self._optimizer.moments(master) if len(inside) else {}
            for kind, values in {TrainingState.WEIGHTS: master, **moments}.items():
                for name, tensor in _pieces(names, named, values.detach().reshape(-1), inside):
                    tensors[kind][name] = tensor
        return dict(tensors)

    def _master(self, parameter: nn.Parameter) -> tuple[Tensor, range]:
        """Return the float32 tensor that the optimizer updates for ``parameter``, and its range of that, flattened."""
        if self._settings.zero == 1:
            if parameter not in self._wrapper.model_param_gbuf_map:
                return torch.empty(0), range(0)
            found = self._wrapper._get_model_param_range_map(parameter)["param"]
            group, place = self._wrapper.model_param_group_index_map[parameter]
            return self._wrapper.optimizer.param_groups[group]["params"][place], range(found.start, found.end)
        return getattr(parameter, "main_param", parameter), range(parameter.numel())

    @property
    def numbers(self) -> dict[str, float]:
        """Numbers of the training state (``TrainingState``)."""
        return {"updates": float(self._optimizer.num_updates), "loss_scale": 1.0, "good_steps": 0.0}

    def load_numbers(self, numbers: Mapping[str, float]) -> None:
        """Set the numbers of the training state."""
        self._optimizer.num_updates = int(numbers["updates"])


def _pieces(names: list[str], named: Named, values: Tensor, inside: range) -> Iterator[tuple[str, StateTensor]]:
    """Yield the piece of each of ``names`` in ``values``, the range ``inside`` of their flattened parameter."""
    for name in names:
        flat = named[name].flat
        start, stop = max(flat.start, inside.start), min(flat.stop, inside.stop)
        if start < stop:
            piece = values[start - inside.start : stop - inside.start]
            yield name, StateTensor(piece, range(start - flat.start, stop - flat.start))
