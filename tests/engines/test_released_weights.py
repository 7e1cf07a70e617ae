"""Weights without memory: what shares memory goes on sharing it, and nothing is kept."""

from __future__ import annotations

import torch

from flexrlhf.engines.released_weights import ReleasedWeights


def test_memory_is_freed_and_allocated_again_for_all_that_share_it() -> None:
    whole, other = torch.arange(10.0), torch.ones(3, dtype=torch.float16)
    part = whole[2:5]
    released = ReleasedWeights([part, whole, other, torch.zeros(0)])
    assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    released.allocate()
    assert whole.untyped_storage().nbytes() == 40 and other.untyped_storage().nbytes() == 6
    whole.fill_(7.0)
    assert part.tolist() == [7.0, 7.0, 7.0]


def test_a_module_computes_with_what_fills_it() -> None:
    layer = torch.nn.Linear(4, 4)
    stored = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    inputs = torch.ones(1, 4)
    before = layer(inputs)
    released = ReleasedWeights(parameter.detach() for parameter in layer.parameters())
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in layer.parameters())
    released.allocate()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(stored[name])
    assert torch.equal(layer(inputs), before)
