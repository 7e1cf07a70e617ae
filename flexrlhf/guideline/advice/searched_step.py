"""Step of a spec as a search sees it: its calls in the order of the strategies, and the time of what models send each
other between any two meshes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

from flexrlhf.api import (
    OF_COPIES,
    BatchShape,
    DeviceClass,
    Layout,
    Lengths,
    ModelShape,
    PlacedModel,
    ResolvedSpec,
    Run,
    Sync,
)
from flexrlhf.guideline.advice.model_options import OptionEnumerator
from flexrlhf.guideline.advice.sketch import Sketch, name_of
from flexrlhf.guideline.costs.cost_model import CostModel, Links
from flexrlhf.guideline.costs.links import MeshSide, ModelLink, SyncWeights
from flexrlhf.guideline.costs.relations import Relation
from flexrlhf.guideline.search.link_table import LinkTimes
from flexrlhf.guideline.search.problem import LinkEnd, LinkSeconds, RowTransfer, SearchSync, SearchTask
from flexrlhf.guideline.simulation.inputs import TextLengths
from flexrlhf.guideline.simulation.pricing import UNKNOWN, rows_bytes, synced_weights

FORBIDDEN = 1e9
"""Seconds of a forbidden transfer; with a lag they may be spread over some steps."""


def is_allowed(seconds: float) -> bool:
    """Whether a plan that takes ``seconds`` a step has no forbidden transfer."""
    return seconds < FORBIDDEN / 10


@dataclass(frozen=True, kw_only=True)
class SearchedStep(ResolvedSpec):
    """Calls and transfers of a step of ``spec`` with or without shadows, for one number of chunks and one lag.

    shapes:       role → sizes of its model.
    costs:        cost model of calls and transfers.
    lengths:      tokens of prompts and responses.
    enumerator:   makes the options of its models.
    has_shadows:  whether inference has copies of its own.
    """

    shapes: Mapping[str, ModelShape]
    costs: CostModel
    lengths: TextLengths
    enumerator: OptionEnumerator
    has_shadows: bool = False

    @cached_property
    def batch(self) -> BatchShape:
        return BatchShape.of(self.spec)

    @cached_property
    def sketch(self) -> Sketch:
        return self.enumerator.sketch(Sketch(self.spec, self.graph, self.cluster, has_shadows=self.has_shadows))

    @cached_property
    def devices(self) -> dict[str, DeviceClass]:
        """Name of a class of the cluster → its figures; all seconds on a class without figures are measured."""
        return {name: self.cluster.figures_or(self.cluster.ranks_on(name)[0], UNKNOWN) for name in self.cluster.classes}

    @cached_property
    def _run_lengths(self) -> Lengths:
        return self.run_lengths(self.shapes)

    def _calls(self) -> Iterator[SearchTask | SearchSync]:
        """Tasks and syncs in the order of the trainer's list, and the switches of an engine that sleeps."""
        sketch, engine = self.sketch, self.sketch.sleeper
        # after the last of its calls: it may have two
        last = next((run for run in reversed(sketch.runs) if run.model == engine), None)
        for each in sketch.instructions:
            match each:
                case Run():
                    reads = tuple(name_of(writer) for writer in (*sketch.writers(each), *sketch.separate(each)))
                    yield SearchTask(name_of(each), each.model, reads, each.lag)
                    if each is last:
                        yield SearchTask("offload", each.model)
                case Sync():
                    if each.destination == engine:
                        yield SearchTask("reload", each.destination)
                    yield self._sync(each, sketch.last_training(each.source), each.destination)

    def _sync(self, sync: Sync, trained: str, copy: str) -> SearchSync:
        """Return a sync from the task that trains to the part that receives."""
        gathers = self._gathers(sync)
        key = "sync", sync.destination, sync.overlaps, gathers, self.has_shadows
        seconds = self._times(partial(self._sync_seconds, sync), *key)
        return SearchSync(trained, copy, seconds, sync.every, sync.overlaps, partial(_sync_side, gathers))

    def _times(self, seconds: LinkSeconds, *key: object) -> LinkTimes:
        """Return the times of a link that searches with other limits, chunks and lags have, too."""
        key = ("times", self._has_several_nodes, *key)
        return self.enumerator.memo.cached(key, lambda: LinkTimes(seconds))

    def _gathers(self, sync: Sync) -> bool:
        """Whether the ranks of the source gather adapters."""
        base = self.spec.models.of(sync.source.role)
        return base is not None and base.lora is not None

    def _rows(self) -> Iterator[RowTransfer]:
        """Yield transfers of columns, and waits between models that must not share a device."""
        for reader in self.sketch.runs:
            for writer in self.sketch.writers(reader):
                size = rows_bytes(self.batch, self._run_lengths, writer, reader)
                disjoint = self.sketch.must_be_disjoint(writer.model, reader.model)
                seconds = self._times(partial(self._rows_seconds, size, disjoint), "rows", size, disjoint)
                yield RowTransfer(name_of(writer), name_of(reader), seconds, _rows_side)
            for writer in self.sketch.separate(reader):
                yield RowTransfer(name_of(writer), name_of(reader), self._border_seconds, lambda end: ())

    @staticmethod
    def _border_seconds(source: LinkEnd, to: LinkEnd, relation: Relation) -> float:
        """Seconds between models that must not share a device and send each other nothing."""
        return 0.0 if relation == "disjoint" else FORBIDDEN

    def _rows_seconds(
        self, size: int, must_be_disjoint: bool, source: LinkEnd, to: LinkEnd, relation: Relation
    ) -> float:
        if must_be_disjoint and relation != "disjoint":
            return FORBIDDEN
        return self._between(source, to, relation).rows_cost(self.costs, size).seconds

    def _sync_seconds(self, sync: Sync, source: LinkEnd, to: LinkEnd, relation: Relation) -> float:
        if relation != ("disjoint" if self.has_shadows else "same"):
            return FORBIDDEN
        weights = self._weights(self.sketch.placement[sync.destination], to, sync.overlaps)
        return self._between(source, to, relation).sync_cost(self.costs, weights).seconds

    def _weights(self, follower: PlacedModel, to: LinkEnd, overlaps: bool = False) -> SyncWeights:
        """Return the weights that a sync sends to ``follower``."""
        side = _side_of(to)
        if (follower.name, side) not in self._weights_cache:
            layout = Layout(tuple(range(side.size)), side.dims).of_weights
            settings = follower.settings.model_copy(update={"zero": side.zero, **layout.dims._asdict()})
            over = side.shards // side.parts
            kind = follower.rollout, follower.head
            model = PlacedModel(follower.name, layout, False, settings, *kind, sharded_over=over)
            self._weights_cache[follower.name, side] = synced_weights(
                model, self.shapes[follower.role], self.spec, overlaps
            )
        return self._weights_cache[follower.name, side]

    @cached_property
    def _weights_cache(self) -> dict[tuple[str, MeshSide], SyncWeights]:
        """(follower, its side) → weights that a sync sends, filled on use."""
        return {}

    def _between(self, source: LinkEnd, to: LinkEnd, relation: Relation) -> ModelLink:
        kinds = [self.devices[kind] for end in (source, to) for kind in end.shape.kinds]
        links = Links(min(kind.link_gb_s for kind in kinds), min(kind.node_gb_s for kind in kinds))
        return ModelLink(_side_of(source), _side_of(to), relation, links, self._has_several_nodes)

    @cached_property
    def _has_several_nodes(self) -> bool:
        return self.cluster.num_nodes > 1


def _rows_side(end: LinkEnd) -> Hashable:
    """Return what a transfer of rows depends on of one end: how many ranks have which rows, on which devices."""
    return end.shape.kinds, _side_of(end).of_rows


def _sync_side(has_adapters: bool, end: LinkEnd) -> Hashable:
    """Return what a sync depends on of one end: which ranks store which weights, on which devices."""
    return end.shape.kinds, _of_weights(_side_of(end), has_adapters)


@lru_cache(maxsize=4096)
def _of_weights(side: MeshSide, has_adapters: bool) -> MeshSide:
    """Return ``side`` without what weights do not depend on; where adapters are gathered it matters who has them."""
    dims = side.dims if has_adapters else side.dims.without(OF_COPIES)
    return replace(side, dp=1, dims=dims, zero=side.zero if side.zero == 3 else 0)


def _side_of(end: LinkEnd) -> MeshSide:
    """Return the layout of one end of a link."""
    assert isinstance(end.layout, MeshSide), "options of a Space have a side as layout"
    return end.layout
