"""Parameters of a model with low-rank adapters, named and shaped as peft makes them (Hu et al. 2022).

A rollout engine stores the same model merged: of each target one weight, W + alpha / rank * B A, under its plain name.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from flexrlhf.config.spec import LoraSpec
from flexrlhf.errors import UserError, nearest
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.model_files import SCALAR_HEAD
from flexrlhf.weights.shapes import ModelShape

ADAPTER = "default"
"""The name that peft gives an adapter by itself."""
BASE = ".base_layer."
_HEADS = ("embed_tokens", "lm_head", "score")


def lora_candidates(shape: ModelShape) -> list[str]:
    """Return the last names of modules that can have adapters: linear layers other than embeddings and heads."""
    names = {name.split(".")[-2]: None for name, size in shape.parameters if len(size) == 2}
    return [name for name in names if name not in _HEADS]


def with_adapters(role: str, shape: ModelShape, lora: LoraSpec) -> ModelShape:
    """Return ``shape`` with adapters: A (rank, inputs) and B (outputs, rank) for each target.

    Raises UserError for targets that the model does not have.
    """
    candidates = lora_candidates(shape)
    if lora.targets == ():
        raise UserError(f"models.{role}.lora.targets: names no module; candidates: {', '.join(candidates)}")
    for target in lora.targets or ():
        if target not in candidates:
            raise UserError(
                f"models.{role}.lora.targets: no module {target!r}{nearest(target, candidates)}; "
                f"candidates: {', '.join(candidates)}"
            )
    parameters: dict[str, tuple[int, ...]] = {}
    adapters = {SCALAR_HEAD} & {name for name, _ in shape.parameters}
    for name, size in shape.parameters:
        path, _, kind = name.rpartition(".")
        if path.split(".")[-1] not in (lora.targets or candidates):
            parameters[name] = size
            continue
        parameters[f"{path}.base_layer.{kind}"] = size
        if kind == "weight":
            outputs, inputs = size
            added = {
                f"{path}.lora_A.{ADAPTER}.weight": (lora.rank, inputs),
                f"{path}.lora_B.{ADAPTER}.weight": (outputs, lora.rank),
            }
            parameters |= added
            adapters |= set(added)
    return replace(shape, parameters=tuple(sorted(parameters.items())), adapters=frozenset(adapters))


def is_merged(model: PlacedModel, shape: ModelShape) -> bool:
    """Whether ``model`` stores the adapters of its role merged into the weights that they change."""
    return model.rollout is not None and bool(shape.adapters)


def adapters_to_merge(source: PlacedModel, destination: PlacedModel) -> LoraSpec | None:
    """Return the adapters of ``source`` that a rollout engine stores inside the weights that they change."""
    return source.settings.lora if destination.rollout is not None else None


def shape_of(model: PlacedModel, shape: ModelShape) -> ModelShape:
    """Return the shape of a role as this copy names its parameters: a rollout engine has no value head."""
    if model.rollout is None:
        return shape
    merged = with_adapters_merged(shape) if is_merged(model, shape) else shape
    return _without_scalar_head(merged) if SCALAR_HEAD in merged.names else merged


@lru_cache(maxsize=16)
def with_adapters_merged(shape: ModelShape) -> ModelShape:
    """Return ``shape`` without adapters; the weights that they change count as trained."""
    bases = {name: name.replace(BASE, ".") for name, _ in shape.parameters if BASE in name and name.endswith(".weight")}
    plain = [(name, size) for name, size in shape.parameters if not {"lora_A", "lora_B"} & set(name.split("."))]
    parameters = {name.replace(BASE, "."): size for name, size in plain}
    return replace(shape, parameters=tuple(sorted(parameters.items())), adapters=frozenset(bases.values()))


@lru_cache(maxsize=16)
def _without_scalar_head(shape: ModelShape) -> ModelShape:
    parameters = tuple((name, size) for name, size in shape.parameters if name != SCALAR_HEAD)
    return replace(shape, parameters=parameters, adapters=shape.adapters - {SCALAR_HEAD})


def merged_from(name: str) -> tuple[str, str, str]:
    """Return the names that the merged weight ``name`` is computed from: the base weight, A and B."""
    path = name.removesuffix(".weight")
    return f"{path}{BASE}weight", f"{path}.lora_A.{ADAPTER}.weight", f"{path}.lora_B.{ADAPTER}.weight"
