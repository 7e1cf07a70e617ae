"""Specs of a command: every config with the overrides of the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import add
from pathlib import Path

from flexrlhf.config.run_arguments import argument_settings
from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import check_scopes, load_spec, parse_vector, split_scope
from flexrlhf.data.quickstart import config_paths
from flexrlhf.errors import UserError
from flexrlhf.operators.registry import make_graph
from flexrlhf.placement.hosts import equal_nodes


def chosen_configs(words: Sequence[Path] | None, by_option: Sequence[Path] | None) -> list[Path]:
    """Return the configs of a command, which are given as words or by ``--config``; none: the quick start's."""
    return [*(by_option or ()), *(words or ())]


def chosen_config(word: Path | None, by_option: Sequence[Path] | None) -> Path | None:
    """Return the config of a command that takes one. Raises UserError for several."""
    configs = chosen_configs(None if word is None else [word], by_option)
    if len(configs) > 1:
        raise UserError(f"--config {configs[0]}: this command takes one config, and {configs[1]} is given, too")
    return configs[0] if configs else None


def with_model_paths(
    overrides: Sequence[str] | None, actor_model_path: str | None, critic_model_path: str | None
) -> list[str]:
    """Return the settings of a command with those of its model paths, which win."""
    return [*(overrides or ()), *argument_settings({"actor": actor_model_path, "critic": critic_model_path})]


def load_specs(
    configs: Sequence[Path] | None,
    placement_ratio: str | None,
    devices: int | None,
    overrides: Sequence[str] | None,
    nnodes: int = 1,
) -> list[Spec]:
    """Load every config, or those of the quick start; ``placement: auto`` stays as it is. Raises UserError."""
    if placement_ratio is not None:
        placement_ratio = json.dumps(parse_vector(placement_ratio), default=str)
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
