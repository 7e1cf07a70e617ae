"""Settings of loggers: libraries that receive the metrics, samples and timeline of a run."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from flexrlhf.config.strict_model import StrictModel


class TensorBoardSpec(StrictModel):
    """TensorBoard: event files in ``runs/<name>/tensorboard``."""

    name: Literal["tensorboard"] = Field(description="needs flexrlhf[tensorboard]")


class WandbSpec(StrictModel):
    """Weights & Biases. The key of an account comes from the environment (WANDB_API_KEY) or ``wandb login``."""

    name: Literal["wandb"] = Field(description="needs flexrlhf[wandb]")
    project: str = Field("flexrlhf", min_length=1, description="project of the run")
    entity: str | None = Field(None, description="team or user that owns the project; null: the account's default")
    group: str | None = Field(None, description="group of runs that are shown together")
    mode: Literal["online", "offline"] = Field(
        "online", description="offline: files in runs/<name>/wandb alone, which `wandb sync` uploads later"
    )


class MlflowSpec(StrictModel):
    """MLflow. Users and passwords of a server come from the environment (MLFLOW_TRACKING_USERNAME and the like)."""

    name: Literal["mlflow"] = Field(description="needs flexrlhf[mlflow]")
    tracking_uri: str | None = Field(
        None, description="server or database; null: MLFLOW_TRACKING_URI, else sqlite:///RUNS/mlflow.db"
    )
    experiment: str = Field("flexrlhf", min_length=1, description="experiment of the run")

    @field_validator("tracking_uri")
    @classmethod
    def _has_no_secret(cls, value: str | None) -> str | None:
        if value is not None and "@" in urlsplit(value).netloc:
            raise ValueError(
                "tracking_uri: a user or password in an address would be written to config.yaml; set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_URI, in the environment"
            )
        return value


LoggerSpec = Annotated[TensorBoardSpec | WandbSpec | MlflowSpec, Field(discriminator="name")]
LOGGERS = ("tensorboard", "wandb", "mlflow")
