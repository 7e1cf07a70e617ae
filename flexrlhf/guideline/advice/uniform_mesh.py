"""Meshes of one class of devices, and models on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from flexrlhf.api import Cluster, DeviceClass, Layout, ModelSpec, ParallelDims, PlacedModel, RolloutSpec
from flexrlhf.guideline.advice.sketch import SearchModel
from flexrlhf.guideline.costs.cost_model import Links


@dataclass(frozen=True)
class UniformMesh:
    """``size`` devices of one class, ``per_node`` of them in each node."""

    size: int
    per_node: int
    device: DeviceClass

    @property
    def links(self) -> Links:
        return Links(self.device.link_gb_s, self.device.node_gb_s)

    @property
    def cluster(self) -> Cluster:
        """The devices of the mesh as a cluster of their own."""
        return _cluster(self.size, self.per_node, self.device.name)


@lru_cache(maxsize=1024)
def _cluster(size: int, per_node: int, device_class: str) -> Cluster:
    """Return such a cluster from a cache: searches try few meshes, many times."""
    return Cluster.of_equal_nodes(size, per_node, device_class)


@lru_cache(maxsize=1024)
def layout_on_first(size: int, dims: ParallelDims) -> Layout:
    """Layout on the first ``size`` devices."""
    return Layout(tuple(range(size)), dims)


def layout_of(mesh: UniformMesh, settings: ModelSpec) -> Layout:
    """Return the layout of a model with ``settings`` on all devices of the mesh."""
    return layout_on_first(mesh.size, settings.dims)


def on_mesh(
    model: SearchModel, mesh: UniformMesh, layout: Layout, settings: ModelSpec, rollout: RolloutSpec | None = None
) -> PlacedModel:
    """Place ``model`` on ``mesh``. Raises UserError if its state cannot be sharded as set."""
    placed = PlacedModel(model.name, layout, model.trained, settings, rollout, model.head)
    return placed if rollout is not None else placed.sharded_on(mesh.cluster)


def with_settings(placed: PlacedModel, change: Mapping[str, object]) -> PlacedModel:
    """The model with other settings."""
    return replace(placed, settings=changed(placed.settings, change)) if change else placed


def changed(settings: ModelSpec, change: Mapping[str, object]) -> ModelSpec:
    """Return ``settings`` with others of their fields."""
    return settings.model_copy(update=dict(change)) if change else settings
