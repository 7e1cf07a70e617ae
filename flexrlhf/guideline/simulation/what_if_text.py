"""Printed table of a run with one thing changed at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flexrlhf.guideline.simulation.inputs import CostSource
from flexrlhf.guideline.simulation.simulate import Simulation
from flexrlhf.guideline.simulation.simulation_text import range_text, seconds_text
from flexrlhf.guideline.simulation.what_if import Outcome
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Run
from flexrlhf.text import bytes_text, table

HEADS = ("what if", "s/step", "", "samples/s", "", "fullest device", "", "longest part of the step")


def format_what_if(plan: Plan, outcomes: Sequence[Outcome], source: CostSource) -> str:
    """Return the table, then a sentence on each change. ``source``: origin of the predicted times."""
    before = outcomes[0].simulation
    assert before is not None, "the run as planned has a plan"
    head = (
        f"{plan.spec.name}: what if, on {plan.placement.num_ranks} devices ({', '.join(plan.cluster.classes)}), by "
        f"{source.name}; as planned {range_text(source.accuracy_of(plan), before.seconds)}"
    )
    lines = table([HEADS, *(_row(each, before) for each in outcomes)], "<>>>>>><")
    notes = [f"{each.name}: {each.note}" for each in outcomes[1:]]
    return "\n".join([head, *(f"  {line}" for line in lines), "", *(f"  {note}" for note in notes)])


def _row(outcome: Outcome, before: Simulation) -> tuple[str, ...]:
    simulation = outcome.simulation
    if simulation is None:
        return (outcome.name, "-", *[""] * (len(HEADS) - 2))
    is_first = simulation is before
    speed, speed_before = simulation.samples_per_second, before.samples_per_second
    return (
        outcome.name,
        seconds_text(simulation.seconds).removesuffix(" s"),
        "" if is_first else f"{round(100 * (simulation.seconds / before.seconds - 1)) + 0:+d}%",
        f"{speed:.4g}",
        "" if is_first else f"{speed / speed_before:.2f} x",
        bytes_text(outcome.peak),
        "" if outcome.memory is None else f"{outcome.peak / outcome.memory:.0%}",
        _longest(simulation),
    )


def _longest(simulation: Simulation) -> str:
    """Return the operator that takes longest, its share of the step and its largest part."""
    parts: dict[str, Counter[str]] = {}
    for item in simulation.regular:
        it = item.instruction
        name = it.operator.name if isinstance(it, Run) else it.kind
        shares = {part: seconds / item.every for part, seconds in item.cost.parts.items()}
        parts.setdefault(name, Counter()).update(shares)
    longest = max(parts, key=lambda name: parts[name].total())
    (largest, _), total = parts[longest].most_common(1)[0], parts[longest].total()
    return f"{longest} {total / simulation.seconds:.0%}, {largest}"
