"""Time of a model's passes and decoding steps on any layout, as the sum of the measured times of its layers.

Between measured micro-batches, rows and cache lengths times are on straight lines, between measured slices of
tensor-parallel ranks on straight lines of their logarithms. A layer of another shape costs a fixed part, launching and
reading its weights, and a part that grows with the tokens, in proportion to the floating-point operations of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import log
from typing import Literal

from flexrlhf.guideline.costs.cost_model import Transformer
from flexrlhf.guideline.costs.measurements import ModelTimes, PartTimes, PassKind, Point

LayerKind = Literal["embedding", "block", "head"]
LAUNCHED = 0.5
"""Share of the time of a layer without tokens that is launching, at least."""


@dataclass(frozen=True)
class Curve:
    """Seconds by tokens or rows: straight between measured points, and beyond them the line through the last two.

    known:  points, both coordinates ascending; empty: nothing was measured, and nothing is counted
    """

    known: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, points: Sequence[Point]) -> Curve:
        """Return the curve of points by tokens, if they have any, else by rows. It never decreases: noise may make a
        call of more rows the shorter one."""
        by_size = sorted((point.rows if point.tokens is None else point.tokens, point.seconds) for point in points)
        seconds = accumulate((each for _, each in by_size), max)
        return cls(tuple(dict(zip((size for size, _ in by_size), seconds, strict=True)).items()))

    def seconds(self, size: float) -> float:
        known = self.known
        if len(known) < 2:
            return known[0][1] * max(1.0, size / known[0][0]) if known else 0.0
        (x0, y0), (x1, y1) = next((pair for pair in pairwise(known) if size <= pair[1][0]), (known[-2], known[-1]))
        line = y0 + (y1 - y0) * (size - x0) / (x1 - x0)
        # fewer rows never take longer for each than in proportion: the fixed part is not negative
        return max(line, y0 * min(1.0, size / x0))

    @cached_property
    def fixed(self) -> float:
        """Time of a call with next to no rows."""
        return min(self.seconds(0), self.known[0][1]) if self.known else 0.0


@dataclass(frozen=True)
class SplitTime:
    """Time of a part of a model: of a call with next to no tokens, and of one with the tokens in question."""

    fixed: float
    seconds: float


class PartCurves:
    """Curves of the times of one part of a model."""

    def __init__(self, part: PartTimes) -> None:
        self._passes = {kind: Curve.of(getattr(part, kind)) for kind in ("forward", "train", "prefill")}
        self._steps = [(step.cache, Curve.of(step.points)) for step in sorted(part.step, key=lambda step: step.cache)]

    def of_pass(self, kind: PassKind, tokens: float) -> SplitTime:
        """Return the time of a pass of ``tokens``."""
        curve = self._passes[kind]
        return SplitTime(curve.fixed, curve.seconds(tokens))

    def of_step(self, rows: float, cache: float) -> SplitTime:
        """Return the time of a decoding step: straight between measured caches and beyond, but never falling."""
        times = [(columns, SplitTime(curve.fixed, curve.seconds(rows))) for columns, curve in self._steps]
        if len(times) < 2:
            return times[0][1] if times else SplitTime(0.0, 0.0)
        (x0, low), (x1, high) = next((pair for pair in pairwise(times) if cache <= pair[1][0]), tuple(times[-2:]))
        grown = max(0.0, high.seconds - low.seconds) * (cache - x0) / (x1 - x0)
        return SplitTime(low.fixed, max(low.fixed, low.seconds + grown))


@dataclass(frozen=True)
class SlicedModel:
    """A model as one of ``tp`` ranks computes it.

    model:  its shape
    tp:     tensor-parallel ranks
    width:  tokens that attention reaches over
    item:   bytes of a weight that a pass reads
    """

    model: Transformer
    tp: int
    width: float
    item: int

    def flops(self, part: LayerKind) -> float:
        """Return the operations of a token in a forward pass of ``part`` over all ranks."""
        model = self.model
        if part == "block":
            return 2 * (model.active_parameters + 2 * model.hidden) + 2 * model.attention_features * self.width
        return 2 * (model.hidden + (model.head_parameters if part == "head" else 0))

    def num_bytes(self, part: LayerKind) -> float:
        """Return the bytes of the weights of ``part`` that a pass reads on each rank."""
        model = self.model
        parameters = {"embedding": 0, "block": model.layer_parameters, "head": model.head_parameters}[part]
        return self.item * parameters / self.tp


@dataclass(frozen=True)
class PartPrices:
    """Times of a part of a model, scaled from the measured times of a part of another size.

    curves:  measured times
    flops:   operations of a token, relative to the measured part
    read:    time of reading the bytes of weights that this part has more than the measured one; negative: it has fewer
    """

    curves: PartCurves
    flops: float
    read: float

    def of_pass(self, kind: PassKind, tokens: float) -> float:
        """Return the time of a pass of ``tokens``."""
        return self._scaled(self.curves.of_pass(kind, tokens))

    def of_step(self, rows: float, cache: float) -> float:
        """Return the time of a decoding step."""
        return self._scaled(self.curves.of_step(rows, cache))

    def _scaled(self, found: SplitTime) -> float:
        # most of the fixed part of a small layer is launching; its weights were read from caches
        return (found.seconds - found.fixed) * self.flops + max(LAUNCHED * found.fixed, found.fixed + self.read)


@dataclass(frozen=True)
class ModelPrices:
    """Times of the parts of one model on a rank.

    layers:  its layers
    parts:   each by measured layouts: of the tensor-parallel ranks in question, or of fewer and of more
    share:   where between these two they are, from 0 to 1
    """

    layers: int
    parts: Mapping[LayerKind, Sequence[PartPrices]]
    share: float

    def stages(self, kind: PassKind, tokens: float, pp: int = 1) -> list[float]:
        """Return the time of a pass on each of ``pp`` stages, of equally many layers: the first has the embedding, the
        last the head."""
        stages = [self.layers / pp * self.block(kind, tokens)] * pp
        stages[0] += self._seconds([each.of_pass(kind, tokens) for each in self.parts["embedding"]])
        stages[-1] += self._seconds([each.of_pass(kind, tokens) for each in self.parts["head"]])
        return stages

    def block(self, kind: PassKind, tokens: float) -> float:
        """Return the time of one layer in a pass."""
        return self._seconds([each.of_pass(kind, tokens) for each in self.parts["block"]])

    def step(self, rows: float, cache: float) -> float:
        """Return the time of one decoding step of ``rows`` rows with ``cache`` columns of keys and values."""
        block, head = (self._seconds([each.of_step(rows, cache) for each in self.parts[part]]) for part in STEP_PARTS)
        return self.layers * block + head

    def _seconds(self, times: Sequence[float]) -> float:
        return times[0] if len(times) == 1 else times[0] ** (1 - self.share) * times[1] ** self.share


STEP_PARTS: tuple[LayerKind, LayerKind] = ("block", "head")
"""Parts of a decoding step; the head's includes the embedding."""
_ALL_PARTS: tuple[LayerKind, ...] = ("embedding", "block", "head")


@dataclass(frozen=True)
class LayerPrices:
    """Times of the parts of models on layouts and of shapes that were measured, or like them.

    times:    of a measured model
    bytes_s:  bandwidth at which each rank reads weights
    """

    times: ModelTimes
    bytes_s: float

    @cached_property
    def _curves(self) -> dict[int, dict[LayerKind, PartCurves]]:
        return {
            tp: {part: PartCurves(getattr(layers, part)) for part in _ALL_PARTS}
            for tp, layers in self.times.layers.items()
        }

    def _between(self, tp: int) -> tuple[int, int, float]:
        """Return two measured numbers of tensor-parallel ranks, and where between them ``tp`` is, from 0 to 1."""
        low = max(each for each in self._curves if each <= tp)
        high = min((each for each in self._curves if each > tp), default=low)
        return low, high, log(tp / low) / log(high / low) if high > low else 0.0

    def unsummed(self, tp: int) -> float:
        """Return the share of sums over ``tp`` tensor-parallel ranks that the times do not include."""
        low, high, share = self._between(tp)
        lacking = [0.0 if self.times.layers[each].summed or tp == 1 else 1.0 for each in (low, high)]
        return (1 - share) * lacking[0] + share * lacking[1]

    def of(self, sliced: SlicedModel, width: float | None = None) -> ModelPrices:
        """Return the times of a model. ``width``: tokens of a row in the measured calls."""
        low, high, share = self._between(sliced.tp)
        width = width or self.times.row or self.times.width
        parts = {
            part: [self._part(part, sliced, width, tp) for tp in ((low, high) if share else (low,))]
            for part in _ALL_PARTS
        }
        return ModelPrices(sliced.model.layers, parts, share)

    def _part(self, part: LayerKind, sliced: SlicedModel, width: float, tp: int) -> PartPrices:
        """Return the times of ``part`` by those of ``tp`` ranks, the largest measured number also for more ranks."""
        like = SlicedModel(self.times.model, tp, width, self.times.item)
        here = max(tp, sliced.tp) if tp == max(self._curves) else tp
        flops = sliced.flops(part) / like.flops(part) * tp / here
        more = replace(sliced, tp=here).num_bytes(part) - like.num_bytes(part)
        return PartPrices(self._curves[tp][part], flops, more / self.bytes_s)
