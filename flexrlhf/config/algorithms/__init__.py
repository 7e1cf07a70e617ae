"""Algorithms as a user writes them: one class each, with every default on its field."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field

from flexrlhf.config.algorithms.base import AlgorithmSpec, LossAggregation
from flexrlhf.config.algorithms.group import DynamicSamplingSpec, GroupSpec, GrpoSpec, GspoSpec, RaftSpec, RlooSpec
from flexrlhf.config.algorithms.policy import (
    AcShareSpec,
    CovarianceSpec,
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

GroupAlgorithm = GrpoSpec | RlooSpec | GspoSpec | RaftSpec
PolicyAlgorithm = PpoSpec | AcShareSpec | GroupAlgorithm | ReinforceSpec | RemaxSpec | SafeRlhfSpec
PreferenceAlgorithm = DpoSpec | SimpoSpec | OrpoSpec | KtoSpec
AnyAlgorithm = PolicyAlgorithm | PreferenceAlgorithm | SftSpec | RewardSpec
Algorithm = Annotated[AnyAlgorithm, Field(discriminator="name")]
ALGORITHMS: tuple[str, ...] = tuple(kind.model_fields["name"].default for kind in get_args(AnyAlgorithm))

__all__ = [
    "ALGORITHMS",
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
]
