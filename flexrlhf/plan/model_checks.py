"""Checks of models, devices and installed libraries: sizes and machines rule out settings that an engine has."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import cycle, islice
from typing import Any

from flexrlhf.config.axes import AXES
from flexrlhf.config.engines import PEFT, EngineFacts, Package
from flexrlhf.config.model_names import Families
from flexrlhf.config.model_settings import Head, ModelSpec
from flexrlhf.errors import SettingError, UserError, either
from flexrlhf.memory.packed_rows import TextPacking
from flexrlhf.operators.columns import Lengths
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.placement.placement import Placement
from flexrlhf.plan.engine_checks import check_replayed_passes, check_ring, check_settings, engines_with
from flexrlhf.weights.decoder_sizes import Sizes
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.parameters import ParameterName
from flexrlhf.weights.shapes import read_config
from flexrlhf.weights.stored_model import StoredModel

FLASH = Package("flash_attn", "flash", "flash-attn")
FLASH_CAPABILITY = 8.0
"""Least compute capability that FlashAttention 2 supports: Ampere."""
LIGER = Package("liger_kernel", "liger", "liger-kernel")
ON_GPUS = ("flash_attention_2", "flex_attention")
"""Kernels of attention that have a backward pass on GPUs alone."""
MAPPED_ROPES = ("default", "linear", "llama3")
KEY_HEADS = "key-value heads"
HOST_ROPES = ("dynamic", "longrope")
"""Rotary embeddings for which transformers reads the longest position on the host in each pass."""
_PLAIN = ModelSpec()
FIXED = {"attention_bias": True, "rms_norm_eps": 1e-5, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Settings of gpt-oss that vLLM does not read."""
MAPPED_ACTIVATION = "silu"
"""Rotary angles and activation that engines without transformers' modules compute."""


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
    on_gpus: bool = True,
) -> None:
    """Raise UserError if the engine, the sizes or the devices of one placed model rule out one of its settings.

    Plans call it for all their models, and advice for the settings that it tries. Which degrees fit which ranks is
    checked where layouts are made (``placement/place.py``).

    shape:      None: unknown.
    longest:    tokens of the longest text that it reads; None: any.
    generates:  whether it computes the operator generate.
    on_gpus:    whether its devices are GPUs.
    """
    check_settings(model)
    if generates and model.settings.cuda_graphs:
        check_replayed_passes(model)
    if on_gpus:
        _check_capabilities(model, cluster)
    _check_dtype(model, cluster)
    if model.rollout is not None and not model.facts.transformers_modules:
        _check_served(model, shape)
    if model.head == "both":
        _check_shared_trunk(model, shape)
    if model.rollout is None:
        _check_modules(model, shape)
    if model.rollout is None and not model.facts.transformers_modules:
        _check_mapped(model, shape, longest or 0)
    if model.settings.cuda_graphs and longest is not None:
        _check_graphs(model, shape, longest)
    _check_routers(model, shape)
    if shape is None:
        _check_unknown_shape(model)
    else:
        _check_split(model, shape, longest or 0)


def _check_served(model: PlacedModel, shape: ModelShape | None) -> None:
    """Raise UserError for a model whose weights cannot be mapped to the fused tensors of a rollout engine."""
    if shape is None or shape.sizes is None or shape.sizes.family not in Families.SERVED + Families.LATENT:
        raise SettingError.of(
            "rollout",
            "engine",
            f"{model.engine} supports only {', '.join(Families.SERVED)} models here, and "
            f"models.{model.role} is of another family; use transformers",
        )
    if shape.sizes.experts is not None and model.settings.lora is not None:
        raise SettingError.of(
            "rollout",
            "adapters",
            f"separate is for models without experts, and models.{model.role} has "
            f"{shape.sizes.experts.number}; use merged",
        )
    if shape.sizes.sinks:
        _check_fixed(model)
    layers, pp = shape.sizes.layers, model.settings.pp
    if shape.sizes.experts is not None:
        stages = {layer * pp // layers for layer in range(layers) if layer not in shape.sizes.experts.dense}
        if len(stages) < min(pp, layers):
            raise SettingError.of(
                "rollout",
                "pp",
                f"{model.engine} needs a layer with experts in each stage, and of {pp} stages of "
                f"models.{model.role} only {len(stages)} would have one; use fewer",
            )
    multiple = model.facts.vocabulary_multiple
    padded = -(-shape.sizes.vocabulary // multiple) * multiple
    if padded % model.settings.tp:
        raise SettingError.of(
            "rollout",
            "tp",
            f"{model.settings.tp} does not divide the vocabulary of models.{model.role}, padded by "
            f"{model.engine} to {padded}; use {either(n for n in (1, 2, 4, 8, 16, 32) if padded % n == 0)}",
        )


def _check_fixed(model: PlacedModel) -> None:
    """Raise UserError for a config of gpt-oss with another value than the one that vLLM computes with."""
    config = read_config(model.role, model.settings)
    kinds = config.get("layer_types") or ()
    fixed = {**FIXED, "layer_types": [*islice(cycle(("sliding_attention", "full_attention")), len(kinds))]}
    for key, value in fixed.items():
        if config.get(key, value) not in (value, None):
            raise SettingError.of(
                "rollout",
                "engine",
                f"{model.engine} computes gpt_oss models with {key} {value} alone, and "
                f"models.{model.role} has {config[key]}; use transformers",
            )


def _check_mapped(model: PlacedModel, shape: ModelShape | None, longest: int) -> None:
    """Raise UserError for a model that an engine without transformers' modules does not compute.

    ``longest``: tokens of a text that it reads.
    """
    others = engines_with(lambda other: other.transformers_modules)
    found = _other_family(shape, Families.STAGED)
    if shape is None or found is not None:
        raise model.refusal(
            "engine", f"{model.engine} maps {', '.join(Families.STAGED)} models, found {found}; use {others}"
        )
    lora = model.settings.lora
    adapted = {*shape.expert_candidates} & {*(() if lora is None else lora.targets or ())}
    if adapted:
        raise model.refusal(
            "lora",
            f"{model.engine} has no adapters of experts, found targets "
            f"{', '.join(sorted(adapted))}; use targets of attention, or {others}",
        )
    unmapped = _unmapped(shape, longest)
    if unmapped:
        raise model.refusal("engine", f"{model.engine} has no {unmapped}; use {others}")


def _unmapped(shape: ModelShape, longest: int) -> str:
    """Return the part of a model of a mapped family that the engine does not compute; empty if it computes all."""
    if shape.window is not None and shape.window < longest:
        return f"sliding attention, of {shape.window} tokens in this model, whose texts have up to {longest}"
    if shape.rope not in MAPPED_ROPES:
        return f"rotary embeddings of type {shape.rope}, only {either(MAPPED_ROPES)}"
    if shape.activation != MAPPED_ACTIVATION:
        return f"MLPs with {shape.activation}, only {MAPPED_ACTIVATION}"
    return _biases(shape)


def _biases(shape: ModelShape) -> str:
    """Return the biases that are not mapped, by the setting of the config; queries, keys and values of qwen2 are."""
    assert shape.sizes is not None, "the family is known"
    biases = [name for name, _ in shape.parameters if name.endswith(".bias")]
    if any(".mlp." in name for name in biases):
        return "biases in MLPs (mlp_bias)"
    if shape.sizes.family != "qwen2" and any(".self_attn." in name for name in biases):
        return "biases in attention (attention_bias)"
    return ""


def _other_family(shape: ModelShape | None, families: Sequence[str] = Families.LLAMA_LIKE) -> str | None:
    """Return the family of a model that is none of ``families``; None of one that is."""
    if shape is None or shape.sizes is None:
        return "an unknown family"
    return None if shape.sizes.family in families else shape.sizes.family


def _check_modules(model: PlacedModel, shape: ModelShape | None) -> None:
    """Raise UserError for Liger's kernels or tiles of an MLP in a family that is not among those checked here."""
    found, attention = _other_family(shape), model.settings.attention
    if found in Families.WITH_SINKS and attention in ("sdpa", "flash_attention_2"):
        raise model.refusal("attention", f"{attention} has no sinks, which {found} models have; use auto", ("auto",))
    for name, kind in (("liger", "kernels"), ("tiled_mlp", "tiles")):
        if found is not None and getattr(model.settings, name):
            raise model.refusal(
                name, f"only {', '.join(Families.LLAMA_LIKE)} models have these {kind} here, found {found}; use false"
            )


def _check_graphs(model: PlacedModel, shape: ModelShape | None, longest: int) -> None:
    """Raise UserError for a model whose rows are decoded in waves. ``longest``: tokens of a row."""
    if not TextPacking.of(model, shape, longest).in_slots:
        raise model.refusal(
            "cuda_graphs",
            f"true is for {', '.join(sorted(TextPacking.FAMILIES))} models with attention auto, "
            f"sdpa or eager and no window of less than {longest} tokens, found another; use false",
        )
    assert shape is not None, "slots are for families with known sizes"
    if shape.rope in HOST_ROPES:
        raise model.refusal(
            "cuda_graphs",
            f"true is for rotary embeddings that do not change with the longest row, found {shape.rope}; use false",
        )


def _check_shared_trunk(model: PlacedModel, shape: ModelShape | None) -> None:
    """Raise UserError for policy and values on one trunk of a family whose language head may do more than multiply."""
    found = _other_family(shape)
    if found is not None:
        raise UserError(
            f"models.{model.role}: only {', '.join(Families.LLAMA_LIKE)} models can share a trunk between policy and "
            f"values, found {found}; use one of these, or a separate critic"
        )


def _check_dtype(model: PlacedModel, cluster: Cluster) -> None:
    """Raise UserError for bfloat16 on a device class without it."""
    if model.settings.dtype != "bfloat16":
        return
    for rank in _first_ranks(model, cluster).values():
        if (figures := cluster.lacks_bfloat16(rank)) is not None:
            raise model.refusal(
                "dtype",
                f"{figures.name} (rank {rank}) has no bfloat16; use float16 or float32, there "
                f"alone with models.{model.role}.fallback_dtype, or place "
                f"{model.role if model.rollout else model.name} on another class with `on:`",
            )


@dataclass(frozen=True)
class Lack:
    """A setting that a device class does not support.

    setting:  its name.
    found:    its value.
    least:    compute capability that it needs.
    instead:  the nearest that works.
    """

    setting: str
    found: str
    least: float
    instead: str


def _lacks_of(figures: DeviceClass, settings: ModelSpec, facts: EngineFacts) -> list[Lack]:
    """Return the settings of a model that devices with ``figures`` do not support. ``facts``: of its engine."""
    asked = [Lack("engine", facts.name, facts.least_capability, "transformers")]
    if facts.transformers_modules and settings.attention == "flash_attention_2":
        asked.append(Lack("attention", settings.attention, FLASH_CAPABILITY, "sdpa"))
    return [each for each in asked if figures.capability < each.least]


def _check_capabilities(model: PlacedModel, cluster: Cluster) -> None:
    """Raise UserError for an engine or a kernel that a device class of its model does not support."""
    for name, rank in _first_ranks(model, cluster).items():
        figures = DeviceClass.KNOWN.get(name)
        for each in [] if figures is None else _lacks_of(figures, model.settings, model.facts):
            raise model.refusal(
                each.setting,
                f"{name} (rank {rank}) has no {each.found}, which needs compute capability "
                f"{each.least}; use {each.instead}, or place {model.role if model.rollout else model.name} on another "
                f"class with `on:`",
            )


def _first_ranks(model: PlacedModel, cluster: Cluster) -> dict[str, int]:
    """Return the device classes of a model, each with the first rank on it."""
    found: dict[str, int] = {}
    for rank in model.ranks:
        found.setdefault(cluster.devices[rank].device_class, rank)
    return found


def _check_unknown_shape(model: PlacedModel) -> None:
    """Raise UserError for settings that need parameter shapes, where the architecture has none known."""
    settings = model.settings
    for name, default in (("zero", 0), *((axis.name, 1) for axis in AXES), ("lora", None)):
        if getattr(settings, name) != default:
            raise model.refusal(
                name,
                f"needs parameter shapes before loading, which are unknown for this architecture; "
                f"set a path with safetensors weights, or use a model of {', '.join(Families.LLAMA_LIKE)}",
            )


def _check_split(model: PlacedModel, shape: ModelShape, longest: int) -> None:
    """Raise UserError for a split of the model that its sizes do not allow."""
    settings, sizes = model.settings, shape.sizes
    if settings.tp > 1:
        _check_heads(model, shape)
    if settings.ep > 1:
        _check_experts(model, shape)
    if sizes is not None and sizes.experts is not None:
        _check_tokens_of_experts(model, shape)
    if settings.cp > 1:
        _check_parts_of_rows(model, shape, longest)
    if settings.pp > 1 and sizes is not None and sizes.layers % settings.pp:
        stages = [n for n in range(1, sizes.layers + 1) if sizes.layers % n == 0]
        raise model.refusal("pp", f"{settings.pp} does not divide its {sizes.layers} layers; use {either(stages)}")


def _check_parts_of_rows(model: PlacedModel, shape: ModelShape, longest: int) -> None:
    """Raise UserError if context-parallel ranks cannot share the attention of a model."""
    settings, sizes = model.settings, shape.sizes
    if sizes is None or sizes.family not in TextPacking.FAMILIES:
        families = ", ".join(Families.LLAMA_LIKE + Families.WITH_EXPERTS)
        raise model.refusal("cp", f"only {families} models compute parts of a row; use 1", (1,))
    if shape.window is not None and shape.window < longest:
        raise model.refusal(
            "cp",
            f"sliding attention, of {shape.window} tokens in this model, is not shared by ranks, "
            f"and texts have up to {longest}; use 1",
            (1,),
        )
    if settings.context_parallel == "ulysses" and sizes.heads % (settings.cp * settings.tp):
        fits = [n for n in range(1, sizes.heads + 1) if sizes.heads % (n * settings.tp) == 0]
        each = "" if settings.tp == 1 else f" on each of {settings.tp} tensor-parallel ranks"
        raise model.refusal(
            "cp",
            f"{settings.cp} does not divide its {sizes.heads // settings.tp} heads{each}, which "
            f"ulysses distributes; use {either(fits)}, or context_parallel ring",
        )


def _check_routers(model: PlacedModel, shape: ModelShape | None) -> None:
    """Raise UserError for settings of routers on a model without experts, or without biases of routers."""
    sizes = None if shape is None else shape.sizes
    for name in ("router_replay", *ModelSpec.OF_ROUTERS):
        found = getattr(model.settings, name)
        if found == getattr(_PLAIN, name):
            continue
        instead = "none" if name == "router_replay" else "0"
        if sizes is None or sizes.experts is None:
            raise model.refusal(
                name, f"{found} is for models with experts, and models.{model.role} has none; use {instead}"
            )
        if name == "router_bias_update_rate" and sizes.family not in Families.SIGMOID_ROUTED:
            raise model.refusal(
                name,
                f"{found} is for {either(Families.SIGMOID_ROUTED)} models, whose routers have biases, and "
                f"models.{model.role} is of {sizes.family}; use 0, or router_aux_loss_coef",
            )
        if name == "router_bias_update_rate" and model.settings.lora is not None:
            raise model.refusal(name, f"{found} goes with lora null, since adapters alone are synced and saved; use 0")


def _check_experts(model: PlacedModel, shape: ModelShape) -> None:
    """Raise UserError if expert-parallel ranks, of each tensor-parallel one, cannot have as many experts each."""
    experts, settings = None if shape.sizes is None else shape.sizes.experts, model.settings
    ep, tp = settings.ep, settings.tp
    if experts is None:
        raise model.refusal("ep", f"{ep} is for models with experts, and models.{model.role} has none; use 1", (1,))
    if experts.number % (ep * tp):
        fits = [n for n in range(1, experts.number + 1) if experts.number % (n * tp) == 0]
        each = "" if tp == 1 else f" on each of {tp} tensor-parallel ranks"
        raise model.refusal("ep", f"{ep} does not divide its {experts.number} experts{each}; use {either(fits)}")


def _check_tokens_of_experts(model: PlacedModel, shape: ModelShape) -> None:
    """Raise UserError for passes that read nothing on the host, of a model whose experts are on several ranks or have
    adapters."""
    settings, is_adapted = model.settings, any(ParameterName(name).is_of_experts for name in shape.adapters)
    reasons = {"ep": settings.ep > 1, "tp": settings.tp > 1 and "ep" in model.facts.axes, "lora.targets": is_adapted}
    for setting in (name for name, holds in reasons.items() if holds):
        instead = "of attention alone" if setting == "lora.targets" else "1"
        for name in ("compile", "cuda_graphs"):
            if getattr(settings, name):
                raise model.refusal(
                    setting,
                    f"how many tokens a rank's experts have is read there, so it goes with "
                    f"{name} false, found true; use false, or {setting} {instead}",
                )


def _check_heads(model: PlacedModel, shape: ModelShape) -> None:
    """Raise UserError if tensor-parallel ranks would split a head, or query heads from their keys, or would have
    unequal parts of the vocabulary in an engine that splits it.
    """
    tp, sizes = model.settings.tp, shape.sizes
    families: tuple[str, ...] = Families.LLAMA_LIKE
    if not model.facts.transformers_modules:
        families = Families.STAGED if model.rollout is None else Families.SERVED + Families.LATENT
    elif "ep" in model.facts.axes:
        families += Families.WITH_SPLIT_EXPERTS
    if sizes is None or sizes.family not in families:
        raise model.refusal(
            "tp", f"only {', '.join(families)} models have a tensor-parallel plan in {model.engine}; use 1", (1,)
        )
    split = _split_sizes(sizes)
    fits = [n for n in range(1, sizes.heads + 1) if _splits_evenly(split, n, model.facts)]
    if tp not in fits:
        *others, last = (f"{size} {name}" for name, size in split.items())
        found = f"{', '.join(others)} and {last}"
        raise model.refusal("tp", f"{tp} does not divide its {found}; use {either(fits)}")
    if model.facts.vocabulary_multiple == 1 and sizes.vocabulary % tp:
        even = [n for n in fits if sizes.vocabulary % n == 0]
        raise model.refusal(
            "tp",
            f"{tp} does not divide its vocabulary of {sizes.vocabulary}, which is not padded here; use {either(even)}",
        )


def _splits_evenly(split: Mapping[str, int], tp: int, facts: EngineFacts) -> bool:
    """Whether ``tp`` ranks of an engine have equal parts of all of ``split``, or each a copy of one key-value head."""
    copies = facts.copies_keys and tp % split[KEY_HEADS] == 0
    return not any(size % tp for name, size in split.items() if not (copies and name == KEY_HEADS))


def _split_sizes(sizes: Sizes) -> dict[str, int]:
    """Return the sizes that tensor parallelism splits, by name; a rank has whole experts."""
    split, experts = {"heads": sizes.heads, KEY_HEADS: sizes.kv_heads}, sizes.experts
    if experts is None or experts.dense:
        split["MLP features"] = sizes.ffn
    if experts is not None:
        split["experts"] = experts.number
    if experts is not None and experts.shared:
        split["features of shared experts"] = experts.shared
    return split


def check_device(placement: Placement, shapes: Mapping[str, ModelShape], device: str) -> None:
    """Raise UserError for a setting that an engine does not support on ``device``, ``cpu`` or ``cuda``."""
    if device != "cpu":
        return
    for model in placement.models:
        shape = shapes.get(model.role)
        if shape is not None and shape.sizes is not None:
            _check_cpu_heads(model, shape.sizes)
        module = model.facts.cpu_module
        if module and find_spec(module) is None:
            raise model.refusal(
                "engine",
                f"{model.engine} runs on GPUs; on CPUs it needs the module {module} of this "
                f"repository's tests/{model.engine}_on_cpu on PYTHONPATH; use {either(EngineFacts.full_engines())}",
            )
        if model.settings.dtype == "float16" and not model.facts.cpu_float16:
            raise model.refusal(
                "dtype",
                f"{model.engine} has no float16 on CPU ranks; use bfloat16, float32 or "
                + engines_with(lambda other: other.cpu_float16),
            )
        _check_cpu_kernels(model)


def _check_cpu_kernels(model: PlacedModel) -> None:
    """Raise UserError for kernels of GPUs."""
    settings = model.settings
    if settings.attention in ON_GPUS:
        raise model.refusal(
            "attention", f"{settings.attention} runs on GPUs alone, and the ranks are on CPUs; use sdpa"
        )
    for name in ("liger", "compile", "cuda_graphs"):
        if getattr(settings, name):
            raise model.refusal(name, "true is for GPUs alone, and the ranks are on CPUs; use false")


def _check_cpu_heads(model: PlacedModel, sizes: Sizes) -> None:
    heads = model.facts.cpu_head_dims
    if heads and sizes.head_dim not in heads:
        raise SettingError.of(
            "rollout",
            "engine",
            f"{model.engine} on CPU ranks has no attention for head dimension {sizes.head_dim} "
            f"(models.{model.role}); use transformers, or a model with head dimension {either(heads)}",
        )


def check_run_engines(placement: Placement, shapes: Mapping[str, ModelShape]) -> None:
    """Raise UserError for a model that its engine does not run, though it is planned."""
    for model in placement.models:
        sizes = shapes[model.role].sizes if model.role in shapes else None
        if model.rollout is not None and model.engine == "vllm" and sizes is not None and sizes.latent is not None:
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


# which families decode as they compute log-probs was measured on small models of each
_ENCODER_DECODERS = """
bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder fsmt led longt5 m2m_100 marian mbart mt5 mvp nllb-moe
pegasus pegasus_x plbart prophetnet switch_transformers t5 t5gemma t5gemma2 umt5 xlm-prophetnet
"""
_ENCODERS = """
albert bert bert-generation big_bird camembert canine convbert data2vec-text deberta deberta-v2 distilbert electra ernie
esm eurobert flaubert fnet funnel ibert longformer luke megatron-bert mobilebert modernbert mpnet mra nystromformer
rembert roberta roberta-prelayernorm roc_bert roformer squeezebert xlm xlm-roberta xlm-roberta-xl xlnet xmod yoso
"""
# their state is not in the cache that decoding keeps; hybrids such as jamba and bamba store theirs there
_RECURRENT = "falcon_mamba mamba mamba2 minimax recurrent_gemma rwkv xlstm"
# padding changes what they compute
_UNMASKED = "rwkv"


def check_family(role: str, config: dict[str, Any], head: Head, is_sampled: bool) -> None:
    """Raise UserError for a family that cannot serve as ``role``.

    ``is_sampled``: whether it is a policy whose sampled log-probs have to be those that it is trained with.
    """
    kind = str(config["model_type"])
    if kind in _ENCODER_DECODERS.split() or config.get("is_encoder_decoder"):
        raise UserError(f"models.{role}: {kind} is an encoder-decoder; use a decoder, such as llama")
    if kind in _ENCODERS.split() and not config.get("is_decoder"):
        purpose = "of scores at every token" if head == "scalar" else "that writes from left to right"
        raise UserError(f"models.{role}: {kind} reads in both directions; use a model {purpose}, such as llama")
    if kind in _UNMASKED.split():
        raise UserError(f"models.{role}: {kind} reads padding as text; use a model with attention, such as llama")
    if kind in _RECURRENT.split() and is_sampled:
        raise UserError(
            f"models.{role}: {kind} has a recurrent state, which decoding here does not keep, so it would sample from "
            f"another distribution than it is trained on; use a model with attention, such as llama, or "
            f"guards.sampled_logprobs: warn"
        )
