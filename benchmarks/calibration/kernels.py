"""Published and predicted timings of single kernels, and the fit of the kernel constants.

``python -m benchmarks.calibration.kernels DIRECTORY [--fit]``
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.calibration.command import command
from benchmarks.calibration.descent import descend, mean_and_square
from benchmarks.calibration.rows import Prediction, Row, device_of, read_rows
from flexrlhf.guideline.costs.kernels import FIGURES, KernelFigures, elements_seconds, matmul_seconds
from flexrlhf.placement.devices import DeviceClass

# Hidden size, feed-forward size, heads, key-value heads of the profiled models (their config files); heads of 128.
_SHAPES = {
    "Llama-2-7b-hf": (4096, 11008, 32, 32),
    "internlm-20b": (5120, 13824, 40, 40),
    "Llama-2-70b-hf": (8192, 28672, 64, 8),
    "Qwen-72B": (8192, 24576, 64, 64),
    "Meta-Llama-3-8B": (4096, 14336, 32, 8),
    "Meta-Llama-3-70B": (8192, 28672, 64, 8),
}
_HEAD_DIM = 128
_FEW_TOKENS = 1024
"""Tokens below which an element-wise kernel takes as long as its start, which is in the profiles' launch constants."""
_ITEM = 2


@dataclass(frozen=True)
class KernelCase:
    """One kernel on a device: a product of ``shape``, or element-wise over ``size`` bytes."""

    row: Row
    device: DeviceClass
    measured: float
    shape: tuple[int, int, int] | None = None
    size: float = 0.0

    @property
    def group(self) -> str:
        return f"{'products' if self.shape else 'elements'}/{self.row['gpu'].lower()}"

    def seconds(self, figures: KernelFigures, device: DeviceClass) -> float:
        if self.shape is None:
            return elements_seconds(self.size, device, figures)
        return matmul_seconds(*self.shape, device, _ITEM, figures)

    @property
    def flops(self) -> float:
        return 2.0 * self.shape[0] * self.shape[1] * self.shape[2] if self.shape else 0.0

    @property
    def moved(self) -> float:
        """Bytes that it moves at least."""
        if self.shape is None:
            return self.size
        m, k, n = self.shape
        return _ITEM * (m * k + k * n + m * n)


def predictions(directory: Path) -> list[Prediction]:
    cases, _ = read_cases(directory)
    utilisation = median(case.flops / (case.device.tflops * 1e12) / case.measured for case in cases if case.shape)
    return [_prediction(case, utilisation) for case in cases]


def _prediction(case: KernelCase, utilisation: float) -> Prediction:
    compute, traffic = case.flops / (case.device.tflops * 1e12), case.moved / (case.device.memory_gb_s * 1e9)
    row = case.row
    return Prediction(
        goal="kernels",
        group=case.group,
        row=f"{row['model']} tp{row['tp']} {row['op']} {row['num_tokens']}",
        measured=case.measured,
        predicted=case.seconds(FIGURES, case.device),
        constant_mfu=compute / utilisation if case.shape else traffic,
        roofline=max(compute, traffic),
    )


def read_cases(directory: Path) -> tuple[list[KernelCase], dict[str, int]]:
    """Return the timings that are predicted, and the number of others by reason."""
    cases: list[KernelCase] = []
    left_out: dict[str, int] = defaultdict(int)
    for row in _rows(directory):
        case = _case(row)
        if isinstance(case, KernelCase):
            cases.append(case)
        else:
            left_out[case] += 1
    return cases, dict(left_out)


def _rows(directory: Path) -> list[Row]:
    names = sorted(path.stem for path in directory.glob("ops*.csv"))
    return [row for name in names for row in read_rows(directory, name)]


def _case(row: Row) -> KernelCase | str:
    device, measured = device_of(row), float(row["time_ms"]) / 1e3
    if device is None:
        return f"no figures of {row['gpu']}"
    if row["m"]:
        return KernelCase(row, device, measured, (int(row["m"]), int(row["k"]), int(row["n"])))
    if row["op"] == "emb":
        return "embedding: not modelled"
    if int(row["num_tokens"]) < _FEW_TOKENS:
        return "element-wise over few tokens: its start"
    if row["model"] not in _SHAPES:
        return f"shape of {row['model']} unknown"
    return KernelCase(row, device, measured, size=_element_bytes(row))


def _element_bytes(row: Row) -> float:
    """Return the bytes of an element-wise kernel as ``flexrlhf.guideline.costs.training`` counts them."""
    hidden, ffn, heads, kv_heads = _SHAPES[row["model"]]
    tp = int(row["tp"])
    each = {
        "mlp_act": 3 * ffn / tp,
        "add": 3 * hidden,
        "attn_rope": 2 * (heads + max(kv_heads, tp)) * _HEAD_DIM / tp,
    }
    return _ITEM * int(row["num_tokens"]) * each.get(row["op"], 3 * hidden)


def fitted() -> dict[str, float]:
    """Return every constant that the fit sets, with its present value: the figures, and the fraction of the peak."""
    return asdict(FIGURES) | {"matmul": DeviceClass.matmul}


def fit(cases: list[KernelCase]) -> dict[str, float]:
    """Return the constants with the smallest relative errors of all kernels."""
    return descend(lambda values: mean_and_square(_errors(cases, values)), fitted())


def _errors(cases: list[KernelCase], values: Mapping[str, float]) -> list[float]:
    figures = KernelFigures(**{name: value for name, value in values.items() if name != "matmul"})
    devices = {name: replace(each, matmul=values["matmul"]) for name, each in DeviceClass.KNOWN.items()}
    return [abs(case.seconds(figures, devices[case.device.name]) / case.measured - 1) for case in cases]


if __name__ == "__main__":
    command(sys.modules[__name__])
