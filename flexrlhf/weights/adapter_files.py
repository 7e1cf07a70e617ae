"""Directories with adapters, as peft writes them: the model that they change, which is loaded with them merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flexrlhf.config.spec import ModelSpec
from flexrlhf.errors import UserError
from flexrlhf.weights.model_files import SCALAR_HEAD

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
SAVED_HEAD = f"base_model.model.{SCALAR_HEAD}"
"""Name of a scalar head among the adapters' weights."""
MOST_LAYERS = 8
"""Adapters on a model that is itself adapters on another one, and so on; more are a circle."""


def has_adapters(path: str | None) -> bool:
    """Whether ``path`` is a directory with adapters instead of a whole model."""
    return path is not None and (Path(path) / CONFIG).is_file() and not (Path(path) / "config.json").is_file()


def base_model(role: str, model: ModelSpec) -> ModelSpec:
    """Return ``model`` with the path of the whole model that it begins with, under any adapters.

    Raises UserError for adapters without weights or without the path of their base model.
    """
    for _ in range(MOST_LAYERS):
        if not has_adapters(model.path):
            return model
        model = model.model_copy(update={"path": _base_path(role, str(model.path))})
    raise UserError(f"models.{role}.path {model.path}: its {CONFIG} names adapters on adapters, {MOST_LAYERS} and more")


def adapter_layers(path: str | None) -> list[str]:
    """Return the directories with adapters under ``path``, those that are merged first at the front."""
    layers: list[str] = []
    while path is not None and has_adapters(path):
        layers.insert(0, path)
        path = _base_path("", path)
    return layers


def _base_path(role: str, path: str) -> str:
    """Return the path of the base model in the config of adapters, which may be relative to the current directory."""
    key = f"models.{role}.path {path}"
    try:
        config: Any = json.loads((Path(path) / CONFIG).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{key}: its {CONFIG} cannot be read ({str(error).splitlines()[0]})") from None
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not isinstance(base, str) or not Path(base).is_dir():
        raise UserError(
            f"{key}: contains adapters, and their base model {base!r} is no directory here; correct "
            f"base_model_name_or_path in {CONFIG}, or merge them with `flexrlhf export --merge-adapters`"
        )
    if not (Path(path) / WEIGHTS).is_file():
        raise UserError(f"{key}: contains adapters without their weights (no file {WEIGHTS})")
    return base
