"""Calls of one step, and their seconds in each system."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.systems.meshes import ModelMeshes, is_streamed
from benchmarks.systems.profiles import System
from benchmarks.systems.workload import ACTOR, CRITIC, REF, REWARD, ROLLOUT, SystemPlacement, Workload
from flexrlhf.guideline.costs.cost_model import Call, CostModel, Mesh, Traffic
from flexrlhf.guideline.costs.links import MeshSide, gather_seconds
from flexrlhf.operators.graph import CallKind


@dataclass(frozen=True)
class SystemCall:
    """One call of a step on its mesh.

    name:      role and kind
    role:      role of the model
    call:      the call on one replica
    mesh:      devices
    blocks:    groups of devices that it occupies
    after:     names of calls whose results it reads
    portions:  parts of the rows that run one after the other, each on the whole mesh
    gathered:  bytes that all devices of the mesh gather before it
    """

    name: str
    role: str
    call: Call
    mesh: Mesh
    blocks: tuple[int, ...]
    after: tuple[str, ...] = ()
    portions: int = 1
    gathered: float = 0.0


def calls_of(
    workload: Workload, system: System, placement: SystemPlacement, meshes: ModelMeshes, rows: int
) -> Iterator[SystemCall]:
    """Yield the calls of a step in order, before micro-batches are chosen."""
    models, groups = workload.models, placement.groups
    gathered = _gathered(workload, system, meshes)
    home = groups.get(ROLLOUT, groups[ACTOR])
    call = call_of(workload, system, "generate", ACTOR, meshes.generate, rows)
    yield SystemCall("actor generate", ACTOR, call, meshes.generate, home, gathered=gathered)
    first = ("actor generate",)
    readers = [role for role in (REF, REWARD, CRITIC) if role in models]
    readers += [ACTOR] if system.scores_again else []
    for role in readers:
        mesh = meshes.models[role]
        call = call_of(workload, system, "forward", role, mesh, rows, meshes.offload)
        yield SystemCall(f"{role} forward", role, call, mesh, groups[role], first)
    read = tuple(f"{role} forward" for role in readers)
    for role in (CRITIC, ACTOR):
        if role in models:
            mesh = meshes.models[role]
            call = call_of(workload, system, "train", role, mesh, rows, meshes.offload)
            yield SystemCall(f"{role} train", role, call, mesh, groups[role], read or first)


def call_of(
    workload: Workload, system: System, kind: CallKind, role: str, mesh: Mesh, rows: int, offload: bool = False
) -> Call:
    return Call(
        kind=kind,
        model=workload.models[role],
        engine=system.generator if kind == "generate" else system.trainer,
        rows=max(1, -(-rows // mesh.dp)),
        prompt=workload.prompt,
        responses=workload.responses,
        width=workload.prompt + (max(workload.responses) if system.pads else workload.mean),
        updates=workload.minibatches if kind == "train" else 1,
        recompute=system.recompute if kind == "train" else "none",
        offload_optimizer=offload and kind == "train",
        offload_parameters=is_streamed(system, mesh, offload),
    )


def _gathered(workload: Workload, system: System, meshes: ModelMeshes) -> float:
    """Return the bytes of weights that ZeRO-3 gathers once before generation."""
    zero3 = meshes.models[ACTOR].zero == 3
    once = system.gathers in ("at once", "tensor parallel") and meshes.generate.zero != 3
    apart = meshes.models[ACTOR].dp > 1
    return 2.0 * workload.models[ACTOR].parameters if zero3 and once and apart else 0.0


def call_seconds(placed: SystemCall, costs: CostModel) -> float:
    """Return the time of one call with all its portions, in seconds."""
    if placed.call.kind == "generate":
        return _generate_seconds(placed, costs)
    call = replace(placed.call, rows=max(1, -(-placed.call.rows // placed.portions)))
    if call.kind == "forward":
        return placed.portions * costs.call(call, placed.mesh).seconds
    passes = costs.call(replace(call, updates=0), placed.mesh).seconds
    updates = costs.call(call, placed.mesh).seconds - passes
    return placed.portions * passes + updates


def _generate_seconds(placed: SystemCall, costs: CostModel) -> float:
    """Return the time of a generation in seconds. A pipeline passes every token through all its stages: its
    micro-batches fill them, each as slow as on a mesh without stages (``pp`` saves memory, no time)."""
    mesh, call = placed.mesh, placed.call
    rows = max(1, -(-call.rows // (placed.portions * mesh.dims.pp)))
    whole = replace(call, rows=rows, decode_rows=max(1, min(rows, call.decode_rows // mesh.dims.pp)))
    once = gather_seconds(placed.gathered, mesh.size, mesh.per_node, mesh.links) if placed.gathered else 0.0
    return once + placed.portions * costs.call(whole, replace(mesh, dims=mesh.dims._replace(pp=1))).seconds


def transition_seconds(
    workload: Workload, system: System, placement: SystemPlacement, trained: Mesh, generate: Mesh, costs: CostModel
) -> float:
    """Return the time of moving weights from the mesh ``trained`` to the mesh ``generate``: every device receives its
    part, and every node the parts that none of its devices has.

    A copy on other devices receives whole tensors from one rank; otherwise all ranks of a node send.
    """
    model = workload.models[ACTOR]
    if system.gathers not in ("own copy", "reshard") and ROLLOUT not in placement.groups:
        return 0.0
    apart = ROLLOUT in placement.groups and not set(placement.groups[ROLLOUT]) & set(placement.groups[ACTOR])
    if not apart and system.gathers == "reshard" and _shards(trained) == _shards(generate):
        return 0.0
    lacking = _node_share(generate) - (0.0 if apart else _node_share(trained))
    several = workload.devices > workload.per_node
    part = int(2 * model.parameters / generate.dims.tp)
    across = int(2 * model.parameters * max(0.0, lacking)) if several else 0
    senders = 1 if apart and system.gathers == "own copy" else workload.per_node
    links, num_tensors = workload.links.of_ports(senders), model.layers * 7 + 3
    seconds = costs.sync(Traffic(part, across), Traffic(part, 0), num_tensors, links).seconds
    return seconds + (system.sync_seconds if across else 0.0)


def _shards(mesh: Mesh) -> tuple[int, int, int]:
    return mesh.dims.tp, mesh.dims.pp, mesh.dp if mesh.zero == 3 else 1


def _node_share(mesh: Mesh) -> float:
    """Return the fraction of the weights that the devices of a node have together."""
    shards = mesh.dims.tp * mesh.dims.pp * (mesh.dp if mesh.zero == 3 else 1)
    return MeshSide(mesh.size, mesh.per_node, mesh.dp, mesh.dims, shards=shards).node_share
