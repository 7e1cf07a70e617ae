"""Shard a transformers model over ranks: tensor parallel by the model's plan, then PyTorch's FSDP2.

ZeRO 3 frees the gathered weights of a layer after every pass of the layer, ZeRO 2 at the end of a call; between calls
both keep shards of weights, gradients and optimizer state alone (Rajbhandari et al. 2020; Zhao et al. 2023).

With ``shard: node`` FSDP2 shards over the ranks of a node, and ``gradients.py`` sums shards over the nodes once in an
optimizer step (hybrid sharding). On its own mesh of two dims FSDP2 would sum them for every micro-batch; what it adds
up instead (``set_requires_all_reduce``) needs micro-batches that all reach the same parameters, which losses of
different heads do not.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from flexrlhf.engines.base import EngineContext
from flexrlhf.engines.language_head import LanguageHead
from flexrlhf.engines.optimizers import local
from flexrlhf.engines.skeletons import Skeleton, swap_values
from flexrlhf.engines.torch.parallel_linear import ColumnLinear, ParallelStyle, RowLinear, shard_adapted
from flexrlhf.weights.shards import tensor_parallel_dim

_STYLES: dict[str, ParallelStyle] = {"colwise": ColumnLinear, "rowwise": RowLinear}
_PARTIAL = "replicated_with_grad_allreduce"
"""transformers' style of weights that each tensor-parallel rank applies to its own heads."""


def make_meshes(context: EngineContext) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Return the meshes of the ranks that FSDP2 shards over and of the tensor-parallel group; None for one rank."""
    device_type, tp = context.device.type, context.tp.group
    sharing = context.same_part if context.in_node is None else context.in_node.shards
    dp = sharing.group
    if tp is not None and dp is not None:
        names = _axis("dp", dp), _axis("tp", tp)
        ranks = torch.tensor([each for each in context.placed.layout.tp_sets if set(each) & set(sharing.ranks)])
        mesh = DeviceMesh.from_group([dp, tp], device_type, mesh=ranks, mesh_dim_names=names)
        return mesh[names[0]], mesh[names[1]]
    return _one_axis("dp", dp, device_type), _one_axis("tp", tp, device_type)


def _one_axis(axis: str, group: dist.ProcessGroup | None, device_type: str) -> DeviceMesh | None:
    return None if group is None else DeviceMesh.from_group(group, device_type, mesh_dim_names=(_axis(axis, group),))


def _axis(axis: str, group: dist.ProcessGroup) -> str:
    """Name of a mesh axis, different for every group.

    torch takes meshes of equal ranks and names for one, and caches plans for it: after the groups of an earlier run are
    destroyed, such a plan would refer to them.
    """
    return f"{axis}_{group.group_name}"


def apply_tensor_parallel(model: PreTrainedModel, head: LanguageHead | None, mesh: DeviceMesh) -> frozenset[str]:
    """Shard the layers by the model's own plan, and the head along the vocabulary.

    Returns the names of parameters whose gradients are partial sums over the tensor-parallel ranks.
    """
    base_name = model.base_model_prefix
    plan: dict[str, str] = model.config.base_model_tp_plan
    styles = {f"{base_name}.{path}": _STYLES[style] for path, style in plan.items() if style in _STYLES}
    ends = [path.replace("*", "").strip(".").split("..")[-1] for path, style in plan.items() if style == _PARTIAL]
    partial = {name for name, _ in model.named_parameters() if name.rpartition(".")[0].endswith(tuple(ends))}
    for name, module in list(model.named_modules()):
        style = next((style for path, style in styles.items() if fnmatchcase(name, path)), None)
        if style is not None and hasattr(module, "base_layer"):
            partial |= {f"{name}.{each}" for each in shard_adapted(module, style, mesh)}
        elif style is not None:
            model.set_submodule(name, style(module, mesh))
    if head is not None and not model.config.tie_word_embeddings:
        _shard_head(head, mesh)
    return frozenset(partial)


def _shard_head(head: LanguageHead, mesh: DeviceMesh) -> None:
    """Replace the head's weight by this rank's shard, where the mesh divides the vocabulary."""
    weight = head.weight
    if tensor_parallel_dim("lm_head.weight", tuple(weight.shape), mesh.size()) is None:
        return
    rows = weight.detach().chunk(mesh.size())[mesh.get_local_rank()]
    rows = rows if rows.is_meta else rows.to(mesh.device_type, copy=True)
    shard = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)
    head.weight = nn.Parameter(shard, requires_grad=weight.requires_grad)
    head.group = mesh.get_group()


def apply_fsdp(model: PreTrainedModel, mesh: DeviceMesh, zero: int, compute_dtype: torch.dtype) -> None:
    """Shard every layer, and the parameters outside layers, over ``mesh``. Gradients are summed, in float32."""
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    settings: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": zero == 3}
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module, **settings)
    fully_shard(model, **settings)
    for unit in _units(model):
        # contributions of ranks add up to the loss, so their gradients are summed and not averaged
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def read_shards(skeleton: Skeleton, device: torch.device) -> None:
    """Give the parameters on the meta device their values on ``device``: this rank's part, one after the other."""
    for name, parameter in skeleton.model.named_parameters():
        if name in skeleton.stored:
            values = torch.empty_like(local(parameter), device=device)
            skeleton.read(name, values)
            swap_values(parameter, _with_local(parameter, values))
    if _units(skeleton.model):
        # units of FSDP2 then take over the new tensors, padded
        skeleton.model._apply(lambda tensor: tensor)


def _with_local(like: Tensor, values: Tensor) -> Tensor:
    """Return ``values``, as the local part of a DTensor where ``like`` is one."""
    if not isinstance(like, DTensor):
        return values
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(values, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def free_gathered(model: nn.Module) -> None:
    """Free gathered weights, which the next update would make stale, and keep the shards."""
    for unit in _units(model):
        unit.reshard()


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
