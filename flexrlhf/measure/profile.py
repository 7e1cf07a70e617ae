"""Profile of this machine: start its ranks, save their measurements, and format them as a table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from flexrlhf.api import (
    Hosts,
    OutputPath,
    Plan,
    RankFactory,
    check_device,
    check_packages,
    counted,
    live_display,
    make_plan,
    process_directory,
)
from flexrlhf.api.engine import choose_device, run_on_ranks
from flexrlhf.guideline.costs.environment_times import EnvironmentTimes, share_below
from flexrlhf.guideline.costs.measurements import (
    LinearTime,
    Measurements,
    ModelTimes,
    Points,
    are_measurements,
    read_measurements,
    write_measurements,
)
from flexrlhf.measure.environment_calls import measure_environments
from flexrlhf.measure.profiled_models import length_sample, profiled_models, profiling_spec

SHARE_OF_ENVIRONMENTS = 0.3
"""Time of an environment's calls, as a share of the time of all other measurements."""


def profile(
    plans: Sequence[Plan],
    command_plans: Sequence[Plan],
    seconds: float,
    path: Path,
    inputs: Sequence[Path] = (),
    network_gb_s: float | None = None,
) -> Measurements:
    """Measure the models of ``plans`` with as many ranks as the cluster's first node has devices, and write ``path``.

    command_plans:  plans of the same command that write models which ``plans`` start from
    seconds:        time of all measurements; longer where calls are slow
    inputs:         files that the command reads; ``path`` is none of them
    network_gb_s:   of the slowest link between two machines, if there are several

    Raises UserError, RankFailure or Interrupted; no process is left.
    """
    OutputPath(path, "-o").check_file("profile.json", are_measurements, inputs, makes_directories=True)
    # its processes load their libraries while models are checked
    with RankFactory.starting(is_copied=True) as factory:
        measurements = _measured(plans, command_plans, seconds, factory)
    environments = measure_environments(plans, SHARE_OF_ENVIRONMENTS * seconds)
    measurements = measurements.model_copy(update={"network_gb_s": network_gb_s, "environments": environments})
    write_measurements(path, measurements)
    return measurements


def _measured(
    plans: Sequence[Plan], command_plans: Sequence[Plan], seconds: float, factory: RankFactory | None
) -> Measurements:
    ranks = len(plans[0].cluster.ranks_on_node(0))
    cluster = plans[0].cluster
    device = choose_device(plans[0].spec.cluster.device, ranks, cluster.planned_gpu(range(ranks)))
    measured_plans = [make_plan(profiling_spec(plan, command_plans, ranks, device)) for plan in plans]
    for plan in measured_plans:
        check_packages(plan.placement)
        check_device(plan.placement, plan.shapes, device)
        # raises UserError where a shape is unknown
        profiled_models(plan)
    with process_directory() as directory:
        request, output = directory / "request.json", directory / "profile.json"
        lengths = [asdict(length_sample(plan)) for plan in plans]
        runs = [{"spec": plan.spec.dump(), **sample} for plan, sample in zip(measured_plans, lengths, strict=True)]
        most_tp = max(len(plan.cluster.ranks_on_node(node)) for plan in plans for node in range(plan.cluster.num_nodes))
        request.write_text(json.dumps({"runs": runs, "seconds": seconds, "most_tp": most_tp}))
        module = ["flexrlhf.measure.profile_rank", str(request), str(output)]
        with live_display(directory / "events.jsonl", f"measuring with {counted(ranks, 'rank')}"):
            run_on_ranks(module, measured_plans[0], Hosts(), factory=factory)
        return read_measurements(output)


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
    points = [point for each in measurements.models for point in each.points]
    spread = sorted(point.spread for point in points)[len(points) // 2]
    if spread > MAX_SPREAD:
        yield f"repetitions of one call differ by ±{50 * spread:.0f}%: measure again when nothing else is running"


def _model_lines(times: ModelTimes) -> Iterator[str]:
    model = times.model
    millions = model.parameters / 1e6
    yield f"\n{model.head} model, {model.layers} layers of {model.hidden}, {millions:.3g} M parameters, {times.engine}"
    for tp, layers in sorted(times.layers.items()):
        parts = {"embedding": layers.embedding, "a layer": layers.block, "head and the rest": layers.head}
        for name, part in parts.items():
            of = f"{name}, tp {tp}" if tp > 1 else name
            yield from _call_line(f"{of}: forward", part.forward)
            yield from _call_line(f"{of}: forward and backward", part.train)
            yield from _call_line(f"{of}: prompts", part.prefill)
            for step in part.step:
                yield from _call_line(f"{of}: decoding, {step.cache:.0f} in cache", step.points)
    for replicas, line in sorted(times.update.items()):
        seconds = line.seconds(4 * model.trained_parameters, model.layers)
        name = f"optimizer step, {counted(replicas, 'replica')}"
        yield f"  {name:<45}{_milliseconds(seconds)} ms"


def _call_line(name: str, points: Points) -> Iterator[str]:
    if points:
        cells = "   ".join(
            f"{p.rows if p.tokens is None else p.tokens:>5} {_milliseconds(p.seconds)} ms ±{50 * p.spread:2.0f}%"
            for p in dict.fromkeys((points[0], points[len(points) // 2], points[-1]))
        )
        yield f"  {name:<40}{cells}"


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
    for environment in measurements.environments:
        yield from _environment_lines(environment)
    if measurements.network_gb_s is not None:
        yield f"  {'slowest link between machines':<34}{measurements.network_gb_s:.3g} GB/s"


def _environment_lines(times: EnvironmentTimes) -> Iterator[str]:
    """Yield the times of an environment's calls in milliseconds."""
    order = "at once" if times.is_concurrent else "one after the other"
    failed = f", {counted(times.failures, 'failed call')} left out" if times.failures else ""
    around = f"{1000 * times.around:.3g} ms around a call, {times.computing:.0%} of their time computing"
    yield f"\n  environment {times.name}, episodes of a process {order}, {around}{failed}"
    for name, each in (("beginning of an episode", times.resets), ("reply", times.replies)):
        if each:
            values = (sum(each) / len(each), share_below(each, 0.5), share_below(each, 0.95), each[-1])
            mean, half, most, longest = (f"{1000 * seconds:.3g}" for seconds in values)
            yield f"    {name:<32}mean {mean} ms, median {half}, 95% below {most}, longest {longest}"


def _line_text(name: str, line: LinearTime) -> str:
    item = "tensor" if name == "sync" else "message"
    parts = [f"{1000 * line.start:.3g} ms"] if line.start else []
    parts += [f"{1000 * line.per_item:.3g} ms a {item}"] if line.per_item else []
    parts += [f"{1e-9 / line.per_byte:.3g} GB/s"] if line.per_byte else []
    return " + ".join(parts) or "nothing"
