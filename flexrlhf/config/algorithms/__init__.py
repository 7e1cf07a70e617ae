"""Algorithms: the settings of each, as a user writes them, and the graph of its operators. One file for each family."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, SerializeAsAny

from flexrlhf.config.algorithms.base import AlgorithmSpec
from flexrlhf.config.plugins import SHIPPED, load_plugin
from flexrlhf.config.presets.filling import PEERS
from flexrlhf.config.strict_model import plugin_settings

ALGORITHMS = tuple(SHIPPED["algorithms"])
KINDS: dict[str, type[AlgorithmSpec]] = {name: load_plugin("algorithms", name) for name in ALGORITHMS}
"""Settings of each algorithm of this package."""
if TYPE_CHECKING:
    AnyAlgorithm = AlgorithmSpec
else:
    AnyAlgorithm = reduce(or_, KINDS.values())
Algorithm = Annotated[
    SerializeAsAny[Annotated[AnyAlgorithm, Field(discriminator="name")]], plugin_settings("algorithms")
]


def with_preset(written: Any) -> dict[str, Any] | None:
    """Return the settings of ``algorithm`` with its preset filled in; None if there is none of that name."""
    if not isinstance(written, dict) or not isinstance(written.get("like"), str):
        return None
    name, peer = written.get("name"), PEERS.get(written["like"])
    if peer is None or not isinstance(name, str) or name not in peer.trainers:
        return None
    return KINDS[name].with_preset(written)
