"""Seconds of generation: prefill, then decoding steps of as many rows as are live."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from flexrlhf.guideline.costs.batching import Phase, phases_of
from flexrlhf.guideline.costs.cost_model import Call, Cost, Mesh
from flexrlhf.guideline.costs.decoders import DecodeProfile, host_factor
from flexrlhf.guideline.costs.kernels import FIGURES
from flexrlhf.guideline.costs.links import all_reduce_seconds, shared_gather_seconds
from flexrlhf.guideline.costs.training import forward_cost

PREFILL_TOKENS = 8192
"""Of one forward pass over prompts, at least one prompt."""
ACTIVATION_BYTES = 2
ONE_SHOT_SHARE = 0.7
"""Of the bandwidth of a device's links, when it reads all the others' messages at once."""


def generate_cost(call: Call, mesh: Mesh, profile: DecodeProfile) -> Cost:
    """Return the seconds of ``call.rows`` prompts and their responses on one replica."""
    phases = phases_of(profile.batching, call.rows, call.decode_rows, call.responses)
    prefill = {"prefill": prefill_cost(call, mesh, profile).seconds}
    return Cost(prefill | _Step.of(call, mesh, profile).through(phases, call.prompt))


def step_cost(call: Call, mesh: Mesh, rows: float, context: float, profile: DecodeProfile) -> Cost:
    """Return the seconds of one decoding step of ``rows`` rows of ``context`` tokens."""
    return Cost(_Step.of(call, mesh, profile).through([Phase(1, rows, context)], 0))


def prefill_cost(call: Call, mesh: Mesh, profile: DecodeProfile) -> Cost:
    """Return the seconds of forward passes over all prompts, which yield the first token of every response."""
    micro_rows = max(1, min(call.rows, int(PREFILL_TOKENS / max(call.prompt, 1.0))))
    forward = replace(call, kind="forward", width=call.prompt, responses=(1.0,), micro_rows=micro_rows)
    parts = dict(forward_cost(forward, _unthrottled(mesh), profile.passes).parts)
    if mesh.tp > 1:
        parts["tensor parallel"] = _prefill_reduce_seconds(call, mesh, micro_rows)
    passes, host = -(-call.rows // micro_rows), host_factor(mesh.device)
    parts["layers"] = passes * _layers_seconds(call, mesh, profile)
    parts["scheduler"] = host * (passes * profile.step_seconds + call.rows * profile.entry_seconds)
    return Cost(parts)


def _layers_seconds(call: Call, mesh: Mesh, profile: DecodeProfile) -> float:
    """Of what is neither matrix, attention nor collective in one step's layers."""
    pace = host_factor(mesh.device) if profile.host_paced else 1.0
    return pace * call.model.layers * profile.layer_seconds


@lru_cache(maxsize=4096)
def _unthrottled(mesh: Mesh) -> Mesh:
    """Decoding steps between prefills leave a board below its power limit."""
    return replace(mesh, device=replace(mesh.device, sustained=1.0))


def _prefill_reduce_seconds(call: Call, mesh: Mesh, micro_rows: int) -> float:
    """Of two all-reduces a layer, whose activations have 16 bits where weights have eight."""
    message = ACTIVATION_BYTES * call.model.hidden * micro_rows * call.prompt
    once = all_reduce_seconds(message, mesh.tp, mesh.per_node, mesh.links)
    return call.rows / micro_rows * 2 * call.model.layers * once


@dataclass(frozen=True)
class _Step:
    """Seconds of one decoding step, as far as they do not depend on its rows: of weights read, of arithmetic of one
    row, of the cache of one token, on the host. A pipeline's stages take their turns: they divide nothing."""

    weights: float
    row: float
    token: float
    layers: float
    launch: float
    host: float
    host_row: float
    gather: float
    reduces: int
    message: float
    one_shot: float
    mesh: Mesh

    @classmethod
    def of(cls, call: Call, mesh: Mesh, profile: DecodeProfile) -> _Step:
        model, device, host = call.model, mesh.device, host_factor(mesh.device)
        bandwidth = mesh.tp * device.memory_gb_s * 1e9
        read = model.layers * model.layer_parameters + model.head_parameters
        heads = 1 + profile.reread * (model.heads / model.kv_heads - 1)
        shared = min(mesh.tp, model.kv_heads)
        return cls(
            weights=call.item * read / (FIGURES.weights * bandwidth),
            row=2 * read / (mesh.tp * device.matmul * device.tflops * 1e12),
            token=heads * model.kv_bytes(call.cache_item) / (profile.cache * bandwidth * shared / mesh.tp),
            layers=_layers_seconds(call, mesh, profile),
            launch=host * model.layers * profile.launch_seconds,
            host=host * profile.step_seconds,
            host_row=host * profile.row_seconds,
            gather=_gather_seconds(call, mesh) if mesh.zero == 3 else 0.0,
            reduces=2 * model.layers if mesh.tp > 1 else 0,
            message=ACTIVATION_BYTES * model.hidden,
            one_shot=profile.one_shot_seconds,
            mesh=mesh,
        )

    def through(self, phases: Iterable[Phase], prompt: float) -> dict[str, float]:
        """Seconds of all steps of ``phases``, by what takes them."""
        blend = FIGURES.blend
        read = self.weights**blend
        steps = live = matrices = cache = reduce = launch = 0.0
        for phase in phases:
            rows = phase.rows
            multiplied = (read + (rows * self.row) ** blend) ** (1 / blend)
            looked_up = rows * (prompt + phase.age) * self.token
            reduced = self.reduces * self.reduce_seconds(self.message * rows) if self.reduces else 0.0
            steps += phase.steps
            live += phase.steps * rows
            matrices += phase.steps * multiplied
            cache += phase.steps * looked_up
            reduce += phase.steps * reduced
            launch += phase.steps * max(0.0, self.launch - multiplied - looked_up - reduced - self.layers)
        return {
            "weights": steps * self.weights,
            "compute": matrices - steps * self.weights,
            "cache": cache,
            "tensor parallel": reduce,
            "layers": steps * self.layers,
            "launch": launch,
            "gather": steps * self.gather,
            "scheduler": steps * self.host + live * self.host_row,
        }

    def reduce_seconds(self, size: float) -> float:
        """Of one all-reduce over tensor-parallel ranks: NCCL's, or the engine's own, whose ranks read all the others'
        messages at once."""
        mesh = self.mesh
        ring = all_reduce_seconds(size, mesh.tp, mesh.per_node, mesh.links)
        if not self.one_shot or mesh.tp > mesh.per_node:
            return ring
        return min(ring, self.one_shot + (mesh.tp - 1) * size / (ONE_SHOT_SHARE * mesh.links.device_gb_s * 1e9))


def _gather_seconds(call: Call, mesh: Mesh) -> float:
    """Of all layers' weights that ZeRO-3 spreads over replicas, for one step."""
    stage = mesh.tp * mesh.pp
    groups, per_node = min(stage, mesh.per_node), max(1, mesh.per_node // stage)
    size = call.item * call.model.parameters / stage
    return mesh.pp * shared_gather_seconds(size, mesh.dp, per_node, groups, mesh.links)
