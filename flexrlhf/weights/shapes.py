"""Parameter shapes of a model before it is loaded, from which bytes are planned.

They are computed from ``config.json`` or ``init`` for the Llama-like families, with which safetensors files have to
agree, else read from the header of these files. Names are transformers'.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from flexrlhf.config.model_names import LLAMA_LIKE
from flexrlhf.config.model_settings import Dtype, Head, ModelSpec
from flexrlhf.config.user_paths import instead_of
from flexrlhf.errors import UserError, nearest, shown
from flexrlhf.weights.adapter_files import base_model, has_adapters
from flexrlhf.weights.model_files import (
    SCALAR_HEAD,
    StoredTensor,
    check_scalar_head,
    check_stored,
    stored_tensors,
)

DTYPE_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number in memory, whatever the dtype of the file."""
_STORED_TYPES: dict[str, Dtype] = {"BF16": "bfloat16", "F16": "float16"}
"""Type of a file's tensors as safetensors names it."""
MAX_LAYERS = 10_000
"""Most layers whose parameters are listed; published models have at most some hundreds."""
MAX_SIZE = 2**20
"""Largest size of a model; published vocabularies have a quarter of it."""
LANGUAGE_HEAD = "lm_head.weight"

Parameters = tuple[tuple[str, tuple[int, ...]], ...]


class HashedParameters(tuple[tuple[str, tuple[int, ...]], ...]):
    """Parameters whose hash is computed once: they are keys of many tables, and there are hundreds."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of a dense decoder, from which its parameters, activations, caches and costs follow.

    layers:      decoder layers.
    hidden:      hidden size.
    ffn:         inner size of the feed-forward block.
    heads:       query heads.
    kv_heads:    key-value heads.
    head_dim:    size of a head.
    vocabulary:  rows of the embedding.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def by_name(self) -> dict[str, Any]:
        """Sizes of this class alone, by name."""
        return {size.name: getattr(self, size.name) for size in fields(DecoderSizes)}


@dataclass(frozen=True)
class Sizes(DecoderSizes):
    """Sizes of a decoder of a known ``family``, the ``model_type`` of its config."""

    family: str


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
    def names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.parameters)

    @property
    def num_parameters(self) -> int:
        return count_elements(self.parameters)


@lru_cache(maxsize=256)
def first_equal(shape: ModelShape) -> ModelShape:
    """Return the first shape that equals ``shape``, so that tables with shapes as keys need not compare parameters."""
    return shape


def attention_window(config: Mapping[str, Any]) -> int | None:
    """Return the tokens that sliding attention of a model reaches back, as transformers reads its config; None: all."""
    kind = config.get("model_type")
    if kind in ("qwen2", "qwen3") and not config.get("use_sliding_window"):
        return None
    window = config.get("sliding_window", _WINDOWS.get(str(kind)))
    return window if isinstance(window, int) else None


def rope_type(config: Mapping[str, Any]) -> str:
    """Return the type of a model's rotary embeddings, as transformers reads its config."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = (rope.get("rope_type") or rope.get("type") or "default") if isinstance(rope, Mapping) else rope
    is_partial = isinstance(rope, Mapping) and rope.get("partial_rotary_factor", 1.0) != 1.0
    return f"{found} of a part of each head" if is_partial else str(found)


@lru_cache(maxsize=256)
def count_elements(parameters: Parameters) -> int:
    """Return the number of elements of all ``parameters``."""
    return sum(math.prod(shape) for _, shape in parameters)


def read_config(role: str, model: ModelSpec) -> dict[str, Any]:
    """Return the Hugging Face config of a role. Raises UserError where there is none, and for a mixture of
    experts or quantised weights.
    """
    config = model.init if model.init is not None else _config_file(role, base_model(role, model).path)
    if not config.get("model_type") or not isinstance(config["model_type"], str):
        raise UserError(f"models.{role}: the config has no model_type, such as {', '.join(LLAMA_LIKE)}")
    if model.init is not None and config["model_type"] in LLAMA_LIKE:
        # the rest is for transformers, which takes the default of a size that it does not find
        known = (*_DEFAULTS, "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings")
        misspelt = next((key for key in config.keys() - {*known} if nearest(str(key), known)), None)
        if misspelt is not None:
            raise UserError(f"models.{role}.init: unknown key {misspelt!r}{nearest(str(misspelt), known)}")
    quantised = config.get("quantization_config") or config.get("compression_config")
    if quantised:
        method = quantised.get("quant_method", "unnamed") if isinstance(quantised, dict) else quantised
        raise UserError(
            f"models.{role}: its weights are quantised ({method}), which is not supported; give them in 16 or 32 bits"
        )
    experts = next((key for key in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(key)), None)
    if experts or "moe" in str(config.get("model_type", "")) or config.get("model_type") == "mixtral":
        raise UserError(
            f"models.{role}: {config.get('model_type')} is a mixture-of-experts model ({experts or 'by its type'}), "
            f"which is not supported; use a dense one"
        )
    return config


def _config_file(role: str, path: str | None) -> dict[str, Any]:
    if path is None:
        raise UserError(f"models.{role}: give a path (a Hugging Face model directory) or init (a config)")
    directory = Path(path)
    if not directory.is_dir():
        raise UserError(f"models.{role}.path {path}: no such directory{instead_of(directory, Path.is_dir)}")
    file = directory / "config.json"
    if not file.is_file():
        raise UserError(f"models.{role}.path {path}: no config.json in it, so it is no Hugging Face model directory")
    try:
        config = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise UserError(f"models.{role}.path {path}: its config.json is not JSON ({error})") from None
    except OSError as error:
        raise UserError(f"models.{role}.path {path}: its config.json cannot be read ({error.strerror})") from None
    if not isinstance(config, dict):
        raise UserError(f"models.{role}.path {path}: its config.json contains {type(config).__name__}, not a mapping")
    return config


def model_shape(role: str, model: ModelSpec, head: Head = "causal", new_head: bool = True) -> ModelShape | None:
    """Return the shape of ``role``; None for an architecture whose parameters are known only when it is loaded.

    ``new_head``: whether files may lack a scalar head, which is then random. Raises UserError for a config that is
    missing or does not fit the head, and for files that do not fit the config.
    """
    new_head = new_head or has_adapters(model.path)
    model = base_model(role, model)
    config = read_config(role, model)
    stored = stored_tensors(f"models.{role}.path", Path(model.path)) if model.path is not None else {}
    computed = _computed_shapes(role, config)
    if not stored and computed is None:
        return None
    if head != "scalar" and SCALAR_HEAD in stored and LANGUAGE_HEAD not in stored and not _is_tied(config):
        raise UserError(f"models.{role}.path {model.path}: a reward model without a language head; use a causal model")
    if stored:
        _check_files(f"models.{role}.path {model.path}", stored, computed, head, config, new_head)
    shapes = {name: tensor.shape for name, tensor in stored.items()} if computed is None else computed
    parameters = tuple(sorted(_with_head(shapes, head, config).items()))
    is_tied = head != "scalar" and _is_tied(config)
    return ModelShape(
        parameters,
        sizes=model_sizes(config),
        window=attention_window(config),
        is_tied=is_tied,
        rope=rope_type(config),
        activation=str(config.get("hidden_act") or "silu"),
        stored=stored_type(stored),
    )


def stored_type(stored: Mapping[str, StoredTensor]) -> Dtype:
    """Return the type that all tensors of a model's files have; float32 for several types, or float64."""
    types = {tensor.dtype for tensor in stored.values()}
    return _STORED_TYPES.get(types.pop(), "float32") if len(types) == 1 else "float32"


def _computed_shapes(role: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes that follow from the config alone; None for a family without such a rule."""
    if config.get("model_type") not in LLAMA_LIKE:
        return None
    try:
        return llama_like_shapes(config)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"models.{role}: the config is not one of {config['model_type']} ({error})") from None


def _check_files(
    key: str,
    stored: dict[str, StoredTensor],
    computed: dict[str, tuple[int, ...]] | None,
    head: Head,
    config: dict[str, Any],
    new_head: bool,
) -> None:
    """Raise UserError for files that lack a tensor of the config or the head, or have it in another shape or type."""
    optional = {SCALAR_HEAD} if new_head else set()
    if computed is not None:
        check_stored(key, stored, _with_head(computed, head, config), optional)
    elif head != "causal":
        check_scalar_head(key, stored, new_head)


def _is_tied(config: dict[str, Any]) -> bool:
    return bool(config.get("tie_word_embeddings"))


def _with_head(shapes: dict[str, tuple[int, ...]], head: Head, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return ``shapes`` with the head: a scalar head replaces the vocabulary head or is added to it; a causal model has
    none.
    """
    shapes = dict(shapes)
    if head == "scalar" or _is_tied(config):
        shapes.pop(LANGUAGE_HEAD, None)
    if head == "causal":
        shapes.pop(SCALAR_HEAD, None)
    else:
        shapes[SCALAR_HEAD] = (1, config.get("hidden_size") or config.get("n_embd") or _DEFAULTS["hidden_size"])
    return shapes


_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
"""Defaults of transformers for sizes that a config leaves out; below, by family."""
_DEFAULTS_OF: dict[str, dict[str, int]] = {
    "llama": {},
    "mistral": {"intermediate_size": 14336, "num_key_value_heads": 8},
    "qwen2": {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32},
    "qwen3": {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "head_dim": 128},
}
_WINDOWS = {"mistral": 4096, "qwen2": 4096, "qwen3": 4096}
"""Windows of transformers for configs that leave them out."""


def model_sizes(config: dict[str, Any]) -> Sizes | None:
    """Return the sizes in a Hugging Face config; None for a family whose config uses other keys."""
    kind = str(config["model_type"])
    known = {**_DEFAULTS, **_DEFAULTS_OF[kind], **config} if kind in LLAMA_LIKE else config
    if _wrong_size(known) is not None:
        return None
    vocabulary, hidden, ffn, layers, heads = (int(known[key]) for key in _DEFAULTS)
    kv_heads = int(known.get("num_key_value_heads") or heads)
    head_dim = int(known.get("head_dim") or hidden // heads)
    return Sizes(layers, hidden, ffn, heads, kv_heads, head_dim, vocabulary, family=kind)


def _wrong_size(config: dict[str, Any]) -> str | None:
    """Return which size of a model is invalid, and which values are valid; None if all are."""
    optional = [key for key in ("num_key_value_heads", "head_dim") if config.get(key)]
    for key in (*_DEFAULTS, *optional):
        value, most = config.get(key), MAX_LAYERS if key == "num_hidden_layers" else MAX_SIZE
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            return f"{key} {shown(value)}: expected a whole number from 1 to {most}"
        if value > most:
            return f"{key} {value}: use at most {most}"
    return None


def llama_like_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the parameter shapes of a dense Llama, Mistral, Qwen2 or Qwen3 causal model under transformers' names."""
    sizes = model_sizes(config)
    if sizes is None:
        raise ValueError(_wrong_size({**_DEFAULTS, **config}))
    if sizes.heads % sizes.kv_heads:
        raise ValueError(f"num_attention_heads {sizes.heads} is no multiple of num_key_value_heads {sizes.kv_heads}")
    if sizes.family == "llama" and sizes.hidden % sizes.heads:
        raise ValueError(f"hidden_size {sizes.hidden} is no multiple of num_attention_heads {sizes.heads}")
    if sizes.head_dim % 2 or not sizes.head_dim:
        raise ValueError(f"head_dim {sizes.head_dim}, or hidden_size over num_attention_heads: expected an even number")
    kind, hidden, ffn, heads, head_dim = sizes.family, sizes.hidden, sizes.ffn, sizes.heads, sizes.head_dim
    vocabulary, kv_heads = sizes.vocabulary, sizes.kv_heads
    attention_bias = kind in ("llama", "qwen3") and config.get("attention_bias")
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(sizes.layers):
        prefix = f"model.layers.{index}"
        for name, width in (("q", heads * head_dim), ("k", kv_heads * head_dim), ("v", kv_heads * head_dim)):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (width, hidden)
            if kind == "qwen2" or attention_bias:
                shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (width,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, heads * head_dim)
        if attention_bias:
            shapes[f"{prefix}.self_attn.o_proj.bias"] = (hidden,)
        if kind == "qwen3":
            shapes |= {f"{prefix}.self_attn.{name}_norm.weight": (head_dim,) for name in ("q", "k")}
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, ffn)
        if kind == "llama" and config.get("mlp_bias"):
            widths = {"gate": ffn, "up": ffn, "down": hidden}
            shapes |= {f"{prefix}.mlp.{name}_proj.bias": (width,) for name, width in widths.items()}
        shapes |= {f"{prefix}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    if not _is_tied(config):
        shapes[LANGUAGE_HEAD] = (vocabulary, hidden)
    return shapes
