"""The passes of one transformers model on this rank, whatever engine owns it: decode, infer, and what a loss reads.

``lockstep``: the ranks of the model gather its shards layer by layer, so all of them must call equally often; a rank
with fewer rows runs idle passes up to the largest count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.config.spec import Head, ModelSpec
from flexrlhf.engines.base import Batch, EntropyUse, Loss, Moments, Outputs, Sampling, Totals, add_moments
from flexrlhf.engines.decoding import Decoding
from flexrlhf.engines.head import LanguageHead
from flexrlhf.engines.micro_batch import MicroBatch, idle_micro_batch, micro_batches
from flexrlhf.engines.models import base_weights_alone
from flexrlhf.operators.columns import Column, Lengths, Quantity


@dataclass
class Passes:
    """``call``: the model, or the library's wrapper around it. ``head`` None: the plain language head of the model.

    ``heads``: which ones the model has.
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

    @torch.no_grad()
    def generate(self, batch: Batch, sampling: Sampling) -> dict[str, Tensor]:
        """Answers drawn for the rows of ``batch``, as the engine contract says."""
        decoding = Decoding(self.model, batch, sampling, self.lengths.response)
        num_rows = max(1, self.settings.generate_tokens // (self.lengths.prompt + self.lengths.response))
        calls = decoding.calls(num_rows)
        busy = next(calls, False)
        while self._most(int(busy)):
            busy = next(calls, False) if busy else self._call_idly(batch.rows.device)
        return decoding.columns()

    def _call_idly(self, device: torch.device) -> bool:
        """A call that counts for nothing, while other ranks of the model decode; this one has no work: False."""
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
        """``columns`` (n, ...) of every row of ``batch``, by name, in one pass."""
        quantities = {column.name: _quantity(column) for column in columns}
        with nullcontext() if adapters else base_weights_alone(self.model):
            pieces = [(piece, self._computed(piece, set(quantities.values()))) for piece in self._pieces(batch)]
        found = [computed for piece, computed in pieces if not piece.idle]
        if found:
            return {name: torch.cat([each[quantity] for each in found]) for name, quantity in quantities.items()}
        widths = {column.name: self.lengths.width(column) for column in columns}
        device = batch.rows.device
        return {name: torch.zeros((0,) if w is None else (0, w), device=device) for name, w in widths.items()}

    def backward(self, parts: Sequence[tuple[Batch, Loss]], backward: Callable[[Tensor, bool], None]) -> Moments:
        """The sum of the losses of mini-batches, micro-batch by micro-batch: ``backward(its part, is it the last)``."""
        assert parts, "an optimizer step needs a loss"
        empty = torch.zeros(3, dtype=torch.float64, device=parts[0][0].rows.device)
        statistics: Moments = {name: empty for _, loss in parts for name in loss.statistics}
        counted = [(loss, self._totals(batch), self._pieces(batch)) for batch, loss in parts]
        work = [(loss, totals, piece) for loss, totals, pieces in counted for piece in pieces]
        for number, (loss, totals, piece) in enumerate(work):
            value, part = self._loss(loss, totals, piece)
            add_moments(statistics, part)
            backward(value, number == len(work) - 1)
        return statistics

    def _loss(self, loss: Loss, totals: Totals, piece: MicroBatch) -> tuple[Tensor, Moments]:
        """What ``piece`` contributes.

        Of a trunk with both heads each has a part in it, if only as nothing: ranks that reduce gradients while they are
        computed must all have the same ones, and some libraries want one of every weight.
        """
        has_both = self.heads == "both"
        assert has_both or not loss.with_values, "only a trunk with both heads has values beside"
        read: set[Quantity] = {loss.quantity, "values"} if has_both else {loss.quantity}
        computed = self._computed(piece, read, loss.entropy, loss.temperature)
        if piece.idle:
            return _nothing(computed, read), {}
        values = computed["values"] if loss.with_values else None
        outputs = Outputs(computed[loss.quantity], computed.get("entropy"), values)
        value, statistics = loss.function(outputs, piece.batch, totals)
        return (value + _nothing(computed, read) if has_both else value), statistics

    def _pieces(self, batch: Batch) -> list[MicroBatch]:
        pieces = list(micro_batches(batch, self.lengths, self.settings.micro_batch_tokens))
        idle = self._most(len(pieces)) - len(pieces)
        return pieces + [idle_micro_batch(self.lengths, batch.rows.device)] * idle

    def _most(self, count: int) -> int:
        """How often this rank calls: as often as the busiest one in lockstep, else as its rows ask."""
        return self.dp.largest(count, self.model.device) if self.lockstep else count

    def _totals(self, batch: Batch) -> Totals:
        mask = batch.mask.double()
        counts = torch.stack([mask.sum(), (mask.sum(1) > 0).double().sum(), mask.new_tensor(len(batch))])
        tokens, sequences, rows = self.dp.sum(counts).tolist()
        return Totals(tokens, sequences, rows / batch.samples_per_prompt)

    def _computed(
        self,
        piece: MicroBatch,
        quantities: Collection[Quantity],
        entropy: EntropyUse = "none",
        temperature: float | None = None,
    ) -> dict[str, Tensor]:
        """Each of ``quantities``, by one pass over the model; with log-probs also ``entropy``, where it is used."""
        temperature = temperature or self.temperature
        judged = [quantity for quantity in quantities if quantity != "logprobs"]
        targets = piece.tokens[:, -piece.response_width :] if "logprobs" in quantities else None
        with self._scoring(targets, temperature, entropy):
            logits, scores = self._heads_of(piece, targets is not None, bool(judged))
        found: dict[str, Tensor] = {}
        if logits is not None and targets is not None:
            found |= self._logprobs(piece, logits, targets, temperature, entropy)
        if scores is not None:
            found |= {quantity: self._judgement(quantity, piece, scores) for quantity in judged}
        return found

    def _scoring(self, targets: Tensor | None, temperature: float, entropy: EntropyUse) -> AbstractContextManager[None]:
        if targets is None or self.head is None:
            return nullcontext()
        return self.head.scoring(targets, temperature, entropy)

    def _heads_of(self, piece: MicroBatch, logits: bool, scores: bool) -> tuple[Tensor | None, Tensor | None]:
        """What the heads that are wanted give at the response tokens and the one before."""
        kept = piece.response_width + 1
        if self.heads == "scalar":
            assert not logits, "a scalar head tells no log-probs"
            return None, self._call(piece)[:, -kept:]
        if self.heads == "causal":
            assert not scores, "a language head tells no values or scores"
            return self._call(piece, logits_to_keep=kept, use_cache=False).logits, None
        out = self._call(piece, logits_to_keep=kept, use_cache=False, with_logits=logits, with_scores=scores)
        return out.logits, out.scores

    def _logprobs(
        self, piece: MicroBatch, logits: Tensor, targets: Tensor, temperature: float, entropy: EntropyUse
    ) -> dict[str, Tensor]:
        """Log-probs (n, R) of the response tokens under softmax(logits / T), and entropies; 0 outside the response.

        ``logits``: what the language head gave, inside ``scoring`` where it is ours.
        """
        if self.head is not None:
            picked, spread = logits.unbind(-1)
        else:
            picked, spread = _from_logits(logits[:, :-1], targets, temperature, entropy)
        mask = piece.attention_mask[:, -piece.response_width :].bool()
        # a value outside the mask may be anything: of padding no number counts
        masked = [self._widen(values.where(mask, 0.0), self.lengths.response) for values in (picked, spread)]
        return {"logprobs": masked[0]} | ({} if entropy == "none" else {"entropy": masked[1]})

    def _judgement(self, quantity: Quantity, piece: MicroBatch, scores: Tensor) -> Tensor:
        """Of the scalar head's output at the response tokens and the one before: ``scores`` (n,) that at the last token
        of the text, known from the mask; ``values`` (n, R+1), entry t that of the state before response token t, the
        last that after the whole text; ``token_scores`` (n, R) that after each response token."""
        mask = piece.attention_mask[:, -scores.shape[1] :]
        if quantity == "scores":
            last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
            return scores.gather(1, last[:, None]).squeeze(1)
        values = self._widen(scores * mask, self.lengths.response + 1)
        return values if quantity == "values" else values[:, 1:]

    def _call(self, piece: MicroBatch, **further: Any) -> Any:
        return self.call(
            input_ids=piece.tokens, attention_mask=piece.attention_mask, position_ids=piece.position_ids, **further
        )

    @staticmethod
    def _widen(tensor: Tensor, width: int) -> Tensor:
        return pad(tensor, (0, width - tensor.shape[1]))


def _nothing(computed: Mapping[str, Tensor], read: Collection[Quantity]) -> Tensor:
    """0, which all weights behind what is ``read`` take part in."""
    return torch.stack([computed[quantity].sum() for quantity in sorted(read)]).sum() * 0.0


def _quantity(column: Column) -> Quantity:
    assert column.quantity is not None, f"{column.name} is not computed by a model"
    return column.quantity


def _from_logits(logits: Tensor, targets: Tensor, temperature: float, entropy: EntropyUse) -> tuple[Tensor, Tensor]:
    """Of a family whose head may do more than multiply: all logits at once."""
    scaled = (logits.float() / temperature).log_softmax(-1)
    picked = scaled.gather(-1, targets[..., None]).squeeze(-1)
    if entropy == "none":
        return picked, torch.zeros_like(picked)
    with torch.set_grad_enabled(entropy == "gradient"):
        return picked, -(scaled.exp() * scaled).sum(-1)
