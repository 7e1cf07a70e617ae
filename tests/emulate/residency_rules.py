"""Rule: models on a device fit it. Written from the rule, not from the code that decides on offloading."""

from __future__ import annotations

from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Eval, Instruction, Offload, Release, Reload, Run, Save, Sync
from flexrlhf.strategies.residency import DeviceMemory


def memory_of(plan: Plan) -> DeviceMemory:
    return DeviceMemory(plan.sizing, plan.cluster, plan.batch)


def models_used(plan: Plan, rank: int, instruction: Instruction) -> set[str]:
    """Models on ``rank`` that an instruction computes with, reads or overwrites."""
    match instruction:
        case Run() | Save():
            names = {instruction.model}
        case Eval():
            names = {run.model for run in instruction.runs if rank in run.ranks}
        case Sync():
            names = {instruction.source, instruction.destination}
        case _:
            names = set()
    return names & {model.name for model in plan.placement.on_rank(rank)}


def check_residency(plan: Plan) -> None:
    """While a rank works, all models on its device fit, or no model is there that it does not use and could offload (an
    engine in its own process cannot be)."""
    memory = memory_of(plan)
    for rank in range(plan.placement.num_ranks):
        capacity = memory.capacity(rank)
        transient = {model.name for model in plan.placement.on_rank(rank) if model.is_transient}
        here = {model.name for model in plan.placement.on_rank(rank)} - set(plan.offloaded.get(rank, ())) - transient
        states = {model.name: memory.state(rank, model.name) for model in plan.placement.on_rank(rank)}
        changed = set[str]()
        needed = {id(x): memory.needed_for(rank, x) for x in plan.schedule.for_rank(rank) if capacity is not None}
        for _, step, instruction in plan.schedule.walk(rank, plan.spec.steps):
            if isinstance(instruction, Offload):
                here.remove(instruction.model)
                is_kept = not isinstance(instruction, Offload) or not instruction.is_unchanged
                assert is_kept or instruction.model not in changed, f"rank {rank}: {instruction.model} has changed"
            elif isinstance(instruction, Reload):
                changed.discard(instruction.model)
                assert instruction.model not in here, f"rank {rank}: {instruction.model} is on the device already"
                here.add(instruction.model)
            elif isinstance(instruction, Release):
                here.remove(instruction.model)
            elif isinstance(instruction, Sync) and instruction.refills and instruction.destination in transient:
                assert instruction.destination not in here, f"rank {rank}: {instruction.destination} is not released"
                here.add(instruction.destination)
            used = models_used(plan, rank, instruction)
            if isinstance(instruction, Sync) or (isinstance(instruction, Run) and instruction.operator.kind == "train"):
                changed |= {instruction.model} if isinstance(instruction, Run) else {instruction.destination}
            place = f"rank {rank}, step {step}: {instruction.kind} {instruction.label}"
            assert used <= here, f"{place} without {sorted(used - here)}"
            if used and capacity is not None:
                total = sum(states[name] for name in here) + stored_once(plan, rank, here) + needed[id(instruction)]
                idle = {name for name in here - used - transient if states[name]}
                assert total <= capacity or not idle, f"{place}: {total} of {capacity} bytes, with {sorted(here)}"


def stored_once(plan: Plan, rank: int, here: set[str]) -> int:
    """Bytes beyond the models ``here``: less, where a copy contains weights of its source; more, where it has views of
    a source that is in host memory."""
    found = 0
    for copy in (plan.placement[name] for name in here if name in plan.sizing.reusing):
        state = plan.state(copy, rank)
        assert state is not None
        found += -state.lent if copy.role in here else state.viewed
    return found


def check_sleep(plan: Plan) -> None:
    """A rollout engine on the ranks of the trained copy is on the device while it generates a batch, chunk by chunk,
    and for its Sync; while other models work, it is not. One that does not sleep moves only if memory is short."""
    for engine in plan.placement.models:
        is_apart = not set(engine.ranks) & set(plan.placement[engine.role].ranks)
        if engine.rollout is None or engine.is_transient or is_apart:
            continue
        for rank in engine.ranks:
            if engine.rollout.sleep:
                _check_asleep(plan, engine.name, rank)
            elif plan.cluster.memory_bytes(rank) is None:
                moved = [x for x in plan.schedule.for_rank(rank) if isinstance(x, Offload | Reload)]
                assert not moved and rank not in plan.offloaded, f"{engine.name} does not sleep, yet {moved}"


def _check_asleep(plan: Plan, engine: str, rank: int) -> None:
    awake = engine not in plan.offloaded.get(rank, ())
    instructions = plan.schedule.instructions
    last_chunk = max(i for i, x in enumerate(instructions) if isinstance(x, Run) and x.model == engine)
    for position, step, instruction in plan.schedule.walk(rank, plan.spec.steps):
        if isinstance(instruction, Offload | Reload) and instruction.model == engine:
            awake = isinstance(instruction, Reload)
        is_done = position % len(instructions) > last_chunk
        others = models_used(plan, rank, instruction) - {engine}
        if isinstance(instruction, Run) and others and is_done:
            place = f"rank {rank}, step {step}: {instruction.label}"
            assert not awake, f"{place} next to {engine}, which does not sleep"


def least_and_most(plan: Plan) -> tuple[int, int]:
    """Bytes of a device on which every instruction fits by itself, and on which nothing is ever offloaded."""
    memory, least, most = memory_of(plan), 0, 0
    for rank in range(plan.placement.num_ranks):
        states = {model.name: memory.state(rank, model.name) for model in plan.placement.on_rank(rank)}
        for instruction in plan.schedule.for_rank(rank):
            used, needed = models_used(plan, rank, instruction), memory.needed_for(rank, instruction)
            least = max(least, needed + sum(states[name] for name in used) + stored_once(plan, rank, used))
            most = max(most, needed + sum(states.values()))
    return least, most
