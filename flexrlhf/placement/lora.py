"""Parameters of a model with low-rank adapters, named and shaped as peft makes them (Hu et al. 2022)."""

from __future__ import annotations

from dataclasses import replace

from flexrlhf.errors import UserError, nearest
from flexrlhf.placement.shapes import ModelShape
from flexrlhf.spec import LoraSpec

ADAPTER = "default"
"""The name that peft gives an adapter by itself."""
_HEADS = ("embed_tokens", "lm_head", "score")


def lora_candidates(shape: ModelShape) -> list[str]:
    """Last names of the modules that can have adapters: linear layers other than embeddings and heads."""
    names = {name.split(".")[-2]: None for name, size in shape.parameters if len(size) == 2}
    return [name for name in names if name not in _HEADS]


def with_adapters(role: str, shape: ModelShape, lora: LoraSpec) -> ModelShape:
    """``shape`` with adapters: A (rank, inputs) and B (outputs, rank) beside each target. Raises UserError."""
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
    adapters = {"score.weight"} & {name for name, _ in shape.parameters}
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
