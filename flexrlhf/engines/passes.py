"""Passes of one transformers model on this rank, whatever engine owns it: decode, forward, and backward of losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, masking_utils

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.engines.base import Batch, EngineContext, Loss, Moments, RowSource, Sampling, Totals, add_moments
from flexrlhf.engines.decoding import Decoding, KeptRows
from flexrlhf.engines.language_head import LanguageHead
from flexrlhf.engines.loss_passes import LossPasses
from flexrlhf.engines.micro_batch import MicroBatch
from flexrlhf.engines.models import recomputing, starting_weights
from flexrlhf.engines.pass_settings import PassSettings
from flexrlhf.engines.readout import Computed, PassRequest, Readout
from flexrlhf.engines.router_biases import router_biases
from flexrlhf.engines.router_losses import RouterTotals
from flexrlhf.engines.router_replay import MISMATCH, Routers, make_routers
from flexrlhf.operators.columns import Column


@dataclass
class Passes(LossPasses):
    """Passes of one model, micro-batch by micro-batch.

    model:          the model.
    call:           the model, or the wrapper of the engine's library around it.
    readout:        its heads, and how quantities follow from them.
    settings:       of the placed model: token budgets of micro-batches.
    pass_settings:  by which sequences are laid out in micro-batches.
    dp:             data-parallel group of the model.
    routers:        of a model whose experts are counted, recorded or replayed; None: they are not.
    kept:           rows that keep their keys and values from step to step; None: none do.
    lockstep:       ranks that gather weights or reduce gradients during a pass, so that all of them must call the model
                    equally often: a rank with fewer rows makes idle passes up to the largest count. None: none do.
    """

    model: PreTrainedModel
    call: Callable[..., Any]
    readout: Readout
    settings: ModelSpec
    pass_settings: PassSettings
    dp: RankGroup
    lockstep: RankGroup | None
    routers: Routers | None = None
    kept: KeptRows | None = None

    @classmethod
    def of(
        cls,
        context: EngineContext,
        model: PreTrainedModel,
        call: Callable[..., Any],
        head: LanguageHead | None,
        lockstep: bool,
    ) -> Passes:
        """Return the passes of the model of ``context``; the other arguments are those of ``Passes`` and ``Readout``.

        lockstep:  whether ranks with the same part of the model must call it equally often.
        """
        placed, config, ranks = context.placed, model.config, context.ranks
        return cls(
            model,
            call,
            Readout.of(context, config, head),
            placed.settings,
            PassSettings.of(context, config),
            ranks.dp,
            ranks.same_part if lockstep else None,
            make_routers(model, placed.settings, placed.trained),
            None if context.kept_slots is None else KeptRows(context.kept_slots),
        )

    def generate(self, batch: Batch, sampling: Sampling) -> dict[str, Tensor]:
        """Sample responses, as ``Engine.generate``; context-parallel ranks to a part of the prompts each."""
        split = self.pass_settings.split
        if split is None:
            return self._generate(batch, sampling)
        own = split.rows(len(batch), batch.samples_per_prompt)
        columns = {}
        for name, values in self._generate(batch.select(own), sampling).items():
            whole = values.new_zeros(len(batch), *values.shape[1:])
            whole[own] = values
            columns[name] = split.ranks.sum(whole)
        return columns

    @torch.no_grad()
    def _generate(self, batch: Batch, sampling: Sampling) -> dict[str, Tensor]:
        decoding, num_rows = self._decoding(batch, sampling)
        calls = decoding.calls(num_rows)
        busy = next(calls, False)
        while self._num_passes(int(busy)):
            busy = next(calls, False) if busy else self._idle_pass(batch.rows.device)
        return decoding.columns()

    @torch.no_grad()
    def advance(self, source: RowSource, sampling: Sampling) -> int:
        """Sample from rows that go on one by one, in slots, as ``Engine.advance``; return how many were due."""
        if (batch := source.due(wait=True)) is None:
            return 0
        decoding, num_rows = self._decoding(batch, sampling, source)
        for _ in decoding.calls(num_rows):
            pass
        return decoding.num_rows

    def drop_kept_rows(self) -> None:
        """Drop keys and values, as ``Engine.drop_kept_rows``."""
        if self.kept is not None:
            self.kept.drop()

    def _decoding(self, batch: Batch, sampling: Sampling, source: RowSource | None = None) -> tuple[Decoding, int]:
        """Return the decoding of ``batch``, and how many rows may be decoded together."""
        lengths = self.readout.lengths
        routers = self.routers if self.settings.has_replay else None
        # evaluations go on with no row
        kept = self.kept if sampling.step >= 0 else None
        decoding = Decoding(self.model, batch, sampling, lengths.response, self.pass_settings, routers, source, kept)
        return decoding, max(1, self.settings.generate_tokens // lengths.total)

    def _idle_pass(self, device: torch.device) -> bool:
        """Call the model on one token while other ranks decode. Returns False: this rank has no rows left."""
        token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.model(
            input_ids=token,
            attention_mask=torch.ones_like(token),
            position_ids=token,
            use_cache=False,
            logits_to_keep=1,
        )
        return False

    @torch.no_grad()
    def forward(self, batch: Batch, columns: Sequence[Column], adapters: bool) -> dict[str, Tensor]:
        """Compute ``columns`` (n, ...) of every row in one pass, as ``Engine.forward``."""
        request = PassRequest.of(columns)
        with nullcontext() if adapters else starting_weights(self.model):
            pieces = []
            for piece in self.micro_batches(batch):
                with self._replaying(piece):
                    pieces.append((piece, self._compute(piece, request)))
        return self.readout.columns(pieces, columns, batch.rows.device)

    def backward(self, parts: Sequence[tuple[Batch, Loss]], backward: Callable[[Tensor, bool], None]) -> Moments:
        """Compute the sum of the losses, each of its own mini-batch, and return their statistics.

        Calls ``backward(contribution, is_last)`` for every micro-batch.
        """
        assert parts, "an optimizer step needs a loss"
        empty = torch.zeros(3, dtype=torch.float64, device=parts[0][0].rows.device)
        statistics: Moments = {name: empty for _, loss in parts for name in loss.statistics}
        if self.routers is not None and any(Column.EXPERTS in batch.columns for batch, _ in parts):
            statistics[MISMATCH] = empty
        if self.routers is not None:
            self.routers.clear()
        counted = []
        for batch, loss in parts:
            pieces = self.micro_batches(batch)
            counted.append((loss, Totals.of(batch, self.dp), self._router_totals(loss, pieces), pieces))
        work = [(loss, totals, of_routers, piece) for loss, totals, of_routers, pieces in counted for piece in pieces]
        for number, (loss, totals, of_routers, piece) in enumerate(work):
            with self._training(piece):
                computed = self._compute(piece, self.readout.request_for(loss))
                value, part = self.readout.loss(loss, totals, piece, computed)
                value = value + self._router_loss(of_routers)
                add_moments(statistics, part)
                if self.routers is not None:
                    add_moments(statistics, self.routers.mismatch(piece))
                backward(value, number == len(work) - 1)
        if self.routers is not None:
            statistics |= self.routers.balance(self._over_all_rows, self.dp.is_first, empty.device)
        return statistics

    def _router_totals(self, loss: Loss, pieces: Sequence[MicroBatch]) -> RouterTotals | None:
        """Return the totals of the routers' losses of a mini-batch; None: they have none."""
        if self.routers is None or self.routers.losses is None:
            return None
        request = PassRequest.without_gradient(loss)
        return self.routers.totals(
            pieces, lambda piece: self._compute(piece, request), self._over_all_rows, self.model.device
        )

    def _router_loss(self, totals: RouterTotals | None) -> Tensor | float:
        """Return the contribution () of the last pass to the routers' losses."""
        if totals is None or self.routers is None or self.routers.losses is None:
            return 0.0
        return self.routers.losses.value(totals)

    def recomputing(self) -> AbstractContextManager[None]:
        """Let the layers inside recompute their activations in backward."""
        return recomputing(self.model)

    @property
    def router_biases(self) -> dict[str, Tensor]:
        """Biases of the model's routers by name: buffers in float32, whole on every rank."""
        return router_biases(self.model)

    def balance_experts(self) -> None:
        """Move the biases of routers after an optimizer step on the passes since ``end_step``."""
        if self.routers is not None and self.routers.biases is not None:
            self.routers.biases.step()

    def end_step(self) -> None:
        """Forget the tokens of a step, whether it was made or left out."""
        if self.routers is not None and self.routers.biases is not None:
            self.routers.biases.clear()

    def idle_loss(self, loss: Loss) -> Tensor:
        """Return 0 () from a pass of ``loss`` that does not count, with a gradient of 0 for every trained weight."""
        piece = MicroBatch.one_idle(self.pass_settings, self.model.device)
        computed = self._compute(piece, self.readout.request_for(loss))
        return self.readout.loss(loss, Totals(1, 1, 1), piece, computed)[0]

    @torch.no_grad()
    def losses(self, parts: Sequence[tuple[Batch, Loss]]) -> Moments:
        """Compute the losses, each of its own mini-batch, and those of the routers."""
        if self.routers is not None:
            self.routers.clear()
        statistics = super().losses(parts)
        if self.routers is not None and self.routers.losses is not None:
            found = self.routers.losses.statistics(self._over_all_rows, self.dp.is_first, self.model.device)
            statistics |= found
            statistics["total_loss"][1] += self.routers.losses.weighted(found)
        return statistics

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        pieces = list(MicroBatch.split(batch, self.pass_settings))
        num_idle = self._num_passes(len(pieces)) - len(pieces)
        return pieces + [MicroBatch.one_idle(self.pass_settings, batch.rows.device)] * num_idle if num_idle else pieces

    def evaluated(self, pieces: Sequence[MicroBatch], loss: Loss) -> Iterator[tuple[MicroBatch, Computed]]:
        request, of_routers = PassRequest.without_gradient(loss), self._router_totals(loss, pieces)
        for piece in pieces:
            with self._training(piece):
                computed = self._compute(piece, request)
                self._router_loss(of_routers)
            yield piece, computed

    def _replaying(self, piece: MicroBatch) -> AbstractContextManager[None]:
        return nullcontext() if self.routers is None else self.routers.replaying(piece)

    def _over_all_rows(self, counts: Tensor) -> Tensor:
        """Sum ``counts`` over all ranks that have other tokens."""
        split = self.pass_settings.split
        return self.dp.sum(counts if split is None else split.ranks.sum(counts))

    def _training(self, piece: MicroBatch) -> AbstractContextManager[None]:
        return nullcontext() if self.routers is None else self.routers.training(piece)

    def _num_passes(self, count: int) -> int:
        """Return ``count``, or in lockstep the largest count of all its ranks."""
        return count if self.lockstep is None else self.lockstep.largest(count, self.model.device)

    def _compute(self, piece: MicroBatch, request: PassRequest) -> Computed:
        """Compute the requested quantities in one pass."""
        of_scalar_head = request.quantities - {"logprobs"}
        with self.readout.scoring(piece, request):
            logits, scores = self._call_heads(piece, "logprobs" in request.quantities, bool(of_scalar_head))
        return self.readout.read(piece, request, logits, scores)

    def _call_heads(self, piece: MicroBatch, logits: bool, scores: bool) -> tuple[Tensor | None, Tensor | None]:
        """Run the model; return the outputs of the requested heads: log-probs and entropies where the language head is
        ours, else logits (m, up to W, vocabulary) of the last positions of each row, and scores (m, W)."""
        heads = self.readout.heads
        if heads == "scalar":
            assert not logits, "a scalar head has no log-probs"
            return None, self._call(piece)
        # the last positions of each row, among which are all that predict a response token
        kept = 0 if self.readout.head is not None or piece.part is not None else piece.width - piece.shortest_prompt + 1
        if heads == "causal":
            assert not scores, "a language head has no values or scores"
            return self._call(piece, logits_to_keep=kept, use_cache=False).logits, None
        out = self._call(piece, logits_to_keep=kept, use_cache=False, with_logits=logits, with_scores=scores)
        return out.logits, out.scores

    def _call(self, piece: MicroBatch, **arguments: Any) -> Any:
        if piece.part is not None:
            with no_search_for_texts():
                tokens, positions, attended = piece.own_part(self.pass_settings.split)
                return self.call(
                    input_ids=tokens, attention_mask=None, position_ids=positions, attended=attended, **arguments
                )
        if piece.attended is not None:
            arguments["attended"] = piece.attended
        with nullcontext() if piece.has_mask else no_search_for_texts():
            return self.call(
                input_ids=piece.tokens,
                attention_mask=piece.attention_mask,
                position_ids=piece.position_ids,
                **arguments,
            )


@contextmanager
def no_search_for_texts() -> Iterator[None]:
    """Keep transformers from reading positions to find several sequences in a row, which the host waits for."""
    before = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = before
