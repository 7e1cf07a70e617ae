"""The noise of ``sampling.gumbel_noise`` on a GPU in one pass over its memory; as torch operations it takes about 24.

Import this module where Triton is installed: it is torch's own on CUDA.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


def gumbel_noise_of(keys: Tensor, vocabulary: int) -> Tensor:
    """Return Gumbel noise (n, vocabulary), float64, of the hashes ``keys``, int64 (n,)."""
    noise = torch.empty(len(keys), vocabulary, dtype=torch.float64, device=keys.device)
    _kernel[len(keys), triton.cdiv(vocabulary, BLOCK)](keys, noise, vocabulary, BLOCK)
    return noise


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(keys, noise, vocabulary, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * block + tl.arange(0, block)
    inside = columns < vocabulary
    x = tl.load(keys + row).to(tl.uint64, bitcast=True) + (columns + 1).to(tl.uint64) * _GOLDEN
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    x = (x ^ (x >> 31)) >> 12
    uniform = (x.to(tl.float64) + 0.5) * 2.220446049250313e-16
    tl.store(noise + row * vocabulary + columns, -tl.log(-tl.log(uniform)), mask=inside)
