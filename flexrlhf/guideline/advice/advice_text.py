"""Report of ``advise``: a ranked table, settings of the best, reasons, rejected candidates, searched spaces; that of
``--per-operator``; and the YAMLs of both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path

from flexrlhf.config.engines import facts_of
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.placement_settings import PlacementMap
from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import dump_spec
from flexrlhf.errors import UserError, either
from flexrlhf.guideline.advice.batches import larger_batches, largest_tried
from flexrlhf.guideline.advice.candidates import FeasibleCandidate
from flexrlhf.guideline.advice.choice import Advice, is_full, ratios_of, tied
from flexrlhf.guideline.advice.guideline_rules import FLEXRLHF, RuleVerdict, judged
from flexrlhf.guideline.advice.model_options import CACHE_SHARES, DECODE_SHARES, PASS_TOKENS
from flexrlhf.guideline.advice.operator_space import OperatorAdvice
from flexrlhf.guideline.advice.space import USABLE, is_allowed
from flexrlhf.guideline.advice.waiting import waiting_lines
from flexrlhf.guideline.costs.cost_model import Cost
from flexrlhf.guideline.search.result import SearchResult
from flexrlhf.guideline.simulation.generation_load import load_lines
from flexrlhf.guideline.simulation.inputs import CostSource
from flexrlhf.guideline.simulation.simulation_text import range_text
from flexrlhf.guideline.simulation.usage import Prices, usage_of
from flexrlhf.guideline.simulation.usage_text import usage_lines
from flexrlhf.memory.states import kv_cache_bytes
from flexrlhf.placement.groups import is_sharded_in_nodes
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.plan.hub_names import with_names
from flexrlhf.plan.models import without_device_sizes
from flexrlhf.plan.placement_text import zero_text
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Offload, Run, without_turn
from flexrlhf.text import bytes_text, ranks_text, span_of, table

SHOWN = 3
"""Instructions whose time is explained."""
ENOUGH = 0.95
"""Share of the most samples/s with which a batch is large enough."""
FULL_SHARE = 0.6
"""Share of memory under which more devices no longer pay (ReaL, section 8)."""
SAVING_SETTINGS = {
    "optimizer in host memory": "offload_optimizer",
    "activations in host memory": "offload_activations",
    "MLPs in tiles": "tiled_mlp",
}
"""Lines of the settings → setting of a model."""
LARGEST_BATCHES = "largest batches at these settings (proposed, not chosen: another batch trains otherwise)"
SIMULATED = "a step as simulated"
"""Words that the first line of an advised YAML has."""


def format_advice(advice: Advice, source: CostSource, max_batch: bool = False, prices: Prices | None = None) -> str:
    """Return the whole report.

    source:     of the seconds.
    max_batch:  whether to try the largest batch of placements.
    prices:     of devices; None: no money is printed.
    """
    sections = [
        "\n".join([_head(advice, source), *usage_lines(usage_of(advice.best.simulation, prices))]),
        _titled("ranked by the simulated time of a step", [*_ranking(advice), *_legend(advice)]),
        _titled(f"settings of {_name(advice.best)}", _settings(advice.best)),
        _titled("why", _reasons(advice)),
        _titled("generation of the one to use", load_lines(advice.best.simulation, source.costs)),
        _titled("waiting for environments (seconds a step; chunks alternate)", _waiting(advice)),
        _titled("larger batches (samples/s and memory, as many optimizer steps a step)", _batches(advice)),
        _titled(LARGEST_BATCHES, _largest(advice) if max_batch else ()),
        _titled("against the guideline", contradictions(advice)),
        _titled(
            "rules (of the guideline's placement and `>`, the one to use)", [*_rules(advice), *weighed_rules(advice)]
        ),
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
    yield f"marks: > {taken}{tie}{'; * ranks that no vector gives' * star}"
    names = ", ".join(advice.best.candidate.space.roles.all)
    shadows = ", ".join(advice.best.candidate.space.roles.shadows)
    first = f" (with copies, {shadows} come first)" if shadows else ""
    yield f"vector: shares of the devices of {names}{first}"
    yield "memory: bytes of the fullest device, and their share of what a plan can fill there"


def placement_text(item: FeasibleCandidate) -> str:
    """Ratio vector as on the command line; with a star where no vector gives the same ranks (see the settings)."""
    star = "*" if isinstance(item.candidate.spec.placement, PlacementMap) else ""
    return f"{_vector(ratios_of(item.candidate))}{star}"


def _vector(ratios: Sequence[Fraction]) -> str:
    return "[" + ",".join(f"{float(ratio):.4g}" for ratio in ratios) + "]"


def _settings(item: FeasibleCandidate) -> list[str]:
    models = item.plan.placement.models
    further = ["pp"] * any(facts_of(model.engine).pp for model in models if model.rollout is None)
    further += _further_degrees(models)
    degrees = ("dp", "tp", *further, "zero")
    head = ("model", "ranks", *degrees, "pass tokens", "decoded", "recompute")
    rows = [head, *(_settings_of(model, item, degrees[:-1]) for model in models)]
    schedule = item.plan.spec.schedule
    last = f"chunks {schedule.num_chunks}, lag {schedule.lag}"
    legend = ["zero in each node: a node's devices have all shards"] if any(map(is_sharded_in_nodes, models)) else []
    lines = table(rows, f"<<{'>' * len(degrees)}>><")
    return [*lines, *legend, last, *_engines(item), *_in_host_memory(item)]


def _further_degrees(models: Sequence[PlacedModel]) -> list[str]:
    """Return the degrees that few plans have, of those that any of ``models`` has."""
    return [name for name in ("cp", "ep") if any(getattr(model.layout, name) > 1 for model in models)]


def _engines(item: FeasibleCandidate) -> Iterator[str]:
    """Yield lines on the engines of models, and on the one that generates with its degrees and its cache."""
    models = [model for model in item.plan.placement.models if model.rollout is None]
    for engine in dict.fromkeys(model.engine for model in models):
        yield f"engine {engine}: {', '.join(model.name for model in models if model.engine == engine)}"
    for model in item.plan.placement.models:
        if _generates(model, item):
            name = model.engine if model.rollout is None else model.rollout.engine
            layout, tokens = model.layout, model.settings.generate_tokens
            degrees = f"tp {layout.tp}{f', pp {layout.pp}' if layout.pp > 1 else ''}"
            size = bytes_text(kv_cache_bytes(model, item.plan.shapes[model.role])) if model.has_cache else ""
            room = f"a cache of {tokens} tokens ({size} on each device)" if size else f"{tokens} tokens at a time"
            yield f"generated by {name}: {model.name}, {degrees}, {room}"


def _in_host_memory(item: FeasibleCandidate) -> Iterator[str]:
    """Yield lines on MLPs in tiles and on tensors in host memory: optimizers, activations, and models while others
    compute, with a node's bytes."""
    moved = [each.model for each in item.plan.schedule.instructions if isinstance(each, Offload) and not each.rare]
    names = [name for name in dict.fromkeys(moved) if not name.is_rollout]
    models = [(role, model) for role, model in item.plan.spec.models if isinstance(model, ModelSpec)]
    for text, setting in SAVING_SETTINGS.items():
        if roles := [role for role, model in models if getattr(model, setting)]:
            yield f"{text}: {', '.join(roles)}"
    if names:
        most, ranks = item.plan.cluster.most_on_node, item.plan.memories
        later = most * max(memory.loaded_host_bytes for memory in ranks)
        loading = most * max(memory.host_bytes for memory in ranks)
        more = f", and {bytes_text(loading)} while models are loaded" if loading > later else ""
        yield f"in host memory while others compute: {', '.join(names)}; a node's host needs {bytes_text(later)}{more}"


def _settings_of(model: PlacedModel, item: FeasibleCandidate, degrees: Sequence[str]) -> tuple[str, ...]:
    settings, layout = model.settings, model.layout
    width = item.plan.lengths.prompt + item.plan.lengths.response
    tokens = "-" if model.rollout is not None else str(settings.micro_batch_tokens)
    decoded = str(settings.generate_tokens // width) if _generates(model, item) else "-"
    recompute = "-" if not model.trained else "yes" if settings.activation_checkpointing else "no"
    split = (*(str(getattr(layout, degree)) for degree in degrees), zero_text(model))
    return (model.name, ranks_text(model.ranks), *split, tokens, decoded, recompute)


def _generates(model: PlacedModel, item: FeasibleCandidate) -> bool:
    runs = (each for each in item.plan.schedule.instructions if isinstance(each, Run))
    return any(run.operator.kind == "generate" and run.model == model.name for run in runs)


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
            calls[without_turn(item.instruction.label), item.instruction.chunk].append(item.cost)
    seconds = {call: sum(cost.seconds for cost in costs) for call, costs in calls.items()}
    for label, chunk in sorted(calls, key=lambda call: -seconds[call])[:SHOWN]:
        taken, longest = seconds[label, chunk], max(calls[label, chunk], key=lambda cost: cost.seconds)
        yield f"{label}: {taken:.2f} s ({taken / best.seconds:.0%} of a step), most of it {longest.largest}"
    yield f"devices run {best.simulation.utilisation:.0%} of the time"
    if is_full(best):
        yield f"memory is filled to {best.share:.0%}: no placement was found that fits into {USABLE:.0%}"
    if 0 < best.share < FULL_SHARE:
        yield f"memory is filled to {best.share:.0%}: fewer devices would reach about the same throughput per device"
    if advice.max_lag > 1 and len(set(best.candidate.space.lengths.responses)) == 1:
        yield "a lag above 1 gains where steps vary: responses of one length have no need of it (--lengths: others)"


def _waiting(advice: Advice) -> Iterator[str]:
    """Yield how chunks and processes change the time of a step with an environment."""
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
            str(each.largest.prompts) if each.largest.prompts >= _prompts(each.item) else "plan does not fit",
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


def contradictions(advice: Advice) -> Iterator[str]:
    """Yield a sentence where the placement to use has another strategy than FlexRLHF's guideline gives, with the
    operator that makes the difference in the simulated steps."""
    best, ruled = advice.best, _by_guideline(advice)
    if ruled is None or ruled.seconds <= (1 + advice.margin) * best.seconds:
        return
    if ruled.candidate.strategy == best.candidate.strategy:
        return
    verdicts = _judged(ruled)
    rule = next((each for each in verdicts if each.rule.strategy and each.state == "followed"), verdicts[0])
    own, other = _seconds_by_operator(best), _seconds_by_operator(ruled)
    name = max(own, key=lambda each: other.get(each, (0.0, 0))[0] - own[each][0])
    (seconds, devices), (before, all_devices) = other[name], own[name]
    yield (
        f"{best.candidate.strategy} contradicts FlexRLHF's guideline, which gives {ruled.candidate.strategy} "
        f"({rule.rule.name}: {rule.evidence}): that takes {ruled.seconds / best.seconds - 1:+.0%}, because as "
        f"simulated {name} takes {seconds:.1f} s on {devices} devices and {before:.1f} s on {all_devices}, and devices "
        f"run {ruled.simulation.utilisation:.0%} of the time in place of {best.simulation.utilisation:.0%}"
    )


def _judged(item: FeasibleCandidate) -> tuple[RuleVerdict, ...]:
    return judged(item.simulation, item.candidate.space.cluster)


def _by_guideline(advice: Advice) -> FeasibleCandidate | None:
    return next((item for item in advice.feasible if item.candidate.method == "guideline"), None)


def _rules(advice: Advice) -> Iterator[str]:
    """Yield a line for each rule that applies and each placement, with its state and figures; the others in one line.
    Rules of other systems than the guideline's are judged on the placement to use alone."""
    best, ruled = advice.best, _by_guideline(advice)
    own = _judged(best)
    other = own if ruled is best or ruled is None else _judged(ruled)
    rows: list[tuple[str, ...]] = []
    idle = []
    for verdict, first in zip(own, other, strict=True):
        is_comment = verdict.rule.source != FLEXRLHF
        if verdict.state == "not applicable" and (is_comment or first.state == verdict.state):
            idle += [] if is_comment else [verdict.rule.name]
            continue
        title = f"{verdict.rule.name} ({verdict.rule.source})"
        pairs = [(">", verdict)] if is_comment or other is own else [("", first), (">", verdict)]
        for mark, each in pairs:
            rows.append((title, mark, each.state, f"{each.evidence}{_miss(advice, each, mark, ruled is best)}"))
            title = ""
    yield from table(rows, "<<<<")
    if idle:
        yield f"not applicable: {', '.join(idle)}"


def _miss(advice: Advice, verdict: RuleVerdict, mark: str, is_ruled: bool) -> str:
    """Return why the guideline's own placement does not follow a rule."""
    reason = advice.misses.get(verdict.rule.name, "") if not mark or is_ruled else ""
    return f"; {reason}" if reason and verdict.state == "contradicted" else ""


def _seconds_by_operator(item: FeasibleCandidate) -> dict[str, tuple[float, int]]:
    """Return the seconds of each operator in a step, over its chunks, and the number of devices that it runs on."""
    found: dict[str, tuple[float, int]] = {}
    for priced in item.simulation.priced:
        if isinstance(priced.instruction, Run) and not priced.is_rare:
            name = priced.instruction.operator.name
            devices = len(item.plan.placement[priced.instruction.model].ranks)
            found[name] = (found.get(name, (0.0, 0))[0] + priced.cost.seconds, devices)
    return found


def weighed_rules(advice: Advice) -> Iterator[str]:
    """Yield a sentence where rules that apply lead to different strategies, with the seconds of the best of each."""
    applied = [each.rule for each in _judged(advice.best) if each.state != "not applicable"]
    rules = {rule.strategy: rule for rule in reversed(applied) if rule.strategy}
    by_strategy = {item.candidate.strategy: item.seconds for item in reversed(advice.comparable)}
    timed = sorted((by_strategy[name], name) for name in rules if name in by_strategy)
    if len(timed) > 1:
        names = " and ".join(f"{rule.name} ({rule.source})" for rule in rules.values())
        figures = ", ".join(f"{seconds:.2f} s {name}" for seconds, name in timed)
        yield f"{names} contradict each other: as simulated a step takes at best {figures}"


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
    yield f"  settings tried: passes of one text, or of at most {either(PASS_TOKENS[1:])} tokens;"
    yield f"    {_parts(DECODE_SHARES)} of the rows decoded together;"
    yield f"    a rollout engine's cache with room for {_parts(CACHE_SHARES)} of its rows"
    yield "    sizes between these for the fastest plan, one model after the other"
    yield "  plans: all of the space, also those that memory or rules forbid"
    yield "  gap: share of its time by which any plan of the space may at most be faster;"
    yield "    other ranks and settings are not in the space"


def _parts(shares: Sequence[int]) -> str:
    return either("all" if share == 1 else f"1/{share}" for share in shares)


def _search_row(label: str, result: SearchResult) -> tuple[str, ...]:
    is_plan = result.is_feasible and is_allowed(result.seconds)
    best = f"{result.seconds:.2f}" if is_plan else "none" if result.is_feasible else "none fits"
    gap = f"{result.gap:.2%}" if is_plan else "-"
    counts = (f"{result.space:.1e}", str(result.evaluated), str(result.pruned_by_memory), str(result.pruned_by_bound))
    return (label, *counts, f"{result.wall_seconds:.2f}", best, gap)


def format_operator_advice(advice: OperatorAdvice, source: CostSource, prices: Prices | None = None) -> str:
    """Return the whole report; arguments as of ``format_advice``."""
    plan, seconds = advice.plan, advice.simulation.seconds
    found = advice.result
    usage = "\n".join(usage_lines(usage_of(advice.simulation, prices)))
    how = "no placement of the space is faster" if found.is_optimal else f"none is over {found.gap:.0%} faster"
    sections = [
        f"{plan.spec.algorithm.name} on {plan.placement.num_ranks} devices, operators placed; seconds from "
        f"{source.name}",
        "\n".join(f"  {line}" for line in _operators(plan)),
        f"{seconds:.2f} s {SIMULATED}, {plan.batch.num_taken / seconds:.4g} samples/s, at most "
        f"{bytes_text(_peak(advice))} on a device\n{range_text(source.accuracy_of(plan), seconds)}\n"
        f"{usage}\nsearch: {found.space:.3g} placements in {found.wall_seconds:.1f} s, "
        f"{how}",
    ]
    return "\n\n".join(sections)


def _peak(advice: OperatorAdvice) -> int:
    return max(memory.peak_bytes for memory in advice.plan.memories)


def _operators(plan: Plan) -> list[str]:
    degrees = ("dp", "tp", "pp", *_further_degrees(plan.placement.models))
    rows: list[tuple[str, ...]] = [("operator", "ranks", "engine", *degrees, "zero", "pass tokens", "copy")]
    for run in plan.schedule.instructions:
        if isinstance(run, Run) and run.operator.name in plan.placement.operators:
            model = plan.placement[run.model]
            sizes = (str(getattr(model.layout, degree)) for degree in degrees)
            composes_passes = run.operator.call in ("forward", "train")
            tokens = str(model.with_passes(run.tokens).settings.micro_batch_tokens) if composes_passes else "-"
            own = span_of(model.ranks), model.engine, *sizes, zero_text(model), tokens, model.name
            rows.append((run.operator.name, *own))
    return table(rows, f"<<<{'>' * len(degrees)}>><")


def write_operator_advice(advice: OperatorAdvice, path: Path) -> None:
    """Write the YAML, with its origin in a comment. Raises UserError if it cannot be written."""
    seconds, peak = advice.simulation.seconds, bytes_text(_peak(advice))
    head = f"# a placement for each operator; {seconds:.2f} s {SIMULATED}, {peak}"
    _write(path, [head], advice.spec)


def is_advised(text: str) -> bool:
    """Whether a text begins as a YAML of ``write_advised``."""
    first = text.partition("\n")[0]
    return first.startswith("# ") and SIMULATED in first


def write_advised(chosen: FeasibleCandidate, path: Path) -> None:
    """Write the YAML of ``chosen``, with its origin in a comment. Raises UserError if it cannot be written."""
    seconds, candidate = chosen.seconds, chosen.candidate
    head = [
        f"# {candidate.method}: {candidate.name}; {seconds:.2f} s {SIMULATED}, {bytes_text(int(chosen.peak))}",
    ]
    if candidate.space.has_less_memory:
        share = f"{candidate.space.usable:.0%}"
        head.append(
            f"# memory_gb of the nodes is {share} of what models can fill: they are offloaded before that is full"
        )
    models = candidate.spec.models
    roles = candidate.space.roles.all
    has_sizes = any((model := models.of(role)) is not None and model.init is not None for role in roles)
    if has_sizes:
        head.append("# models have sizes only (init): give the paths of their weights instead, and of the data")
    _write(path, head, candidate.spec)


def _write(path: Path, head: Sequence[str], spec: Spec) -> None:
    try:
        path.write_text("\n".join([*head, dump_spec(without_device_sizes(with_names(spec)), short=True)]))
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror})") from None
