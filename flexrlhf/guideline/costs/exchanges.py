"""Time that the ranks along an axis of parallelism exchange data around and between the layers of a pass.

Sums over tensor-parallel ranks are inside layers, which ``training.py`` prices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, lcm

from flexrlhf.api import EngineFacts
from flexrlhf.guideline.costs.cost_model import Call, Mesh, Traffic
from flexrlhf.guideline.costs.kernels import attention_seconds, elements_seconds
from flexrlhf.guideline.costs.links import travel_seconds
from flexrlhf.guideline.costs.profiles import EngineProfile

# FlashAttention 2, section 3.1: five products of the square backward, two forward.
ATTENTION_BACKWARD = 2.5
# Parts of attention in a ring are joined (``joined`` in engines/attended_spans.py): per feature of a query, a part's
# output is cleared, written, cast to float32 and weighed with the sum of those before.
JOINED_BYTES = 44


@dataclass(frozen=True)
class PassShape:
    """Shape of one micro-batch.

    rows:         rows
    width:        tokens of a row
    head_tokens:  tokens whose logits are computed
    item:         bytes of a number
    sharers:      ranks with as many tokens that share the experts
    """

    rows: float
    width: float
    head_tokens: float
    item: int
    sharers: int = 1

    @property
    def tokens(self) -> float:
        return self.rows * self.width


@dataclass(frozen=True)
class PricedPasses:
    """Passes of a call, the largest first.

    shapes:         distinct passes, each with its number
    training:       whether they have a backward pass
    repeats:        forward passes that recomputation adds
    stage_seconds:  time of the largest pass in a pipeline stage
    """

    call: Call
    mesh: Mesh
    profile: EngineProfile
    shapes: Sequence[tuple[float, PassShape]]
    training: bool
    repeats: float
    stage_seconds: float

    @property
    def number(self) -> int:
        return ceil(sum(times for times, _ in self.shapes))


def parts_of_rows(passes: PricedPasses) -> dict[str, float]:
    """Return the time of attention's exchanges between context-parallel ranks."""
    if passes.mesh.dims.cp == 1:
        return {}
    given, repeats = (passes.call, passes.mesh, passes.profile), passes.repeats
    seconds = sum(
        times * (1 + repeats) * _parts_seconds(*given, shape, backward=False)
        + times * passes.training * _parts_seconds(*given, shape, backward=True)
        for times, shape in passes.shapes
    )
    return {"context parallel": seconds}


def tokens_of_experts(passes: PricedPasses) -> dict[str, float]:
    """Return the time of tokens that travel to experts on other ranks."""
    exchanges = 1 + passes.repeats + passes.training
    given = passes.call, passes.mesh
    seconds = sum(times * exchanges * expert_seconds(*given, shape.tokens) for times, shape in passes.shapes)
    return {"expert parallel": seconds} if seconds else {}


def stages_in_turn(passes: PricedPasses) -> dict[str, float]:
    """Return the time in which stages of a pipeline wait, and of activations that travel from one to the next."""
    call, mesh, pp = passes.call, passes.mesh, passes.mesh.dims.pp
    if pp == 1:
        return {}
    bubble = (call.updates if passes.training else 1) * (pp - 1) * passes.stage_seconds / passes.profile.chunks
    hops = (passes.number + pp - 1) * (2 if passes.training else 1)
    return {"bubble": bubble, "pipeline": hops * _hop_seconds(call, mesh, passes.shapes[0][1].tokens)}


def parts_traffic(call: Call, mesh: Mesh, tokens: float, backward: bool) -> tuple[Traffic, float]:
    """Return the messages of one layer's attention in a pass of which each context-parallel rank has ``tokens``, and
    the bytes that their copies and joins move.

    Ulysses sends queries, keys and values to the ranks of their heads, and outputs back, each copied once. In a ring
    keys and values visit all other ranks; backward their gradients in float32, too, until they are back. Each part of
    the attention is joined with the others, two in a step of the ring and one more of a rank's own tokens.
    """
    model, others, item = call.model, mesh.dims.cp - 1, call.item
    queries, keys = (heads * model.head_dim / mesh.dims.tp for heads in (model.heads, model.kv_heads))
    if mesh.is_ring:
        each, messages = others * 2 * keys * item, others
        moved = JOINED_BYTES * queries
        if backward:
            each, messages = each + mesh.dims.cp * 2 * keys * 4, messages + mesh.dims.cp
            moved = (4 * item + 8) * (queries + 2 * keys)
        moved *= 2 * mesh.dims.cp + 1
    else:
        repeated = lcm(max(1, model.kv_heads // mesh.dims.tp), mesh.dims.cp) * model.head_dim
        each, messages = others / mesh.dims.cp * 2 * (queries + repeated) * item, 2
        moved = 4 * (queries + repeated) * item
    size, within = int(tokens * each), mesh.dims.width <= mesh.per_node
    # over a node's border go the messages of one rank to the next, for each tensor-parallel part
    return Traffic(size, 0 if within else size * mesh.dims.tp, messages), tokens * moved


def _parts_seconds(call: Call, mesh: Mesh, profile: EngineProfile, shape: PassShape, backward: bool) -> float:
    """Return the time that exchanges add to the attention of a pass, of which each rank has ``shape``; in a ring other
    keys and values travel while those that are there are attended to.
    """
    traffic, moved = parts_traffic(call, mesh, shape.tokens, backward)
    hidden = 0.0
    if mesh.is_ring:
        channels = call.model.attention_features / mesh.dims.tp
        attention = attention_seconds(shape.rows, shape.width, channels, mesh.device, profile.attention)
        hidden = (ATTENTION_BACKWARD if backward else 1) * attention * (mesh.dims.cp - 1) / mesh.dims.cp
    exposed = max(0.0, travel_seconds(traffic, mesh.links) - hidden)
    return call.model.layers / mesh.dims.pp * (exposed + elements_seconds(moved, mesh.device))


def expert_seconds(call: Call, mesh: Mesh, tokens: float) -> float:
    """Return the time in which ``tokens`` of a rank travel to their experts and outputs back, or as much of gradients.

    As many stay as on any rank: experts are taken equally often. Of tensor-parallel ranks, which have the same tokens,
    each sends the ones of its own experts; under sequence parallelism they have different ones, and send them to each
    other.
    """
    model, ranks = call.model, mesh.dims.expert_parts * mesh.dims.tp
    others = (ranks if EngineFacts.of(call.engine).sequence_parallel else mesh.dims.expert_parts) - 1
    if model.experts is None or others == 0:
        return 0.0
    size = int(tokens / mesh.dims.tp * model.experts.active * model.hidden * call.item * others / (1 + others))
    if ranks <= mesh.per_node:
        traffic = Traffic(size, 0, others)
    else:  # what leaves a node, of all its ranks
        away = (ranks - mesh.per_node) / (ranks - mesh.dims.tp)
        traffic = Traffic(int(size * (1 - away)), int(size * away * mesh.per_node), others)
    return 2 * model.sparse_layers / mesh.dims.pp * travel_seconds(traffic, mesh.links)


def _hop_seconds(call: Call, mesh: Mesh, tokens: float) -> float:
    """Return the time of a micro-batch's activations to the next stage; each rank of a stage sends a part."""
    size = int(call.item * call.model.hidden * tokens / mesh.dims.tp)
    within = mesh.between_stages * mesh.dims.pp <= mesh.per_node
    traffic = Traffic(size, 0) if within else Traffic(0, size * min(mesh.between_stages, mesh.per_node))
    return travel_seconds(traffic, mesh.links)


EXCHANGES: Mapping[str, Callable[[PricedPasses], dict[str, float]]] = {
    "cp": parts_of_rows,
    "ep": tokens_of_experts,
    "pp": stages_in_turn,
}
"""Axis → function that returns the time of its exchanges, by cause."""
