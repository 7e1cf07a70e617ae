"""Partitions of ZeRO-3: made tensor by tensor of a model that has no numbers yet, and found in its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def partition(model: nn.Module, mpu: Any, config: Mapping[str, Any]) -> None:
    """Partition the parameters of ``model`` over the data-parallel group of ``mpu``, the world of this call.

    ``deepspeed.initialize`` would do so too, and broadcast every whole tensor before, though the ranks have the same
    numbers or read them afterwards.
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
    """Return the numbers of ``parameter`` on a rank of its group: at stage 3 a range of the flattened tensor, without
    padding.
    """
    if not hasattr(parameter, "ds_tensor"):
        whole: Tensor = parameter.detach()
        return whole
    stored: Tensor = parameter.ds_tensor.detach().view(-1)
    start = rank * len(stored)
    return stored[: max(0, min(len(stored), parameter.ds_numel - start))]
