"""Time of generation: prefill, then decoding steps with as many rows as are live.

Lengths are those of the rows, or a sample of their distribution: then a batch of ``rows`` has, after as many steps as a
share ``alive`` of the sample survives, ``rows * alive`` live rows on the average, and any at all with probability
``1 - (1 - alive) ** most``, where ``most`` rows could have been as long. Steps are not simulated one by one: lengths
are divided into few bins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from flexrlhf.guideline.costs.cost_model import Call, Cost, Mesh
from flexrlhf.guideline.costs.kernels import FIGURES
from flexrlhf.guideline.costs.links import all_reduce_seconds
from flexrlhf.guideline.costs.profiles import Batching, DecodeProfile, host_factor
from flexrlhf.guideline.costs.training import forward_cost, gather_weights_seconds

PREFILL_TOKENS = 8192
"""Tokens of one forward pass over prompts; it has at least one prompt."""
ACTIVATION_BYTES = 2
ONE_SHOT_SHARE = 0.7
"""Share of the bandwidth of a device's links that it reaches when it reads all other ranks' messages at once."""
EVEN_BINS, TAIL_BINS = 14, 6
"""Bins of a large sample: the tail, which runs long and nearly alone, has one for each length."""


def generate_cost(call: Call, mesh: Mesh, profile: DecodeProfile) -> Cost:
    """Return the time of ``call.rows`` prompts and their responses on one replica."""
    phases = decode_phases(profile.batching, call.rows, call.decode_rows, call.responses, call.is_exact)
    prefill = {"prefill": prefill_cost(call, mesh, profile).seconds}
    step, speculation = _Step.of(call, mesh, profile), call.speculation
    if speculation is None:
        return Cost(prefill | step.through(phases, call.prompt))
    each = list(phases)
    drafting = speculation.drafting * sum(step.through(each, call.prompt).values())
    steps, tokens = speculation.steps, 1 + speculation.drafted
    verified = [replace(phase, steps=steps * phase.steps, tokens=tokens) for phase in each]
    return Cost(prefill | step.through(verified, call.prompt) | {"drafting": drafting})


def step_cost(call: Call, mesh: Mesh, rows: float, context: float, profile: DecodeProfile) -> Cost:
    """Return the time of one decoding step of ``rows`` rows of ``context`` tokens."""
    return Cost(_Step.of(call, mesh, profile).through([DecodePhase(1, rows, context)], 0))


def prefill_cost(call: Call, mesh: Mesh, profile: DecodeProfile) -> Cost:
    """Return the time of forward passes over all prompts, which yield the first token of every response."""
    micro_rows = max(1, min(call.prompts, int(PREFILL_TOKENS / max(call.prompt, 1.0))))
    forward = replace(
        call, kind="forward", rows=call.prompts, width=call.prompt, responses=(1.0,), micro_rows=micro_rows
    )
    parts = dict(forward_cost(forward, _unthrottled(mesh), profile.passes).parts)
    if mesh.tp > 1:
        # two all-reduces a layer; activations have 16 bits even where weights have eight
        message = ACTIVATION_BYTES * call.model.hidden * micro_rows * call.prompt
        once = all_reduce_seconds(message, mesh.tp, mesh.per_node, mesh.links)
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

    weights:   time of reading the weights
    row:       time of one row's arithmetic
    token:     time of reading one token's keys and values
    layers:    time of the small kernels of all layers
    launch:    time of launching kernels on the host
    host:      time of the host's scheduler
    host_row:  the same, for each live row
    gather:    time of gathering weights that ZeRO-3 shards
    reduces:   all-reduces over tensor-parallel ranks
    message:   bytes of one row in one of them
    one_shot:  latency of the engine's own all-reduce kernel; 0: it has none
    tensor_reached: share of the speed of these collectives
    mesh:      where the step runs
    """

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
    tensor_reached: float
    mesh: Mesh

    @classmethod
    def of(cls, call: Call, mesh: Mesh, profile: DecodeProfile) -> _Step:
        model, device, host = call.model, mesh.device, host_factor(mesh.device)
        slower = 1 / profile.reached
        bandwidth = mesh.tp * device.memory_gb_s * 1e9
        read = model.layers * model.layer_parameters + model.head_parameters
        heads = 1 + profile.reread * (model.heads / model.kv_heads - 1)
        shared = min(mesh.tp, model.kv_heads)
        launch = profile.launch_seconds
        if launch and mesh.tp > 1:
            launch += profile.launch_tp_seconds
        return cls(
            weights=slower * call.weight_share * call.item * read / (FIGURES.weights * bandwidth),
            row=slower * 2 * read / (mesh.tp * device.matmul * device.tflops * 1e12),
            token=slower * heads * model.kv_bytes(call.cache_item) / (profile.cache * bandwidth * shared / mesh.tp),
            layers=_layers_seconds(call, mesh, profile),
            launch=slower * host * model.layers * launch,
            host=slower * host * profile.step_seconds,
            host_row=slower * host * profile.row_seconds,
            gather=mesh.pp * gather_weights_seconds(call, mesh, profile.passes) if mesh.zero == 3 else 0.0,
            reduces=2 * model.layers if mesh.tp > 1 else 0,
            message=ACTIVATION_BYTES * model.hidden,
            one_shot=profile.one_shot_seconds,
            tensor_reached=profile.tensor_reached,
            mesh=mesh,
        )

    def through(self, phases: Iterable[DecodePhase], prompt: float) -> dict[str, float]:
        """Return the time of all steps of ``phases``, by cause."""
        blend = FIGURES.blend
        read = self.weights**blend
        steps = live = matrices = cache = reduce = launch = gather = 0.0
        for phase in phases:
            rows = phase.rows
            multiplied = (read + (rows * phase.tokens * self.row) ** blend) ** (1 / blend)
            cached = rows * (prompt + phase.age) * self.token
            reduced = self.reduces * self.reduce_seconds(self.message * rows * phase.tokens) if self.reduces else 0.0
            steps += phase.steps
            live += phase.steps * rows
            matrices += phase.steps * multiplied
            cache += phase.steps * cached
            reduce += phase.steps * reduced
            busy = multiplied + cached + reduced + self.layers
            launched = max(0.0, self.launch - busy)
            launch += phase.steps * launched
            # the next layers' weights are gathered while one computes
            gather += phase.steps * max(0.0, self.gather - busy - launched)
        return {
            "weights": steps * self.weights,
            "compute": matrices - steps * self.weights,
            "cache": cache,
            "tensor parallel": reduce,
            "layers": steps * self.layers,
            "launch": launch,
            "gather": gather,
            "scheduler": steps * self.host + live * self.host_row,
        }

    def reduce_seconds(self, size: float) -> float:
        """Return the time of one all-reduce over tensor-parallel ranks: NCCL's, or the engine's own, in which each
        rank reads all other ranks' messages at once."""
        mesh = self.mesh
        seconds = all_reduce_seconds(size, mesh.tp, mesh.per_node, mesh.links)
        if self.one_shot and mesh.tp <= mesh.per_node:
            own = self.one_shot + (mesh.tp - 1) * size / (ONE_SHOT_SHARE * mesh.links.device_gb_s * 1e9)
            seconds = min(seconds, own)
        return seconds / self.tensor_reached


@dataclass(frozen=True)
class DecodePhase:
    """Decoding steps with the same number of live rows.

    steps:  steps, on the average
    rows:   live rows
    age:    tokens of their responses so far
    tokens: tokens of a row that a step computes
    """

    steps: float
    rows: float
    age: float
    tokens: int = 1


@dataclass(frozen=True)
class LengthBin:
    """Decoding steps ``start`` to ``end``, which a share ``alive`` of the rows reaches."""

    start: float
    end: float
    alive: float

    @property
    def steps(self) -> float:
        return self.end - self.start

    @property
    def age(self) -> float:
        return (self.start + self.end) / 2


@lru_cache(maxsize=1024)
def length_bins(responses: tuple[float, ...]) -> tuple[LengthBin, ...]:
    """Divide a sample of response lengths into bins; the first token of a response comes with the prefill."""
    lengths = sorted(max(0.0, length - 1) for length in responses)
    bins, start, ended = [], 0.0, 0
    for count in _counts(len(lengths)):
        end = sum(lengths[ended : ended + count]) / count
        if end > start:
            bins.append(LengthBin(start, end, 1 - ended / len(lengths)))
            start = end
        ended += count
    return tuple(bins)


def _counts(total: int) -> list[int]:
    """Number of lengths in each bin, the shortest first."""
    if total <= EVEN_BINS + TAIL_BINS:
        return [1] * total
    body = total - TAIL_BINS
    bounds = [body * index // EVEN_BINS for index in range(EVEN_BINS + 1)]
    return [high - low for low, high in zip(bounds, bounds[1:], strict=False)] + [1] * TAIL_BINS


def decode_phases(
    batching: Batching, rows: int, together: int, responses: tuple[float, ...], is_exact: bool = False
) -> Iterator[DecodePhase]:
    """Yield the phases of decoding ``rows`` rows, at most ``together`` at once. ``is_exact``: as of ``Call``."""
    together = max(1, min(rows, together))
    bins = length_bins(responses)
    if is_exact and rows == together:
        stays = batching == "static"
        yield from (DecodePhase(each.steps, rows * (1 if stays else each.alive), each.age) for each in bins)
        return
    if batching == "refill":
        yield from _full(rows, together, bins)
        yield from _shrinking(1, together, rows, bins)
        return
    groups, rest = divmod(rows, together)
    group = _static if batching == "static" else _shrinking
    yield from group(groups, together, together, bins)
    if rest:
        yield from group(1, rest, rest, bins)


def _full(rows: int, together: int, bins: tuple[LengthBin, ...]) -> Iterator[DecodePhase]:
    """Yield the phase in which the batch is full, until one batch is left; its age is that of a token in the mean."""
    mean = sum(each.steps * each.alive for each in bins)
    if rows > together and mean > 0:
        age = sum(each.steps * each.alive * each.age for each in bins) / mean
        yield DecodePhase((rows - together) / together * mean, together, age)


def _shrinking(groups: int, together: int, most: int, bins: tuple[LengthBin, ...]) -> Iterator[DecodePhase]:
    """Yield the phases of ``groups`` batches, one after the other, whose rows leave as they end."""
    for each in bins:
        any_left = 1 - (1 - each.alive) ** most
        yield DecodePhase(groups * each.steps * any_left, together * each.alive / any_left, each.age)


def _static(groups: int, together: int, most: int, bins: tuple[LengthBin, ...]) -> Iterator[DecodePhase]:
    """Yield the phases of ``groups`` batches, one after the other, whose rows stay until the longest has ended."""
    for each in bins:
        yield DecodePhase(groups * each.steps * (1 - (1 - each.alive) ** most), together, each.age)
