"""Bytes on a device for models and calls of any system, with pipelines and ZeRO.

The formulas come from the package's ``memory`` (``PerParameter``, ``Blocks``), which counts a plan's bytes rank by
rank; here a model is a ``Transformer`` and its split a ``Mesh``.
"""

from __future__ import annotations

from benchmarks.systems.engines import PROFILES
from flexrlhf.config.axes import ParallelDims
from flexrlhf.config.model_settings import LoraSpec
from flexrlhf.guideline.costs.cost_model import Call, Mesh, Transformer
from flexrlhf.guideline.costs.training import layer_products
from flexrlhf.memory.activations import Blocks
from flexrlhf.memory.states import PerParameter
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.weights.decoder_sizes import Sizes

MIXED = PerParameter(weights=2, gradients=2, optimizer=12)
"""16-bit weights and gradients, float32 master weights and two moments (ZeRO, sec. 3.1)."""
FLOAT_GRADIENTS = PerParameter(weights=2, gradients=4, optimizer=12)
"""Megatron's distributed optimizer: gradients in float32 (HybridFlow, sec. 8.1)."""
FLOAT_SHARDS = PerParameter(weights=4, gradients=4, optimizer=8)
"""FSDP: the float32 shards are their own master weights, those of frozen models with adapters too."""
PER_PARAMETER = {
    "deepspeed": MIXED,
    "deepspeed-2021": MIXED,
    "megatron": FLOAT_GRADIENTS,
    "real": FLOAT_GRADIENTS,
    "torch": FLOAT_SHARDS,
}
"""Trainer → bytes of a parameter."""

FRAGMENTATION = 0.06
"""Unused fraction of the allocator's memory: 5 to 10 %."""
LOGIT_BYTES, READ_LOGIT_BYTES = 16, 6
"""Bytes of each logit in a training pass (16 bits, float32, its logarithm, and gradients of all) and a forward pass."""
CHUNKED_LOGIT_BYTES = 10
"""Bytes of each logit in a training pass over one chunk of them at a time: 16 bits, float32, its logarithm."""
SELECTIVE = 0.5
"""Fraction of the results of a layer's products that selective recomputation keeps (torchtitan: every second one)."""
SCORE_BYTES = 5
"""Bytes of each score of attention that is not fused, for the backward pass (Korthikanti et al. 2022, section 4)."""
UNFUSED = 0.5
"""Relative speed of attention below which it is not fused."""
HOST_BYTES = 1e12
"""Bytes of a node's memory that offloaded states can take."""
LIVE_ELEMENTS = 1_000_000_000
"""Parameters that ZeRO-3 keeps gathered at a time (``stage3_max_live_parameters``), at most."""


def capacity_bytes(device: DeviceClass) -> float:
    """Return the bytes of a device that models and calls can take."""
    return device.allocator_bytes * (1 - FRAGMENTATION)


def blocks_of(model: Transformer, item: int, tp: int) -> Blocks:
    return Blocks(
        Sizes(**model.by_name, family="llama"), item, ParallelDims(tp), LoraSpec() if model.adapters else None
    )


def frozen_bytes(model: Transformer, mesh: Mesh, item: int = 2) -> float:
    """Return the bytes of weights that are only read."""
    return item * model.parameters / (mesh.dims.tp * mesh.dims.pp) / (mesh.dp if mesh.zero == 3 else 1)


def trained_bytes(model: Transformer, mesh: Mesh, per: PerParameter, offload: bool = False) -> float:
    """Return the bytes of weights, gradients and optimizer of a trained model. ``offload``: gradients and optimizer are
    in host memory."""
    shards, (split, *_) = mesh.dims.tp * mesh.dims.pp, per.zero_split(mesh.zero, mesh.dp)
    trained = PerParameter(per.weights, 0, 0) if offload else per
    frozen = (model.parameters - model.trained_parameters) / shards
    return trained.on_rank(model.trained_parameters / shards, mesh.zero, mesh.dp) + per.weights * frozen / split


def offloaded_bytes(model: Transformer) -> float:
    """Return the bytes in the host memory of all nodes together: master weights, moments, and float32 copies for both
    directions, as ``memory.states`` counts them for DeepSpeed."""
    return 20.0 * model.trained_parameters


def pass_bytes(call: Call, mesh: Mesh, rows: int) -> float:
    """Return the bytes of activations and logits of one micro-batch of ``rows`` in a forward or training call."""
    model, train = call.model, call.kind == "train"
    logits = 0.0
    if model.head == "causal":
        logits = rows * call.width * model.vocabulary / mesh.dims.tp * (LOGIT_BYTES if train else READ_LOGIT_BYTES)
    return _activation_bytes(call, mesh, rows) + logits + gathered_bytes(model, mesh)


def _activation_bytes(call: Call, mesh: Mesh, rows: int) -> float:
    """Return the bytes of activations. Fused attention keeps neither mask nor scores, so a row of n tokens takes as
    much as n rows of one. A pipeline's first stage has a micro-batch in flight for every stage, each with its part of
    the layers: as many as a mesh without stages."""
    blocks, tokens = blocks_of(call.model, call.item, mesh.dims.tp), round(rows * call.width)
    if call.kind != "train":
        return blocks.forward_bytes(tokens, 1)
    kept: float = blocks.train_bytes(tokens, 1, call.recompute != "none")
    if call.recompute == "selective":
        kept += tokens * call.item * call.model.layers * selected_numbers(call.model) / mesh.dims.tp
    if PROFILES[call.engine].attention < UNFUSED:
        layers = 1 if call.recompute == "full" else call.model.layers
        kept += SCORE_BYTES * layers * call.model.heads / mesh.dims.tp * tokens * call.width
    return kept


def selected_numbers(model: Transformer) -> float:
    """Return the number of values per token that selective recomputation keeps of a layer in addition to its input:
    attention's result and some of its products' results."""
    outer = sum(each.n for each in layer_products(model, 1, tokens=1))
    return model.heads * model.head_dim + SELECTIVE * outer


def gathered_bytes(model: Transformer, mesh: Mesh, item: int = 2) -> float:
    """Return the bytes of other ranks' weights that ZeRO-3 keeps gathered during a pass."""
    if mesh.zero != 3 or mesh.dp == 1:
        return 0.0
    return item * min(model.parameters, LIVE_ELEMENTS + 2 * model.layer_parameters) / (mesh.dims.tp * mesh.dims.pp)


def decode_bytes(call: Call, mesh: Mesh, rows: int) -> float:
    """Return the bytes of keys, values and logits of ``rows`` that a replica decodes together."""
    model = call.model
    tokens = rows * (call.prompt + call.longest_response)
    cache = model.kv_bytes(call.item) * tokens / (min(mesh.dims.tp, model.kv_heads) * mesh.dims.pp)
    return cache + rows * model.vocabulary * 6


def rows_that_fit(call: Call, mesh: Mesh, free: float) -> int:
    """Return the most rows of a micro-batch, or the most that are decoded together, in ``free`` bytes of each device;
    0 if not even one fits."""
    need = decode_bytes if call.kind == "generate" else pass_bytes
    one, two = need(call, mesh, 1), need(call, mesh, 2)
    return max(0, int((free - one) // max(two - one, 1.0)) + 1) if free >= one else 0
