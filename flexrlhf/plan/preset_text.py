"""Text of a plan on its preset: settings of ``algorithm.like``, settings of the YAML that differ, and missing ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from textwrap import wrap
from typing import Any

from flexrlhf.config.presets.filling import PEERS
from flexrlhf.config.presets.table import Cell
from flexrlhf.config.spec import Spec
from flexrlhf.errors import shown

WIDTH = 116
"""Columns of a line, without its indent."""


def preset_lines(spec: Spec) -> list[str]:
    """Return lines on the preset of ``spec``; none without one."""
    if spec.algorithm.like is None:
        return []
    peer = PEERS[spec.algorithm.like]
    trainer, values = peer.trainers[spec.algorithm.name], spec.model_dump(mode="json")
    same = [cell for cell in trainer.cells if _is_there(cell, _value(values, cell.key), spec)]
    # a role that is not placed has no optimizer
    written = [cell for cell in trainer.cells if isinstance(_value(values, cell.key.rpartition(".")[0]), dict)]
    others = [cell for cell in written if cell not in same]
    lines = [f"set as in {peer.title}, its trainer for {spec.algorithm.name}:"]
    for section in dict.fromkeys(cell.key.rpartition(".")[0] for cell in same):
        named = (cell for cell in same if cell.key.rpartition(".")[0] == section)
        settings = (f"{cell.key.rpartition('.')[2]} {shown(_there(cell, spec))}" for cell in named)
        lines += _wrapped(f"{section}: {', '.join(settings)}")
    if (routers := trainer.routers) is not None and _value(values, routers.key) in routers.value.values():
        section, _, name = routers.key.rpartition(".")
        lines += _wrapped(f"{section}: {name} {shown(_value(values, routers.key))}")
    lines += _listed("written otherwise:", (_difference(cell, _value(values, cell.key), spec) for cell in others))
    return lines + _listed("not expressed here:", trainer.differs)


def _listed(title: str, items: Iterable[str]) -> list[str]:
    lines = [line for item in items for line in _wrapped(item)]
    return [title, *lines] if lines else []


def _wrapped(text: str) -> Iterator[str]:
    first, *rest = wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)
    yield f"- {first}"
    yield from (f"  {line}" for line in rest)


def _difference(cell: Cell, value: Any, spec: Spec) -> str:
    return f"{cell.key} {shown(value)}, there {shown(_there(cell, spec))}"


def _is_there(cell: Cell, value: Any, spec: Spec) -> bool:
    """Whether a setting has the peer's value; of a mapping, the keys that the peer has."""
    there = _there(cell, spec)
    if isinstance(there, dict) and isinstance(value, dict):
        return all(value.get(key) == each for key, each in there.items())
    return bool(value == there)


def _there(cell: Cell, spec: Spec) -> Any:
    """Return the peer's value; a number that follows from others, for this spec."""
    of = spec.algorithm
    return cell.resolved(of.prompts_per_step, of.samples_per_prompt, spec.steps, of.num_mini_batches * of.epochs)


def _value(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values
