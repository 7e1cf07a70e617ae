"""Contract of a logger, and the facts that all of them receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from flexrlhf.config.spec import Spec

SAMPLE_COLUMNS = ("step", "rows", "row", "prompt", "response", "length", "finished", "score", "cost")


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
    """Logger of one run. Rank 0 makes it; a thread of its own calls all other methods.

    A row counts as received once ``log_row`` has returned: a run that is killed never repeats it. A library's errors
    are raised, not warned of. Nothing is printed on stdout.

    modules:     that it imports; an extra of its name installs them.
    hint:        remedy for a start that fails.
    identifier:  of the run in it, with which another process goes on.

    One of another package, which need not inherit this class, has its settings, too: a ``StrictModel`` with a
    ``name``, as the class attribute ``settings``.
    """

    modules: ClassVar[tuple[str, ...]]
    hint: ClassVar[str]
    identifier: str | None

    def __init__(self, settings: Any, run: LoggedRun) -> None:
        """Begin a run, or go on in the one with the identifier of ``run``."""

    @staticmethod
    def errors() -> tuple[type[Exception], ...]:
        """Return the exceptions by which calls of the library may fail."""

    @staticmethod
    def check(settings: Any) -> None:
        """Raise UserError if it could not begin on this machine."""

    def log_row(self, row: Mapping[str, Any]) -> None:
        """Log a row of ``metrics.jsonl`` under its step: numbers, and words such as the rollout engine."""

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log the samples of a step, lines of ``samples.jsonl``, as a table."""

    def finish(self, files: Sequence[Path], is_whole: bool) -> None:
        """Log ``files`` of the run as artifacts and end. ``is_whole``: whether all its steps are done."""

    @staticmethod
    def numbers(row: Mapping[str, Any]) -> dict[str, float]:
        """Return the metrics of a row: everything but its step and words."""
        return {name: float(value) for name, value in row.items() if name != "step" and not isinstance(value, str)}

    @staticmethod
    def table(samples: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
        """Return the columns that some sample has, and a row for each sample."""
        columns = [name for name in SAMPLE_COLUMNS if any(name in sample for sample in samples)]
        return columns, [[sample.get(name) for name in columns] for sample in samples]
