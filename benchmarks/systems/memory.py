"""What a step leaves of the devices' memory, and the micro-batches that fit into it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from benchmarks.systems.calls import Work, works_of
from benchmarks.systems.meshes import Layouts, state_bytes
from benchmarks.systems.profiles import System
from benchmarks.systems.tasks import ACTOR, CRITIC, ROLLOUT, Placement, Task
from flexrlhf.config.spec import CallKind
from flexrlhf.guideline.costs.cost_model import Call
from flexrlhf.guideline.costs.footprint import (
    HOST_BYTES,
    capacity_bytes,
    decode_bytes,
    frozen_bytes,
    offloaded_bytes,
    pass_bytes,
    rows_that_fit,
)

RESTLESS = 0.1
"""Of a device, what an allocator that never gives back leaves in pieces besides."""


@dataclass(frozen=True)
class Held:
    """Bytes of each group's devices between calls: ``states`` of the models, ``copy``: weights that only generate.

    ``sleeps``: each leaves the device while the other is at work.
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


def held_bytes(task: Task, system: System, placement: Placement, layouts: Layouts) -> Held:
    """Of models that keep their meshes."""
    states, copy = [0.0] * len(placement.blocks), [0.0] * len(placement.blocks)
    for role in task.models:
        size = state_bytes(task, system, role, layouts.models[role], layouts.offload)
        for block in placement.where[role] if not _swapped(system, role) else ():
            states[block] += size
    if system.gathers == "own copy" or ROLLOUT in placement.where:
        for block in placement.where.get(ROLLOUT, placement.where[ACTOR]):
            copy[block] += frozen_bytes(task.models[ACTOR], layouts.generate)
    return Held(tuple(states), tuple(copy), system.sleeps)


def _swapped(system: System, role: str) -> bool:
    """Whether a model that is only read lies in host memory while others work."""
    return system.sleeps and role not in (ACTOR, CRITIC)


def _own_bytes(system: System, work: Work, placement: Placement) -> float:
    """Bytes of a call besides states and rows: the slice of the weights that generation gathers or exchanges."""
    if _swapped(system, work.role):
        return frozen_bytes(work.call.model, work.mesh)
    if work.call.kind != "generate" or system.gathers == "own copy" or ROLLOUT in placement.where:
        return 0.0
    return frozen_bytes(work.call.model, work.mesh) if work.gathered or system.gathers == "reshard" else 0.0


_BATCHES = tuple(sorted(factor * 2**power for power in range(12) for factor in (1, 3)))


def _capacity(task: Task, system: System) -> float:
    return capacity_bytes(task.device) * (1 if system.rests else 1 - RESTLESS)


def _as_counted(call: Call, system: System) -> Call:
    """With keys and values as the system's own planner counts them."""
    return replace(call, model=replace(call.model, kv_heads=call.model.heads)) if system.all_heads else call


def sized(task: Task, system: System, placement: Placement, work: Work, held: Held) -> Work | None:
    """With the largest micro-batch that fits beside the states; None where not even one row does."""
    free = _capacity(task, system) - max(held.during(work.call.kind)[block] for block in work.blocks)
    most = rows_that_fit(_as_counted(work.call, system), work.mesh, free - _own_bytes(system, work, placement))
    if not most:
        return None
    call = work.call
    if call.kind == "generate":
        together = min(most, task.decode_rows or most, system.decode_rows or most, call.rows)
        return replace(work, call=replace(call, decode_rows=together))
    share = max(1, call.rows // call.updates)
    wanted = min(share, task.micro_rows or most)
    rows = min(most, max(1, -(-wanted // work.mesh.pp) if work.mesh.pp > 1 else wanted))
    return replace(work, call=replace(call, micro_rows=rows))


def most_rows(task: Task, system: System, placement: Placement, works: tuple[Work, ...], held: Held) -> int:
    """A step's rows where they are free: as many for each device, one of the numbers that people choose."""
    most = min(
        _rows_at_once(system, placement, works, block, _capacity(task, system) - held.most[block])
        for block in range(len(placement.blocks))
    )
    if system.layout != "ZeRO":
        return most
    each = most // task.devices
    return max((size for size in _BATCHES if size <= each), default=0) * task.devices


def _rows_at_once(system: System, placement: Placement, works: tuple[Work, ...], block: int, free: float) -> int:
    """Of the whole step, as far as the devices of one group let it. An allocator that never rests keeps what generation
    and training took, and eager generation makes its cache anew, a token longer, beside the old one."""
    here = [work for work in works if block in work.blocks]
    wanted = min(
        (work.mesh.dp * (system.decode_rows or sys.maxsize) for work in here if _generates(work)), default=sys.maxsize
    )
    if system.rests:
        return min((*(_rows_of(work) * work.mesh.dp for work in here), wanted))
    kinds = {kind: [work for work in here if work.call.kind == kind] for kind in ("generate", "forward", "train")}
    each = {
        kind: max((_row_bytes(work) / work.mesh.dp for work in found), default=0.0) for kind, found in kinds.items()
    }
    own = max((_own_bytes(system, work, placement) for work in here), default=0.0)
    per_row = 2 * each["generate"] + max(each["train"], each["forward"])
    return min(wanted, int((free - own) / per_row)) if per_row else wanted


def _generates(work: Work) -> bool:
    return work.call.kind == "generate"


def _rows_of(work: Work) -> int:
    call = work.call
    return min(call.rows, call.decode_rows if call.kind == "generate" else call.micro_rows)


def _row_bytes(work: Work) -> float:
    need = decode_bytes if work.call.kind == "generate" else pass_bytes
    return need(work.call, work.mesh, 2) - need(work.call, work.mesh, 1)


def has_host_memory(task: Task) -> bool:
    """Whether the nodes' memory holds the offloaded states of all trained models."""
    size = sum(offloaded_bytes(task.models[role]) for role in (ACTOR, CRITIC) if role in task.models)
    return size <= HOST_BYTES * max(1, task.devices // task.per_node)


def fitted(
    task: Task, system: System, placement: Placement, layouts: Layouts, held: Held, rows: int
) -> tuple[Work, ...] | None:
    works = [sized(task, system, placement, work, held) for work in works_of(task, system, placement, layouts, rows)]
    found = tuple(work for work in works if work is not None)
    return found if len(found) == len(works) else None


def peak_bytes(system: System, placement: Placement, works: tuple[Work, ...], held: Held) -> tuple[float, ...]:
    """The most that a device of each group holds."""
    peaks = list(held.most)
    for work in works:
        rows = work.call.decode_rows if _generates(work) else work.call.micro_rows
        need = decode_bytes if _generates(work) else pass_bytes
        size = need(work.call, work.mesh, rows) + _own_bytes(system, work, placement)
        for block in work.blocks:
            peaks[block] = max(peaks[block], held.during(work.call.kind)[block] + size)
    return tuple(peaks)
