"""Calls of one step, and their seconds in each system."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.systems.meshes import ModelMeshes
from benchmarks.systems.profiles import System
from benchmarks.systems.workload import ACTOR, CRITIC, REF, REWARD, ROLLOUT, SystemPlacement, Workload
from flexrlhf.config.spec import CallKind
from flexrlhf.guideline.costs.cost_model import Call, Cost, CostModel, Mesh, Traffic
from flexrlhf.guideline.costs.decoders import host_factor
from flexrlhf.guideline.costs.links import gather_seconds
from flexrlhf.guideline.costs.transformer import Transformer


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
    models, where = workload.models, placement.where
    gathered = _gathered(workload, system, meshes)
    home = where.get(ROLLOUT, where[ACTOR])
    call = call_of(workload, system, "generate", ACTOR, meshes.generate, rows)
    yield SystemCall("actor generate", ACTOR, call, meshes.generate, home, gathered=gathered)
    readers = [role for role in (REF, REWARD, CRITIC) if role in models]
    readers += [ACTOR] if system.scores_again else []
    for role in readers:
        mesh = meshes.models[role]
        call = call_of(workload, system, "forward", role, mesh, rows)
        yield SystemCall(f"{role} forward", role, call, mesh, where[role], ("actor generate",))
    read = tuple(f"{role} forward" for role in readers)
    for role in (CRITIC, ACTOR):
        if role in models:
            mesh = meshes.models[role]
            call = call_of(workload, system, "train", role, mesh, rows, meshes.offload)
            yield SystemCall(f"{role} train", role, call, mesh, where[role], read or ("actor generate",))


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
        width=workload.prompt + workload.mean,
        updates=workload.minibatches if kind == "train" else 1,
        recompute=system.recompute if kind == "train" else "none",
        offload_optimizer=offload and kind == "train",
    )


def _gathered(workload: Workload, system: System, meshes: ModelMeshes) -> float:
    """Return the bytes of weights that ZeRO-3 gathers once before generation."""
    zero3 = meshes.models[ACTOR].zero == 3
    once = system.gathers in ("at once", "tensor parallel") and meshes.generate.zero != 3
    apart = meshes.models[ACTOR].dp > 1
    return 2.0 * workload.models[ACTOR].parameters if zero3 and once and apart else 0.0


def call_seconds(placed: SystemCall, system: System, costs: CostModel) -> float:
    """Return the seconds of one call with all its portions."""
    if placed.call.kind == "generate":
        return _generate_seconds(placed, system, costs)
    call = replace(placed.call, rows=max(1, -(-placed.call.rows // placed.portions)))
    if call.kind == "forward":
        return placed.portions * _pass_seconds(costs.call(call, placed.mesh), system, _gather_share(placed, system))
    passes = costs.call(replace(call, updates=0), placed.mesh)
    updates = costs.call(call, placed.mesh).seconds - passes.seconds
    return placed.portions * _pass_seconds(passes, system, _gather_share(placed, system)) + updates


def _gather_share(placed: SystemCall, system: System) -> float:
    """Return the share of the links' speed that ZeRO-3's collectives reach."""
    return system.gather if placed.mesh.spans_nodes else system.gather_within


def _pass_seconds(cost: Cost, system: System, share: float) -> float:
    """Return the seconds of a pass: slower than the engine alone, except for collectives between replicas."""
    gather, tensor = (cost.parts.get(name, 0.0) for name in ("gather", "tensor parallel"))
    return (cost.seconds - gather - tensor) / system.passes + tensor / system.tensor + gather / share


def _generate_seconds(placed: SystemCall, system: System, costs: CostModel) -> float:
    """Return the seconds of a generation. A pipeline passes every token through all its stages: its micro-batches fill
    them, each as slow as on a mesh without stages (``pp`` saves memory, no time)."""
    mesh, call = placed.mesh, placed.call
    rows = max(1, -(-call.rows // (placed.portions * mesh.pp)))
    whole = replace(call, rows=rows, decode_rows=max(1, min(rows, call.decode_rows // mesh.pp)))
    cost = costs.call(whole, replace(mesh, pp=1))
    share = _gather_share(placed, system)
    once = gather_seconds(placed.gathered, mesh.size, mesh.per_node, mesh.links) if placed.gathered else 0.0
    return once / share + placed.portions * _decode_seconds(cost, _launch_seconds(whole, mesh, system), system, share)


def _decode_seconds(cost: Cost, launch: float, system: System, share: float) -> float:
    """Return the seconds of decoding. ``launch``: seconds of launches on the system's host, which a quicker device
    waits for; 0: those in ``cost``."""
    gather, tensor = (cost.parts.get(name, 0.0) for name in ("gather", "tensor parallel"))
    busy = (cost.seconds - gather - tensor) / system.decode + tensor / system.tensor
    if launch:
        outside = sum(cost.parts.get(name, 0.0) for name in ("prefill", "scheduler")) / system.decode
        hidden = cost.parts.get("launch", 0.0) / system.decode
        busy += max(0.0, launch - (busy - outside - hidden)) - hidden
    # the next layers' weights are gathered while one computes
    return max(busy, gather / share)


def _launch_seconds(call: Call, mesh: Mesh, system: System) -> float:
    """Return the seconds of launches on the host in all decoding steps."""
    layer = system.launch_seconds + (system.launch_tp_seconds if mesh.tp > 1 else 0.0)
    steps = -(-call.rows // call.decode_rows) * call.longest_response
    return steps * call.model.layers * layer * host_factor(mesh.device)


def sync_seconds(model: Transformer, system: System) -> float:
    """Return the seconds of sending all weights to a copy, at the system's own speed."""
    return system.sync_seconds + (2.0 * model.parameters / (system.sync_gb_s * 1e9) if system.sync_gb_s else 0.0)


def transition_seconds(
    workload: Workload, system: System, placement: SystemPlacement, generate: Mesh, costs: CostModel
) -> float:
    """Return the seconds from trained weights to generating ones."""
    model = workload.models[ACTOR]
    size = 2.0 * model.parameters
    if system.gathers not in ("own copy", "reshard") and ROLLOUT not in placement.where:
        return 0.0
    if system.sync_gb_s and workload.devices > workload.per_node:
        return sync_seconds(model, system)
    return _exchange_seconds(workload, placement, size / generate.tp, costs)


def _exchange_seconds(workload: Workload, placement: SystemPlacement, share: float, costs: CostModel) -> float:
    """Return the seconds at the speed of the links: every device receives ``share`` bytes, from another node where the
    groups differ."""
    model, part = workload.models[ACTOR], int(share)
    apart = not set(placement.where.get(ROLLOUT, placement.where[ACTOR])) & set(placement.where[ACTOR])
    across = 2 * model.parameters if apart and workload.devices > workload.per_node else 0
    traffic = Traffic(part, across)
    return costs.sync(traffic, Traffic(part, 0), model.layers * 7 + 3, workload.links).seconds
