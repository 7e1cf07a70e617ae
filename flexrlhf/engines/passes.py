"""Passes of one transformers model on this rank, whatever engine owns it: decode, forward, and backward of losses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.config.spec import Head, ModelSpec
from flexrlhf.engines.base import Batch, EntropyUse, Loss, Moments, Outputs, Sampling, Totals, add_moments
from flexrlhf.engines.decoding import Decoding
from flexrlhf.engines.language_head import LanguageHead
from flexrlhf.engines.micro_batch import MicroBatch, PassSettings, idle_micro_batch, micro_batches
from flexrlhf.engines.models import DTYPES, base_weights_alone
from flexrlhf.engines.non_finite import NonFinite, TrainingPass, first_in_training, forbid_update
from flexrlhf.engines.packing import may_pack
from flexrlhf.engines.score_rule import ScoreRule
from flexrlhf.operators.columns import Column, Lengths, Quantity


@dataclass
class Passes:
    """Passes of one model, micro-batch by micro-batch.

    model:       the model.
    call:        the model, or the wrapper of the engine's library around it.
    heads:       heads that the model has.
    head:        its language head, where it is ours; None: the model's own.
    settings:    of the placed model: token budgets of micro-batches.
    lengths:     P and R of the run.
    temperature: of log-probs.
    dp:          data-parallel group of the model.
    lockstep:    whether ranks of ``dp`` gather weights or reduce gradients during a pass, so that all of them must call
                 the model equally often: a rank with fewer rows makes idle passes up to the largest count.
    score_rule:  where the score of a text is read.
    """

    model: PreTrainedModel
    call: Callable[..., Any]
    heads: Head
    head: LanguageHead | None
    settings: ModelSpec
    lengths: Lengths
    temperature: float
    dp: RankGroup
    lockstep: bool
    score_rule: ScoreRule = ScoreRule()

    @torch.no_grad()
    def generate(self, batch: Batch, sampling: Sampling) -> dict[str, Tensor]:
        """Sample responses, as ``Engine.generate``."""
        decoding = Decoding(self.model, batch, sampling, self.lengths.response, self.settings.share_prompts)
        num_rows = max(1, self.settings.generate_tokens // (self.lengths.prompt + self.lengths.response))
        calls = decoding.calls(num_rows)
        busy = next(calls, False)
        while self._num_passes(int(busy)):
            busy = next(calls, False) if busy else self._idle_pass(batch.rows.device)
        return decoding.columns()

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
        quantities = {column.name: _quantity(column) for column in columns}
        with nullcontext() if adapters else base_weights_alone(self.model):
            pieces = [(piece, self._compute(piece, set(quantities.values()))) for piece in self._micro_batches(batch)]
        computed = [(piece.order, outputs) for piece, outputs in pieces if not piece.idle]
        if computed:
            back = torch.cat([order for order, _ in computed]).argsort()
            return {
                name: torch.cat([outputs[quantity] for _, outputs in computed])[back]
                for name, quantity in quantities.items()
            }
        widths = {column.name: self.lengths.width(column) for column in columns}
        device = batch.rows.device
        return {name: torch.zeros((0,) if w is None else (0, w), device=device) for name, w in widths.items()}

    def backward(self, parts: Sequence[tuple[Batch, Loss]], backward: Callable[[Tensor, bool], None]) -> Moments:
        """Compute the sum of the losses, each of its own mini-batch, and return their statistics.

        Calls ``backward(contribution, is_last)`` for every micro-batch.
        """
        assert parts, "an optimizer step needs a loss"
        empty = torch.zeros(3, dtype=torch.float64, device=parts[0][0].rows.device)
        statistics: Moments = {name: empty for _, loss in parts for name in loss.statistics}
        counted = [(loss, self._totals(batch), self._micro_batches(batch)) for batch, loss in parts]
        work = [(loss, totals, piece) for loss, totals, pieces in counted for piece in pieces]
        for number, (loss, totals, piece) in enumerate(work):
            value, part = self._loss(loss, totals, piece)
            add_moments(statistics, part)
            backward(value, number == len(work) - 1)
        return statistics

    def _loss(self, loss: Loss, totals: Totals, piece: MicroBatch) -> tuple[Tensor, Moments]:
        """Return the contribution () of ``piece`` to the loss, and its statistics.

        Where the model has both heads, each takes part, if only with a factor of 0: ranks that reduce gradients during
        backward need the same gradients on all of them, and some libraries need one of every weight.
        """
        has_both = self.heads == "both"
        assert has_both or not loss.with_values, "only a model with both heads has values next to log-probs"
        quantities: set[Quantity] = {loss.quantity, "values"} if has_both else {loss.quantity}
        computed = self._compute(piece, quantities, loss.entropy, loss.temperature)
        if piece.idle:
            return _zero_of(computed, quantities), {}
        outputs = _outputs_of(computed, loss)
        value, statistics = loss.function(outputs, piece.batch, totals)
        forbid_update(value, [computed[quantity] for quantity in quantities])
        return (value + _zero_of(computed, quantities) if has_both else value), statistics

    @torch.no_grad()
    def first_non_finite(self, parts: Sequence[tuple[Batch, Loss]]) -> NonFinite | None:
        """Return the first row with a number that is not finite, over all data-parallel ranks, which call this alike.

        Computes the micro-batches of ``parts`` once more, without gradients.
        """
        return first_in_training(self._training_passes(parts), parts, self.dp)

    def _training_passes(self, parts: Sequence[tuple[Batch, Loss]]) -> Iterator[TrainingPass]:
        for part, (batch, loss) in enumerate(parts):
            totals = self._totals(batch)
            quantities: set[Quantity] = {loss.quantity, "values"} if loss.with_values else {loss.quantity}
            for number, piece in enumerate(self._micro_batches(batch)):
                entropy: EntropyUse = "none" if loss.entropy == "none" else "value"
                computed = self._compute(piece, quantities, entropy, loss.temperature)
                if not piece.idle:
                    yield TrainingPass(part, number, piece.batch, _outputs_of(computed, loss), totals)

    def _micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """Split ``batch``, with idle micro-batches up to the number of passes."""
        pieces = list(micro_batches(batch, self._pass_settings))
        num_idle = self._num_passes(len(pieces)) - len(pieces)
        return pieces + [idle_micro_batch(self._pass_settings, batch.rows.device)] * num_idle if num_idle else pieces

    @cached_property
    def _pass_settings(self) -> PassSettings:
        settings, config = self.settings, self.model.config
        window = getattr(config, "sliding_window", None)
        return PassSettings(
            lengths=self.lengths,
            budget=settings.micro_batch_tokens,
            packs=settings.pack_texts and may_pack(config.model_type, settings.attention, window, self.lengths.total),
            shares=settings.share_prompts,
            dtype=DTYPES[settings.dtype],
        )

    def _num_passes(self, count: int) -> int:
        """Return ``count``, or in lockstep the largest count of all data-parallel ranks."""
        return self.dp.largest(count, self.model.device) if self.lockstep else count

    def _totals(self, batch: Batch) -> Totals:
        """Count the mini-batch over all data-parallel ranks."""
        mask = batch.mask.double()
        counts = torch.stack([mask.sum(), (mask.sum(1) > 0).double().sum(), mask.new_tensor(len(batch))])
        tokens, sequences, rows = self.dp.sum(counts).tolist()
        return Totals(tokens, sequences, rows / batch.samples_per_prompt)

    def _compute(
        self,
        piece: MicroBatch,
        quantities: Collection[Quantity],
        entropy: EntropyUse = "none",
        temperature: float | None = None,
    ) -> dict[str, Tensor]:
        """Compute ``quantities`` in one pass, and with log-probs also "entropy", where it is used.

        ``temperature``: None: that of the run.
        """
        temperature = temperature or self.temperature
        of_scalar_head = [quantity for quantity in quantities if quantity != "logprobs"]
        with_logits = "logprobs" in quantities
        with self._scoring(piece, temperature, entropy) if with_logits else nullcontext():
            logits, scores = self._call_heads(piece, with_logits, bool(of_scalar_head))
        computed: dict[str, Tensor] = {}
        if logits is not None:
            computed |= self._logprobs(piece, logits, temperature, entropy)
        if scores is not None:
            computed |= {quantity: self._from_scores(quantity, piece, scores) for quantity in of_scalar_head}
        return computed

    def _scoring(self, piece: MicroBatch, temperature: float, entropy: EntropyUse) -> AbstractContextManager[None]:
        if self.head is None:
            return nullcontext()
        mask = piece.response_mask
        return self.head.scoring(piece.state_places[:, :-1][mask], piece.response_tokens[mask], temperature, entropy)

    def _call_heads(self, piece: MicroBatch, logits: bool, scores: bool) -> tuple[Tensor | None, Tensor | None]:
        """Run the model; return the outputs of the requested heads: log-probs and entropies where the language head is
        ours, else logits (m, up to W, vocabulary) of the last positions of each row, and scores (m, W)."""
        if self.heads == "scalar":
            assert not logits, "a scalar head has no log-probs"
            return None, self._call(piece)
        kept = 0 if self.head is not None else _kept(piece)
        if self.heads == "causal":
            assert not scores, "a language head has no values or scores"
            return self._call(piece, logits_to_keep=kept, use_cache=False).logits, None
        out = self._call(piece, logits_to_keep=kept, use_cache=False, with_logits=logits, with_scores=scores)
        return out.logits, out.scores

    def _logprobs(
        self, piece: MicroBatch, logits: Tensor, temperature: float, entropy: EntropyUse
    ) -> dict[str, Tensor]:
        """Return log-probs (n, R) of the response tokens under softmax(logits / T), and entropies (n, R).

        Both are 0 outside the response. ``logits``: the output of the language head, which is that of ``scoring`` where
        the head is ours.
        """
        mask = piece.response_mask
        if self.head is not None:
            picked, entropies = logits.unbind(-1)
        else:
            places = piece.state_places[:, :-1][mask]
            rows, columns = places // piece.width, places % piece.width - (piece.width - logits.shape[1])
            picked, entropies = _from_logits(logits[rows, columns], piece.response_tokens[mask], temperature, entropy)
        spread = [self._in_responses(mask, values) for values in (picked, entropies)]
        return {"logprobs": spread[0]} | ({} if entropy == "none" else {"entropy": spread[1]})

    def _in_responses(self, mask: Tensor, values: Tensor) -> Tensor:
        """Return ``values`` (k,) of the tokens in ``mask`` (n, r), as (n, R)."""
        empty = torch.zeros(mask.shape, dtype=values.dtype, device=values.device)
        return self._widen(empty.masked_scatter(mask, values), self.lengths.response)

    def _from_scores(self, quantity: Quantity, piece: MicroBatch, scores: Tensor) -> Tensor:
        """Return a quantity of the scalar head, from its outputs (m, W).

        scores:       (n,), after the token that ``score_rule`` reads.
        values:       (n, R+1); entry t is the value before response token t, the last one that after the whole text.
        token_scores: (n, R), after each response token.
        """
        outputs = scores.flatten()
        if quantity == "scores":
            return self.score_rule.scores(outputs[piece.places], piece.text_tokens, piece.text_mask)
        values = self._widen(outputs[piece.state_places] * piece.state_mask, self.lengths.response + 1)
        return values if quantity == "values" else values[:, 1:]

    def _call(self, piece: MicroBatch, **arguments: Any) -> Any:
        return self.call(
            input_ids=piece.tokens, attention_mask=piece.attention_mask, position_ids=piece.position_ids, **arguments
        )

    @staticmethod
    def _widen(tensor: Tensor, width: int) -> Tensor:
        return pad(tensor, (0, width - tensor.shape[1]))


def _kept(piece: MicroBatch) -> int:
    """Return the last positions of each row, among which are all that predict a response token."""
    return piece.width - int(piece.prompt_lengths.min()) + 1


def _outputs_of(computed: Mapping[str, Tensor], loss: Loss) -> Outputs:
    """Return what ``loss`` reads of a pass."""
    values = computed["values"] if loss.with_values else None
    return Outputs(computed[loss.quantity], computed.get("entropy"), values)


def _zero_of(computed: Mapping[str, Tensor], quantities: Collection[Quantity]) -> Tensor:
    """Return 0 (), with a gradient of 0 for every weight behind ``quantities``."""
    return torch.stack([computed[quantity].sum() for quantity in sorted(quantities)]).sum() * 0.0


def _quantity(column: Column) -> Quantity:
    assert column.quantity is not None, f"{column.name} is not computed by a model"
    return column.quantity


def _from_logits(logits: Tensor, targets: Tensor, temperature: float, entropy: EntropyUse) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies (n, w) from all logits at once, for heads that do more than multiply."""
    logprobs = (logits.float() / temperature).log_softmax(-1)
    picked = logprobs.gather(-1, targets[..., None]).squeeze(-1)
    if entropy == "none":
        return picked, torch.zeros_like(picked)
    with torch.set_grad_enabled(entropy == "gradient"):
        return picked, -(logprobs.exp() * logprobs).sum(-1)
