"""Tensors of loaded models as pieces of a checkpoint, copied to host memory."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from flexrlhf.engines.base import WEIGHTS, StateTensor
from flexrlhf.runs.tensor_files import Piece, piece_key
from flexrlhf.trainer.loaded_models import LoadedModel
from flexrlhf.weights.pieces import written_names
from flexrlhf.weights.shards import Part, Parts, trained_parts


def trained_pieces(model: LoadedModel, rank: int) -> dict[str, Piece]:
    """Return the weights and moments of a trained model that ``rank`` writes."""
    parts, mine = trained_parts(model.placed, model.shape, rank), written_names(model.placed, model.shape, rank)
    pieces: dict[str, Piece] = {}
    for kind, tensors in model.engine.training_state().tensors.items():
        for name, tensor in tensors.items():
            # ranks with a range of their own each write theirs
            if tensor.values.numel() and (tensor.flat is not None or name in mine):
                pieces[piece_key(kind, name)] = Piece(_copied(tensor.values), part_of(tensor, parts, name))
    return pieces


def follower_pieces(model: LoadedModel, rank: int) -> dict[str, Piece]:
    """Return the weights that ``rank`` writes of a copy which may be behind its trained model."""
    parts, live = trained_parts(model.placed, model.shape, rank), model.engine.weights()
    names = [name for name in written_names(model.placed, model.shape, rank) if live[name].numel()]
    return {piece_key(WEIGHTS, name): Piece(_copied(live[name]), parts[name]) for name in sorted(names)}


def part_of(tensor: StateTensor, parts: Parts, name: str) -> Part:
    """Return the part of the parameter ``name`` that ``tensor`` is; ``parts``: what this rank stores."""
    part = parts[name]
    return part if tensor.flat is None else replace(part, flat=tensor.flat)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
