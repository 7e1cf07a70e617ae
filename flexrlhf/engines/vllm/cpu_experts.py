"""Experts of vLLM's models on CPUs that multiply by their own weights.

vLLM's kernels for CPUs read packed copies, which could not be overwritten, and compute all experts of a layer on every
rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

SIGMOID_GAIN, LIMIT = 1.702, 7.0
"""Of gpt-oss's activation, whose config may have others, which vLLM does not read."""


class OwnWeightExperts(CPUUnquantizedExperts):
    """Experts of a layer, of any sizes, of which this rank may have some."""

    @staticmethod
    def classes(_: Any) -> list[type[OwnWeightExperts]]:
        """Replace vLLM's function that returns the classes of a backend."""
        return [OwnWeightExperts]

    @classmethod
    def _supports_grouped_gemm(cls, _: Any) -> tuple[bool, str | None]:
        return True, None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation in (MoEActivation.SILU, MoEActivation.SWIGLUOAI)

    def process_weights_after_loading(self, _: torch.nn.Module) -> None:
        """Leave the weights as they were loaded."""

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        expert_map: Tensor | None = None,
        **_: Any,
    ) -> None:
        """Write to ``output`` (T, H) the weighted sums of the outputs of this rank's experts of each token.

        hidden_states:  (T, H).
        w1:             (E, 2I, H) gate and up of this rank's experts.
        w2:             (E, H, I) down.
        topk_weights:   (T, k) of the outputs.
        topk_ids:       (T, k) experts of each token, numbered over all ranks.
        activation:     of gate and up, one behind the other; of gpt-oss, whose are in turn, its own.
        expert_map:     number of each expert on this rank, -1 for experts of others; None: it has all.
        """
        local = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()].long()
        outputs = hidden_states.new_zeros(*local.shape, hidden_states.shape[1])
        for expert in local.unique().tolist():
            if expert >= 0:
                chosen = local == expert
                biases = [None if each is None else each[expert] for each in (self.w1_bias, self.w2_bias)]
                inner = linear(hidden_states[chosen.any(1)], w1[expert], biases[0])
                outputs[chosen] = linear(_activated(inner, activation), w2[expert], biases[1])
        output.copy_((outputs * topk_weights.unsqueeze(-1)).sum(1))


def _activated(inner: Tensor, activation: MoEActivation) -> Tensor:
    """Return the product (T, I) of gate and up in ``inner`` (T, 2I)."""
    if activation == MoEActivation.SWIGLUOAI:
        gate, up = inner[:, ::2].clamp(max=LIMIT), inner[:, 1::2].clamp(-LIMIT, LIMIT)
        return (up + 1) * (gate * torch.sigmoid(SIGMOID_GAIN * gate))
    gate, up = inner.chunk(2, -1)
    return silu(gate) * up
