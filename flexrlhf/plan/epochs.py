"""Steps of a run whose length is given in passes over its data (``epochs``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.spec import Spec
from flexrlhf.data.files import read_rows
from flexrlhf.errors import UserError
from flexrlhf.placement.layout import BatchShape
from flexrlhf.plan.algorithm_graph import make_graph
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.run_data import training_sources
from flexrlhf.text import counted

MOST_STEPS = 10**9
"""Steps of a plan that only counts rows, so that no check of a run's length refuses it."""


def with_epochs(spec: Spec, pending: Mapping[Path, ModelSpec] | None = None) -> tuple[Spec, str]:
    """Return ``spec`` with ``steps`` in the place of ``epochs``, and a text on them; as it is, without a text, if it
    has none.

    The last step is filled up from the next pass. A pass over several files has as many prompts as they have rows
    together, each file by its weight. ``pending``: directories of models that an earlier run of the command will write.
    Raises UserError for rows that cannot be counted.
    """
    if spec.epochs is None:
        return spec, ""
    rows, prompts = _num_rows(spec, pending), BatchShape.of(spec).num_new
    steps = math.ceil(spec.epochs * rows / prompts)
    if steps > MOST_STEPS:
        raise UserError(f"{spec.name}: epochs {float(spec.epochs):g} are {steps} steps: use at most {MOST_STEPS}")
    models, of = {}, spec.algorithm
    preset = {} if of.peer is None else of.peer_values(of.peer.trainers[of.name], steps)
    for role, model in spec.models:
        key = f"models.{role}.optimizer.warmup_steps"
        if key in preset and model is not None and "warmup_steps" not in model.optimizer.model_fields_set:
            optimizer = model.optimizer.model_copy(update={"warmup_steps": preset[key]})
            models[role] = model.model_copy(update={"optimizer": optimizer})
    found = spec.with_models(models).model_copy(update={"steps": steps, "epochs": None})
    passes = f"epochs {float(spec.epochs):g} over {counted(rows, 'row')}"
    return found, f"{spec.name}: {passes}: {counted(steps, 'step')} of {counted(prompts, 'prompt')}"


def _num_rows(spec: Spec, pending: Mapping[Path, ModelSpec] | None) -> int:
    """Return the number of training rows. Raises UserError."""
    try:
        if "drop" not in (spec.data.long_prompts, spec.data.bad_rows):
            sources = training_sources(spec, make_graph(spec).data)
            return sum(len(read_rows(source.path)) for source in sources)
    except UserError as error:
        raise UserError(f"{spec.name}: epochs are counted in rows: {error}; or give steps") from None
    changes = {"steps": MOST_STEPS, "epochs": None, "placement": None if spec.placement == "auto" else spec.placement}
    kept = make_plan(spec.model_copy(update=changes), pending).data.num_kept()
    if kept is None:
        raise UserError(
            f"{spec.name}: epochs are counted in rows, of which data.long_prompts or data.bad_rows drop leaves out "
            f"some by the tokens of a tokenizer that is not there yet; give steps"
        )
    return kept
