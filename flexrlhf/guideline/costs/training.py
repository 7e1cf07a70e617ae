"""Time of forward and training calls: one micro-batch on a pipeline stage, times their number, and the collectives
meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from flexrlhf.api import DeviceClass, EngineFacts
from flexrlhf.guideline.costs.cost_model import Call, Cost, Links, Mesh, Transformer
from flexrlhf.guideline.costs.exchanges import ATTENTION_BACKWARD, EXCHANGES, PassShape, PricedPasses
from flexrlhf.guideline.costs.kernels import (
    attention_seconds,
    elements_seconds,
    grouped_seconds,
    looped_seconds,
    matmul_seconds,
)
from flexrlhf.guideline.costs.links import (
    ACROSS,
    WITHIN,
    Figures,
    all_reduce_seconds,
    gather_seconds,
)
from flexrlhf.guideline.costs.profiles import EngineProfile

# Gradients of an element-wise kernel read its input and the gradient of its result: about twice the traffic.
ELEMENTS_BACKWARD = 2.0
# Adam in mixed precision, bytes of a parameter: 32-bit weight and two moments read and written, gradient read, 16-bit
# weight written (ZeRO, section 3.1, counts them).
OPTIMIZER_BYTES = 30
# ZeRO-Offload, section 4: gradients down and weights up, in 16 bits; the host's Adam moves the same bytes through its
# own memory, about 200 GB/s of a node.
OFFLOADED_BYTES, HOST_MEMORY_GB_S = 4, 200
# Reads and writes of each token at each of its experts: in transformers' ``grouped_mm_experts_forward``, and in
# ``experts_over_ranks`` of engines/experts.py, which calls it on the ranks of the experts.
DISPATCH_PASSES, RANKS_DISPATCH_PASSES = 7, 17
# Of the latter the ones over all choices of a token, of which a tensor-parallel rank computes its own: zeros, the sum.
WHOLE_DISPATCH_PASSES = 2
# Sums of weight gradients over the tiles of an MLP: a 32-bit sum read and written, a 16-bit gradient written and read.
TILE_SUM_BYTES = 12


@dataclass(frozen=True)
class LayerSeconds:
    """Time of one pass of one layer, or of the head, on one device, in seconds.

    products:   matrix products
    attention:  attention
    elements:   element-wise kernels
    """

    products: float = 0.0
    attention: float = 0.0
    elements: float = 0.0

    @property
    def seconds(self) -> float:
        return self.products + self.attention + self.elements

    def times(self, factor: float) -> LayerSeconds:
        return LayerSeconds(factor * self.products, factor * self.attention, factor * self.elements)

    def plus(self, other: LayerSeconds) -> LayerSeconds:
        return LayerSeconds(
            self.products + other.products, self.attention + other.attention, self.elements + other.elements
        )


def forward_cost(call: Call, mesh: Mesh, profile: EngineProfile) -> Cost:
    """Return the time of a forward pass over all rows of a replica."""
    parts, micro_batches = _stages(call, mesh, profile, training=False)
    number = _num_gathers(call, mesh, micro_batches)
    gather = number * gather_weights_seconds(call, mesh, profile) if number else 0.0
    return Cost(_with_traffic(parts, {"gather": gather}, profile.overlap))


def _num_gathers(call: Call, mesh: Mesh, micro_batches: int) -> int:
    """Return how often a forward pass over all micro-batches gathers weights that ZeRO shards: for each at stage 3;
    once at others at which replicas store shards, which stay gathered until the call ends."""
    if mesh.zero == 3:
        return micro_batches
    return int(mesh.zero > 0 and EngineFacts.of(call.engine).split(mesh.zero) != "whole")


def train_cost(call: Call, mesh: Mesh, profile: EngineProfile) -> Cost:
    """Return the time of forward and backward passes over all rows of a replica, and of its optimizer steps."""
    parts, micro_batches = _stages(call, mesh, profile, training=True)
    parts = _with_traffic(parts, _replica_traffic(call, mesh, profile, micro_batches), profile.overlap)
    parts["optimizer"] = call.updates * _optimizer_seconds(call, mesh)
    return Cost(parts)


def _with_traffic(parts: dict[str, float], traffic: dict[str, float], overlap: float) -> dict[str, float]:
    """Return ``parts`` with the traffic that does not hide behind compute: the share ``1 - overlap`` of the shorter of
    both, and what traffic is longer."""
    compute, exchanged = sum(parts.values()), sum(traffic.values())
    if not exchanged:
        return parts
    exposed = max(exchanged - compute, 0.0) + (1 - overlap) * min(exchanged, compute)
    return parts | {name: seconds * exposed / exchanged for name, seconds in traffic.items()}


def _replica_traffic(call: Call, mesh: Mesh, profile: EngineProfile, micro_batches: int) -> dict[str, float]:
    """Return the time of gathering weights and reducing gradients over replicas (ZeRO, section 7).

    Where nodes have copies of the shards, gradients are summed over these once in an update.
    """
    gradients = call.item * call.model.trained_on_each(mesh.dims.expert_parts) / mesh.dims.parts
    groups, per_node = _groups(mesh)
    copies, part = mesh.copies // mesh.num_shards, gradients / mesh.num_shards
    across = call.updates * all_reduce_seconds(part, copies, 1, mesh.links, groups * per_node)
    if mesh.zero == 3:
        gather = 2 * micro_batches * gather_weights_seconds(call, mesh, profile)
        layers = ceil(call.model.layers / mesh.dims.pp)
        return {"gather": gather, "gradients": micro_batches * _gather(gradients, mesh, profile, layers) + across}
    if mesh.zero:
        gather = call.updates * _gather(gradients, mesh, profile)
        reductions = micro_batches if mesh.zero == 2 else call.updates
        return {"gather": gather, "gradients": reductions * _gather(gradients, mesh, profile) + across}
    return {"gradients": call.updates * replica_sum_seconds(gradients, mesh)}


def gather_weights_seconds(call: Call, mesh: Mesh, profile: EngineProfile) -> float:
    """Return the time of gathering all weights of a pipeline stage that ZeRO-3 shards over replicas, one layer after
    the other, each shard from where it is."""
    size = call.item * call.model.on_each(mesh.dims.expert_parts) / mesh.dims.parts
    host = size / mesh.num_shards / mesh.device.host_gb_s / 1e9 if call.offload_parameters else 0.0
    return host + _gather(size, mesh, profile, ceil(call.model.layers / mesh.dims.pp))


def replica_sum_seconds(size: float, mesh: Mesh, figures: Figures = (WITHIN, ACROSS)) -> float:
    """Return the time of a sum of ``size`` bytes on each rank over the replicas of a model."""
    groups, per_node = _groups(mesh)
    return all_reduce_seconds(size, mesh.copies, per_node, mesh.links, groups, figures)


def _groups(mesh: Mesh) -> tuple[int, int]:
    """Return the number of data-parallel groups that share a node's link, and the ranks of each in a node."""
    groups = min(mesh.between_replicas, mesh.per_node)
    return groups, max(1, mesh.per_node // mesh.between_replicas)


def _gather(size: float, mesh: Mesh, profile: EngineProfile, pieces: int = 1) -> float:
    groups, per_node = _groups(mesh)
    return gather_seconds(size, mesh.num_shards, per_node, mesh.links, groups, pieces, _reached(mesh.links, profile))


@lru_cache(maxsize=256)
def _reached(links: Links, profile: EngineProfile) -> Figures:
    """Return the figures of ``links`` in gathers of an engine, which may reach less of them than others do."""
    within = min(WITHIN.share, profile.gather_within_gb_s / links.device_gb_s)
    across = min(ACROSS.share, profile.gather_gb_s / links.node_gb_s)
    return replace(WITHIN, share=within), replace(ACROSS, share=across)


def _optimizer_seconds(call: Call, mesh: Mesh) -> float:
    shard = mesh.num_shards if mesh.zero else 1
    experts = 0 if call.model.adapters else call.model.expert_parameters
    shared = (call.model.trained_parameters - experts) / shard + experts / max(shard, mesh.dims.expert_parts)
    parameters = shared / mesh.dims.parts
    if not call.offload_optimizer:
        return elements_seconds(OPTIMIZER_BYTES * parameters, mesh.device)
    host = OPTIMIZER_BYTES * parameters * mesh.per_node / HOST_MEMORY_GB_S
    return (OFFLOADED_BYTES * parameters / mesh.device.host_gb_s + host) / 1e9


def _stages(call: Call, mesh: Mesh, profile: EngineProfile, training: bool) -> tuple[dict[str, float], int]:
    """Return the time of all micro-batches through the pipeline, by cause, and their number, whatever ZeRO shards."""
    parts, number = _whole_stages(call, mesh.unsharded, profile, training)
    return dict(parts), number


@lru_cache(maxsize=4096)
def _whole_stages(call: Call, mesh: Mesh, profile: EngineProfile, training: bool) -> tuple[Mapping[str, float], int]:
    shapes = _pass_shapes(call, mesh.dims.expert_parts)
    # forward passes that recomputation adds
    repeats = {"none": 0.0, "selective": profile.repeats, "full": 1.0}[call.recompute] if training else 0.0
    split, tiled, offloads = (mesh.dims.tp, mesh.dims.pp, mesh.per_node), call.tiled_mlp, call.offload_activations
    stages = [
        _stage(call.model, mesh.device, mesh.links, profile, shape, split, training, repeats, tiled, offloads)
        for _, shape in shapes
    ]
    parts: dict[str, float] = {}
    for (times, _), stage in zip(shapes, stages, strict=True):
        for name, seconds in stage.items():
            parts[name] = parts.get(name, 0.0) + times * seconds
    passes = PricedPasses(call, mesh, profile, shapes, training, repeats, sum(stages[0].values()))
    for exchange in EXCHANGES.values():
        parts |= exchange(passes)
    return parts, passes.number


def _pass_shapes(call: Call, sharers: int) -> list[tuple[float, PassShape]]:
    """Return the distinct passes of a call, the largest first, each with its number.

    sharers:  ranks that share the experts.
    """
    mean = call.passes
    if mean is not None:
        head = mean.responses if call.model.head == "causal" else mean.rows
        return [(mean.count, PassShape(mean.rows, mean.width, head, call.item, sharers))]
    micro_rows = max(1, min(call.micro_rows, call.rows))
    full, rest = divmod(call.rows, micro_rows)
    head = min(call.mean_response, call.width) if call.model.head == "causal" else 1
    rows = [(full, micro_rows)] + ([(1, rest)] if rest else [])
    return [(times, PassShape(each, call.width, each * head, call.item, sharers)) for times, each in rows]


@lru_cache(maxsize=65536)
def _stage(
    model: Transformer,
    device: DeviceClass,
    links: Links,
    profile: EngineProfile,
    shape: PassShape,
    split: tuple[int, int, int],
    training: bool,
    repeats: float,
    tiled: bool,
    offloads: bool,
) -> Mapping[str, float]:
    """Return the time of one micro-batch on the slowest stage, by cause.

    split:     tensor-parallel ranks, pipeline stages, ranks in a node.
    repeats:   forward passes that recomputation adds.
    tiled:     whether MLPs are computed in tiles, and again in the backward pass.
    offloads:  whether the inputs of layers are in host memory until the backward pass.
    """
    tp, pp, per_node = split
    layers = ceil(model.layers / pp)
    forward = layer_forward(model, device, profile, shape, tp)
    if training and tiled:
        each = forward.plus(_tiled_again(forward, model, device, profile, shape, tp, repeats))
    else:
        each = forward.plus(_recomputed(forward, model, device, profile, shape, tp).times(repeats))
    head = head_forward(model, device, profile, shape, tp)
    if training:
        each = each.plus(layer_backward(model, device, profile, shape, tp))
        head = head.plus(head_backward(model, device, profile, shape, tp))
    stage = each.times(layers)
    passes = 1 + repeats + (1 if training else 0)
    launch = max(0.0, passes * layers * profile.pass_launch_seconds - stage.seconds - head.seconds)
    repeated = (1 if profile.stops_early else 2) if repeats == 1 else 0
    reduces = layers * (2 + repeated + (2 if training else 0)) if tp > 1 else 0
    message = shape.item * model.hidden * shape.tokens
    tensor = reduces * all_reduce_seconds(message, tp, min(tp, per_node), links)
    slower = 1 / profile.reached
    # inputs are copied both ways while layers compute
    exposed = max(0.0, 2 * layers * message / device.host_gb_s / 1e9 - slower * (stage.seconds + launch))
    return {
        "compute": slower * stage.products,
        "attention": slower * stage.attention,
        "elements": slower * stage.elements,
        "head": slower * head.seconds,
        "launch": slower * launch,
        "tensor parallel": tensor / profile.tensor_reached,
        **({"host": exposed} if offloads else {}),
    }


def _recomputed(
    forward: LayerSeconds, model: Transformer, device: DeviceClass, profile: EngineProfile, shape: PassShape, tp: int
) -> LayerSeconds:
    """Return the time of computing a layer again under full recomputation; selective repeats a share of it."""
    if not profile.stops_early:
        return forward
    last = (
        layer_products(model, tp, shape.tokens, shape.sharers)[-1].seconds(device, profile, shape.item)
        / device.sustained
    )
    return replace(forward, products=forward.products - last)


def _tiled_again(
    forward: LayerSeconds,
    model: Transformer,
    device: DeviceClass,
    profile: EngineProfile,
    shape: PassShape,
    tp: int,
    repeats: float,
) -> LayerSeconds:
    """Return the time of computing again a layer whose MLP is in tiles: all of it, or the MLP alone where activations
    are kept; and of summing weight gradients over the tiles, each of as many tokens as hidden features."""
    products = layer_products(model, tp, shape.tokens, shape.sharers)[2:]
    sums = TILE_SUM_BYTES * shape.tokens / model.hidden * sum(p.k * p.n for p in products) * (not model.adapters)
    if repeats:
        return forward.plus(LayerSeconds(elements=elements_seconds(sums, device)))
    mlp = sum(product.seconds(device, profile, shape.item) for product in products) / device.sustained
    activation = profile.elements * shape.item * shape.tokens * _ffn_elements(model, tp)
    return LayerSeconds(mlp, 0.0, elements_seconds(sums + activation, device))


def layer_forward(
    model: Transformer, device: DeviceClass, profile: EngineProfile, shape: PassShape, tp: int
) -> LayerSeconds:
    """Return the time of one layer's forward pass on one of ``tp`` devices."""
    products = sum(
        each.seconds(device, profile, shape.item) for each in layer_products(model, tp, shape.tokens, shape.sharers)
    )
    channels = model.attention_features / tp
    attention = attention_seconds(shape.rows, shape.width, channels, device, profile.attention)
    elements = elements_seconds(element_bytes(model, profile, shape, tp), device)
    elements += _adapter_seconds(model, device, profile, shape, tp)
    return LayerSeconds(products / device.sustained, attention, elements)


def layer_backward(
    model: Transformer, device: DeviceClass, profile: EngineProfile, shape: PassShape, tp: int
) -> LayerSeconds:
    """Return the time of the gradients of one layer's activations and, without adapters, of its weights."""
    forward = layer_products(model, tp, shape.tokens, shape.sharers)
    products = sum(each.of_inputs.seconds(device, profile, shape.item) for each in forward)
    if not model.adapters:
        products += sum(each.of_weights.seconds(device, profile, shape.item) for each in forward)
    channels = model.attention_features / tp
    attention = ATTENTION_BACKWARD * attention_seconds(shape.rows, shape.width, channels, device, profile.attention)
    moved = ELEMENTS_BACKWARD * element_bytes(model, profile, shape, tp)
    elements = elements_seconds(moved, device) + ELEMENTS_BACKWARD * _adapter_seconds(model, device, profile, shape, tp)
    return LayerSeconds(products / device.sustained, attention, elements)


@dataclass(frozen=True)
class Product:
    """``groups`` products of [m, k] and [k, n] in one kernel.

    share:  of all layers that have it.
    """

    m: float
    k: float
    n: float
    groups: float = 1.0
    share: float = 1.0

    @property
    def of_inputs(self) -> Product:
        """The product that gives the gradients of its inputs."""
        return replace(self, k=self.n, n=self.k)

    @property
    def of_weights(self) -> Product:
        """The product that gives the gradients of its matrix."""
        return replace(self, m=self.k, k=self.m)

    def seconds(self, device: DeviceClass, profile: EngineProfile, item: float) -> float:
        """Return its time, in the mean over layers."""
        loops = self.groups > 1 and profile.grouped_mm and not device.has_grouped_mm(item)
        seconds = looped_seconds if loops else grouped_seconds
        return self.share * seconds(self.groups, self.m, self.k, self.n, device, item)


@lru_cache(maxsize=4096)
def layer_products(model: Transformer, tp: int, tokens: float, sharers: int = 1) -> tuple[Product, ...]:
    """Return the matrix products of one layer on one of ``tp`` devices: query, key and value; output; of the MLP or of
    experts up (and gate); down. Key-value heads fewer than the devices are copied.

    Tokens are spread evenly over experts, of which each of ``sharers`` ranks with as many tokens has a part, and each
    of ``tp`` of that. A router's product is not counted.
    """
    attention = _attention_products(model, tp, tokens)
    if model.experts is None:
        return attention + _mlp_products(model, tokens, model.ffn / tp)
    experts, share = model.experts, model.sparse_layers / model.layers
    taken = experts.taken(tokens * sharers) / sharers
    shared = _mlp_products(model, tokens, experts.shared / tp, share=share) if experts.shared else ()
    dense = _mlp_products(model, tokens, model.ffn / tp, share=1 - share) if share < 1 else ()
    routed = _mlp_products(model, tokens * experts.active / taken, experts.ffn, taken / tp, share)
    return attention + dense + shared + routed


def _attention_products(model: Transformer, tp: int, tokens: float) -> tuple[Product, ...]:
    """Return the matrix products of a layer's attention; of latent attention to latents first, which are not split,
    and from these to queries, and to keys and values."""
    queries, latent = model.heads * model.head_dim / tp, model.latent
    if latent is None:
        keys = max(model.kv_heads / tp, 1) * model.head_dim
        return Product(tokens, model.hidden, queries + 2 * keys), Product(tokens, queries, model.hidden)
    to_latents = latent.cached + (latent.query or queries)
    from_query = (Product(tokens, latent.query, queries),) if latent.query else ()
    heads = model.heads / tp
    return (
        Product(tokens, model.hidden, to_latents),
        *from_query,
        Product(tokens, latent.key, heads * latent.expanded),
        Product(tokens, heads * latent.value, model.hidden),
    )


def _mlp_products(
    model: Transformer, tokens: float, ffn: float, groups: float = 1.0, share: float = 1.0
) -> tuple[Product, Product]:
    up = Product(tokens, model.hidden, ffn * (2 if model.gated else 1), groups, share)
    return up, Product(tokens, ffn, model.hidden, groups, share)


def element_bytes(model: Transformer, profile: EngineProfile, shape: PassShape, tp: int) -> float:
    """Return the bytes that one layer's element-wise kernels read and write on one of ``tp`` devices, forward: two
    norms (read twice, written once), two additions, rotations of queries and keys, the activation."""
    hidden = 12 * model.hidden / (tp if profile.sequence_parallel else 1)
    heads = 2 * (model.heads + model.kv_heads) * model.head_dim / tp
    moved = profile.elements * (hidden + heads + _ffn_elements(model, tp))
    # all passes of dispatch are counted, of which an engine may have fewer
    moved += min(1.0, profile.elements) * _dispatched(model, shape.sharers, tp)
    return shape.item * shape.tokens * moved


def _ffn_elements(model: Transformer, tp: int) -> float:
    """Return the numbers that the activation of an MLP reads and writes for a token."""
    return (3 if model.gated else 2) * model.active_ffn / tp


def _dispatched(model: Transformer, sharers: int, tp: int) -> float:
    """Return the numbers that are read and written for a token as it is copied to its experts, and as their outputs are
    weighted, brought back in its order and added."""
    if model.experts is None:
        return 0.0
    own = (RANKS_DISPATCH_PASSES - WHOLE_DISPATCH_PASSES) / tp
    passes = DISPATCH_PASSES if sharers == 1 else own + WHOLE_DISPATCH_PASSES
    return passes * model.experts.active * model.hidden * model.sparse_layers / model.layers


def _adapter_seconds(
    model: Transformer, device: DeviceClass, profile: EngineProfile, shape: PassShape, tp: int
) -> float:
    if not model.adapters:
        return 0.0
    # of a layer with experts attention alone has adapters unless they are named, too
    is_dense = model.experts is None
    products = layer_products(model, tp, shape.tokens) if is_dense else _attention_products(model, tp, shape.tokens)
    results = sum(each.share * each.n for each in products)
    return elements_seconds(profile.adapter_elements * shape.item * shape.tokens * results, device)


def head_forward(
    model: Transformer, device: DeviceClass, profile: EngineProfile, shape: PassShape, tp: int
) -> LayerSeconds:
    """Return the time of logits and their log-probabilities; each of ``tp`` devices has a part of the vocabulary."""
    if model.head != "causal":
        return LayerSeconds()
    columns = model.vocabulary / tp
    products = matmul_seconds(shape.head_tokens, model.hidden, columns, device, shape.item) / device.sustained
    return LayerSeconds(products, 0.0, elements_seconds(profile.loss_bytes / 2 * shape.head_tokens * columns, device))


def head_backward(
    model: Transformer, device: DeviceClass, profile: EngineProfile, shape: PassShape, tp: int
) -> LayerSeconds:
    """Return the time of the language head's backward pass; none for a scalar head."""
    if model.head != "causal":
        return LayerSeconds()
    tokens, columns, hidden, item = shape.head_tokens, model.vocabulary / tp, model.hidden, shape.item
    products = matmul_seconds(tokens, columns, hidden, device, item)
    if not model.adapters:
        products += matmul_seconds(hidden, tokens, columns, device, item)
    elements = elements_seconds(profile.loss_bytes / 2 * tokens * columns, device)
    return LayerSeconds(products / device.sustained, 0.0, elements)
