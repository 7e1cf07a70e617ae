"""Adapters in a directory, compared tensor by tensor with the ones that peft makes of their config.

peft fills in tensors that a file lacks with random numbers, and leaves others out. Libraries are loaded in functions:
planning starts at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexrlhf.errors import UserError, some_of
from flexrlhf.weights.loading import one_sentence_errors
from flexrlhf.weights.model_files import StoredTensors
from flexrlhf.weights.parameters import ParameterName
from flexrlhf.weights.stored_model import StoredModel

BY_WEIGHTS = ("pissa", "olora", "orthogonal")
"""Beginnings of ``init_lora_weights`` with which peft begins from the weights, and changes them."""


def check_adapters(key: str, model: Any, directory: str) -> None:
    """Raise UserError for adapters that peft does not load whole, or with values that are not finite.

    ``model``: the one that they change, on the meta device; it is changed, too.
    """
    import torch
    from peft import PeftConfig, get_peft_model

    with one_sentence_errors(key, "peft"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = PeftConfig.from_pretrained(directory)
        if str(getattr(config, "init_lora_weights", "")).startswith(BY_WEIGHTS):
            config.init_lora_weights = True
        with torch.device("meta"):
            adapted: Any = get_peft_model(model, config, autocast_adapter_dtype=False)
            check_loaded(key, adapted, directory)
            adapted.merge_and_unload()
    _check_finite(key, Path(directory) / StoredModel.ADAPTER_WEIGHTS)


def load_adapters(key: str, model: Any, directory: str) -> Any:
    """Return ``model`` with the adapters in ``directory``. Raises UserError where peft has not loaded all of them."""
    from peft import PeftModel

    with one_sentence_errors(key, "peft"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = PeftModel.from_pretrained(model, directory)
        check_loaded(key, adapted, directory)
    return adapted


def check_loaded(key: str, adapted: Any, directory: str) -> None:
    """Raise UserError for files that lack tensors of ``adapted``, have them in another shape or type, or have others.

    Other weights of the model, such as embeddings that peft saves with adapters, replace the ones of the base model.
    """
    from peft import get_peft_model_state_dict

    stored = StoredTensors.read(key, Path(directory) / StoredModel.ADAPTER_WEIGHTS)
    own = _shapes(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    if not own.keys() & stored.keys():
        found = f"has {some_of(stored, 2)}" if stored else "has none"
        raise UserError(f"{key}: none of its tensors is of this model: expected {some_of(own, 2)}, and it {found}")
    others = {
        name.replace(f".{ParameterName.ADAPTER}.", "."): shape for name, shape in _shapes(adapted.state_dict()).items()
    }
    known = {**{name: shape for name, shape in others.items() if name in stored}, **own}
    stored.check(key, known, by=StoredModel.ADAPTER_CONFIG)
    left = sorted(stored.keys() - known.keys() - {f"{StoredModel.PREFIX}{ParameterName.SCALAR_HEAD}"})
    if left:
        raise UserError(
            f"{key}: its files have {some_of(left, 3)}, which adapters of its {StoredModel.ADAPTER_CONFIG} have not; "
            f"correct one or the other"
        )


def _shapes(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _check_finite(key: str, file: Path) -> None:
    """Raise UserError for a tensor with a value that is not finite."""
    from safetensors import safe_open

    with safe_open(file, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            if not tensors.get_tensor(name).isfinite().all():
                raise UserError(f"{key}: {name} has a value that is not finite; save the adapters again")
