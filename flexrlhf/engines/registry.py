"""Engine name → how to make it for one placed model on this rank. A new engine adds one line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flexrlhf.comm.reduce import Replicas
from flexrlhf.engines.base import Engine
from flexrlhf.engines.models import load_model
from flexrlhf.engines.torch import TorchEngine
from flexrlhf.operators.columns import Lengths
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.placement.shapes import HEAD_OF_ROLE
from flexrlhf.spec import ModelSpec


@dataclass(frozen=True)
class Wanted:
    """All that an engine is told: the placed model, its settings, and where and with whom it computes."""

    placed: PlacedModel
    spec: ModelSpec
    lengths: Lengths
    temperature: float
    seed: int
    replicas: Replicas
    device: torch.device


def _torch(wanted: Wanted) -> Engine:
    model = load_model(wanted.spec, HEAD_OF_ROLE[wanted.placed.role], wanted.seed, wanted.device)
    return TorchEngine(
        model, wanted.spec, wanted.lengths, wanted.replicas, wanted.temperature, trained=wanted.placed.trained
    )


ENGINES: dict[str, Callable[[Wanted], Engine]] = {"torch": _torch}


def make_engine(wanted: Wanted) -> Engine:
    return ENGINES[wanted.placed.engine](wanted)
