"""Contract of a logger, and the facts that all of them receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError

Row = Mapping[str, Any]
"""Row of metrics.jsonl: numbers, and words such as the rollout engine."""
Sample = Mapping[str, Any]
"""Line of samples.jsonl."""
SAMPLE_COLUMNS = ("step", "rows", "row", "prompt", "response", "length", "finished", "score", "cost")

MODULES = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}
"""Modules that a logger imports; the extra has its name."""


@dataclass(frozen=True)
class LoggedRun:
    """A run as its loggers see it.

    spec:        resolved settings.
    settings:    the same as nested mappings, without secrets.
    directory:   of its results.
    identifier:  that a logger has given it before, where it goes on; else None.
    """

    spec: Spec
    settings: Mapping[str, Any]
    directory: Path
    identifier: str | None = None


class RunLogger(Protocol):
    """Logger of one run. All methods are called by one thread.

    errors:      exceptions of its library by which a call may fail.
    identifier:  of the run in it, with which another process goes on.
    """

    errors: tuple[type[Exception], ...]
    identifier: str | None

    def log_row(self, row: Row) -> None:
        """Log a row of metrics under its step."""

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Log the samples of a step as a table."""

    def finish(self, files: Sequence[Path], is_whole: bool) -> None:
        """Log ``files`` of the run as artifacts and end. ``is_whole``: whether all its steps are done."""


def numbers(row: Row) -> dict[str, float]:
    """Return the metrics of a row: everything but its step and words."""
    return {name: float(value) for name, value in row.items() if name != "step" and not isinstance(value, str)}


def sample_table(samples: Sequence[Sample]) -> tuple[list[str], list[list[Any]]]:
    """Return the columns that some sample has, and a row for each sample."""
    columns = [name for name in SAMPLE_COLUMNS if any(name in sample for sample in samples)]
    return columns, [[sample.get(name) for name in columns] for sample in samples]


def check_loggers(spec: Spec) -> None:
    """Raise UserError for a logger whose library is not installed, or that could not begin on this machine."""
    for logger in spec.loggers:
        for module in MODULES[logger.name]:
            if find_spec(module) is None:
                raise UserError(
                    f"loggers: {logger.name} needs the package {module}, which is not installed; "
                    f"pip install 'flexrlhf[{logger.name}]'"
                )
        import_module(f"flexrlhf.loggers.{logger.name}").check(logger)
