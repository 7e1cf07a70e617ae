"""Passes of a model over its pipeline: one forward, one backward in turn (Narayanan et al. 2021), by Megatron-Core."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from flexrlhf.api import Column, Lengths
from flexrlhf.api.engine import (
    Batch,
    Computed,
    Loss,
    LossPasses,
    MicroBatch,
    Moments,
    PassRequest,
    PassSettings,
    RankGroup,
    Readout,
    Totals,
    add_moments,
)


@dataclass(frozen=True)
class _Work:
    """A micro-batch on its way through the stages, and the loss that backward starts from; None: there is none."""

    piece: MicroBatch
    request: PassRequest
    loss: Loss | None = None
    totals: Totals | None = None


class _Pipeline(P2PCommunicator):
    """Messages between stages, whose shapes follow from the micro-batches, which are the same on all of their ranks.

    Megatron would exchange the shape before each tensor, wait for everything on the device, and read it.
    """

    def __init__(self, group: ProcessGroup, config: TransformerConfig, work: Sequence[_Work], parts: int) -> None:
        """``parts``: ranks that share the hidden states of a row between layers."""
        super().__init__(group, config)
        shapes = [(piece.width // parts, len(piece.tokens), config.hidden_size) for piece in (w.piece for w in work)]
        self._arriving, self._returning = iter(shapes), iter(shapes)

    def _communicate_shapes(
        self, sent_on: Tensor | None, sent_back: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """Return the shapes of the hidden states and of their gradients that come next, each in order of the work."""
        return next(self._arriving) if recv_prev else None, next(self._returning) if recv_next else None


@dataclass(frozen=True)
class StagePasses(LossPasses):
    """Passes of a model of which this rank has one stage. All ranks of a replica call alike, with the same rows.

    module:         the stage of this rank, or the module around it that collects gradients.
    readout:        heads of the last stage, and what is read from them.
    pass_settings:  by which sequences are laid out in micro-batches.
    groups:         of this rank.
    dp:             data-parallel group.
    stages:         ranks at the same position in every stage, which have the same rows.
    """

    module: nn.Module
    readout: Readout
    pass_settings: PassSettings
    groups: ProcessGroupCollection
    dp: RankGroup
    stages: RankGroup

    @torch.no_grad()
    def forward(self, batch: Batch, columns: Sequence[Column]) -> dict[str, Tensor]:
        """Compute ``columns`` (n, ...) of every row, as ``Engine.forward``, on every rank of the replica."""
        request = PassRequest.of(columns)
        pieces = self.micro_batches(batch)
        computed = self._outputs([_Work(piece, request) for piece in pieces])
        return self.readout.columns(list(zip(pieces, computed, strict=True)), columns, batch.rows.device)

    def backward(self, parts: Sequence[tuple[Batch, Loss]]) -> Moments:
        """Compute the gradients of the sum of the losses, each of its own mini-batch; return their statistics."""
        empty = torch.zeros(3, dtype=torch.float64, device=parts[0][0].rows.device)
        statistics: Moments = {name: empty for _, loss in parts for name in loss.statistics}
        work = [
            _Work(piece, self.readout.request_for(loss), loss, totals)
            for batch, loss in parts
            for totals in (Totals.of(batch, self.dp),)
            for piece in self.micro_batches(batch)
        ]
        if not work:
            batch, loss = parts[0]
            idle = MicroBatch.one_idle(self.pass_settings, batch.rows.device)
            work = [_Work(idle, self.readout.request_for(loss), loss, Totals(1, 1, 1))]
        for part in self._run(work, forward_only=False):
            add_moments(statistics, part)
        # the last stage alone has computed them
        summed = self.stages.sum(torch.stack([empty, *statistics.values()]))
        return dict(zip(statistics, summed[1:], strict=True))

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        return list(MicroBatch.split(batch, self.pass_settings))

    def evaluated(self, pieces: Sequence[MicroBatch], loss: Loss) -> Iterator[tuple[MicroBatch, Computed]]:
        request = PassRequest.without_gradient(loss)
        return zip(pieces, self._outputs([_Work(piece, request) for piece in pieces]), strict=True)

    def _outputs(self, work: Sequence[_Work]) -> list[Computed]:
        """Return what is computed of each micro-batch, on every rank of the replica, without gradients."""
        if not work:
            return []
        computed = self._run(work, forward_only=True)
        if self.stages.group is None:
            return computed
        shapes = [_shapes(each, self.readout.lengths) for each in work]
        sizes = [torch.Size(shape).numel() for named in shapes for shape in named.values()]
        flat = torch.zeros(sum(sizes), device=work[0].piece.batch.rows.device)
        if computed:
            values = (each[name] for each, named in zip(computed, shapes, strict=True) for name in named)
            flat = torch.cat([tensor.float().flatten() for tensor in values])
        parts = iter(self.stages.sum(flat).split(sizes))
        return [{name: next(parts).view(shape) for name, shape in named.items()} for named in shapes]

    def _run(self, work: Sequence[_Work], forward_only: bool) -> list[Any]:
        """Pass ``work`` through the stages; return on the last one what is computed, or statistics, of each piece."""
        arguments: dict[str, Any] = {
            "forward_step_func": self._step,
            "data_iterator": iter(work),
            "model": self.module,
            "num_microbatches": len(work),
            "seq_length": 1,
            "micro_batch_size": 1,
            "forward_only": forward_only,
            "collect_non_loss_data": forward_only,
            "pg_collection": self.groups,
        }
        self.module.train(not forward_only)
        if self.groups.pp.size() == 1:
            results: list[Any] = forward_backward_no_pipelining(**arguments)
        else:
            config, split = get_model_config(self.module), self.pass_settings.split
            parts = 1 if split is None else split.num_parts
            parts *= self.groups.tp.size() if config.sequence_parallel else 1
            pipeline = _Pipeline(self.groups.pp, config, work, parts)
            results = forward_backward_pipelining_without_interleaving(**arguments, p2p_communicator=pipeline)
        # the buffer for gathered activations, which no plan contains between calls
        parallel_state.get_global_memory_buffer().buffer.clear()
        return results

    def _step(self, work: Iterator[_Work], module: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        """Compute the stage of the next micro-batch; return its output, and what the last stage makes of that."""
        each = next(work)
        with self.readout.scoring(each.piece, each.request):
            output = module(*each.piece.own_part(self.pass_settings.split))
        return output, partial(self._computed if each.loss is None else self._loss, each)

    def _computed(self, work: _Work, output: Tensor, non_loss_data: bool) -> Computed:
        """Return what is requested of the output (m, W) or (k, 2) of the head."""
        scores, logits = (output, None) if self.readout.heads == "scalar" else (None, output)
        return self.readout.read(work.piece, work.request, logits, scores)

    def _loss(self, work: _Work, output: Tensor) -> tuple[Tensor, Tensor, Moments]:
        """Return a contribution to the loss, no tokens to divide it by, and its statistics."""
        assert work.loss is not None and work.totals is not None, "backward starts from a loss"
        computed = self._computed(work, output, non_loss_data=True)
        value, statistics = self.readout.loss(work.loss, work.totals, work.piece, computed)
        return value, torch.zeros((), dtype=torch.int, device=value.device), statistics


def _shapes(work: _Work, lengths: Lengths) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what is computed of a micro-batch, by name."""
    rows = len(work.piece.batch)
    widths: dict[str, tuple[int, ...]] = {
        "logprobs": (lengths.response,),
        "values": (lengths.response + 1,),
        "token_scores": (lengths.response,),
        "scores": (),
    }
    shapes: dict[str, tuple[int, ...]] = {name: (rows, *widths[name]) for name in sorted(work.request.quantities)}
    return shapes if work.request.entropy == "none" else {**shapes, "entropy": (rows, lengths.response)}
