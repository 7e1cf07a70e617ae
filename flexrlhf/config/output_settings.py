"""Settings of the files that a run writes (loggers, samples, models, checkpoints), of its guards, and for tests."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny, field_validator

from flexrlhf.config.plugins import SHIPPED
from flexrlhf.config.secrets import has_port, secrets_in, without_secrets
from flexrlhf.config.strict_model import StrictModel, plugin_settings
from flexrlhf.config.user_paths import UserPath
from flexrlhf.errors import shown


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
        if value is not None and secrets_in(value):
            raise ValueError(
                "a user or password in an address would be written to config.yaml; set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_URI, in the environment, or give the name of a variable, "
                "such as ${MLFLOW_PASSWORD}"
            )
        if value is not None and value.startswith(("http://", "https://")) and not has_port(value):
            raise ValueError(f"no such port, use 1 to 65535, found {shown(without_secrets(value))}")
        return value


LoggerSpec = Annotated[TensorBoardSpec | WandbSpec | MlflowSpec, Field(discriminator="name")]
PluginLogger = Annotated[SerializeAsAny[LoggerSpec], plugin_settings("loggers")]
"""A logger of this package, or another one."""
LOGGERS = tuple(SHIPPED["loggers"])


class GuardsSpec(StrictModel):
    """Numbers that end a run or are warned of. They never change a number of a run without such events,
    but for the rounding of log-probs (``rollout.logprobs``)."""

    non_finite: Literal["stop", "skip"] = Field(
        "stop",
        description="NaN or infinite losses, gradients, log-probs and values: stop: the run ends and names the first "
        "response; skip: the optimizer step of the mini-batch is left out, on all ranks, and counted",
    )
    max_failed_steps: int | None = Field(
        3, ge=1, description="the run ends after so many steps in a row in which no response has a score; null: never"
    )
    sampled_logprobs: Literal["stop", "warn", "off"] = Field(
        "stop",
        description="log-probs of the first step as transformers sampled the tokens differ from those computed of the "
        "whole texts, by more than 1e-3 nats in the mean, or 0.05 in 16 bits; for torch and vllm see rollout.parity",
    )
    warnings: bool = Field(
        True,
        description="warn of a KL that explodes, losses and gradient norms that jump, equal scores, and truncated "
        "responses",
    )


class SamplesSpec(StrictModel):
    """Responses that ``runs/<name>/samples.jsonl`` keeps as text, with their scores. They change no number."""

    every: int = Field(
        10, ge=1, description="steps between two whose training responses are kept; those of the last step always are"
    )
    count: int = Field(4, ge=0, description="responses kept of such a step, and of each evaluation; 0: none")


class SaveSpec(StrictModel):
    """Checkpoints of trained models: ``runs/<name>/<role>``, the best ones in ``runs/<name>/<role>-best``."""

    every: int | None = Field(None, ge=1, description="steps between two checkpoints; null: one, after the last step")
    keep: bool = Field(
        False,
        description="keep those of earlier steps, in runs/<name>/<role>-step-<number>; false: the next replaces one",
    )
    best: str | None = Field(
        None, description="a metric of the evaluations by which the best models are kept; null: none are"
    )
    shard_gb: float = Field(5.0, gt=0, description="GB of one file of weights; larger models have several and an index")

    @property
    def shard_bytes(self) -> int:
        """Most bytes of weights in a file."""
        return int(self.shard_gb * 1e9)


class CheckpointSpec(StrictModel):
    """Checkpoints that ``flexrlhf run --resume`` goes on from, in ``runs/<name>/checkpoints``."""

    every: int | None = Field(
        None, ge=1, description="steps between two, and one after the last step; null: none but on a signal"
    )
    keep_last: int = Field(2, ge=1, description="older checkpoints are deleted")
    on_signal: bool = Field(True, description="SIGTERM and SIGUSR1 write one after the current step, and end the run")


class Switches(StrictModel):
    """Mechanisms that a run can do without, one setting each, to find the one that fails on a machine.

    None depends on another, each may be set with any others and on CPUs, and a run without any of them has the same
    results, but for the rounding that a setting names. A setting stays as long as the mechanism does, however reliable
    that is: machines that nobody here has may need it.
    """

    backend: Literal["auto", "gloo"] = Field(
        "auto",
        description="of messages between ranks: auto: NCCL where each rank has a GPU of its own; gloo: through host "
        "memory everywhere",
    )
    communicators: Literal["auto", "apart", "shared"] = Field(
        "auto",
        description="of groups of the same ranks: apart: each purpose has one of its own, up to 0.5 GB of a GPU each; "
        "shared: one for all messages that ranks await where they begin them; auto: shared, but for messages inside "
        "layers (of experts and context-parallel ranks) next to gathers of FSDP2",
    )
    message_batches: bool = Field(
        True,
        description="begin all messages between pairs of ranks that belong together at once; false: one after another, "
        "for which NCCL connects each pair of ranks by itself",
    )
    move_blocks: bool = Field(
        True,
        description="let NCCL's messages of rows take four thread blocks of a GPU at most; false: NCCL decides",
    )
    device_polling: bool = Field(
        True,
        description="have the host look whether a GPU has done what it waits for, with a deadline; false: leave that "
        "to NCCL, whose watchdog ends the process a minute after the deadline",
    )
    device_waits: bool = Field(
        True,
        description="let the device alone wait for sums of gradients and messages of a ring; false: the host waits for "
        "each",
    )
    reused_weights: bool = Field(
        True, description="store once what a copy and the model that it follows have in common on a rank"
    )
    copy_streams: bool = Field(
        True,
        description="copy between GPU and host memory on streams of their own; false: the host waits for each copy",
    )
    prefetched_reloads: bool = Field(
        True, description="begin to reload a model before the instruction that needs it, where memory allows it"
    )
    pinned_memory: bool = Field(True, description="pin host memory that is copied from and to a GPU")
    slots: bool = Field(
        True, description="decode in slots of one KV cache (engine torch); false: in waves, without rollout graphs"
    )
    noise_kernel: bool = Field(
        True, description="make sampling noise by a Triton kernel on GPUs; false: by operations of torch"
    )
    sleep_level_2: bool = Field(
        True,
        description="let a sleeping vLLM discard weights that a sync overwrites; false: it copies them to host memory",
    )
    float32_routers: bool = Field(
        True,
        description="compute routers of experts in float32 in a model of 16 bits; false: as its implementation does, "
        "so that training and generation may choose other experts",
    )
    deterministic: bool = Field(
        False,
        description="use kernels alone that add in a fixed order (torch, cuBLAS, flash attention, vLLM's batch "
        "invariance), so that a run on GPUs can be repeated to the bit; slower",
    )

    @property
    def thrown(self) -> dict[str, str | bool]:
        """Settings that turn a mechanism off, by name."""
        values = {name: getattr(self, name) for name in Switches.model_fields}
        return {name: value for name, value in values.items() if value != Switches.model_fields[name].default}

    @property
    def thrown_text(self) -> str:
        """Text of these settings behind the title of a run: ``; debug: slots false``; empty without any."""
        thrown = ", ".join(f"{name} {str(value).lower()}" for name, value in self.thrown.items())
        return f"; debug: {thrown}" if thrown else ""


NO_SWITCHES = Switches()


class DebugSpec(Switches):
    """Settings for tests, to find where two runs differ, and which mechanism fails on a machine."""

    record_columns: bool = Field(False, description="write every column of every step to runs/<name>/columns")
    replay: UserPath | None = Field(
        None, description="runs/NAME of a run with recorded columns, whose responses replace the sampled ones"
    )
    late_replies_of: UserPath | None = Field(
        None,
        description="runs/NAME of a run with recorded columns, whose late replies are late here as well "
        "(rollout.late_replies: carry)",
    )
    run_delay_seconds: float = Field(0.0, ge=0, description="sleep this long in every Run, to make overlap visible")
    cudnn_attention: bool = Field(
        False,
        description="let torch use cuDNN's attention, which it prefers in 16 bits on H100 and later, and which takes "
        "0.02 to 1 s for each new number of rows and width",
    )
    expandable_segments: bool = Field(
        False,
        description="let torch's memory of a GPU grow in place, which leaves fewer gaps between tensors of changing "
        "sizes, for this run and later ones of its command; what PYTORCH_ALLOC_CONF says of it comes first",
    )
