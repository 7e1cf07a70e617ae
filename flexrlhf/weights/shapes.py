"""Parameter shapes of a model before it is loaded, from which bytes are planned.

They are computed from ``config.json`` or ``init`` for the known families, with which safetensors files have to
agree, else read from the header of these files. Names are those of transformers' modules.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flexrlhf.config.model_families import EXPERT_NUMBERS, WITHOUT_EXPERTS, Families
from flexrlhf.config.model_settings import Head, ModelSpec
from flexrlhf.config.user_paths import instead_of
from flexrlhf.errors import UserError, nearest
from flexrlhf.weights.config_numbers import wrong_number
from flexrlhf.weights.expert_files import file_shapes
from flexrlhf.weights.families import (
    attention_window,
    decoder_shapes,
    hidden_size,
    is_tied,
    known_keys,
    model_sizes,
    rope_type,
)
from flexrlhf.weights.model_files import StoredTensors
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.parameters import ParameterName
from flexrlhf.weights.stored_model import StoredModel


def read_config(role: str, model: ModelSpec) -> dict[str, Any]:
    """Return the Hugging Face config of a role. Raises UserError where there is none, for quantised weights, and for
    experts of a family whose parameters are not known.
    """
    config = model.init if model.init is not None else _config_file(role, StoredModel.of(role, model).whole.path)
    if not config.get("model_type") or not isinstance(config["model_type"], str):
        raise UserError(f"models.{role}: the config has no model_type, such as {', '.join(Families.KNOWN)}")
    if model.init is not None and config["model_type"] in Families.KNOWN:
        # the rest is for transformers, which takes the default of a size that it does not find
        known = known_keys(config["model_type"])
        misspelt = next((key for key in config.keys() - {*known} if nearest(str(key), known)), None)
        if misspelt is not None:
            raise UserError(f"models.{role}.init: unknown key {misspelt!r}{nearest(str(misspelt), known)}")
    quantised = config.get("quantization_config") or config.get("compression_config")
    if quantised:
        method = quantised.get("quant_method", "unnamed") if isinstance(quantised, dict) else quantised
        others = ", as transformers saves a model that it has loaded with Mxfp4Config(dequantize=True)"
        raise UserError(
            f"models.{role}: its weights are quantised ({method}), which is not supported; give them in 16 or 32 bits"
            f"{others if method == 'mxfp4' else ''}"
        )
    wrong = wrong_number(config)
    if wrong is not None:
        where = f"models.{role}.init" if model.init is not None else f"models.{role}.path {model.path}: its config.json"
        raise UserError(f"{where} has {wrong}")
    mixtures = [family for family in Families.KNOWN if family not in Families.LLAMA_LIKE]
    experts = next((key for key in EXPERT_NUMBERS if config.get(key)), None)
    if not experts and config["model_type"] in WITHOUT_EXPERTS and config.get("num_local_experts") == 0:
        raise UserError(
            f"models.{role}: {config['model_type']} is not supported, with experts or, as here, without; use a model "
            f"of another family"
        )
    if (experts or "moe" in config["model_type"]) and config["model_type"] not in mixtures:
        raise UserError(
            f"models.{role}: {config['model_type']} is a mixture-of-experts model ({experts or 'by its type'}), of "
            f"which families {', '.join(mixtures)} are supported; use one of these, or a dense model"
        )
    return config


def _config_file(role: str, path: str | None) -> dict[str, Any]:
    if path is None:
        raise UserError(f"models.{role}: give a path (a Hugging Face model directory) or init (a config)")
    directory = Path(path)
    if not directory.is_dir():
        raise UserError(f"models.{role}.path {path}: no such directory{instead_of(directory)}")
    file = directory / "config.json"
    if not file.is_file():
        raise UserError(f"models.{role}.path {path}: no config.json in it, so it is no Hugging Face model directory")
    try:
        config = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise UserError(f"models.{role}.path {path}: its config.json is not JSON ({error})") from None
    except OSError as error:
        raise UserError(f"models.{role}.path {path}: its config.json cannot be read ({error.strerror})") from None
    if not isinstance(config, dict):
        raise UserError(f"models.{role}.path {path}: its config.json contains {type(config).__name__}, not a mapping")
    return config


def model_shape(role: str, model: ModelSpec, head: Head = "causal", new_head: bool = True) -> ModelShape | None:
    """Return the shape of ``role``; None for an architecture whose parameters are known only when it is loaded.

    ``new_head``: whether files may lack a scalar head, which is then random. Raises UserError for a config that is
    missing or does not fit the head, and for files that do not fit the config.
    """
    source = StoredModel.of(role, model)
    new_head = new_head or source.has_adapters
    source = source.whole
    model = model.model_copy(update={"path": source.path})
    config = read_config(role, model)
    stored = source.tensors
    computed = _computed_shapes(role, config)
    if not stored and computed is None:
        return None
    if (
        head != "scalar"
        and ParameterName.SCALAR_HEAD in stored
        and ParameterName.LANGUAGE_HEAD not in stored
        and not is_tied(config)
    ):
        raise UserError(f"models.{role}.path {model.path}: a reward model without a language head; use a causal model")
    if stored:
        _check_files(f"models.{role}.path {model.path}", stored, computed, head, config, new_head)
    shapes = {name: tensor.shape for name, tensor in stored.items()} if computed is None else computed
    parameters = tuple(sorted(_with_head(shapes, head, config).items()))
    return ModelShape(
        parameters,
        sizes=model_sizes(config),
        window=attention_window(config),
        is_tied=head != "scalar" and is_tied(config),
        rope=rope_type(config),
        activation=str(config.get("hidden_act") or "silu"),
        stored=stored.common_type,
    )


def _computed_shapes(role: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes that follow from the config alone; None for a family without such a rule."""
    if config.get("model_type") not in Families.KNOWN:
        return None
    try:
        return decoder_shapes(config)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"models.{role}: the config is not one of {config['model_type']} ({error})") from None


def _check_files(
    key: str,
    stored: StoredTensors,
    computed: dict[str, tuple[int, ...]] | None,
    head: Head,
    config: dict[str, Any],
    new_head: bool,
) -> None:
    """Raise UserError for files that lack a tensor of the config or the head, have others, or other shapes or types."""
    optional = {ParameterName.SCALAR_HEAD} if new_head else set()
    if computed is not None:
        expected = file_shapes(config["model_type"], _with_head(computed, head, config))
        stored.check(key, expected, optional)
        stored.check_left_over(key, expected, config)
    elif head != "causal":
        stored.check_scalar_head(key, new_head)


def _with_head(shapes: dict[str, tuple[int, ...]], head: Head, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return ``shapes`` with the head: a scalar head replaces the vocabulary head or is added to it; a causal model has
    none.
    """
    shapes = dict(shapes)
    if head == "scalar" or is_tied(config):
        shapes.pop(ParameterName.LANGUAGE_HEAD, None)
    if head == "causal":
        shapes.pop(ParameterName.SCALAR_HEAD, None)
    else:
        shapes[ParameterName.SCALAR_HEAD] = (1, hidden_size(config))
    return shapes
