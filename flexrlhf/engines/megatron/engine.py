"""Engine on Megatron-Core: tensor-parallel parts and pipeline stages on any ranks, several models in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from flexrlhf.api import Column, model_sizes
from flexrlhf.api.engine import (
    Batch,
    EngineContext,
    HostOffload,
    Lender,
    Loss,
    MemoryUsage,
    Moments,
    NonFiniteStep,
    PassSettings,
    Readout,
    Sampling,
    Skeleton,
    StateTensor,
    TrainingState,
    storage_bytes,
)
from flexrlhf.engines.megatron.adapters import starting_weights
from flexrlhf.engines.megatron.config import gradient_config, prepare_process, transformer_config
from flexrlhf.engines.megatron.experts import expert_blocks
from flexrlhf.engines.megatron.facts import MEGATRON
from flexrlhf.engines.megatron.passes import StagePasses
from flexrlhf.engines.megatron.stage import Named, Stage, StageShape, add_adapters, rows_by_name
from flexrlhf.engines.megatron.update import StageUpdate


class MegatronEngine(Lender):
    """Stage of a model on this rank; ``Engine`` in engines/base.py documents the methods.

    ``weights`` of a 16-bit model are in 16 bits: with zero 1 the float32 masters are in flat ranges.
    """

    num_requests = 0

    def __init__(self, context: EngineContext) -> None:
        if context.device.type == "cpu":
            # Megatron-Core addresses CUDA by name; planning refuses CPUs without this module
            import_module(MEGATRON.cpu_module).install()
        prepare_process(context.seed)
        placed, self._settings = context.placed, context.placed.settings
        ranks = context.ranks.stages
        assert ranks is not None, "an engine with stages has their groups"
        context.check_links()
        skeleton = Skeleton.of(context)
        self.config = skeleton.model.config
        groups = process_groups(context)
        self._stage = _stage(context, skeleton, groups)
        if self._settings.lora is not None:
            add_adapters(self._stage, self._settings.lora, placed.keeps_start)
        if not placed.trained:
            self._stage.requires_grad_(False)
        self._named: Named = rows_by_name(self._stage)
        source = _Source(context, skeleton)
        _read(source, self._named)
        module: nn.Module = self._stage
        self._update: StageUpdate | None = None
        if placed.trained:
            module = DistributedDataParallel(
                self._stage.config, gradient_config(self._settings), self._stage, pg_collection=groups
            )
            world = ranks.model.group or context.ranks.alone
            assert world is not None, "the plan has a group of one rank for every rank of a Megatron model"
            copies = placed.layout.dims.cp
            self._update = StageUpdate(self._settings, module, groups, world, context.num_updates, copies)
            if self._settings.dtype != "float32":
                _read_masters(source, self._update.tensors(self._named)[TrainingState.WEIGHTS])
        laid_out = PassSettings.of(context, self.config)
        # sequence parallelism gives each rank as many tokens of a row, or of its part
        parts = placed.layout.width if self._stage.config.sequence_parallel else 1
        multiple = lcm(laid_out.multiple, parts)
        self._passes = StagePasses(
            module=module,
            readout=Readout.of(context, self.config, self._stage.head),
            pass_settings=replace(laid_out, masks=False, multiple=multiple),
            groups=groups,
            dp=context.ranks.dp,
            stages=ranks.stages,
        )
        self._host_offload = HostOffload(context.device, context.copies)

    def generate(self, batch: Batch, sampling: Sampling, ahead: Sequence[Batch] = ()) -> dict[str, Tensor]:
        raise AssertionError("planning places generation on another engine")

    def forward(self, batch: Batch, columns: Sequence[Column], adapters: bool = True) -> dict[str, Tensor]:
        with nullcontext() if adapters else starting_weights(self._stage):
            return self._passes.forward(batch, columns)

    def backward(self, parts: Sequence[tuple[Batch, Loss]]) -> Moments:
        self._trained.allocate()
        return self._passes.backward(parts)

    def step(self, parts: Sequence[tuple[Batch, Loss]]) -> Moments:
        try:
            return self._trained.step()
        except NonFiniteStep as error:
            error.first = self._passes.first_non_finite(parts)
            raise
        finally:
            self._trained.release()

    def losses(self, parts: Sequence[tuple[Batch, Loss]]) -> Moments:
        return self._passes.losses(parts)

    def weights(self) -> dict[str, Tensor]:
        return {name: rows.live for name, rows in self._named.items()}

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        for name, values in weights.items():
            live = self._named[name].live
            live.copy_(values.view(live.shape))

    def training_state(self) -> TrainingState:
        tensors = self._trained.tensors(self._named)
        for of_kind in tensors.values():
            for name, each in of_kind.items():
                of_kind[name] = replace(each, values=self._host_offload.readable(each.values))
        return TrainingState(tensors, self._trained.numbers)

    def load_numbers(self, numbers: Mapping[str, float]) -> None:
        self._trained.load_numbers(numbers)

    def _usage(self) -> MemoryUsage:
        update = self._update
        return MemoryUsage(
            weights=storage_bytes(self._parameters()),
            gradients=update.gradient_bytes if update else 0,
            optimizer=storage_bytes(update.state_tensors()) if update else 0,
        )

    def _tensors(self) -> list[Tensor]:
        return [*self._parameters(), *(self._update.state_tensors() if self._update else [])]

    def close(self) -> None:
        del self._stage, self._named, self._passes, self._update

    @property
    def _trained(self) -> StageUpdate:
        assert self._update is not None, "this placed model is not trained"
        return self._update

    def _parameters(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self._stage.parameters()]


def _stage(context: EngineContext, skeleton: Skeleton, groups: ProcessGroupCollection) -> Stage:
    """Return the stage of this rank, whose weights are not read yet."""
    placed, config = context.placed, skeleton.model.config
    sizes = model_sizes(config.to_dict())
    assert sizes is not None, "planning refuses families that are not mapped"
    shape = StageShape(
        sizes=sizes,
        head=placed.head,
        is_tied=context.is_tied(config),
        padding_token=skeleton.model.get_input_embeddings().padding_idx,
        chunk_elements=placed.settings.logits_at_a_time,
        blocks=expert_blocks(skeleton.model),
        float32_routers=context.switches.float32_routers,
    )
    frequencies: Any = skeleton.model.base_model.rotary_emb.inv_freq
    stage = Stage(transformer_config(placed, sizes, config), shape, frequencies, groups)
    return stage.to(context.device)


class _Source:
    """Parts of the weights on this rank, from files or from the model that was loaded whole."""

    def __init__(self, context: EngineContext, skeleton: Skeleton) -> None:
        self.parts = skeleton.planned_parts(context)
        self._skeleton = skeleton
        self._loaded = dict(skeleton.model.named_parameters())

    def values(self, name: str) -> Tensor:
        """Return this rank's part of a parameter as a vector, float32 and on the CPU."""
        part = self.parts[name]
        if name not in self._skeleton.stored:
            box = tuple(slice(side.start, side.stop) for side in part.box)
            return self._loaded[name].detach()[box].reshape(-1)
        values = torch.empty(part.num_elements)
        self._skeleton.read(name, values)
        return values


@torch.no_grad()
def _read(source: _Source, named: Named) -> None:
    assert source.parts.keys() == named.keys(), f"{sorted(source.parts.keys() ^ named.keys())} are not mapped"
    for name, rows in named.items():
        rows.live.copy_(source.values(name).view(rows.live.shape))
        if not source.parts[name].is_whole:
            # the norm of all gradients counts each part; Megatron says so where it initialises weights
            parameter: Any = rows.parameter
            parameter.tensor_model_parallel = True


@torch.no_grad()
def _read_masters(source: _Source, masters: Mapping[str, StateTensor]) -> None:
    """Read the master weights of a 16-bit model, which Megatron has made of the rounded ones."""
    for name, master in masters.items():
        assert master.flat is not None, "masters are ranges"
        master.values.copy_(source.values(name)[master.flat.start : master.flat.stop])


def process_groups(context: EngineContext) -> ProcessGroupCollection:
    """Return the groups of this rank; a rank that is alone in one has a group of its own there."""
    ranks, alone, of_stages = context.ranks, context.ranks.alone, context.ranks.stages
    assert of_stages is not None, "an engine with stages has their groups"
    assert alone is not None, "the plan has a group of one rank for every rank of a Megatron model"

    def group(of: dist.ProcessGroup | None) -> dist.ProcessGroup:
        return alone if of is None else of

    dp, tp, same_part = group(ranks.dp.group), group(ranks.tp.group), group(ranks.same_part.group)
    stages, replica, ends = group(of_stages.stages.group), group(ranks.replica.group), group(of_stages.ends.group)
    return ProcessGroupCollection(
        tp=tp,
        pp=stages,
        mp=replica,
        embd=ends,
        pos_embd=alone,
        dp=dp,
        dp_cp=same_part,
        intra_dp_cp=same_part,
        intra_dist_opt=group(of_stages.model.group),
        # attention of parts of rows is ours
        cp=alone,
        tp_cp=tp,
        ep=alone,
        expt_tp=tp,
        tp_ep=tp,
        tp_ep_pp=replica,
        expt_dp=same_part,
        intra_expt_dp=same_part,
    )
