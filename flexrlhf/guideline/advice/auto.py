"""``placement: auto``: the placement that ``flexrlhf advise`` recommends."""

from __future__ import annotations

from flexrlhf.config.spec import Spec
from flexrlhf.guideline.advice.advice_text import vector_text
from flexrlhf.guideline.advice.advise import SECONDS, advise
from flexrlhf.guideline.simulation.inputs import costs_for, lengths_for


def with_placement(spec: Spec) -> tuple[Spec, str]:
    """Return ``spec`` with the placement to use, and a line that describes it. Settings in the YAML stay.

    Raises UserError where no figures of the devices exist, or nothing fits.
    """
    source = costs_for(spec, None)
    best = advise(spec, source.costs, lengths_for(spec, None), SECONDS, source.accuracy.tie).best
    line = f"{spec.name}: placement auto is {vector_text(best)}, {best.candidate.strategy}, {best.seconds:.3g} s a step"
    chosen = best.candidate.spec
    return chosen.model_copy(update={"rollout": chosen.rollout.as_written}), f"{line} by {source.name}"
