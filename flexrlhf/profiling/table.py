"""What a profile found, for a person."""

from __future__ import annotations

from collections.abc import Iterator

from flexrlhf.guideline.costs.measurements import LinearTime, Measurements, ModelTimes, Points

UNSTEADY = 0.4
"""A spread that points to something else on the machine."""


def format_measurements(measured: Measurements) -> str:
    """Times in milliseconds, speeds in GB/s; behind each time how far the middle half of its repetitions spread."""
    machine = measured.machine
    head = (
        f"{machine.ranks} ranks of {machine.threads} thread{'s' * (machine.threads > 1)} on {machine.cores} cores, "
        f"{machine.device}, torch {machine.torch}"
    )
    models = [line for times in measured.models for line in _model(times)]
    return "\n".join([head, *models, "", *_rest(measured), *_warning(measured)])


def _warning(measured: Measurements) -> Iterator[str]:
    unsteady = max(point.spread for times in measured.models for curve in _curves(times) for point in curve)
    if unsteady > UNSTEADY:
        yield f"repetitions of one call differ by ±{50 * unsteady:.0f}%: measure again when nothing else is running"


def _curves(times: ModelTimes) -> Iterator[Points]:
    """Those of calls by themselves: replicas that wait for each other differ by nature."""
    yield from (times.forward, times.step, times.train.get(1, ()))


def _model(times: ModelTimes) -> Iterator[str]:
    model = times.model
    millions = model.parameters / 1e6
    yield f"\n{model.head} model, {model.layers} layers of {model.hidden}, {millions:.3g} M parameters, {times.engine}"
    yield from _calls(f"forward, {times.width} tokens a row", times.forward)
    yield from _calls(f"prompts, {times.prompt} tokens a row", times.prefill)
    yield from _calls("one decoding step", times.step)
    for replicas, points in sorted(times.train.items()):
        yield from _calls(f"optimizer step, {replicas} replica{'s' * (replicas > 1)}", points)


def _calls(what: str, points: Points) -> Iterator[str]:
    if points:
        cells = "   ".join(f"{p.rows:>4} rows {_milliseconds(p.seconds)} ms ±{50 * p.spread:2.0f}%" for p in points)
        yield f"  {what:<30}{cells}"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:>6.{max(0, 2 - (seconds >= 0.01) - (seconds >= 0.1))}f}"


def _rest(measured: Measurements) -> Iterator[str]:
    yield from _calls("advantages", measured.combine)
    around, sums = 1000 * measured.bookkeeping, 1000 * measured.statistics
    yield f"  {'around each run':<34}{around:.3g} ms, {sums:.3g} ms where replicas add up statistics"
    for count, ratio in sorted(measured.contention.items()):
        yield f"  {f'forward with {count} ranks at work':<34}{ratio:.2f} x its time alone"
    yield f"  {'memory read by each rank':<34}{measured.memory_bytes_s / 1e9:.3g} GB/s"
    lines: dict[str, LinearTime | None] = {"sum over ranks": measured.reduce}
    lines |= {str(primitive): line for primitive, line in measured.moves.items()}
    lines |= {"sync": measured.sync, "host memory": measured.switch, "save": measured.save}
    for name, line in lines.items():
        if line is not None:
            yield f"  {name.replace('_', ' '):<34}{_line(name, line)}"


def _line(name: str, line: LinearTime) -> str:
    item = "tensor" if name == "sync" else "message"
    parts = [f"{1000 * line.start:.3g} ms"] if line.start else []
    parts += [f"{1000 * line.per_item:.3g} ms a {item}"] if line.per_item else []
    parts += [f"{1e-9 / line.per_byte:.3g} GB/s"] if line.per_byte else []
    return " + ".join(parts) or "nothing"
