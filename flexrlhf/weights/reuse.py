"""Weights that a copy and the model that it follows have in common on a rank, and that are stored once there.

A copy that exists from a Sync to its last call has the weights of its source meanwhile. A tensor of it that the rank
has all of, or a slice of it, is a view of the source's. A tensor that contains the source's shard stores it for the
source, whose own memory is freed until the copy is released: the zero redundancy of HybridFlow (Sheng et al. 2024, sec.
5.3).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flexrlhf.config.engines import TORCH
from flexrlhf.config.model_settings import Dtype
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.shapes import DTYPE_BYTES, ModelShape
from flexrlhf.weights.shards import Part, Parts, parts_on, shape_on
from flexrlhf.weights.sync_plan import sent_dtype


@dataclass(frozen=True)
class Reuse:
    """Weights of a copy on a rank that are not stored twice, by name.

    views:         views of the source's tensors.
    lent:          tensors that contain the source's, whose memory is freed while the copy exists.
    parts:         of the copy on the rank.
    source_parts:  of the source, by the copy's names.
    """

    views: frozenset[str]
    lent: frozenset[str]
    parts: Parts
    source_parts: Parts

    def source_elements(self, names: Iterable[str]) -> int:
        """Return the elements of the source's parts called ``names``."""
        return sum(self.source_parts[name].num_elements for name in names)

    @property
    def largest_lent(self) -> int:
        """Elements of the largest tensor that the source lends: while it is copied, both exist."""
        return max((self.source_parts[name].num_elements for name in self.lent), default=0)


def reuse_on(source: PlacedModel, copy: PlacedModel, shape: ModelShape, rank: int, lends: bool) -> Reuse:
    """Return the weights of ``copy`` and ``source``, which have no ``obstacle``, that are stored once on ``rank``.

    lends:  whether the source is not used while the copy exists.
    """
    parts, stored = parts_on(copy, shape, rank), parts_on(source, shape, rank)
    common = {name: stored[name] for name, _ in shape_on(copy, shape, rank).parameters if name in stored}
    views = frozenset(name for name, part in common.items() if _contains(part, parts[name]))
    lent = frozenset(name for name, part in common.items() if name not in views and _contains(parts[name], part))
    return Reuse(views, lent if lends else frozenset(), parts, common)


def obstacle(source: PlacedModel, copy: PlacedModel, sync_dtype: Dtype | None) -> str:
    """Return why a copy on ranks of its source stores all of its weights by itself; empty if it need not."""
    for model in (source, copy):
        if model.engine != TORCH.name:
            return f"{model.engine} stores the weights of {model.name} in a layout of its own"
    if not copy.is_transient:
        return "its weights stay between its calls"
    if copy.split != "whole":
        return f"its ZeRO shards are not those of {source.name}"
    trained, own = stored_dtype(source), copy.settings.dtype
    if trained != own:
        return f"{source.name} is stored in {trained}, and it computes in {own}"
    if (sent := sent_dtype(copy, sync_dtype)) != own:
        return f"sync.dtype rounds its weights to {sent}"
    return ""


def stored_dtype(model: PlacedModel) -> Dtype:
    """Return the type of the weights that a model of the torch engine stores: shards that it trains are float32."""
    return "float32" if model.trained and model.split == "rows" else model.settings.dtype


def bytes_of(model: PlacedModel, elements: int) -> int:
    """Return the bytes of ``elements`` of a copy that reuses weights, and of its source."""
    return DTYPE_BYTES[model.settings.dtype] * elements


def _contains(outer: Part, inner: Part) -> bool:
    """Whether a part of a tensor, not empty, is inside another one, of which it then is a view."""
    sides = zip(outer.box, inner.box, strict=True)
    return inner.num_elements > 0 and all(one.start <= other.start and other.stop <= one.stop for one, other in sides)
