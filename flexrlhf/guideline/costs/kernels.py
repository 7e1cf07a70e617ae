"""Time of single kernels: matrix products, attention, passes over memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import pow
from pathlib import Path

from flexrlhf.api import DeviceClass
from flexrlhf.guideline.costs.profiles import read_table

TILE = 128
LAUNCH_SECONDS = 1e-5
"""Host time of one product in a loop over experts: assumed, a layer of about 45 kernels taking 0.47 ms in decoding
(``decoders.csv``)."""


@dataclass(frozen=True)
class KernelFigures:
    """Constants of all devices (``kernels.csv``), fitted on kernel timings by ``benchmarks/calibration/kernels.py``.

    wave:           part of one wave of tiles that stays idle, on the average, at the end of a matrix product
    depth:          terms of the inner dimension that starting and ending a tile costs
    start_seconds:  start of a kernel
    blend:          how sharply arithmetic and memory traffic replace each other as the limit (exponent; infinite: their
                    maximum)
    weights:        share of the memory bandwidth that a product reaches
    elements:       share of it that element-wise passes over activations reach
    """

    wave: float
    depth: float
    start_seconds: float
    blend: float
    weights: float
    elements: float


FIGURES = KernelFigures(**{row["name"]: float(row["value"]) for row in read_table(Path(__file__).with_suffix(".csv"))})


def matmul_seconds(
    m: float, k: float, n: float, device: DeviceClass, item: float = 2, figures: KernelFigures = FIGURES
) -> float:
    """Return the time of [m, k] times [k, n]: the roofline with a smooth ridge, plus the waste of tiles. Never
    decreases in m, k or n."""
    idle = figures.wave * device.cores * min(m, TILE) * min(n, TILE)
    arithmetic = 2 * (m * n + idle) * (k + figures.depth) / (device.matmul * device.tflops * 1e12)
    traffic = item * (m * k + k * n + m * n) / (figures.weights * device.memory_gb_s * 1e9)
    blended = pow(arithmetic, figures.blend) + pow(traffic, figures.blend)
    return figures.start_seconds + pow(blended, 1 / figures.blend)


def grouped_seconds(
    groups: float, m: float, k: float, n: float, device: DeviceClass, item: float = 2, figures: KernelFigures = FIGURES
) -> float:
    """Return the time of ``groups`` products of [m, k] and [k, n], each with a matrix of its own, in one kernel.

    It is that of one product of all rows, in which half a tile is idle for each group, at most as much as the group
    has rows; it reads the matrices of all groups. No measurement is behind it.
    """
    if groups <= 1:
        return matmul_seconds(m, k, n, device, item, figures)
    rows = groups * (m + min(m, TILE / 2))
    idle = figures.wave * device.cores * min(m, TILE) * min(n, TILE)
    arithmetic = 2 * (rows * n + idle) * (k + figures.depth) / (device.matmul * device.tflops * 1e12)
    traffic = item * groups * (m * k + k * n + m * n) / (figures.weights * device.memory_gb_s * 1e9)
    blended = pow(arithmetic, figures.blend) + pow(traffic, figures.blend)
    return figures.start_seconds + pow(blended, 1 / figures.blend)


def looped_seconds(groups: float, m: float, k: float, n: float, device: DeviceClass, item: float = 2) -> float:
    """Return the time of the products of ``grouped_seconds`` if torch has no kernel for all of them: one after the
    other, as fast as the host launches them, after it has read how many rows each has."""
    return LAUNCH_SECONDS + groups * max(LAUNCH_SECONDS, matmul_seconds(m, k, n, device, item))


def attention_seconds(rows: float, width: float, channels: float, device: DeviceClass, speed: float = 1.0) -> float:
    """Return the time of fused causal attention over ``rows`` rows of ``width`` tokens in one layer.

    Half of the square and the whole blocks on its diagonal (FlashAttention 2, section 3.1). ``channels``: heads times
    head size. ``speed``: relative to the kernels of FlashAttention 2; attention is no faster than matrix products.
    """
    flops = 2 * rows * channels * width * (width + TILE)
    return flops / (min(speed * device.attention, device.matmul) * device.tflops * 1e12)


def elements_seconds(size: float, device: DeviceClass, figures: KernelFigures = FIGURES) -> float:
    """Return the time of element-wise kernels that move ``size`` bytes."""
    return size / (figures.elements * device.memory_gb_s * 1e9)
