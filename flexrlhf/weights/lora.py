"""Parameters of a model with low-rank adapters, named and shaped as peft makes them (Hu et al. 2022).

A rollout engine without adapters of its own stores the same model merged: of each target one weight,
W + alpha / rank * B A, under its plain name.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from flexrlhf.config.model_settings import LoraSpec
from flexrlhf.errors import UserError, nearest
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.adapter_files import ADAPTER, MATRICES, NOT_ADAPTED
from flexrlhf.weights.expert_files import DOWN, FUSED, OF_EXPERTS
from flexrlhf.weights.model_files import SCALAR_HEAD
from flexrlhf.weights.shapes import ModelShape, Parameters

START = "start"
"""Name of a frozen copy of adapters that a run goes on training: the policy that its reference is."""
BASE = ".base_layer."
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM 0.32 has memory for."""
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_ATTENTION = ".self_attn."


def lora_candidates(parameters: Parameters) -> list[str]:
    """Return the last names of modules that can have adapters: linear layers other than embeddings and heads.

    If layers have experts these are the ones of attention: peft takes the name of any layer of an MLP for experts'.
    """
    within = _ATTENTION if is_mixture(parameters) else ""
    names = {name.split(".")[-2]: None for name, size in parameters if len(size) == 2 and within in name}
    return [name for name in names if name not in NOT_ADAPTED]


def is_mixture(parameters: Parameters) -> bool:
    """Whether layers of a model with these parameters have experts."""
    return any(name.endswith(FUSED) for name, _ in parameters)


def expert_candidates(parameters: Parameters) -> list[str]:
    """Return the last names of the experts' weights, which have adapters if they are targets by name; of experts with
    biases (gpt-oss), whose weights are transposed, none has."""
    found = {name.rpartition(".")[2] for name, _ in parameters if name.endswith(OF_EXPERTS)}
    weights = {end.rpartition(".")[2] for end in (FUSED, DOWN)}
    return sorted(found) if found <= weights else []


def with_adapters(role: str, shape: ModelShape, lora: LoraSpec, keeps_start: bool = False) -> ModelShape:
    """Return ``shape`` with adapters: A (rank, inputs) and B (outputs, rank) for each target, of experts one tensor of
    all A and one of all B.

    ``keeps_start``: whether there is a frozen copy of them. Raises UserError for targets that the model does not have.
    """
    linear, of_experts = lora_candidates(shape.parameters), expert_candidates(shape.parameters)
    candidates = [*linear, *of_experts]
    where = f" in attention{' or experts' * bool(of_experts)}" if is_mixture(shape.parameters) else ""
    if lora.targets == ():
        raise UserError(f"models.{role}.lora.targets: names no module; candidates: {', '.join(candidates)}")
    for target in lora.targets or ():
        if target not in candidates:
            raise UserError(
                f"models.{role}.lora.targets: no module {target!r}{where}{nearest(target, candidates)}; "
                f"candidates: {', '.join(candidates)}"
            )
    parameters: dict[str, tuple[int, ...]] = {}
    adapters = {SCALAR_HEAD} & {name for name, _ in shape.parameters}
    within, targets = _ATTENTION if of_experts else "", lora.targets or linear
    for name, size in shape.parameters:
        path, _, kind = name.rpartition(".")
        is_expert = kind in targets and name.endswith(OF_EXPERTS)
        if not is_expert and (path.split(".")[-1] not in targets or within not in name):
            parameters[name] = size
            continue
        parameters[name if is_expert else f"{path}.base_layer.{kind}"] = size
        if is_expert or kind == "weight":
            *experts, outputs, inputs = size
            for matrix, added in zip(MATRICES, ((lora.rank, inputs), (outputs, lora.rank)), strict=True):
                parameters[f"{path}.{matrix}.{ADAPTER}.{kind}"] = (*experts, *added)
                adapters.add(f"{path}.{matrix}.{ADAPTER}.{kind}")
                if keeps_start:
                    parameters[f"{path}.{matrix}.{START}.{kind}"] = (*experts, *added)
    return replace(shape, parameters=tuple(sorted(parameters.items())), adapters=frozenset(adapters))


def check_rank(role: str, shape: ModelShape, lora: LoraSpec) -> None:
    """Raise UserError for adapters of a higher rank than any of their layers can have. ``shape``: with adapters."""
    sizes = dict(shape.parameters)
    pairs = [(name, name.replace(MATRICES[0], MATRICES[1])) for name in shape.adapters if f".{MATRICES[0]}." in name]
    most = max((min(sizes[first][-1], sizes[second][-2]) for first, second in pairs), default=lora.rank)
    if lora.rank > most:
        raise UserError(
            f"models.{role}.lora.rank: {lora.rank}, and the layers with adapters have {most} features at most; use "
            f"{most} or less"
        )


def is_merged(model: PlacedModel, shape: ModelShape) -> bool:
    """Whether ``model`` stores the adapters of its role merged into the weights that they change."""
    return model.rollout is not None and model.settings.lora is None and bool(shape.adapters)


def adapters_to_merge(source: PlacedModel, destination: PlacedModel) -> LoraSpec | None:
    """Return the adapters of ``source`` that a rollout engine stores inside the weights that they change."""
    return source.settings.lora if destination.rollout is not None and destination.settings.lora is None else None


def shape_of(model: PlacedModel, shape: ModelShape) -> ModelShape:
    """Return the shape of a role as this copy names its parameters: a rollout engine has neither a value head nor the
    adapters of a reference.
    """
    if model.rollout is None:
        return shape
    return _of_generation(with_adapters_merged(shape) if is_merged(model, shape) else shape)


@lru_cache(maxsize=16)
def with_adapters_merged(shape: ModelShape) -> ModelShape:
    """Return ``shape`` without adapters; the weights that they change count as trained."""
    bases = {base for base, matrix in map(without_adapter, shape.names) if matrix}
    plain = [(name, size) for name, size in shape.parameters if not {*MATRICES} & set(name.split("."))]
    parameters = {name.replace(BASE, "."): size for name, size in plain}
    return replace(shape, parameters=tuple(sorted(parameters.items())), adapters=frozenset(bases))


@lru_cache(maxsize=16)
def as_vllm_allocates(role: str, shape: ModelShape, lora: LoraSpec) -> ModelShape:
    """Return ``shape``, which has the adapters of ``lora``, with the adapters that vLLM has memory for."""
    targets = (
        None if lora.targets is None else tuple(dict.fromkeys(name for each in lora.targets for name in _fused(each)))
    )
    allocated = LoraSpec(rank=rank_in_vllm(role, lora), targets=targets)
    return with_adapters(role, with_adapters_merged(shape), allocated)


def num_adapters_in_vllm(role: str, shape: ModelShape, lora: LoraSpec | None) -> int:
    """Return the adapters that a pass of vLLM adds, of all layers."""
    return 0 if lora is None else len(as_vllm_allocates(role, shape, lora).adapters) // 2


def rank_in_vllm(role: str, lora: LoraSpec) -> int:
    """Return the rank of the adapters that vLLM has memory for; rows and columns above ``lora.rank`` stay 0.

    Raises UserError for a rank that it has not.
    """
    if lora.rank > VLLM_RANKS[-1]:
        raise UserError(
            f"models.{role}.lora.rank: vLLM adds adapters of rank {VLLM_RANKS[-1]} at most, found {lora.rank}; use "
            f"{VLLM_RANKS[-1]}, or rollout.adapters: merged"
        )
    return next(rank for rank in VLLM_RANKS if rank >= lora.rank)


def _fused(target: str) -> tuple[str, ...]:
    """Return the layers that vLLM computes as one with ``target``; if one of them has an adapter it makes all."""
    return next((layers for layers in _FUSED if target in layers), (target,))


@lru_cache(maxsize=16)
def _of_generation(shape: ModelShape) -> ModelShape:
    surplus = {name for name in shape.names if name == SCALAR_HEAD or f".{START}." in name}
    if not surplus:
        return shape
    parameters = tuple((name, size) for name, size in shape.parameters if name not in surplus)
    return replace(shape, parameters=parameters, adapters=shape.adapters - surplus)


def without_adapter(name: str) -> tuple[str, str]:
    """Return the name without peft's additions, and ``lora_A`` or ``lora_B`` of a parameter of an adapter, else
    nothing.
    """
    for matrix in MATRICES:
        for adapter in (ADAPTER, START):
            if (words := f".{matrix}.{adapter}.") in name:
                return name.replace(words, "."), matrix
    return name.replace(BASE, "."), ""


def merged_from(name: str) -> tuple[str, str, str]:
    """Return the names that the merged weight ``name`` is computed from: the base weight, A and B."""
    path, _, kind = name.rpartition(".")
    if name.endswith(OF_EXPERTS):
        return name, f"{path}.lora_A.{ADAPTER}.{kind}", f"{path}.lora_B.{ADAPTER}.{kind}"
    return f"{path}{BASE}weight", f"{path}.lora_A.{ADAPTER}.weight", f"{path}.lora_B.{ADAPTER}.weight"
