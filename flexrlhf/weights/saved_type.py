"""The type in which a trained model is saved. Its checkpoints have float32 weights, whatever that is."""

from __future__ import annotations

from flexrlhf.config.spec import Dtype
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.shapes import ModelShape


def saved_type(model: PlacedModel, shape: ModelShape) -> Dtype:
    """Return the type of ``model.settings.save_dtype``, or of the files that the model started from.

    ``auto`` is never wider than the weights that the engine exposes. Adapters come from no files: they are saved as
    they are trained.
    """
    settings = model.settings
    if settings.save_dtype != "auto":
        return settings.save_dtype
    exposed: Dtype = "float32" if model.facts.exposes_masters else settings.dtype
    return exposed if exposed != "float32" or settings.lora is not None else shape.stored
