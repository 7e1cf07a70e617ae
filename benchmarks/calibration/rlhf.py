"""Published and predicted steps and calls of RLHF systems."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.calibration.problems import (
    Catalogue,
    LeftOut,
    NothingFits,
    PublishedStep,
    number,
    problem_of,
    source_of,
)
from benchmarks.calibration.rows import Prediction, Row, read_models, read_rows
from benchmarks.systems.calls import SystemCall, call_of, call_seconds, transition_seconds
from benchmarks.systems.engines import TABLES, EngineTables
from benchmarks.systems.meshes import mesh_of
from benchmarks.systems.profiles import SYSTEMS, System
from benchmarks.systems.steps import SystemStep, best_step, part_seconds, timed_as
from benchmarks.systems.workload import ACTOR, CRITIC, REF, REWARD, ROLLOUT, SystemPlacement
from flexrlhf.guideline.costs.cost_model import Transformer

CALLS, STEPS = "rlhf calls", "rlhf steps"
DSCHAT_SAMPLES = 264_292
"""Rows of a whole run in DeepSpeed-Chat's tables."""
DSCHAT_ROWS = 1024
"""Most rows of a step in them."""
NAIVE_MFU = 0.10
"""Fraction of the peak at which the median step runs."""

_CALLS = {
    "actor_generate": ("generate", ACTOR),
    "gen": ("generate", ACTOR),
    "generate_sequences": ("generate", ACTOR),
    "gen (incl. reshard)": ("generate", ACTOR),
    "reward_infer": ("forward", REWARD),
    "ref_infer": ("forward", REF),
    "critic_infer": ("forward", CRITIC),
    "old_log_prob": ("forward", ACTOR),
    "ref_log_prob": ("forward", REF),
    "actor_train": ("train", ACTOR),
    "critic_train": ("train", CRITIC),
    "update_actor": ("train", ACTOR),
}
_PHASES = {
    "generation phase (gen+forward)": ("generate", "forward"),
    "training phase (actor+critic)": ("train",),
    "actor_train+critic_train": ("train",),
    "generation": ("generate",),
}


@dataclass
class ReadRows:
    """Result of reading the rows.

    predictions:  predictions of rows that are tests
    left_out:     number of others by reason
    systems:      system of each row
    """

    predictions: list[Prediction]
    left_out: Counter[str]
    systems: dict[str, str]


def read(directory: Path, systems: Mapping[str, System] = SYSTEMS, tables: EngineTables = TABLES) -> ReadRows:
    known = Catalogue(read_models(directory), systems, tables)
    found = ReadRows([], Counter(), {})
    for row in rows_of(directory):
        found.systems[row["id"]] = row["system"]
        try:
            found.predictions.append(predict(row, known))
        except LeftOut as reason:
            found.left_out[str(reason)] += 1
    return found


def rows_of(directory: Path) -> list[Row]:
    """Return the rows of steps and calls. A step that does not state its micro-batch has its calls' one."""
    kinds = ("percall", "e2e", "phase", "transition")
    rows = [row for row in read_rows(directory, "measurements_calib") if row["kind"] in kinds]
    named: dict[tuple[str, ...], str] = {}
    for row in rows:
        if row["micro_bs"]:
            named.setdefault(_experiment(row), row["micro_bs"])
    return [row | {"micro_bs": row["micro_bs"] or named.get(_experiment(row), "")} for row in rows]


def _experiment(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in ("group", "system", "version", "actor_b", "n_gpus", "global_batch", "gen_len"))


def predict(row: Row, known: Catalogue) -> Prediction:
    """Return the prediction of a row: 0 seconds, an error of 100 %, if it is predicted not to fit. Raises LeftOut if it
    is no test."""
    try:
        return _predicted(row, known)
    except NothingFits:
        goal = STEPS if row["kind"] == "e2e" else CALLS
        return Prediction(goal, row["group"], row["id"], 1.0, 0.0, 0.0, 0.0)


def _predicted(row: Row, known: Catalogue) -> Prediction:
    if row["kind"] == "e2e":
        return _end_to_end(row, known)
    if row["kind"] == "phase":
        return _phase_share(row, known)
    if row["kind"] == "transition":
        return _transition(row, known)
    return _call(row, known)


# ---------------------------------------------------------------- steps


def step_of(problem: PublishedStep) -> SystemStep:
    """Return the predicted step. Raises LeftOut if nothing fits."""
    if problem.planner is not None:  # without graphs it runs the plan that was searched with them
        planned = replace(problem.planner, layout=problem.system.layout, placements=problem.system.placements)
        step = best_step(problem.workload, planned, problem.tables.costs(planned.overheads))
        step = None if step is None else timed_as(step, problem.system, problem.costs)
    else:
        step = best_step(problem.workload, problem.system, problem.costs, problem.placement)
    if step is not None and source_of(problem.row) == "dschat" and step.rows > DSCHAT_ROWS:
        step = best_step(replace(problem.workload, rows=DSCHAT_ROWS), problem.system, problem.costs, problem.placement)
    if step is None:
        raise NothingFits("predicted not to fit")
    return step


def _end_to_end(row: Row, known: Catalogue) -> Prediction:
    if row["metric"] not in ("step_time", "time", "throughput", "run_time"):
        raise LeftOut(f"metric {row['metric']}")
    step = step_of(problem_of(row, known))
    value = number(row["value"])
    if value is None:
        raise LeftOut("no value")
    seconds = {
        "samples/s": step.rows / value,
        "h": value * 3600 / DSCHAT_SAMPLES * step.rows,
    }.get(row["unit"], value)
    flops, roofline = naive_step(step)
    return Prediction(STEPS, row["group"], row["id"], seconds, step.seconds, flops, roofline)


def naive_step(step: SystemStep) -> tuple[float, float]:
    """Return the seconds at constant MFU, and of the roofline: all calls one after the other on all devices."""
    each = [naive_call(placed, sum(step.placement.blocks)) for placed in step.calls]
    return sum(pair[0] for pair in each), sum(pair[1] for pair in each)


def dense_flops(model: Transformer, tokens: float, width: float) -> float:
    """Return the operations of one forward pass: 2 per parameter and token, and causal attention."""
    return tokens * (2 * model.parameters + 2 * model.layers * model.heads * model.head_dim * width)


def naive_call(placed: SystemCall, devices: int) -> tuple[float, float]:
    """Return both for one call. A decoding step of the roofline reads all weights of a replica and its rows' cache."""
    call, mesh = placed.call, placed.mesh
    factor = {"generate": 1, "forward": 1, "train": 3}[call.kind]
    flops = factor * mesh.dp * dense_flops(call.model, call.rows * call.width, call.width)
    peak, bandwidth = mesh.device.tflops * 1e12, mesh.device.memory_gb_s * 1e9
    roofline = flops / devices / peak
    if call.kind == "generate":
        rounds = -(-call.rows // call.decode_rows)
        weights = rounds * call.longest_response * 2 * call.model.parameters
        cache = call.rows * call.mean_response * call.model.kv_bytes() * (call.prompt + call.mean_response / 2)
        roofline = max(roofline, (weights + cache) / (mesh.dims.tp * mesh.dims.pp) / bandwidth)
    return flops / devices / peak / NAIVE_MFU, roofline


# ---------------------------------------------------------------- calls


def _call(row: Row, known: Catalogue) -> Prediction:
    if row["call"] in _PHASES:
        return _phase(row, known)
    if row["call"] == "weight reshard":
        return _transition(row, known)
    if row["call"] not in _CALLS:
        raise LeftOut(f"call {row['call']} is no model call")
    if source_of(row) == "real":
        return _placed_call(row, known)
    problem = problem_of(row, known)
    step = step_of(problem)
    kind, role = _CALLS[row["call"]]
    placed = next((placed for placed in step.calls if placed.call.kind == kind and placed.role == role), None)
    if placed is None:
        raise LeftOut("a call that the step does not have")
    seconds = step.call_seconds[placed.name]
    if "incl. reshard" in row["call"]:
        seconds += step.call_seconds.get("transition", 0.0)
    return Prediction(
        CALLS, row["group"], row["id"], float(row["value"]), seconds, *naive_call(placed, placed.mesh.size)
    )


def _placed_call(row: Row, known: Catalogue) -> Prediction:
    """Return the prediction of a call on the mesh of its row, with its sequential portions."""
    placed, problem = placed_call(row, known)
    seconds = call_seconds(placed, problem.costs)
    return Prediction(
        CALLS, row["group"], row["id"], float(row["value"]), seconds, *naive_call(placed, placed.mesh.size)
    )


def placed_call(row: Row, known: Catalogue) -> tuple[SystemCall, PublishedStep]:
    kind, role = _CALLS[row["call"]]
    tp, pp, portions = (int(number(row[name]) or 1) for name in ("tp", "pp", "n_microbatch"))
    problem = problem_of(row | {"critic_b": row["critic_b"] or "8.03"}, known)
    size = tp * pp * int(number(row["dp"]) or problem.workload.devices // (tp * pp))
    mesh = mesh_of(problem.workload, size, tp, pp, 1 if kind == "train" else 0)
    call = call_of(problem.workload, problem.system, kind, role, mesh, problem.workload.rows or 1)
    share = max(1, call.rows // (call.updates * portions))
    stages = pp * (2 if kind == "train" else 1) if pp > 1 else 1
    rows = max(1, share // stages) if kind != "generate" else 1
    call = replace(call, micro_rows=rows, decode_rows=max(1, call.rows // portions))
    return SystemCall(row["call"], role, call, mesh, (0,), portions=portions), problem


def _phase(row: Row, known: Catalogue) -> Prediction:
    """Return the prediction of calls of some kinds together, in parallel if they have separate devices."""
    problem = problem_of(row, known)
    step = step_of(problem)
    kinds = _PHASES[row["call"]]
    calls = [placed for placed in step.calls if placed.call.kind in kinds]
    naive = [naive_call(placed, problem.workload.devices) for placed in calls]
    return Prediction(
        CALLS,
        row["group"],
        row["id"],
        float(row["value"]),
        part_seconds(step, kinds),
        sum(pair[0] for pair in naive),
        sum(pair[1] for pair in naive),
    )


def _phase_share(row: Row, known: Catalogue) -> Prediction:
    """Return the predicted fraction of a phase in its step."""
    value = number(row["value"])
    if value is None or row["value"].startswith(">"):
        raise LeftOut("a bound, no value")
    step = step_of(problem_of(row, known))
    naive = naive_step(step)
    calls = [naive_call(placed, sum(step.placement.blocks)) for placed in step.calls if placed.call.kind == "generate"]
    shares = [sum(pair[index] for pair in calls) / naive[index] for index in (0, 1)]
    share = part_seconds(step, ("generate",)) / step.seconds
    return Prediction(CALLS, row["group"], row["id"], value, share, *shares)


# ---------------------------------------------------------------- transitions


def _transition(row: Row, known: Catalogue) -> Prediction:
    value = number(row["value"])
    if row["unit"] != "s" or value is None:
        raise LeftOut("a transition's ratio, no time")
    if "MoE" in row["model"] or re.search(r"A\d+B", row["model"]):
        raise LeftOut("mixture of experts")
    seconds, naive = _gaps(row, known) if source_of(row) == "real" else _sync(row, known)
    return Prediction(CALLS, row["group"], row["id"], value, seconds, naive, naive)


def _gaps(row: Row, known: Catalogue) -> tuple[float, float]:
    """Return the time of ReaL's step in addition to the calls on its critical path, in seconds."""
    problem = problem_of(row, known)
    step = step_of(problem)
    calls = timed_as(step, replace(problem.system, controller_seconds=0.0), problem.costs)
    return step.seconds - part_seconds(calls, ("generate", "forward", "train")), 0.0


def _sync(row: Row, known: Catalogue) -> tuple[float, float]:
    """Return the time of sending weights to the generating copy, and naively at the speed of a node's links."""
    name = row["model"] or f"LLaMA-2-{row['actor_b']}B"
    stated = {"gen_len": "1024", "prompt_len": "1024", "algo": "GRPO", "model": name, "n_gpus": row["n_gpus"] or "64"}
    problem = problem_of(row | stated, known)
    if re.search("disjoint|separate", row["placement"]) or "co-located" not in problem.system.placements:
        half = problem.workload.devices // 2
        placement = SystemPlacement("halves", (half, half), {ACTOR: (0,), ROLLOUT: (1,)})
    else:
        placement = SystemPlacement("co-located", (problem.workload.devices,), {ACTOR: (0,)})
    trained = mesh_of(problem.workload, placement.devices(ACTOR), zero=3)
    generate = mesh_of(problem.workload, placement.devices(placement.home))
    seconds = transition_seconds(problem.workload, problem.system, placement, trained, generate, problem.costs)
    return seconds, 2 * problem.workload.models[ACTOR].parameters / (problem.workload.links.node_gb_s * 1e9)
