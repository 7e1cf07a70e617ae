"""Report of ``advise --per-operator``."""

from __future__ import annotations

from flexrlhf.api import OF_PARTS, Plan, Run, bytes_text, span_of, table
from flexrlhf.guideline.advice.advised_yaml import SIMULATED, peak_of
from flexrlhf.guideline.advice.operator_space import OperatorAdvice
from flexrlhf.guideline.advice.settings_text import further_axes
from flexrlhf.guideline.simulation.inputs import CostSource
from flexrlhf.guideline.simulation.simulation_text import range_text
from flexrlhf.guideline.simulation.usage import Prices, usage_of
from flexrlhf.guideline.simulation.usage_text import usage_lines


def format_operator_advice(advice: OperatorAdvice, source: CostSource, prices: Prices | None = None) -> str:
    """Return the whole report. ``source``: of the seconds. ``prices``: of devices; None: no money is printed."""
    plan, seconds = advice.plan, advice.simulation.seconds
    found = advice.result
    usage = "\n".join(usage_lines(usage_of(advice.simulation, prices)))
    how = "no placement of the space is faster" if found.is_optimal else f"none is over {found.gap:.0%} faster"
    sections = [
        f"{plan.spec.algorithm.name} on {plan.placement.num_ranks} devices, operators placed; seconds from "
        f"{source.name}",
        "\n".join(f"  {line}" for line in _operators(plan)),
        f"{seconds:.2f} s {SIMULATED}, {plan.batch.num_taken / seconds:.4g} samples/s, at most "
        f"{bytes_text(peak_of(advice))} on a device\n{range_text(source.accuracy_of(plan), seconds)}\n"
        f"{usage}\nsearch: {found.space:.3g} placements in {found.wall_seconds:.1f} s, "
        f"{how}",
    ]
    return "\n\n".join(sections)


def _operators(plan: Plan) -> list[str]:
    axes = (*OF_PARTS, *further_axes(plan.placement.models))
    degrees = ("dp", *(axis.name for axis in axes))
    rows: list[tuple[str, ...]] = [("operator", "ranks", "engine", *degrees, "zero", "pass tokens", "copy")]
    for run in plan.schedule.instructions:
        if isinstance(run, Run) and run.operator.name in plan.placement.operators:
            model = plan.placement[run.model]
            sizes = (str(model.layout.dp), *(str(model.layout.dims.of(axis)) for axis in axes))
            composes_passes = run.operator.call in ("forward", "train")
            tokens = str(model.with_passes(run.tokens).settings.micro_batch_tokens) if composes_passes else "-"
            own = span_of(model.ranks), model.engine, *sizes, model.zero_text, tokens, model.name
            rows.append((run.operator.name, *own))
    return table(rows, f"<<<{'>' * len(degrees)}>><")
