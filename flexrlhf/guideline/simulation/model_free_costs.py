"""Times of operators that call no model: combines, functions, services and rules, and texts that are encoded anew."""

from __future__ import annotations

from flexrlhf.api import Operator, Spec
from flexrlhf.guideline.costs.cost_model import Cost, CostModel

RETOKENIZED = "retokenized"
"""Stands for a section where texts are encoded again."""
SECONDS_PER_TOKEN = 3e-6
"""Time to decode a token and encode it again, on one core: byte-level BPE of 4,000 and of 8,000 tokens on Alpaca."""


def source_section(operator: Operator) -> str:
    """Return the section of the YAML whose sources ``operator`` calls, ``RETOKENIZED`` where it encodes texts;
    empty for another one."""
    if operator.kind == "retokenize":
        return RETOKENIZED
    return operator.function if operator.kind == "score" else ""


def model_free_cost(costs: CostModel, spec: Spec, section: str, rows: int, width: float) -> Cost:
    """Return the time of a combine or a score on the ``rows`` of the fullest replica, each of ``width`` tokens.

    ``section``: section of the YAML with the sources of a score; empty for a combine, which has none; ``RETOKENIZED``.
    """
    combined = costs.combine(rows, width)
    if section == RETOKENIZED:
        return Cost({**combined.parts, "encoding": rows * width * SECONDS_PER_TOKEN})
    sources = {"": None, "reward": spec.reward, "cost": spec.cost}[section]
    if not sources:
        return combined
    # all sources are called at once, so the slowest counts
    replies = max(source.predicted_seconds(rows) for source in sources)
    return Cost({**combined.parts, "replies": replies})
