"""Cut a transformers model over ranks with PyTorch's own parts: tensor parallel by the model's plan, then FSDP2.

ZeRO 3 frees the gathered layers after every pass of a layer, ZeRO 2 at the end of a call; between calls both hold
shards of weights, gradients and optimizer state (Rajbhandari et al. 2020; Zhao et al. 2023).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from flexrlhf.engines.base import EngineContext
from flexrlhf.engines.head import LanguageHead
from flexrlhf.weights.shards import tensor_parallel_dim

_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_PARTIAL = "replicated_with_grad_allreduce"
"""transformers' word for weights that each tensor-parallel rank applies to its own heads."""


def make_meshes(context: EngineContext) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """The meshes of replicas and of tensor-parallel ranks, over groups that exist already. None: one rank."""
    kind, replicas, tp = context.device.type, context.dp.group, context.tp.group
    if tp is not None and replicas is not None:
        names = _axis("dp", replicas), _axis("tp", tp)
        ranks = torch.tensor(context.placed.layout.tp_sets)
        mesh = DeviceMesh.from_group([replicas, tp], kind, mesh=ranks, mesh_dim_names=names)
        return mesh[names[0]], mesh[names[1]]
    return _one_axis("dp", replicas, kind), _one_axis("tp", tp, kind)


def _one_axis(axis: str, group: dist.ProcessGroup | None, kind: str) -> DeviceMesh | None:
    return None if group is None else DeviceMesh.from_group(group, kind, mesh_dim_names=(_axis(axis, group),))


def _axis(axis: str, group: dist.ProcessGroup) -> str:
    """A name of its own for every group: torch takes meshes of equal ranks and names for one, and caches plans for it,
    which after the groups of an earlier run have gone would look for them."""
    return f"{axis}_{group.group_name}"


def apply_tensor_parallel(model: PreTrainedModel, head: LanguageHead | None, mesh: DeviceMesh) -> frozenset[str]:
    """Cut the layers by the model's own plan and the head along the vocabulary.

    Returns the names of parameters whose gradients are partial sums over the tensor-parallel ranks.
    """
    base_name = model.base_model_prefix
    plan: dict[str, str] = model.config.base_model_tp_plan
    styles = {f"{base_name}.{path}": _STYLES[style]() for path, style in plan.items() if style in _STYLES}
    # every rank loaded the whole model, so nothing needs to be sent
    parallelize_module(model, mesh, styles, src_data_rank=None)
    if head is not None and not model.config.tie_word_embeddings:
        _shard_head(head, mesh)
    partial = [path.replace("*", "").strip(".") for path, style in plan.items() if style == _PARTIAL]
    ends = tuple(path.split("..")[-1] for path in partial)
    return frozenset(name for name, _ in model.named_parameters() if ends and name.rpartition(".")[0].endswith(ends))


def _shard_head(head: LanguageHead, mesh: DeviceMesh) -> None:
    weight = head.weight
    if tensor_parallel_dim("lm_head.weight", tuple(weight.shape), mesh.size()) is None:
        return
    rows = weight.detach().chunk(mesh.size())[mesh.get_local_rank()].to(mesh.device_type, copy=True)
    cut = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)
    head.weight = nn.Parameter(cut, requires_grad=weight.requires_grad)
    head.group = mesh.get_group()


def apply_fsdp(model: PreTrainedModel, mesh: DeviceMesh, zero: int, compute_dtype: torch.dtype) -> None:
    """Shard every layer, and what is outside layers, over ``mesh``. Gradients are summed, in float32."""
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    settings: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": zero == 3}
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module, **settings)
    fully_shard(model, **settings)
    for unit in _units(model):
        # what a rank contributes is its share of the loss already, so gradients add up
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def free_gathered(model: nn.Module) -> None:
    """Hold shards alone: what a pass left gathered would be old after the next update."""
    for unit in _units(model):
        unit.reshard()


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
