"""Text of a plan on its preset: settings of ``algorithm.like``, settings of the YAML that differ, and missing ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from textwrap import wrap
from typing import Any

from flexrlhf.config.spec import Spec
from flexrlhf.errors import shown

WIDTH = 116
"""Columns of a line, without its indent."""


def preset_lines(spec: Spec) -> list[str]:
    """Return lines on the preset of ``spec``; none without one."""
    peer = spec.algorithm.peer
    if peer is None:
        return []
    of = spec.algorithm
    trainer, values = peer.trainers[of.name], spec.model_dump(mode="json")
    there = of.peer_values(trainer, spec.steps)
    same = [key for key, value in there.items() if _is_there(value, _value(values, key))]
    # a role that is not placed has no optimizer
    written = [key for key in there if isinstance(_value(values, key.rpartition(".")[0]), dict)]
    others = [key for key in written if key not in same]
    lines = [f"set as in {peer.title}, its trainer for {spec.algorithm.name}:"]
    for section in dict.fromkeys(key.rpartition(".")[0] for key in same):
        named = (key for key in same if key.rpartition(".")[0] == section)
        settings = (f"{key.rpartition('.')[2]} {shown(there[key])}" for key in named)
        lines += _wrapped(f"{section}: {', '.join(settings)}")
    if (routers := trainer.routers) is not None and _value(values, routers.key) in routers.value.values():
        section, _, name = routers.key.rpartition(".")
        lines += _wrapped(f"{section}: {name} {shown(_value(values, routers.key))}")
    found = (f"{key} {shown(_value(values, key))}, there {shown(there[key])}" for key in others)
    lines += _listed("written otherwise:", found)
    return lines + _listed("not expressed here:", trainer.differs)


def _listed(title: str, items: Iterable[str]) -> list[str]:
    lines = [line for item in items for line in _wrapped(item)]
    return [title, *lines] if lines else []


def _wrapped(text: str) -> Iterator[str]:
    first, *rest = wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)
    yield f"- {first}"
    yield from (f"  {line}" for line in rest)


def _is_there(there: Any, value: Any) -> bool:
    """Whether a setting has the peer's value ``there``; of a mapping, the keys that the peer has."""
    if isinstance(there, dict) and isinstance(value, dict):
        return all(value.get(key) == each for key, each in there.items())
    return bool(value == there)


def _value(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values
