"""Specs of a command: every config with the overrides of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from pathlib import Path

from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import check_scopes, load_spec, parse_vector, split_scope
from flexrlhf.data.quickstart import config_paths
from flexrlhf.operators.registry import make_graph
from flexrlhf.placement.hosts import equal_nodes


def load_specs(
    configs: Sequence[Path] | None,
    placement_ratio: str | None,
    devices: int | None,
    overrides: Sequence[str] | None,
    nnodes: int = 1,
) -> list[Spec]:
    """Load every config, or those of the quick start; ``placement: auto`` stays as it is. Raises UserError."""
    settings = tuple(overrides or ())
    if devices is not None:
        settings += (f"cluster.devices={devices}",)
    paths = list(configs or config_paths())
    general = tuple(setting for setting in settings if _role_of(setting) is None)
    specs = [load_spec(path, general) for path in paths]
    check_scopes(settings, specs)
    by_run = [_settings_for(spec, specs, settings) for spec in specs]
    # settings of models may change which roles a run has
    specs = [load_spec(path, chosen) for path, chosen in zip(paths, by_run, strict=True)]
    further = [_placement_settings(spec, placement_ratio, nnodes) for spec in specs]
    if placement_ratio is not None and not any(f"placement={placement_ratio}" in added for added in further):
        # no run has so many models: the first run's error lists the vectors that it takes
        further[0] += (f"placement={placement_ratio}",)
    return [load_spec(path, every) for path, every in zip(paths, map(add, by_run, further), strict=True)]


def _role_of(override: str) -> str | None:
    """Return ``actor`` for ``models.actor.zero=3``, which applies to every run that has that model."""
    scope, setting = split_scope(override)
    section, _, rest = setting.partition("=")[0].partition(".")
    return rest.partition(".")[0] if scope is None and section == "models" and rest else None


def _settings_for(spec: Spec, specs: Sequence[Spec], settings: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``settings`` without those of models that this run lacks and another one has."""
    roles = make_graph(spec).roles
    elsewhere = {role for other in specs for role in make_graph(other).roles} - set(roles)
    return tuple(setting for setting in settings if _role_of(setting) not in elsewhere)


def _placement_settings(spec: Spec, placement_ratio: str | None, nnodes: int) -> tuple[str, ...]:
    """Return the vector where its length fits this run, and equal nodes for a cluster without any."""
    settings: tuple[str, ...] = ()
    if placement_ratio is not None and _takes_vector(spec, parse_vector(placement_ratio)):
        settings += (f"placement={placement_ratio}",)
    if nnodes > 1 and not spec.cluster.nodes:
        settings += (f"cluster.nodes={equal_nodes(spec.cluster.devices or 1, nnodes)}",)
    return settings


def _takes_vector(spec: Spec, vector: Sequence[object]) -> bool:
    graph = make_graph(spec)
    return len(vector) in (len(graph.roles), len(graph.roles) + len(graph.trained) * graph.can_shadow)
