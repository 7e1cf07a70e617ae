"""What a person reads of advice: a ranked table, settings of the best, why, what was refused, what was searched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

from flexrlhf.config.spec import PlacementMap
from flexrlhf.errors import either
from flexrlhf.guideline.advice.advise import Advice, Answer, Searched, is_ppo
from flexrlhf.guideline.advice.choices import CACHE_SHARES, DECODE_SHARES, PASS_TOKENS
from flexrlhf.guideline.advice.space import is_allowed
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.strategies.instructions import Run
from flexrlhf.text import bytes_text, ranks_text, table

SHOWN = 3
"""Models of a plan whose reason for its time is told."""
FULL_SHARE = 0.6
"""Of memory, under which more devices no longer pay (ReaL, section 8)."""


def format_advice(advice: Advice, source: str) -> str:
    """``source``: where seconds are from."""
    sections = [
        _head(advice, source),
        _titled("ranked (seconds and memory as simulated; `>`: what to use; `*`: by ranks, below)", _ranking(advice)),
        *[_titled(f"settings of {_name(answer)}", _settings(answer)) for answer in _told(advice)],
        _titled("why", _reasons(advice)),
        _titled("guideline: rules that fired", _rules(advice)),
        _titled("search", _searches(advice)),
        _titled("refused", _refused(advice)),
    ]
    return "\n\n".join(section for section in sections if section)


def _head(advice: Advice, source: str) -> str:
    plan = advice.best.plan
    classes = ", ".join(f"{len(plan.cluster.ranks_on(name))} {name}" for name in plan.cluster.classes)
    nodes = f"{plan.cluster.num_nodes} node{'s' if plan.cluster.num_nodes > 1 else ''}"
    rows, lengths = plan.batch, plan.lengths
    return (
        f"{plan.spec.algorithm.name} on {classes} in {nodes}: {rows.num_prompts} prompts x "
        f"{rows.samples_per_prompt} a step, {lengths.prompt} + {lengths.response} tokens at the most"
        f"{_mean(advice)}; seconds from {source}; answered in {advice.seconds:.1f} s"
    )


def _mean(advice: Advice) -> str:
    """Where answers are shorter than they may be."""
    mean = advice.best.candidate.space.lengths.mean_response
    return f", answers of {mean:.4g} tokens in the mean" if mean < advice.best.plan.lengths.response else ""


def _titled(title: str, lines: Iterable[str]) -> str:
    listed = [f"  {line}".rstrip() for line in lines]
    return "\n".join([title, *listed]) if listed else ""


def _refused(advice: Advice) -> Iterator[str]:
    for item in advice.refused:
        yield f"{item.candidate.method:<10}{item.candidate.name}: {item.reason}"


def _name(answer: Answer) -> str:
    return f"{answer.candidate.method}, {answer.candidate.name}"


def _told(advice: Advice) -> list[Answer]:
    """The one to use, and what the guideline says."""
    best = advice.best
    return [best, *(a for a in advice.answers if a.candidate.method == "guideline" and a is not best)]


def _ranking(advice: Advice) -> list[str]:
    rows = [("", "method", "placement", "strategy", "ratio vector", "s/step", "samples/s", "memory", "")]
    best = advice.best
    for answer in advice.answers:
        mark = ">" if answer is best else ""
        seconds, samples = f"{answer.seconds:.2f}", f"{answer.samples_per_second:.2f}"
        memory, share = bytes_text(int(answer.peak)), f"{answer.share:.0%}" if answer.share else ""
        method, name, strategy = answer.candidate.method, answer.candidate.name, answer.candidate.strategy
        rows.append((mark, method, name, strategy, vector_text(answer), seconds, samples, memory, share))
    return table(rows, "<<<<<>>>>")


def vector_text(answer: Answer) -> str:
    """The vector as on the command line; with a star where no vector means the same ranks (see the settings)."""
    placement, total = answer.candidate.spec.placement, answer.candidate.space.pool.num_devices
    if isinstance(placement, PlacementMap):
        ratios = [Fraction(len(entry.ranks or ()), total) for entry in placement.models.values()]
        return f"{_vector(ratios)}*"
    assert isinstance(placement, tuple), "proposals have a vector or ranks"
    return _vector(placement)


def _vector(ratios: Sequence[Fraction]) -> str:
    return "[" + ",".join(f"{float(ratio):.4g}" for ratio in ratios) + "]"


def _settings(answer: Answer) -> list[str]:
    head = ("model", "ranks", "dp", "tp", "zero", "rows of a pass", "decoded", "recompute")
    rows = [head, *(_settings_of(model, answer) for model in answer.plan.placement.models)]
    schedule = answer.plan.spec.schedule
    return [*table(rows, "<<>>>>><"), f"chunks {schedule.num_chunks}, lag {schedule.lag}"]


def _settings_of(model: PlacedModel, answer: Answer) -> tuple[str, ...]:
    settings, layout = model.settings, model.layout
    width = answer.plan.lengths.prompt + answer.plan.lengths.response
    rows = "-" if model.rollout is not None else str(max(1, settings.micro_batch_tokens // width))
    decoded = str(settings.generate_tokens // width) if _generates(model, answer) else "-"
    again = "-" if not model.trained else "yes" if settings.activation_checkpointing else "no"
    split = (str(number) for number in (layout.dp, layout.tp, settings.zero))
    return (model.name, ranks_text(model.ranks), *split, rows, decoded, again)


def _generates(model: PlacedModel, answer: Answer) -> bool:
    runs = (each for each in answer.plan.schedule.instructions if isinstance(each, Run))
    return any(run.operator.kind == "generate" and run.model == model.name for run in runs)


def _reasons(advice: Advice) -> Iterator[str]:
    """What takes the time of the best, and what it saves against the others."""
    best = advice.best
    runs = [item for item in best.simulation.priced if isinstance(item.instruction, Run) and not item.is_rare]
    for item in sorted(runs, key=lambda item: -item.cost.seconds)[:SHOWN]:
        seconds, share = item.cost.seconds, item.cost.seconds / best.seconds
        yield f"{item.instruction.label}: {seconds:.2f} s ({share:.0%} of a step), most of it {item.cost.largest}"
    yield f"devices run {best.simulation.utilisation:.0%} of the time"
    if 0 < best.share < FULL_SHARE:
        yield f"memory is filled to {best.share:.0%}: fewer devices would serve nearly as well for each of them"
    others = sorted((answer for answer in advice.answers if answer is not best), key=lambda answer: answer.seconds)
    for method in dict.fromkeys(answer.candidate.method for answer in others):
        other = next(answer for answer in others if answer.candidate.method == method)
        slower = other.seconds / best.seconds - 1
        yield f"{slower:+.0%} seconds for the best other {method} placement ({other.candidate.name})"


def _rules(advice: Advice) -> Iterator[str]:
    for rule in advice.rules:
        yield f"{rule.name} ({rule.source}): {rule.reason}"


def _searches(advice: Advice) -> Iterator[str]:
    searched = [*advice.searches, *([] if advice.on_paper is None else [advice.on_paper])]
    head = ("space", "plans", "evaluated", "pruned: memory", "bound", "seconds", "best s/step", "gap")
    yield from table([head, *map(_searched, searched)], "<>>>>>>>")
    if advice.on_paper is not None:
        yield (
            f"  {advice.on_paper.label}: with pipeline stages, what ReaL searches; no engine here runs it as a whole"
        )
    elif not is_ppo(advice.best.candidate.space):
        roles = ", ".join(advice.best.candidate.space.roles.all)
        yield f"  one placement for each call (ReaL): of PPO with four models alone; here {roles}"
    meshes = next((item.result.meshes for item in advice.searches if item.result.meshes), "")
    if meshes:
        yield f"  meshes: {meshes}"
    yield f"  settings tried: passes of one prompt, or of at most {either(PASS_TOKENS[1:])} tokens;"
    yield f"    {_parts(DECODE_SHARES)} of the rows decoded together;"
    yield f"    a rollout engine's cache with room for {_parts(CACHE_SHARES)} of its rows"
    yield "  plans: all that the space states, also what memory or rules forbid"
    yield "  gap: by how much of its time any plan of the space may at most be faster"


def _parts(shares: Sequence[int]) -> str:
    return either("all" if share == 1 else f"1/{share}" for share in shares)


def _searched(item: Searched) -> tuple[str, ...]:
    result = item.result
    is_plan = result.is_feasible and is_allowed(result.seconds)
    best = f"{result.seconds:.2f}" if is_plan else "none" if result.is_feasible else "none fits"
    gap = f"{result.gap:.2%}" if is_plan else "-"
    counts = (f"{result.space:.1e}", str(result.evaluated), str(result.pruned_by_memory), str(result.pruned_by_bound))
    return (item.label, *counts, f"{result.wall_seconds:.2f}", best, gap)
