"""Text of a plan before a run: plain, of fixed width."""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from flexrlhf.memory.packed_rows import TextPacking
from flexrlhf.placement.layout import BatchShape, Layout
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.plan.gpu_warnings import gpu_warnings
from flexrlhf.plan.memory_text import peak_text, planned_memory
from flexrlhf.plan.node_traffic import SentBytes
from flexrlhf.plan.overlap import overlapping_operators
from flexrlhf.plan.placement_text import NAME_WIDTH, environment_lines, placement_lines
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.preset_text import preset_lines
from flexrlhf.plan.schedule_text import schedule_table
from flexrlhf.strategies.instructions import Eval, Move, Run, Sync
from flexrlhf.text import bytes_text, counted, ranks_text, span_of


def _head(plan: Plan) -> str:
    spec, devices = plan.spec, counted(plan.placement.num_ranks, "device")
    run = f"{spec.name}: {spec.algorithm.name}, {plan.strategy} on {devices}, {counted(spec.steps, 'step')}"
    return run + spec.debug.thrown_text


def format_plan(plan: Plan) -> str:
    """Return the whole plan as text: batch, placement, memory, overlap, groups, schedule with bytes."""
    spec, head = plan.spec, _head(plan)
    left_out = [f"{column}: {reason}" for column, reason in plan.graph.left_out]
    sections = [
        [head, *_without_cluster(plan)],
        *([_titled("preset", preset_lines(spec))] if spec.algorithm.like is not None else []),
        _titled("batch", _batch(plan)),
        _titled("placement", placement_lines(plan)),
        *([_titled("environment", lines)] if (lines := list(environment_lines(plan))) else []),
        _titled("memory per rank, without driver context (about 1 GB on CUDA) and fragmentation", planned_memory(plan)),
        _titled("overlap", _overlap(plan)),
        _titled("process groups", _groups(plan)),
        *([_titled("bytes between nodes in a step", lines)] if (lines := list(_between_nodes(plan))) else []),
        *([_titled("left out", left_out)] if left_out else []),
        _titled("schedule of one step (left: the ranks that an instruction names)", schedule_table(plan)),
    ]
    return "\n\n".join("\n".join(section) for section in sections)


def format_short_plan(plan: Plan, width: int) -> str:
    """Return who is where, the step as a list, the fullest rank, and where the whole plan is, in ``width`` columns."""
    by_ranks: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for model in plan.placement.models:
        by_ranks[model.ranks].append(f"{model.name}{' (trained)' * model.trained}")
    memory = max(plan.memories, key=lambda memory: memory.peak_bytes)
    size = plan.device_bytes(memory.rank)
    room = "" if size is None else f"; it has {bytes_text(size)}"
    rows = [(ranks_text(ranks), ", ".join(names)) for ranks, names in by_ranks.items()]
    labels = Counter(
        each.label if isinstance(each, Run) else f"{each.kind} {each.label}"
        for each in plan.schedule.instructions
        if not (isinstance(each, Move) or (isinstance(each, Sync | Eval) and each.at_start))
    )
    step = [f"{label}{f' x {count}' * (count > 1)}" for label, count in labels.items()]
    rows += [
        ("step", " > ".join(step)),
        ("memory", f"rank {memory.rank} needs {peak_text(memory)}{room}"),
        *([("classes", plan.placement.reason)] if plan.placement.reason else []),
        ("whole plan", f"{plan.spec.directory}/plan.txt"),
        *(("warning", text) for text in (*plan.placement.warnings, *gpu_warnings(plan))),
    ]
    start = 4 + max(len(name) for name, _ in rows)
    lines = [_head(plan)]
    for name, text in rows:
        parts = textwrap.wrap(text, max(40, width - start), break_long_words=False, break_on_hyphens=False)
        lines += [f"  {'' if index else name:<{start - 2}}{part}" for index, part in enumerate(parts)]
    return "\n".join(lines)


def _between_nodes(plan: Plan) -> Iterator[str]:
    """Yield a line for each group of nodes that send the same bytes to others."""
    groups: dict[SentBytes, list[int]] = defaultdict(list)
    for node, sent in plan.traffic.sent.items():
        groups[sent].append(node)
    for sent, nodes in groups.items():
        which = f"{'node' if len(nodes) == 1 else 'each of nodes'} {span_of(tuple(nodes))}"
        yield f"{which} sends {sent}"


def _without_cluster(plan: Plan) -> list[str]:
    """Return a line for a run whose number of devices nobody has set."""
    cluster = plan.spec.cluster
    if cluster.devices is not None or cluster.nodes:
        return []
    return ["no cluster is given, so one device is planned: set cluster.devices, or use --devices"]


def _titled(title: str, lines: Iterable[str]) -> list[str]:
    return [title, *(f"  {line}" for line in lines)]


def _batch(plan: Plan) -> list[str]:
    batch, epochs = plan.batch, plan.spec.algorithm.epochs
    rows, n, m, c = batch.num_rows, batch.samples_per_prompt, batch.num_mini_batches, batch.num_chunks
    sizes = [n * len(batch.prompts(mini_batch)) for mini_batch in batch.mini_batches]
    chunks = [sum(sizes[mini_batch] for mini_batch in batch.chunk(index)) for index in range(c)]
    chunked = f"{counted(c, 'chunk')} of {counted(m // c, 'mini-batch')}"
    p, r, k = plan.lengths.prompt, plan.lengths.response, batch.sequences
    of_prompt = f"{counted(n // k, _response(plan))}" + (f" x {k} sequences of an episode, at most" if k > 1 else "")
    return [
        f"rows per step        {rows:>8} = {counted(batch.num_prompts, 'prompt')} x {of_prompt}" + _places(batch),
        *_largest(plan),
        f"rows per mini-batch  {_range(sizes):>8} = {rows} rows / {counted(m, 'mini-batch')}, whole prompts",
        f"rows per chunk       {_range(chunks):>8} = {rows} rows / {chunked}",
        f"optimizer steps      {m * epochs:>8} = {counted(m, 'mini-batch')} x {counted(epochs, 'epoch')}",
        f"tokens per row       {p + r:>8} = {p} prompt + {r} response, padded; {_passes(plan)}",
        *(f"tokens per text      {width:>8} of {role}, by its own tokenizer" for role, width in plan.lengths.texts),
        *([] if plan.sampled_ids is None else [f"sampled ids          {plan.sampled_ids:>8} that all models embed"]),
        f"blocks of passes     {batch.num_blocks:>8} in a mini-batch, {_blocks(plan)}",
        *(_rows_per_replica(model.name, model.layout, plan) for model in plan.placement.models),
        *(_rows_per_replica(name, layout, plan) for name, layout in plan.placement.layouts.items()),
    ]


def _largest(plan: Plan) -> Iterator[str]:
    """Yield a line on the most prompts of a step, and on the longest text, where the memory of the devices is known."""
    found = plan.limits.largest_batch()
    if found is None:
        return
    limit = "by memory" if found.is_memory_filled else "the limit of a plan"
    most = f"at most so many prompts a step at these settings, {limit}" if found.prompts else "none fits"
    yield f"largest batch        {found.prompts:>8} = {most}"
    yield from plan.limits.text_lines()


def _places(batch: BatchShape) -> str:
    """Return how many of the prompts of a step are there at most once."""
    if batch.segments > 1:
        most = f"at most {batch.num_new * batch.attempts}" if batch.attempts > 1 else batch.num_new
        return f", places of {most} new ones in {batch.segments} segments"
    return f", at most, in {batch.attempts} attempts" if batch.attempts > 1 else ""


def _response(plan: Plan) -> str:
    """Return the word for a response to a prompt: a sample of the policy, or a response of the data set."""
    return "response" if plan.graph.generated is None else "sample"


def _passes(plan: Plan) -> str:
    """Return how sequences lie in the rows of forward and training passes."""
    models = [model for model in plan.placement.models if model.rollout is None]
    packed = {
        model.name: TextPacking.of(model, plan.shapes.get(model.role), plan.lengths.of_role(model.role).total).packs
        for model in models
    }
    if not any(packed.values()):
        return "one text in each row of a pass"
    others = [name for name, packs in packed.items() if not packs]
    shares = [model.settings.shares_in_passes for model in models if packed[model.name]]
    once = f", a prompt once for its {_response(plan)}s" if plan.batch.samples_per_prompt > 1 and any(shares) else ""
    packs = f"passes pack texts{once}" + (f", except {', '.join(others)}" if others else "")
    return f"{packs}; {_attention(plan, models)}"


def _attention(plan: Plan, models: Sequence[PlacedModel]) -> str:
    """Return how attention in forward and training passes separates sequences."""
    masked = {
        model.name: model.settings.attention
        for model in models
        if TextPacking.of(model, plan.shapes.get(model.role), plan.lengths.of_role(model.role).total).masks
    }
    if not masked:
        return "attention by lengths"
    kernels = [f"{name} ({kernel})" for name, kernel in masked.items()]
    return f"attention under masks: {', '.join(kernels)}"


def _blocks(plan: Plan) -> str:
    """Return which models compute parts of blocks, whose results have other last digits than the ones of whole
    blocks."""
    models = [model for model in plan.placement.models if model.rollout is None]
    layouts: dict[str, Layout] = {model.name: model.layout for model in models} | {**plan.placement.layouts}
    cutting = [name for name, layout in layouts.items() if not plan.batch.takes_whole_blocks(layout)]
    return f"cut by replicas of {', '.join(cutting)}" if cutting else "whole on every replica"


def _range(sizes: Sequence[int]) -> str:
    return str(sizes[0]) if len(set(sizes)) == 1 else f"{min(sizes)}-{max(sizes)}"


def _rows_per_replica(name: str, layout: Layout, plan: Plan) -> str:
    batch = plan.batch
    counts = [
        batch.num_prompts_on(layout, ranks[0], batch.mini_batches) * batch.samples_per_prompt
        for ranks in layout.replica_sets
    ]
    shown = ", ".join(map(str, counts[:8])) + (" ..." if len(counts) > 8 else "")
    if len(set(counts)) == 1:
        shown = str(counts[0])
    replicas = "its one replica" if layout.dp == 1 else f"each of {layout.dp} replicas"
    by_protocol = f", by protocol {layout.protocol.name}" if layout.protocol is not None else ""
    width = max(NAME_WIDTH, *(len(each.name) for each in plan.placement.models))
    return f"rows of {name:<{width}}{shown:>8} on {replicas}{by_protocol}"


def _overlap(plan: Plan) -> list[str]:
    """Return lines of operators that run at the same time, and the settings that prevent overlap."""
    lines = overlapping_operators(plan.schedule) or ["none"]
    whole = [name for name in plan.graph.waves if name in plan.placement.whole_step(plan.graph)]
    if plan.batch.num_chunks > 1 and whole:
        lines.append(f"not chunked: {', '.join(whole)}; shadows, whiten: mini_batch and epochs: 1 let them stream")
    return lines


def _groups(plan: Plan) -> list[str]:
    alone = tuple(sorted(group.ranks[0] for group in plan.groups if group.alone))
    lines = [f"{group.purpose:<24} {ranks_text(group.ranks)}" for group in plan.groups if not group.alone]
    lines += [f"{'alone, each':<24} {ranks_text(alone)}"] if alone else []
    most = plan.most_communicators
    apart = ["moves", "syncs"]
    apart += ["messages inside layers"] * any(each.inside for each in plan.groups)
    apart += ["vLLM's own"] * (most > max(map(plan.communicators_of_groups, plan.cluster.ranks)))
    others = f"{', '.join(apart[:-1])} and {apart[-1]}"
    shared = f"{counted(most, 'communicator')} on a rank: of the same ranks all share one but {others}"
    return [*lines, shared] if most else lines or ["none: one rank"]
