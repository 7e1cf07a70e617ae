"""Load the transformers model of a role: a causal language model, one with a scalar head for scores, or with both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from flexrlhf.config.spec import Head, LoraSpec, ModelSpec
from flexrlhf.engines.value_head import add_value_head
from flexrlhf.placement.placed import PlacedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CLASSES: dict[Head, Any] = {
    "causal": AutoModelForCausalLM,
    "scalar": AutoModelForSequenceClassification,
    "both": AutoModelForCausalLM,
}


def load_model(placed: PlacedModel, seed: int) -> PreTrainedModel:
    """Return the model of ``placed`` in float32 on the CPU, in evaluation mode.

    ``requires_grad`` is set for the parameters that are trained. Weights that no file contains, adapters among them,
    are initialised from ``seed``, alike on all ranks and copies.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    head = placed.head
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _load(placed.settings, head)
        if placed.settings.lora is not None:
            _add_adapters(model, placed.settings.lora)
        if head == "both":
            # last: so the random numbers of the other weights, and the layers with adapters, are as without it
            add_value_head(model, placed.settings.path)
    if head != "scalar":
        # only the run sets sampling: defaults stored with a model would change the policy
        model.generation_config = GenerationConfig()
    else:
        model.forward = MethodType(_scores_everywhere, model)
    # saved with the model; other tools select the class by it
    model.config.architectures = [type(model).__name__]
    if not placed.trained:
        model.requires_grad_(False)
    for parameter in model.parameters():
        # weights mapped from a file cannot be freed, as offloading requires
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()
    return model.eval()


def _load(settings: ModelSpec, head: Head) -> PreTrainedModel:
    """Load a model from its path, or make one from its config with random weights; float32."""
    extra = {"num_labels": 1} if head == "scalar" else {}
    if settings.path is not None:
        model: PreTrainedModel = _CLASSES[head].from_pretrained(settings.path, dtype=torch.float32, **extra)
        return model
    config = AutoConfig.for_model(**{**(settings.init or {}), **extra})
    fresh: PreTrainedModel = _CLASSES[head].from_config(config, dtype=torch.float32)
    return fresh


def _scores_everywhere(self: Any, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
    """Forward of a sequence classifier that returns scores at every position, float32 (n, width).

    The model's own forward returns one position, which it derives from the pad token instead of the mask.
    """
    base = getattr(self, self.base_model_prefix)
    out = base(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False)
    scores: Tensor = self.score(out.last_hidden_state).squeeze(-1).float()
    return scores.clone()  # a new tensor: FSDP2 warns of a module that returns a view


def _add_adapters(model: PreTrainedModel, lora: LoraSpec) -> None:
    """Add adapters inside the model, which keeps its class and forward; a scalar head stays trained in full."""
    from peft import LoraConfig, inject_adapter_in_model

    targets = list(lora.targets) if lora.targets is not None else "all-linear"
    # "all-linear" excludes a scalar head only for this task type
    kind = "SEQ_CLS" if hasattr(model, "score") else "CAUSAL_LM"
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type=kind)
    inject_adapter_in_model(config, model)
    if hasattr(model, "score"):
        model.score.requires_grad_(True)


@contextmanager
def base_weights_alone(model: PreTrainedModel) -> Iterator[None]:
    """Disable adapters. peft's own switch would also change ``requires_grad``, after sharding has relied on it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    assert layers, "this model has no adapters"
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


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
