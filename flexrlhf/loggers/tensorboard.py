"""TensorBoard: scalars for metrics, Markdown tables for samples and the timeline's place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flexrlhf.api import LoggedRun, RunLogger

FOLDER = "tensorboard"


class TensorBoardLogger(RunLogger):
    """Writer of event files in the run's directory."""

    modules, hint = ("tensorboard",), "make its directory writable"

    @staticmethod
    def errors() -> tuple[type[Exception], ...]:
        """Return the exceptions by which calls of the library may fail."""
        return (OSError,)

    @staticmethod
    def check(_: object) -> None:
        """Do nothing: files in the run's directory need nothing else."""

    def __init__(self, _: object, run: LoggedRun) -> None:
        """Start a file next to those that the run has."""
        from torch.utils.tensorboard import SummaryWriter

        self.identifier: str | None = None
        self._writer: Any = SummaryWriter(str(run.directory / FOLDER))
        if run.identifier is None:
            lines = (run.directory / "config.yaml").read_text().splitlines()
            # as code in Markdown
            self._writer.add_text("config", "\n".join(f"    {line}" for line in lines), 0)

    def log_row(self, row: Mapping[str, Any]) -> None:
        """Log a row of metrics under its step."""
        for name, value in self.numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log the samples of a step as a table."""
        columns, rows = self.table(samples)
        lines = [columns, ["---"] * len(columns)]
        for row in rows:
            lines.append([" ".join(str(value).split()).replace("|", "\\|") for value in row])
        self._writer.add_text("samples", "\n".join(f"| {' | '.join(line)} |" for line in lines), step)

    def finish(self, files: Sequence[Path], is_whole: bool) -> None:
        """Log where the files are: TensorBoard stores none."""
        places = [f"- `{path.resolve()}`" for path in files]
        notes = ["The timeline opens in chrome://tracing and ui.perfetto.dev."] if places else []
        self._writer.add_text("files", "\n".join([*places, "", *notes]))
        self._writer.close()
