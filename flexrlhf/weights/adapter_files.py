"""Directories with low-rank adapters, as peft writes them, which name the model that they change.

A model either goes on training the adapters in its ``path``, or they are merged into the weights that they change.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flexrlhf.config.model_settings import LoraSpec, ModelSpec
from flexrlhf.errors import UserError
from flexrlhf.weights.model_files import SCALAR_HEAD, StoredTensor, read_header

ADAPTER = "default"
"""The name that peft gives an adapter by itself."""
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MATRICES = ("lora_A", "lora_B")
PREFIX = "base_model.model."
"""Beginning of the names of peft's tensors."""
NOT_ADAPTED = ("embed_tokens", "lm_head", "score")
"""Modules that have no adapters here."""
MOST_LAYERS = 8
"""Adapters on a model that is itself adapters on another one, and so on; more are a circle."""
_OTHER_FORMS = (
    *("use_rslora", "use_dora", "use_qalora", "lora_bias", "fan_in_fan_out", "rank_pattern", "alpha_pattern"),
    *("layers_to_transform", "layer_replication", "target_parameters", "trainable_token_indices", "arrow_config"),
    *("alora_invocation_tokens", "use_bdlora", "kasa_config", "velora_config", "monteclora_config"),
)
"""Settings of peft with which adapters compute something else, or are on some layers alone; peft merges them."""


def has_adapters(path: str | None) -> bool:
    """Whether ``path`` is a directory with adapters instead of a whole model."""
    return path is not None and (Path(path) / ADAPTER_CONFIG).is_file() and not (Path(path) / "config.json").is_file()


def base_model(role: str, model: ModelSpec) -> ModelSpec:
    """Return ``model`` with the path of the whole model that it begins with, under any adapters.

    Raises UserError for adapters without weights or without the path of their base model.
    """
    for _ in range(MOST_LAYERS):
        if not has_adapters(model.path):
            return model
        model = model.model_copy(update={"path": _base_path(role, str(model.path))})
    raise UserError(
        f"models.{role}.path {model.path}: its {ADAPTER_CONFIG} names adapters on adapters, {MOST_LAYERS} and more"
    )


def frozen_model(role: str, model: ModelSpec) -> ModelSpec:
    """Return ``model`` with the path of what its adapters change: without the ones that it goes on training, unless
    an earlier run of the command is to write these.
    """
    if not goes_on(model) or not has_adapters(model.path):
        return model
    return model.model_copy(update={"path": _base_path(role, str(model.path))})


def adapter_layers(path: str | None) -> list[str]:
    """Return the directories with adapters under ``path``, in the order in which they are merged."""
    layers: list[str] = []
    while path is not None and has_adapters(path):
        layers.insert(0, path)
        path = _base_path("", path)
    return layers


def goes_on(model: ModelSpec) -> bool:
    """Whether a model, whose settings are resolved, goes on training the adapters in its path."""
    return model.lora is not None and model.lora.new is False


def adapters_in(role: str, path: str) -> LoraSpec | None:
    """Return the settings of the adapters in a directory; None where training cannot go on with them: they are of
    another form than plain low-rank ones.
    """
    config = _config(role, path)
    names = stored_adapters(role, path).keys() - {SCALAR_HEAD}
    targets = sorted({name.split(".")[-4] for name in names if name.count(".") > 3})
    rank, alpha = config.get("r"), config.get("lora_alpha")
    is_plain = (
        config.get("peft_type") == "LORA"
        and config.get("bias") in (None, "none")
        and config.get("init_lora_weights") in (None, True, False, "gaussian")
        and not any(config.get(name) for name in _OTHER_FORMS)
        and all(name.split(".")[-3:] in [[each, ADAPTER, "weight"] for each in MATRICES] for name in names)
        and not {*targets} & {*NOT_ADAPTED}
        and targets != []
    )
    if not is_plain or not isinstance(rank, int) or not isinstance(alpha, int):
        return None
    return LoraSpec(rank=rank, alpha=alpha, targets=tuple(targets))


def stored_adapters(role: str, path: str) -> dict[str, StoredTensor]:
    """Return the tensors in a directory of adapters, a scalar head among them, by the model's parameters."""
    tensors = read_header(f"models.{role}.path {path}", Path(path) / ADAPTER_WEIGHTS)
    renamed = {}
    for name, tensor in tensors.items():
        own = name.removeprefix(PREFIX)
        for matrix in MATRICES:
            own = own.replace(f".{matrix}.weight", f".{matrix}.{ADAPTER}.weight")
        renamed[own] = tensor
    return renamed


def _base_path(role: str, path: str) -> str:
    """Return the path of the base model in the config of adapters, which may be relative to the current directory."""
    key, base = f"models.{role}.path {path}", _config(role, path).get("base_model_name_or_path")
    if not isinstance(base, str) or not Path(base).is_dir():
        raise UserError(
            f"{key}: contains adapters, and their base model {base!r} is no directory here; correct "
            f"base_model_name_or_path in {ADAPTER_CONFIG}, or merge them with `flexrlhf export --merge-adapters`"
        )
    if not (Path(path) / ADAPTER_WEIGHTS).is_file():
        raise UserError(f"{key}: contains adapters without their weights (no file {ADAPTER_WEIGHTS})")
    return base


def _config(role: str, path: str) -> dict[str, Any]:
    """Return the config of adapters; nothing where the file is no mapping. Raises UserError for one that is no JSON."""
    try:
        config: Any = json.loads((Path(path) / ADAPTER_CONFIG).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"models.{role}.path {path}: its {ADAPTER_CONFIG} cannot be read ({str(error).splitlines()[0]})"
        ) from None
    return config if isinstance(config, dict) else {}
