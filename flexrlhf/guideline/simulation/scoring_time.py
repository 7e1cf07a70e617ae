"""What is done beside a model: mathematics on columns, and asking functions, services and rules for scores."""

from __future__ import annotations

from flexrlhf.config.reward_sources import FunctionSource, ModelSource, RewardSource, ServiceSource, Sources
from flexrlhf.config.spec import Spec
from flexrlhf.guideline.costs.cost_model import Cost, CostModel


def cost_beside(costs: CostModel, spec: Spec, asked: str, rows: int, width: float) -> Cost:
    """Of a combine or a score on the ``rows`` of the fullest replica, each of ``width`` tokens.

    ``asked``: the section with the sources of a score; a combine has none.
    """
    combined = costs.combine(rows, width)
    sources = {"": None, "reward": spec.reward, "cost": spec.cost}[asked]
    return Cost({**combined.parts, "replies": asking_seconds(sources or (), rows)}) if sources else combined


def asking_seconds(sources: Sources, rows: int) -> float:
    """Until the last reply about ``rows`` answers: all sources are asked at once, so as long as the slowest takes."""
    called = (source for source in sources if not isinstance(source, ModelSource))
    return max((rounds(source, rows) * source.seconds for source in called), default=0.0)


def rounds(source: RewardSource, rows: int) -> int:
    """Calls for ``rows`` answers that come one after the other; each round has as many as are made at a time."""
    assert not isinstance(source, ModelSource), "a model is no call"
    calls = -(-rows // source.batch_size)
    match source:
        case FunctionSource():
            return -(-calls // source.workers)
        case ServiceSource():
            return -(-calls // source.concurrency)
    return calls
