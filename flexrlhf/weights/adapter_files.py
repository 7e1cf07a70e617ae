"""Directories with low-rank adapters, as peft writes them, which name the model that they change.

A model either goes on training the adapters in its ``path``, or they are merged into the weights that they change.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexrlhf.config.model_settings import LoraSpec, ModelSpec
from flexrlhf.errors import UserError, shown
from flexrlhf.weights.model_files import INDEX, SINGLE, StoredTensor, read_header
from flexrlhf.weights.parameters import ParameterName

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Beginning of the names of peft's tensors."""
NOT_ADAPTED = ("embed_tokens", "lm_head", "score")
"""Modules that have no adapters here."""
KINDS = ("LORA", "LOHA", "LOKR", "IA3")
"""Values of ``peft_type`` whose adapters are merged."""
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
    return path is not None and (Path(path) / ADAPTER_CONFIG).is_file() and not _has_whole_model(Path(path))


def _has_whole_model(directory: Path) -> bool:
    return (directory / "config.json").is_file() and any((directory / name).exists() for name in (SINGLE, INDEX))


def base_model(role: str, model: ModelSpec) -> ModelSpec:
    """Return ``model`` with the path of the whole model that it begins with, under any adapters.

    Raises UserError for adapters without weights or without the path of their base model.
    """
    for _ in range(MOST_LAYERS):
        if not has_adapters(model.path):
            _check_one_kind(role, model.path)
            return model
        model = model.model_copy(update={"path": _base_path(role, str(model.path))})
    raise UserError(
        f"models.{role}.path {model.path}: its {ADAPTER_CONFIG} names adapters on adapters, {MOST_LAYERS} and more"
    )


def frozen_model(role: str, model: ModelSpec) -> ModelSpec:
    """Return ``model`` with the path of what its adapters change: without the ones that it goes on training, unless
    an earlier run of the command is to write these.
    """
    if not model.goes_on_adapters or not has_adapters(model.path):
        return model
    return model.model_copy(update={"path": _base_path(role, str(model.path))})


def adapter_layers(path: str | None) -> list[str]:
    """Return the directories with adapters under ``path``, in the order in which they are merged."""
    layers: list[str] = []
    while path is not None and has_adapters(path):
        layers.insert(0, path)
        path = _base_path("", path)
    return layers


def adapters_in(role: str, path: str) -> LoraSpec | None:
    """Return the settings of the adapters in a directory; None where training cannot go on with them: they are of
    another form than plain low-rank ones.
    """
    config = _config(role, path)
    names = stored_adapters(role, path).keys() - {ParameterName.SCALAR_HEAD}
    targets = sorted({name.split(".")[-4] for name in names if name.count(".") > 3})
    rank, alpha = config.get("r", _DEFAULT), config.get("lora_alpha", _DEFAULT)
    is_plain = (
        config.get("peft_type") == "LORA"
        and config.get("bias") in (None, "none")
        and config.get("init_lora_weights") in (None, True, False, "gaussian")
        and not any(config.get(name) for name in _OTHER_FORMS)
        and all(
            name.split(".")[-3:] in [[each, ParameterName.ADAPTER, "weight"] for each in ParameterName.MATRICES]
            for name in names
        )
        and not {*targets} & {*NOT_ADAPTED}
        and targets != []
    )
    if not is_plain or not isinstance(alpha, int | float) or alpha < 1 or alpha != int(alpha):
        return None
    return LoraSpec(rank=rank, alpha=int(alpha), targets=tuple(targets))


def stored_adapters(role: str, path: str) -> dict[str, StoredTensor]:
    """Return the tensors in a directory of adapters, a scalar head among them, by the model's parameters."""
    tensors = read_header(f"models.{role}.path {path}", Path(path) / ADAPTER_WEIGHTS)
    renamed = {}
    for name, tensor in tensors.items():
        own = name.removeprefix(PREFIX)
        for matrix in ParameterName.MATRICES:
            own = own.replace(f".{matrix}.weight", f".{matrix}.{ParameterName.ADAPTER}.weight")
        renamed[own] = tensor
    return renamed


def _check_one_kind(role: str, path: str | None) -> None:
    """Raise UserError for a whole model next to adapters, of which transformers would load either."""
    if path is not None and (Path(path) / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"models.{role}.path {path}: has a whole model and {ADAPTER_CONFIG}; remove one of them, since either "
            f"could be meant"
        )


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
    """Return the config of adapters. Raises UserError for one that cannot be read, or has a value that peft does not
    take."""
    key = f"models.{role}.path {path}: its {ADAPTER_CONFIG}"
    try:
        config: Any = json.loads((Path(path) / ADAPTER_CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{key} cannot be read ({str(error).splitlines()[0]})") from None
    if not isinstance(config, dict):
        raise UserError(f"{key} contains {type(config).__name__}, not a mapping")
    if config.get("peft_type") not in KINDS:
        raise UserError(
            f"{key} has peft_type {shown(config.get('peft_type'))}, and {', '.join(KINDS)} are read here; merge others "
            f"with peft's merge_and_unload, and give the whole model"
        )
    if config["peft_type"] == "LORA":
        _check_values(key, config)
    return config


def _check_values(key: str, config: dict[str, Any]) -> None:
    """Raise UserError for a setting of low-rank adapters of another type or range, or for other layers."""
    if config.get("layer_replication"):
        raise UserError(
            f"{key} has layer_replication {shown(config['layer_replication'])}, with which the model has other layers "
            f"than its config; merge it with peft's merge_and_unload, and give the whole model"
        )
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    for name, values in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        if not isinstance(values, dict) or not all(map(_is_expression, values)):
            raise UserError(f"{key} has {name} {shown(values)}: expected expressions of names of modules, with values")
    found = [("r", config.get("r", _DEFAULT), *_RANK), ("lora_alpha", config.get("lora_alpha", _DEFAULT), *_ALPHA)]
    found += [(f"rank_pattern.{name}", value, *_RANK) for name, value in ranks.items()]
    found += [(f"alpha_pattern.{name}", value, *_ALPHA) for name, value in alphas.items()]
    for name, value, is_valid, expected in found:
        if isinstance(value, bool) or not is_valid(value):
            raise UserError(f"{key} has {name} {shown(value)}: expected {expected}")


def _is_expression(name: str) -> bool:
    try:
        re.compile(name)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


_DEFAULT, _MOST_RANK = 8, 2**16
"""Rank and alpha of peft for configs that leave them out; and the largest rank."""
_RANK: tuple[Callable[[Any], bool], str] = (
    lambda value: isinstance(value, int) and 1 <= value <= _MOST_RANK,
    f"a whole number from 1 to {_MOST_RANK}",
)
_ALPHA: tuple[Callable[[Any], bool], str] = (
    lambda value: isinstance(value, int | float) and 0 < abs(value) < math.inf,
    "a finite number other than 0",
)
"""Whether a value is valid, and the valid ones in words."""
