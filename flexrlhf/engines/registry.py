"""Engine name → how to make it for one placed model on this rank. A new engine adds one line here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexrlhf.comm.reduce import Replicas
from flexrlhf.engines.base import Engine
from flexrlhf.engines.models import load_model
from flexrlhf.engines.torch import TorchEngine
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.placement.shapes import HEAD_OF_ROLE
from flexrlhf.plan import Plan

Maker = Callable[[PlacedModel, Plan, Replicas, torch.device], Engine]


def _torch(model: PlacedModel, plan: Plan, replicas: Replicas, device: torch.device) -> Engine:
    spec = plan.model(model.role)
    loaded = load_model(spec, HEAD_OF_ROLE[model.role], plan.spec.seed, device)
    return TorchEngine(loaded, spec, plan.lengths, replicas, plan.temperature, model.trained)


ENGINES: dict[str, Maker] = {"torch": _torch}


def make_engine(model: PlacedModel, plan: Plan, replicas: Replicas, device: torch.device) -> Engine:
    return ENGINES[model.engine](model, plan, replicas, device)
