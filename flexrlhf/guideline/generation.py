"""Seconds of generation: prefill, then one decoding step for every token of the longest answers."""

from __future__ import annotations

from dataclasses import replace

from flexrlhf.guideline.calls import Call, Cost, Mesh
from flexrlhf.guideline.engines import PROFILES
from flexrlhf.guideline.links import all_reduce_seconds, gather_seconds
from flexrlhf.guideline.training import forward_cost


def generate_cost(call: Call, mesh: Mesh) -> Cost:
    rounds = max(1, -(-call.rows // call.decode_rows))
    together = min(call.rows, call.decode_rows)
    steps = rounds * call.longest_response
    prefill = replace(call, kind="forward", width=call.prompt, responses=(1.0,))
    parts = {"prefill": forward_cost(prefill, mesh).seconds}
    for name, seconds in _step(call, mesh, together * call.mean_response / call.longest_response).items():
        parts[name] = steps * seconds
    return Cost(parts)


def _step(call: Call, mesh: Mesh, rows: float) -> dict[str, float]:
    model, profile, split = call.model, PROFILES[call.engine], mesh.tp
    bandwidth = profile.decode * mesh.device.memory_gb_s * 1e9
    weights = call.item * (model.parameters - model.hidden * model.vocabulary * (not model.tied)) / split / bandwidth
    compute = 2 * model.parameters * rows / split / (0.7 * mesh.device.tflops * 1e12)
    cache = model.kv_bytes(call.item) / split * rows * (call.prompt + call.mean_response / 2) / bandwidth
    reduce = all_reduce_seconds(call.item * model.hidden * rows, mesh.tp, mesh.per_node, mesh.links)
    whole = call.item * model.parameters / split
    gather = gather_seconds(whole, mesh.dp, mesh.per_node, mesh.links) if mesh.zero == 3 else 0.0
    busy = max(weights, compute) + cache
    launch = profile.step_seconds + model.layers * profile.launch_seconds
    return {
        "weights": max(weights, compute),
        "cache": cache,
        "launch": max(0.0, launch - busy),
        "tensor parallel": 2 * model.layers * reduce if mesh.tp > 1 else 0.0,
        "gather": gather,
    }
