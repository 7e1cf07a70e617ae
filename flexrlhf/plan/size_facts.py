"""Facts of a placed model's sizes and devices, which rules read by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, islice
from typing import Self

from flexrlhf.config.engines import Split
from flexrlhf.config.model_families import Families, ModelFamily
from flexrlhf.config.model_settings import Head, ModelSpec
from flexrlhf.errors import either
from flexrlhf.memory.packed_rows import TextPacking
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.decoder_sizes import Sizes
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.parameters import ParameterName
from flexrlhf.weights.shapes import read_config

FLASH_CAPABILITY = 8.0
"""Least compute capability that FlashAttention 2 supports: Ampere."""
MAPPED_ROPES = ("default", "linear", "llama3")
MAPPED_ACTIVATION = "silu"
"""Rotary angles and activation that engines without transformers' modules compute."""
KEY_HEADS = "key-value heads"
FIXED = {"attention_bias": True, "rms_norm_eps": 1e-5, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Settings of gpt-oss that vLLM does not read."""

UNKNOWN = Sizes(0, 0, 0, 0, 1, 0, 0, family="an unknown family")
"""Sizes of a model whose config does not give them."""


@dataclass(frozen=True)
class RoleFacts:
    """Facts of a placed model that follow from its role.

    name:     of the role.
    trained:  whether it has an optimizer.
    follows:  whether its weights come from another copy.
    head:     its outputs.
    split:    how its replicas store weights.
    placed:   name by which a placement has it.
    is_rollout: whether it is a rollout engine.
    """

    name: str
    trained: bool
    follows: bool
    head: Head
    split: Split
    placed: str
    is_rollout: bool

    @classmethod
    def of(cls, model: PlacedModel) -> Self:
        """Return the facts of a placed model."""
        is_rollout = model.rollout is not None
        own = model.role, model.trained, model.follows, model.head, model.split
        return cls(*own, model.role if is_rollout else model.name, is_rollout)


@dataclass(frozen=True)
class SizeFacts:
    """Facts of the architecture and the sizes of a placed model. They have no layout, which a search chooses later.

    _settings:  settings of the model.
    _role:      facts of its role.
    _shape:     its parameters; None: unknown.
    longest:    tokens of the longest text that it reads; None: any.
    """

    _settings: ModelSpec
    _role: RoleFacts
    _shape: ModelShape | None
    longest: int | None

    @cached_property
    def decoder(self) -> Sizes:
        sizes = None if self._shape is None else self._shape.sizes
        return UNKNOWN if sizes is None else sizes

    @property
    def are_known(self) -> bool:
        return self._shape is not None

    @cached_property
    def experts(self) -> int:
        """Experts of a layer; 0: it has none."""
        return 0 if self.decoder.experts is None else self.decoder.experts.number

    @property
    def have_experts(self) -> bool:
        return self.experts > 0

    @property
    def cpu_head_dims_text(self) -> str:
        return either(self._settings.facts.cpu_head_dims)

    @property
    def own_heads(self) -> int:
        """Query heads of a tensor-parallel rank."""
        return self.decoder.heads // self._settings.tp

    @property
    def on_each(self) -> str:
        """Words that follow a size of one tensor-parallel rank, if there are several."""
        tp = self._settings.tp
        return "" if tp == 1 else f" on each of {tp} tensor-parallel ranks"

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding, padded as the engine pads them."""
        multiple = max(1, self._settings.facts.vocabulary_multiple)
        return -(-self.decoder.vocabulary // multiple) * multiple

    @property
    def padding(self) -> str:
        facts = self._settings.facts
        return f"padded by {facts.name}" if facts.vocabulary_multiple > 1 else "not padded here"

    @cached_property
    def split(self) -> Mapping[str, int]:
        """Sizes that tensor parallelism splits, by name; a rank has whole experts."""
        sizes = self.decoder
        split, experts = {"heads": sizes.heads, KEY_HEADS: sizes.kv_heads}, sizes.experts
        if experts is None or experts.dense:
            split["MLP features"] = sizes.ffn
        if experts is not None:
            split["experts"] = experts.number
        if experts is not None and experts.shared:
            split["features of shared experts"] = experts.shared
        return split

    @property
    def split_text(self) -> str:
        return either((f"{size} {name}" for name, size in self.split.items()), "and")

    @property
    def tensor_families(self) -> tuple[str, ...]:
        """Families with a tensor-parallel plan in the model's engine."""
        facts = self._settings.facts
        if facts.transformers_modules:
            return Families.LLAMA_LIKE + (Families.WITH_SPLIT_EXPERTS if "ep" in facts.axes else ())
        return Families.STAGED if not self._role.is_rollout else Families.SERVED + Families.LATENT

    @property
    def tensor_families_text(self) -> str:
        return ", ".join(self.tensor_families)

    @property
    def mixed_layers(self) -> tuple[int, ...]:
        """Layers with experts, by number."""
        experts, layers = self.decoder.experts, range(self.decoder.layers)
        return () if experts is None else tuple(layer for layer in layers if layer not in experts.dense)

    @property
    def mixed_stages(self) -> int:
        """Pipeline stages with a layer with experts."""
        return len({layer * self._settings.pp // self.decoder.layers for layer in self.mixed_layers})

    @cached_property
    def adapt_experts(self) -> bool:
        return self._shape is not None and any(ParameterName(name).is_of_experts for name in self._shape.adapters)

    @property
    def adapted_experts(self) -> str:
        """Targets of adapters that are weights of experts."""
        lora = self._settings.lora
        targets = () if lora is None or self._shape is None else lora.targets or ()
        return ", ".join(sorted({*targets} & {*(self._shape.expert_candidates if self._shape is not None else ())}))

    @property
    def window(self) -> int | None:
        return None if self._shape is None else self._shape.window

    @property
    def slide(self) -> bool:
        """Whether sliding attention is shorter than a text."""
        return self.window is not None and self.window < (self.longest or 0)

    @property
    def in_slots(self) -> bool:
        """Whether rows are decoded in slots, rather than in waves; where texts have any length they may be."""
        if self.longest is None:
            return True
        of_model = self.decoder.family, self._settings.attention, self.window, self.longest
        return TextPacking.of_family(*of_model, packs=True).in_slots

    @property
    def rope(self) -> str:
        """Type of rotary embeddings."""
        return "default" if self._shape is None else self._shape.rope

    @property
    def unmapped(self) -> str:
        """Part of a model of a mapped family that an engine without transformers' modules does not compute."""
        if self.slide:
            return f"sliding attention, of {self.window} tokens in this model, whose texts have up to {self.longest}"
        if self.rope not in MAPPED_ROPES:
            return f"rotary embeddings of type {self.rope}, only {either(MAPPED_ROPES)}"
        if self._shape is not None and self._shape.activation != MAPPED_ACTIVATION:
            return f"MLPs with {self._shape.activation}, only {MAPPED_ACTIVATION}"
        return self._biases

    @property
    def _biases(self) -> str:
        """Biases that are not mapped, by the setting of the config; queries, keys and values of qwen2 are."""
        biases = [
            name for name, _ in (self._shape.parameters if self._shape is not None else ()) if name.endswith(".bias")
        ]
        if any(".mlp." in name for name in biases):
            return "biases in MLPs (mlp_bias)"
        family = ModelFamily.of(self.decoder.family)
        if not (family.staged and family.is_biased) and any(".self_attn." in name for name in biases):
            return "biases in attention (attention_bias)"
        return ""

    @property
    def unserved(self) -> str:
        """Setting of gpt-oss with another value than the one that vLLM computes with, in words."""
        if self.decoder.family not in Families.WITH_SINKS:
            return ""
        config = read_config(self._role.name, self._settings)
        kinds = config.get("layer_types") or ()
        fixed = {**FIXED, "layer_types": [*islice(cycle(("sliding_attention", "full_attention")), len(kinds))]}
        found = (key for key, value in fixed.items() if config.get(key, value) not in (value, None))
        key = next(found, "")
        return f"{key} {fixed[key]} alone, and models.{self._role.name} has {config[key]}" if key else ""


@dataclass(frozen=True)
class DeviceFacts:
    """Facts of a placed model's devices: each names a class that lacks something, with its first rank; empty: none.

    _model:    the placed model.
    _cluster:  its devices.
    """

    _model: PlacedModel
    _cluster: Cluster

    @property
    def without_bfloat16(self) -> str:
        return self._lacking(lambda figures: not figures.bf16)

    @property
    def without_engine(self) -> str:
        return self._lacking(lambda figures: figures.capability < self._model.facts.least_capability)

    @property
    def without_flash(self) -> str:
        return self._lacking(lambda figures: figures.capability < FLASH_CAPABILITY)

    def _lacking(self, lacks: Callable[[DeviceClass], bool]) -> str:
        return next((f"{name} (rank {rank})" for name, rank, figures in self._classes if lacks(figures)), "")

    @cached_property
    def _classes(self) -> tuple[tuple[str, int, DeviceClass], ...]:
        """Known device classes of the model, each with the first rank on it."""
        first: dict[str, int] = {}
        for rank in self._model.ranks:
            first.setdefault(self._cluster.devices[rank].device_class, rank)
        known = DeviceClass.KNOWN
        return tuple((name, rank, known[name]) for name, rank in first.items() if name in known)
