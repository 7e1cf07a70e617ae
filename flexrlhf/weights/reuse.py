"""Weights that a copy and the model that it follows have in common on a rank, and that are stored once there.

A copy that exists from a Sync to its last call has the weights of its source meanwhile. A tensor of it that the rank
has all of, or a slice of it, is a view of the source's. A tensor that contains the source's shard stores it for the
source, whose own memory is freed until the copy is released: the zero redundancy of HybridFlow (Sheng et al. 2024, sec.
5.3).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from flexrlhf.config.engines import TORCH
from flexrlhf.config.model_settings import Dtype
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.boxes import intersection
from flexrlhf.weights.expert_files import is_router_bias
from flexrlhf.weights.shapes import DTYPE_BYTES, ModelShape
from flexrlhf.weights.shards import Part, Parts, fused_name, parts_on, shape_on
from flexrlhf.weights.sync_plan import sent_dtype


@dataclass(frozen=True)
class Reuse:
    """Weights of a copy on a rank that are not stored twice, by name.

    views:         views of the source's tensors.
    groups:        tensors that contain the source's, whose memory is freed while the copy exists; those of a group have
                   one memory in the source, so that all of them move before that is freed.
    parts:         of the copy on the rank.
    source_parts:  of the source, by the copy's names.
    """

    views: frozenset[str]
    groups: tuple[tuple[str, ...], ...]
    parts: Parts
    source_parts: Parts

    @cached_property
    def lent(self) -> frozenset[str]:
        """Names of the tensors of all groups."""
        return frozenset(name for group in self.groups for name in group)

    def source_elements(self, names: Iterable[str]) -> int:
        """Return the elements of the source's parts called ``names``."""
        return sum(self.source_parts[name].num_elements for name in names)

    @cached_property
    def most_moved(self) -> int:
        """Elements of the source's largest group: while it moves, both memories exist."""
        return max(map(self.source_elements, self.groups), default=0)


def reuse_on(source: PlacedModel, copy: PlacedModel, shape: ModelShape, rank: int, lends: bool) -> Reuse:
    """Return the weights of ``copy`` and ``source``, which have no ``obstacle``, that are stored once on ``rank``.

    lends:  whether the source is not used while the copy exists.
    """
    parts, stored = parts_on(copy, shape, rank), parts_on(source, shape, rank)
    names = [name for name, _ in shape_on(copy, shape, rank).parameters if not is_router_bias(name)]
    common = {name: stored[name] for name in names if name in stored}
    views = frozenset(name for name, part in common.items() if _contains(part, parts[name]))
    fused: dict[str, list[str]] = defaultdict(list)
    for name in sorted(common) if lends and not shared_memory(source) else ():
        fused[fused_name(name) if source.facts.fused_layers else name].append(name)
    groups = tuple(
        tuple(names)
        for names in fused.values()
        if views.isdisjoint(names) and all(_contains(parts[name], common[name]) for name in names)
    )
    return Reuse(views, groups, parts, common)


def obstacle(source: PlacedModel, copy: PlacedModel, sync_dtype: Dtype | None) -> str:
    """Return why a copy on ranks of its source stores all of its weights by itself; empty if it need not."""
    if not copy.is_transient:
        return "its weights stay between its calls"
    if copy.engine != TORCH.name or copy.split != "whole":
        return f"{copy.engine} has shards or buffers of its own"
    if source.split == "flat":
        return f"{source.engine} shards {source.name} as flat ranges"
    trained, own = stored_dtype(source), copy.settings.dtype
    if trained != own:
        return f"{source.name} is stored in {trained}, and it computes in {own}"
    if (sent := sent_dtype(copy, sync_dtype)) != own:
        return f"sync.dtype rounds its weights to {sent}"
    return ""


def shared_memory(source: PlacedModel) -> str:
    """Return why no tensor of a trained model can be freed by itself; empty if tensors can."""
    if source.engine == TORCH.name or (source.facts.fused_layers and source.settings.zero == 0):
        return ""
    return f"{source.engine} keeps the weights of {source.name} in one buffer"


def stored_dtype(model: PlacedModel) -> Dtype:
    """Return the type of the weights that passes of a model read: shards of FSDP2 that it trains are float32."""
    return "float32" if model.trained and model.split == "rows" else model.settings.dtype


def bytes_of(model: PlacedModel, elements: int) -> int:
    """Return the bytes of ``elements`` of a copy that reuses weights, and of its source."""
    return DTYPE_BYTES[model.settings.dtype] * elements


def _contains(outer: Part, inner: Part) -> bool:
    """Whether a part of a tensor, not empty, is inside another one, of which it then is a view."""
    return intersection(outer.box, inner.box) == inner.box
