"""MLflow: a run with its metrics, settings as parameters, and tables of samples and files as artifacts."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flexrlhf.api import (
    Address,
    LoggedRun,
    MlflowSpec,
    RunLogger,
    UserError,
    without_secrets,
)

PORTS = {"http": 80, "https": 443}
CONNECT_SECONDS = 10.0
LONGEST_PARAMETER = 500
MOST_PARAMETERS = 100
"""Of one request, as MLflow limits them."""


def _uri(spec: MlflowSpec) -> str | None:
    """Return the server or database that is written, or that the environment names."""
    written = Address.expanded(spec.tracking_uri or "", "loggers.tracking_uri").url
    return written or os.environ.get("MLFLOW_TRACKING_URI")


class MlflowLogger(RunLogger):
    """Run of MLflow."""

    modules, hint = ("mlflow", "sqlalchemy", "alembic"), "correct tracking_uri, or start its server"

    @staticmethod
    def errors() -> tuple[type[Exception], ...]:
        """Return the exceptions by which calls of the library may fail."""
        from mlflow.exceptions import MlflowException

        return (MlflowException, OSError)

    @staticmethod
    def check(spec: MlflowSpec) -> None:
        """Raise UserError for a server at which nothing listens, unless a proxy hides it."""
        uri = _uri(spec) or ""
        if not uri.startswith(("http://", "https://")):
            return
        parts, problem = urlsplit(uri), "it is no address"
        if Address(uri).has_port and parts.hostname:
            if Address(uri).proxy() is not None:
                return
            try:
                socket.create_connection((parts.hostname, parts.port or PORTS[parts.scheme]), CONNECT_SECONDS).close()
                return
            except OSError as error:
                problem = error.strerror or str(error)
        raise UserError(f"loggers: mlflow cannot begin ({without_secrets(uri)}: {problem}); {MlflowLogger.hint}")

    def __init__(self, spec: MlflowSpec, run: LoggedRun) -> None:
        """Begin a run, or go on in the one with the identifier of ``run``."""
        from mlflow import MlflowClient

        # what a new database prints
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)

        uri = _uri(spec)
        local = Path(run.spec.runs).resolve()
        self._client: Any = MlflowClient(uri or f"sqlite:///{local / 'mlflow.db'}")
        if run.identifier is None:
            # MLflow's own default is in the current directory
            place = None if uri else (local / "mlflow-artifacts").as_uri()
            found = self._client.get_experiment_by_name(spec.experiment)
            experiment = found.experiment_id if found else self._client.create_experiment(spec.experiment, place)
            self.identifier: str | None = self._client.create_run(experiment, run_name=run.spec.name).info.run_id
            self._log_settings(run.settings)
        else:
            self.identifier = run.identifier
            self._client.update_run(self.identifier, status="RUNNING")

    def _log_settings(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        parameters = [Param(key, str(value)[:LONGEST_PARAMETER]) for key, value in _flat(settings)]
        for some in [parameters[at : at + MOST_PARAMETERS] for at in range(0, len(parameters), MOST_PARAMETERS)]:
            self._client.log_batch(self.identifier, params=some)

    def log_row(self, row: Mapping[str, Any]) -> None:
        """Log a row of metrics under its step."""
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        metrics = [Metric(name, value, now, row["step"]) for name, value in self.numbers(row).items()]
        self._client.log_batch(self.identifier, metrics=metrics)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log the samples of a step as a table, in the form of ``mlflow.log_table``."""
        columns, rows = self.table(samples)
        self._client.log_dict(self.identifier, {"columns": columns, "data": rows}, f"samples/step-{step:06d}.json")

    def finish(self, files: Sequence[Path], is_whole: bool) -> None:
        """Log ``files`` as artifacts and end the run."""
        for path in files:
            self._client.log_artifact(self.identifier, str(path))
        self._client.set_terminated(self.identifier, "FINISHED" if is_whole else "KILLED")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings with dotted keys."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
