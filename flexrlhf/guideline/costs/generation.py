"""Time of generation: prefill, then decoding steps with as many rows as are live (``decode_phases.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from flexrlhf.guideline.costs.cost_model import Call, Cost, Mesh
from flexrlhf.guideline.costs.decode_phases import DecodePhase, decoding
from flexrlhf.guideline.costs.exchanges import expert_seconds
from flexrlhf.guideline.costs.kernels import FIGURES, LAUNCH_SECONDS
from flexrlhf.guideline.costs.links import TransferTime, all_reduce_seconds, all_reduces
from flexrlhf.guideline.costs.profiles import DecodeProfile, host_factor
from flexrlhf.guideline.costs.training import forward_cost, gather_weights_seconds

PREFILL_TOKENS = 8192
"""Tokens of one forward pass over prompts; it has at least one prompt."""
ACTIVATION_BYTES = 2
ONE_SHOT_SHARE = 0.7
"""Share of the bandwidth of a device's links that it reaches when it reads all other ranks' messages at once."""


@lru_cache(maxsize=16384)
def generate_cost(call: Call, mesh: Mesh, profile: DecodeProfile) -> Cost:
    """Return the time of ``call.rows`` prompts and their responses on one replica."""
    found = decoding(call, profile.batching, mesh.dp)
    prefill, step = _prefill_and_step(replace(call, decode_rows=1, pages=None), mesh, profile)
    parts = {"prefill": prefill}
    if found.repeats:
        length = found.repeated / found.repeats
        again = replace(call, rows=max(1, round(found.repeats)), prompt=length, prompt_samples=1)
        parts["recomputation"] = prefill_cost(again, mesh, profile).seconds
    return Cost(parts | step.through(found.phases, call.prompt))


def step_cost(call: Call, mesh: Mesh, rows: float, context: float, profile: DecodeProfile) -> Cost:
    """Return the time of one decoding step of ``rows`` rows of ``context`` tokens."""
    return Cost(_Step.of(call, mesh, profile).through([DecodePhase(1, rows, context)], 0))


@lru_cache(maxsize=4096)
def _prefill_and_step(call: Call, mesh: Mesh, profile: DecodeProfile) -> tuple[float, _Step]:
    """Return the time of prefill, and a decoding step: neither depends on how many rows are decoded together."""
    return prefill_cost(call, mesh, profile).seconds, _Step.of(call, mesh, profile)


def prefill_cost(call: Call, mesh: Mesh, profile: DecodeProfile) -> Cost:
    """Return the time of forward passes over all prompts, which yield the first token of every response."""
    micro_rows = max(1, min(call.prompts, int(PREFILL_TOKENS / max(call.prompt, 1.0))))
    forward = replace(
        call, kind="forward", rows=call.prompts, width=call.prompt, responses=(1.0,), micro_rows=micro_rows
    )
    parts = dict(forward_cost(forward, _unthrottled(mesh), profile.passes).parts)
    if mesh.dims.tp > 1:
        # two all-reduces a layer; activations have 16 bits even where weights have eight
        message = ACTIVATION_BYTES * call.model.hidden * micro_rows * call.prompt
        once = all_reduce_seconds(message, mesh.dims.tp, mesh.per_node, mesh.links)
        parts["tensor parallel"] = call.prompts / micro_rows * 2 * call.model.layers * once / profile.tensor_reached
    passes, host = -(-call.prompts // micro_rows), host_factor(mesh.device)
    parts["layers"] = passes * _layers_seconds(call, mesh, profile)
    parts["scheduler"] = host * (passes * profile.step_seconds + call.rows * profile.entry_seconds) / profile.reached
    return Cost(parts)


def _layers_seconds(call: Call, mesh: Mesh, profile: DecodeProfile) -> float:
    """Return the time of one step's layers that are neither matrix, attention nor collective, and of two small
    products for each adapter.
    """
    pace = host_factor(mesh.device) if profile.host_paced else 1.0
    adapters = 2 * call.adapters_apart * FIGURES.start_seconds
    return (pace * call.model.layers * profile.layer_seconds + adapters) / profile.reached


@lru_cache(maxsize=4096)
def _unthrottled(mesh: Mesh) -> Mesh:
    """Return ``mesh`` at full clock: decoding steps between prefills leave a board below its power limit."""
    return replace(mesh, device=replace(mesh.device, sustained=1.0))


@dataclass(frozen=True)
class _Step:
    """Constants of one decoding step; times in seconds. A pipeline's stages work in turn, so they divide nothing.

    weights:   time of reading the weights, without experts
    experts:   time of reading all experts
    untaken:   share of them that a token does not take
    exchange:  time in which so many tokens travel to experts of other ranks and back; None: there are none
    row:       time of one row's arithmetic
    token:     time of reading one token's keys and values, and of making them from a latent where the engine does
    layers:    time of the small kernels of all layers
    launch:    time of launching kernels on the host
    host:      time of the host's scheduler
    host_row:  the same, for each live row
    gather:    time of gathering weights that ZeRO-3 shards
    reduces:   all-reduces over tensor-parallel ranks
    message:   bytes of one row in one of them
    reduce:    time of one of them, by its bytes
    sharers:   ranks that share the experts
    """

    weights: float
    experts: float
    untaken: float
    exchange: Callable[[float], float] | None
    row: float
    token: float
    layers: float
    launch: float
    host: float
    host_row: float
    gather: float
    reduces: int
    message: float
    reduce: TransferTime
    sharers: int

    @classmethod
    def of(cls, call: Call, mesh: Mesh, profile: DecodeProfile) -> _Step:
        model, device, host = call.model, mesh.device, host_factor(mesh.device)
        slower = 1 / profile.reached
        bandwidth = mesh.dims.tp * device.memory_gb_s * 1e9
        # no token: none of the routed experts
        read = model.layers * model.read_parameters(0) + model.head_parameters
        experts = model.layers * (model.layer_parameters - model.read_parameters(0))
        active = model.layers * (model.active_parameters + 2 * model.hidden) + model.head_parameters
        weights = slower * call.item / (FIGURES.weights * bandwidth)
        heads = 1 + profile.reread * (model.heads / model.kv_heads - 1)
        shared = model.cache_parts(mesh.dims.tp)
        speed = mesh.dims.tp * device.matmul * device.tflops * 1e12
        expanding = 0.0
        if model.latent is not None and profile.expands:
            features = model.latent.key * model.heads * model.latent.expanded
            expanding = slower * 2 * model.layers * features / speed
        launch = profile.launch_seconds
        if launch and mesh.dims.tp > 1:
            launch += profile.launch_tp_seconds
        if model.experts is not None and profile.passes.grouped_mm and not device.has_grouped_mm(call.item):
            # two products of each expert of a rank
            ranks = mesh.dims.tp * mesh.dims.expert_parts
            launch += 2 * LAUNCH_SECONDS * model.sparse_layers / model.layers * model.experts.number / ranks
        return cls(
            weights=weights * read,
            experts=weights * experts / mesh.dims.expert_parts,
            untaken=0.0 if model.experts is None else 1 - model.experts.active / model.experts.number,
            exchange=(lambda tokens: expert_seconds(call, mesh, tokens)) if mesh.dims.expert_parts > 1 else None,
            row=slower * 2 * active / speed,
            token=slower * heads * model.kv_bytes(call.cache_item) / (profile.cache * bandwidth * shared / mesh.dims.tp)
            + expanding,
            layers=_layers_seconds(call, mesh, profile),
            launch=slower * host * model.layers * launch,
            host=slower * host * profile.step_seconds,
            host_row=slower * host * profile.row_seconds,
            gather=mesh.dims.pp * gather_weights_seconds(call, mesh, profile.passes) if mesh.zero == 3 else 0.0,
            reduces=2 * model.layers if mesh.dims.tp > 1 else 0,
            message=ACTIVATION_BYTES * model.hidden,
            reduce=_reduces(mesh, profile),
            sharers=mesh.dims.expert_parts,
        )

    def through(self, phases: Iterable[DecodePhase], prompt: float) -> dict[str, float]:
        """Return the time of all steps of ``phases``, by cause."""
        blend = FIGURES.blend
        weights, read = self.weights, self.weights**blend
        steps = live = exchanged = reading = matrices = cache = reduce = launch = gather = 0.0
        for phase in phases:
            rows = phase.rows
            if self.experts:
                weights = self.weights + self.experts * (1 - self.untaken ** (rows * self.sharers))
                read = weights**blend
            multiplied = (read + (rows * self.row) ** blend) ** (1 / blend)
            cached = rows * (prompt + phase.age) * self.token
            reduced = self.reduces * self.reduce(self.message * rows) if self.reduces else 0.0
            steps += phase.steps
            live += phase.steps * rows
            if self.exchange is not None:
                exchanged += phase.steps * self.exchange(rows)
            reading += phase.steps * weights
            matrices += phase.steps * multiplied
            cache += phase.steps * cached
            reduce += phase.steps * reduced
            busy = multiplied + cached + reduced + self.layers
            launched = max(0.0, self.launch - busy)
            launch += phase.steps * launched
            # the next layers' weights are gathered while one computes
            gather += phase.steps * max(0.0, self.gather - busy - launched)
        return {
            "weights": reading,
            "compute": matrices - reading,
            "cache": cache,
            **({"expert parallel": exchanged} if exchanged else {}),
            "tensor parallel": reduce,
            "layers": steps * self.layers,
            "launch": launch,
            "gather": gather,
            "scheduler": steps * self.host + live * self.host_row,
        }


def _reduces(mesh: Mesh, profile: DecodeProfile) -> TransferTime:
    """Return the time of one all-reduce over tensor-parallel ranks: NCCL's, or the engine's own, in which each rank
    reads all other ranks' messages at once."""
    reached, start, others = profile.tensor_reached, profile.one_shot_seconds, mesh.dims.tp - 1
    library = all_reduces(mesh.dims.tp, mesh.per_node, mesh.links)
    if not start or mesh.dims.tp > mesh.per_node:
        return lambda size: library(size) / reached
    bytes_s = ONE_SHOT_SHARE * mesh.links.device_gb_s * 1e9
    return lambda size: min(library(size), start + others * size / bytes_s) / reached
