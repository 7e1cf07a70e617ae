"""The interface of cost models: calls of a transformer on a mesh of devices, rows that move, weight syncs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal, Protocol

from flexrlhf.api import (
    OUTER,
    CallKind,
    DecoderSizes,
    DeviceClass,
    Head,
    ModelShape,
    ParallelDims,
    ParameterName,
    PlacedModel,
    Primitive,
)
from flexrlhf.guideline.costs.environment_times import EnvironmentTimes

PORT_GB_S = 12.5
"""Least speed of a port of a node with several: 100 Gb/s. A slower network is one port."""


@dataclass(frozen=True)
class Transformer(DecoderSizes):
    """Model as its costs follow from it.

    gated:       whether the feed-forward block has three matrices instead of two
    tied:        whether the head is the embedding
    head:        causal or scalar; a scalar head on a trunk with both is not counted
    adapters:    parameters of low-rank adapters; 0: all weights are trained
    """

    gated: bool = True
    tied: bool = False
    head: Literal["causal", "scalar"] = "causal"
    adapters: int = 0

    def __hash__(self) -> int:
        # of a few fields: models are keys of many tables
        return hash((self.layers, self.hidden, self.ffn, self.head))

    @property
    def matrix_parameters(self) -> int:
        """Parameters of the matrices of one layer, in the mean: query, key, value and output, those of the feed-forward
        block or of all experts, and the router."""
        return self._matrices(self.stored_ffn)

    @property
    def active_parameters(self) -> int:
        """Parameters of ``matrix_parameters`` that compute a token."""
        return self._matrices(self.active_ffn)

    def read_parameters(self, tokens: float) -> float:
        """Return the parameters of a layer that a pass over ``tokens`` reads: of its experts those that any token
        takes."""
        if self.experts is None:
            return self.layer_parameters
        return self._matrices(self.mean_ffn(self.experts.taken(tokens))) + 2 * self.hidden

    def _matrices(self, ffn: float) -> int:
        routers = 0 if self.experts is None else self.sparse_layers * self.experts.number * self.hidden // self.layers
        return self.attention_parameters + int(self.hidden * ffn * (3 if self.gated else 2)) + routers

    @property
    def layer_parameters(self) -> int:
        return self.matrix_parameters + 2 * self.hidden

    @property
    def head_parameters(self) -> int:
        return self.hidden * (self.vocabulary if self.head == "causal" else 1)

    @cached_property
    def parameters(self) -> int:
        """Parameters of the model; a tied head counts once."""
        own_head = 0 if self.tied and self.head == "causal" else self.head_parameters
        return self.layers * self.layer_parameters + self.hidden * (self.vocabulary + 1) + own_head

    @property
    def trained_parameters(self) -> int:
        return self.adapters or self.parameters

    @property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts."""
        if self.experts is None:
            return 0
        return self.sparse_layers * self.hidden * self.experts.number * self.experts.ffn * (3 if self.gated else 2)

    def on_each(self, sharers: int) -> float:
        """Return the parameters on each of so many copies that share the experts."""
        return self.parameters - self.expert_parameters * (1 - 1 / sharers)

    def trained_on_each(self, sharers: int) -> float:
        """Return the trained parameters on each of so many copies that share the experts; adapters are on all."""
        return self.adapters or self.on_each(sharers)

    def kv_bytes(self, item: int = 2) -> int:
        """Return the bytes of one token's keys and values in all layers; ``item``: bytes of one number."""
        return item * self.layers * self.cached_features

    def as_scorer(self) -> Transformer:
        """Return the model with a scalar head instead of the vocabulary's."""
        return replace(self, head="scalar")


@lru_cache(maxsize=256)
def transformer_of(shape: ModelShape, head: Head, is_adapted: bool) -> Transformer:
    """Return the model of a planned ``shape``. ``is_adapted``: adapters count as trained parameters."""
    assert shape.sizes is not None, "shapes without sizes are refused"
    return Transformer(
        **shape.sizes.by_name,
        tied=head != "scalar" and ParameterName.LANGUAGE_HEAD not in shape.names,
        head="scalar" if head == "scalar" else "causal",
        adapters=shape.num_trained if is_adapted and shape.adapters else 0,
    )


Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Links:
    """Bandwidths in GB/s (1e9 bytes), one direction, as the hardware is sold; cost models take the share that is
    reached.

    device_gb_s:  each device inside its node
    node_gb_s:    each node to the network
    """

    device_gb_s: float
    node_gb_s: float

    def of_ports(self, ranks: int) -> Links:
        """Return the links if only ``ranks`` of a node send or receive, each through a port of the node's network."""
        port = max(self.node_gb_s / DeviceClass.PER_NODE, PORT_GB_S)
        return replace(self, node_gb_s=min(self.node_gb_s, ranks * port))


@dataclass(frozen=True)
class Mesh:
    """Devices of one placed model and how they share its work.

    device:         slowest class among them
    links:          slowest links among them
    dp:             replicas
    dims:           degree of each axis: ranks of a replica, and copies of the weights that share experts
    per_node:       devices of the mesh in each node that it spans
    zero:           ZeRO stage over the copies of the weights
    sharded_over:   copies of a node, over which ZeRO shards; 0: all copies
    stages_spread:  whether all replicas of a stage are next to each other, and the next stage behind them; else all
                    stages of a replica are
    is_ring:        whether keys and values travel around context-parallel ranks, else heads are exchanged for tokens
    """

    device: DeviceClass
    links: Links
    dp: int = 1
    dims: ParallelDims = ParallelDims()
    per_node: int = 1
    zero: int = 0
    stages_spread: bool = False
    sharded_over: int = 0
    is_ring: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash of a few fields, computed once: meshes are keys of tables."""
        return hash((self.dp, self.dims, self.zero))

    @cached_property
    def unsharded(self) -> Mesh:
        """The same devices without ZeRO."""
        return replace(self, zero=0, sharded_over=0) if self.zero or self.sharded_over else self

    @cached_property
    def size(self) -> int:
        return self.dp * self.dims.replica

    @cached_property
    def copies(self) -> int:
        """Copies of the weights, before ZeRO shards them; a replica may have several."""
        return self.dp * self.dims.row_parts

    @property
    def spans_nodes(self) -> bool:
        return self.size > self.per_node

    @property
    def num_shards(self) -> int:
        """Copies over which ZeRO shards."""
        return self.sharded_over or self.copies

    @property
    def between_replicas(self) -> int:
        """Ranks from one to the next of a data-parallel group."""
        return self.dims.tp if self.stages_spread else self.dims.parts

    @property
    def between_stages(self) -> int:
        """Ranks from a stage of a replica to the next one's; all of them send to the next stage at once."""
        return self.dims.tp * self.copies if self.stages_spread else self.dims.width


def priced_dims(model: PlacedModel) -> ParallelDims:
    """Return the degrees that costs depend on: the stages of a rollout engine work in turn, each on its share, as long
    as one stage on all."""
    return model.layout.dims if model.rollout is None else model.layout.dims.without(OUTER)


@dataclass(frozen=True)
class MeanPass:
    """Mean of the forward or training passes over sequences that the engine lays out in rows, on one replica.

    A pass computes ``rows * width`` tokens, and causal attention over half of ``rows * width**2`` pairs of them. A mask
    skips no pair, so rows under one are as many as compute the same pairs without.

    count:      passes
    rows:       rows of a pass
    width:      tokens of a row
    responses:  tokens of a pass whose log-probs are computed
    texts:      tokens of the sequences of all passes, a prompt once for every response
    """

    count: float
    rows: float
    width: float
    responses: float
    texts: float

    @property
    def tokens(self) -> float:
        """Computed tokens of all passes."""
        return self.count * self.rows * self.width

    def of_part(self, parts: int) -> MeanPass:
        """Return the work of one of so many ranks that share the tokens of every row, as if it had fewer rows."""
        if parts == 1:
            return self
        return replace(self, rows=self.rows / parts, responses=self.responses / parts, texts=self.texts / parts)


@dataclass(frozen=True)
class Pages:
    """Pages of an engine's cache, which rows take as they grow.

    tokens:         tokens of all pages
    most_rows:      most rows that are decoded at a time
    kept_free:      share that stays free when a row is admitted
    partly_filled:  tokens of a row's last page that are not used yet, in the mean
    """

    tokens: float
    most_rows: int
    kept_free: float
    partly_filled: float = 0.0

    def rows(self, prompt: float, responses: Sequence[float]) -> int:
        """Return the rows that they have room for, of which one begins when another ends."""
        age = sum(each**2 for each in responses) / sum(responses) / 2
        fitting = (1 - self.kept_free) * self.tokens / (prompt + self.partly_filled + age)
        return max(1, min(self.most_rows, int(fitting)))


@dataclass(frozen=True)
class Call:
    """One model call on one replica.

    kind:               generate, forward or train
    model:              shape of the model
    engine:             name of its profile
    rows:               rows of the fullest replica
    prompt:             mean tokens of a prompt
    responses:          tokens of responses, a sample of the rows' distribution (one number: all of that length)
    is_exact:           whether they are the lengths of these very rows
    width:              tokens of a row in forward and training passes (padded where the engine pads)
    updates:            optimizer steps
    micro_rows:         rows of one pass
    decode_rows:        rows decoded together
    item:               bytes of a weight
    recompute:          activations that the backward pass computes again
    tiled_mlp:          whether MLPs are computed in tiles, and again in the backward pass
    offload_activations: whether the inputs of layers that are computed again are in host memory until then
    offload_optimizer:  whether the optimizer runs on the host
    offload_parameters: whether ZeRO-3 shards of weights are in host memory between passes
    cache_item:         bytes of one number of a key or value
    passes:             passes over sequences of several lengths; None: ``micro_rows`` rows of ``width``
    prompt_samples:     rows that a generation reads one prompt for
    adapters_apart:     adapters of all layers that a step of decoding adds by kernels of their own
    pages:              of the cache of the engine that decodes; None: ``decode_rows`` have room at full length
    counts_experts:     whether a pass without gradients counts the tokens of experts before those of a training
    """

    kind: CallKind
    model: Transformer
    engine: str
    rows: int
    prompt: float
    responses: tuple[float, ...]
    width: float
    updates: int = 1
    micro_rows: int = 1
    decode_rows: int = 256
    item: int = 2
    recompute: Recompute = "none"
    tiled_mlp: bool = False
    offload_activations: bool = False
    offload_optimizer: bool = False
    offload_parameters: bool = False
    cache_item: int = 2
    passes: MeanPass | None = None
    prompt_samples: int = 1
    adapters_apart: int = 0
    is_exact: bool = False
    pages: Pages | None = None
    counts_experts: bool = False

    def __hash__(self) -> int:
        # of a few fields: calls are keys of tables
        return hash((self.kind, self.rows, self.decode_rows, self.recompute, self.tiled_mlp, self.passes, self.pages))

    @property
    def counting(self) -> Call:
        """Passes that count the tokens of experts."""
        return replace(self, kind="forward", counts_experts=False, recompute="none", offload_activations=False)

    @property
    def prompts(self) -> int:
        """Prompts that a generation reads."""
        return -(-self.rows // self.prompt_samples)

    @property
    def mean_response(self) -> float:
        return sum(self.responses) / len(self.responses)

    @property
    def longest_response(self) -> float:
        return max(self.responses)

    @property
    def computed_tokens(self) -> float:
        """Tokens of all forward or training passes."""
        return self.rows * self.width if self.passes is None else self.passes.tokens

    @property
    def row_width(self) -> float:
        """Tokens of a row of a pass, over which attention reaches."""
        return self.width if self.passes is None else self.passes.width

    @property
    def passes_per_update(self) -> float:
        """Passes between two optimizer steps; of a forward call all of them. At least 1."""
        if self.passes is not None:
            return max(1.0, self.passes.count / self.updates)
        return max(1, -(-self.rows // (self.updates * self.micro_rows)))


@dataclass(frozen=True)
class Cost:
    """Time of one piece of work, in seconds, by cause: ``compute``, ``attention``, ``weights``, ``cache``, ``launch``,
    ``tensor parallel``, ``gather``, ``bubble``, ``optimizer`` ... Time that is hidden behind other work is not counted.
    """

    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        """Name of the part that takes longest."""
        return max(self.parts, key=lambda name: self.parts[name], default="nothing")

    def after(self, other: Cost, cause: str) -> Cost:
        """Return the time of this work behind ``other``, whose time has one ``cause``."""
        return Cost({**self.parts, cause: other.seconds})


@dataclass(frozen=True)
class Traffic:
    """Bytes of one exchange, on the busiest rank and node.

    within:    most bytes that one rank sends or receives inside its node
    across:    most bytes that one node sends or receives from other nodes
    messages:  most messages that one rank sends or receives; each has its latency
    """

    within: int
    across: int
    messages: int = 1

    @property
    def total(self) -> int:
        return self.within + self.across


class CostModel(Protocol):
    """Times of all kinds of instructions."""

    def call(self, call: Call, mesh: Mesh) -> Cost:
        """Return the time of a model call on all its replicas."""

    def combine(self, rows: int, width: float) -> Cost:
        """Return the time of an operator that runs no model, on ``rows`` rows of ``width`` tokens."""

    def move(self, primitive: Primitive, traffic: Traffic, links: Links) -> Cost:
        """Return the time of columns that move between ranks."""

    def sync(self, traffic: Traffic, gathered: Traffic, num_tensors: int, links: Links) -> Cost:
        """Return the time of a weight sync. ``gathered``: traffic with which the source's ranks first gather their
        shards; ``num_tensors``: weight tensors, each of which has its start."""

    def switch(self, size: int, device: DeviceClass) -> Cost:
        """Return the time of an Offload or Reload: ``size`` bytes between a device and its host."""

    def save(self, size: int) -> Cost:
        """Return the time of writing ``size`` bytes of weights into a directory."""

    def environment(self, name: str) -> EnvironmentTimes | None:
        """Return the measured times of an environment; None if it has not been measured."""
