"""Shape of a model: names and sizes of its parameters, without or with low-rank adapters as peft makes them (Hu et al.
2022).

A rollout engine without adapters of its own stores the same model merged: of each target one weight,
W + alpha / rank * B A, under its plain name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from flexrlhf.config.model_settings import Dtype, LoraSpec
from flexrlhf.errors import UserError, nearest
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.decoder_sizes import Sizes
from flexrlhf.weights.parameters import HashedParameters, ParameterName, Parameters, count_elements
from flexrlhf.weights.shards import Parts, elements_on_rank, named, parts_of
from flexrlhf.weights.stored_model import StoredModel

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_ATTENTION = ".self_attn."


@dataclass(frozen=True)
class ModelShape:
    """Names and shapes of a model's parameters.

    parameters:  (name, shape), sorted by name.
    adapters:    names that are trained; empty: all are.
    sizes:       None for a family whose config uses other keys.
    window:      tokens that sliding attention reaches back; None: it reaches all.
    is_tied:     whether the embedding is also the language head.
    rope:        type of its rotary embeddings.
    activation:  of its MLPs.
    stored:      type of its files; float32 without files, and where they have several types.
    """

    parameters: Parameters
    adapters: frozenset[str] = frozenset()
    sizes: Sizes | None = None
    window: int | None = None
    is_tied: bool = False
    rope: str = "default"
    activation: str = "silu"
    stored: Dtype = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", HashedParameters(self.parameters))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash, computed once: shapes are keys of many tables, and have hundreds of parameters."""
        return hash((self.parameters, self.adapters, self.sizes))

    @cached_property
    def trained(self) -> Parameters:
        """Parameters that training changes, which are synced and saved."""
        if not self.adapters:
            return self.parameters
        return HashedParameters((name, shape) for name, shape in self.parameters if name in self.adapters)

    @cached_property
    def with_gradients(self) -> Parameters:
        """Trained parameters that the optimizer updates: all but biases of routers."""
        found = HashedParameters(
            (name, shape) for name, shape in self.trained if not ParameterName(name).is_router_bias
        )
        return self.trained if len(found) == len(self.trained) else found

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.parameters)

    @property
    def num_parameters(self) -> int:
        return count_elements(self.parameters)

    @property
    def num_trained(self) -> int:
        """Elements of the trained parameters."""
        return count_elements(self.trained)

    @property
    def lora_candidates(self) -> list[str]:
        """Last names of modules that can have adapters: linear layers other than embeddings and heads.

        If layers have experts these are the ones of attention: peft takes the name of any layer of an MLP for experts'.
        """
        within = _ATTENTION if self.is_mixture else ""
        names = {name.split(".")[-2]: None for name, size in self.parameters if len(size) == 2 and within in name}
        return [name for name in names if name not in StoredModel.NOT_ADAPTED]

    @property
    def is_mixture(self) -> bool:
        """Whether layers have experts."""
        return any(name.endswith(ParameterName.EXPERTS_IN) for name, _ in self.parameters)

    @property
    def expert_candidates(self) -> list[str]:
        """Last names of the experts' weights, which have adapters if they are targets by name; of experts with
        biases (gpt-oss), whose weights are transposed, none has."""
        found = {name.rpartition(".")[2] for name, _ in self.parameters if name.endswith(ParameterName.OF_EXPERTS)}
        weights = {end.rpartition(".")[2] for end in (ParameterName.EXPERTS_IN, ParameterName.EXPERTS_OUT)}
        return sorted(found) if found <= weights else []

    def is_merged_in(self, model: PlacedModel) -> bool:
        """Whether ``model`` stores the adapters of its role merged into the weights that they change."""
        return model.rollout is not None and model.settings.lora is None and bool(self.adapters)

    def with_adapters(self, role: str, lora: LoraSpec, keeps_start: bool = False) -> ModelShape:
        """Return the shape with adapters: A (rank, inputs) and B (outputs, rank) for each target, of experts one tensor
        of all A and one of all B.

        ``keeps_start``: whether there is a frozen copy of them. Raises UserError for targets that the model does not
        have.
        """
        linear, of_experts = self.lora_candidates, self.expert_candidates
        candidates = [*linear, *of_experts]
        where = f" in attention{' or experts' * bool(of_experts)}" if self.is_mixture else ""
        if lora.targets == ():
            raise UserError(f"models.{role}.lora.targets: names no module; candidates: {', '.join(candidates)}")
        for target in lora.targets or ():
            if target not in candidates:
                raise UserError(
                    f"models.{role}.lora.targets: no module {target!r}{where}{nearest(target, candidates)}; "
                    f"candidates: {', '.join(candidates)}"
                )
        parameters: dict[str, tuple[int, ...]] = {}
        adapters = {ParameterName.SCALAR_HEAD} & {name for name, _ in self.parameters}
        within, targets = _ATTENTION if of_experts else "", lora.targets or linear
        for name, size in self.parameters:
            path, _, kind = name.rpartition(".")
            is_expert = kind in targets and name.endswith(ParameterName.OF_EXPERTS)
            if not is_expert and (path.split(".")[-1] not in targets or within not in name):
                parameters[name] = size
                continue
            parameters[name if is_expert else f"{path}.base_layer.{kind}"] = size
            if is_expert or kind == "weight":
                *experts, outputs, inputs = size
                for matrix, added in zip(
                    ParameterName.MATRICES, ((lora.rank, inputs), (outputs, lora.rank)), strict=True
                ):
                    parameters[f"{path}.{matrix}.{ParameterName.ADAPTER}.{kind}"] = (*experts, *added)
                    adapters.add(f"{path}.{matrix}.{ParameterName.ADAPTER}.{kind}")
                    if keeps_start:
                        parameters[f"{path}.{matrix}.{ParameterName.START}.{kind}"] = (*experts, *added)
        return replace(self, parameters=tuple(sorted(parameters.items())), adapters=frozenset(adapters))

    def check_rank(self, role: str, lora: LoraSpec) -> None:
        """Raise UserError for adapters, which the shape has, of a higher rank than any of their layers can have."""
        sizes = dict(self.parameters)
        pairs = [
            (name, name.replace(ParameterName.MATRICES[0], ParameterName.MATRICES[1]))
            for name in self.adapters
            if f".{ParameterName.MATRICES[0]}." in name
        ]
        most = max((min(sizes[first][-1], sizes[second][-2]) for first, second in pairs), default=lora.rank)
        if lora.rank > most:
            raise UserError(
                f"models.{role}.lora.rank: {lora.rank}, and the layers with adapters have {most} features at most; use "
                f"{most} or less"
            )

    @cached_property
    def merged(self) -> ModelShape:
        """The shape without adapters; the weights that they change count as trained."""
        plain_names = (ParameterName(name).without_adapter for name in self.names)
        bases = {base for base, matrix in plain_names if matrix}
        plain = [(name, size) for name, size in self.parameters if not {*ParameterName.MATRICES} & set(name.split("."))]
        parameters = {name.replace(ParameterName.BASE, "."): size for name, size in plain}
        return replace(self, parameters=tuple(sorted(parameters.items())), adapters=frozenset(bases))

    @cached_property
    def _of_generation(self) -> ModelShape:
        surplus = {
            name for name in self.names if name == ParameterName.SCALAR_HEAD or f".{ParameterName.START}." in name
        }
        if not surplus:
            return self
        parameters = tuple((name, size) for name, size in self.parameters if name not in surplus)
        return replace(self, parameters=parameters, adapters=self.adapters - surplus)

    def of_copy(self, model: PlacedModel) -> ModelShape:
        """Return the shape of a role as this copy names its parameters: a rollout engine has neither a value head nor
        the adapters of a reference.
        """
        if model.rollout is None:
            return self
        return (self.merged if self.is_merged_in(model) else self)._of_generation

    def num_adapters_in_vllm(self, role: str, lora: LoraSpec | None) -> int:
        """Return the adapters that a pass of vLLM adds, of all layers."""
        return 0 if lora is None else len(self.as_vllm_allocates(role, lora).adapters) // 2

    def as_vllm_allocates(self, role: str, lora: LoraSpec) -> ModelShape:
        """Return the shape, which has the adapters of ``lora``, with the adapters that vLLM has memory for."""
        return _allocated_by_vllm(role, self, lora)

    def of_stage(self, stage: int, pp: int) -> ModelShape:
        """Return the shape with the parameters of a pipeline stage alone, of ``pp``."""
        return self if pp == 1 else _of_stage(self, stage, pp)

    def on_rank(self, model: PlacedModel, rank: int) -> ModelShape:
        """Return the shape of a role as this copy names its parameters, of the pipeline stage on ``rank``."""
        layout = model.layout
        return self.of_copy(model).of_stage(layout.index("pp", rank), layout.dims.pp)

    def parts_on(self, model: PlacedModel, rank: int, names: frozenset[str] | None = None) -> Parts:
        """Return the part of every parameter of the pipeline stage on ``rank``, by name.

        Ranks at the same position share the result. ``names``: of the parameters in question; None: all.
        """
        return parts_of(model, named(self.on_rank(model, rank).parameters, names), rank, self.sizes)

    def trained_parts(self, model: PlacedModel, rank: int, names: frozenset[str] | None = None) -> Parts:
        """Return the part on ``rank`` of each parameter that training changes, by name. ``names``: as of
        ``parts_on``."""
        parts, stored = self.parts_on(model, rank, names), self.on_rank(model, rank)
        return {name: parts[name] for name, _ in named(stored.trained, names)} if stored.adapters else parts

    def written_names(self, model: PlacedModel, rank: int) -> frozenset[str]:
        """Return the trained parameters whose part on ``rank`` this rank writes.

        Of ranks that store the same part of a parameter one writes it; they take turns.
        """
        parts = {each: self.trained_parts(model, each) for each in model.ranks}
        # of all stages: a tied embedding is on two of them
        names, written = sorted(dict.fromkeys(name for stored in parts.values() for name in stored)), set()
        for turn, name in enumerate(names):
            if name in parts[rank]:
                alike = [other for other, stored in parts.items() if stored.get(name) == parts[rank][name]]
                written |= {name} if alike[turn % len(alike)] == rank else set()
        return frozenset(written)

    def saved_type(self, model: PlacedModel) -> Dtype:
        """Return the type of ``model.settings.save_dtype``, or of the files that the model started from.

        ``auto`` is never wider than the weights that the engine exposes. Adapters come from no files: they are saved
        as they are trained.
        """
        settings = model.settings
        if settings.save_dtype != "auto":
            return settings.save_dtype
        exposed: Dtype = "float32" if model.facts.exposes_masters else settings.dtype
        return exposed if exposed != "float32" or settings.lora is not None else self.stored

    def trained_elements_on(self, model: PlacedModel, rank: int) -> int:
        """Return the elements on ``rank`` of the parameters of ``model`` that training changes."""
        return elements_on_rank(model, self.on_rank(model, rank).trained, rank, self.sizes)


@lru_cache(maxsize=16)
def _allocated_by_vllm(role: str, shape: ModelShape, lora: LoraSpec) -> ModelShape:
    """Return ``shape``, which has the adapters of ``lora``, with the adapters that vLLM has memory for."""
    targets = (
        None if lora.targets is None else tuple(dict.fromkeys(name for each in lora.targets for name in _fused(each)))
    )
    allocated = LoraSpec(rank=lora.rank_in_vllm(role), targets=targets)
    return shape.merged.with_adapters(role, allocated)


def _fused(target: str) -> tuple[str, ...]:
    """Return the layers that vLLM computes as one with ``target``; if one of them has an adapter it makes all."""
    return next((layers for layers in _FUSED if target in layers), (target,))


@lru_cache(maxsize=256)
def _of_stage(shape: ModelShape, stage: int, pp: int) -> ModelShape:
    """Return the shape of a pipeline stage, of ``pp``, which divides the number of layers.

    Stages have equally many layers. The embedding is on the first stage, and where the language head is tied to it on
    the last one, too; parameters behind the layers are on the last.
    """
    found = {name: ParameterName(name).layer for name, _ in shape.parameters}
    layers = 1 + max((layer for layer in found.values() if layer is not None), default=-1)
    assert layers % pp == 0, f"{layers} layers, pp {pp}"

    def stages(name: str) -> set[int]:
        layer = found[name]
        if layer is not None:
            return {layer * pp // layers}
        if f".{name}".endswith(ParameterName.EMBEDDING):
            return {0, pp - 1} if shape.is_tied else {0}
        return {pp - 1}

    parameters = HashedParameters((name, size) for name, size in shape.parameters if stage in stages(name))
    return replace(shape, parameters=parameters)
