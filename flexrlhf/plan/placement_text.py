"""Text of who is where: placed models, their engines, and the processes of an environment."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TypeVar

from flexrlhf.config.model_settings import LoraSpec
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.plan.gpu_warnings import gpu_warnings
from flexrlhf.plan.plan import Plan
from flexrlhf.text import counted, ranks_text, span_of
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.parameters import ParameterName
from flexrlhf.weights.reuse import Reuse

Key = TypeVar("Key")
Value = TypeVar("Value")
NAME_WIDTH = 13
"""Characters of the names of placed models, if none is longer."""


def placement_lines(plan: Plan) -> list[str]:
    """Return a line for each placed model, then what they share, the environment, and what ``auto`` is."""
    lines, width = [], 1 + max(NAME_WIDTH, *(len(model.name) for model in plan.placement.models))
    for model in plan.placement.models:
        devices = {(plan.cluster.devices[r].node, plan.cluster.devices[r].device_class) for r in model.ranks}
        where = ", ".join(f"node {node} ({name})" for node, name in sorted(devices))
        trained = "trained" if model.trained else "follows " + model.role if model.follows else "frozen"
        head = f"{model.name:<{width}}{ranks_text(model.ranks):<12}"
        lines.append(f"{head} {where:<22} {model.computing_text:<28} {trained}{_computed(plan, model)}")
        lines += [f"{'':<{width}}{line}" for line in _stages(model, plan.shapes.get(model.role))]
        lines += [f"{'':<{width}}{line}" for line in _reused(plan, model)]
        if model.trained and model.settings.lora is not None and model.settings.lora.new is not None:
            lines.append(f"{'':<{width}}{_start_text(model.settings.lora, str(model.settings.path))}")
    shared = {role: model.share for role, model in plan.spec.models if model is not None and model.share is not None}
    of_start = {True: "with the adapters that it starts from", False: "without adapters"}
    lines += [
        f"{role:<{width}}the base weights of {owner}, {of_start[plan.placement[owner].keeps_start]}"
        for role, owner in shared.items()
    ]
    for count, nodes in _by_value(plan.processes.by_node()).items():
        which = "each of nodes" if len(nodes) > 1 else "node"
        lines.append(f"{'environment':<{width}}{counted(count, 'process')} on {which} {span_of(tuple(sorted(nodes)))}")
    pairs = plan.placement.co_located_pairs()
    lines.append("share devices: " + (", ".join(f"{a} + {b}" for a, b in pairs) or "none"))
    lines.append("idle: " + (ranks_text(plan.placement.idle_ranks) if plan.placement.idle_ranks else "none"))
    lines += [f"device classes: {plan.placement.reason}"] if plan.placement.reason else []
    lines += [f"rollout.engine: auto is {plan.choice}"] if plan.choice else []
    lines += [f"rollout.kv_tokens: not written, {plan.cache}"] if plan.cache else []
    return lines + [f"warning: {text}" for text in (*plan.placement.warnings, *gpu_warnings(plan))]


def _start_text(lora: LoraSpec, path: str) -> str:
    """Return whether training goes on with the adapters in ``path``, or has new ones of ``lora``."""
    return (
        f"merges the adapters in {path}, new ones of rank {lora.rank}"
        if lora.new
        else f"goes on with the adapters in {path}"
    )


def environment_lines(plan: Plan) -> Iterator[str]:
    """Yield the environment, its processes by rank, and the limits of its turns."""
    environment = plan.spec.environment
    if environment is None:
        return
    parts = [
        f"{counted(number, 'process')} of {'each of ' * (len(ranks) > 1)}{ranks_text(ranks)}"
        for number, ranks in _by_value(dict(sorted(plan.processes.by_rank().items()))).items()
    ]
    tokens = "" if environment.turn_tokens is None else f" of at most {environment.turn_tokens} tokens"
    yield f"{environment.name}: {', '.join(parts)}"
    turns = f"at most {counted(environment.max_turns, 'turn')}{tokens}"
    yield f"{turns}; a reply may take {environment.timeout_seconds:g} s"
    # programs of a process run at once
    most = plan.processes.most_episodes if environment.api is None else 1
    limit = plan.spec.timeout_seconds / 2
    if most * environment.timeout_seconds > limit:
        yield f"all replies to a turn may take {limit:g} s: {limit / most:.3g} s each of the {most} of a process"
    if most * environment.seconds > limit:
        enough = math.ceil(most * environment.seconds / limit) * sum(plan.processes.by_node().values())
        yield (
            f"warning: {most} replies of {environment.seconds:g} s, one after the other, would take longer; use "
            f"{enough} processes, unless the environment is async"
        )


def _by_value(values: Mapping[Key, Value]) -> dict[Value, tuple[Key, ...]]:
    """Return the keys that have each value."""
    keys: dict[Value, list[Key]] = defaultdict(list)
    for key, value in values.items():
        keys[value].append(key)
    return {value: tuple(found) for value, found in keys.items()}


def _stages(model: PlacedModel, shape: ModelShape | None) -> Iterator[str]:
    """Yield a line for each pipeline stage: its ranks, its layers, and other weights."""
    layout = model.layout
    if layout.dims.pp == 1 or shape is None:
        return
    for stage in range(layout.dims.pp):
        ranks = tuple(rank for rank in model.ranks if layout.index("pp", rank) == stage)
        names = [name for name, _ in shape.of_stage(stage, layout.dims.pp).parameters]
        layers = sorted({number for name in names if (number := ParameterName(name).layer) is not None})
        others = sorted({name.removesuffix(".weight") for name in names if ParameterName(name).layer is None})
        shown = f", {', '.join(others)}" if others else ""
        yield f"stage {stage} on {ranks_text(ranks)}: layers {layers[0]}-{layers[-1]}{shown}"


def _reused(plan: Plan, copy: PlacedModel) -> Iterator[str]:
    """Yield lines on the weights that a copy and its source store once on ranks that both have, and why others are
    stored twice.
    """
    source, reusing = plan.placement[copy.role], plan.sizing.reusing
    common = [rank for rank in copy.ranks if rank in source.ranks]
    if not (copy.follows and common and copy.role in plan.shapes):
        return
    if reason := copy.obstacle_to_reuse(source, plan.spec.sync.dtype):
        yield f"next to the weights of {source.name}: {reason}"
        return
    if not plan.spec.debug.reused_weights:
        yield f"next to the weights of {source.name}: debug.reused_weights is false"
        return
    texts = {rank: _reused_text(plan.sizing.reuse(copy, rank), source) for rank in common}
    for text, ranks in _by_value(texts).items():
        yield text if len(ranks) == len(copy.ranks) else f"on {ranks_text(tuple(sorted(ranks)))} {text}"
    if user := reusing.get(copy.name, "its training"):
        yield f"next to shards of {source.name}, because of {user} meanwhile"


def _reused_text(reuse: Reuse | None, source: PlacedModel) -> str:
    """Return which weights a copy and its source store once on a rank."""
    if reuse is None or not (reuse.views or reuse.lent):
        return f"next to the weights of {source.name}, which are not inside its own"
    stored, once = (reuse.source_elements(names) for names in (reuse.source_parts, reuse.views | reuse.lent))
    if stored > once:
        why = source.shared_buffer or "they are not inside its own"
        return f"next to {100 * (stored - once) / stored:.3g} % of the weights of {source.name}: {why}"
    if reuse.lent:
        return f"contains the weights of {source.name}, which have no memory of their own meanwhile"
    return f"views of the weights of {source.name}" + ", next to its others" * (len(reuse.views) < len(reuse.parts))


def _computed(plan: Plan, model: PlacedModel) -> str:
    """Return the operators of a copy, where operators are placed or it is a hybrid engine's, and how long it exists."""
    tokens = {name: f" in passes of {number} tokens" for name, number in plan.placement.pass_tokens.items()}
    names = [name + tokens.get(name, "") for name, copy in plan.placement.operators.items() if copy == model.name]
    names += ["generate"] if model.is_hybrid and not names else []
    return (": " + ", ".join(names) if names else "") + (", released after it" if model.is_transient else "")
