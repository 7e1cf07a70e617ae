"""Settings by which the sequences of a model are laid out in passes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from flexrlhf.engines.base import EngineContext
from flexrlhf.engines.models import DTYPES
from flexrlhf.engines.row_split import RowSplit
from flexrlhf.memory.packed_rows import TextPacking
from flexrlhf.operators.columns import Lengths


@dataclass(frozen=True)
class PassSettings:
    """Settings by which sequences are laid out.

    lengths:  P and R of the run.
    budget:   computed tokens of a pass.
    packs:    whether several sequences are in one row.
    shares:   whether sequences with the same prompt share one copy of it.
    dtype:    of the mask that separates sequences in a row.
    masks:    whether attention reads a mask; else it takes the lengths of sequences.
    multiple: of which the tokens of a row are.
    split:    of the rows over context-parallel ranks; None: this rank computes all tokens.
    slots:    whether rows are decoded in slots of one cache, for which attention must take any mask.
    pins:     whether host memory is pinned that a GPU copies from.
    graphs:   whether passes over slots are captured as CUDA graphs.
    """

    lengths: Lengths
    budget: int
    packs: bool = False
    shares: bool = False
    dtype: torch.dtype = torch.float32
    masks: bool = True
    multiple: int = 1
    split: RowSplit | None = None
    slots: bool = False
    pins: bool = True
    graphs: bool = False

    @classmethod
    def of(cls, context: EngineContext, config: Any) -> PassSettings:
        """Return how sequences are laid out for the model of ``context``. ``config``: its Hugging Face config."""
        settings, split = context.placed.settings, RowSplit.of(context, config)
        # without a window the config of Qwen2-MoE has one of 0
        window = getattr(config, "sliding_window", None) or None
        of_model = config.model_type, settings.attention, window, context.lengths.total
        packing = TextPacking.of_family(*of_model, packs=settings.pack_texts)
        return cls(
            lengths=context.lengths,
            budget=settings.micro_batch_tokens,
            packs=packing.packs,
            shares=settings.share_prompts,
            dtype=DTYPES[settings.dtype],
            masks=packing.masks,
            # torch's attention would copy a mask of any other width in each layer
            multiple=(1 if context.device.type == "cpu" else 8) * (1 if split is None else split.multiple),
            split=split,
            slots=packing.in_slots and context.switches.slots,
            pins=context.switches.pinned_memory,
            graphs=settings.cuda_graphs,
        )

    def within(self, budget: int | None) -> PassSettings:
        """Return the settings of passes of so many computed tokens; None: as they are."""
        return self if budget is None else replace(self, budget=budget)
