"""Load the transformers model of a role: a causal language model, or one with a scalar head for values and scores."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from flexrlhf.placement.shapes import Head
from flexrlhf.spec import ModelSpec

_CLASSES: dict[Head, Any] = {"causal": AutoModelForCausalLM, "scalar": AutoModelForSequenceClassification}


def load_model(model: ModelSpec, head: Head, seed: int, device: torch.device) -> PreTrainedModel:
    """The model in float32, without dropout. Weights that no file holds are drawn from ``seed``, alike on all ranks."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    extra = {"num_labels": 1} if head == "scalar" else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if model.path is not None:
            loaded = _CLASSES[head].from_pretrained(model.path, dtype=torch.float32, **extra)
        else:
            config = AutoConfig.for_model(**{**(model.init or {}), **extra})
            loaded = _CLASSES[head].from_config(config, dtype=torch.float32)
    if head == "causal":
        # decoding is set by the run alone: sampling defaults stored with a model would change the policy
        loaded.generation_config = GenerationConfig()
    # saved with the model; other tools choose the class by it
    loaded.config.architectures = [type(loaded).__name__]
    result: PreTrainedModel = loaded.eval().to(device)
    return result
