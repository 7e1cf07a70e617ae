"""Layouts and settings of a model that plans allow, of the ones that are tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter

from flexrlhf.api import (
    MODEL_RULES,
    Degrees,
    Layout,
    ModelName,
    ModelSpec,
    PlacedModel,
    UserError,
    check_placed_model,
    rollout_settings,
)
from flexrlhf.guideline.advice.memo import Memo
from flexrlhf.guideline.advice.sketch import SearchModel
from flexrlhf.guideline.advice.tried_settings import TriedSettings
from flexrlhf.guideline.advice.uniform_mesh import UniformMesh, layout_on_first, on_mesh, with_settings

UNTRIED = frozenset({"config", "lora", "optimizer", "shadow"})
"""Settings that are the same in all options of a model."""
CHOSEN = tuple(sorted(MODEL_RULES.subjects & ModelSpec.model_fields.keys() - UNTRIED))
"""Settings by which the options of a model may differ, and which a rule reads: their values decide what is allowed."""
_chosen = attrgetter(*CHOSEN)


@dataclass(frozen=True)
class AllowedSettings:
    """Layouts and settings of the models of a spec that plans allow.

    tried:     the settings that are tried.
    refusals:  name of a model → why a plan refuses the last of its settings that are tried and not allowed.
    memo:      results so far.
    """

    tried: TriedSettings
    refusals: dict[str, str]
    memo: Memo

    def laid_out(self, model: SearchModel, mesh: UniformMesh) -> Iterator[PlacedModel]:
        """Place the model on the first devices, once with each layout and ZeRO stage that plans allow."""
        base = self.tried.base(model, mesh)
        own = base.of_shadow if model.is_shadow else base
        for dims in self.tried.dims(model, mesh, base):
            crossing = () if model.is_rollout else own.crossing_axes
            layout = self._allowed_layout(mesh, Degrees(dims, crossing, whole_nodes=model.is_rollout))
            if layout is None:
                continue
            if model.is_rollout:
                rollout = self.tried.spec.rollout.with_dims(dims)
                settings = rollout_settings(base, layout, self.tried.spec.model_copy(update={"rollout": rollout}))
                placed = PlacedModel(model.name, layout, False, settings, rollout)
                if self.is_allowed(model, mesh, placed):
                    yield placed
                continue
            stages, by_stage = self.tried.stages(model, mesh, base, dims.parts), dict[int, list[PlacedModel]]()
            for zero, shard in product(stages, self.tried.shards(model, mesh, own)):
                change = {"zero": zero, "shard": shard, **dims._asdict()}
                sharded = self._as_set(model, mesh, layout, own.model_copy(update=change))
                if sharded is not None and self.is_allowed(model, mesh, sharded):
                    by_stage.setdefault(zero, []).append(sharded)
            # of a single replica no stage shards anything
            for zero in by_stage if dims.parts < mesh.size else [*by_stage][:1]:
                yield from by_stage[zero]

    def _allowed_layout(self, mesh: UniformMesh, degrees: Degrees) -> Layout | None:
        """Return the layout of a model on all devices of the mesh; None if a plan refuses it."""

        def made() -> tuple[Layout | None]:
            layout = layout_on_first(mesh.size, degrees.dims)
            try:
                degrees.check("", "", layout.ranks, mesh.cluster)
            except UserError:
                return (None,)
            return (layout,)

        return self.memo.cached(("layout", mesh.size, mesh.per_node, degrees), made)[0]

    def _as_set(self, model: SearchModel, mesh: UniformMesh, layout: Layout, settings: ModelSpec) -> PlacedModel | None:
        """Return the model with its state sharded as set; None if a plan refuses that."""
        try:
            return on_mesh(model, mesh, layout, settings)
        except UserError:
            return None

    def is_allowed(self, model: SearchModel, mesh: UniformMesh, placed: PlacedModel) -> bool:
        """Whether a plan allows the settings of a placed model."""
        key = self._allowed_key(model, mesh, placed)
        return self.memo.cached(("allowed", key), lambda: (self._is_checked(model, mesh, placed),))[0]

    def _allowed_key(self, model: SearchModel, mesh: UniformMesh, placed: PlacedModel) -> object:
        """Return all that ``is_allowed`` depends on."""
        chosen = _chosen(placed.settings)
        of_model = model.name, model.trained, model.operator, "generate" in model.kinds
        return of_model, mesh.device.name, placed.split, chosen

    def _is_checked(self, model: SearchModel, mesh: UniformMesh, placed: PlacedModel) -> bool:
        if model.operator:
            name, settings = ModelName.of(model.role, model.operator), placed.settings.of_copy({})
            placed = replace(placed, name=name, operator=model.operator, settings=settings)
        shape, longest = self.tried.shapes[model.role], self.tried.spec.lengths.of_role(model.role).total
        generates, on_gpus = "generate" in model.kinds, self.tried.spec.cluster.device != "cpu"
        try:
            check_placed_model(placed, shape, mesh.cluster, longest, generates, on_gpus)
        except UserError as error:
            self.refusals[model.name] = str(error)
            return False
        return True

    def passes(self, model: SearchModel, mesh: UniformMesh, plain: PlacedModel) -> tuple[ModelSpec, ...]:
        """Return the settings of ``plain`` with each of the tried passes that a plan allows."""
        rows = self.tried.pass_rows(plain.layout)
        # equal ones on most meshes
        key = "passes", model.is_lean, rows, self._allowed_key(model, mesh, plain)

        def made() -> tuple[ModelSpec, ...]:
            tried = (with_settings(plain, change) for change in self.tried.passes(model, rows))
            return tuple(each.settings for each in tried if self.is_allowed(model, mesh, each))

        return self.memo.cached(key, made)
