"""Experts of tokens: counted in training, and replayed as generation has chosen them (R3; Ma et al. 2025).

A router of transformers returns logits, the weights of the chosen experts and their numbers. In a replay the numbers
are the recorded ones, and the weights follow from the router's own logits, so that gradients reach it as ever. Where
the router chooses the same experts, every bit stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.engines.base import Moments
from flexrlhf.engines.micro_batch import MicroBatch
from flexrlhf.engines.router_biases import BiasController
from flexrlhf.engines.router_losses import RouterLosses, RouterTotals, loss_coefficients
from flexrlhf.engines.routing import routers_of, scores_of, weights_of
from flexrlhf.operators.columns import Column

MISMATCH = "router_mismatch"
"""Statistic of the (token, layer) pairs for which generation and the trainer's router choose other experts."""
FULLEST = "expert_load_max"
"""Statistic of the tokens of the fullest expert of a layer over their mean."""
_TYPES = {1: torch.uint8, 2: torch.int16}


@dataclass(frozen=True)
class _Recorded:
    """Recorded experts of the tokens of a pass.

    experts:  (T, layers, k) numbers of experts.
    known:    bool (T,), whether the token has them: padding and last tokens, which generation has not read, do not.
    """

    experts: Tensor
    known: Tensor


class Routers:
    """Routers of a model by layer.

    replays:       whether recorded experts replace their choice.
    coefficients:  of their losses.
    rate:          of the controller of their biases; 0: there is none.
    losses:        theirs; None: they have none.
    biases:        the controller.
    """

    def __init__(self, routers: Sequence[Any], replays: bool, coefficients: Mapping[str, float], rate: float) -> None:
        self._replays = replays
        self.layers, self.top = len(routers), int(routers[0].top_k)
        self._experts = int(routers[0].num_experts)
        self.biases = BiasController(routers, rate) if rate else None
        self.losses = RouterLosses(coefficients, self.layers, self._experts) if coefficients else None
        self.dtype = _TYPES[Column.expert_bytes(self._experts)]
        self._chosen: list[Tensor] | None = None
        self._recorded: _Recorded | None = None
        self._weights: Tensor | None = None
        self._load: Tensor | int = 0
        self._loads = [torch.zeros(())] * self.layers
        self._differing = [torch.zeros(())] * self.layers
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._route, layer))

    def recorded(self, call: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the result of ``call``, a pass of the model over T tokens, and their experts (T, layers, k)."""
        self._chosen = []
        try:
            result = call()
            return result, torch.stack(self._chosen, 1).to(self.dtype)
        finally:
            self._chosen = None

    @contextmanager
    def replaying(self, piece: MicroBatch) -> Iterator[None]:
        """Compare, or replace, the experts of the tokens of ``piece`` in the passes inside, recomputed layers too."""
        self._recorded = self._recorded_of(piece)
        try:
            yield
        finally:
            self._recorded = None

    @contextmanager
    def training(self, piece: MicroBatch) -> Iterator[None]:
        """Count the tokens of ``piece`` by their experts in the passes inside, which are as in ``replaying``."""
        self._weights = _sequences_of_tokens(piece)
        try:
            with self.replaying(piece):
                yield
            self._load = self._load + torch.stack(self._loads)
        finally:
            self._weights = None

    def clear(self) -> None:
        """Discard the counts and values since the last ``balance``."""
        self._load = 0
        if self.losses is not None:
            self.losses.clear()

    def totals(
        self,
        pieces: Sequence[MicroBatch],
        call: Callable[[MicroBatch], object],
        over_ranks: Callable[[Tensor], Tensor],
        device: torch.device,
    ) -> RouterTotals:
        """Return the totals of a mini-batch, of which this rank has ``pieces``, for the losses of its passes.

        call:        runs the model on a piece.
        over_ranks:  sums a tensor over all ranks with other tokens.
        """
        assert self.losses is not None, "the losses need totals"
        self._load = 0
        with torch.no_grad():
            for piece in pieces if self.losses.counts_first else ():
                with self.training(piece):
                    call(piece)
        taken = torch.zeros(self.layers, self._experts, dtype=torch.float64, device=device) + self._load
        tokens = taken.new_zeros(1) + self.layers * sum(_sequences_of_tokens(piece).sum() for piece in pieces)
        self._load = 0
        sums = over_ranks(torch.cat([tokens, taken.sum(0)]))
        self.losses.begin(sums[0] > 0)
        tokens = sums[0].clamp(min=1)
        return RouterTotals(tokens, (sums[1:] / tokens).float())

    def balance(self, over_ranks: Callable[[Tensor], Tensor], reports: bool, device: torch.device) -> Moments:
        """Return the statistics of the tokens counted since the last call, of which one rank ``reports`` the whole.

        over_ranks: as in ``totals``.
        """
        none = torch.zeros(self.layers, self._experts, dtype=torch.int64, device=device)
        counts, self._load = over_ranks(none + self._load).double(), 0
        if self.biases is not None:
            self.biases.add(counts)
        fullest = (counts.amax(1) / counts.mean(1).clamp(min=1e-9)).amax()
        is_counted = (counts.sum() > 0).double()
        found = {FULLEST: torch.stack([is_counted, fullest, fullest * fullest]) * reports}
        return found if self.losses is None else found | self.losses.statistics(over_ranks, reports, device)

    def mismatch(self, piece: MicroBatch) -> Moments:
        """Return the statistic of the last pass, that of ``piece``, inside ``replaying``; alike on all of its ranks."""
        if self._recorded is None:
            return {}
        known, differing = self._recorded.known.sum() * self.layers, torch.stack(self._differing).sum()
        found = torch.stack([known, differing, differing]).double()
        return {MISMATCH: found if piece.part is None else piece.part.ranks.sum_in_order(found)}

    def _recorded_of(self, piece: MicroBatch) -> _Recorded | None:
        places = piece.expert_places
        if places is None:
            return None
        if piece.part is not None:
            places = places[:, piece.part.columns]
        places = places.flatten()
        column = piece.batch[Column.EXPERTS].view(self.dtype).view(-1, self.layers, self.top)
        return _Recorded(column[places.clamp(min=0)], places >= 0)

    def _route(
        self, layer: int, router: Any, _: tuple[Any, ...], routed: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        logits, weights, chosen = routed
        if self._chosen is not None:
            self._chosen.append(chosen)
        taken = chosen
        if self._recorded is not None:
            known, before = self._recorded.known, self._recorded.experts[:, layer].long()
            # a recomputed layer finds the same once more, as below
            self._differing[layer] = ((before.sort(1).values != chosen.sort(1).values).any(1) & known).sum()
            taken = before.where(known[:, None], chosen) if self._replays else chosen
        if self._weights is not None:
            empty = self._weights.new_zeros(self._experts)
            self._loads[layer] = empty.index_add_(0, taken.flatten(), self._weights.repeat_interleave(self.top))
            if self.losses is not None:
                self.losses.read(layer, logits, scores_of(router, logits), self._weights)
        return None if taken is chosen else (logits, weights_of(taken, router, logits).to(weights.dtype), taken)


def _sequences_of_tokens(piece: MicroBatch) -> Tensor:
    """Return how many sequences that are trained on have each token of a pass on this rank: int64 (T,), 0 of padding.

    A response that is left out, as its environment failed or its group is alike, counts in no loss.
    """
    counts = torch.zeros(piece.tokens.numel(), dtype=torch.int64, device=piece.tokens.device)
    if not piece.idle:
        is_trained = piece.batch.sampled_mask.bool().any(1, keepdim=True)
        counts.index_add_(0, piece.places.flatten(), (piece.text_mask & is_trained).flatten().long())
    counts = counts.view_as(piece.tokens)
    return (counts if piece.part is None else counts[:, piece.part.columns]).flatten()


def make_routers(model: PreTrainedModel, settings: ModelSpec, is_trained: bool) -> Routers | None:
    """Return the routers of ``model``, whose tokens are counted if it is trained; None if nobody reads their choice."""
    routers = routers_of(model)
    is_read = is_trained or settings.has_replay
    # a compiled layer would be interrupted at each router
    if not (routers and is_read) or settings.compile:
        return None
    coefficients, rate = (loss_coefficients(settings), settings.router_bias_update_rate) if is_trained else ({}, 0.0)
    return Routers(routers, settings.router_replay == "rollout", coefficients, rate)
