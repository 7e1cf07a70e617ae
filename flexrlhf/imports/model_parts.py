"""Parts of a YAML on the trained model: adapters; expert-parallel ranks, losses of routers, router replay."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from flexrlhf.api import Sizes, model_sizes
from flexrlhf.imports.device_parts import num_placed
from flexrlhf.imports.parts import names_of
from flexrlhf.imports.settings import JobSettings, Setting
from flexrlhf.imports.translation import DOT, Translation

_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
_GROUPS = {
    "self_attn": _ATTENTION,
    "mlp": _MLP,
    "linear_qkv": _ATTENTION[:3],
    "linear_proj": _ATTENTION[3:],
    "linear_fc1": _MLP[:2],
    "linear_fc2": _MLP[2:],
}
"""Modules of transformers, and of Megatron, that have several linear layers or other names."""
_OTHERS = ("embed_tokens", "lm_head", "wte", "embed_out", "output_layer", "word_embeddings")
"""Layers that have no adapters here."""
ADAPTERS = "adapters have rank, alpha and targets; there is no dropout, and nothing else is trained"
NO_MEGATRON = "of a model with experts torch with shards and expert-parallel ranks stands for Megatron"
SPLITS = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size"}
"""Settings of Megatron that split a model over ranks, by the name here."""
NO_SPLIT = "shards and expert-parallel ranks of torch stand for Megatron's splits"
UNKNOWN = "the model's experts are not known by its name: router_aux_loss_coef, router_z_loss_coef"


def put_lora(
    out: Translation,
    role: str,
    rank: Setting | None,
    alpha: Setting | None,
    targets: Setting | None,
    excluded: Setting | None = None,
    by_root: Setting | None = None,
) -> None:
    """Write adapters, if their rank is given.

    targets:   layers with adapters; None: all linear ones.
    excluded:  layers without them.
    by_root:   that the scale is alpha over the root of the rank.
    """
    if rank is None:
        return
    out.put(f"models.{role}.lora.rank", rank.value, rank)
    if alpha is not None:
        _put_scale(out, role, rank, alpha, by_root)
    names = [] if targets is None else names_of(targets.value)
    names = [] if names in (["all-linear"], ["all_linear"]) else names
    layers = list(dict.fromkeys(_layers(names)))
    if has_experts(out):  # whose projections are one layer
        layers = list(dict.fromkeys("gate_up_proj" if each in _MLP[:2] else each for each in layers))
    others = [name for name in names if name in _OTHERS or not re.fullmatch(r"\w+", name)]
    for name in others:
        key = targets.key if targets is not None else ""
        out.drop(Setting(key, name), "adapters are on linear layers by the last part of their names, not on this one")
    without = _without(out, role, layers, excluded)
    is_of_all = not names or (set(layers) == {*_ATTENTION, *_MLP} and _is_plain(out, role))
    if without is not None:
        out.put(f"models.{role}.lora.targets", without, targets, excluded)
    elif layers and not (is_of_all and any(name.startswith("linear_") for name in names)):
        out.put(f"models.{role}.lora.targets", layers, targets)
    elif targets is not None and not others:
        out.drop(targets, "adapters are on all linear layers", matters=False)


def _put_scale(out: Translation, role: str, rank: Setting, alpha: Setting, by_root: Setting | None) -> None:
    value = float(alpha.value) * (math.sqrt(rank.value) if by_root is not None else 1)
    if value == int(value) and value >= 1:
        out.put(f"models.{role}.lora.alpha", int(value), alpha, by_root, "times the root of the rank" * bool(by_root))
        return
    out.put(f"models.{role}.lora.alpha", max(1, round(value)), alpha, by_root, "the nearest whole number")
    out.drop(by_root or alpha, f"alpha is a whole number here: {value:.6g} is rounded")


def _layers(names: Iterable[str]) -> Iterable[str]:
    """Yield the linear layers that names stand for."""
    for name in names:
        if name not in _OTHERS and re.fullmatch(r"\w+", name):
            yield from _GROUPS.get(name, (name,)) if name.startswith("linear_") else (name,)


def _is_plain(out: Translation, role: str) -> bool:
    """Whether a model is known by its name to have the linear layers of Llama."""
    known = out.known_model(role)
    return known is not None and known.is_llama_like


def _without(out: Translation, role: str, layers: Sequence[str], excluded: Setting | None) -> list[str] | None:
    """Return the layers less the excluded ones; None if there are none of these, or if they are not known."""
    patterns = [] if excluded is None else names_of(excluded.value)
    if not patterns:
        return None
    plain = [re.sub(r"^\.?\*?\.?|\.?\*?$", "", pattern) for pattern in patterns]
    known = [*_ATTENTION, *_MLP, *_GROUPS, *_OTHERS, *layers]
    base = list(layers) or ([*_ATTENTION, *_MLP] if _is_plain(out, role) else [])
    found = {layer for name in plain for layer in _GROUPS.get(name, (name,))}
    left = [layer for layer in base if layer not in found]
    if not all(name in known for name in plain) or not left:
        out.drop(excluded, "adapters are on all linear layers, or on the ones in targets")
        return None
    return left


def has_experts(out: Translation) -> bool:
    """Whether the trained model is known by its name to have experts."""
    known = out.known_model("actor")
    return known is not None and not known.is_llama_like


def put_expert_ranks(out: Translation, setting: Setting | None) -> None:
    """Write the ranks that share the experts of the actor and of its reference, as far as these and replicas divide."""
    if setting is None or setting.value == 1:
        return
    sizes = _sizes(out)
    if sizes is None or sizes.experts is None:
        out.drop(setting, "the model's experts are not known by its name: models.actor.ep, where it has some")
        return
    size = math.gcd(setting.value, sizes.experts.number, num_placed(out, "actor") // (out.value("models.all.cp") or 1))
    if size == 1:
        out.drop(setting, f"it divides neither the {sizes.experts.number} experts nor the replicas")
        return
    for role in ("actor", *(["ref"] if "algorithm.kl.place" in out.lines else [])):
        out.put(f"models.{role}.ep", size, setting)


def put_router_loss(out: Translation, setting: Setting | None) -> None:
    """Write the coefficient of the loss that balances experts, as transformers has it."""
    if has_experts(out):
        out.put_real("models.actor.router_aux_loss_coef", setting)
    else:
        out.drop(setting, UNKNOWN)


def put_megatron_losses(out: Translation, job: JobSettings, prefix: str) -> None:
    """Write the losses of routers whose settings in Megatron begin with ``prefix``.

    Megatron adds up the losses of layers, each with shares of a token's choices; here they are means over tokens and
    layers, with shares of tokens.
    """
    kind = job.get(f"{prefix}moe_router_load_balancing_type")
    auxiliary, squares = (job.number(f"{prefix}moe_{name}_loss_coeff") for name in ("aux", "z"))
    sizes = _sizes(out)
    if kind is not None and kind.value == "none":
        auxiliary = None
    elif auxiliary is not None and kind is not None and kind.value not in ("aux_loss", "global_aux_loss"):
        out.drop(kind, "experts are balanced over a mini-batch here")
    if sizes is None or sizes.experts is None:
        for each in (auxiliary, squares):
            out.drop(each, UNKNOWN)
        return
    layers, active = sizes.sparse_layers, sizes.experts.active
    if auxiliary is not None:
        value = auxiliary.value * layers / active
        out.put("models.actor.router_aux_loss_coef", value, auxiliary, f"times {layers} layers over top-{active}")
    if squares is not None:
        out.put("models.actor.router_z_loss_coef", squares.value * layers, squares, f"times {layers} layers")


def put_router_replay(out: Translation, setting: Setting | None) -> bool:
    """Write that training takes the experts that generation has chosen; return whether it does."""
    if setting is None:
        return False
    if not has_experts(out):
        out.drop(setting, "the model is not known by its name to have experts: models.actor.router_replay")
        return False
    if f"placement.actor{DOT}rollout.ranks" in out.lines:
        out.drop(setting, "devices that only generate have vLLM, which returns no experts here")
        return False
    out.put("models.actor.router_replay", "rollout", setting)
    out.put("rollout.engine", "transformers", setting)
    out.note(
        "router replay needs the experts that generation chose, which vLLM does not return here, so transformers "
        "generates; to have vLLM write models.actor.router_replay: none and rollout.engine: vllm"
    )
    return True


def _sizes(out: Translation) -> Sizes | None:
    known = out.known_model("actor")
    return None if known is None else model_sizes(known.config)
