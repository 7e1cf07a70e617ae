"""Engine profiles: what differs between engines on the same device, one row of constants each (``engines.csv``)."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path

from flexrlhf.guideline.costs.constants import named_rows, read_rows


@dataclass(frozen=True)
class EngineProfile:
    """Constants of an engine's forward and training passes; those of generation are in ``decoders``.

    name:                 the engine
    attention:            speed of its attention kernels, that of FlashAttention 2 being 1
    elements:             bytes that element-wise kernels of a layer move, those of plain 16-bit kernels being 1
                          (normalising in 32 bits unfused moves several times as many)
    loss_bytes:           bytes that each logit moves in its loss, forward and backward
    overlap:              share of the shorter of compute and collectives over replicas that hides behind the other
    repeats:              share of a layer's forward pass that selective recomputation does again
    sequence_parallel:    whether tensor-parallel ranks share element-wise work too
    pass_launch_seconds:  launching the kernels of one layer in one pass, on the host
    adapter_elements:     passes over a product's result that a low-rank adapter adds to it
    gather_gb_s:          most GB/s of a node to others in gathering sharded weights or scattering gradients; empty:
                          what its links reach
    gather_within_gb_s:   the same of a device inside its node
    reached:              share of all these speeds that passes reach, but for collectives and the optimizer
    tensor_reached:       share of the speed of tensor-parallel collectives that they reach
    stops_early:          whether recomputing a layer ends before its last matrix product, whose result the backward
                          pass does not need (``torch.utils.checkpoint`` without reentrance)
    chunks:               parts of each pipeline stage whose micro-batches are interleaved, which divides the bubble
                          (PTD-P, section 2.2)
    """

    name: str
    attention: float
    elements: float
    loss_bytes: float
    overlap: float
    repeats: float
    sequence_parallel: bool
    pass_launch_seconds: float
    adapter_elements: float
    stops_early: bool
    chunks: int
    gather_gb_s: float = inf
    gather_within_gb_s: float = inf
    reached: float = 1.0
    tensor_reached: float = 1.0


def read_engines(path: Path) -> dict[str, EngineProfile]:
    """Return the engine profiles of a table, by name."""
    return named_rows(EngineProfile, read_rows(path))


PROFILES = read_engines(Path(__file__).with_name("engines.csv"))
"""Engine name → profile. ``serving``: forward passes of inference engines."""
