"""Placements that a command searches for: of ``placement: auto``, and of a YAML without a placement.

The search is limited by its work, so every machine of a job finds the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flexrlhf.api import Cluster, ModelSpec, Spec, Strategy, UserError, make_graph
from flexrlhf.guideline.advice.request_changes import OF_MODELS

if TYPE_CHECKING:
    from flexrlhf.guideline.advice.choice import Advice
    from flexrlhf.guideline.simulation.inputs import CostSource, TextLengths

LEFT_OUT_SECONDS = 3.0
"""Work of the search for a placement that is not written, in seconds that it takes on an ordinary core."""
SETTINGS = ("engine", *OF_MODELS)
"""Settings of models that a search chooses."""


def choose(spec: Spec, pending: Mapping[Path, ModelSpec], obstacle: str) -> tuple[Spec, str]:
    """Return ``spec``, which has no placement or ``auto``, with the one to use, and a text on it; as it is, without a
    text, if it needs none. A ``Chooser``."""
    is_open = "placement" not in spec.model_fields_set
    has_gpus = Cluster.of(spec.cluster).has_known_gpus(spec.cluster)
    if spec.placement != "auto" and not (is_open and (has_gpus or _is_on_cpu(spec))):
        return spec, ""
    # what follows loads numpy and the tables of costs, which most commands do without
    from flexrlhf.guideline.simulation.inputs import costs_for, lengths_for, ordinary_cpu

    source = costs_for(spec, None) if has_gpus or not is_open else ordinary_cpu(spec)
    if not is_open:
        advice = _searched(spec, source, lengths_for(spec, None, pending), pending, obstacle)
        return _chosen(spec, advice, source)
    try:
        advice = _searched(spec, source, None, pending, obstacle)
        return _chosen(spec, advice, source, has_settings=has_gpus)
    except UserError as error:
        return spec, f"{spec.name}: every model on all devices, since a search finds no placement that fits: {error}"


def _is_on_cpu(spec: Spec) -> bool:
    """Whether several models share several CPU ranks of one machine, in an engine and with settings that are
    measured."""
    cluster, models = Cluster.of(spec.cluster), [model for _, model in spec.models if model is not None]
    plain = ModelSpec()
    measured = (plain.engine, plain.dims, plain.zero)
    is_plain = [(each.engine, each.dims, each.zero) == measured for each in models]
    return (
        spec.cluster.is_on_cpu
        and (spec.rollout.engine == "auto" or not spec.rollout.has_copy)
        and all(is_plain)
        and len(cluster.devices) > 1
        and cluster.num_nodes == 1
        and len(make_graph(spec).roles) > 1
    )


def _searched(
    spec: Spec, source: CostSource, lengths: TextLengths | None, pending: Mapping[Path, ModelSpec], obstacle: str
) -> Advice:
    """Search for placements and settings of ``spec``; written settings stay. ``lengths``: None: the longest."""
    from flexrlhf.guideline.advice.advise import SECONDS, advise

    is_written = spec.placement == "auto"
    limit = SECONDS if is_written else LEFT_OUT_SECONDS
    return advise(spec, source.costs, lengths, limit, source.accuracy.tie, pending, obstacle, explains=is_written)


def _chosen(spec: Spec, advice: Advice, source: CostSource, has_settings: bool = True) -> tuple[Spec, str]:
    """Return ``spec`` with the placement to use, and a text on it. Raises UserError if nothing fits.

    ``has_settings``: whether models get settings, too, by the memory that devices have.
    """
    from flexrlhf.guideline.advice.settings_text import placement_text

    best = advice.best
    found = best.candidate.spec
    chosen = found.model_copy(update={"rollout": found.rollout.as_written})
    if not has_settings:
        names = ("placement", "schedule", "sync", "environment")
        kept = {name: getattr(found, name) for name in names}
        chosen = spec.model_copy(update=kept)
    head = "placement auto is" if spec.placement == "auto" else "placement, which is not written, is"
    # models that keep their settings have another time than the search found
    seconds = f", {best.seconds:.3g} s a step" * has_settings
    line = f"{spec.name}: {head} {placement_text(best)}, {best.candidate.strategy}{seconds} by {source.name}"
    colocated = next((item for item in advice.feasible if item.candidate.name == Strategy.COLOCATED), None)
    if colocated is not None and best.candidate.strategy != Strategy.COLOCATED:
        longer = f"{colocated.seconds:.3g}" if has_settings else f"{colocated.seconds / best.seconds:.2f} times as long"
        line += f", {longer} with every model on all devices"
    settings = "; ".join(_settings(spec, chosen))
    return chosen, f"{line}\n  with {settings}" if settings else line


def _settings(spec: Spec, chosen: Spec) -> Iterator[str]:
    """Yield the settings of models that are chosen, each value with its models."""
    models: dict[str, list[str]] = {}
    for role, model in chosen.models:
        written = spec.models.of(role) or spec.models.all
        for name in SETTINGS if isinstance(model, ModelSpec) else ():
            value = getattr(model, name)
            is_chosen = written is None or getattr(written, name) != value
            if is_chosen and value != ModelSpec.model_fields[name].default:
                models.setdefault(f"{name}: {str(value).lower()}", []).append(role)
    yield from (f"{setting} of {', '.join(roles)}" for setting, roles in models.items())
    if chosen.rollout.tp != spec.rollout.tp:
        yield f"rollout.tp: {chosen.rollout.tp}"
