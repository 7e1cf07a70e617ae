"""What a user asks ``advise``: models, devices, lengths and batch, as a Spec whose placement is still open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flexrlhf.errors import UserError, nearest
from flexrlhf.guideline.advice.model_names import Config, find_model
from flexrlhf.placement.devices import DEVICE_CLASSES
from flexrlhf.spec import NodeSpec, Spec
from flexrlhf.spec_file import apply_override, parse_spec
from flexrlhf.yaml12 import explain, read_yaml

ROLES = ("actor", "critic", "ref", "reward")
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Request:
    """``models``: role → name, directory or config file; ``nodes``: as in ``cluster.nodes``.

    ``prompts`` of a step, ``samples`` of each; ``engine``: of all models; ``rollout``: what generates; ``lora``: rank
    of adapters on the trained models.
    """

    models: Mapping[str, str]
    nodes: tuple[Mapping[str, Any], ...]
    prompt_tokens: int = 1024
    response_tokens: int = 1024
    prompts: int = 512
    samples: int = 1
    mini_batches: int = 8
    engine: str = "torch"
    rollout: str = "transformers"
    lora: int | None = None

    def spec(self, overrides: tuple[str, ...] = ()) -> Spec:
        """Raises UserError for unknown models and impossible sizes. ``overrides``: as behind ``--set``."""
        raw: dict[str, Any] = {
            "name": "advised",
            "algorithm": {
                "name": "ppo",
                "prompts_per_step": self.prompts,
                "samples_per_prompt": self.samples,
                "num_mini_batches": self.mini_batches,
            },
            "models": {role: self._model(role, find_model(name)) for role, name in self.models.items()},
            "data": {
                "path": "prompts.jsonl",
                "max_prompt_tokens": self.prompt_tokens,
                "max_response_tokens": self.response_tokens,
            },
            "cluster": {"nodes": [dict(node) for node in self.nodes]},
        }
        if self.rollout != "transformers":
            raw["rollout"] = {"engine": self.rollout}
        for override in overrides:
            apply_override(raw, override)
        return parse_spec(raw, "advise")

    def _model(self, role: str, config: Config) -> dict[str, Any]:
        has_bf16 = all(DEVICE_CLASSES[node["class"]].bf16 for node in self.nodes)
        dtype = "bfloat16" if has_bf16 else "float16"
        model: dict[str, Any] = {"init": config, "engine": self.engine, "dtype": dtype}
        if self.lora is not None and role in ("actor", "critic"):
            model["lora"] = {"rank": self.lora, "alpha": 2 * self.lora}
        return model


def equal_nodes(gpus: int, gpu_type: str) -> tuple[dict[str, Any], ...]:
    """``gpus`` devices of one class in nodes of eight. Raises UserError for an unknown class."""
    device_class = find_class(gpu_type, "--gpu-type")
    if gpus <= GPUS_PER_NODE:
        return ({"count": 1, "devices": gpus, "class": device_class},)
    if gpus % GPUS_PER_NODE:
        low = gpus // GPUS_PER_NODE * GPUS_PER_NODE
        raise UserError(
            f"--gpus {gpus}: nodes have {GPUS_PER_NODE} devices; use {low} or {low + GPUS_PER_NODE}, or describe the "
            f"nodes in a file for --cluster"
        )
    return ({"count": gpus // GPUS_PER_NODE, "devices": GPUS_PER_NODE, "class": device_class},)


def find_class(text: str, where: str) -> str:
    """The catalogue's name for ``text``: whole, in any case, or the start of one name alone."""
    lowered = {name.lower(): name for name in DEVICE_CLASSES}
    if text.lower() in lowered:
        return lowered[text.lower()]
    starts = [name for key, name in lowered.items() if key.startswith(text.lower())]
    if len(starts) == 1:
        return starts[0]
    hint = f" (it may be {' or '.join(starts)})" if starts else nearest(text, DEVICE_CLASSES)
    raise UserError(f"{where} {text}: no such device class{hint}; known: {', '.join(DEVICE_CLASSES)}")


def read_nodes(path: Path) -> tuple[dict[str, Any], ...]:
    """The nodes of a cluster file: a list, or a mapping with ``nodes`` or ``cluster.nodes``."""
    if not path.is_file():
        raise UserError(f"--cluster {path}: no such file")
    try:
        found = read_yaml(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        text = explain(error) if isinstance(error, yaml.YAMLError) else "not a text"
        raise UserError(f"--cluster {path}: not YAML: {text}") from None
    for key in ("cluster", "nodes"):
        found = found[key] if isinstance(found, dict) and key in found else found
    if not isinstance(found, list) or not found or not all(isinstance(node, dict) for node in found):
        raise UserError(
            f"--cluster {path}: expected a list of nodes such as [{{count: 2, devices: 8, class: A100-80G}}]"
        )
    known = {item.alias or name for name, item in NodeSpec.model_fields.items()}
    return tuple(_node(node, path, known) for node in found)


def _node(node: dict[str, Any], path: Path, known: set[str]) -> dict[str, Any]:
    for key in node:
        if key not in known:
            raise UserError(f"--cluster {path}: unknown key {key!r}{nearest(str(key), known)}")
    if "class" not in node:
        raise UserError(f"--cluster {path}: a node has no class; known: {', '.join(DEVICE_CLASSES)}")
    return {**node, "class": find_class(str(node["class"]), f"--cluster {path}: class")}
