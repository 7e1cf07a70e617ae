"""Measure the layers of models: calls of models of few layers, and the embedding by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from flexrlhf.api import Operator
from flexrlhf.api.engine import LoadedModel
from flexrlhf.guideline.costs.cost_model import Transformer
from flexrlhf.guideline.costs.measurements import DecodeTimes, PartTimes, Point, Points
from flexrlhf.measure.layer_split import REPEATS, SlimTimes
from flexrlhf.measure.model_calls import ProfileContext
from flexrlhf.measure.profiled_models import MeasuredRows, RowCounts
from flexrlhf.measure.stopwatch import Estimate, TimedCall, Timing

MOST_STEPS = 64
"""Decoding steps of which the mean is measured, at most."""


@dataclass(frozen=True)
class SlimModel:
    """A model of few layers on this rank, by itself, with other tensor-parallel ranks, or sharded over all ranks.

    layers:    its layers
    loaded:    the model
    replicas:  the same with replicas on all ranks, to be trained; None: only itself is measured
    """

    layers: int
    loaded: LoadedModel
    replicas: LoadedModel | None = None


def measure_slim(
    context: ProfileContext, operators: Mapping[str, Operator], models: Sequence[SlimModel], counts: RowCounts
) -> list[SlimTimes]:
    """Measure every kind of call of ``models``, in turns, so that a slow moment affects all alike. Times are lower
    quartiles, as differences of them are taken."""
    found = _Calls(context, counts)
    for number, model in enumerate(models):
        for kind, operator in operators.items():
            found.add(number, kind, operator, model)
    timings = context.stopwatch.time(found.calls, context.budget, further=found.further)
    return [found.times(number, model, timings) for number, model in enumerate(models)]


class _Calls:
    """Calls of several models, by name."""

    def __init__(self, context: ProfileContext, counts: RowCounts) -> None:
        self._context, self._counts = context, counts
        response = context.plan.lengths.response
        self._steps = min(MOST_STEPS, max(1, (response - 1) // 2))
        # responses so far, of which the next steps are measured
        self._given = sorted({0, response - 1 - self._steps}) if response > 1 else []
        self.calls: dict[str, TimedCall] = {}
        self.further: dict[str, Estimate] = {}

    def add(self, number: int, kind: str, operator: Operator, model: SlimModel) -> None:
        """Add the calls of a kind."""
        context, loaded = self._context, model.loaded
        if kind == "generate":
            for given in self._given or [0]:
                for name, tokens in (("first", 1), ("steps", 1 + self._steps))[: 1 + bool(self._given)]:
                    self._add(
                        f"{number}/{name}/{given}",
                        {
                            rows: context.generation(operator, loaded, rows, given, tokens)
                            for rows in self._counts.decode.all
                        },
                        self._counts.decode,
                    )
            return
        _, by_rows = context.equal_passes(loaded.placed, self._counts.passes)
        self._add(
            f"{number}/{kind}", {rows: context.call(operator, loaded, rows) for rows in by_rows}, self._counts.passes
        )
        if kind == "train":
            least = min(by_rows)
            self.calls[f"{number}/repeated/{least}"] = context.call(operator, loaded, REPEATS * least, passes=REPEATS)
            if model.replicas is not None:
                self.calls[f"{number}/replicas/{least}"] = context.call(operator, model.replicas, least)

    def _add(self, name: str, calls: Mapping[int, TimedCall], measured: MeasuredRows) -> None:
        last = max(rows for rows in calls if rows in measured.needed)
        self.calls |= {f"{name}/{rows}": call for rows, call in calls.items()}
        self.further |= {
            f"{name}/{rows}": Estimate(f"{name}/{last}", rows / last) for rows in calls if rows in measured.further
        }

    def times(self, number: int, model: SlimModel, timings: Mapping[str, Timing]) -> SlimTimes:
        """Return the times of a model."""
        context, loaded = self._context, model.loaded

        def points(name: str, tokens: Mapping[int, int] = MappingProxyType({})) -> Points:
            prefix = f"{number}/{name}/"
            found = {
                int(name.removeprefix(prefix)): timing for name, timing in timings.items() if name.startswith(prefix)
            }
            return tuple(
                Point(rows=rows, seconds=each.low, spread=each.spread, tokens=tokens.get(rows))
                for rows, each in sorted(found.items())
            )

        passes, tokens = context.equal_passes(loaded.placed, self._counts.passes)
        read = {rows: context.read_tokens(loaded.placed, rows) for rows in self._counts.decode.all}
        several, replicas = model.replicas, points("replicas")
        return SlimTimes(
            layers=model.layers,
            trained=_trained_bytes(loaded, context.rank.world.rank),
            summed=loaded.placed.layout.dims.tp > 1,
            dp=loaded.placed.num_shards,
            passes=passes,
            forward=points("forward", tokens),
            train=points("train", tokens),
            repeated=points("repeated"),
            replicas={several.placed.layout.dp: replicas} if several is not None and replicas else {},
            prefill=points("first/0", read),
            step=tuple(self._step(given, points) for given in self._given) if points("steps/0") else (),
        )

    def _step(self, given: int, points: Callable[[str], Points]) -> DecodeTimes:
        """Return the time of a decoding step after ``given`` tokens of the responses."""
        first = {point.rows: point.seconds for point in points(f"first/{given}")}
        steps = [
            point.model_copy(update={"seconds": max(0.0, point.seconds - first[point.rows]) / self._steps})
            for point in points(f"steps/{given}")
            if point.rows in first
        ]
        cache = max(self._context.lengths.prompts) + given + (self._steps + 1) / 2
        return DecodeTimes(cache=cache, points=tuple(steps))


def _trained_bytes(loaded: LoadedModel, rank: int) -> int:
    """Return the bytes of the parameters that training changes on a rank, in float32."""
    names = {name for name, _ in loaded.shape.trained}
    parts = loaded.shape.parts_on(loaded.placed, rank)
    return sum(4 * part.num_elements for name, part in parts.items() if name in names)


def measure_embedding(context: ProfileContext, model: Transformer, dtype: torch.dtype, tokens: Points) -> PartTimes:
    """Measure the embedding of ``model`` on its own, for passes of as many tokens as those of ``tokens``."""
    device = context.rank.world.device
    embedding = torch.nn.Embedding(model.vocabulary, model.hidden, dtype=dtype, device=device)
    calls: dict[str, TimedCall] = {}
    for point in tokens:
        ids = torch.randint(0, model.vocabulary, (point.tokens or point.rows,), device=device)
        calls[f"forward/{point.rows}"] = partial(_embed, embedding, ids, trains=False)
        calls[f"train/{point.rows}"] = partial(_embed, embedding, ids, trains=True)
    timings = context.stopwatch.time(calls, context.budget) if calls else {}

    def of(kind: str) -> Points:
        return tuple(
            point.model_copy(update={"seconds": each.low, "spread": each.spread})
            for point in tokens
            for each in [timings[f"{kind}/{point.rows}"]]
        )

    return PartTimes(forward=of("forward"), train=of("train"))


def _embed(embedding: torch.nn.Embedding, ids: Tensor, trains: bool) -> None:
    with torch.set_grad_enabled(trains):
        hidden = embedding(ids)
    if trains:
        hidden.backward(hidden.detach())
