"""Machines of a YAML, the ranks that train and generate, and vLLM's cache."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flexrlhf.api import DeviceClass, ModelSpec, Spec, UserError, make_plan, model_shape
from flexrlhf.imports.settings import JobSettings, Setting
from flexrlhf.imports.translation import DOT, Translation

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
    r"\bRTX ?-?3090\b": "RTX3090-24G",
    r"\bRTX ?-?4090\b": "RTX4090-24G",
    r"\bV100\b": "V100-32G",
}

KV_TOKENS = "rollout.kv_tokens"
MANY_STEPS = 10**6
"""Steps of a plan in the place of epochs, whose rows may not be here; memory does not depend on them."""
TRIALS = 6
"""Plans that are made, each with a smaller cache."""


def named_class(text: str) -> str | None:
    """Return the class of devices that a text names; None for none, or several."""
    found = {name for pattern, name in _CLASS_WORDS.items() if re.search(pattern, text.replace("_", " "), re.I)}
    return next(iter(found)) if len(found) == 1 else None


def machines(out: Translation, job: JobSettings, nodes: Setting | None, per_node: Setting | None) -> tuple[int, int]:
    """Return the number of nodes and the devices of one; one node of eight if the file does not have them."""
    is_missing = any(each.key.rpartition(".")[2] in ("nnodes", "num_nodes") for each in job.unresolved.values())
    if per_node is None or is_missing:
        out.note("the number of devices is not in the file: one node of eight is assumed")
    return 1 if nodes is None else nodes.value, DeviceClass.PER_NODE if per_node is None else per_node.value


def put_cluster(out: Translation, machines: Sequence[tuple[int, int]], *sources: Setting | str | None) -> None:
    """Write the machines: the number of nodes of each kind with the devices of one.

    Raises UserError for more devices than a plan takes.
    """
    total = sum(count * devices for count, devices in machines)
    if total > Spec.MAX_DEVICES:
        raise UserError(f"{out.file}: {total} devices are more than a plan takes: at most {Spec.MAX_DEVICES}")
    name, origin = out.devices or (None, None)
    nodes = [{"count": count, "devices": devices} | ({"class": name} if name else {}) for count, devices in machines]
    out.put("cluster.nodes", nodes, *sources, origin)
    if name is None:
        out.note(
            "the file names no class of devices: plan checks no memory and simulate needs one: --gpu-type, such as "
            "H100-80G"
        )


def machines_of(gpus: int) -> tuple[int, int]:
    """Return machines of eight, or one with fewer, that have a number of devices, and the devices of one."""
    devices = next(each for each in range(min(gpus, DeviceClass.PER_NODE), 0, -1) if gpus % each == 0)
    return gpus // devices, devices


def num_devices(out: Translation) -> int:
    """Return the number of devices that are written."""
    return sum(node["count"] * node["devices"] for node in out.value("cluster.nodes") or [{"count": 1, "devices": 1}])


def put_apart(
    out: Translation, training: tuple[int, int], generating: tuple[int, int], *sources: Setting | None
) -> None:
    """Write devices that train and others that generate: of the same machines if these have room, else of others."""
    (count, devices), (others, more) = training, generating
    trains = list(range(count * devices))
    if count == others and devices + more <= DeviceClass.PER_NODE:
        whole = devices + more
        put_cluster(out, [(count, whole)], *sources)
        trains = [node * whole + rank for node in range(count) for rank in range(devices)]
    else:
        put_cluster(out, [(count + others, devices)] if devices == more else [training, generating], *sources)
    generates = [rank for rank in range(num_devices(out)) if rank not in set(trains)]
    half = len(sources) // 2
    for role in ("actor", *other_roles(out, bool(out.value("algorithm.kl.place")))):
        out.put(f"placement.{role}.ranks", span(trains), *sources[:half])
    put_generating(out, generates, *sources[half:])


def other_roles(out: Translation, penalised: bool) -> list[str]:
    """Return the roles of a job next to the actor. ``penalised``: whether there is a reference."""
    found = {"critic": out.value("algorithm.name") == "ppo", "ref": penalised, "reward": out.has_model("reward")}
    return [role for role, is_there in found.items() if is_there]


def put_generating(out: Translation, ranks: Sequence[int], *sources: Setting | None) -> None:
    """Write the ranks that generate and do nothing else."""
    out.put(f"placement.actor{DOT}rollout.ranks", span(ranks), *sources)
    out.put("sync.overlap", False, "weights are sent while nothing else runs there")


def span(ranks: Sequence[int]) -> str | list[int]:
    """Return ranks as a YAML has them: a run of several as ``0-3``."""
    is_run = list(ranks) == list(range(ranks[0], ranks[0] + len(ranks)))
    return f"{ranks[0]}-{ranks[-1]}" if is_run and len(ranks) > 1 else list(ranks)


def num_placed(out: Translation, model: str) -> int:
    """Return the number of devices of a model; all, where none are written for it."""
    ranks = out.value(f"placement.{model}.ranks")
    if isinstance(ranks, str):
        first, _, last = ranks.partition("-")
        return int(last) - int(first) + 1
    return len(ranks) if ranks else num_devices(out)


def put_vllm(
    out: Translation,
    tp: Setting | None,
    pp: Setting | None,
    share: Setting | None,
    rows: int,
    tokens: int,
    engines: int | None = None,
) -> None:
    """Write the ranks of a vLLM engine and its cache.

    tp, pp:   tensor-parallel ranks and stages of an engine.
    share:    of a device's memory that the engine may fill.
    rows:     responses of a step.
    tokens:   longest prompt and response.
    engines:  number of engines; None: as many as the devices that generate allow.
    """
    size, devices = 1 if tp is None else tp.value, num_placed(out, f"actor{DOT}rollout")
    if size > DeviceClass.PER_NODE:
        out.drop(tp, f"an engine's tensor-parallel ranks are on one node: {DeviceClass.PER_NODE} here")
        size = DeviceClass.PER_NODE
    elif devices % size and engines is None:
        out.drop(tp, f"engines of {size} ranks do not divide {devices} devices")
        size = 1
    if size > 1:
        out.put("rollout.tp", size, tp)
    if pp is not None and pp.value > 1:
        out.put("rollout.pp", pp.value, pp)
        size *= pp.value
    put_cache(out, share, size, -(-rows // engines) if engines else -(-rows * size // max(1, devices)), tokens)


def put_cache(out: Translation, share: Setting | None, engines_tp: int, rows: int, tokens: int) -> None:
    """Write vLLM's cache: the share of a device's memory that it may fill less its weights, up to a step's rows.

    engines_tp:  ranks of an engine.
    rows:        most responses of a step that an engine has.
    tokens:      longest prompt and response.
    """
    if share is None:
        return
    device_class = out.devices[0] if out.devices else None
    known = out.known_model("actor")
    shape = None if known is None else model_shape("actor", ModelSpec.model_validate(known.weights))
    if shape is None or shape.sizes is None or device_class is None:
        out.drop(
            share, "tokens of vLLM's cache (rollout.kv_tokens) follow from the model's sizes and the devices' class"
        )
        return
    a_token = 2 * shape.sizes.layers * shape.sizes.cached_features
    memory = share.value * DeviceClass.KNOWN[device_class].memory_gb * 2**30
    fits = int((engines_tp * memory - 2 * shape.num_parameters) / a_token)
    if fits < tokens:
        out.drop(share, f"the weights leave no room for a response of {tokens} tokens in this share of {device_class}")
        return
    out.put(KV_TOKENS, max(tokens, min(fits, rows * tokens)), share, "less the weights, up to a step's rows")


def fit_cache(out: Translation) -> None:
    """Reduce vLLM's cache until the plan fits its devices, if a smaller one is enough.

    The share is of all that vLLM needs; next to weights and cache these are the activations of its passes, which a
    plan computes.
    """
    if KV_TOKENS not in out.lines or any(key.startswith("models.") and key.endswith(".path") for key in out.lines):
        return
    tokens, comment = out.lines[KV_TOKENS]
    least = (out.value("data.max_prompt_tokens") or 0) + (out.value("data.max_response_tokens") or 0)
    first = _lacking(out)
    for _ in range(TRIALS):
        if first is None or first <= 0 or tokens <= least:
            return
        tokens = max(least, int(tokens * 0.7))
        out.lines[KV_TOKENS] = (tokens, f"{comment}, and what a plan needs next to them")
        lacking = _lacking(out)
        if lacking is None or lacking <= 0:
            return


def _lacking(out: Translation) -> int | None:
    """Return the bytes that the plan's tightest rank lacks for generation or a sync; None if something else lacks."""
    try:
        tree = out.tree()
        if tree.pop("epochs", None) is not None:
            tree["steps"] = MANY_STEPS
        plan = make_plan(Spec.parse(tree, out.file))
    except UserError:
        return None
    rank = plan.tightest_rank
    size, memory = plan.device_bytes(rank), plan.memories[rank]
    if size is None:
        return None
    lacks = memory.peak_bytes - size
    is_of_rollout = memory.peak is not None and "actor.rollout" in memory.peak.label
    return lacks if lacks <= 0 or is_of_rollout else None
