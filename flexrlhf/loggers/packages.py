"""Libraries of loggers, which are installed where a run uses them. Loads none of them."""

from __future__ import annotations

from importlib.util import find_spec

from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError

MODULES = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}
"""Modules that a logger imports; the extra has its name."""


def check_loggers(spec: Spec) -> None:
    """Raise UserError for a logger whose library is not installed."""
    for logger in spec.loggers:
        for module in MODULES[logger.name]:
            if find_spec(module) is None:
                raise UserError(
                    f"loggers: {logger.name} needs the package {module}, which is not installed; "
                    f"pip install 'flexrlhf[{logger.name}]'"
                )
