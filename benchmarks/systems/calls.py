"""The calls of a step, and how long each of them takes in a system."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.systems.meshes import Layouts
from benchmarks.systems.profiles import System
from benchmarks.systems.tasks import ACTOR, CRITIC, REF, REWARD, ROLLOUT, Placement, Task
from flexrlhf.config.spec import CallKind
from flexrlhf.guideline.costs.cost_model import Call, Cost, CostModel, Mesh, Traffic
from flexrlhf.guideline.costs.decoders import host_factor
from flexrlhf.guideline.costs.links import gather_seconds
from flexrlhf.guideline.costs.transformer import Transformer


@dataclass(frozen=True)
class Work:
    """One call of the step. ``portions``: parts of the rows that go one after the other, each through all of the mesh.
    ``gathered``: bytes that all devices of the mesh put together before it."""

    name: str
    role: str
    call: Call
    mesh: Mesh
    blocks: tuple[int, ...]
    after: tuple[str, ...] = ()
    portions: int = 1
    gathered: float = 0.0


def works_of(task: Task, system: System, placement: Placement, layouts: Layouts, rows: int) -> Iterator[Work]:
    """The calls of a step, in order, before micro-batches are chosen."""
    models, where = task.models, placement.where
    gathered = _gathered(task, system, layouts)
    home = where.get(ROLLOUT, where[ACTOR])
    call = call_of(task, system, "generate", ACTOR, layouts.generate, rows)
    yield Work("actor generate", ACTOR, call, layouts.generate, home, gathered=gathered)
    readers = [role for role in (REF, REWARD, CRITIC) if role in models]
    readers += [ACTOR] if system.scores_again else []
    for role in readers:
        mesh = layouts.models[role]
        call = call_of(task, system, "forward", role, mesh, rows)
        yield Work(f"{role} forward", role, call, mesh, where[role], ("actor generate",))
    read = tuple(f"{role} forward" for role in readers)
    for role in (CRITIC, ACTOR):
        if role in models:
            mesh = layouts.models[role]
            call = call_of(task, system, "train", role, mesh, rows, layouts.offload)
            yield Work(f"{role} train", role, call, mesh, where[role], read or ("actor generate",))


def call_of(
    task: Task, system: System, kind: CallKind, role: str, mesh: Mesh, rows: int, offload: bool = False
) -> Call:
    return Call(
        kind=kind,
        model=task.models[role],
        engine=system.generator if kind == "generate" else system.trainer,
        rows=max(1, -(-rows // mesh.dp)),
        prompt=task.prompt,
        responses=task.responses,
        width=task.prompt + task.mean,
        updates=task.minibatches if kind == "train" else 1,
        recompute=system.recompute if kind == "train" else "none",
        offload_optimizer=offload and kind == "train",
    )


def _gathered(task: Task, system: System, layouts: Layouts) -> float:
    """Bytes of weights that ZeRO-3 puts together once before generation."""
    zero3 = layouts.models[ACTOR].zero == 3
    once = system.gathers in ("at once", "tensor parallel") and layouts.generate.zero != 3
    apart = layouts.models[ACTOR].dp > 1
    return 2.0 * task.models[ACTOR].parameters if zero3 and once and apart else 0.0


def work_seconds(work: Work, system: System, costs: CostModel) -> float:
    """Of one call, with all its portions."""
    if work.call.kind == "generate":
        return _generate_seconds(work, system, costs)
    call = replace(work.call, rows=max(1, -(-work.call.rows // work.portions)))
    if call.kind == "forward":
        return work.portions * _pass_seconds(costs.call(call, work.mesh), system, _gather_share(work, system))
    passes = costs.call(replace(call, updates=0), work.mesh)
    updates = costs.call(call, work.mesh).seconds - passes.seconds
    return work.portions * _pass_seconds(passes, system, _gather_share(work, system)) + updates


def _gather_share(work: Work, system: System) -> float:
    """Of the links' speed in ZeRO-3's collectives."""
    return system.gather if work.mesh.spans_nodes else system.gather_within


def _pass_seconds(cost: Cost, system: System, share: float) -> float:
    """Slower than alone, but no slower in what waits for the links between replicas."""
    gather, tensor = (cost.parts.get(name, 0.0) for name in ("gather", "tensor parallel"))
    return (cost.seconds - gather - tensor) / system.passes + tensor / system.tensor + gather / share


def _generate_seconds(work: Work, system: System, costs: CostModel) -> float:
    """A pipeline passes every token through all its stages: its micro-batches fill them, each as slow as one mesh
    without stages (``pp`` buys memory, no time)."""
    mesh, call = work.mesh, work.call
    rows = max(1, -(-call.rows // (work.portions * mesh.pp)))
    whole = replace(call, rows=rows, decode_rows=max(1, min(rows, call.decode_rows // mesh.pp)))
    cost = costs.call(whole, replace(mesh, pp=1))
    share = _gather_share(work, system)
    once = gather_seconds(work.gathered, mesh.size, mesh.per_node, mesh.links) if work.gathered else 0.0
    return once / share + work.portions * _decode_seconds(cost, _launch_seconds(whole, mesh, system), system, share)


def _decode_seconds(cost: Cost, launch: float, system: System, share: float) -> float:
    """``launch``: of the system's own host, which the device waits for where it is quicker; 0: as ``cost`` says."""
    gather, tensor = (cost.parts.get(name, 0.0) for name in ("gather", "tensor parallel"))
    busy = (cost.seconds - gather - tensor) / system.decode + tensor / system.tensor
    if launch:
        outside = sum(cost.parts.get(name, 0.0) for name in ("prefill", "scheduler")) / system.decode
        hidden = cost.parts.get("launch", 0.0) / system.decode
        busy += max(0.0, launch - (busy - outside - hidden)) - hidden
    # the next layers' weights are gathered while one computes
    return max(busy, gather / share)


def _launch_seconds(call: Call, mesh: Mesh, system: System) -> float:
    """On the host, for all decoding steps."""
    layer = system.launch_seconds + (system.launch_tp_seconds if mesh.tp > 1 else 0.0)
    steps = -(-call.rows // call.decode_rows) * call.longest_response
    return steps * call.model.layers * layer * host_factor(mesh.device)


def sync_seconds(model: Transformer, system: System) -> float:
    """Of sending all weights to a copy, as slow as the system does it."""
    return system.sync_seconds + (2.0 * model.parameters / (system.sync_gb_s * 1e9) if system.sync_gb_s else 0.0)


def transition_seconds(task: Task, system: System, placement: Placement, generate: Mesh, costs: CostModel) -> float:
    """From the trained weights to those that generate."""
    model = task.models[ACTOR]
    size = 2.0 * model.parameters
    if system.gathers not in ("own copy", "reshard") and ROLLOUT not in placement.where:
        return 0.0
    if system.sync_gb_s and task.devices > task.per_node:
        return sync_seconds(model, system)
    return _exchange_seconds(task, placement, size / generate.tp, costs)


def _exchange_seconds(task: Task, placement: Placement, share: float, costs: CostModel) -> float:
    """As fast as the links let it: every device takes ``share`` bytes, from another node where the groups differ."""
    model, part = task.models[ACTOR], int(share)
    apart = not set(placement.where.get(ROLLOUT, placement.where[ACTOR])) & set(placement.where[ACTOR])
    across = 2 * model.parameters if apart and task.devices > task.per_node else 0
    traffic = Traffic(part, across)
    return costs.sync(traffic, Traffic(part, 0), model.layers * 7 + 3, task.links).seconds
