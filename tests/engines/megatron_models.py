"""Models in Megatron-Core's parts, stages and replicas on four ranks, and their training data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from both_heads import FAST
from small_models import TINY, likelihood, mini_batch, squared_values
from torch import Tensor

from flexrlhf.config.axes import ParallelDims
from flexrlhf.config.model_settings import Head, ModelSpec
from flexrlhf.engines.base import Batch, Loss, Moments, Outputs, Totals
from flexrlhf.operators.columns import Column
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.placed import ModelName, PlacedModel

FOUR = (0, 1, 2, 3)
UPDATES = 3
LLAMA = {**TINY, "intermediate_size": 32, "num_hidden_layers": 4}
QWEN2 = {**LLAMA, "model_type": "qwen2"}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
# one stage has a layer without experts
QWEN3_MOE = {**QWEN3, **_EXPERTS, "model_type": "qwen3_moe", "mlp_only_layers": [1]}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4}
TIED = {"tie_word_embeddings": True}
PADDED = {"pad_token_id": 3}
SCALED = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}

MEGATRON = ("tp", "pp", "cp", "context_parallel", "zero", "activation_checkpointing", "pack_texts")
"""Settings of a case that change no number."""


@dataclass(frozen=True)
class Case:
    """A model on some of the ranks, and how."""

    ranks: tuple[int, ...]
    init: dict[str, Any] = field(default_factory=lambda: LLAMA)
    head: Head = "causal"
    settings: dict[str, Any] = field(default_factory=dict)
    is_from_files: bool = False

    def placed(self, path: Path | None = None, engine: str = "megatron") -> PlacedModel:
        """The model as the case places it; with torch on one rank, with the same weights. ``path``: its files."""
        settings = {"micro_batch_tokens": 12, "optimizer": FAST, **self.settings, "engine": engine}
        if engine == "torch":
            settings = {name: value for name, value in settings.items() if name not in MEGATRON}
        source = {"path": str(path)} if self.is_from_files and path is not None else {"init": self.init}
        spec = ModelSpec(**source, **settings)
        layout = (
            Layout(self.ranks, ParallelDims(spec.tp, spec.pp, cp=spec.cp)) if engine == "megatron" else Layout((0,))
        )
        return PlacedModel(ModelName("actor"), layout, True, spec, head=self.head)

    @property
    def column(self) -> Column:
        return Column.of("values" if self.head == "scalar" else "logprobs")


CASES = {
    "tp": Case((0, 1), settings={"tp": 2}),
    "pp": Case((2, 3), settings={"pp": 2}),
    "dp": Case((1, 2)),
    "alone": Case((3,), settings={"zero": 1}),
    "tp pp": Case(FOUR, settings={"tp": 2, "pp": 2}),
    "tp dp, distributed optimizer": Case(FOUR, settings={"tp": 2, "zero": 1}),
    "pp dp, distributed optimizer, tied": Case(FOUR, {**LLAMA, **TIED}, settings={"pp": 2, "zero": 1}),
    "four stages, tied": Case(FOUR, {**QWEN2, **TIED}, settings={"pp": 4}),
    "values, tp pp": Case(FOUR, head="scalar", settings={"tp": 2, "pp": 2}),
    "qwen3, tp dp": Case(FOUR, QWEN3, settings={"tp": 2}),
    "qwen2, tp, recomputed": Case((1, 3), QWEN2, settings={"tp": 2, "activation_checkpointing": True}),
    "mistral, pp, unpacked": Case(
        (0, 2), {**LLAMA, "model_type": "mistral", **SCALED}, settings={"pp": 2, "pack_texts": False}
    ),
    "one pass, tp pp": Case(FOUR, {**LLAMA, **PADDED}, settings={"tp": 2, "pp": 2, "micro_batch_tokens": 512}),
    "one pass, dp": Case((0, 1), settings={"micro_batch_tokens": 512}),
    "ring, pp": Case(FOUR, settings={"cp": 2, "pp": 2, "context_parallel": "ring", "activation_checkpointing": True}),
    "ulysses, tp": Case(FOUR, QWEN3, settings={"cp": 2, "tp": 2}),
    "ring, dp, distributed optimizer, tied": Case(
        FOUR, {**LLAMA, **TIED, **PADDED}, settings={"cp": 2, "context_parallel": "ring", "zero": 1}
    ),
    "experts, ring": Case(FOUR, QWEN3_MOE, settings={"cp": 2, "tp": 2, "context_parallel": "ring"}),
    "ulysses, values": Case((0, 1), head="scalar", settings={"cp": 2}),
    "tied, tp": Case((0, 1), {**LLAMA, **TIED, **PADDED}, settings={"tp": 2}),
    "experts, tp pp, recomputed": Case(FOUR, QWEN3_MOE, settings={"tp": 2, "pp": 2, "activation_checkpointing": True}),
    "experts, tp dp, distributed optimizer": Case(FOUR, MIXTRAL, settings={"tp": 2, "zero": 1}),
    "experts, values, 16 bits, pp": Case((0, 1), MIXTRAL, head="scalar", settings={"pp": 2, "dtype": "bfloat16"}),
    "experts, 16 bits, pp": Case((0, 1), QWEN3_MOE, settings={"pp": 2, "dtype": "bfloat16"}),
    "files, tp pp": Case(FOUR, settings={"tp": 2, "pp": 2}, is_from_files=True),
    "16 bits, files, tp dp": Case(FOUR, settings={"tp": 2, "dtype": "bfloat16"}, is_from_files=True),
    "16 bits, tp dp": Case(FOUR, settings={"tp": 2, "dtype": "bfloat16", "zero": 1}),
    "values, 16 bits, pp": Case((0, 1), head="scalar", settings={"pp": 2, "dtype": "bfloat16"}),
}


IN_FULL_ALONE = (
    *("tp", "pp", "dp", "tp pp", "one pass, dp", "16 bits, files, tp dp", "qwen3, tp dp"),
    *("ring, dp, distributed optimizer, tied", "ulysses, values", "experts, ring"),
    *("experts, tp dp, distributed optimizer", "experts, 16 bits, pp", "experts, values, 16 bits, pp"),
)
"""Cases that others have with a further setting."""
TOGETHER = "pp dp, distributed optimizer, tied"
"""The case of two models at once."""


def poisoned(row: int) -> Loss:
    """A loss that is not finite on one row."""

    def function(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Moments]:
        factor = torch.where(batch.rows == row, torch.nan, 1.0)[:, None]
        return -(factor * outputs.quantity * batch.mask).sum() / totals.tokens, {}

    return Loss("logprobs", function, ())


def parts_of(case: Case, step: int, rows: slice) -> list[tuple[Batch, Loss]]:
    """The losses of one optimizer step, of which ``rows`` are this replica's; the second step has two."""
    loss = squared_values() if case.head == "scalar" else likelihood()
    return [(mini_batch(step + 10 * number, rows=7).select(rows), loss) for number in range(2 if step == 1 else 1)]


def rows_of(layout: Layout, rank: int) -> slice:
    """A batch of seven rows; the first of two replicas has most."""
    if layout.dp == 1:
        return slice(None)
    return slice(0, 5) if layout.replica(rank) == 0 else slice(5, 7)
