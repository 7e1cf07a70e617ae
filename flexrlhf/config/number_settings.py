"""Settings that a run's numbers depend on, and those in which two specs differ.

All other settings (placement but for roles without a shadow under a lag, cluster, engines, ZeRO stages, chunks,
micro-batches) change times and bytes. Types of numbers (``dtype``) are among those: they change numbers by their
rounding alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.placement_settings import PlacementMap
from flexrlhf.errors import shown

if TYPE_CHECKING:
    from flexrlhf.config.spec import Spec

OF_RUN = frozenset({"algorithm", "data", "reward", "cost", "environment", "eval", "seed"})
OF_MODELS = frozenset(
    {
        "path",
        "init",
        "share",
        "lora",
        "optimizer",
        "retokenize",
        "max_text_tokens",
        "router_replay",
        *ModelSpec.OF_ROUTERS,
    }
)
"""Settings of each model."""
HOW_SCORED = frozenset(
    {"batch_size", "seconds", "timeout_seconds", "workers", "deadline_seconds", "retries", "concurrency", "headers"}
)
"""Settings of a source of scores that change how it is called, not the scores."""
HOW_CALLED = frozenset({"processes", "timeout_seconds", "seconds", "memory_mb", "open_files", "max_failures"})
"""Settings of an environment that change how it is called, not its replies."""
PATHS = frozenset({"path", "tokenizer", "chat_template"})
"""Settings that name a file or directory."""


@dataclass(frozen=True)
class SettingDifference:
    """One setting of two specs that numbers depend on.

    key:     dotted, as ``--set`` takes it
    first:   value in the first spec; None if it is null or absent
    second:  value in the second one
    """

    key: str
    first: Any
    second: Any

    @classmethod
    def between(cls, first: Any, second: Any, key: str = "") -> Iterator[Self]:
        """Yield the deepest settings of two nested mappings that differ; a mapping that only one has is one setting."""
        pairs = _pairs(first, second)
        if pairs is None:
            if not _is_same(key, first, second):
                yield cls(key, first, second)
            return
        for name, (one, other) in pairs.items():
            yield from cls.between(one, other, f"{key}.{name}" if key else name)

    def __str__(self) -> str:
        return f"{self.key} is {shown(self.first)} and {shown(self.second)}"


def differing_settings(first: Spec, second: Spec) -> tuple[SettingDifference, ...]:
    """Return the settings of ``Spec.differences``."""
    one, other = number_settings(first), number_settings(second)
    if one["algorithm"]["name"] != other["algorithm"]["name"]:
        # their other settings are not comparable
        one["algorithm"], other["algorithm"] = ({"name": each["algorithm"]["name"]} for each in (one, other))
    return tuple(SettingDifference.between(one, other))


def number_settings(spec: Spec) -> dict[str, Any]:
    """Return the settings of ``spec`` that numbers depend on, nested as in the YAML."""
    # a directory of the Hub's cache is another one on another machine
    spec = spec.as_written
    raw = spec.model_dump(mode="json", by_alias=True, include=set(OF_RUN))
    # a preset is a name for settings that are filled in, and a protocol a way to split rows
    for key in ("like", "protocols"):
        raw["algorithm"].pop(key, None)
    if raw["eval"] is not None:
        raw["eval"].pop("every")
    for section in ("reward", "cost"):
        raw[section] = raw[section] and [
            {key: value for key, value in source.items() if key not in HOW_SCORED} for source in raw[section]
        ]
    if raw["environment"] is not None:
        raw["environment"] = {key: value for key, value in raw["environment"].items() if key not in HOW_CALLED}
    raw["models"] = {
        role: model.model_dump(mode="json", include=set(OF_MODELS)) for role, model in spec.models if model is not None
    }
    # a learning rate that falls towards the last step makes every step depend on their number
    is_falling = any(model is not None and model.optimizer.schedule != "constant" for _, model in spec.models)
    raw["steps"] = spec.steps if is_falling else None
    stale: dict[str, Any] = {"schedule": {"lag": spec.schedule.lag}, "sync": {"every": spec.sync.every}}
    if spec.rollout.caches == "kept":
        # rows are read again behind each
        stale["checkpoint"] = {"every": spec.checkpoint.every}
    return raw | stale | {"rollout": _rollout(spec), "placement": _shadows(spec)}


def _shadows(spec: Spec) -> dict[str, bool]:
    """Return which trained roles infer with a copy, whose weights are older than the trained ones with a lag or rare
    syncs; empty if all do."""
    if not isinstance(spec.placement, PlacementMap) or (not spec.schedule.lag and spec.sync.every == 1):
        return {}
    graph, operators = spec.algorithm.step_graph(), spec.operators
    copied = {name.partition(".")[0] for name in spec.placement.models if "." in name}
    copied |= {each.role for each in graph.operators if each.name in operators and operators[each.name].shadow}
    return {f"{role}.shadow": False for role in graph.trained if copied and role not in copied}


def _rollout(spec: Spec) -> dict[str, Any]:
    """Return the settings of the rollout engine that numbers depend on: its noise, segments, and which copy of a shared
    trunk has values."""
    rollout = spec.rollout
    settings: dict[str, Any] = {"noise": rollout.noise}
    changed = rollout.model_dump(exclude_defaults=True)
    if spec.num_segments > 1:
        settings |= {"segment_tokens": rollout.segment_tokens, "max_segments": spec.num_segments}
        settings |= {name: getattr(rollout, name) for name in ("groups", "caches", "late_replies") if name in changed}
    if spec.most_stale and any(len(each.quantities) > 1 for each in spec.algorithm.step_graph().operators):
        settings["engine"] = spec.rollout.engine
    return settings


def _pairs(first: Any, second: Any) -> dict[str, tuple[Any, Any]] | None:
    """Return the pairs of values of two mappings, or of two lists of as many mappings, by key; None for all else."""
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        if not all(isinstance(item, dict) for item in (*first, *second)):
            return None
        first, second = ({str(index): item for index, item in enumerate(items)} for items in (first, second))
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return None
    return {name: (first.get(name), second.get(name)) for name in {**first, **second}}


def _is_same(key: str, first: Any, second: Any) -> bool:
    if key.rpartition(".")[2] in PATHS and isinstance(first, str) and isinstance(second, str):
        return os.path.abspath(first) == os.path.abspath(second)
    return bool(first == second)
