"""Check of a model's architecture with transformers, before a rank starts: config, class, head, names of parameters.

transformers and torch are loaded in functions; the model is built without memory for its weights (device ``meta``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexrlhf.config.model_names import LLAMA_LIKE
from flexrlhf.config.spec import Head, ModelSpec
from flexrlhf.errors import UserError
from flexrlhf.weights.adapter_files import base_model, has_adapters
from flexrlhf.weights.loading import is_native, load_config, model_key, one_sentence_errors
from flexrlhf.weights.model_files import SCALAR_HEAD, check_stored, named_as, stored_tensors
from flexrlhf.weights.shapes import read_config


def check_architecture(role: str, model: ModelSpec, head: Head, new_head: bool) -> Any:
    """Return the config of a role as an object of transformers. Raises UserError for what its ranks could not load.

    ``new_head``: whether files may lack a scalar head. Models with code of their own, which is trusted, are built by
    the ranks alone.
    """
    model, new_head = base_model(role, model), new_head or has_adapters(model.path)
    config = load_config(role, model)
    if is_native(role, model) and read_config(role, model)["model_type"] not in LLAMA_LIKE:
        shapes = _shapes_without_weights(role, model, config, head)
        if model.path is not None:
            _check_files(role, model, shapes, {SCALAR_HEAD} if new_head else set())
    return config


def _shapes_without_weights(role: str, model: ModelSpec, config: Any, head: Head) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters of the class that the ranks load."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )

    key, kind = model_key(role, model), config.model_type
    if head == "scalar":
        config.num_labels = 1
    names = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES if head == "scalar" else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if kind not in names:
        needed = "a scalar head" if head == "scalar" else "a language head"
        raise UserError(f"{key}: transformers has no {kind} model with {needed}; use a model such as {LLAMA_LIKE[0]}")
    auto = AutoModelForSequenceClassification if head == "scalar" else AutoModelForCausalLM
    with one_sentence_errors(key), torch.device("meta"):
        built = auto.from_config(config, trust_remote_code=False)
    shapes = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
    if head == "scalar" and SCALAR_HEAD not in shapes:
        raise UserError(
            f"{key}: the head of {kind} is no {SCALAR_HEAD}, so it gives no score at each token; use a model such as "
            f"{LLAMA_LIKE[0]}"
        )
    return shapes


def _check_files(role: str, model: ModelSpec, shapes: dict[str, tuple[int, ...]], optional: set[str]) -> None:
    """Raise UserError for files that lack weights of the model, unless their names are converted on loading.

    Files with names that the model does not have may be of an older form of the family; then the ranks check.
    """
    assert model.path is not None, "a model without files has none to check"
    stored = stored_tensors(f"models.{role}.path", Path(model.path))
    missing = set(shapes) - set(named_as(stored, shapes)) - {SCALAR_HEAD}
    others = {name for name in named_as(stored, shapes) if name not in shapes and name.endswith((".weight", ".bias"))}
    if missing and others:
        return
    check_stored(model_key(role, model), stored, shapes, optional)
