"""Biases by which routers choose experts, which no gradient changes: a controller balances experts by them.

After an optimizer step the bias of each expert moves by a constant, up if fewer tokens of the whole mini-batch took the
expert than one in the mean, down if more did (Loss-Free Balancing; Wang et al. 2024, algorithm 1; DeepSeek-V3, section
2.1.2). Weights of experts follow from scores without the biases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexrlhf.weights.parameters import ParameterName


def router_biases(model: nn.Module) -> dict[str, Tensor]:
    """Return the biases of a model's routers by name: buffers in float32, whole on every rank."""
    return {name: bias for name, bias in model.named_buffers() if ParameterName(name).is_router_bias}


class BiasController:
    """Controller of the biases of ``routers``, by layer, which move by ``rate`` in a step."""

    def __init__(self, routers: Sequence[Any], rate: float) -> None:
        self._routers, self._rate = routers, rate
        self._load: Tensor | None = None

    def add(self, load: Tensor) -> None:
        """Add tokens (layers, E) of each expert, over all ranks, that the next step trains on."""
        self._load = load if self._load is None else self._load + load

    @torch.no_grad()
    def step(self) -> None:
        """Move the biases after an optimizer step on the tokens that were added."""
        if self._load is None:
            return
        for router, load in zip(self._routers, self._load, strict=True):
            bias = router.e_score_correction_bias
            bias.add_(self._rate * (load.mean() - load).sign().to(bias.dtype))

    def clear(self) -> None:
        """Forget the tokens that were added."""
        self._load = None
