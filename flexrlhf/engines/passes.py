"""The passes of one transformers model on this rank, whatever engine owns it: decode, infer, and what a loss reads.

``lockstep``: the ranks of the model gather its shards layer by layer, so all of them must call equally often; a rank
with fewer rows runs idle passes up to the largest count.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from flexrlhf.comm.reduce import Replicas
from flexrlhf.engines.base import Batch, EntropyUse, Loss, Moments, Outputs, Sampling, Totals, add_moments
from flexrlhf.engines.decoding import Decoding
from flexrlhf.engines.head import LanguageHead
from flexrlhf.engines.micro_batch import MicroBatch, idle_micro_batch, micro_batches
from flexrlhf.engines.models import base_weights_alone
from flexrlhf.operators.columns import Column, Lengths, Quantity
from flexrlhf.spec import ModelSpec


@dataclass
class Passes:
    """``call``: the model, or the library's wrapper around it. ``head`` None: the plain language head of the model."""

    model: PreTrainedModel
    call: Callable[..., Any]
    head: LanguageHead | None
    settings: ModelSpec
    lengths: Lengths
    temperature: float
    replicas: Replicas
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
    def forward(self, batch: Batch, column: Column, adapters: bool) -> Tensor:
        """``column`` (n, ...) of every row of ``batch``."""
        assert column.quantity is not None, f"{column.name} is not computed by a model"
        with nullcontext() if adapters else base_weights_alone(self.model):
            pieces = [(piece, self._outputs(piece, column.quantity).quantity) for piece in self._pieces(batch)]
        parts = [values for piece, values in pieces if not piece.idle]
        if parts:
            return torch.cat(parts)
        width = self.lengths.width(column)
        return torch.zeros((0,) if width is None else (0, width), device=batch.rows.device)

    def backward(self, batch: Batch, loss: Loss, backward: Callable[[Tensor, bool], None]) -> Moments:
        """The loss of a mini-batch, micro-batch by micro-batch: ``backward(part of the loss, is the last part)``."""
        totals = self._totals(batch)
        empty = torch.zeros(3, dtype=torch.float64, device=batch.rows.device)
        statistics: Moments = dict.fromkeys(loss.statistics, empty)
        pieces = self._pieces(batch)
        for number, piece in enumerate(pieces):
            outputs = self._outputs(piece, loss.quantity, loss.entropy)
            if piece.idle:
                value = outputs.quantity.sum() * 0.0
            else:
                value, part = loss.function(outputs, piece.batch, totals)
                add_moments(statistics, part)
            backward(value, number == len(pieces) - 1)
        return statistics

    def _pieces(self, batch: Batch) -> list[MicroBatch]:
        pieces = list(micro_batches(batch, self.lengths, self.settings.micro_batch_tokens))
        idle = self._most(len(pieces)) - len(pieces)
        return pieces + [idle_micro_batch(self.lengths, batch.rows.device)] * idle

    def _most(self, count: int) -> int:
        """How often this rank calls: as often as the busiest one in lockstep, else as its rows ask."""
        return self.replicas.largest(count, self.model.device) if self.lockstep else count

    def _totals(self, batch: Batch) -> Totals:
        mask = batch["response_mask"].double()
        counts = torch.stack([mask.sum(), (mask.sum(1) > 0).double().sum(), mask.new_tensor(len(batch))])
        tokens, sequences, rows = self.replicas.sum(counts).tolist()
        return Totals(tokens, sequences, rows / batch.samples_per_prompt)

    def _outputs(self, piece: MicroBatch, quantity: Quantity, entropy: EntropyUse = "none") -> Outputs:
        match quantity:
            case "logprobs":
                return self._logprobs(piece, entropy)
            case "values":
                return Outputs(self._values(piece))
            case "scores":
                return Outputs(self._scores(piece))

    def _logprobs(self, piece: MicroBatch, entropy: EntropyUse) -> Outputs:
        """Log-probs (n, R) of the response tokens under softmax(logits / T); 0 outside the response."""
        width = piece.response_width
        mask, targets = piece.attention_mask[:, -width:], piece.tokens[:, -width:]
        with nullcontext() if self.head is None else self.head.scoring(targets, self.temperature, entropy):
            out = self._call(piece, logits_to_keep=width + 1, use_cache=False).logits
        if self.head is not None:
            picked, spread = out.unbind(-1)
        else:
            picked, spread = self._from_logits(out[:, :-1], targets, entropy)
        # a value outside the mask may be anything: of padding no number counts
        masked = [self._widen(values.where(mask.bool(), 0.0), self.lengths.response) for values in (picked, spread)]
        return Outputs(masked[0], None if entropy == "none" else masked[1])

    def _from_logits(self, logits: Tensor, targets: Tensor, entropy: EntropyUse) -> tuple[Tensor, Tensor]:
        """Of a family whose head may do more than multiply: all logits at once."""
        scaled = (logits.float() / self.temperature).log_softmax(-1)
        picked = scaled.gather(-1, targets[..., None]).squeeze(-1)
        if entropy == "none":
            return picked, torch.zeros_like(picked)
        with torch.set_grad_enabled(entropy == "gradient"):
            return picked, -(scaled.exp() * scaled).sum(-1)

    def _values(self, piece: MicroBatch) -> Tensor:
        """Values (n, R+1): entry t is that of the state before response token t, the last that after the whole text."""
        width = piece.response_width + 1
        values = self._call(piece)[:, -width:] * piece.attention_mask[:, -width:]
        return self._widen(values, self.lengths.response + 1)

    def _scores(self, piece: MicroBatch) -> Tensor:
        """The head's output (n,) at the last token of the text, known from the mask."""
        mask = piece.attention_mask
        last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
        scores: Tensor = self._call(piece).gather(1, last[:, None]).squeeze(1)
        return scores

    def _call(self, piece: MicroBatch, **further: Any) -> Any:
        return self.call(
            input_ids=piece.tokens, attention_mask=piece.attention_mask, position_ids=piece.position_ids, **further
        )

    @staticmethod
    def _widen(tensor: Tensor, width: int) -> Tensor:
        return pad(tensor, (0, width - tensor.shape[1]))
