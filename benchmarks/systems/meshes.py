"""Meshes of the models of a step: what fits, as each system prefers it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from benchmarks.systems.profiles import Layout, System
from benchmarks.systems.tasks import ACTOR, CRITIC, REF, REWARD, ROLLOUT, Placement, Task
from flexrlhf.guideline.costs.cost_model import Mesh
from flexrlhf.guideline.costs.footprint import FLOAT_GRADIENTS, MIXED, capacity_bytes, frozen_bytes, trained_bytes
from flexrlhf.guideline.costs.transformer import Transformer


def mesh_of(task: Task, size: int, tp: int = 1, pp: int = 1, zero: int = 0) -> Mesh:
    dp = max(1, size // (tp * pp))
    return Mesh(task.device, task.links, dp, tp, pp, min(size, task.per_node), zero)


def _powers(limit: int) -> tuple[int, ...]:
    return tuple(2**power for power in range(max(1, limit).bit_length()))


def splits(task: Task, size: int, layout: Layout, layers: int, stages: tuple[int, ...] = ()) -> Iterator[Mesh]:
    """Meshes to try, those that are preferred first."""
    node = min(size, task.per_node)
    if task.train_split:
        yield mesh_of(task, size, *task.train_split, zero=1)
        return
    if layout == "ZeRO":
        yield from (mesh_of(task, size, zero=stage) for stage in stages)
        return
    widths = (max(_powers(node)),) if layout == "symmetric" else _powers(node)
    cuts = [(tp, pp) for tp in widths for pp in _powers(min(size // tp, layers))]
    for tp, pp in sorted(cuts, key=lambda cut: (cut[0] * cut[1], cut[1])):
        if size % (tp * pp) == 0:
            yield mesh_of(task, size, tp, pp, 1)


def _as_frozen(mesh: Mesh) -> Mesh:
    """Weights that are only read: whole on every replica, unless even training splits them."""
    return mesh if mesh.zero == 3 else replace(mesh, zero=0)


@dataclass(frozen=True)
class Layouts:
    """The meshes of one candidate: of trained and read models by role, and of generation."""

    models: Mapping[str, Mesh]
    generate: Mesh
    offload: bool = False


def layouts_of(task: Task, system: System, placement: Placement) -> Iterator[Layouts]:
    """One for each mesh of the largest model; the others take their first that holds no more of a device."""
    largest = max(task.models, key=lambda role: task.models[role].parameters * (8 if role in (ACTOR, CRITIC) else 1))
    for offload in (False, True) if system.offloads else (False,):
        for mesh in role_meshes(task, system, placement, largest):
            limit = state_bytes(task, system, largest, mesh, offload)
            models: dict[str, Mesh] = {}
            for role in task.models:
                models[role] = _beside(task, system, placement, role, Layouts(models, mesh, offload), limit)
            for generate in _generation_meshes(task, system, placement, models):
                yield Layouts(models, generate, offload)


def role_meshes(task: Task, system: System, placement: Placement, role: str) -> Iterator[Mesh]:
    yield from splits(task, placement.devices(role), system.layout, task.models[role].layers, system.stages)


def _beside(task: Task, system: System, placement: Placement, role: str, chosen: Layouts, limit: float) -> Mesh:
    """The first mesh of ``role`` that holds no more than ``limit`` bytes, else the last. A model that is only read lies
    as the trained one that it is like, on as many devices. ``chosen.generate``: the mesh of the largest model."""
    like = {REF: ACTOR, REWARD: CRITIC}.get(role, role)
    if like in chosen.models and placement.devices(like) == placement.devices(role):
        return _as_frozen(chosen.models[like])
    options = [mesh for mesh in role_meshes(task, system, placement, role) if mesh.zero == chosen.generate.zero]
    if role not in (ACTOR, CRITIC):
        options = [_as_frozen(mesh) for mesh in options]
    fitting = (mesh for mesh in options if state_bytes(task, system, role, mesh, chosen.offload) <= limit)
    return next(fitting, options[-1])


def state_bytes(task: Task, system: System, role: str, mesh: Mesh, offload: bool) -> float:
    """Of ``role`` on one of its devices."""
    model = task.models[role]
    if role not in (ACTOR, CRITIC):
        return frozen_bytes(model, mesh)
    return trained_bytes(model, mesh, MIXED if system.layout == "ZeRO" else FLOAT_GRADIENTS, offload)


def _generation_meshes(task: Task, system: System, placement: Placement, models: Mapping[str, Mesh]) -> Iterator[Mesh]:
    actor, own = models[ACTOR], placement.where.get(ROLLOUT, placement.where[ACTOR])
    size = sum(placement.blocks[index] for index in own)
    if system.gathers in ("every step", "at once"):
        each = system.gathers == "every step" or not _fits_whole(task, task.models[ACTOR])
        yield replace(actor, zero=3 if each and actor.zero == 3 else 0)
    elif system.gathers == "tensor parallel":
        yield mesh_of(task, size, max(_powers(min(size, task.per_node))) if actor.zero == 3 else 1)
    elif system.layout == "symmetric":
        yield replace(mesh_of(task, size, actor.tp, actor.pp), zero=0)
    else:
        widths = (task.generate_tp,) if task.generate_tp else _powers(min(size, task.per_node))
        yield from (mesh_of(task, size, tp) for tp in widths)


def _fits_whole(task: Task, model: Transformer) -> bool:
    """Whether a gathered copy leaves half of the device to the rest."""
    return 2 * model.parameters <= capacity_bytes(task.device) / 2
