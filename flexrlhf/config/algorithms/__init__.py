"""Algorithms: the settings of each, as a user writes them, and the graph of its operators. One file for each family."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import Field, SerializeAsAny

from flexrlhf.config.algorithms.base import AlgorithmSpec
from flexrlhf.config.algorithms.grpo import GrpoSpec, GspoSpec, RaftSpec, RlooSpec
from flexrlhf.config.algorithms.ppo import AcShareSpec, PpoSpec, SafeRlhfSpec
from flexrlhf.config.algorithms.reinforce import ReinforceSpec, RemaxSpec
from flexrlhf.config.algorithms.supervised import DpoSpec, KtoSpec, OrpoSpec, RewardSpec, SftSpec, SimpoSpec
from flexrlhf.config.presets.filling import PEERS
from flexrlhf.config.strict_model import plugin_settings

_Sampling = PpoSpec | AcShareSpec | GrpoSpec | RlooSpec | GspoSpec | RaftSpec | ReinforceSpec | RemaxSpec | SafeRlhfSpec
AnyAlgorithm = _Sampling | DpoSpec | SimpoSpec | OrpoSpec | KtoSpec | SftSpec | RewardSpec
Algorithm = Annotated[
    SerializeAsAny[Annotated[AnyAlgorithm, Field(discriminator="name")]], plugin_settings("algorithms")
]
ALGORITHMS: tuple[str, ...] = tuple(kind.model_fields["name"].default for kind in get_args(AnyAlgorithm))
_CLASSES: dict[str, type[AlgorithmSpec]] = dict(zip(ALGORITHMS, get_args(AnyAlgorithm), strict=True))


def with_preset(written: Any) -> dict[str, Any] | None:
    """Return the settings of ``algorithm`` with its preset filled in; None if there is none of that name."""
    if not isinstance(written, dict) or not isinstance(written.get("like"), str):
        return None
    name, peer = written.get("name"), PEERS.get(written["like"])
    if peer is None or not isinstance(name, str) or name not in peer.trainers:
        return None
    return _CLASSES[name].with_preset(written)
