"""What the cost model is asked: a model call on a mesh of devices, rows that move, weights that are sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from flexrlhf.config.spec import CallKind
from flexrlhf.guideline.costs.transformer import Transformer
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.placement.routes import Primitive

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Links:
    """How fast bytes travel: ``device_gb_s`` of each device inside its node, ``node_gb_s`` of each node outwards.

    GB/s (1e9 bytes), one direction, as the hardware is sold; what of it is reached is the cost model's to know.
    """

    device_gb_s: float
    node_gb_s: float


@dataclass(frozen=True)
class Mesh:
    """The devices of one placed model and how they share its work: ``dp`` replicas of ``tp * pp`` devices.

    ``per_node``: devices of the mesh in each node that it touches. ``zero``: ZeRO stage over the replicas.
    ``device``: the slowest class among them.
    """

    device: DeviceClass
    links: Links
    dp: int = 1
    tp: int = 1
    pp: int = 1
    per_node: int = 1
    zero: int = 0

    @property
    def size(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def spans_nodes(self) -> bool:
        return self.size > self.per_node


@dataclass(frozen=True)
class Call:
    """One model call, as a replica sees it.

    ``rows``: of the fullest replica. ``prompt``: mean tokens of a prompt. ``responses``: lengths of answers in tokens,
    a sample of the rows' distribution (one number: all alike). ``width``: tokens of a row in forward and training
    passes (padded where the engine pads). ``updates``: optimizer steps. ``micro_rows``: rows of one pass;
    ``decode_rows``: rows decoded together. ``item``: bytes of a weight; ``cache_item``: of a key's or value's number.
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
    offload_optimizer: bool = False
    cache_item: int = 2

    @property
    def mean_response(self) -> float:
        return sum(self.responses) / len(self.responses)

    @property
    def longest_response(self) -> float:
        return max(self.responses)


@dataclass(frozen=True)
class Cost:
    """Seconds of one piece of work, by what takes them (``compute``, ``attention``, ``weights``, ``cache``, ``launch``,
    ``tensor parallel``, ``gather``, ``bubble``, ``optimizer`` ...); hidden parts are left out."""

    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda name: self.parts[name], default="nothing")


@dataclass(frozen=True)
class Traffic:
    """Bytes of one exchange: the most that one rank sends or receives inside its node, and that one node does outwards.

    ``messages``: the most that one rank sends or receives, each of which has its latency.
    """

    within: int
    across: int
    messages: int = 1


class CostModel(Protocol):
    """Seconds of everything that an instruction can be."""

    def call(self, call: Call, mesh: Mesh) -> Cost:
        """A model call on all its replicas."""

    def combine(self, rows: int, width: float) -> Cost:
        """Math on columns, beside a model."""

    def move(self, primitive: Primitive, traffic: Traffic, links: Links) -> Cost:
        """Columns between ranks."""

    def sync(self, traffic: Traffic, gathered: Traffic, num_tensors: int, links: Links) -> Cost:
        """Weights from a trained copy to one that follows it. ``gathered``: what source ranks put together first;
        ``num_tensors``: weight tensors, each of which costs a start."""

    def switch(self, size: int, device: DeviceClass) -> Cost:
        """``size`` bytes between a device and its host: Offload, Reload."""

    def save(self, size: int) -> Cost:
        """``size`` bytes of weights into a directory."""
