"""Quantities of sequences, read from the outputs of a model's heads, and losses on them; for every engine's passes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexrlhf.config.model_settings import Head
from flexrlhf.engines.base import EngineContext, EntropyUse, Loss, Moments, Totals
from flexrlhf.engines.language_head import LanguageHead
from flexrlhf.engines.micro_batch import MicroBatch
from flexrlhf.engines.non_finite import forbid_update
from flexrlhf.engines.scalar_head import ScoreRule, score_rule
from flexrlhf.operators.columns import Column, Lengths, Quantity

Computed = dict[str, Tensor]
"""Quantities of the rows of a pass by name; with log-probs also "entropy", where it is used."""


@dataclass(frozen=True)
class PassRequest:
    """Outputs that are requested of a pass.

    quantities:   of the model.
    entropy:      how the policy's entropy is used.
    temperature:  of log-probs; None: that of the run.
    """

    quantities: frozenset[Quantity]
    entropy: EntropyUse = "none"
    temperature: float | None = None

    @classmethod
    def of(cls, columns: Sequence[Column]) -> PassRequest:
        """Return the request of a pass that computes ``columns``."""
        return cls(frozenset(map(_quantity_of, columns)))

    @classmethod
    def without_gradient(cls, loss: Loss) -> PassRequest:
        """Return the request of a pass of ``loss`` without gradients."""
        quantities: set[Quantity] = {loss.quantity, "values"} if loss.with_values else {loss.quantity}
        entropy: EntropyUse = "none" if loss.entropy == "none" else "value"
        return cls(frozenset(quantities), entropy, loss.temperature)


@dataclass(frozen=True)
class Readout:
    """Heads of one model, and how quantities follow from what they compute.

    heads:        heads that the model has.
    head:         its language head, where it is ours; None: the model's own, or none.
    lengths:      P and R of the run.
    temperature:  of log-probs.
    score_rule:   where the score of a sequence is read.
    """

    heads: Head
    head: LanguageHead | None
    lengths: Lengths
    temperature: float
    score_rule: ScoreRule = ScoreRule()

    @classmethod
    def of(cls, context: EngineContext, config: Any, head: LanguageHead | None) -> Readout:
        """Return the heads of the model of ``context``. ``config``: its Hugging Face config."""
        rule = score_rule(config, context.placed.trained)
        return cls(context.placed.head, head, context.lengths, context.temperature, rule)

    def request_for(self, loss: Loss) -> PassRequest:
        """Return what a pass of ``loss`` computes: where the model has both heads, outputs of each."""
        has_both = self.heads == "both"
        assert has_both or not loss.with_values, "only a model with both heads has values next to log-probs"
        quantities: set[Quantity] = {loss.quantity, "values"} if has_both else {loss.quantity}
        return PassRequest(frozenset(quantities), loss.entropy, loss.temperature)

    def scoring(self, piece: MicroBatch, request: PassRequest) -> AbstractContextManager[None]:
        """Make our language head return the requested log-probs of ``piece`` instead of logits."""
        if self.head is None or "logprobs" not in request.quantities:
            return nullcontext()
        temperature, part = request.temperature or self.temperature, piece.part
        if part is not None:
            return self.head.scoring(part.places, piece.scored_tokens[part.scored], temperature, request.entropy)
        return self.head.scoring(piece.predicting_places, piece.scored_tokens, temperature, request.entropy)

    def read(self, piece: MicroBatch, request: PassRequest, logits: Tensor | None, scores: Tensor | None) -> Computed:
        """Return the requested quantities.

        logits: output of the language head, that of ``scoring`` where the head is ours; None: no log-prob is requested.
        scores: outputs (m, W) of the scalar head; of a part of the rows (m, w), as are ``logits``.
        """
        computed: Computed = {}
        if (part := piece.part) is not None:
            if logits is not None:
                assert self.head is not None, "parts of rows are of models with our head"
                logits = part.join(logits, 0, part.scored, len(piece.scored))
            if scores is not None:
                scores = part.join(scores, 1, part.columns, piece.width)
        if logits is not None:
            computed |= self._logprobs(piece, logits, request)
        if scores is not None:
            of_scalar_head = [quantity for quantity in request.quantities if quantity != "logprobs"]
            computed |= {quantity: self._from_scores(quantity, piece, scores) for quantity in of_scalar_head}
        return computed

    def loss(self, loss: Loss, totals: Totals, piece: MicroBatch, computed: Computed) -> tuple[Tensor, Moments]:
        """Return the contribution () of ``piece`` to the loss, and its statistics.

        Where the model has both heads, each takes part, if only with a factor of 0: ranks that reduce gradients during
        backward need the same gradients on all of them, and some libraries need one of every weight.
        """
        quantities = self.request_for(loss).quantities
        if piece.idle:
            return _zero_of(computed, quantities), {}
        value, statistics = loss.function(loss.outputs(computed), piece.batch, totals)
        forbid_update(value, [computed[quantity] for quantity in quantities])
        return (value + _zero_of(computed, quantities) if self.heads == "both" else value), statistics

    def columns(
        self, pieces: Sequence[tuple[MicroBatch, Computed]], columns: Sequence[Column], device: torch.device
    ) -> dict[str, Tensor]:
        """Return ``columns`` (n, ...) of all rows of ``pieces``, in the order of the batch that was split."""
        computed = [(piece.order, outputs) for piece, outputs in pieces if not piece.idle]
        if not computed:
            widths = {column.name: self.lengths.width(column) for column in columns}
            return {name: torch.zeros((0,) if w is None else (0, w), device=device) for name, w in widths.items()}
        back = torch.cat([order for order, _ in computed]).argsort()
        quantities = {column.name: _quantity_of(column) for column in columns}
        return {
            name: torch.cat([outputs[quantity] for _, outputs in computed])[back]
            for name, quantity in quantities.items()
        }

    def _logprobs(self, piece: MicroBatch, logits: Tensor, request: PassRequest) -> Computed:
        """Return log-probs (n, R) of the response tokens under softmax(logits / T), and entropies (n, R).

        Both are 0 outside the response.
        """
        entropy = request.entropy
        if self.head is not None:
            picked, entropies = logits.unbind(-1)
        else:
            places = piece.predicting_places
            rows, columns = places // piece.width, places % piece.width - (piece.width - logits.shape[1])
            temperature = request.temperature or self.temperature
            picked, entropies = _from_logits(logits[rows, columns], piece.scored_tokens, temperature, entropy)
        spread = [self._in_responses(piece, values) for values in (picked, entropies)]
        return {"logprobs": spread[0]} | ({} if entropy == "none" else {"entropy": spread[1]})

    def _in_responses(self, piece: MicroBatch, values: Tensor) -> Tensor:
        """Return ``values`` (k,) of the tokens of responses, as (n, R)."""
        # by places that the host knows: a mask would be counted on the device, in backward too
        spread = values.new_zeros(len(piece.order) * piece.longest_response).index_copy(0, piece.scored, values)
        return _widen(spread.view(len(piece.order), piece.longest_response), self.lengths.response)

    def _from_scores(self, quantity: Quantity, piece: MicroBatch, scores: Tensor) -> Tensor:
        """Return a quantity of the scalar head, from its outputs (m, W).

        scores:       (n,), after the token that ``score_rule`` reads.
        values:       (n, R+1); entry t is the value before response token t, the last one after all.
        token_scores: (n, R), after each response token.
        """
        outputs = scores.flatten()
        if quantity == "scores":
            return self.score_rule.scores(outputs[piece.places], piece.text_tokens, piece.text_mask)
        values = _widen(outputs[piece.state_places] * piece.state_mask, self.lengths.response + 1)
        return values if quantity == "values" else values[:, 1:]


def _quantity_of(column: Column) -> Quantity:
    """Return the quantity of a model that ``column`` is."""
    assert column.quantity is not None, f"{column.name} is not computed by a model"
    return column.quantity


def _zero_of(computed: Mapping[str, Tensor], quantities: Collection[Quantity]) -> Tensor:
    """Return 0 (), with a gradient of 0 for every weight behind ``quantities``."""
    return torch.stack([computed[quantity].sum() for quantity in sorted(quantities)]).sum() * 0.0


def _widen(tensor: Tensor, width: int) -> Tensor:
    return pad(tensor, (0, width - tensor.shape[1]))


def _from_logits(logits: Tensor, targets: Tensor, temperature: float, entropy: EntropyUse) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies (n, w) from all logits at once, for heads that do more than multiply."""
    logprobs = (logits.float() / temperature).log_softmax(-1)
    picked = logprobs.gather(-1, targets[..., None]).squeeze(-1)
    if entropy == "none":
        return picked, torch.zeros_like(picked)
    with torch.set_grad_enabled(entropy == "gradient"):
        return picked, -(logprobs.exp() * logprobs).sum(-1)
