"""Bytes on a device for models and calls that are no plan yet: other systems' too, with pipelines and ZeRO.

The formulas are those of ``placement`` (``PerParameter``, ``zero_split``, ``Blocks``), which counts a plan's bytes rank
by rank; here a model is a ``Transformer`` and its split a ``Mesh``.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexrlhf.guideline.costs.cost_model import Call, Mesh
from flexrlhf.guideline.costs.transformer import Transformer
from flexrlhf.memory.activations import Blocks
from flexrlhf.memory.states import PerParameter, zero_split
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.weights.shapes import Sizes

MIXED = PerParameter(weights=2, gradients=2, optimizer=12)
"""16-bit weights and gradients, float32 master weights and two moments (ZeRO, sec. 3.1)."""
FLOAT_GRADIENTS = PerParameter(weights=2, gradients=4, optimizer=12)
"""Megatron's distributed optimizer: gradients in float32 (HybridFlow, sec. 8.1)."""

CONTEXT_BYTES = 1.5e9
"""Driver, libraries and communication buffers of one device."""
FRAGMENTATION = 0.06
"""Share of the allocator's memory that holds nothing: 5 to 10 %."""
USABLE = 0.988
"""Of the GiB that the name of a device says, what a framework can allocate: 79.1 of 80, 31.7 of 32, 139.8 of 141."""
LOGIT_BYTES, READ_LOGIT_BYTES = 16, 6
"""For each logit of a training pass: 16 bits, float32, its logarithm, and gradients of all; of a forward pass."""
SELECTIVE = 0.5
"""Of a layer's activations, what selective recomputation keeps: results of products, not what lies between."""
HOST_BYTES = 1e12
"""Of a node's memory, what offloaded states can have."""
LIVE_ELEMENTS = 1_000_000_000
"""Parameters that ZeRO-3 keeps gathered at a time (``stage3_max_live_parameters``), at most."""


def capacity_bytes(device: DeviceClass) -> float:
    """What models and calls can have of a device."""
    return (USABLE * 2**30 * device.memory_gb - CONTEXT_BYTES) * (1 - FRAGMENTATION)


def blocks_of(model: Transformer, item: int, tp: int) -> Blocks:
    sizes = Sizes(
        "llama",
        model.layers,
        model.hidden,
        model.ffn,
        model.heads,
        model.kv_heads,
        model.head_dim,
        model.vocabulary,
    )
    return Blocks(sizes, item, tp, model.adapters > 0)


def frozen_bytes(model: Transformer, mesh: Mesh, item: int = 2) -> float:
    """Weights that are only read."""
    return item * model.parameters / (mesh.tp * mesh.pp) / (mesh.dp if mesh.zero == 3 else 1)


def trained_bytes(model: Transformer, mesh: Mesh, per: PerParameter, offload: bool = False) -> float:
    """Weights, gradients and optimizer of a trained model. ``offload``: gradients and optimizer are in host memory."""
    cut, split = mesh.tp * mesh.pp, zero_split(mesh.zero, mesh.dp)
    trained = PerParameter(per.weights, 0, 0) if offload else per
    frozen = (model.parameters - model.trained_parameters) / cut
    return trained.on_rank(model.trained_parameters / cut, split) + per.weights * frozen / split.weights


def offloaded_bytes(model: Transformer) -> float:
    """In the memory of all nodes together: master weights, moments, and float32 copies for the way there and back, as
    ``placement.states`` counts them for DeepSpeed."""
    return 20.0 * model.trained_parameters


def pass_bytes(call: Call, mesh: Mesh, rows: int) -> float:
    """Activations and logits of one micro-batch of ``rows`` in a forward or training call."""
    model, train = call.model, call.kind == "train"
    logits = 0.0
    if model.head == "causal":
        logits = rows * call.width * model.vocabulary / mesh.tp * (LOGIT_BYTES if train else READ_LOGIT_BYTES)
    return _activation_bytes(call, mesh, rows) + logits + gathered_bytes(model, mesh)


def _activation_bytes(call: Call, mesh: Mesh, rows: int) -> float:
    """Attention is fused: no mask and no scores, so that a row of n tokens is as n rows of one. A pipeline's first
    stage has a micro-batch in flight for every stage, each with its share of the layers: as many as one mesh alone."""
    blocks, tokens = blocks_of(call.model, call.item, mesh.tp), round(rows * call.width)
    if call.kind != "train":
        return blocks.forward_bytes(tokens, 1)
    kept = blocks.train_bytes(tokens, 1, call.recompute == "full")
    return kept * (SELECTIVE if call.recompute == "selective" else 1)


def gathered_bytes(model: Transformer, mesh: Mesh, item: int = 2) -> float:
    """Weights of other ranks that ZeRO-3 holds during a pass."""
    if mesh.zero != 3 or mesh.dp == 1:
        return 0.0
    return item * min(model.parameters, LIVE_ELEMENTS + 2 * model.layer_parameters) / (mesh.tp * mesh.pp)


def decode_bytes(call: Call, mesh: Mesh, rows: int) -> float:
    """Keys, values and logits of ``rows`` that are decoded together by a replica."""
    model = call.model
    tokens = rows * (call.prompt + call.longest_response)
    cache = model.kv_bytes(call.item) * tokens / (min(mesh.tp, model.kv_heads) * mesh.pp)
    return cache + rows * model.vocabulary * 6


@dataclass(frozen=True)
class Room:
    """How many rows fit into ``free`` bytes, if ``one`` takes the bytes of one row and ``two`` of two."""

    free: float
    one: float
    two: float

    @property
    def rows(self) -> int:
        return max(0, int((self.free - self.one) // max(self.two - self.one, 1.0)) + 1) if self.free >= self.one else 0


def rows_that_fit(call: Call, mesh: Mesh, free: float) -> int:
    """Most rows of a micro-batch, or most that are decoded together, in ``free`` bytes of each device; may be 0."""
    need = decode_bytes if call.kind == "generate" else pass_bytes
    return Room(free, need(call, mesh, 1), need(call, mesh, 2)).rows
