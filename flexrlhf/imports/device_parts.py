"""Machines of a YAML, the ranks that train and generate, and vLLM's cache."""

from __future__ import annotations

import re
from typing import Any

from flexrlhf.config.model_names import MODELS
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.spec import MAX_DEVICES
from flexrlhf.errors import UserError
from flexrlhf.imports.settings import Setting
from flexrlhf.imports.translation import DOT, Translation
from flexrlhf.placement.devices import DEVICE_CLASSES, GPUS_PER_NODE
from flexrlhf.weights.shapes import model_shape

_CLASS_WORDS = {
    r"\bH100\b": "H100-80G",
    r"\bH200\b": "H200-141G",
    r"\bH800\b": "H800-80G",
    r"\bH20\b": "H20-96G",
    r"\bA100[-_ ]?(?:SXM4?[-_ ]?)?40\s?GB?\b": "A100-40G",
    r"\bA100\b(?![-_ ]?(?:SXM4?[-_ ]?)?40\s?G)": "A100-80G",
    r"\bA800\b": "A800-80G",
    r"\bL40S\b": "L40S-48G",
    r"\bA40\b": "A40-48G",
    r"\bA6000\b": "A6000-48G",
    r"\bA10G?\b": "A10-24G",
    r"\bG?B200\b": "B200-180G",
    r"\bRTX ?-?4090\b": "RTX4090-24G",
    r"\bV100\b": "V100-32G",
}


def named_class(text: str) -> str | None:
    """Return the class of devices that a text names; None for none, or several."""
    found = {name for pattern, name in _CLASS_WORDS.items() if re.search(pattern, text.replace("_", " "), re.I)}
    return next(iter(found)) if len(found) == 1 else None


def check_number(out: Translation, devices: int) -> None:
    """Raise UserError for more devices than a plan takes."""
    if devices > MAX_DEVICES:
        raise UserError(f"{out.file}: {devices} devices are more than a plan takes: at most {MAX_DEVICES}")


def put_cluster(
    out: Translation, count: int, devices: int, device_class: tuple[str, str] | None, *sources: Setting | str | None
) -> None:
    """Write the machines. ``device_class``: its name, and where that is from."""
    check_number(out, count * devices)
    node: dict[str, Any] = {"count": count, "devices": devices}
    if device_class is not None:
        node["class"] = device_class[0]
    else:
        out.note(
            "the file names no class of devices: plan checks no memory and simulate needs one: --gpu-type, such as "
            "H100-80G"
        )
    out.put("cluster.nodes", [node], *sources, None if device_class is None else device_class[1])


def put_gpus(out: Translation, gpus: int, device_class: tuple[str, str] | None, *sources: Setting | str | None) -> None:
    """Write machines of eight, or one with fewer, that have a number of devices."""
    devices = min(gpus, GPUS_PER_NODE)
    while gpus % devices:
        devices -= 1
    put_cluster(out, gpus // devices, devices, device_class, *sources)


def num_devices(out: Translation) -> int:
    """Return the number of devices that are written."""
    return sum(node["count"] * node["devices"] for node in out.value("cluster.nodes") or [{"count": 1, "devices": 1}])


def put_apart(
    out: Translation,
    training: tuple[int, int],
    generating: tuple[int, int],
    device_class: tuple[str, str] | None,
    *sources: Setting | None,
) -> None:
    """Write devices that train and others that generate: of the same machines if these have room, else of others."""
    (count, devices), (others, more) = training, generating
    check_number(out, count * devices + others * more)
    if count == others and devices + more <= GPUS_PER_NODE:
        whole = devices + more
        put_cluster(out, count, whole, device_class, *sources)
        trains = [node * whole + rank for node in range(count) for rank in range(devices)]
    elif devices == more:
        put_cluster(out, count + others, devices, device_class, *sources)
        trains = list(range(count * devices))
    else:
        first = {"count": count, "devices": devices}
        second = {"count": others, "devices": more}
        named = {} if device_class is None else {"class": device_class[0]}
        out.put("cluster.nodes", [{**first, **named}, {**second, **named}], *sources)
        trains = list(range(count * devices))
    generates = [rank for rank in range(num_devices(out)) if rank not in set(trains)]
    roles = ["critic"] if out.value("algorithm.name") == "ppo" else []
    roles += ["ref"] if out.value("algorithm.kl.place") else []
    roles += ["reward"] if {"models.reward.init", "models.reward.path"} & set(out.lines) else []
    for role in ("actor", *roles):
        out.put(f"placement.{role}.ranks", span(trains), *sources[: len(sources) // 2])
    out.put(f"placement.actor{DOT}rollout.ranks", span(generates), *sources[len(sources) // 2 :])
    out.put("sync.overlap", False, "weights are sent while nothing else runs there")


def span(ranks: list[int]) -> str | list[int]:
    """Return ranks as a YAML has them: a run of several as ``0-3``."""
    is_run = ranks == list(range(ranks[0], ranks[0] + len(ranks)))
    return f"{ranks[0]}-{ranks[-1]}" if is_run and len(ranks) > 1 else ranks


def ranks_of(text: Any) -> list[int]:
    """Return the ranks of a line; none where there is none."""
    if isinstance(text, str):
        first, _, last = text.partition("-")
        return list(range(int(first), int(last or first) + 1))
    return list(text or ())


def put_cache(out: Translation, share: Setting | None, engines_tp: int, rows: int, tokens: int) -> None:
    """Write vLLM's cache: the share of a device's memory that it may fill less its weights, up to a step's rows.

    engines_tp:  ranks of an engine.
    rows:        most responses of a step that an engine has.
    tokens:      longest prompt and response.
    """
    if share is None:
        return
    init, nodes = out.value("models.actor.init"), out.value("cluster.nodes")
    device_class = None if not nodes else nodes[0].get("class")
    shape = None if init not in MODELS else model_shape("actor", ModelSpec.model_validate({"init": init}))
    if shape is None or shape.sizes is None or device_class is None:
        out.drop(
            share, "tokens of vLLM's cache (rollout.kv_tokens) follow from the model's sizes and the devices' class"
        )
        return
    a_token = 4 * shape.sizes.layers * shape.sizes.kv_heads * shape.sizes.head_dim
    memory = share.value * DEVICE_CLASSES[device_class].memory_gb * 2**30
    fits = int((engines_tp * memory - 2 * shape.num_parameters) / a_token)
    if fits < tokens:
        out.drop(share, f"the weights leave no room for a response of {tokens} tokens in this share of {device_class}")
        return
    out.put("rollout.kv_tokens", max(tokens, min(fits, rows * tokens)), share, "less the weights, up to a step's rows")
