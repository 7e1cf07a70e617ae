"""Bytes that a run writes: its checkpoints and the models that it saves, before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexrlhf.memory.transfers import copied_bytes, saved_bytes
from flexrlhf.plan.plan import Plan
from flexrlhf.text import bytes_text


@dataclass(frozen=True)
class DiskNeed:
    """Most bytes of a run on disk at a time.

    run:              its name
    directory:        of its results
    checkpoint:       bytes of one checkpoint
    num_checkpoints:  those kept and the one that is written
    models:           bytes of saved models, and of the copy that replaces one
    on_signal:        whether only a signal writes a checkpoint
    """

    run: str
    directory: Path
    checkpoint: int
    num_checkpoints: int
    models: int
    on_signal: bool = False

    @property
    def total(self) -> int:
        """Bytes without what only a signal writes."""
        return self.num_checkpoints * self.checkpoint + self.models

    @property
    def with_signal(self) -> int:
        """Bytes with what a signal writes."""
        return self.total + (self.checkpoint if self.on_signal else 0)

    def __str__(self) -> str:
        text = f"{self.run} needs {bytes_text(self.total)}"
        if not self.num_checkpoints:
            return text
        many = "checkpoint" if self.num_checkpoints == 1 else "checkpoints"
        checkpoints = f"{self.num_checkpoints} {many} of {bytes_text(self.checkpoint)}"
        return f"{text} ({checkpoints}, models of {bytes_text(self.models)})"


def planned_disk(plan: Plan) -> DiskNeed:
    """Return the bytes that the run of ``plan`` writes; a model of an architecture yet unknown counts nothing."""
    settings = plan.spec.checkpoint
    written = 0 if settings.every is None else -(-plan.spec.steps // settings.every)
    return DiskNeed(
        plan.spec.name,
        plan.spec.directory,
        _checkpoint_bytes(plan),
        min(written, settings.keep_last + 1),
        _model_bytes(plan),
        on_signal=settings.on_signal and not written,
    )


def _checkpoint_bytes(plan: Plan) -> int:
    return sum(
        copied_bytes(model, plan.shapes[model.role], rank)
        for model in plan.checkpointed
        if model.role in plan.shapes
        for rank in model.ranks
    )


def _model_bytes(plan: Plan) -> int:
    """Return the bytes of all saved models: a new copy exists before it replaces the one of an earlier step.

    With ``save.keep`` there is one for each time.
    """
    sizes = [saved_bytes(plan.placement[role], plan.shapes[role]) for role in plan.graph.trained if role in plan.shapes]
    settings = plan.spec.save
    times = -(-plan.spec.steps // settings.every) if settings.every is not None else 1
    replaces = settings.best is not None or (times > 1 and not settings.keep)
    kept = (times if settings.keep else 1) + (settings.best is not None)
    return sum(sizes) * kept + (max(sizes, default=0) if replaces else 0)
