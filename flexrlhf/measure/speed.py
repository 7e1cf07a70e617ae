"""Speed of a device, by products of large matrices."""

from __future__ import annotations

import time

import torch

CPU_SIDE, CUDA_SIDE = 512, 4096
SECONDS = 0.5
"""Time for which products are repeated: a quota of a container is one of each tenth of a second."""


def measured_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Return TFLOP/s of products of square matrices of ``dtype`` on ``device``."""
    side = CUDA_SIDE if device.type == "cuda" else CPU_SIDE
    first, second = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    product = torch.empty(side, side, dtype=dtype, device=device)
    _multiply(first, second, product)
    began, times = time.monotonic(), 0
    while (passed := time.monotonic() - began) < SECONDS:
        _multiply(first, second, product)
        times += 1
    return 2 * side**3 * times / passed / 1e12


def _multiply(first: torch.Tensor, second: torch.Tensor, product: torch.Tensor) -> None:
    torch.mm(first, second, out=product)
    if product.is_cuda:
        torch.cuda.synchronize()
