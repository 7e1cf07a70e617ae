"""Published and predicted training throughputs, and the fit of the engines' constants.

``python -m benchmarks.calibration.training DIRECTORY [--fit]``
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from benchmarks.calibration.command import command
from benchmarks.calibration.descent import descend, mean_and_square
from benchmarks.calibration.rows import Prediction, Row, device_of, read_models, read_rows
from benchmarks.systems.engines import PROFILES
from flexrlhf.config.axes import ParallelDims
from flexrlhf.guideline.costs.cost_model import Call, Links, Mesh, Recompute, Transformer
from flexrlhf.guideline.costs.profiles import EngineProfile
from flexrlhf.guideline.costs.training import train_cost
from flexrlhf.placement.devices import DeviceClass

Item = TypeVar("Item", DeviceClass, EngineProfile)
Knob = tuple[tuple[str, ...], str]
"""A constant: device classes or engine profiles that share it, and its field."""

_H100 = ("H100-80G", "H800-80G", "H200-141G", "H100-96G")
_SHARDED = ("torch", "compiled", "foundry", "prime-rl", "deepspeed", "megatron", "megatron-lm")
_KNOBS: dict[Knob, str] = {
    (("A100-40G", "A100-80G", "A800-80G"), "attention"): "device",
    (_H100, "attention"): "device",
    (_H100, "sustained"): "device",
    (("V100-16G", "V100-32G"), "sustained"): "device",
    (("foundry",), "attention"): "profile",
    (("prime-rl",), "attention"): "profile",
    (("torch", "deepspeed", "transformers", "deepspeed-2021"), "elements"): "profile",
    (("compiled",), "elements"): "profile",
    (("foundry",), "elements"): "profile",
    (("prime-rl",), "elements"): "profile",
    (("megatron", "megatron-lm", "megatron-2021"), "elements"): "profile",
    (tuple(PROFILES), "loss_bytes"): "profile",
    (_SHARDED, "overlap"): "profile",
    (("prime-rl",), "adapter_elements"): "profile",
}
_SAVE: Knob = (("prime-rl",), "save")

SAVE_GB_S = 1.66
"""Speed of writing 16-bit weights into a directory that generation servers read. Fitted."""

# llm-foundry's MPT configurations: hidden size, heads; layers follow from the parameters.
_MPT = {
    "125m": (768, 12),
    "350m": (1024, 16),
    "760m": (1536, 12),
    "1b": (2048, 16),
    "3b": (2560, 20),
    "7b": (4096, 32),
    "13b": (5120, 40),
    "30b": (7168, 56),
    "70b": (8192, 64),
}
_MPT_VOCABULARY = 50368
# Megatron's GPT models by billions of parameters: layers, hidden size, heads (Megatron-LM, table 1; PTD-P, table 1).
_GPT = {
    1.2: (40, 1536, 16),
    1.7: (24, 2304, 24),
    2.5: (54, 1920, 20),
    3.6: (30, 3072, 32),
    4.2: (64, 2304, 24),
    8.3: (72, 3072, 32),
    13.0: (40, 5120, 40),
    22.0: (48, 6144, 64),
    39.1: (48, 8192, 64),
    76.1: (60, 10240, 80),
    145.6: (80, 12288, 96),
    174.6: (96, 12288, 96),
    310.1: (96, 16384, 128),
    529.6: (105, 20480, 128),
    1008.0: (128, 25600, 160),
}
_GPT_VOCABULARY, _GPT_WIDTH = 51200, 2048
_PIPELINE_FILL = 8
"""Micro-batches per pipeline stage if a row does not state them (selective recomputation, table 3)."""
_ENGINES = {
    "llm-foundry": "foundry",
    "prime-rl": "prime-rl",
    "Megatron": "megatron-lm",
    "NeMo": "megatron-lm",
    "DeepSpeed": "deepspeed",
    "ZeRO": "deepspeed",
}
_RANK = re.compile(r"r=(\d+)")


@dataclass(frozen=True)
class TrainingCase:
    """A row as a call on a mesh.

    row:       the row
    call:      the call
    mesh:      its devices
    measured:  measured seconds
    saved:     bytes of weights that it also writes
    """

    row: Row
    call: Call
    mesh: Mesh
    measured: float
    saved: float = 0.0

    @property
    def ideal(self) -> float:
        """Time of its operations at the device's peak in seconds, without recomputation."""
        operations = _operations(self.call, 3) * self.call.rows * self.call.width
        return operations / (self.mesh.dims.tp * self.mesh.dims.pp * self.mesh.device.tflops * 1e12)


def predictions(directory: Path) -> list[Prediction]:
    cases, _ = read_cases(directory)
    utilisation = median(case.ideal / case.measured for case in cases)
    return [_prediction(case, utilisation) for case in cases]


def _prediction(case: TrainingCase, utilisation: float) -> Prediction:
    return Prediction(
        goal="training",
        group=case.row["group"],
        row=case.row["id"],
        measured=case.measured,
        predicted=_seconds(case),
        constant_mfu=case.ideal / utilisation,
        roofline=max(case.ideal, _bytes(case) / (case.mesh.device.memory_gb_s * 1e9)),
    )


def _bytes(case: TrainingCase) -> float:
    """Return the bytes of weights and optimizer states that a device reads at least."""
    return 16 * case.call.model.trained_parameters / case.mesh.size


def _seconds(case: TrainingCase, values: Mapping[Knob, float] | None = None) -> float:
    values = values or {}
    device, profile = case.mesh.device, PROFILES[case.call.engine]
    mesh = replace(case.mesh, device=_with(device, values)) if values else case.mesh
    cost = train_cost(case.call, mesh, _with(profile, values) if values else profile)
    return cost.seconds + case.saved / (values.get(_SAVE, SAVE_GB_S) * 1e9)


def _with(item: Item, values: Mapping[Knob, float]) -> Item:
    """Return ``item`` with its fields among ``values``; a hidden fraction is at most 1."""
    own: dict[str, Any] = {
        field: min(value, 1.0) if field == "overlap" else value
        for (names, field), value in values.items()
        if item.name in names and hasattr(item, field)
    }
    return replace(item, **own)


def fitted() -> dict[str, float]:
    """Return every constant that the fit sets, with its present value."""
    return {f"{field} of {', '.join(names)}": value for (names, field), value in _values().items()}


def _values() -> dict[Knob, float]:
    owners: dict[str, Mapping[str, DeviceClass | EngineProfile]] = {"device": DeviceClass.KNOWN, "profile": PROFILES}
    now = {knob: getattr(owners[kind][knob[0][0]], knob[1]) for knob, kind in _KNOBS.items()}
    return now | {_SAVE: SAVE_GB_S}


def fit(cases: list[TrainingCase]) -> dict[Knob, float]:
    """Return the constants with the smallest relative errors."""
    return descend(
        lambda values: mean_and_square([abs(_seconds(case, values) / case.measured - 1) for case in cases]), _values()
    )


def read_cases(directory: Path) -> tuple[list[TrainingCase], dict[str, str]]:
    """Return training rows as calls, and the reason for each row that is left out."""
    models = read_models(directory)
    read = {row["id"]: _case(row, models) for row in _train_rows(directory)}
    cases = [case for case in read.values() if isinstance(case, TrainingCase)]
    return cases, {name: reason for name, reason in read.items() if isinstance(reason, str)}


def _train_rows(directory: Path) -> list[Row]:
    names = sorted(path.stem for path in directory.glob("measurements*.csv"))
    return [row for name in names for row in read_rows(directory, name) if row["kind"] == "train"]


def _case(row: Row, models: Mapping[str, Transformer]) -> TrainingCase | str:
    device = device_of(row)
    if device is None:
        return f"no figures of {row['gpu']}"
    if "MoE" in row["model"]:
        return "mixture of experts"
    if row["dtype"].endswith("fp8"):
        return "8-bit products"
    model = _model(row, models)
    if model is None:
        return f"shape of {row['model']} unknown"
    return _measured(row, _call(row, model, _mesh(row, model, device)), _mesh(row, model, device))


def _model(row: Row, models: Mapping[str, Transformer]) -> Transformer | None:
    family, _, size = row["model"].partition("-")
    if family == "MPT":
        return _mpt(size, float(row["actor_b"]) * 1e9, int(row["prompt_len"]))
    if family == "GPT":
        return _gpt(float(row["actor_b"]))
    known = {name.lower(): model for name, model in models.items()}
    model = known.get(row["model"].lower()) or known.get(row["model"].lower().replace("llama-3-", "llama-3.1-"))
    rank = _RANK.search(row["lora"])
    return replace(model, adapters=_adapters(model, int(rank[1]))) if model and rank else model


def _mpt(size: str, parameters: float, positions: int) -> Transformer | None:
    """Return the shape of an MPT model; its layers follow from its parameters without the tied embedding and the
    learned positions."""
    if size not in _MPT:
        return None
    hidden, heads = _MPT[size]
    layers = round((parameters - (_MPT_VOCABULARY + positions) * hidden) / (12 * hidden**2))
    return _plain(layers, hidden, heads, _MPT_VOCABULARY)


def _gpt(billions: float) -> Transformer:
    """Return the published shape nearest in parameters."""
    nearest = min(_GPT, key=lambda known: abs(known - billions))
    return _plain(*_GPT[nearest], _GPT_VOCABULARY)


def _plain(layers: int, hidden: int, heads: int, vocabulary: int) -> Transformer:
    """Return a shape with layers as in GPT-2."""
    return Transformer(
        layers=layers,
        hidden=hidden,
        ffn=4 * hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocabulary=vocabulary,
        gated=False,
        tied=True,
    )


def _adapters(model: Transformer, rank: int) -> int:
    """Return the parameters of two matrices of ``rank`` for each matrix product of a layer."""
    attention = model.head_dim * (2 * model.heads + 2 * model.kv_heads) + 4 * model.hidden
    ffn = (3 if model.gated else 2) * (model.hidden + model.ffn)
    return model.layers * rank * (attention + ffn)


def _mesh(row: Row, model: Transformer, device: DeviceClass) -> Mesh:
    size = int(row["n_gpus"] or 8)
    tp, pp = _split(row, model, device)
    return Mesh(
        device=device,
        links=Links(device.link_gb_s, device.node_gb_s),
        dp=max(1, size // (tp * pp)),
        dims=ParallelDims(tp, pp),
        per_node=min(int(row["gpus_per_node"] or 8), size),
        zero=_zero(row),
    )


def _split(row: Row, model: Transformer, device: DeviceClass) -> tuple[int, int]:
    """Return tensor-parallel ranks and pipeline stages: the row's, or for Megatron the fewest whose memory fits the
    weights."""
    if row["system"] != "Megatron-LM" or row["tp"]:
        return _number(row, "tp"), _number(row, "pp")
    least = 6 * model.parameters / (0.5 * device.memory_gb * 1e9)
    ranks = next(ranks for ranks in (2**power for power in range(20)) if ranks >= least)
    return min(ranks, 8), max(1, ranks // 8)


def _number(row: Row, name: str) -> int:
    found = re.search(rf"{name.upper()}(\d+)", row["zero"])
    return int(row[name] or (found[1] if found else 1))


def _zero(row: Row) -> int:
    text = f"{row['system']} {row['zero']}"
    if "SHARD_GRAD_OP" in text or "ZeRO-2" in text:
        return 2
    return 3 if "FSDP" in text or "ZeRO-3" in text else 1


def _call(row: Row, model: Transformer, mesh: Mesh) -> Call:
    width = float(row["prompt_len"] or _GPT_WIDTH)
    micro_rows = int(row["micro_bs"] or 1)
    return Call(
        kind="train",
        model=model,
        engine=_engine(row),
        rows=_rows(row, mesh, micro_rows),
        prompt=0.0,
        responses=(width,),
        width=width,
        micro_rows=micro_rows,
        recompute=_recompute(row),
    )


def _rows(row: Row, mesh: Mesh, micro_rows: int) -> int:
    if row["n_microbatch"]:
        return micro_rows * int(row["n_microbatch"])
    if row["global_batch"]:
        return max(1, int(row["global_batch"]) // mesh.dp)
    return micro_rows * (_PIPELINE_FILL * mesh.dims.pp if mesh.dims.pp > 1 else 1)


def _engine(row: Row) -> str:
    system = row["system"]
    if row["source"] == "ptd-p":
        return "deepspeed-2021" if system.startswith("DeepSpeed") else "megatron-2021"
    if system == "torchtitan":
        return "compiled" if "compile" in row["zero"] else "torch"
    return next((engine for start, engine in _ENGINES.items() if system.startswith(start)), "torch")


def _recompute(row: Row) -> Recompute:
    """Return the recomputation of a row. If it is not stated, Megatron's utilisations are with selective recomputation,
    earlier rates with full."""
    text = row["grad_ckpt"]
    if text in ("no", "none"):
        return "none"
    return "selective" if text.startswith("selective") or (not text and row["metric"] == "MFU") else "full"


def _measured(row: Row, call: Call, mesh: Mesh) -> TrainingCase | str:
    value, tokens = float(row["value"]), call.rows * call.width * mesh.dp
    if row["unit"] == "tokens/s/GPU":
        return TrainingCase(row, call, mesh, tokens / mesh.size / value)
    if row["unit"] == "tokens/s (total)":
        return TrainingCase(row, call, mesh, tokens / value, _saved(row, call))
    if row["unit"] == "ms":
        return TrainingCase(row, call, mesh, value / 1e3)
    rate = {"%": value / 100 * mesh.device.tflops, "TFLOP/s/GPU": value}.get(row["unit"])
    if rate is None:
        return f"{row['metric']} in {row['unit']}"
    return TrainingCase(row, call, mesh, _operations(call, _counted_passes(row)) * tokens / mesh.size / (rate * 1e12))


def _counted_passes(row: Row) -> int:
    """Return the forward passes whose operations a published rate counts: utilisations do not count recomputation,
    PTD-P's and FSDP's rates do; Megatron's first paper does not (its table 1)."""
    return 3 if row["unit"] == "%" or row["source"] == "megatron-v1" else 4


def _operations(call: Call, passes: int) -> float:
    """Return the operations of one token as papers count them, with all of attention's square (PTD-P, section 5.1)."""
    model = call.model
    layer = 2 * model.matrix_parameters
    attention = 4 * model.heads * model.head_dim * call.width
    return passes * model.layers * (layer + attention) + 3 * 2 * model.head_parameters


def _saved(row: Row, call: Call) -> float:
    """Return the bytes that a row writes: prime-rl's RL steps pass trained weights to generation servers through a
    directory."""
    return 0.0 if call.model.adapters or not row["call"].startswith("rl") else 2.0 * call.model.parameters


if __name__ == "__main__":
    command(sys.modules[__name__], lambda knob: f"{knob[1]} of {', '.join(knob[0])}")
