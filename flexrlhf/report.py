"""What a person reads: the plan before a run, the summary after it. Plain text, fixed width."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from flexrlhf.metrics import METRICS
from flexrlhf.placement.cluster import DEVICE_CLASSES
from flexrlhf.placement.memory import Phase, RankMemory
from flexrlhf.placement.memory import bytes_text as _bytes
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.placement.states import State
from flexrlhf.plan import Plan
from flexrlhf.remedies import remedies, tightest_rank
from flexrlhf.strategies.instructions import Eval, Instruction, Move, Save, Sync
from flexrlhf.strategies.overlap import overlapping_operators
from flexrlhf.strategies.schedule import whole_step

NUM_REMEDIES = 6
SMALLEST_DEVICE_BYTES = min(int(1e9 * device.memory_gb) for device in DEVICE_CLASSES.values())


def format_plan(plan: Plan) -> str:
    """The whole plan: sizes, placement, memory of weights, groups, schedule with bytes."""
    spec = plan.spec
    head = (
        f"{spec.name}: {spec.algorithm.name}, {plan.strategy} on {plan.placement.num_ranks} devices, {spec.steps} steps"
    )
    sections = [
        [head],
        _titled("batch", _batch(plan)),
        _titled("placement", _placement(plan)),
        _titled("memory per rank, without driver context (about 1 GB on CUDA) and fragmentation", _memory(plan)),
        _titled("overlap", _overlap(plan)),
        _titled("process groups", _groups(plan)),
        _titled("schedule of one step (left: the ranks that an instruction names)", schedule_table(plan)),
    ]
    return "\n\n".join("\n".join(section) for section in sections)


def _titled(title: str, lines: Iterable[str]) -> list[str]:
    return [title, *(f"  {line}" for line in lines)]


def _batch(plan: Plan) -> list[str]:
    batch, epochs = plan.batch, plan.spec.algorithm.epochs
    rows, n, m, c = batch.num_rows, batch.samples_per_prompt, batch.num_mini_batches, batch.num_chunks
    sizes = [n * len(batch.prompts(mini_batch)) for mini_batch in batch.mini_batches]
    chunks = [sum(sizes[mini_batch] for mini_batch in batch.chunk(index)) for index in range(c)]
    p, r = plan.lengths.prompt, plan.lengths.response
    return [
        f"rows per step        {rows:>8} = {batch.num_prompts} prompts x {n} samples",
        f"rows per mini-batch  {_range(sizes):>8} = {rows} rows / {m} mini-batches, whole prompts",
        f"rows per chunk       {_range(chunks):>8} = {rows} rows / {c} chunks of {m // c} mini-batches",
        f"optimizer steps      {m * epochs:>8} = {m} mini-batches x {epochs} epochs",
        f"tokens per row       {p + r:>8} = {p} prompt + {r} response, padded",
        *(_rows_per_replica(model, plan) for model in plan.placement.models),
    ]


def _range(sizes: Sequence[int]) -> str:
    return str(sizes[0]) if len(set(sizes)) == 1 else f"{min(sizes)}-{max(sizes)}"


def _rows_per_replica(model: PlacedModel, plan: Plan) -> str:
    batch = plan.batch
    counts = [
        len(batch.held(model.layout, ranks[0], batch.mini_batches)) * batch.samples_per_prompt
        for ranks in model.layout.tp_sets
    ]
    shown = ", ".join(map(str, counts[:8])) + (" ..." if len(counts) > 8 else "")
    if len(set(counts)) == 1:
        shown = str(counts[0])
    dp = model.layout.dp
    replicas = "its one replica" if dp == 1 else f"each of {dp} replicas"
    return f"rows of {model.name:<13}{shown:>8} on {replicas}"


def _placement(plan: Plan) -> list[str]:
    lines = []
    for model in plan.placement.models:
        devices = {(plan.cluster.devices[r].node, plan.cluster.devices[r].device_class) for r in model.ranks}
        where = ", ".join(f"node {node} ({name})" for node, name in sorted(devices))
        trained = "trained" if model.trained else "follows " + model.role if model.is_shadow else "frozen"
        lines.append(f"{model.name:<14}{ranks_text(model.ranks):<12} {where:<22} {_computing(model):<28} {trained}")
    lines += [f"{role:<14}the base weights of {owner}, without adapters" for role, owner in _shared(plan).items()]
    pairs = plan.placement.co_located_pairs()
    lines.append("share devices: " + (", ".join(f"{a} + {b}" for a, b in pairs) or "none"))
    lines.append("idle: " + (ranks_text(plan.placement.idle_ranks) if plan.placement.idle_ranks else "none"))
    return lines + [f"warning: {text}" for text in plan.placement.warnings]


def _computing(model: PlacedModel) -> str:
    """Engine, and of the sharding and the type what is not the default."""
    settings, layout = model.settings, model.layout
    shown = [f"dp {layout.dp}"] if layout.dp > 1 else []
    shown += [f"tp {layout.tp}"] if layout.tp > 1 else []
    shown += [f"zero {settings.zero}"] if settings.zero else []
    shown += [settings.dtype] if settings.dtype != "float32" else []
    shown += ["lora"] if settings.lora is not None else []
    return " ".join([settings.engine, *shown])


def _shared(plan: Plan) -> dict[str, str]:
    models = plan.spec.models
    return {role: m.share for role in type(models).model_fields if (m := models.of(role)) and m.share is not None}


def _memory(plan: Plan) -> list[str]:
    """For ranks with the same models and device the one that needs most; then what would free memory."""
    alike: dict[tuple[tuple[str, ...], str, int | None], list[RankMemory]] = {}
    for memory in plan.memories:
        device = plan.cluster.devices[memory.rank].device_class, plan.cluster.memory_bytes(memory.rank)
        alike.setdefault((tuple(memory.states), *device), []).append(memory)
    lines = []
    for (_, device_class, size), members in alike.items():
        highest = max(members, key=lambda memory: memory.peak_bytes)
        where = "" if size is None else f" ({device_class}, {_bytes(size)})"
        lines.append(f"{ranks_text(tuple(memory.rank for memory in members))}{where}: {_peak(highest)}")
        lines += [f"  {line}" for line in _memory_table(highest)]
    return lines + _remedies(plan)


def _peak(memory: RankMemory) -> str:
    if memory.peak is None:
        return "nothing"
    known = "at most" if memory.is_complete else "at least"
    return f"{known} {_bytes(memory.peak_bytes)}, for {memory.peak.label}"


def _memory_table(memory: RankMemory) -> list[str]:
    """A line for each model, which holds that much between its calls too, and for each phase with its parts."""
    if not memory.states:
        return []
    return [
        *_states(memory.states),
        f"{'':<25}{'in all':>11}  of it beside the states",
        *(line for phase in memory.phases if _is_worth_a_line(phase, memory) for line in _phase_lines(phase)),
        f"{'host memory':<25}{_bytes(memory.host_bytes):>11}  {_host(memory)}".rstrip(),
    ]


def _states(states: Mapping[str, State | None]) -> list[str]:
    sizes = {name: asdict(state) if state else None for name, state in states.items()}
    shown = ["weights", "gradients", "optimizer"]
    shown += [key for key in ("buffers", "host") if any(each and each[key] for each in sizes.values())]
    lines = [f"{'':<25}" + "".join(f"{key:>11}" for key in shown)]
    for name, each in sizes.items():
        texts = ["? B"] if each is None else [_bytes(each[key]) if each[key] else "-" for key in shown]
        lines.append(f"{name:<25}" + "".join(f"{text:>11}" for text in texts))
    return lines


def _is_worth_a_line(phase: Phase, memory: RankMemory) -> bool:
    """Left out is what takes next to nothing beside the states, unless it is a model call."""
    return phase == memory.peak or phase.kind in ("generate", "forward", "train") or _share(phase.besides, phase)


def _phase_lines(phase: Phase) -> list[str]:
    parts = [f"{_bytes(size)} {name}" for name, size in phase.parts.items() if size is None or _share(size, phase)]
    head = f"{phase.label:<25}{_bytes(phase.total):>11}  "
    unbroken = [part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts]
    lines = textwrap.wrap(head + ", ".join(unbroken), 96, subsequent_indent=" " * len(head))
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _host(memory: RankMemory) -> str:
    later = max((phase.host for phase in memory.phases), default=0)
    return "while models are loaded, each whole and in float32" if memory.host_bytes > later else ""


def _share(size: int, phase: Phase) -> bool:
    """Whether ``size`` is at least a hundredth."""
    return 100 * size >= phase.total > 0


def _remedies(plan: Plan) -> list[str]:
    """What would lower the highest peak, where it is not far below what devices hold."""
    rank = tightest_rank(plan)
    size = plan.cluster.memory_bytes(rank) or SMALLEST_DEVICE_BYTES
    if 2 * plan.memories[rank].peak_bytes < size:
        return []
    lines = [
        f"  {_bytes(remedy.freed):>8}  {remedy.change}{'' if remedy.same_numbers else '  (other numbers)'}"
        for remedy in remedies(plan, rank)[:NUM_REMEDIES]
    ]
    return [f"to free memory on rank {rank}:", *lines] if lines else []


def _overlap(plan: Plan) -> list[str]:
    """Operators that run at the same time, and what keeps others from it."""
    lines = overlapping_operators(plan.schedule) or ["none"]
    whole = [name for name in plan.graph.waves if name in whole_step(plan.graph, plan.placement)]
    if plan.batch.num_chunks > 1 and whole:
        lines.append(f"not chunked: {', '.join(whole)}; shadows, whiten: mini_batch and epochs: 1 let them stream")
    return lines


def _groups(plan: Plan) -> list[str]:
    alone = tuple(sorted(group.ranks[0] for group in plan.groups if group.alone))
    lines = [f"{group.purpose:<24} {ranks_text(group.ranks)}" for group in plan.groups if not group.alone]
    lines += [f"{'alone, each':<24} {ranks_text(alone)}"] if alone else []
    return lines or ["none: one rank"]


def schedule_table(plan: Plan) -> list[str]:
    """One line for each instruction: ranks, kind, label, and for moves and syncs the primitive and the bytes."""
    rows = [(i, _label(i)) for i in plan.schedule.instructions]
    width = max(len(label) for _, label in rows)
    return [
        f"{rank_marks(i.ranks, plan.placement.num_ranks)}  {type(i).__name__.lower():<5} "
        f"{label:<{min(width, 60)}}  {'  '.join(_notes(plan, i))}".rstrip()
        for i, label in rows
    ]


def _label(instruction: Instruction) -> str:
    if isinstance(instruction, Move):
        return f"{', '.join(instruction.columns)}  {instruction.edge}"
    return instruction.label


def _notes(plan: Plan, instruction: Instruction) -> list[str]:
    """Primitive, bytes, period, chunk, lag: whatever the instruction has."""
    notes: list[str] = []
    match instruction:
        case Move():
            notes = [instruction.primitive, _bytes(plan.move_bytes(instruction))]
        case Sync():
            notes = ["point_to_point", _bytes(plan.sync_bytes(instruction)), _period(instruction.every)]
        case Eval() | Save():
            notes = ["after the last step" if instruction.every >= plan.spec.steps else _period(instruction.every)]
    chunk = getattr(instruction, "chunk", None)
    if chunk is not None:
        notes.append(f"chunk {chunk}")
    if instruction.lag:
        notes.append("of the last batch")
    return notes


def _period(every: int) -> str:
    return "every step" if every == 1 else f"every {every} steps"


def rank_marks(ranks: tuple[int, ...], num_ranks: int) -> str:
    """``##..`` for up to 32 ranks, the ranks themselves beyond."""
    if num_ranks > 32:
        return f"{span_of(ranks):<12}"
    return "".join("#" if rank in ranks else "." for rank in range(num_ranks))


def ranks_text(ranks: tuple[int, ...]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {span_of(ranks)}"


def span_of(ranks: tuple[int, ...]) -> str:
    """``0-3,6`` for (0, 1, 2, 3, 6)."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def format_summary(
    name: str, directory: str, rows: Sequence[Mapping[str, float]], samples: Sequence[Mapping[str, str]]
) -> str:
    """First and last three steps of the main metrics, answers of the last evaluation, and where the files are."""
    lines = [f"{name}: {len(rows)} steps, {sum(row['seconds'] for row in rows):.1f} s, results in {directory}"]
    for metric in METRICS:
        values = [row[metric.name] for row in rows if metric.name in row]
        if values and metric.progress:
            few = max(1, min(3, len(values) // 2))
            first, last = _mean(values[:few]), _mean(values[-few:])
            trend = f"{first:.4g} -> {last:.4g}" if len(values) > 1 else f"{last:.4g}"
            lines.append(f"  {metric.name:<18}{trend:<26}{metric.definition}")
    lines += [f"  {sample['prompt']} -> {sample['answer']}" for sample in samples]
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
