"""Load the transformers model of a role: a causal language model, one with a scalar head for scores, or with both.

Liger's kernels and compiled layers take the place of transformers' own, by the model's settings.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from flexrlhf.config.model_families import Families
from flexrlhf.config.model_settings import Head, LoraSpec, ModelSpec
from flexrlhf.config.output_settings import NO_SWITCHES, Switches
from flexrlhf.engines.attention import BY_SEQUENCES
from flexrlhf.engines.experts import add_expert_adapters
from flexrlhf.engines.rms_norm import use_own_norms
from flexrlhf.engines.rotary_positions import use_own_rotation
from flexrlhf.engines.routing import use_float32_routers
from flexrlhf.engines.scalar_head import add_value_head, is_of_openrlhf, saved_value_head, settle_padding
from flexrlhf.engines.sink_attention import SINK_ATTENTION
from flexrlhf.engines.tiled_mlp import tile_mlps
from flexrlhf.engines.weight_files import PartReader
from flexrlhf.errors import UserError
from flexrlhf.memory.packed_rows import TextPacking
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.decoder_sizes import Sizes
from flexrlhf.weights.loading import load_config, one_sentence_errors
from flexrlhf.weights.model_files import StoredTensors
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.parameters import ParameterName
from flexrlhf.weights.shapes import read_config
from flexrlhf.weights.shards import Part, parts_of
from flexrlhf.weights.stored_model import StoredModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CLASSES: dict[Head, Any] = {
    "causal": AutoModelForCausalLM,
    "scalar": AutoModelForSequenceClassification,
    "both": AutoModelForCausalLM,
}


def load_model(placed: PlacedModel, seed: int, pad_token_id: int | None = None) -> PreTrainedModel:
    """Return the model of ``placed``, whole and in float32 on the CPU, in evaluation mode.

    ``pad_token_id``: of the run. ``requires_grad`` is set for the parameters that are trained. Weights that no file
    contains, new adapters among them, are initialised from ``seed``, alike on all ranks and copies.
    """
    with seeded(seed):
        model = _load(placed)
        add_parts(model, placed)
    settle(model, placed, pad_token_id)
    for tensor in (*model.parameters(), *model.buffers()):
        # weights mapped from a file cannot be freed, as offloading requires
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()
    return model


def load_frozen(placed: PlacedModel, seed: int) -> PreTrainedModel:
    """Return the model of ``placed`` without the adapters that are trained, as ``load_model`` does."""
    path = StoredModel.frozen(placed.role, placed.settings).path
    settings = placed.settings.model_copy(update={"path": path, "lora": None})
    return load_model(replace(placed, settings=settings), seed)


def frozen_files(placed: PlacedModel) -> str | None:
    """Return the directory with the weights of ``load_frozen`` and no others: neither adapters nor a scalar head; None
    where there is none.
    """
    files = StoredModel.frozen(placed.role, placed.settings)
    return None if files.has_adapters or saved_value_head(files.path) is not None else files.path


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Make the random numbers inside follow from ``seed``, and transformers silent."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def add_parts(model: PreTrainedModel, placed: PlacedModel) -> None:
    """Add adapters and the value head, which the files of a causal model lack: with random numbers, or those of the
    adapters that are trained on.
    """
    if placed.settings.lora is not None:
        _add_adapters(model, placed.settings.lora)
    if placed.settings.goes_on_adapters:
        _read_adapters(model, placed)
    if placed.head == "both":
        # last: so the random numbers of the other weights, and the layers with adapters, are as without it
        add_value_head(model, placed.settings.path)


def settle(model: PreTrainedModel, placed: PlacedModel, pad_token_id: int | None) -> None:
    """Set a model up for its head, its purpose and evaluation; its weights stay as they are."""
    if placed.head != "scalar":
        # only the run sets sampling: defaults stored with a model would change the policy
        model.generation_config = GenerationConfig()
    else:
        model.forward = MethodType(_scores_everywhere, model)
        reads_last = is_of_openrlhf(model.config) or _head_name(placed) is not None
        # adapters are saved without a config, so that of their base model stays as it is
        settle_padding(model.config, reads_last, placed.trained, None if placed.settings.lora else pad_token_id)
    # saved with the model; other tools select the class by it
    model.config.architectures = [type(model).__name__]
    if TextPacking.has_lengths(model.config.model_type, placed.settings.attention):
        model.config._attn_implementation = BY_SEQUENCES
    elif model.config.model_type in Families.WITH_SINKS and placed.settings.attention == "auto":
        model.config._attn_implementation = SINK_ATTENTION
    if not placed.trained:
        model.requires_grad_(False)
    model.eval()


def _load(placed: PlacedModel) -> PreTrainedModel:
    """Load a model from its path, or make one from its config with random weights; float32.

    Raises UserError for what transformers refuses, and for files that lack weights.
    """
    settings, kind, options = placed.settings, CLASSES[placed.head], _options(placed)
    extra = {"num_labels": 1} if placed.head == "scalar" else {}
    key, head = StoredModel.of(placed.role, settings).where, _head_name(placed)
    if head is not None:
        options["key_mapping"] = {rf"^{re.escape(head)}\.": "score."}
    with one_sentence_errors(key):
        # raises UserError for a family that only the launching script has registered
        load_config(placed.role, settings)
        if settings.path is None:
            config = AutoConfig.for_model(**{**(settings.init or {}), **extra})
            fresh: PreTrainedModel = kind.from_config(config, **options)
            return fresh
        model, info = kind.from_pretrained(
            StoredModel.of(placed.role, settings).whole.path,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            use_safetensors=True,
            **options,
            **extra,
        )
    layers = StoredModel.frozen(placed.role, settings).layers
    _check_loaded(
        key,
        info,
        {ParameterName.SCALAR_HEAD} if may_lack_head(placed) or StoredModel(settings.path).has_adapters else set(),
    )
    loaded: PreTrainedModel = model
    for directory in layers:
        loaded = _with_merged_adapters(key, loaded, directory)
    return loaded


def empty_model(placed: PlacedModel) -> PreTrainedModel:
    """Return the model of the config in a directory, float32 and on the meta device. Raises UserError."""
    settings, key = placed.settings, StoredModel.of(placed.role, placed.settings).where
    extra = {"num_labels": 1} if placed.head == "scalar" else {}
    with one_sentence_errors(key):
        load_config(placed.role, settings)
        path = StoredModel.of(placed.role, settings).whole.path
        config = AutoConfig.from_pretrained(path, trust_remote_code=settings.trust_remote_code, **extra)
        with torch.device("meta"):
            model: PreTrainedModel = CLASSES[placed.head].from_config(config, **_options(placed))
    return model


def may_lack_head(placed: PlacedModel) -> bool:
    """Whether files may lack the scalar head of a model, which is then random."""
    return placed.trained or placed.follows or placed.settings.new_head


def _options(placed: PlacedModel) -> dict[str, Any]:
    settings = placed.settings
    # without this option transformers takes sdpa, or eager where a family lacks it
    is_ours = TextPacking.has_lengths(read_config(placed.role, settings)["model_type"], settings.attention)
    is_default = is_ours or settings.attention in ("auto", "sdpa")
    attention = {} if is_default else {"attn_implementation": settings.attention}
    return {"dtype": torch.float32, "trust_remote_code": settings.trust_remote_code, **attention}


def _head_name(placed: PlacedModel) -> str | None:
    """Return the name of the scalar head in the model's files, where it is not transformers' and the head is used."""
    whole = StoredModel.of(placed.role, placed.settings).whole
    return whole.head_name if placed.head == "scalar" else None


def _with_merged_adapters(key: str, model: PreTrainedModel, directory: str) -> PreTrainedModel:
    """Return ``model`` with the adapters in ``directory`` added to its weights, in float32; a head is replaced.

    Planning refuses adapters that do not fit where it can build a model; here are those of models with own code.
    """
    # slow to load, and only a model with adapters needs it
    from flexrlhf.weights.peft_files import load_adapters

    merged: PreTrainedModel = load_adapters(key, model, directory).merge_and_unload()
    # peft freezes the base weights of adapters that it loads
    return merged.requires_grad_(True)


def _check_loaded(key: str, info: Mapping[str, Any], optional: Collection[str]) -> None:
    """Raise UserError where ``info`` of transformers has weights that files lacked, or had in another shape.

    Planning refuses these where it can compute a model's parameters; here are the other architectures.
    """
    mismatched = sorted(info["mismatched_keys"])
    if mismatched:
        name, in_files, by_config = mismatched[0]
        raise UserError(
            f"{key}: {name} is {list(in_files)} in its files and {list(by_config)} by its config.json; correct one or "
            f"the other"
        )
    StoredTensors.check_none_missing(key, sorted(set(info["missing_keys"]) - set(optional)))


def _scores_everywhere(
    self: Any, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor, **arguments: Any
) -> Tensor:
    """Forward of a sequence classifier that returns scores at every position, float32 (n, width).

    The model's own forward returns one position, which it derives from the pad token instead of the mask.
    """
    base = getattr(self, self.base_model_prefix)
    out = base(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False, **arguments
    )
    scores: Tensor = self.score(out.last_hidden_state).squeeze(-1).float()
    return scores.clone()  # a new tensor: FSDP2 warns of a module that returns a view


def _add_adapters(model: PreTrainedModel, lora: LoraSpec) -> None:
    """Add adapters inside the model, which keeps its class and forward; a scalar head stays trained in full."""
    from peft import LoraConfig, inject_adapter_in_model

    parameters = tuple((name, tuple(parameter.shape)) for name, parameter in model.named_parameters())
    # of layers with experts "all-linear" of peft would adapt router and experts, which it has as parameters
    every = ModelShape(parameters).lora_candidates if ModelShape(parameters).is_mixture else "all-linear"
    of_experts = [name for name in ModelShape(parameters).expert_candidates if name in (lora.targets or ())]
    targets = [name for name in lora.targets if name not in of_experts] if lora.targets is not None else every
    # "all-linear" excludes a scalar head only for this task type
    kind = "SEQ_CLS" if hasattr(model, "score") else "CAUSAL_LM"
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type=kind)
    if targets:
        inject_adapter_in_model(config, model)
    else:
        model.requires_grad_(False)
    if of_experts:
        add_expert_adapters(model, lora, of_experts)
    if hasattr(model, "score"):
        model.score.requires_grad_(True)


@torch.no_grad()
def read_adapters(
    placed: PlacedModel, tensors: Mapping[str, Tensor], rank: int | None = None, sizes: Sizes | None = None
) -> None:
    """Read the adapters in the path of ``placed``, and their scalar head, into the ``tensors`` that have their names.

    rank:   whose parts the tensors are; None: they are whole.
    sizes:  of a model that may have fewer key-value heads than tensor-parallel ranks.
    """
    stored, reader = StoredModel.of(placed.role, placed.settings).adapter_tensors, PartReader()
    shapes = tuple((name, each.shape) for name, each in stored.items() if name in tensors)
    whole = {name: Part.whole(shape) for name, shape in shapes}
    for name, part in (whole if rank is None else parts_of(placed, shapes, rank, sizes)).items():
        values = torch.empty(part.num_elements)
        reader.read(stored[name], part, values)
        tensors[name].copy_(values.view(tensors[name].shape))


@torch.no_grad()
def _read_adapters(model: PreTrainedModel, placed: PlacedModel) -> None:
    """Read the adapters in the path of ``placed``, and their scalar head; keep a frozen copy where one is used."""
    from peft.tuners.lora import LoraLayer

    read_adapters(placed, dict(model.named_parameters()))
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers if placed.keeps_start else ():
        for matrices in (layer.lora_A, layer.lora_B):
            matrices[ParameterName.START] = deepcopy(matrices[ParameterName.ADAPTER]).requires_grad_(False)
        for of_adapter in (layer.scaling, layer.lora_dropout):
            of_adapter[ParameterName.START] = of_adapter[ParameterName.ADAPTER]


@contextmanager
def starting_weights(model: PreTrainedModel) -> Iterator[None]:
    """Compute as the model did before training: without adapters, or with the ones that it started from.

    peft's own switches would also change ``requires_grad``, after sharding has relied on it.
    """
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    assert layers, "this model has no adapters"
    for layer in layers:
        layer._active_adapter = [ParameterName.START]
    try:
        yield
    finally:
        for layer in layers:
            layer._active_adapter = [ParameterName.ADAPTER]


@contextmanager
def recomputing(model: PreTrainedModel) -> Iterator[None]:
    """Put checkpointed layers in training mode: transformers recomputes activations only there.

    All other modules stay in evaluation mode, without dropout.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.training = layer.gradient_checkpointing
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def use_kernels(model: PreTrainedModel, settings: ModelSpec, switches: Switches = NO_SWITCHES) -> None:
    """Give the layers of ``model`` the kernels of its settings; parameters and their names stay as they are."""
    if settings.liger:
        _use_liger(model)
    elif not settings.compile:
        use_own_norms(model)
        use_own_rotation(model)
    if settings.dtype != "float32" and switches.float32_routers:
        use_float32_routers(model)
    if settings.tiled_mlp:
        tile_mlps(model)
    if settings.compile:
        compile_layers(model)


def _use_liger(model: PreTrainedModel) -> None:
    """Replace norms and MLPs by Liger's, for a family that it has; log-probs have our own head already."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    # Liger also replaces classes and functions of the module, for models that are made later
    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    try:
        _apply_liger_kernel_to_instance(
            model=model, rope=False, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False
        )
    finally:
        vars(module).update(before)


def compile_layers(model: nn.Module, backend: str = "inductor") -> None:
    """Compile every layer when it is first called, for rows of any number and width. ``backend``: of torch.compile."""
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(dynamic=True, backend=backend)
