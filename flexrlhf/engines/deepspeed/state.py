"""Tensors of DeepSpeed on this rank: partitions of ZeRO-3, and float32 weights and moments of each parameter.

Partitions are made tensor by tensor of a model that has no values yet. The training state is live views.

Stage 0 stores whole tensors. Stages 1 and 2 store a range of the concatenated parameters of a group, and map every
parameter to its piece of that (``_hp_mapping``). Stage 3 stores a range of each parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from flexrlhf.api.engine import ScheduledOptimizer, StateTensor, TrainingState

_PARTITIONS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition")
"""Attributes of the optimizers of stages 1 and 2 with this rank's range of each group, in float32."""


def state_tensors_by_kind(
    wrapper: Any, optimizer: ScheduledOptimizer, parameters: Mapping[str, Parameter], rank: int
) -> dict[str, dict[str, StateTensor]]:
    """Return this rank's tensors of the trained ``parameters``: kind → parameter → tensor.

    wrapper:   DeepSpeed's optimizer around ``optimizer``; at stage 0 in float32 the same.
    rank:      of this process in the data-parallel group.
    """
    tensors: dict[str, dict[str, StateTensor]] = defaultdict(dict)
    for name, parameter in parameters.items():
        piece = _piece(wrapper, parameter, rank)
        if piece is None:
            continue
        moments = optimizer.moments(piece.owner)
        for kind, whole in {TrainingState.WEIGHTS: piece.owner.detach(), **moments}.items():
            tensors[kind][name] = StateTensor(piece.of(whole), piece.flat)
    return dict(tensors)


@dataclass(frozen=True)
class _Piece:
    """Part of a parameter inside a tensor that the optimizer updates.

    owner:   that tensor.
    inside:  range of ``owner``; None: all of it, in its shape.
    flat:    range of the flattened parameter; None: what this rank stores of it.
    """

    owner: Tensor
    inside: range | None = None
    flat: range | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of ``tensor``, which is the owner or a moment of it."""
        return tensor if self.inside is None else tensor.narrow(0, self.inside.start, len(self.inside))


def _piece(wrapper: Any, parameter: Any, rank: int) -> _Piece | None:
    """Return the piece of ``parameter`` on this rank; None where a rank of stage 1 or 2 has none."""
    if hasattr(parameter, "ds_tensor"):
        group, start, length = wrapper.grad_position[wrapper.get_param_id(parameter)]
        # the last ranks' ranges are padded
        stored = max(0, min(length, parameter.ds_numel - rank * parameter.ds_tensor.numel()))
        return _Piece(wrapper.fp32_partitioned_groups_flat[group], range(start, start + stored))
    if not hasattr(wrapper, "optimizer"):
        return _Piece(parameter)
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    partitions = next(getattr(wrapper, name) for name in _PARTITIONS if hasattr(wrapper, name))
    inside, of_parameter = mapping.hp_fragment_address, mapping.lp_fragment_address
    return _Piece(
        partitions[mapping.param_group_index],
        range(inside.start, inside.start + inside.numel),
        range(of_parameter.start, of_parameter.start + of_parameter.numel),
    )


def loss_scale(wrapper: Any) -> dict[str, float]:
    """Return ``loss_scale`` and ``good_steps`` of a training state; no scale is one of 1."""
    scaler = getattr(wrapper, "loss_scaler", None)
    if scaler is None or not scaler.dynamic:
        return {"loss_scale": 1.0, "good_steps": 0.0}
    return {"loss_scale": float(scaler.cur_scale), "good_steps": float(scaler.cur_iter - scaler.last_overflow_iter - 1)}


def load_loss_scale(wrapper: Any, numbers: Mapping[str, float]) -> None:
    """Set the loss scale of float16; other types have none."""
    scaler = getattr(wrapper, "loss_scaler", None)
    if scaler is not None and scaler.dynamic:
        scaler.cur_scale, scaler.cur_iter = numbers["loss_scale"], int(numbers["good_steps"])
        scaler.last_overflow_iter = -1


def partition(model: nn.Module, mpu: Any, config: Mapping[str, Any]) -> None:
    """Partition the parameters of ``model`` over the data-parallel group of ``mpu``, the world of this call.

    ``deepspeed.initialize`` would do so too, and broadcast every whole tensor before, though the ranks have the same
    values or read them afterwards.
    """
    from deepspeed.runtime.zero.partition_parameters import Init

    class LocalInit(Init):  # type: ignore[misc]
        """Partitioning without communication."""

        def _zero_init_param(self, param: Any) -> None:
            self._convert_to_deepspeed_param(param)
            param.partition()

    LocalInit(
        module=model,
        data_parallel_group=mpu.get_data_parallel_group(),
        config_dict_or_path=dict(config),
        dtype=next(model.parameters()).dtype,
        mpu=mpu,
    )


def shard(parameter: Any, rank: int) -> Tensor:
    """Return the values of ``parameter`` on a rank of its group: at stage 3 a range of the flattened tensor, without
    padding.
    """
    if not hasattr(parameter, "ds_tensor"):
        whole: Tensor = parameter.detach()
        return whole
    stored: Tensor = parameter.ds_tensor.detach().view(-1)
    start = rank * len(stored)
    return stored[: max(0, min(len(stored), parameter.ds_numel - start))]
