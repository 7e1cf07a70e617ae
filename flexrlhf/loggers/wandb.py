"""Weights & Biases: a run with its metrics, a table of samples for each step with some, and artifacts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from flexrlhf.api import (
    LoggedRun,
    RunLogger,
    UserError,
    WandbSpec,
    without_secrets,
)


class WandbLogger(RunLogger):
    """Run of Weights & Biases, whose step is the training step."""

    modules, hint = ("wandb",), "set WANDB_API_KEY, or mode: offline"

    @staticmethod
    def errors() -> tuple[type[Exception], ...]:
        """Return the exceptions by which calls of the library may fail."""
        import wandb

        return (wandb.Error, OSError)

    @staticmethod
    def check(spec: WandbSpec) -> None:
        """Raise UserError without the key of an account, which is not verified here."""
        if spec.mode == "offline":
            return
        import wandb
        from wandb.sdk import wandb_setup
        from wandb.sdk.lib.wbauth import authenticate_session

        host = wandb_setup.singleton().settings.base_url
        try:
            found = authenticate_session(host=host, source="flexrlhf", prompt=False, update_session=False)
            reason = "" if found else f"there is no key of an account at {host}"
        except wandb.Error as error:
            reason = str(error)
        if reason:
            raise UserError(f"loggers: wandb cannot begin ({without_secrets(reason)}); {WandbLogger.hint}")

    def __init__(self, spec: WandbSpec, run: LoggedRun) -> None:
        """Begin a run, or go on in the one with the identifier of ``run``."""
        import wandb

        self.identifier: str | None = run.identifier or uuid4().hex[:8]
        self._wandb, self._name = wandb, run.spec.name
        self._run: Any = wandb.init(
            project=spec.project,
            entity=spec.entity,
            group=spec.group,
            mode=spec.mode,
            name=run.spec.name,
            id=self.identifier,
            resume="allow",
            # its service may be that of a parent process, which has another current directory
            dir=str(run.directory.resolve()),
            config=dict(run.settings),
            # ranks print for themselves
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log_row(self, row: Mapping[str, Any]) -> None:
        """Log a row of metrics under its step."""
        self._run.log({"step": row["step"], **self.numbers(row)})

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log the samples of a step as a table."""
        columns, rows = self.table(samples)
        texts = [[value if value is None else str(value) for value in row] for row in rows]
        self._run.log({"step": step, "samples": self._wandb.Table(columns=columns, data=texts)})

    def finish(self, files: Sequence[Path], is_whole: bool) -> None:
        """Log ``files`` as an artifact and end the run."""
        if files:
            artifact = self._wandb.Artifact(f"{self._name}-files", type="run")
            for path in files:
                artifact.add_file(str(path))
            self._run.log_artifact(artifact)
        self._run.finish(exit_code=0)
