"""Meshes of the models of a step that a system tries, in its order of preference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from benchmarks.systems.footprint import PER_PARAMETER, capacity_bytes, frozen_bytes, trained_bytes
from benchmarks.systems.profiles import MeshRule, System
from benchmarks.systems.workload import ACTOR, CRITIC, REF, REWARD, ROLLOUT, SystemPlacement, Workload
from flexrlhf.config.axes import ParallelDims
from flexrlhf.guideline.costs.cost_model import Mesh, Transformer


def mesh_of(workload: Workload, size: int, tp: int = 1, pp: int = 1, zero: int = 0) -> Mesh:
    dp = max(1, size // (tp * pp))
    return Mesh(workload.device, workload.links, dp, ParallelDims(tp, pp), min(size, workload.per_node), zero)


def _powers(limit: int) -> tuple[int, ...]:
    return tuple(2**power for power in range(max(1, limit).bit_length()))


def splits(
    workload: Workload, size: int, layout: MeshRule, layers: int, stages: tuple[int, ...] = ()
) -> Iterator[Mesh]:
    """Yield the meshes to try, preferred ones first."""
    node = min(size, workload.per_node)
    if workload.train_split:
        yield mesh_of(workload, size, *workload.train_split, zero=1)
        return
    if layout == "ZeRO":
        yield from (mesh_of(workload, size, zero=stage) for stage in stages)
        return
    widths = (max(_powers(node)),) if layout == "symmetric" else _powers(node)
    pairs = [(tp, pp) for tp in widths for pp in _powers(min(size // tp, layers))]
    for tp, pp in sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[1])):
        if size % (tp * pp) == 0:
            yield mesh_of(workload, size, tp, pp, 1)


def _as_frozen(mesh: Mesh) -> Mesh:
    """Return ``mesh`` for weights that are only read: whole on every replica, unless even training shards them."""
    return mesh if mesh.zero == 3 else replace(mesh, zero=0)


@dataclass(frozen=True)
class ModelMeshes:
    """Meshes of one candidate.

    models:    meshes of trained and read models, by role
    generate:  mesh of generation
    offload:   whether gradients and optimizer are in host memory
    """

    models: Mapping[str, Mesh]
    generate: Mesh
    offload: bool = False


def mesh_candidates(workload: Workload, system: System, placement: SystemPlacement) -> Iterator[ModelMeshes]:
    """Yield a candidate for each mesh of the largest model; other models take their first that uses no more of a
    device."""
    largest = max(
        workload.models, key=lambda role: workload.models[role].parameters * (8 if role in (ACTOR, CRITIC) else 1)
    )
    for offload in {"no": (False,), "at last": (False, True), "always": (True,)}[system.offloads]:
        for mesh in role_meshes(workload, system, placement, largest):
            limit = state_bytes(workload, system, largest, mesh, offload)
            models: dict[str, Mesh] = {}
            for role in workload.models:
                models[role] = _mesh_within(
                    workload, system, placement, role, ModelMeshes(models, mesh, offload), limit
                )
            for generate in _generation_meshes(workload, system, placement, models):
                yield ModelMeshes(models, generate, offload)


def role_meshes(workload: Workload, system: System, placement: SystemPlacement, role: str) -> Iterator[Mesh]:
    yield from splits(workload, placement.devices(role), system.layout, workload.models[role].layers, system.stages)


def _mesh_within(
    workload: Workload, system: System, placement: SystemPlacement, role: str, chosen: ModelMeshes, limit: float
) -> Mesh:
    """Return the first mesh of ``role`` that uses at most ``limit`` bytes, else the last. A model that is only read has
    the mesh of the trained model of its size on as many devices. ``chosen.generate``: mesh of the largest model."""
    like = {REF: ACTOR, REWARD: CRITIC}.get(role, role)
    if like in chosen.models and placement.devices(like) == placement.devices(role):
        return _as_frozen(chosen.models[like])
    options = [mesh for mesh in role_meshes(workload, system, placement, role) if mesh.zero == chosen.generate.zero]
    if role not in (ACTOR, CRITIC):
        options = [_as_frozen(mesh) for mesh in options]
    fitting = (mesh for mesh in options if state_bytes(workload, system, role, mesh, chosen.offload) <= limit)
    return next(fitting, options[-1])


def state_bytes(workload: Workload, system: System, role: str, mesh: Mesh, offload: bool) -> float:
    """Return the bytes of ``role`` on one device."""
    model = workload.models[role]
    if is_streamed(system, mesh, offload):
        return 0.0
    if role not in (ACTOR, CRITIC):
        return frozen_bytes(model, mesh)
    return trained_bytes(model, mesh, PER_PARAMETER[system.trainer], offload)


def is_streamed(system: System, mesh: Mesh, offload: bool) -> bool:
    """Whether the weights of a model are in host memory, from which each pass reads them."""
    return offload and system.streams and mesh.zero == 3


def _generation_meshes(
    workload: Workload, system: System, placement: SystemPlacement, models: Mapping[str, Mesh]
) -> Iterator[Mesh]:
    actor, own = models[ACTOR], placement.groups.get(ROLLOUT, placement.groups[ACTOR])
    size = sum(placement.blocks[index] for index in own)
    if system.gathers in ("every step", "at once"):
        each = system.gathers == "every step" or not _fits_whole(workload, workload.models[ACTOR])
        yield replace(actor, zero=3 if each and actor.zero == 3 else 0)
    elif system.gathers == "tensor parallel":
        yield mesh_of(workload, size, max(_powers(min(size, workload.per_node))) if actor.zero == 3 else 1)
    elif system.layout == "symmetric":
        yield replace(mesh_of(workload, size, actor.dims.tp, actor.dims.pp), zero=0)
    else:
        widths = (workload.generate_tp,) if workload.generate_tp else _powers(min(size, workload.per_node))
        yield from (mesh_of(workload, size, tp) for tp in widths)


def _fits_whole(workload: Workload, model: Transformer) -> bool:
    """Whether a gathered copy takes at most half of the device."""
    return 2 * model.parameters <= capacity_bytes(workload.device) / 2
