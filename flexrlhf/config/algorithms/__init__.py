"""Algorithms as a user writes them: one class each, with every default on its field."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import Field

from flexrlhf.config.algorithms.base import AlgorithmSpec, LossAggregation
from flexrlhf.config.algorithms.group import DynamicSamplingSpec, GroupSpec, GrpoSpec, GspoSpec, RaftSpec, RlooSpec
from flexrlhf.config.algorithms.policy import (
    K3_LIMIT,
    AcShareSpec,
    CovarianceSpec,
    KlEstimator,
    KlSpec,
    LagrangeSpec,
    OverlongSpec,
    PolicySpec,
    PpoSpec,
    PtxSpec,
    ReinforceSpec,
    RemaxSpec,
    ReturnsSpec,
    SafeRlhfSpec,
    TruncationPenalty,
)
from flexrlhf.config.algorithms.sampled import ImportanceSpec, RejectionSpec, SampledSpec
from flexrlhf.config.algorithms.supervised import (
    DpoSpec,
    KtoSpec,
    OrpoSpec,
    PreferenceSpec,
    RewardSpec,
    SftSpec,
    SimpoSpec,
)
from flexrlhf.config.presets.filling import PEERS

GroupAlgorithm = GrpoSpec | RlooSpec | GspoSpec | RaftSpec
PolicyAlgorithm = PpoSpec | AcShareSpec | GroupAlgorithm | ReinforceSpec | RemaxSpec | SafeRlhfSpec
PreferenceAlgorithm = DpoSpec | SimpoSpec | OrpoSpec | KtoSpec
AnyAlgorithm = PolicyAlgorithm | PreferenceAlgorithm | SftSpec | RewardSpec
Algorithm = Annotated[AnyAlgorithm, Field(discriminator="name")]
ALGORITHMS: tuple[str, ...] = tuple(kind.model_fields["name"].default for kind in get_args(AnyAlgorithm))
_CLASSES: dict[str, type[AlgorithmSpec]] = dict(zip(ALGORITHMS, get_args(AnyAlgorithm), strict=True))


def with_preset(written: Any) -> dict[str, Any] | None:
    """Return the settings of ``algorithm`` with its preset filled in; None where it names none that exists for it."""
    if not isinstance(written, dict) or not isinstance(written.get("like"), str):
        return None
    name, peer = written.get("name"), PEERS.get(written["like"])
    if peer is None or not isinstance(name, str) or name not in peer.trainers:
        return None
    return _CLASSES[name].with_preset(written)


__all__ = [
    "ALGORITHMS",
    "K3_LIMIT",
    "AcShareSpec",
    "Algorithm",
    "AlgorithmSpec",
    "AnyAlgorithm",
    "CovarianceSpec",
    "DpoSpec",
    "DynamicSamplingSpec",
    "GroupSpec",
    "GrpoSpec",
    "GspoSpec",
    "ImportanceSpec",
    "KlEstimator",
    "KlSpec",
    "KtoSpec",
    "LagrangeSpec",
    "LossAggregation",
    "OrpoSpec",
    "OverlongSpec",
    "PolicyAlgorithm",
    "PolicySpec",
    "PreferenceAlgorithm",
    "PreferenceSpec",
    "PpoSpec",
    "PtxSpec",
    "RaftSpec",
    "ReinforceSpec",
    "RejectionSpec",
    "RemaxSpec",
    "ReturnsSpec",
    "RewardSpec",
    "RlooSpec",
    "SafeRlhfSpec",
    "SampledSpec",
    "SftSpec",
    "SimpoSpec",
    "TruncationPenalty",
    "with_preset",
]
