"""Printed text of a simulation and of its comparison with a run: fixed width."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import astuple
from pathlib import Path

from flexrlhf.api import Instruction, Move, Plan, Run, Sync, bytes_text, counted, rank_marks, ranks_text, span_of
from flexrlhf.guideline.costs.cost_model import Cost
from flexrlhf.guideline.costs.profiles import Accuracy
from flexrlhf.guideline.simulation.compare import Comparison, SpanComparison, SpanKey
from flexrlhf.guideline.simulation.episode_prices import crowding
from flexrlhf.guideline.simulation.generation_load import load_lines
from flexrlhf.guideline.simulation.inputs import CostSource, TextLengths
from flexrlhf.guideline.simulation.simulate import Simulation, TimeShares
from flexrlhf.guideline.simulation.timed_instructions import PricedInstruction
from flexrlhf.guideline.simulation.usage import Prices, usage_of
from flexrlhf.guideline.simulation.usage_text import usage_lines

LABEL_WIDTH, RANKS_WIDTH = 52, 24
NUM_KEYS = 5


def format_simulation(simulation: Simulation, source: CostSource, prices: Prices | None = None) -> str:
    """Return the text of a simulation.

    source:  origin of the predicted time
    prices:  of devices; None: no money is printed
    """
    plan = simulation.plan
    sections = [
        _head(simulation, source, prices),
        _titled("instructions of one step (left: the ranks that an instruction names)", _instructions(simulation)),
        _titled("devices, share of the step", _devices(simulation)),
        _titled("placed models, share of the step that they run", _models(simulation)),
        _titled("bytes of one step between devices (moves and syncs)", _links(simulation)),
    ]
    if simulation.rare:
        sections.append(_titled("not in every step, and not in the seconds above", _rare(simulation, plan)))
    return "\n\n".join("\n".join(section) for section in sections)


def format_prediction(simulation: Simulation, source: CostSource, prices: Prices | None = None) -> str:
    """Return the short text of a simulation, which ends that of its plan. ``source``: of the predicted time.
    ``prices``: of devices; None: no money is printed."""
    return "\n".join(_titled(f"predicted, by {source.name}", _speed(simulation, source, prices)))


def _titled(title: str, lines: Iterable[str]) -> list[str]:
    return [title, *(f"  {line}" for line in lines)]


def _head(simulation: Simulation, source: CostSource, prices: Prices | None) -> list[str]:
    plan = simulation.plan
    title = (
        f"{plan.spec.name}: {plan.spec.algorithm.name}, {plan.strategy} on {plan.placement.num_ranks} devices "
        f"({', '.join(plan.cluster.classes)}), by {source.name}"
    )
    lines = [
        *_speed(simulation, source, prices),
        f"devices run models {_percent(simulation.utilisation)} of the time, and {_percent(simulation.bubble)} they "
        f"wait (the bubble)",
        *_copies(simulation),
        *_environments(simulation, source),
        *load_lines(simulation, source.costs),
        *plan.limits.text_lines(),
    ]
    return _titled(title, lines)


def _speed(simulation: Simulation, source: CostSource, prices: Prices | None) -> Iterator[str]:
    """Yield lines on the time of a step with its range, by part, and on the run in a user's units."""
    lengths = simulation.lengths
    yield (
        f"{seconds_text(simulation.seconds)} a step, {simulation.samples_per_second:.4g} samples/s, of "
        f"{lengths.mean_prompt:.4g} prompt tokens and {lengths.mean_response:.4g} of the response{lengths.assumption}"
        f"{_passes(simulation)}"
    )
    yield range_text(source.accuracy_of(simulation.plan), simulation.seconds)
    yield from _parts(simulation, source)
    yield from usage_lines(usage_of(simulation, prices))


def _copies(simulation: Simulation) -> Iterator[str]:
    """Yield a line on copies of models to host memory and back, next to the work of a device."""
    if simulation.copying:
        copying, exposed = seconds_text(simulation.copying), seconds_text(simulation.exposed)
        hidden = _percent(1 - simulation.exposed / simulation.copying)
        yield f"models are copied to host memory and back for {copying}, {hidden} hidden: a step is {exposed} longer"


def _environments(simulation: Simulation, source: CostSource) -> Iterator[str]:
    """Yield a line on the replies of environments in a step, and on how long ranks wait for them."""
    environment, waits = simulation.plan.spec.environment, simulation.reply_seconds
    if environment is None:
        return
    processes = counted(environment.processes, "process")
    times = source.costs.environment(environment.name)
    longer = 1.0 if times is None else crowding(simulation.plan, times.computing)
    shared = f", {longer:.3g} times as long as with a core for each" if longer > 1 else ""
    part = _percent(waits / (simulation.seconds or 1.0))
    yield f"ranks wait {seconds_text(waits)} ({part} of a step) for replies of environments, in {processes}{shared}"


def _parts(simulation: Simulation, source: CostSource) -> Iterator[str]:
    """Yield a line of the parts of a step, each on the device on which it takes longest, with their ranges."""
    texts = []
    for part, seconds in simulation.part_seconds.items():
        accuracy = source.accuracy_of(simulation.plan, part)
        if not accuracy.has_range:
            texts.append(f"{part} {seconds_text(seconds)}")
            continue
        low, high = map(seconds_text, accuracy.seconds(seconds))
        unit = high[high.index(" ") :]
        texts.append(f"{part} {seconds_text(seconds)} ({low.removesuffix(unit)} to {high})")
    if len(texts) > 1:
        yield ", ".join(texts)


def _passes(simulation: Simulation) -> str:
    """Return how much of the texts passes compute: less than 1 where samples share a prompt, more with padding."""
    return "" if simulation.computed is None else f"; passes compute {simulation.computed:.2f} tokens for each"


def _instructions(simulation: Simulation) -> Iterator[str]:
    """Yield a line for each kind and label, with all chunks.

    Moves proceed while the instructions after them run.
    """
    groups: dict[tuple[str, str], list[PricedInstruction]] = defaultdict(list)
    for item in simulation.regular:
        groups[item.instruction.kind, item.instruction.label].append(item)
    num_ranks = simulation.plan.placement.num_ranks
    width = min(LABEL_WIDTH, max((len(label) for _, label in groups), default=0))
    margin = len(rank_marks((), num_ranks))
    yield f"{'':<{margin + 10 + width}} {'total':>9}  largest part, bytes"
    for (kind, label), items in groups.items():
        marks = rank_marks(items[0].instruction.ranks, num_ranks)
        total = Cost(_sum(item.cost for item in items))
        notes = "  ".join(note for note in _notes(simulation.plan, items, total) if note)
        seconds = seconds_text(total.seconds)
        yield f"{marks}  {kind:<7} {_shortened(label, width):<{width}} {seconds:>9}  {notes}".rstrip()


def _notes(plan: Plan, items: list[PricedInstruction], total: Cost) -> list[str]:
    """Return the part that takes longest, bytes, period and number of chunks, without what there is not."""
    first = items[0].instruction
    if isinstance(first, Move | Sync):
        what = first.primitive if isinstance(first, Move) else _largest(total)
        size = bytes_text(sum(_crossing(plan, item.instruction) for item in items))
    else:
        what, size = _largest(total), ""
    every = items[0].every
    parts = {f"every {every} steps": every, f"{len(items)} chunks": len(items)}
    return [what, size, *(text for text, number in parts.items() if number > 1)]


def _crossing(plan: Plan, instruction: Instruction) -> int:
    """Return the bytes that cross between ranks."""
    if isinstance(instruction, Move):
        return plan.traffic.move_bytes(instruction)
    return (plan.traffic.sync_bytes(instruction) or 0) if isinstance(instruction, Sync) else 0


def _sum(costs: Iterable[Cost]) -> dict[str, float]:
    parts: Counter[str] = Counter()
    for cost in costs:
        parts.update(cost.parts)
    return dict(parts)


def _largest(cost: Cost) -> str:
    """Return the part that takes longest; if there are several, with its share."""
    busy = [name for name, seconds in cost.parts.items() if seconds]
    if not busy:
        return ""
    return cost.largest if len(busy) == 1 else f"{cost.largest} {_percent(cost.parts[cost.largest] / cost.seconds)}"


def _devices(simulation: Simulation) -> list[str]:
    """Return a line for each group of ranks with the same models and shares, with the highest of their peaks."""
    plan = simulation.plan
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for ranks, shares in zip(simulation.blocks, simulation.shares, strict=True):
        models = ", ".join(model.name for model in plan.placement.on_rank(ranks[0]))
        groups[models, _shares(shares)].extend(ranks)
    names = [_shortened(ranks_text(tuple(sorted(ranks))), RANKS_WIDTH) for ranks in groups.values()]
    width = max(map(len, (*names, *plan.cluster.classes)), default=0)
    lines = [f"{'':<{width}}  running  exchanging  waiting  memory at most"]
    for name, ((models, cells), members) in zip(names, groups.items(), strict=True):
        lines.append(f"{name:<{width}}  {cells}  {_memory(plan, members):<18} {models}")
    lines += [f"{ranks_text(idle)}  idle" for idle in [plan.placement.idle_ranks] if idle]
    return lines + (list(_classes(simulation, width)) if len(plan.cluster.classes) > 1 else [])


def _classes(simulation: Simulation, width: int) -> Iterator[str]:
    """Yield a line for each device class with the mean shares of its devices; those without a model only wait."""
    cluster = simulation.plan.cluster
    by_rank = {
        rank: shares for ranks, shares in zip(simulation.blocks, simulation.shares, strict=True) for rank in ranks
    }
    for name in cluster.classes:
        of_class = [by_rank[rank] for rank in cluster.ranks_on(name) if rank in by_rank]
        number = len(cluster.ranks_on(name))
        running = sum(shares.running for shares in of_class) / number
        exchanging = sum(shares.exchanging for shares in of_class) / number
        yield f"{name:<{width}}  {_shares(TimeShares(running, exchanging))}  mean of {counted(number, 'device')}"


def _shares(shares: TimeShares) -> str:
    return f"{_percent(shares.running):>7}  {_percent(shares.exchanging):>10}  {_percent(shares.waiting):>7}"


def _memory(plan: Plan, ranks: Iterable[int]) -> str:
    """Return the highest peak among ``ranks``, and the memory of that device."""
    highest = max(ranks, key=lambda rank: plan.memories[rank].peak_bytes)
    size = plan.device_bytes(highest)
    return bytes_text(plan.memories[highest].peak_bytes) + ("" if size is None else f" of {bytes_text(size)}")


def _models(simulation: Simulation) -> Iterator[str]:
    for model in simulation.plan.placement.models:
        share = simulation.model_shares[model.name]
        seconds = seconds_text(share * simulation.seconds)
        yield f"{model.name:<15} {_percent(share):>5}  {seconds:>9}  on {ranks_text(model.ranks)}"


def _links(simulation: Simulation) -> Iterator[str]:
    """Yield a line for each group of nodes with the same bytes."""
    groups: dict[str, list[int]] = defaultdict(list)
    many = simulation.plan.cluster.num_nodes > 1
    for node, traffic in simulation.node_bytes.items():
        within, sent, received = (bytes_text(int(size)) for size in astuple(traffic))
        outwards = f", {sent} to other nodes, {received} from them" if many else ""
        groups[f"{within} inside it{outwards}"].append(node)
    for text, nodes in groups.items():
        yield f"{'node' if len(nodes) == 1 else 'each of nodes'} {span_of(tuple(nodes))}: {text}"


def _rare(simulation: Simulation, plan: Plan) -> Iterator[str]:
    for item in simulation.rare:
        kind = item.instruction.kind
        when = "after the last step" if item.every >= plan.spec.steps else f"every {item.every} steps"
        if isinstance(item.instruction, Run) and item.every >= plan.spec.steps:
            when = "at the first step"
        if kind == "eval":
            when += f", with {plan.batch.num_prompts} prompts in the evaluation set"
        yield f"{kind:<7} {item.instruction.label:<34} {seconds_text(item.cost.seconds):>9}  {when}"


def format_comparison(
    comparison: Comparison, path: Path | str, lengths: TextLengths | None = None, own_mean: float | None = None
) -> str:
    """Return a table of medians, then the spans that were only measured or only predicted.

    path:      of the measured timeline
    lengths:   of the prediction
    own_mean:  mean response length of the compared steps; None: unknown
    """
    steps, step = comparison.steps, comparison.step
    width = min(LABEL_WIDTH, max((len(line.label) for line in comparison.lines), default=0))
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"
    lines = [
        f"against {path}: {which}",
        f"  a step: measured {seconds_text(step.measured)}, predicted {seconds_text(step.predicted)}"
        f"{_error(step.error, ', error ')}",
        *_own_lengths(path, lengths, own_mean),
        f"  {'medians':<{width + 8}}  measured predicted   error     waited predicted  spans",
        *(f"  {_compared(line, width)}" for line in comparison.lines),
        *_only("only predicted", comparison.missing),
        *_only("only measured", comparison.extra),
    ]
    return "\n".join(lines)


def _own_lengths(path: Path | str, lengths: TextLengths | None, own_mean: float | None) -> Iterator[str]:
    """Yield a line on the response lengths behind the two times of a step."""
    if lengths is None or own_mean is None:
        return
    hint = (
        ""
        if f"{own_mean:.3g}" == f"{lengths.mean_response:.3g}"
        else f"; --lengths {Path(path).parent} takes the run's"
    )
    yield f"  responses: {own_mean:.4g} tokens in the run's mean, {lengths.mean_response:.4g} in the prediction{hint}"


def _compared(line: SpanComparison, width: int) -> str:
    seconds, waited = line.seconds, line.waited
    cells = f"{seconds_text(seconds.measured):>9} {seconds_text(seconds.predicted):>9} {_error(seconds.error):>7}"
    waits = f"{seconds_text(waited.measured):>9} {seconds_text(waited.predicted):>9}"
    if line.kind != "run":
        waits = f"{'-':>9} {'-':>9}"
    return f"{line.kind:<7} {_shortened(line.label, width):<{width}} {cells}  {waits} {line.count:>6}"


def _only(title: str, keys: Counter[SpanKey]) -> Iterator[str]:
    if not keys:
        return
    yield f"  {title}: {keys.total()} spans"
    for rank, kind, label, step, chunk in list(keys)[:NUM_KEYS]:
        yield f"    rank {rank}, step {step}: {kind} {label}{'' if chunk is None else f', chunk {chunk}'}"
    if len(keys) > NUM_KEYS:
        yield "    ..."


def range_text(accuracy: Accuracy, predicted: float) -> str:
    """Return the range of measured seconds for predicted ones; of another machine's how to get some of this one."""
    if not accuracy.has_range:
        return f"{seconds_text(predicted)} on the machine that was measured; `flexrlhf profile` measures this one"
    low, high = accuracy.seconds(predicted)
    return f"between {seconds_text(low)} and {seconds_text(high)} when measured, in {accuracy.share:.0%} of cases"


def seconds_text(seconds: float) -> str:
    """Return ``seconds`` with three digits, in a suitable unit."""
    if seconds >= 1:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"
    if seconds >= 1e-3:
        return f"{1e3 * seconds:.3g} ms"
    return f"{1e6 * seconds:.3g} us" if seconds else "0 s"


def _percent(share: float) -> str:
    return f"{100 * max(share, 0.0):.0f}%"


def _error(error: float | None, lead: str = "") -> str:
    if error is None:
        return "" if lead else "-"
    # adding 0 makes a rounded -0.0 positive
    return f"{lead}{round(100 * error, 1) + 0.0:+.1f}%"


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
