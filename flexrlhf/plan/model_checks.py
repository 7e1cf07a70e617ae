"""Checks of models, devices and installed libraries: sizes and machines rule out settings that an engine has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.util import find_spec
from typing import Any

from flexrlhf.config.engines import PEFT, EngineFacts, Package
from flexrlhf.config.model_families import ENCODER_DECODERS, ENCODERS, RECURRENT, UNMASKED, Families
from flexrlhf.config.model_settings import Head
from flexrlhf.errors import SettingError, UserError, either
from flexrlhf.memory.packed_rows import TextPacking
from flexrlhf.operators.columns import Lengths
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.placement.placement import Placement
from flexrlhf.plan.engine_checks import check_engine_config, check_ring
from flexrlhf.plan.model_view import PlacedView, RunFacts, SizedView
from flexrlhf.plan.size_rules import CPU_RULES, MODEL_RULES
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.shapes import read_config
from flexrlhf.weights.stored_model import StoredModel

FLASH = Package("flash_attn", "flash", "flash-attn")
LIGER = Package("liger_kernel", "liger", "liger-kernel")


def check_models(
    placement: Placement,
    shapes: Mapping[str, ModelShape],
    cluster: Cluster,
    lengths: Lengths | None = None,
    generates: Collection[str] = (),
    on_gpus: bool = True,
) -> None:
    """Raise UserError if the engine, the sizes or the devices of a model rule out one of its settings.

    ``lengths``: tokens of the run's texts; None: any. ``generates``: models that compute the operator generate.
    """
    for model in sorted(placement.models, key=lambda model: model.follows):
        longest = None if lengths is None else lengths.of_role(model.role).total
        check_placed_model(model, shapes.get(model.role), cluster, longest, model.name in generates, on_gpus)
    check_ring(placement)


def check_placed_model(
    model: PlacedModel,
    shape: ModelShape | None,
    cluster: Cluster,
    longest: int | None,
    generates: bool,
    on_gpus: bool,
) -> None:
    """Raise UserError if the engine, the sizes or the devices of one placed model rule out one of its settings.

    Plans call it for all their models, and advice for the settings that it tries. Which degrees fit which ranks is
    checked where layouts are made (``placement/place.py``).

    shape:      None: unknown.
    longest:    tokens of the longest text that it reads; None: any.
    generates:  whether it computes the operator generate.
    on_gpus:    whether its devices are GPUs.
    """
    view = PlacedView(model, shape, longest, cluster, RunFacts(generates, on_gpus))
    if model.head == "both" and view.decoder.family not in Families.LLAMA_LIKE:
        raise UserError(
            f"models.{model.role}: only {', '.join(Families.LLAMA_LIKE)} models can share a trunk between policy and "
            f"values, found {view.decoder.family}; use one of these, or a separate critic"
        )
    MODEL_RULES.check(view)
    check_engine_config(model)


def check_device(placement: Placement, shapes: Mapping[str, ModelShape], device: str) -> None:
    """Raise UserError for a setting that an engine does not support on ``device``, ``cpu`` or ``cuda``."""
    if device != "cpu":
        return
    for model in placement.models:
        CPU_RULES.check(SizedView(model, shapes.get(model.role), longest=None))
        module = model.facts.cpu_module
        if module and find_spec(module) is None:
            raise model.refusal(
                "engine",
                f"{model.engine} runs on GPUs; on CPUs it needs the module {module} of this "
                f"repository's tests/{model.engine}_on_cpu on PYTHONPATH; use {either(EngineFacts.full_engines())}",
            )


def check_run_engines(placement: Placement, shapes: Mapping[str, ModelShape]) -> None:
    """Raise UserError for a model that its engine does not run, though it is planned."""
    for model in placement.models:
        sizes = shapes[model.role].sizes if model.role in shapes else None
        if not model.facts.renews_latent and sizes is not None and sizes.latent is not None:
            raise SettingError.of(
                "rollout",
                "engine",
                f"{model.engine} is planned and not run for {sizes.family} models, since it computes "
                f"latent attention with copies of weights, which a sync would not renew; use transformers",
            )


def check_packages(placement: Placement) -> None:
    """Raise UserError for a library that the run needs and that is not installed on this machine."""
    for model in placement.models:
        is_choice = model.rollout is not None and "engine" not in model.rollout.model_fields_set
        engine = f"engine {model.engine}" + (", chosen by auto," if is_choice else "")
        packages = {engine: model.facts.package}
        if model.settings.lora is not None:
            packages["lora"] = PEFT
        if StoredModel(model.settings.path).has_adapters:
            packages["the adapters in its path"] = PEFT
        packages |= _packages_of_kernels(model)
        for feature, package in packages.items():
            if package is not None and not _is_installed(package.module):
                section = f"models.{model.role}" if model.rollout is None else "rollout"
                without_gpu = f", on CPUs 'flexrlhf[{package.cpu_build}]'" if package.cpu_build else ""
                instead = ", or write rollout.engine: transformers" if is_choice and feature == engine else ""
                raise UserError(
                    f"{section}: {feature} needs the package {package.module}, which is not installed; "
                    f"pip install 'flexrlhf[{package.extra}]'{without_gpu}{instead}"
                )


def _is_installed(module: str) -> bool:
    """Whether a module can be imported; of one inside a package, the package has to be there, too."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _packages_of_kernels(model: PlacedModel) -> dict[str, Package | None]:
    """Return the library of each kernel by the setting that needs it; torch has flash attention by lengths."""
    settings = model.settings
    packages: dict[str, Package | None] = {}
    if settings.attention == "flash_attention_2":
        family = read_config(model.role, settings)["model_type"]
        if not TextPacking.has_lengths(family, settings.attention):
            packages[f"attention flash_attention_2 of {family}"] = FLASH
    if settings.liger:
        packages["liger"] = LIGER
    return packages


def check_family(role: str, config: dict[str, Any], head: Head, is_sampled: bool) -> None:
    """Raise UserError for a family that cannot serve as ``role``.

    ``is_sampled``: whether it is a policy whose sampled log-probs have to be those that it is trained with.
    """
    kind = str(config["model_type"])
    if kind in ENCODER_DECODERS.split() or config.get("is_encoder_decoder"):
        raise UserError(f"models.{role}: {kind} is an encoder-decoder; use a decoder, such as llama")
    if kind in ENCODERS.split() and not config.get("is_decoder"):
        purpose = "of scores at every token" if head == "scalar" else "that writes from left to right"
        raise UserError(f"models.{role}: {kind} reads in both directions; use a model {purpose}, such as llama")
    if kind in UNMASKED.split():
        raise UserError(f"models.{role}: {kind} reads padding as text; use a model with attention, such as llama")
    if kind in RECURRENT.split() and is_sampled:
        raise UserError(
            f"models.{role}: {kind} has a recurrent state, which decoding here does not keep, so it would sample from "
            f"another distribution than it is trained on; use a model with attention, such as llama, or "
            f"guards.sampled_logprobs: warn"
        )
