"""Engine profiles: what differs between engines on the same device, one named set of constants for each.

Fitted on published measurements (``benchmarks/calibration``), never on one row of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class EngineProfile:
    """Constants of forward and training passes; those of generation are in ``decoders``.

    ``attention``: speed of its attention kernels, that of FlashAttention 2 being 1.
    ``elements``: bytes that element-wise kernels of a layer move, those of plain 16-bit kernels being 1 (normalising
    in 32 bits unfused moves several times as many). ``loss_bytes``: that each logit moves in its loss, forward and
    backward. ``overlap``: share of the shorter of compute and collectives over replicas that hides behind the other.
    ``repeats``: share of a layer's forward pass that selective recomputation does again. ``sequence_parallel``:
    tensor-parallel ranks share element-wise work too. ``pass_launch_seconds``: of one layer in one pass, on the host.
    ``adapter_elements``: passes over a product's result that a low-rank adapter beside it adds. ``chunks``: pieces of
    each pipeline stage whose micro-batches are interleaved, which divides the bubble (PTD-P, section 2.2).
    """

    name: str
    attention: float = 1.0
    elements: float = 2.8
    loss_bytes: float = 30.0
    overlap: float = 0.73
    repeats: float = 0.5
    sequence_parallel: bool = False
    pass_launch_seconds: float = 0.6e-3
    adapter_elements: float = 4.6
    chunks: int = 1


# compiled: torch.compile and sequence parallelism (torchtitan). foundry: FSDP of torch 1.13 and 2.0 with Triton's first
# FlashAttention (llm-foundry). prime-rl: FSDP2, FlashAttention 3, modules of transformers. megatron repeats attention
# only, which fused attention does anyway; megatron-lm interleaves its pipeline, engines that took it over do not.
_MEGATRON = EngineProfile("megatron", elements=0.51, repeats=0.0, sequence_parallel=True)

PROFILES = {
    profile.name: profile
    for profile in (
        EngineProfile("torch"),
        EngineProfile("compiled", elements=1.6, sequence_parallel=True),
        EngineProfile("foundry", elements=0.92, attention=0.53),
        EngineProfile("prime-rl", elements=6.7, attention=1.95),
        EngineProfile("deepspeed"),
        _MEGATRON,
        replace(_MEGATRON, name="megatron-lm", chunks=3),
        EngineProfile("transformers"),
    )
}
