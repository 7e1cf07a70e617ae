"""Report and YAML of ``advise --per-operator``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flexrlhf.config.spec_file import dump_spec
from flexrlhf.errors import UserError
from flexrlhf.guideline.advice.advise import SIMULATED
from flexrlhf.guideline.advice.operator_space import OperatorAdvice
from flexrlhf.guideline.simulation.inputs import CostSource
from flexrlhf.guideline.simulation.simulation_text import range_text
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.plan.hub_names import with_names
from flexrlhf.plan.models import without_device_sizes
from flexrlhf.plan.plan_text import zero_text
from flexrlhf.strategies.instructions import Run
from flexrlhf.text import bytes_text, span_of, table


def format_operator_advice(advice: OperatorAdvice, source: CostSource) -> str:
    """Return the whole report. ``source``: what the seconds are from."""
    plan, seconds = advice.plan, advice.simulation.seconds
    found = advice.result
    how = "no placement of the space is faster" if found.is_optimal else f"none is over {found.gap:.0%} faster"
    sections = [
        f"{plan.spec.algorithm.name} on {plan.placement.num_ranks} devices, operators placed; seconds from "
        f"{source.name}",
        "\n".join(f"  {line}" for line in _operators(advice)),
        f"{seconds:.2f} s {SIMULATED}, {plan.batch.num_rows / seconds:.4g} samples/s, at most "
        f"{bytes_text(_peak(advice))} on a device\n{range_text(source.accuracy, seconds)}\n"
        f"search: {found.space:.3g} placements in {found.wall_seconds:.1f} s, "
        f"{how}",
    ]
    return "\n\n".join(sections)


def _peak(advice: OperatorAdvice) -> int:
    return max(memory.peak_bytes for memory in advice.plan.memories)


def _operators(advice: OperatorAdvice) -> Iterator[str]:
    plan = advice.plan
    rows = [("operator", "ranks", "engine", "dp", "tp", "pp", "zero", "copy")]
    for instruction in plan.schedule.instructions:
        if isinstance(instruction, Run) and instruction.operator.name in plan.placement.operators:
            rows.append((instruction.operator.name, *_settings(plan.placement[instruction.model])))
    yield from table(rows, "<<<>>>><")


def _settings(model: PlacedModel) -> tuple[str, str, str, str, str, str, str]:
    layout = model.layout
    degrees = f"{layout.dp}", f"{layout.tp}", f"{layout.pp}", zero_text(model)
    return span_of(model.ranks), model.engine, *degrees, model.name


def write_operator_advice(advice: OperatorAdvice, path: Path) -> None:
    """Write the YAML, with its origin in a comment. Raises UserError where it cannot be written."""
    seconds, peak = advice.simulation.seconds, bytes_text(_peak(advice))
    head = f"# a placement for each operator; {seconds:.2f} s {SIMULATED}, {peak}"
    try:
        path.write_text("\n".join([head, dump_spec(without_device_sizes(with_names(advice.spec)), short=True)]))
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror})") from None
