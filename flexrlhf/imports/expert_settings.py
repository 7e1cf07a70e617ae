"""Settings of models with experts: expert-parallel ranks, losses of routers, router replay."""

from __future__ import annotations

import math

from flexrlhf.api import FoundModel, Sizes, model_sizes
from flexrlhf.imports.device_parts import num_training
from flexrlhf.imports.settings import JobSettings, Setting
from flexrlhf.imports.translation import DOT, Translation

NO_MEGATRON = "of a model with experts torch with shards and expert-parallel ranks stands for Megatron"

NO_SPLIT = "shards and expert-parallel ranks of torch stand for Megatron's splits"

UNKNOWN = "the model's experts are not known by its name: router_aux_loss_coef, router_z_loss_coef"


def has_experts(out: Translation) -> bool:
    """Whether the trained model is known by its name to have experts."""
    known = FoundModel.known(out.value("models.actor.init"))
    return known is not None and not known.is_llama_like


def put_expert_ranks(out: Translation, setting: Setting | None) -> None:
    """Write the ranks that share the experts of the actor and of its reference, as far as these and replicas divide."""
    if setting is None or setting.value == 1:
        return
    sizes = _sizes(out)
    if sizes is None or sizes.experts is None:
        out.drop(setting, "the model's experts are not known by its name: models.actor.ep, where it has some")
        return
    size = math.gcd(setting.value, sizes.experts.number, num_training(out) // (out.value("models.all.cp") or 1))
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
    known = FoundModel.known(out.value("models.actor.init"))
    return None if known is None else model_sizes(known.config)
