"""Seconds of forward and training calls: what one micro-batch takes on a stage, then how many of them, and what ranks
exchange meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from flexrlhf.guideline.costs.cost_model import Call, Cost, Links, Mesh, Traffic
from flexrlhf.guideline.costs.engines import EngineProfile
from flexrlhf.guideline.costs.kernels import attention_seconds, elements_seconds, matmul_seconds
from flexrlhf.guideline.costs.links import (
    all_reduce_seconds,
    shared_all_reduce_seconds,
    shared_gather_seconds,
    travel_seconds,
)
from flexrlhf.guideline.costs.transformer import Transformer
from flexrlhf.placement.devices import DeviceClass

# FlashAttention 2, section 3.1: five products of the square backward, two forward.
ATTENTION_BACKWARD = 2.5
# Gradients of an element-wise kernel read its input and the gradient of its result: about twice the traffic.
ELEMENTS_BACKWARD = 2.0
# Adam in mixed precision, bytes of a parameter: 32-bit weight and two moments read and written, gradient read, 16-bit
# weight written (ZeRO, section 3.1, counts them).
OPTIMIZER_BYTES = 30
# ZeRO-Offload, section 4: gradients down and weights up, in 16 bits; the host's Adam moves the same bytes through its
# own memory, about 200 GB/s of a node.
OFFLOADED_BYTES, HOST_MEMORY_GB_S = 4, 200


@dataclass(frozen=True)
class Pieces:
    """Seconds of one pass of one layer, or of the head, on one device."""

    products: float = 0.0
    attention: float = 0.0
    elements: float = 0.0

    @property
    def seconds(self) -> float:
        return self.products + self.attention + self.elements

    def times(self, factor: float) -> Pieces:
        return Pieces(factor * self.products, factor * self.attention, factor * self.elements)

    def plus(self, other: Pieces) -> Pieces:
        return Pieces(self.products + other.products, self.attention + other.attention, self.elements + other.elements)


@dataclass(frozen=True)
class Batch:
    """One micro-batch. ``head_tokens``: those whose logits are computed."""

    rows: float
    width: float
    head_tokens: float
    item: int

    @property
    def tokens(self) -> float:
        return self.rows * self.width


@dataclass(frozen=True)
class Stage:
    """One micro-batch on the slowest stage: the layers' pieces, the head's, seconds of launches in vain, of
    tensor-parallel reductions."""

    layers: Pieces
    head: float
    launch: float
    tensor: float

    @property
    def seconds(self) -> float:
        return self.layers.seconds + self.head + self.launch + self.tensor


def forward_cost(call: Call, mesh: Mesh, profile: EngineProfile) -> Cost:
    """Return the seconds of a forward pass over all rows of a replica."""
    parts, micro_batches = _stages(call, mesh, profile, training=False)
    weights = call.item * call.model.parameters / (mesh.tp * mesh.pp)
    gather = micro_batches * _gather(weights, mesh) if mesh.zero == 3 else 0.0
    return Cost(_with_traffic(parts, {"gather": gather}, profile.overlap))


def train_cost(call: Call, mesh: Mesh, profile: EngineProfile) -> Cost:
    """Return the seconds of forward and backward passes over all rows of a replica, and of its optimizer steps."""
    parts, micro_batches = _stages(call, mesh, profile, training=True)
    parts = _with_traffic(parts, _replica_traffic(call, mesh, micro_batches), profile.overlap)
    parts["optimizer"] = call.updates * _optimizer_seconds(call, mesh)
    return Cost(parts)


def _with_traffic(parts: dict[str, float], traffic: dict[str, float], overlap: float) -> dict[str, float]:
    """Adds what does not hide: of the shorter of compute and traffic the share ``1 - overlap``."""
    compute, exchanged = sum(parts.values()), sum(traffic.values())
    if not exchanged:
        return parts
    exposed = max(exchanged - compute, 0.0) + (1 - overlap) * min(exchanged, compute)
    return parts | {name: seconds * exposed / exchanged for name, seconds in traffic.items()}


def _replica_traffic(call: Call, mesh: Mesh, micro_batches: int) -> dict[str, float]:
    """Weights gathered and gradients reduced, seconds (ZeRO, section 7)."""
    model = call.model
    weights = call.item * model.parameters / (mesh.tp * mesh.pp)
    gradients = call.item * model.trained_parameters / (mesh.tp * mesh.pp)
    if mesh.zero == 3:
        gather = 2 * micro_batches * _gather(weights, mesh)
        return {"gather": gather, "gradients": micro_batches * _gather(gradients, mesh)}
    if mesh.zero:
        gather = call.updates * _gather(gradients, mesh)
        reductions = micro_batches if mesh.zero == 2 else call.updates
        return {"gather": gather, "gradients": reductions * _gather(gradients, mesh)}
    groups, per_node = _groups(mesh)
    return {"gradients": call.updates * shared_all_reduce_seconds(gradients, mesh.dp, per_node, groups, mesh.links)}


def _groups(mesh: Mesh) -> tuple[int, int]:
    """Groups of replicas' peers that leave a node side by side, and the ranks that each has in it."""
    groups = min(mesh.tp * mesh.pp, mesh.per_node)
    return groups, max(1, mesh.per_node // (mesh.tp * mesh.pp))


def _gather(size: float, mesh: Mesh) -> float:
    groups, per_node = _groups(mesh)
    return shared_gather_seconds(size, mesh.dp, per_node, groups, mesh.links)


def _optimizer_seconds(call: Call, mesh: Mesh) -> float:
    shard = mesh.dp if mesh.zero else 1
    parameters = call.model.trained_parameters / (mesh.tp * mesh.pp * shard)
    if not call.offload_optimizer:
        return elements_seconds(OPTIMIZER_BYTES * parameters, mesh.device)
    host = OPTIMIZER_BYTES * parameters * mesh.per_node / HOST_MEMORY_GB_S
    return (OFFLOADED_BYTES * parameters / mesh.device.host_gb_s + host) / 1e9


def _stages(call: Call, mesh: Mesh, profile: EngineProfile, training: bool) -> tuple[dict[str, float], int]:
    """Seconds of all micro-batches through the pipeline, by what takes them; and their number."""
    micro_rows = max(1, min(call.micro_rows, call.rows))
    full, rest = divmod(call.rows, micro_rows)
    stage = _stage(call, mesh, profile, micro_rows, training)
    parts = _parts(stage, full)
    if rest:
        for name, seconds in _parts(_stage(call, mesh, profile, rest, training), 1).items():
            parts[name] += seconds
    if mesh.pp > 1:
        parts["bubble"] = (call.updates if training else 1) * (mesh.pp - 1) * stage.seconds / profile.chunks
        hops = (full + (rest > 0) + mesh.pp - 1) * (2 if training else 1)
        parts["pipeline"] = hops * _hop_seconds(call, mesh, micro_rows)
    return parts, int(full + (rest > 0))


def _parts(stage: Stage, times: float) -> dict[str, float]:
    return {
        "compute": times * stage.layers.products,
        "attention": times * stage.layers.attention,
        "elements": times * stage.layers.elements,
        "head": times * stage.head,
        "launch": times * stage.launch,
        "tensor parallel": times * stage.tensor,
    }


def _hop_seconds(call: Call, mesh: Mesh, rows: float) -> float:
    """A micro-batch's activations to the next stage; ranks of a stage send a part each."""
    size = int(call.item * call.model.hidden * rows * call.width / mesh.tp)
    within = mesh.tp * mesh.pp <= mesh.per_node
    traffic = Traffic(size, 0) if within else Traffic(0, size * min(mesh.tp, mesh.per_node))
    return travel_seconds(traffic, mesh.links)


def _stage(call: Call, mesh: Mesh, profile: EngineProfile, rows: float, training: bool) -> Stage:
    head = min(call.mean_response, call.width) if call.model.head == "causal" else 1
    batch = Batch(rows, call.width, rows * head, call.item)
    repeats = _repeats(call, profile) if training else 0.0
    return _stage_of(
        call.model, mesh.device, mesh.links, profile, batch, (mesh.tp, mesh.pp, mesh.per_node), training, repeats
    )


def _repeats(call: Call, profile: EngineProfile) -> float:
    """Forward passes that recomputation adds."""
    return {"none": 0.0, "selective": profile.repeats, "full": 1.0}[call.recompute]


@lru_cache(maxsize=65536)
def _stage_of(
    model: Transformer,
    device: DeviceClass,
    links: Links,
    profile: EngineProfile,
    batch: Batch,
    split: tuple[int, int, int],
    training: bool,
    repeats: float,
) -> Stage:
    """``split``: tensor- and pipeline-parallel ranks, ranks in a node."""
    tp, pp, per_node = split
    layers = ceil(model.layers / pp)
    forward = layer_forward(model, device, profile, batch, tp)
    pieces = forward.times(1 + repeats)
    head = head_forward(model, device, profile, batch, tp)
    if training:
        pieces = pieces.plus(layer_backward(model, device, profile, batch, tp))
        head = head.plus(head_backward(model, device, profile, batch, tp))
    pieces = pieces.times(layers)
    passes = 1 + repeats + (1 if training else 0)
    launch = max(0.0, passes * layers * profile.pass_launch_seconds - pieces.seconds - head.seconds)
    reduces = layers * (2 * (1 + (repeats == 1)) + (2 if training else 0)) if tp > 1 else 0
    message = batch.item * model.hidden * batch.tokens
    tensor = reduces * all_reduce_seconds(message, tp, min(tp, per_node), links)
    return Stage(pieces, head.seconds, launch, tensor)


def layer_forward(model: Transformer, device: DeviceClass, profile: EngineProfile, batch: Batch, tp: int) -> Pieces:
    """One layer's forward pass on one of ``tp`` devices."""
    products = sum(matmul_seconds(batch.tokens, k, n, device, batch.item) for k, n in shapes(model, tp))
    channels = model.heads * model.head_dim / tp
    attention = attention_seconds(batch.rows, batch.width, channels, device, profile.attention)
    elements = elements_seconds(element_bytes(model, profile, batch, tp), device)
    elements += _adapter_seconds(model, device, profile, batch, tp)
    return Pieces(products / device.sustained, attention, elements)


def layer_backward(model: Transformer, device: DeviceClass, profile: EngineProfile, batch: Batch, tp: int) -> Pieces:
    """Gradients of one layer's activations and, without adapters, of its weights."""
    tokens, item = batch.tokens, batch.item
    products = sum(matmul_seconds(tokens, n, k, device, item) for k, n in shapes(model, tp))
    if not model.adapters:
        products += sum(matmul_seconds(k, tokens, n, device, item) for k, n in shapes(model, tp))
    channels = model.heads * model.head_dim / tp
    attention = ATTENTION_BACKWARD * attention_seconds(batch.rows, batch.width, channels, device, profile.attention)
    moved = ELEMENTS_BACKWARD * element_bytes(model, profile, batch, tp)
    elements = elements_seconds(moved, device) + ELEMENTS_BACKWARD * _adapter_seconds(model, device, profile, batch, tp)
    return Pieces(products / device.sustained, attention, elements)


def shapes(model: Transformer, tp: int) -> tuple[tuple[float, float], ...]:
    """Inner and outer size of each product of one layer on one of ``tp`` devices: query, key and value; output; up (and
    gate); down. Key-value heads fewer than the devices are copied."""
    queries = model.heads * model.head_dim / tp
    keys = max(model.kv_heads / tp, 1) * model.head_dim
    ffn = model.ffn / tp
    return (
        (model.hidden, queries + 2 * keys),
        (queries, model.hidden),
        (model.hidden, ffn * (2 if model.gated else 1)),
        (ffn, model.hidden),
    )


def element_bytes(model: Transformer, profile: EngineProfile, batch: Batch, tp: int) -> float:
    """Read and written by one layer's element-wise kernels on one of ``tp`` devices, forward: two norms (read twice,
    written once), two additions, rotations of queries and keys, the activation."""
    hidden = 12 * model.hidden / (tp if profile.sequence_parallel else 1)
    heads = 2 * (model.heads + model.kv_heads) * model.head_dim / tp
    ffn = (3 if model.gated else 2) * model.ffn / tp
    return profile.elements * batch.item * batch.tokens * (hidden + heads + ffn)


def _adapter_seconds(model: Transformer, device: DeviceClass, profile: EngineProfile, batch: Batch, tp: int) -> float:
    if not model.adapters:
        return 0.0
    results = sum(n for _, n in shapes(model, tp))
    return elements_seconds(profile.adapter_elements * batch.item * batch.tokens * results, device)


def head_forward(model: Transformer, device: DeviceClass, profile: EngineProfile, batch: Batch, tp: int) -> Pieces:
    """Logits and their log-probabilities, a share of the vocabulary on each of ``tp`` devices."""
    if model.head != "causal":
        return Pieces()
    columns = model.vocabulary / tp
    products = matmul_seconds(batch.head_tokens, model.hidden, columns, device, batch.item) / device.sustained
    return Pieces(products, 0.0, elements_seconds(profile.loss_bytes / 2 * batch.head_tokens * columns, device))


def head_backward(model: Transformer, device: DeviceClass, profile: EngineProfile, batch: Batch, tp: int) -> Pieces:
    if model.head != "causal":
        return Pieces()
    tokens, columns, hidden, item = batch.head_tokens, model.vocabulary / tp, model.hidden, batch.item
    products = matmul_seconds(tokens, columns, hidden, device, item)
    if not model.adapters:
        products += matmul_seconds(hidden, tokens, columns, device, item)
    elements = elements_seconds(profile.loss_bytes / 2 * tokens * columns, device)
    return Pieces(products / device.sustained, 0.0, elements)
