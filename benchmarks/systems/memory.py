"""Memory of a step: states between calls, and the micro-batches that fit into the rest."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from benchmarks.systems.calls import SystemCall, calls_of
from benchmarks.systems.footprint import (
    HOST_BYTES,
    capacity_bytes,
    decode_bytes,
    frozen_bytes,
    offloaded_bytes,
    pass_bytes,
    rows_that_fit,
)
from benchmarks.systems.meshes import ModelMeshes, state_bytes
from benchmarks.systems.profiles import System
from benchmarks.systems.workload import ACTOR, CRITIC, ROLLOUT, SystemPlacement, Workload
from flexrlhf.guideline.costs.cost_model import Call
from flexrlhf.operators.graph import CallKind

IN_WORKSPACE = ("deepspeed-kernels",)
"""Generators whose cache is a workspace of the engine (its log prints size and address), which they fill in place."""
RESTLESS = 0.1
"""Fraction of a device that an allocator without release leaves fragmented."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on a device of each group between calls.

    states:  states of the models
    copy:    weights that only generate
    sleeps:  whether each of both leaves the device while the other is in use
    """

    states: tuple[float, ...]
    copy: tuple[float, ...]
    sleeps: bool

    def during(self, kind: CallKind) -> tuple[float, ...]:
        if not self.sleeps:
            return tuple(map(sum, zip(self.states, self.copy, strict=True)))
        return self.copy if kind == "generate" else self.states

    @property
    def most(self) -> tuple[float, ...]:
        return tuple(map(max, zip(self.during("generate"), self.during("train"), strict=True)))


def memory_use(workload: Workload, system: System, placement: SystemPlacement, meshes: ModelMeshes) -> MemoryUse:
    """Return the memory of models that keep their meshes."""
    states, copy = [0.0] * len(placement.blocks), [0.0] * len(placement.blocks)
    for role in workload.models:
        size = state_bytes(workload, system, role, meshes.models[role], meshes.offload)
        for block in placement.groups[role] if not _swapped(system, role) else ():
            states[block] += size
    if system.gathers == "own copy" or ROLLOUT in placement.groups:
        for block in placement.groups.get(ROLLOUT, placement.groups[ACTOR]):
            copy[block] += frozen_bytes(workload.models[ACTOR], meshes.generate)
    return MemoryUse(tuple(states), tuple(copy), system.sleeps)


def _swapped(system: System, role: str) -> bool:
    """Whether a model that is only read is in host memory while others work."""
    return system.sleeps and role not in (ACTOR, CRITIC)


def _own_bytes(system: System, placed: SystemCall, placement: SystemPlacement) -> float:
    """Return the bytes of a call in addition to states and rows: the part of the weights that generation gathers or
    exchanges."""
    if _swapped(system, placed.role):
        return frozen_bytes(placed.call.model, placed.mesh)
    if placed.call.kind != "generate" or system.gathers == "own copy" or ROLLOUT in placement.groups:
        return 0.0
    return frozen_bytes(placed.call.model, placed.mesh) if placed.gathered or system.gathers == "reshard" else 0.0


_BATCHES = tuple(sorted(factor * 2**power for power in range(12) for factor in (1, 3)))


def _capacity(workload: Workload, system: System) -> float:
    return capacity_bytes(workload.device) * (1 if system.rests else 1 - RESTLESS)


def _as_counted(call: Call, system: System) -> Call:
    """Return ``call`` with keys and values as the system's own planner counts them."""
    return replace(call, model=replace(call.model, kv_heads=call.model.heads)) if system.all_heads else call


def sized(
    workload: Workload, system: System, placement: SystemPlacement, placed: SystemCall, usage: MemoryUse
) -> SystemCall | None:
    """Return ``placed`` with the largest micro-batch that fits next to the states; None if not even one row does."""
    free = _capacity(workload, system) - max(usage.during(placed.call.kind)[block] for block in placed.blocks)
    most = rows_that_fit(_as_counted(placed.call, system), placed.mesh, free - _own_bytes(system, placed, placement))
    if not most:
        return None
    call = placed.call
    if call.kind == "generate":
        sent = _sent_rows(workload, system, placement, placed) or most
        together = min(most, workload.decode_rows or most, system.decode_rows or most, sent, call.rows)
        return replace(placed, call=replace(call, decode_rows=together))
    share = max(1, call.rows // call.updates)
    usual = max(1, int(system.micro_tokens / call.width)) if system.micro_tokens else most
    together = min(share, workload.micro_rows or usual)
    rows = min(most, max(1, -(-together // placed.mesh.dims.pp) if placed.mesh.dims.pp > 1 else together))
    return replace(placed, call=replace(call, micro_rows=rows))


def _sent_rows(workload: Workload, system: System, placement: SystemPlacement, placed: SystemCall) -> int | None:
    """Return the rows that a replica of the generator has at a time; None if it has all."""
    tokens = system.sends_tokens
    each = workload.sent_rows if tokens is None else max(1, int(tokens / (workload.prompt + workload.mean)))
    if each is None:
        return None
    return max(1, each * placement.devices(ACTOR) // placed.mesh.dp)


def most_rows(
    workload: Workload, system: System, placement: SystemPlacement, calls: tuple[SystemCall, ...], usage: MemoryUse
) -> int:
    """Return the rows of a step if the workload leaves them open: for each device one of the usual values."""
    most = min(
        _rows_at_once(system, placement, calls, block, _capacity(workload, system) - usage.most[block])
        for block in range(len(placement.blocks))
    )
    if system.layout != "ZeRO":
        return most
    each = most // workload.devices
    return max((size for size in _BATCHES if size <= each), default=0) * workload.devices


def _rows_at_once(
    system: System, placement: SystemPlacement, calls: tuple[SystemCall, ...], block: int, free: float
) -> int:
    """Return the rows of the whole step that fit the devices of one group. An allocator without release keeps the
    memory of generation and training, and eager generation copies its cache, a token longer, in every step; kernels of
    a workspace do not."""
    here = [placed for placed in calls if block in placed.blocks]
    most = min(
        (placed.mesh.dp * (system.decode_rows or sys.maxsize) for placed in here if _generates(placed)),
        default=sys.maxsize,
    )
    if system.rests:
        return min((*(_rows_of(placed) * placed.mesh.dp for placed in here), most))
    kinds = {kind: [placed for placed in here if placed.call.kind == kind] for kind in ("generate", "forward", "train")}
    row_bytes = {
        kind: max((_row_bytes(placed) / placed.mesh.dp for placed in of_kind), default=0.0)
        for kind, of_kind in kinds.items()
    }
    own = max((_own_bytes(system, placed, placement) for placed in here), default=0.0)
    copies = 1 if system.generator in IN_WORKSPACE else 2
    per_row = copies * row_bytes["generate"] + max(row_bytes["train"], row_bytes["forward"])
    return min(most, int((free - own) / per_row)) if per_row else most


def _generates(placed: SystemCall) -> bool:
    return placed.call.kind == "generate"


def _rows_of(placed: SystemCall) -> int:
    call = placed.call
    return min(call.rows, call.decode_rows if call.kind == "generate" else call.micro_rows)


def _row_bytes(placed: SystemCall) -> float:
    need = decode_bytes if placed.call.kind == "generate" else pass_bytes
    return need(placed.call, placed.mesh, 2) - need(placed.call, placed.mesh, 1)


def has_host_memory(workload: Workload) -> bool:
    """Whether the offloaded states of all trained models fit the memory of the nodes."""
    size = sum(offloaded_bytes(workload.models[role]) for role in (ACTOR, CRITIC) if role in workload.models)
    return size <= HOST_BYTES * max(1, workload.devices // workload.per_node)


def fitted(
    workload: Workload,
    system: System,
    placement: SystemPlacement,
    meshes: ModelMeshes,
    usage: MemoryUse,
    rows: int,
) -> tuple[SystemCall, ...] | None:
    """Return the calls of a step with their micro-batches; None if one of them does not fit."""
    drafts = calls_of(workload, system, placement, meshes, rows)
    calls = [sized(workload, system, placement, placed, usage) for placed in drafts]
    fitting = tuple(placed for placed in calls if placed is not None)
    return fitting if len(fitting) == len(calls) else None


def peak_bytes(
    system: System, placement: SystemPlacement, calls: tuple[SystemCall, ...], usage: MemoryUse
) -> tuple[float, ...]:
    """Return the peak memory of a device of each group."""
    peaks = list(usage.most)
    for placed in calls:
        rows = placed.call.decode_rows if _generates(placed) else placed.call.micro_rows
        need = decode_bytes if _generates(placed) else pass_bytes
        size = need(placed.call, placed.mesh, rows) + _own_bytes(system, placed, placement)
        for block in placed.blocks:
            peaks[block] = max(peaks[block], usage.during(placed.call.kind)[block] + size)
    return tuple(peaks)
