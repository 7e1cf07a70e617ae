"""Shard a transformers model over data-parallel ranks by PyTorch's FSDP2.

ZeRO 3 frees the gathered weights of a layer after every pass of the layer, ZeRO 2 at the end of a call; between calls
both keep shards of weights, gradients and optimizer state alone (Rajbhandari et al. 2020; Zhao et al. 2023).

With ``shard: node`` FSDP2 shards over the ranks of a node, and ``gradients.py`` sums shards over the nodes once in an
optimizer step (hybrid sharding). On its own mesh of two dims FSDP2 would sum them for every micro-batch; what it adds
up instead (``set_requires_all_reduce``) needs micro-batches that all reach the same parameters, which losses of
different heads do not.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from flexrlhf.engines.base import EngineContext
from flexrlhf.engines.experts import has_experts
from flexrlhf.engines.optimizers import local
from flexrlhf.engines.skeletons import Skeleton, swap_values
from flexrlhf.weights.shards import fsdp_dim


def shard_mesh(context: EngineContext) -> DeviceMesh | None:
    """Return the mesh of the ranks that FSDP2 shards over; None for one rank.

    Its axis has a name of its own: torch takes meshes of equal ranks and names for one, and caches plans for it, which
    would refer to groups of an earlier run that are destroyed.
    """
    ranks = context.ranks
    return _mesh((ranks.same_part if ranks.in_node is None else ranks.in_node.shards).group, context)


def expert_mesh(context: EngineContext) -> DeviceMesh | None:
    """Return the mesh of the ranks that FSDP2 shards experts over, this one alone if no other has the same; None: they
    are sharded as other weights."""
    ranks = context.ranks
    return None if ranks.experts is None else _mesh(ranks.experts.same.group or ranks.alone, context)


def _mesh(group: dist.ProcessGroup | None, context: EngineContext) -> DeviceMesh | None:
    if group is None:
        return None
    return DeviceMesh.from_group(group, context.device.type, mesh_dim_names=(f"dp_{group.group_name}",))


def apply_fsdp(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    zero: int,
    compute_dtype: torch.dtype,
    experts: DeviceMesh | None = None,
) -> None:
    """Shard every layer, and the parameters outside layers, over ``mesh``; experts over ``experts``, if any. Gradients
    are summed, in float32."""
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    names = {parameter: name for name, parameter in model.named_parameters()}

    def shard(module: nn.Module, mesh: DeviceMesh) -> None:
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=zero == 3,
            mp_policy=policy,
            shard_placement_fn=lambda each: Shard(fsdp_dim(names[each], tuple(each.shape), mesh.size())),
        )

    for module in model.modules():
        if experts is not None and has_experts(module):
            shard(module, experts)
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            shard(module, mesh)
    shard(model, mesh)
    if any(map(has_experts, model.modules())):
        _gather_ahead(model)
    for unit in _units(model):
        # contributions of ranks add up to the loss, so their gradients are summed and not averaged
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def _gather_ahead(model: nn.Module) -> None:
    """Let each layer gather the weights of the next one, and in backward passes of the one before, once it has its own.

    FSDP2 by itself gathers the next layer's while one computes if the host is ahead of the device, for which it waits
    in layers with experts; and in a backward pass experts that are units of their own when their layer begins.
    """
    layers = [_units(layer) for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    for units, after in pairwise(layers):
        units[0].set_modules_to_forward_prefetch(after)
        after[0].set_modules_to_backward_prefetch(units)
    _units(model)[0].set_modules_to_backward_prefetch(layers[-1])


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
