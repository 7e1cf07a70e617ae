"""Computation of the figures of models on meshes.

Bytes are the ones that ``memory.budget`` counts for a plan, so ``flexrlhf plan`` accepts the result of a search.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf

from flexrlhf.api import (
    OF_COPIES,
    BatchShape,
    Cluster,
    Compute,
    Layout,
    ModelName,
    ModelShape,
    ModelSpec,
    OperatorKind,
    PlacedModel,
    Placement,
    SequenceLengths,
    Sizing,
    Spec,
    State,
)
from flexrlhf.guideline.advice.call_figures import CallFigures, ShardedModel, TransferBytes, relevant_settings
from flexrlhf.guideline.advice.memo import Memo
from flexrlhf.guideline.advice.sketch import PlacedCall, SearchModel
from flexrlhf.guideline.advice.uniform_mesh import UniformMesh
from flexrlhf.guideline.costs.cost_model import Call, CostModel, Mesh, priced_dims
from flexrlhf.guideline.simulation.calls import CallMaker, row_patterns
from flexrlhf.guideline.simulation.model_free_costs import model_free_cost
from flexrlhf.guideline.simulation.pricing import is_ring, side_of


@dataclass(frozen=True)
class FigureMaker:
    """Computes the figures of the models of a spec.

    spec:    the spec, its models resolved.
    shapes:  role → sizes of its model.
    batch:   rows of a step.
    costs:   cost model of calls and transfers.
    maker:   makes the calls that ``costs`` prices.
    memo:    results so far.
    """

    spec: Spec
    shapes: Mapping[str, ModelShape]
    batch: BatchShape
    costs: CostModel
    maker: CallMaker
    memo: Memo

    def sharded(self, placed: PlacedModel, mesh: UniformMesh) -> ShardedModel:
        key = self._state_key(placed, mesh)
        stages = self.memo.cached(("stages", key), lambda: tuple(self._states(placed)))
        side = self.memo.cached(("side", key), lambda: side_of(placed, mesh.per_node))
        return ShardedModel(placed, key, stages, side)

    def _states(self, placed: PlacedModel) -> Iterator[State]:
        """Yield the state of each pipeline stage."""
        for rank in placed.layout.along("pp", 0):
            state = self._sizing.own_state(placed, rank)
            assert state is not None, "shapes are known"
            yield state

    def may_fit(self, sharded: ShardedModel) -> bool:
        """Whether the state of a model fits the largest device."""
        return sharded.state.resting <= self.most_memory

    def calls(self, model: SearchModel, mesh: UniformMesh, sharded: ShardedModel) -> Iterator[CallFigures]:
        """Yield time and bytes of each call."""
        placed, state_key = sharded.placed, sharded.key
        zero, over, priced_mesh = placed.settings.zero, placed.sharded_over, self._priced_mesh(placed, mesh)
        for call in model.calls:
            time_key = size_key = state_key
            if call.kind == "switch":
                yield CallFigures(call.kind, partial(self._switch_seconds, sharded, mesh), lambda _: 0)
                continue
            if call.kind != "train":
                # without gradients ZeRO matters where it shards the weights alone
                time_key = self._key(placed, mesh, *((zero, over) if zero >= 2 else ()))
                if placed.layout.dims.pp == 1:
                    size_key = self._key(placed, mesh, *((zero, over) if placed.split != "whole" else ()))
            patterns = row_patterns(call.shape(self.batch), placed.layout, call.mini_batches)
            most = max(map(max if call.kind == "train" else sum, patterns))
            price = partial(self._seconds, placed, mesh, priced_mesh, call.kind, call)
            size = partial(self._bytes, sharded, call, most)
            times = self.memo.cached(("seconds", time_key, call), lambda: dict[object, float]())
            sizes = self.memo.cached(
                ("bytes", size_key, call.kind, most, call.texts, call.compares, call.tokens),
                lambda: dict[object, int](),
            )
            yield CallFigures(call.kind, price, size, times, sizes)

    def _switch_seconds(self, sharded: ShardedModel, mesh: UniformMesh, _: ModelSpec) -> float:
        """Time of a transfer to or from host memory."""
        trained = self.spec.models.of(sharded.placed.role)
        # a Sync brings all weights, unless it brings adapters
        has_copy = trained is not None and trained.lora is not None
        return self.costs.switch(sharded.state.offloaded if has_copy else 0, mesh.device).seconds

    def _seconds(
        self,
        placed: PlacedModel,
        mesh: UniformMesh,
        priced_mesh: Mesh,
        kind: OperatorKind,
        call: PlacedCall,
        settings: ModelSpec,
    ) -> float:
        rows = row_patterns(call.shape(self.maker.batch), placed.layout, call.mini_batches)
        if kind == "combine" or kind == "score" or kind == "retokenize":
            most, width = max(map(sum, rows)), self.maker.lengths.width
            return model_free_cost(self.costs, self.spec, call.score_source, most, width).seconds
        assert kind != "loss" and kind != "backward" and kind != "step", "programs alone call them"
        used = [each for each in rows if any(each)]
        layout, shape = placed.layout, self.shapes[placed.role]
        own = settings.offload_optimizer, placed.rollout is None, placed.trained, mesh.device.name
        key = "call", placed.role, own, relevant_settings(kind, settings), call, tuple(used), layout.dims.row_parts

        def made() -> Call:
            return self.maker.call(kind, replace(placed, settings=settings), shape, used, call.texts, call.compares)

        # whatever the ZeRO stage, tensor-parallel and pipeline ranks are
        priced = self.memo.cached(key, made)
        return self.costs.call(priced, priced_mesh).seconds

    def _bytes(self, sharded: ShardedModel, call: PlacedCall, most_rows: int, settings: ModelSpec) -> int:
        """Most bytes that a call needs on a rank in addition to the resting ones of the stage that stores most.

        ``most_rows``: of the fullest replica; settings may allow fewer that are decoded together.
        """
        kind, rows = call.kind, most_rows
        if kind not in ("generate", "forward", "train"):
            return 0
        placed = sharded.placed_with(settings)
        if kind == "generate":
            # ranks with parts of rows share these
            parts = placed.layout.dims.row_parts
            rows = parts * self._lengths.rows_decoded(placed, -(-rows // parts))
        block = self.batch.block_rows
        work = Compute(
            kind, placed.name, rows, texts=call.texts, compares=call.compares, block=block, tokens=call.tokens
        )
        most, sizes = sharded.state.resting, []
        for rank, state in zip(placed.layout.along("pp", 0), sharded.stages, strict=True):
            for phase in self._sizing.call_phases(work, placed, rank):
                sizes.append(phase.part_bytes + (state.training if phase.trains else state.resting) - most)
        return max(sizes)

    def _priced_mesh(self, placed: PlacedModel, mesh: UniformMesh) -> Mesh:
        """Return the mesh of a model as costs depend on it."""
        split, zero, shape = (placed.layout.dp, priced_dims(placed)), placed.settings.zero, self.shapes[placed.role]
        spread, over = True, placed.sharded_over
        return Mesh(mesh.device, mesh.links, *split, mesh.per_node, zero, spread, over, is_ring(placed, shape))

    def transfers(self, model: SearchModel, placed: PlacedModel) -> TransferBytes:
        """Return the bytes of a model's syncs and saves, of the stage that needs most."""
        most, under_way = [0], [0]
        if placed.trained:
            most.append(self._sizing.saving_bytes(placed, len(placed.gather_sets[0])))
        for rank in placed.layout.along("pp", 0):
            travelling = 0
            for sync in model.syncs:
                ends = (placed, self._partner(sync.partner, placed))
                source, copy = ends if placed.trained else reversed(ends)
                size, under = self._sizing.syncing_bytes(source, copy, rank, sync.overlaps)
                travelling += under
                most.append(size)
            under_way.append(travelling)
        return TransferBytes(max(under_way), max(most))

    def _partner(self, name: ModelName, placed: PlacedModel) -> PlacedModel:
        """Return the other end ``name`` of a sync of a model, as if it was whole on another device."""
        base, rollout = self.spec.models.of(name.role), self.spec.rollout
        assert base is not None, f"{name.role} is resolved"
        settings = base.of_shadow if name.copy else base
        if name.is_rollout:
            adapters = rollout.own_adapters(base)
            settings = ModelSpec(engine=rollout.engine, dtype=rollout.dtype or base.dtype, lora=adapters)
        elsewhere = Layout((len(placed.ranks),))
        return PlacedModel(name, elsewhere, not name.copy, settings, rollout if name.is_rollout else None, placed.head)

    @staticmethod
    def _key(placed: PlacedModel, mesh: UniformMesh, *settings: object) -> object:
        """Key of a model on ranks, with those of its ``settings`` that are not the same wherever these are."""
        where, layout = (mesh.size, mesh.per_node, mesh.device.name), placed.layout
        # a rollout engine's cache is allocated all the time
        cache = None if placed.rollout is None else placed.settings.generate_tokens
        return placed.role, placed.trained, where, layout.dims, cache, settings

    def _state_key(self, placed: PlacedModel, mesh: UniformMesh) -> object:
        """Key of all that the bytes of the model's state depend on."""
        return self._key(placed, mesh, placed.settings.zero, placed.sharded_over, placed.settings.offload_optimizer)

    @staticmethod
    def transfer_key(sharded: ShardedModel, mesh: UniformMesh) -> object:
        """Key of all that the bytes of the model's syncs and saves depend on: the parts of it that ranks store."""
        placed, layout = sharded.placed, sharded.placed.layout
        stored = placed.split, placed.num_shards, layout.dims.without(OF_COPIES)
        kind = placed.role, placed.trained, placed.rollout is None
        return kind, mesh.device.name, stored, sharded.side.shards

    @cached_property
    def _sizing(self) -> Sizing:
        """Bytes of any model of the spec, wherever it is."""
        lengths, own, nothing = self._lengths, self._own_lengths, Placement((), 0)
        return Sizing(
            nothing,
            self.shapes,
            lengths,
            self.spec.sync,
            own,
            on_gpus=self._cluster.has_known_classes,
            save=self.spec.save,
            has_episodes=self.spec.environment is not None,
        )

    @cached_property
    def _cluster(self) -> Cluster:
        return Cluster.of(self.spec.cluster)

    @cached_property
    def most_memory(self) -> float:
        """Bytes of the largest device; without limit if one has no known size."""
        sizes = [self._cluster.memory_bytes(self._cluster.ranks_on(name)[0]) for name in self._cluster.classes]
        return inf if None in sizes else float(max(size or 0 for size in sizes))

    @cached_property
    def _lengths(self) -> SequenceLengths:
        data, of_rows = self.spec.data, (self.batch.samples_per_prompt, self.batch.sequences)
        return SequenceLengths(data.max_prompt_tokens, data.max_response_tokens, *of_rows)

    @cached_property
    def _own_lengths(self) -> dict[str, SequenceLengths]:
        """Lengths by role, for models with a tokenizer of their own."""
        return self._lengths.of_own_tokenizers(self.spec.lengths)
