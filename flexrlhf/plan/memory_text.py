"""Text of memory plans: of every rank before a run, planned against measured after it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from math import inf
from typing import Any

from flexrlhf.memory.budget import Phase
from flexrlhf.memory.rank_memory import RankMemory
from flexrlhf.memory.states import State
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.placement.placed import ModelName
from flexrlhf.plan.cache_size import is_short_of_cache
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.suggestions import memory_suggestions
from flexrlhf.text import bytes_text, ranks_text

NUM_MEASURED = 4
NUM_SUGGESTIONS = 6
SMALLEST_DEVICE_BYTES = min(device.usable_bytes for device in DeviceClass.KNOWN.values())
TensorBytes = Mapping[str, Mapping[str, int]]
"""Bytes of a rank's tensors by placed model and kind."""
WIDTH = 120
PHASE_WIDTH = 96
"""Columns of a phase or suggestion, before a plan indents them."""


def planned_memory(plan: Plan) -> list[str]:
    """Return lines for the fullest of ranks with the same models, their stages and device, then the suggestions."""
    alike: dict[tuple[tuple[tuple[str, int], ...], str, int | None], list[RankMemory]] = {}
    for memory in plan.memories:
        device = plan.cluster.devices[memory.rank].device_class, plan.device_bytes(memory.rank)
        models = tuple((name, plan.placement[name].layout.index("pp", memory.rank)) for name in memory.states)
        alike.setdefault((models, *device), []).append(memory)
    lines = []
    for (_, device_class, size), members in alike.items():
        highest = max(members, key=lambda memory: memory.peak_bytes)
        where = "" if size is None else f" ({device_class}, {bytes_text(size)})"
        lines.append(f"{ranks_text(tuple(memory.rank for memory in members))}{where}: {peak_text(highest)}")
        lines += [f"  {line}" for line in _memory_table(highest)]
    return lines + _suggestions(plan)


def peak_text(memory: RankMemory) -> str:
    """Return the peak of a rank, and the phase that it is in."""
    if memory.peak is None:
        return "nothing"
    known = "at most" if memory.is_complete else "at least"
    return f"{known} {bytes_text(memory.peak_bytes)}, for {memory.peak.label}"


def _memory_table(memory: RankMemory) -> list[str]:
    """Return a line for each model, allocated also between its calls, and for each phase with its parts."""
    if not memory.states:
        return []
    return [
        *_states(memory.states),
        f"{'':<25}{'total':>11}  of which not model state",
        *(line for phase in memory.phases if _is_worth_a_line(phase, memory) for line in _phase_lines(phase)),
        f"{'host memory':<25}{bytes_text(memory.host_bytes):>11}  {_host(memory)}".rstrip(),
    ]


def _states(states: Mapping[ModelName, State | None]) -> list[str]:
    sizes = {name: asdict(state) if state else None for name, state in states.items()}
    shown = ["weights", "gradients", "optimizer"]
    shown += [
        key for key in ("cache", "graphs", "buffers", "host") if any(each and each[key] for each in sizes.values())
    ]
    lines = [f"{'':<25}" + "".join(f"{key:>11}" for key in shown)]
    for name, each in sizes.items():
        texts = ["? B"] if each is None else [bytes_text(each[key]) if each[key] else "-" for key in shown]
        lines.append(f"{name:<25}" + "".join(f"{text:>11}" for text in texts))
    return lines


def _is_worth_a_line(phase: Phase, memory: RankMemory) -> bool:
    """Whether a phase is shown: the peak, every model call, and phases that add a hundredth to the states."""
    return phase == memory.peak or phase.kind in ("generate", "forward", "train") or _share(phase.part_bytes, phase)


def _phase_lines(phase: Phase) -> list[str]:
    parts = [f"{bytes_text(size)} {name}" for name, size in phase.parts.items() if size is None or _share(size, phase)]
    head = f"{phase.label:<25}{bytes_text(phase.total):>11}  "
    unbroken = [part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts]
    lines = _wrapped(head, ", ".join(unbroken))
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _host(memory: RankMemory) -> str:
    how = ", each whole and in float32" if memory.loads_whole else ""
    restarts = {name: state.for_restart for name, state in memory.states.items() if state is not None}
    parts = [f"while models are loaded{how}"] if memory.host_bytes > memory.loaded_host_bytes else []
    parts += [f"{bytes_text(size)} to restart {name}" for name, size in restarts.items() if size]
    return "; ".join(parts)


def _share(size: int, phase: Phase) -> bool:
    """Whether ``size`` is at least a hundredth of the phase."""
    return 100 * size >= phase.total > 0


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        head + text, PHASE_WIDTH, subsequent_indent=" " * len(head), break_long_words=False, break_on_hyphens=False
    )


def _suggestions(plan: Plan) -> list[str]:
    """Return the settings that reduce the highest peak, unless it is far below the device's memory, or a cache takes
    what they would free."""
    rank = plan.tightest_rank
    size = plan.device_bytes(rank) or SMALLEST_DEVICE_BYTES
    lacks = (plan.device_bytes(rank) or inf) < plan.memories[rank].peak_bytes
    if 2 * plan.memories[rank].peak_bytes < size or (is_short_of_cache(plan) and not lacks):
        return []
    lines: list[str] = []
    for each in memory_suggestions(plan, rank)[:NUM_SUGGESTIONS]:
        remarks = "  (suffices)" * (lacks and each.suffices) + "  (other numbers)" * (not each.same_numbers)
        lines += _wrapped(f"  {bytes_text(each.freed):>8}  ", each.change + remarks)
    return [f"to free memory on rank {rank}:", *lines] if lines else []


def measured_memory(plan: Plan, facts: Mapping[str, Any], width: int = WIDTH) -> list[str]:
    """Return lines of planned against measured bytes of tensors, for the ranks whose measured peak is highest.

    ``facts`` of the timeline: ``held_bytes`` of the models of each rank; ``peak_bytes``: on a GPU what torch has
    allocated, on CPUs the process, with libraries and code, for which nothing is planned; ``device_bytes``: what the
    driver of a GPU has counted after instructions.
    """
    tensors, peaks, in_use = facts["held_bytes"], facts["peak_bytes"], facts.get("device_bytes", {})
    ranks = sorted(peaks, key=lambda rank: -peaks[rank])[:NUM_MEASURED]
    lines = []
    for rank in ranks:
        memory = plan.memories[int(rank)]
        parts = [f"  rank {rank}: {_tensors(memory, tensors[rank])}"]
        if facts["device"] != "cpu":
            planned = memory.peak_bytes if memory.is_complete else None
            parts = [f"{parts[0]};", _peaks("peak", planned, peaks[rank], "measured")]
            if used := in_use.get(rank):
                whole = None if planned is None else planned + plan.outside_bytes(int(rank))
                parts = [parts[0], f"{parts[1]};", _peaks("device", whole, used, "in use")]
        is_short = len(" ".join(parts)) + 2 <= width
        lines += [" ".join(parts)] if is_short else [parts[0], *(f"    {part}" for part in parts[1:])]
    return ["  memory, planned and measured", *(f"  {line}" for line in lines)]


def _tensors(memory: RankMemory, tensors: TensorBytes) -> str:
    measured = sum(size for sizes in tensors.values() for key, size in sizes.items() if key != "host")
    known = bytes_text(memory.tensor_bytes if None not in memory.states.values() else None)
    return f"tensors of models {known} planned, {bytes_text(measured)} allocated"


def _peaks(of: str, planned: int | None, measured: int, how: str) -> str:
    return f"{of} {bytes_text(planned)} planned, {bytes_text(measured)} {how}"
