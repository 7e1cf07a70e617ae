"""Context of all stages, and sizes of the runs on several GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import ON_CPU, ON_GPU, Scale

OF_SEVERAL = {
    "cuda": replace(ON_GPU, dtype="float32", prompt=64, response=64, micro=2048, steps=2),
    "cpu": replace(ON_CPU, samples=2, prompt=16, response=16, micro=256, steps=2),
}
"""Scales of the stages for several GPUs, in float32, in which sides are the same but for its rounding."""
_DENSE: dict[str, Any] = {"model_type": "qwen3", "tie_word_embeddings": True}
_EXPERTS = {**_DENSE, "model_type": "qwen3_moe", "norm_topk_prob": True}
_ON_GPU = {"vocab_size": 32_768, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}
_ON_CPU: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
_ON_CPU |= {"head_dim": 32, "initializer_range": 0.1}
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "dense": {**_DENSE, **_ON_GPU, "head_dim": 128, "intermediate_size": 3072, "num_hidden_layers": 28},
        "experts": {
            **{**_EXPERTS, **_ON_GPU, "head_dim": 128, "num_hidden_layers": 12},
            **{"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768},
        },
    },
    "cpu": {
        "dense": {**_DENSE, **_ON_CPU, "intermediate_size": 96, "num_hidden_layers": 4},
        "experts": {
            **{**_EXPERTS, **_ON_CPU, "num_hidden_layers": 2},
            **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        },
    },
}
"""Models of 0.5 B parameters, on CPUs of 0.2 M; heads and experts divide by all numbers of ranks."""
OPTIMIZERS = {"cuda": "{learning_rate: 1.0e-5}", "cpu": "{learning_rate: 1.0e-3, eps: 1.0e-4}"}
"""With which a wrong update is beyond the limits, and rounding is not. Adam's eps is larger for small models, in which
one weight with a gradient near 0 would be seen."""


@dataclass(frozen=True)
class Job:
    """Context of all stages.

    directory:  for everything that is written
    device:     cuda or cpu
    scale:      sizes of the stages for one GPU
    gpus:       GPUs, or ranks on CPUs, of the stages for several
    visible:    the numbers or UUIDs of these GPUs, as CUDA_VISIBLE_DEVICES has them
    settings:   of the runs on several GPUs in addition to their own, such as ``debug.backend=gloo``
    trl:        a Python with TRL, or None
    """

    directory: Path
    device: str
    scale: Scale
    gpus: int = 1
    visible: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    trl: str | None = None

    @property
    def ranks(self) -> str:
        """Word for the devices of the stages for several GPUs."""
        return "GPUs" if self.device == "cuda" else "ranks"

    def lacks(self, ranks: int) -> str:
        """Return why something that needs so many ranks cannot run; empty if it can."""
        return "" if ranks <= self.gpus else f"needs {ranks} {self.ranks}, {self.gpus} used (--gpus)"
