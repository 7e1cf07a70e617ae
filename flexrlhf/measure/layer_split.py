"""Times of single layers from those of whole models: a model of few layers and one of more differ by their layers.

Optimizer steps on one micro-batch, and on several like it, differ by forward and backward passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from flexrlhf.guideline.costs.measurements import DecodeTimes, LayerTimes, LinearTime, PartTimes, Point, Points
from flexrlhf.measure.traffic import fit


@dataclass(frozen=True, eq=False)
class SlimTimes:
    """Times of the calls of a model of ``layers`` layers.

    layers:    its layers
    trained:   bytes of its trained parameters on a rank in float32
    summed:    whether tensor-parallel ranks computed it, and summed what they exchange
    dp:        replicas over which it was sharded; 1: none
    passes:    passes of a call of ``forward`` and ``train``
    forward:   forward passes
    train:     optimizer steps
    repeated:  optimizer steps of ``REPEATS`` times the passes of the point of ``train`` that has its rows
    replicas:  optimizer steps of several replicas, by their number
    prefill:   passes over prompts that sample the first token
    step:      decoding steps
    """

    layers: int
    trained: int
    summed: bool = False
    dp: int = 1
    passes: int = 1
    forward: Points = ()
    train: Points = ()
    repeated: Points = ()
    replicas: Mapping[int, Points] = field(default_factory=dict)
    prefill: Points = ()
    step: tuple[DecodeTimes, ...] = ()


REPEATS = 4
"""Optimizer steps of so many times the passes are compared with those of one."""


def update_times(slim: Sequence[SlimTimes]) -> dict[int, LinearTime]:
    """Return the time of an optimizer step without passes, by number of replicas; empty where nothing is trained.

    Tensor-parallel ranks wait for each other in every layer, which hides their optimizer steps: they are left out.
    """
    alone = [each for each in slim if each.train and not each.summed]
    if not alone:
        return {}
    first = alone[0].dp
    updates = {first: _fit({each: _update(each) for each in alone})}
    for replicas in sorted({number for each in alone for number in each.replicas}):
        several = [each for each in alone if replicas in each.replicas]
        of_one = {each: updates[first].seconds(each.trained, each.layers) for each in several}
        updates[replicas] = _fit({each: of_one[each] + _longer(each, replicas) for each in several})
    return updates


def _fit(updates: Mapping[SlimTimes, float]) -> LinearTime:
    # differences of long times: some may be noise
    return fit([(each.layers, each.trained, max(0.0, seconds)) for each, seconds in updates.items()], relative=False)


def _update(slim: SlimTimes) -> float:
    """Return the time of an optimizer step without its pass."""
    (repeated,) = slim.repeated
    once = next(point.seconds for point in slim.train if point.rows == repeated.rows)
    return (REPEATS * once - repeated.seconds) / (REPEATS - 1)


def _longer(slim: SlimTimes, replicas: int) -> float:
    """Return how much longer an optimizer step takes with ``replicas`` than with one."""
    (several,) = slim.replicas[replicas]
    return several.seconds - next(point.seconds for point in slim.train if point.rows == several.rows)


def layer_times(
    shallow: SlimTimes, deep: SlimTimes, embedding: PartTimes, updates: Mapping[int, LinearTime]
) -> LayerTimes:
    """Return the times of embedding, block and head. ``updates``: without which ``train`` is of passes alone."""

    def split(low: Points, high: Points, of_embedding: Points = ()) -> tuple[Points, Points]:
        return _split(low, high, of_embedding, shallow.layers, deep.layers)

    parts = {
        "forward": split(_passes(shallow.forward, shallow), _passes(deep.forward, deep), embedding.forward),
        "train": split(_passes(shallow.train, shallow, updates), _passes(deep.train, deep, updates), embedding.train),
        "prefill": split(shallow.prefill, deep.prefill),
    }
    steps = [(low.cache, *split(low.points, high.points)) for low, high in zip(shallow.step, deep.step, strict=True)]
    block, head = (
        PartTimes(
            **{kind: points[place] for kind, points in parts.items()},
            step=tuple(DecodeTimes(cache=cache, points=points[place]) for cache, *points in steps),
        )
        for place in (0, 1)
    )
    return LayerTimes(embedding=embedding, block=block, head=head, summed=shallow.summed)


def _passes(points: Points, slim: SlimTimes, updates: Mapping[int, LinearTime] = MappingProxyType({})) -> Points:
    """Return the times of single passes of calls, without the optimizer step of ``updates``."""
    update = updates[min(updates)].seconds(slim.trained, slim.layers) if updates else 0.0
    return tuple(_point(point, max(0.0, point.seconds - update) / slim.passes) for point in points)


def _split(shallow: Points, deep: Points, embedding: Points, few: int, many: int) -> tuple[Points, Points]:
    """Return the times of a layer, and of all that is neither layer nor embedding, for rows of which all are known.

    ``few``, ``many``: layers of ``shallow`` and of ``deep``.
    """
    of_embedding = {point.rows: point.seconds for point in embedding}
    of_deep = {point.rows: point for point in deep}
    blocks, heads = [], []
    for point in (point for point in shallow if point.rows in of_deep):
        other = of_deep[point.rows]
        block = max(0.0, other.seconds - point.seconds) / (many - few)
        head = max(0.0, point.seconds - few * block - of_embedding.get(point.rows, 0.0))
        blocks.append(_point(other, block))
        heads.append(_point(point, head))
    return tuple(blocks), tuple(heads)


def _point(like: Point, seconds: float) -> Point:
    return like.model_copy(update={"seconds": seconds})
