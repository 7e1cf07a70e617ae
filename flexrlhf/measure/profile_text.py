"""The printed table of a profile's measurements."""

from __future__ import annotations

from collections.abc import Iterator

from flexrlhf.guideline.costs.measurements import LinearTime, Measurements, ModelTimes, Points

MAX_SPREAD = 0.4
"""A larger spread is a sign of other work on the machine."""


def format_measurements(measurements: Measurements) -> str:
    """Return times in milliseconds, each with half the interquartile range of its repetitions, and speeds in GB/s."""
    machine = measurements.machine
    head = (
        f"{machine.ranks} ranks of {machine.threads} thread{'s' * (machine.threads > 1)} on {machine.cores} cores, "
        f"{machine.device}, torch {machine.torch}"
    )
    models = [line for times in measurements.models for line in _model_lines(times)]
    return "\n".join([head, *models, "", *_other_lines(measurements), *_warning(measurements)])


def _warning(measurements: Measurements) -> Iterator[str]:
    spread = max(point.spread for times in measurements.models for curve in _curves(times) for point in curve)
    if spread > MAX_SPREAD:
        yield f"repetitions of one call differ by ±{50 * spread:.0f}%: measure again when nothing else is running"


def _curves(times: ModelTimes) -> Iterator[Points]:
    """Yield the calls of a rank by itself; replicas that wait for each other vary in any case."""
    yield from (times.forward, times.step, times.train.get(1, ()))


def _model_lines(times: ModelTimes) -> Iterator[str]:
    model = times.model
    millions = model.parameters / 1e6
    yield f"\n{model.head} model, {model.layers} layers of {model.hidden}, {millions:.3g} M parameters, {times.engine}"
    yield from _call_line(f"forward, {times.width} tokens a row", times.forward)
    yield from _call_line(f"prompts, {times.prompt} tokens a row", times.prefill)
    yield from _call_line("one decoding step", times.step)
    for replicas, points in sorted(times.train.items()):
        yield from _call_line(f"optimizer step, {replicas} replica{'s' * (replicas > 1)}", points)


def _call_line(name: str, points: Points) -> Iterator[str]:
    if points:
        cells = "   ".join(f"{p.rows:>4} rows {_milliseconds(p.seconds)} ms ±{50 * p.spread:2.0f}%" for p in points)
        yield f"  {name:<30}{cells}"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:>6.{max(0, 2 - (seconds >= 0.01) - (seconds >= 0.1))}f}"


def _other_lines(measurements: Measurements) -> Iterator[str]:
    yield from _call_line("advantages", measurements.combine)
    around, sums = 1000 * measurements.bookkeeping, 1000 * measurements.statistics
    yield f"  {'bookkeeping of a run':<34}{around:.3g} ms, {sums:.3g} ms with sums over replicas"
    for count, ratio in sorted(measurements.contention.items()):
        ranks = f"{count} ranks at once" if count > 1 else "one rank"
        yield f"  {f'forward on {ranks}':<34}{ratio:.2f} x its time on one"
    yield f"  {'memory read by each rank':<34}{measurements.memory_bytes_s / 1e9:.3g} GB/s"
    lines: dict[str, LinearTime | None] = {"sum over ranks": measurements.reduce}
    lines |= {str(primitive): line for primitive, line in measurements.moves.items()}
    lines |= {"sync": measurements.sync, "host memory": measurements.switch, "save": measurements.save}
    for name, line in lines.items():
        if line is not None:
            yield f"  {name.replace('_', ' '):<34}{_line_text(name, line)}"
    if measurements.network_gb_s is not None:
        yield f"  {'slowest link between machines':<34}{measurements.network_gb_s:.3g} GB/s"


def _line_text(name: str, line: LinearTime) -> str:
    item = "tensor" if name == "sync" else "message"
    parts = [f"{1000 * line.start:.3g} ms"] if line.start else []
    parts += [f"{1000 * line.per_item:.3g} ms a {item}"] if line.per_item else []
    parts += [f"{1e-9 / line.per_byte:.3g} GB/s"] if line.per_byte else []
    return " + ".join(parts) or "nothing"
