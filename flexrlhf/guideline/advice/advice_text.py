"""Report of ``advise``: a ranked table, settings of the best, reasons, batches, rejected ones, searched spaces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from flexrlhf.api import PlacementMap, Run, bytes_text, either, table
from flexrlhf.guideline.advice.batches import larger_batches, largest_tried
from flexrlhf.guideline.advice.candidates import FeasibleCandidate
from flexrlhf.guideline.advice.choice import Advice, is_full, tied
from flexrlhf.guideline.advice.rules_text import rules_section
from flexrlhf.guideline.advice.searched_step import is_allowed
from flexrlhf.guideline.advice.settings_text import placement_text, settings_table
from flexrlhf.guideline.advice.space import USABLE
from flexrlhf.guideline.advice.tried_settings import CACHE_SHARES, DECODE_SHARES, PASS_TOKENS
from flexrlhf.guideline.advice.waiting import waiting_lines
from flexrlhf.guideline.costs.cost_model import Cost
from flexrlhf.guideline.search.result import SearchResult
from flexrlhf.guideline.simulation.generation_load import load_lines
from flexrlhf.guideline.simulation.inputs import CostSource
from flexrlhf.guideline.simulation.simulation_text import range_text
from flexrlhf.guideline.simulation.usage import Prices, usage_of
from flexrlhf.guideline.simulation.usage_text import usage_lines

SHOWN = 3
"""Instructions whose time is explained, and shares of rows that are printed one by one."""
ENOUGH = 0.95
"""Share of the most samples/s with which a batch is large enough."""
FULL_SHARE = 0.6
"""Share of memory under which more devices no longer pay (ReaL, section 8)."""
LARGEST_BATCHES = "largest batches at these settings (proposed, not chosen: another batch trains otherwise)"


def format_advice(advice: Advice, source: CostSource, max_batch: bool = False, prices: Prices | None = None) -> str:
    """Return the whole report.

    source:     of the seconds.
    max_batch:  whether to try the largest batch of placements.
    prices:     of devices; None: no money is printed.
    """
    sections = [
        "\n".join([_head(advice, source), *usage_lines(usage_of(advice.best.simulation, prices))]),
        _titled("ranked by the simulated time of a step", [*_ranking(advice), *_legend(advice)]),
        _titled(f"settings of {_name(advice.best)}", settings_table(advice.best)),
        _titled(
            f"why: devices run {advice.best.simulation.utilisation:.0%} of the time",
            [*_reasons(advice), *load_lines(advice.best.simulation, source.costs)],
        ),
        _titled("waiting for environments (seconds a step, by rollout.order)", _waiting(advice)),
        _titled("larger batches (samples/s and memory, as many optimizer steps a step)", _batches(advice)),
        _titled(LARGEST_BATCHES, _largest(advice) if max_batch else ()),
        _titled("rules (of the guideline's placement and `>`, the one to use)", rules_section(advice)),
        _titled("search", _searches(advice)),
        _titled("rejected", _rejected(advice)),
    ]
    return "\n\n".join(section for section in sections if section)


def _head(advice: Advice, source: CostSource) -> str:
    plan = advice.best.plan
    classes = ", ".join(f"{len(plan.cluster.ranks_on(name))} {name}" for name in plan.cluster.classes)
    nodes = f"{plan.cluster.num_nodes} node{'s' if plan.cluster.num_nodes > 1 else ''}"
    rows, lengths = plan.batch, plan.lengths
    return (
        f"{plan.spec.algorithm.name} on {classes} in {nodes}: {rows.num_new} prompts x "
        f"{rows.samples_per_prompt} a step, at most {lengths.prompt} + {lengths.response} tokens"
        f"{_mean(advice)}; seconds from {source.name}; took {advice.seconds:.1f} s\n"
        f"a step of the one to use is {range_text(source.accuracy_of(plan), advice.best.seconds)}{_with_lag(advice)}"
    )


def _with_lag(advice: Advice) -> str:
    """Return a line on the fastest placement with a lag, if it is faster and may not be chosen."""
    item, best = advice.lagging, advice.best
    if item is None or advice.may_lag:
        return ""
    return (
        f"\nwith lag {item.lag}, on batches that many steps old, {item.seconds:.2f} s in place of {best.seconds:.2f}: "
        f"{placement_text(item)}, --max-lag {item.lag} allows it"
    )


def _mean(advice: Advice) -> str:
    """Mean length of responses, if they are shorter than the longest."""
    lengths, longest = advice.best.candidate.space.lengths, advice.best.plan.lengths.response
    text = f", responses of {lengths.mean_response:.4g} tokens on average{lengths.assumption}"
    return text if lengths.mean_response < longest else ""


def _titled(title: str, lines: Iterable[str]) -> str:
    listed = [f"  {line}".rstrip() for line in lines]
    return "\n".join([title, *listed]) if listed else ""


def _rejected(advice: Advice) -> Iterator[str]:
    """Yield the last rejection of each placement: what was proposed again is listed as it is then."""
    for item in advice.rejected:
        if not item.is_again:
            yield f"{item.candidate.method:<10}{item.candidate.name}: {item.reason}"


def _name(item: FeasibleCandidate) -> str:
    return f"{item.candidate.method}, {item.candidate.name}"


def _equal(advice: Advice) -> list[FeasibleCandidate]:
    """Candidates that count as equally fast, the one to use among them."""
    return tied(advice.comparable, advice.margin)


def _ranking(advice: Advice) -> list[str]:
    rows = [("", "method", "placement", "strategy", "ratio vector", "s/step", "samples/s", "memory", "")]
    best, equal = advice.best, _equal(advice)
    for item in advice.feasible:
        mark = ">" if item is best else "=" if item in equal else ""
        seconds, samples = f"{item.seconds:.2f}", f"{item.samples_per_second:.2f}"
        memory, share = bytes_text(int(item.peak)), f"{item.share:.0%}" if item.share else ""
        method, name, strategy = item.candidate.method, item.candidate.name, item.candidate.strategy
        rows.append((mark, method, name, strategy, placement_text(item), seconds, samples, memory, share))
    return table(rows, "<<<<<>>>>")


def _legend(advice: Advice) -> Iterator[str]:
    """Yield what the marks and columns of the ranking mean."""
    taken = "the one to use" if advice.take is None else f"the one to use, by --take {advice.take}"
    tie = f"; = as fast as the fastest within {advice.margin:.0%}" if len(_equal(advice)) > 1 else ""
    star = any(isinstance(item.candidate.spec.placement, PlacementMap) for item in advice.feasible)
    yield (
        f"marks: > {taken}{tie}{'; * ranks that no vector gives' * star}; memory: bytes of the fullest device, and "
        f"their share of what a plan can fill there"
    )
    names = ", ".join(advice.best.candidate.space.roles.all)
    shadows = ", ".join(advice.best.candidate.space.roles.shadows)
    first = f" (with copies, {shadows} come first)" if shadows else ""
    yield f"vector: shares of the devices of {names}{first}"


def _reasons(advice: Advice) -> Iterator[str]:
    """Lines on where the time of the best is spent, and how much it saves compared with the others."""
    best, equal = advice.best, _equal(advice)
    if best in equal[1:] and advice.take is None:
        yield (
            f"{len(equal)} placements take as long as the fastest ({_name(equal[0])}) within {advice.margin:.0%}; this "
            f"is the simplest of them"
        )
    calls: dict[tuple[str, int | None], list[Cost]] = defaultdict(list)
    for item in best.simulation.regular:
        if isinstance(item.instruction, Run):
            calls[item.instruction.label, item.instruction.chunk].append(item.cost)
    seconds = {call: sum(cost.seconds for cost in costs) for call, costs in calls.items()}
    for label, chunk in sorted(calls, key=lambda call: -seconds[call])[:SHOWN]:
        taken, longest = seconds[label, chunk], max(calls[label, chunk], key=lambda cost: cost.seconds)
        yield f"{label}: {taken:.2f} s ({taken / best.seconds:.0%} of a step), most of it {longest.largest}"
    if is_full(best):
        yield f"memory is filled to {best.share:.0%}: no placement was found that fits into {USABLE:.0%}"
    if 0 < best.share < FULL_SHARE:
        yield f"memory is filled to {best.share:.0%}: fewer devices would reach about the same throughput per device"
    if advice.max_lag > 1 and len(set(best.candidate.space.lengths.responses)) == 1:
        yield "a lag above 1 gains where steps vary: responses of one length have no need of it (--lengths: others)"


def _waiting(advice: Advice) -> Iterator[str]:
    """Yield how processes and the order of rows change the time of a step with an environment."""
    environment = advice.best.plan.spec.environment
    if advice.waiting:
        yield from waiting_lines(advice.waiting, advice.margin)
    elif environment is not None:
        yield "replies are taken to need no time: measure them with flexrlhf profile, or set environment.seconds"


def _batches(advice: Advice) -> Iterator[str]:
    """Yield a table of samples/s by batch of the placement to use and of the fastest others, one of each strategy."""
    items = _by_strategy(advice)
    speeds = larger_batches(tuple(items.values()))
    head = ("prompts a step", *(f"{name} {placement_text(item)}" for name, item in items.items()))
    cells = [(str(row.prompts), *map(_speed, row.found)) for row in speeds]
    yield from table([head, *cells], ">" * len(head))
    most = max(_samples(row.found[0]) for row in speeds)
    enough = next(row for row in speeds if _samples(row.found[0]) >= ENOUGH * most)
    gain = _samples(enough.found[0]) / advice.best.samples_per_second - 1
    if gain > advice.margin:
        yield f"{enough.prompts} prompts a step in place of {speeds[0].prompts}: {gain:+.0%} samples/s"


def _by_strategy(advice: Advice) -> dict[str, FeasibleCandidate]:
    """Return the placement to use, and the fastest of each other strategy."""
    best = {advice.best.candidate.strategy: advice.best}
    return best | {item.candidate.strategy: item for item in reversed(advice.comparable)} | best


def _largest(advice: Advice) -> Iterator[str]:
    """Yield a table of samples/s with today's batch and the largest, and how to take that of the placement to use."""
    rows = largest_tried(tuple(_by_strategy(advice).values()))
    if not rows:
        yield "unknown, as the memory of the devices is"
        return
    head = ("placement", "prompts a step", "samples/s", "at most", "tried", "samples/s", "gain")
    cells = [
        (
            f"{each.item.candidate.strategy} {placement_text(each.item)}",
            str(_prompts(each.item)),
            f"{each.item.samples_per_second:.2f}",
            str(each.prompts) if each.prompts >= _prompts(each.item) else "plan does not fit",
            *((str(_prompts(each.tried)), _speed(each.tried), f"{each.gain:+.0%}") if each.tried else ("-",) * 3),
        )
        for each in rows
    ]
    yield from table([head, *cells], "<>>>>>>")
    tried = rows[0].tried
    if tried is not None and rows[0].gain > 0:
        yield f"--prompts {_prompts(tried)} takes it: {rows[0].gain:+.0%} samples/s, in as many optimizer steps"


def _prompts(item: FeasibleCandidate) -> int:
    return item.candidate.space.spec.algorithm.prompts_per_step


def _samples(item: FeasibleCandidate | None) -> float:
    return 0.0 if item is None else item.samples_per_second


def _speed(item: FeasibleCandidate | None) -> str:
    return "does not fit" if item is None else f"{item.samples_per_second:.2f} {item.share:.0%}"


def _searches(advice: Advice) -> Iterator[str]:
    head = ("space", "plans", "evaluated", "pruned: memory", "bound", "seconds", "best s/step", "gap")
    rows = [_search_row(label, result) for label, result in advice.searches.items()]
    yield from table([head, *rows], "<>>>>>>>")
    by_meshes: dict[str, list[str]] = {}
    for label, result in advice.searches.items():
        by_meshes.setdefault(result.meshes, []).append(label)
    for meshes, labels in by_meshes.items():
        of = "" if len(by_meshes) == 1 else f" of {', '.join(labels)}"
        yield f"  meshes{of}: {meshes}"
    tokens = either(PASS_TOKENS[1:])
    yield f"  settings tried: passes of one text, or of at most {tokens} tokens; sizes between for the fastest plan;"
    yield (
        f"    {_parts(DECODE_SHARES)} of the rows decoded together; a rollout engine's cache with room for "
        f"{_parts(CACHE_SHARES)} of them"
    )
    yield (
        "  plans: all of the space, also those that memory or rules forbid; gap: share of its time by which any may at "
        "most be faster (other ranks and settings are not in the space)"
    )


def _parts(shares: Sequence[int]) -> str:
    """Return shares of rows, in steps of a half, as ``all, 1/2, 1/4 ... 1/512``."""
    first = ", ".join("all" if share == 1 else f"1/{share}" for share in shares[:SHOWN])
    return f"{first} ... 1/{shares[-1]}"


def _search_row(label: str, result: SearchResult) -> tuple[str, ...]:
    is_plan = result.is_feasible and is_allowed(result.seconds)
    best = f"{result.seconds:.2f}" if is_plan else "none" if result.is_feasible else "none fits"
    gap = f"{result.gap:.2%}" if is_plan else "-"
    counts = (f"{result.space:.1e}", str(result.evaluated), str(result.pruned_by_memory), str(result.pruned_by_bound))
    return (label, *counts, f"{result.wall_seconds:.2f}", best, gap)
