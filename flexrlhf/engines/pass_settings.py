"""Settings by which the sequences of a model are laid out in passes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.output_settings import NO_SWITCHES, Switches
from flexrlhf.engines.models import DTYPES
from flexrlhf.engines.row_split import RowSplit
from flexrlhf.memory.packed_rows import may_pack, takes_lengths
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

    def within(self, budget: int | None) -> PassSettings:
        """Return the settings of passes of so many computed tokens; None: as they are."""
        return self if budget is None else replace(self, budget=budget)


def pass_settings(
    settings: ModelSpec,
    config: Any,
    lengths: Lengths,
    device: torch.device,
    split: RowSplit | None = None,
    switches: Switches = NO_SWITCHES,
) -> PassSettings:
    """Return how sequences are laid out for a model. ``config``: its Hugging Face config."""
    # without a window the config of Qwen2-MoE has one of 0
    of_model = config.model_type, settings.attention, getattr(config, "sliding_window", None) or None, lengths.total
    takes_masks = may_pack(*of_model)
    return PassSettings(
        lengths=lengths,
        budget=settings.micro_batch_tokens,
        packs=settings.pack_texts and takes_masks,
        shares=settings.share_prompts,
        dtype=DTYPES[settings.dtype],
        masks=not takes_lengths(*of_model),
        # torch's attention would copy a mask of any other width in each layer
        multiple=(1 if device.type == "cpu" else 8) * (1 if split is None else split.multiple),
        split=split,
        slots=takes_masks and switches.slots,
        pins=switches.pinned_memory,
        graphs=settings.cuda_graphs,
    )
