"""Sizes and parameter shapes of decoders, from their Hugging Face configs, for the families whose parameters follow.

Names and shapes are those of transformers' modules: the routed experts of a layer are two tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexrlhf.config.model_families import (
    EXPERT_NUMBERS,
    FAMILIES,
    GROUPS,
    LATENT_SIZES,
    ExpertLayout,
    ModelFamily,
)
from flexrlhf.errors import shown
from flexrlhf.weights.decoder_sizes import ExpertSizes, LatentSizes, Sizes
from flexrlhf.weights.parameters import ParameterName

MAX_LAYERS = 10_000
"""Most layers whose parameters are listed; published models have at most some hundreds."""
MAX_SIZE = 2**20
"""Largest size of a model; published vocabularies have a quarter of it."""
MOST_EXPERTS = 4096
"""Most experts of a layer; published models have at most some hundreds."""


_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
"""Defaults of transformers for sizes that a config leaves out, where the family has no others."""
_OPTIONAL = (
    *("num_key_value_heads", "head_dim", "num_experts_per_tok", "use_qk_norm"),
    *("max_position_embeddings", "tie_word_embeddings"),
)
"""Settings that may follow from the others, or be left out."""
_SHARED_FFN, _SHARED_NUMBER = "shared_expert_intermediate_size", "n_shared_experts"
_FIRST_DENSE = "first_k_dense_replace"


def known_keys(family: str) -> tuple[str, ...]:
    """Return the settings of a config that the parameters of a known family follow from."""
    # a dense family with experts is refused as one
    known = ModelFamily.of(family)
    numbers = EXPERT_NUMBERS if known.experts is None else known.experts.other.split()
    return (*_DEFAULTS, *known.sizes, *numbers, *_OPTIONAL)


def attention_window(config: Mapping[str, Any]) -> int | None:
    """Return the tokens that sliding attention of a model reaches back, as transformers reads its config; None: all."""
    family = ModelFamily.of(str(config.get("model_type")))
    if family.has_switch and not config.get("use_sliding_window"):
        return None
    window = config.get("sliding_window", family.window)
    return window if isinstance(window, int) else None


def rope_type(config: Mapping[str, Any]) -> str:
    """Return the type of a model's rotary embeddings, as transformers reads its config."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = (rope.get("rope_type") or rope.get("type") or "default") if isinstance(rope, Mapping) else rope
    is_partial = isinstance(rope, Mapping) and rope.get("partial_rotary_factor", 1.0) != 1.0
    return f"{found} of a part of each head" if is_partial else str(found)


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the embedding is also the language head."""
    return bool(config.get("tie_word_embeddings"))


def model_sizes(config: Mapping[str, Any]) -> Sizes | None:
    """Return the sizes in a Hugging Face config; None for a family whose config uses other keys."""
    kind = str(config["model_type"])
    known = _with_defaults(config)
    if _wrong_size(known) is not None:
        return None
    vocabulary, hidden, ffn, layers, heads = (int(known[key]) for key in _DEFAULTS)
    family = ModelFamily.of(kind)
    latent = _latent(known) if family.attention == "latent" else None
    kv_heads = heads if latent is not None else int(known.get("num_key_value_heads") or heads)
    head_dim = latent.rotary + latent.plain if latent is not None else int(known.get("head_dim") or hidden // heads)
    return Sizes(
        *(layers, hidden, ffn, heads, kv_heads, head_dim, vocabulary),
        family=kind,
        experts=_experts(family.experts, known, layers),
        latent=latent,
        head_norms=bool(family.head_norms and known.get(family.head_norms, family.head_norms != "use_qk_norm")),
        sinks=family.attention == "sinks",
    )


def _latent(known: Mapping[str, Any]) -> LatentSizes:
    query, *others = (int(known[key] or 0) for key in LATENT_SIZES)
    return LatentSizes(query, *others)


def hidden_size(config: Mapping[str, Any]) -> int:
    """Return the hidden size in a Hugging Face config of any family."""
    return int(config.get("hidden_size") or config.get("n_embd") or _with_defaults(config)["hidden_size"])


def _with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    family = FAMILIES.get(str(config["model_type"]))
    if family is None:
        return dict(config)
    known = {**_DEFAULTS, **family.sizes, **config}
    if family.experts is not None and family.experts.other in config:
        known[family.experts.number] = config[family.experts.other]
    return known


def _experts(layout: ExpertLayout | None, known: Mapping[str, Any], layers: int) -> ExpertSizes | None:
    """Return the experts of a family that has them; None for others, and where no layer has any."""
    if layout is None:
        return None
    number, ffn = int(known[layout.number]), int(known[layout.ffn])
    step = known.get("decoder_sparse_step", 1)
    dense = {*(known.get("mlp_only_layers") or ()), *(i for i in range(layers) if (i + 1) % step)}
    dense |= {*range(int(known.get(_FIRST_DENSE) or 0))}
    dense &= {*range(layers)}
    if len(dense) == layers:
        return None
    shared = int(known.get(_SHARED_FFN) or int(known.get(_SHARED_NUMBER) or 0) * ffn)
    return ExpertSizes(number, int(known["num_experts_per_tok"]), ffn, shared, frozenset(dense))


_CAPACITIES = ("capacity_factor", "expert_capacity", "moe_capacity_factor", "moe_expert_capacity_factor")
"""Settings of systems that drop an expert's tokens beyond a number of them."""


def _wrong_size(config: Mapping[str, Any]) -> str | None:
    """Return which size of a model is invalid, and which values are valid; None if all are."""
    optional = [key for key in ("num_key_value_heads", "head_dim") if config.get(key)]
    family = ModelFamily.of(str(config.get("model_type")))
    experts = () if family.experts is None else (family.experts.number, family.experts.ffn)
    latent = [key for key in LATENT_SIZES if family.attention == "latent" and config.get(key) is not None]
    groups = GROUPS if family.experts is not None and family.experts.router_bias else ()
    keys = (*_DEFAULTS, *optional, *experts, *(("num_experts_per_tok",) if experts else ()), *latent, *groups)
    most_of = {"num_hidden_layers": MAX_LAYERS, **dict.fromkeys(experts[:1], MOST_EXPERTS)}
    for key in keys:
        value, most = config.get(key), most_of.get(key, MAX_SIZE)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            return f"{key} {shown(value)}: expected a whole number from 1 to {most}"
        if value > most:
            return f"{key} {value}: use at most {most}"
    if experts and config["num_experts_per_tok"] > config[experts[0]]:
        return f"num_experts_per_tok {config['num_experts_per_tok']}: use at most {experts[0]}, {config[experts[0]]}"
    for key in _CAPACITIES if experts else ():
        if config.get(key):
            return (
                f"{key} {shown(config[key])}: experts take all of their tokens here, and none is dropped; leave it out"
            )
    return _wrong_groups(config) if groups else None


def _wrong_groups(config: Mapping[str, Any]) -> str | None:
    """Return which number of groups of experts is invalid, as ``_wrong_size``."""
    experts, active = config["n_routed_experts"], config["num_experts_per_tok"]
    groups, taken = (config[key] for key in GROUPS)
    if experts % groups or experts < 2 * groups:
        return f"n_group {groups}: expected groups of equally many of the {experts} experts, at least 2 in each"
    if taken > groups:
        return f"topk_group {taken}: use at most n_group, {groups}"
    if active > taken * experts // groups:
        return f"num_experts_per_tok {active}: use at most {taken * experts // groups}, as many as topk_group has"
    return None


def decoder_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the parameter shapes of a causal model of a known family, under the names of transformers' modules.

    Raises ValueError for sizes that do not fit each other.
    """
    sizes = model_sizes(config)
    if sizes is None:
        raise ValueError(_wrong_size(_with_defaults(config)))
    known = _with_defaults(config)
    _check_heads(sizes, known)
    hidden = sizes.hidden
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (sizes.vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(sizes.layers):
        prefix = f"model.layers.{index}"
        attention = _attention_shapes(sizes, known)
        shapes |= {f"{prefix}.self_attn.{name}": shape for name, shape in attention.items()}
        is_sparse = sizes.experts is not None and index not in sizes.experts.dense
        mlp = _expert_shapes(sizes, sizes.experts) if is_sparse and sizes.experts else _mlp_shapes(hidden, sizes.ffn)
        shapes |= {f"{prefix}.mlp.{name}": shape for name, shape in mlp.items()}
        if ModelFamily.of(sizes.family).mlp_bias and config.get("mlp_bias"):
            shapes |= {
                f"{name.removesuffix('weight')}bias": (shape[0],)
                for name, shape in [*shapes.items()]
                if name.startswith(f"{prefix}.mlp.") and name.endswith("_proj.weight")
            }
        shapes |= {f"{prefix}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    if not is_tied(config):
        shapes[ParameterName.LANGUAGE_HEAD] = (sizes.vocabulary, hidden)
    return shapes


def _check_heads(sizes: Sizes, known: Mapping[str, Any]) -> None:
    if sizes.latent is not None and known.get("num_key_value_heads") not in (None, sizes.heads):
        raise ValueError(
            f"num_key_value_heads {known['num_key_value_heads']}: latent attention has as many as num_attention_heads, "
            f"{sizes.heads}"
        )
    if sizes.heads % sizes.kv_heads:
        raise ValueError(f"num_attention_heads {sizes.heads} is no multiple of num_key_value_heads {sizes.kv_heads}")
    if ModelFamily.of(sizes.family).even_heads and sizes.hidden % sizes.heads:
        raise ValueError(f"hidden_size {sizes.hidden} is no multiple of num_attention_heads {sizes.heads}")
    if sizes.latent is not None and sizes.latent.rotary % 2:
        raise ValueError(f"qk_rope_head_dim {sizes.latent.rotary}: expected an even number")
    if sizes.latent is None and (sizes.head_dim % 2 or not sizes.head_dim):
        raise ValueError(f"head_dim {sizes.head_dim}, or hidden_size over num_attention_heads: expected an even number")


def _attention_shapes(sizes: Sizes, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of one layer's attention."""
    if sizes.latent is not None:
        return _latent_shapes(sizes, sizes.latent, bool(config.get("attention_bias")))
    family, hidden = ModelFamily.of(sizes.family), sizes.hidden
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    has_bias = config.get(family.bias, family.is_biased) if family.bias else family.is_biased
    shapes: dict[str, tuple[int, ...]] = {"o_proj.weight": (hidden, queries)}
    for name, width in (("q", queries), ("k", keys), ("v", keys)):
        shapes[f"{name}_proj.weight"] = (width, hidden)
        if has_bias:
            shapes[f"{name}_proj.bias"] = (width,)
    if has_bias and family.output_bias:
        shapes["o_proj.bias"] = (hidden,)
    if sizes.sinks:
        shapes["sinks"] = (sizes.heads,)
    if family.head_norms == "all heads":
        shapes |= {"q_norm.weight": (hidden,), "k_norm.weight": (hidden // sizes.heads * sizes.kv_heads,)}
    elif sizes.head_norms:
        shapes |= {f"{name}_norm.weight": (sizes.head_dim,) for name in ("q", "k")}
    return shapes


def _latent_shapes(sizes: Sizes, latent: LatentSizes, has_bias: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of one layer's latent attention. ``has_bias``: of the layers to latents, and
    of the output."""
    hidden, queries = sizes.hidden, sizes.heads * sizes.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (latent.cached, hidden),
        "kv_a_layernorm.weight": (latent.key,),
        "kv_b_proj.weight": (sizes.heads * latent.expanded, latent.key),
        "o_proj.weight": (hidden, sizes.heads * latent.value),
    }
    if latent.query:
        shapes |= {
            "q_a_proj.weight": (latent.query, hidden),
            "q_a_layernorm.weight": (latent.query,),
            "q_b_proj.weight": (queries, latent.query),
        }
    else:
        shapes["q_proj.weight"] = (queries, hidden)
    if has_bias:
        biased = ("kv_a_proj_with_mqa", "o_proj", *(("q_a_proj",) if latent.query else ()))
        shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in biased}
    return shapes


def _mlp_shapes(hidden: int, ffn: int) -> dict[str, tuple[int, ...]]:
    return {"gate_proj.weight": (ffn, hidden), "up_proj.weight": (ffn, hidden), "down_proj.weight": (hidden, ffn)}


def _expert_shapes(sizes: Sizes, experts: ExpertSizes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of router, routed experts and shared ones of a layer."""
    hidden = sizes.hidden
    if sizes.sinks:  # gate and up in turn, matrices transposed
        number, features = experts.number, 2 * experts.ffn
        return {
            "router.weight": (number, hidden),
            "router.bias": (number,),
            "experts.gate_up_proj": (number, hidden, features),
            "experts.gate_up_proj_bias": (number, features),
            "experts.down_proj": (number, experts.ffn, hidden),
            "experts.down_proj_bias": (number, hidden),
        }
    shapes: dict[str, tuple[int, ...]] = {
        "gate.weight": (experts.number, hidden),
        "experts.gate_up_proj": (experts.number, 2 * experts.ffn, hidden),
        "experts.down_proj": (experts.number, hidden, experts.ffn),
    }
    layout = ModelFamily.of(sizes.family).experts
    assert layout is not None, "a family with experts"
    if layout.router_bias:
        shapes[f"gate{ParameterName.ROUTER_BIAS}"] = (experts.number,)
    is_gated = layout.gates_shared
    if experts.shared:
        name_of_shared = "shared_expert" if is_gated else "shared_experts"
        shapes |= {f"{name_of_shared}.{name}": size for name, size in _mlp_shapes(hidden, experts.shared).items()}
    if experts.shared and is_gated:
        shapes["shared_expert_gate.weight"] = (1, hidden)
    return shapes
