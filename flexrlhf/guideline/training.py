"""Seconds of forward and training calls."""

from __future__ import annotations

from flexrlhf.guideline.calls import Call, Cost, Mesh
from flexrlhf.guideline.engines import PROFILES
from flexrlhf.guideline.links import all_reduce_seconds, gather_seconds

MATMUL_SHARE = 0.7


def forward_flops(call: Call, rows: float) -> float:
    """Of one forward pass over ``rows``: 2 per parameter and token, and causal attention (PaLM, appendix B)."""
    model, width = call.model, call.width
    weights = model.layers * model.layer_parameters * 2 * rows * width
    attention = 4 * model.layers * model.heads * model.head_dim * rows * width * width / 2
    head = 2 * model.head_parameters * rows * (call.mean_response if model.head == "causal" else 1)
    return weights + attention + head


def forward_cost(call: Call, mesh: Mesh) -> Cost:
    return Cost(_passes(call, mesh, 1.0, 1))


def train_cost(call: Call, mesh: Mesh) -> Cost:
    factor = {"none": 3.0, "selective": 3.0, "full": 4.0}[call.recompute]
    parts = _passes(call, mesh, factor, 3)
    model = call.model
    gradients = 4 * model.trained_parameters / (mesh.tp * mesh.pp)
    parts["gradients"] = call.updates * all_reduce_seconds(gradients, mesh.dp, mesh.per_node, mesh.links)
    shard = mesh.dp if mesh.zero else 1
    state = 16 * model.trained_parameters / (mesh.tp * mesh.pp * shard)
    parts["optimizer"] = call.updates * 2 * state / (0.7 * mesh.device.memory_gb_s * 1e9)
    return Cost(parts)


def _passes(call: Call, mesh: Mesh, factor: float, gathers: int) -> dict[str, float]:
    model, profile = call.model, PROFILES[call.engine]
    flops = factor * forward_flops(call, call.rows) / (mesh.tp * mesh.pp)
    compute = flops / (profile.passes * MATMUL_SHARE * mesh.device.tflops * 1e12)
    micro_batches = max(1, -(-call.rows // call.micro_rows))
    bubble = compute * (mesh.pp - 1) / max(micro_batches, 1)
    message = call.item * model.hidden * call.micro_rows * call.width
    reduces = 2 * model.layers * factor / 2 if mesh.tp > 1 else 0
    tensor = micro_batches * reduces * all_reduce_seconds(message, mesh.tp, mesh.per_node, mesh.links)
    gather = 0.0
    if mesh.zero == 3:
        weights = call.item * model.parameters / (mesh.tp * mesh.pp)
        gather = gathers * micro_batches * gather_seconds(weights, mesh.dp, mesh.per_node, mesh.links)
    return {"compute": compute, "bubble": bubble, "tensor parallel": tensor, "gather": max(0.0, gather - compute)}
