"""Schema of the YAML: one class for each section, with every default on its field.

All classes are frozen and refuse unknown keys with the nearest valid one. ``spec_file`` reads and writes them.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema

from flexrlhf.config.algorithms import Algorithm, with_preset
from flexrlhf.config.engines import ENGINES, facts_of
from flexrlhf.config.model_names import find_model
from flexrlhf.config.outputs import CheckpointSpec, DebugSpec, GuardsSpec, LoggerSpec, SamplesSpec, SaveSpec
from flexrlhf.config.presets.filling import filled_models
from flexrlhf.config.ratio_vector import Exact, read_vector, vector_schema
from flexrlhf.config.reward_sources import Sources
from flexrlhf.config.rows import DataSpec, EvalSpec
from flexrlhf.config.strict_model import StrictModel, plain_text
from flexrlhf.config.user_paths import UserPath
from flexrlhf.errors import UserError, either, nearest, shown
from flexrlhf.operators.columns import LONGER, Lengths


def _pair(value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"expected two numbers such as [0.9, 0.95], found {shown(value)}")
    return value


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSpec(StrictModel):
    """Optimizer, its learning-rate schedule over the optimizer steps, and the clipping of the global gradient norm."""

    name: Literal["adamw", "adam", "sgd"] = Field("adamw", description="adamw: Loshchilov & Hutter 2019")
    learning_rate: float = Field(
        1e-6, ge=0, description="peak learning rate, after the warm-up; a critic's is 9e-6 unless it is written"
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="learning rate after the warm-up; linear and cosine: down to its end at the last step"
    )
    final_ratio: float = Field(
        0.0, ge=0, le=1, description="end of linear and cosine: learning rate of the last step over the peak"
    )
    warmup_steps: int = Field(0, ge=0, description="optimizer steps in which the learning rate rises linearly from 0")
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(_pair)] = Field((0.9, 0.95), description="of adamw and adam")
    eps: float = Field(1e-8, gt=0, description="of adamw and adam")
    momentum: float = Field(0.0, ge=0, lt=1, description="of sgd")
    weight_decay: float = Field(0.0, ge=0, description="of adamw: decoupled from the gradient")
    max_grad_norm: float | None = Field(
        1.0, gt=0, description="gradients are scaled down to this global norm; null: not clipped"
    )

    @model_validator(mode="after")
    def _momentum_is_of_sgd(self) -> Self:
        if self.momentum and self.name != "sgd":
            raise ValueError(f"momentum {self.momentum:g} goes with sgd; {self.name} has betas")
        return self


class LoraSpec(StrictModel):
    """Low-rank adapters on frozen weights (Hu et al. 2022), by peft: h = Wx + alpha / rank * BAx."""

    rank: int = Field(8, ge=1, le=2**16, description="rows of A and columns of B")
    alpha: int = Field(16, ge=1, description="scale of the adapters, over rank")
    targets: tuple[str, ...] | None = Field(
        None, description="linear layers with adapters, by the last part of their names; null: every linear layer"
    )


Dtype = Literal["float32", "bfloat16", "float16"]
SavedDtype = Literal["auto", "float32", "bfloat16", "float16"]
Zero = Literal[0, 1, 2, 3]
Shard = Literal["all", "node"]
Head = Literal["causal", "scalar", "both"]
"""Outputs of a model: logits over the vocabulary, one number for each token, or both on one trunk."""


class ShadowSpec(StrictModel):
    """Settings in which a role's shadow differs from its trained copy; null: the trained copy's setting."""

    engine: str | None = Field(None, description="torch, deepspeed or megatron")
    zero: Zero | None = Field(None, description="3: weights sharded; otherwise each replica has all of them")
    shard: Shard | None = Field(None, description="ranks over which ZeRO shards: all, or those of one node")
    tp: int | None = Field(None, ge=1, description="tensor-parallel ranks of a replica")
    pp: int | None = Field(None, ge=1, description="pipeline stages of a replica")
    dtype: Dtype | None = Field(None, description="type of weights and passes")
    micro_batch_tokens: int | None = Field(None, ge=1, description="computed tokens of one forward pass")
    generate_tokens: int | None = Field(None, ge=1, description="padded tokens of the rows decoded together")


SMALL_LOGITS_MB, SMALL_BUCKET_MB = 64.0, 48.0
"""Sizes on CPUs and on devices of unknown memory."""


def _named_config(value: Any) -> Any:
    """Return the config of a model's name or file; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return find_model(value, "init")
    except UserError as error:
        raise ValueError(str(error).removeprefix("init ")) from None


ModelConfig = Annotated[dict[str, Any], BeforeValidator(_named_config, json_schema_input_type=dict[str, Any] | str)]


class ModelSpec(StrictModel):
    """One role: its weights, the engine that runs it and how it is trained."""

    path: UserPath | None = Field(
        None, description="Hugging Face model directory, or a name on the Hub; null: see ModelsSpec"
    )
    init: ModelConfig | None = Field(
        None,
        description="a Hugging Face config, its file or a name such as qwen2.5-7b, to start from random weights",
    )
    new_head: bool = Field(
        False,
        description="files of scores may lack the scalar head, which is then random; trained ones may anyway",
    )
    trust_remote_code: bool = Field(
        False, description="run Python code that the model's directory contains, as transformers does"
    )
    retokenize: bool = Field(
        False,
        description="a reward or cost model of another vocabulary: texts are encoded again by its own tokenizer",
    )
    max_text_tokens: int | None = Field(
        None,
        ge=2,
        description="retokenize: longest text, of longer ones the beginning is cut off; null: twice prompt and "
        "response, at most the model's positions",
    )
    share: Literal["actor"] | None = Field(None, description="ref: the actor's base weights, without its adapters")
    engine: str = Field("torch", description="torch, deepspeed or megatron")
    zero: Zero = Field(
        0, description="ZeRO stage (Rajbhandari et al. 2020): 1 optimizer, 2 gradients, 3 weights sharded"
    )
    shard: Shard = Field(
        "all",
        description="ranks over which ZeRO shards: all of the model, or those of one node, with a copy on every node "
        "(torch, zero 2 and 3)",
    )
    tp: int = Field(1, ge=1, description="tensor-parallel ranks of a replica")
    pp: int = Field(1, ge=1, description="pipeline stages of a replica, of equally many layers (megatron)")
    sequence_parallel: bool = Field(
        True, description="tensor-parallel ranks split what lies between split layers along the texts (megatron)"
    )
    dtype: Dtype = Field(
        "float32",
        description="type of weights and passes; a trained model keeps float32 master weights; where none is written, "
        "bfloat16 on GPUs of known classes that all compute in it",
    )
    save_dtype: SavedDtype = Field(
        "auto",
        description="type of the saved model; auto: that of the files that it started from, float32 without any; "
        "checkpoints have float32 weights",
    )
    fallback_dtype: Literal["float16", "float32"] | None = Field(
        None, description="the type instead of bfloat16 on device classes without it, such as V100; null: refused"
    )
    attention: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = Field(
        "sdpa", description="kernel of transformers' attention; the last two on GPUs alone"
    )
    liger: bool = Field(False, description="norms and MLPs by Liger's kernels, on GPUs")
    compile: bool = Field(False, description="compile the layers (torch.compile), on GPUs")
    lora: LoraSpec | None = Field(None, description="train adapters; null: all weights")
    optimizer: OptimizerSpec = OptimizerSpec()
    micro_batch_tokens: int = Field(
        8192,
        ge=1,
        description="computed tokens of one forward or backward pass, which has at least one text, or the texts of a "
        "prompt that a loss compares",
    )
    pack_texts: bool = Field(True, description="several texts in one row of a pass, where the model's attention can")
    share_prompts: bool = Field(
        True,
        description="samples of one prompt share one copy of it: in generation, and with pack_texts in a pass",
    )
    generate_tokens: int = Field(65536, ge=1, description="padded tokens of the rows decoded together")
    logits_mb: float | None = Field(
        None,
        gt=0,
        description="MB of float32 logits that exist at a time while log-probs are computed; null: 64, on GPUs of a "
        "known class 512, or a hundredth of their memory",
    )
    activation_checkpointing: bool = Field(False, description="recompute a layer's activations in the backward pass")
    offload_optimizer: bool = Field(False, description="keep the optimizer's state in host memory")
    offload_parameters: bool = Field(False, description="keep ZeRO-3 shards in host memory between passes")
    config: dict[str, Any] = Field(default_factory=dict, description="further settings of DeepSpeed, by their names")
    shadow: ShadowSpec | None = Field(None, description="settings in which this role's shadow differs")

    @property
    def logits_at_a_time(self) -> int:
        """Logits, in float32, that ``logits_mb`` has room for."""
        return int((self.logits_mb or SMALL_LOGITS_MB) * 1e6 / 4)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.path is not None and self.init is not None:
            raise ValueError("path and init exclude each other: remove one")
        return self

    @model_validator(mode="after")
    def _limit_of_texts(self) -> Self:
        if self.max_text_tokens is not None and not self.retokenize:
            raise ValueError("max_text_tokens goes with retokenize: true: remove it, or set data.max_prompt_tokens")
        return self

    @model_validator(mode="after")
    def _shared_weights_have_no_settings(self) -> Self:
        plain = type(self).model_construct()
        others = [name for name in type(self).model_fields if getattr(self, name) != getattr(plain, name)]
        if self.share is not None and others != ["share"]:
            others.remove("share")
            raise ValueError(f"share: {self.share} means no copy of its own: remove {', '.join(others)}")
        return self

    @property
    def of_shadow(self) -> Self:
        """Settings of this role's shadow."""
        return self.of_copy({key: value for key, value in (self.shadow or ()) if value is not None})

    def of_copy(self, own: dict[str, Any]) -> Self:
        """Return the settings of a copy that is not trained and has ``own`` ones, without those for training or for
        another engine's library.

        Of another engine it has one pipeline stage and is sharded over all ranks, unless its own settings differ.
        """
        dropped: dict[str, Any] = {"shadow": None, "offload_optimizer": False}
        is_other = own.get("engine", self.engine) != self.engine
        if is_other:
            dropped |= {"config": {}, "pp": own.get("pp", 1), "shard": own.get("shard", "all")}
        if is_other or own.get("zero", self.zero) != 3:
            dropped["offload_parameters"] = False
        return self.model_copy(update={**own, **dropped})


OF_TRAINING = ("optimizer", "lora", "activation_checkpointing", "offload_optimizer", "shadow")
"""Settings of ``models.all`` that a role which is not trained does not take."""
_OF_ONE_ROLE = {"path": "actor", "init": "actor", "share": "ref", "retokenize": "reward", "max_text_tokens": "reward"}
"""Settings that ``models.all`` does not have → a role that has them."""


def _over_all(own: Any, shared: dict[str, Any]) -> Any:
    """Return a role's settings over those of ``all``, sections key by key; a role that shares weights takes none."""
    if not isinstance(own, dict) or own.get("share") is not None:
        return own
    pairs = {name: (shared.get(name), own.get(name)) for name in ("optimizer", "lora", "shadow")}
    sections = {
        name: {**of_all, **of_role}
        for name, (of_all, of_role) in pairs.items()
        if isinstance(of_all, dict) and isinstance(of_role, dict)
    }
    return {**shared, **own, **sections}


FURTHER_MODELS = ("reward_", "cost_", "critic_", "ref_")
"""Prefixes of further models, whose names a user chooses."""


def _named_models(schema: dict[str, Any]) -> None:
    """Allow in a JSON Schema the further models whose names begin as they must, and no others."""
    schema["patternProperties"] = {f"^({'|'.join(FURTHER_MODELS)})": schema["additionalProperties"]}
    schema["additionalProperties"] = False


class ModelsSpec(StrictModel):
    """Models by role. ref defaults to the actor's path, critic to the reward's, cost_critic to the cost's.

    Settings of ``all`` hold for every role that does not have them itself, those of training for trained roles alone.
    Further reward and cost models have names of their own (``reward_...``, ``cost_...``), to which a source of
    ``reward`` or ``cost`` refers; a graph of one's own may have any (``critic_...``, ``ref_...``, too).
    """

    model_config = ConfigDict(extra="allow", frozen=True, json_schema_extra=_named_models)
    __pydantic_extra__: dict[str, ModelSpec] = Field(init=False)

    all: ModelSpec | None = Field(
        None,
        description="settings of every role that does not have them itself",
        json_schema_extra={"properties": dict.fromkeys(_OF_ONE_ROLE, False)},
    )
    actor: ModelSpec | None = None
    critic: ModelSpec | None = None
    cost_critic: ModelSpec | None = None
    ref: ModelSpec | None = None
    reward: ModelSpec | None = None
    cost: ModelSpec | None = None

    @model_validator(mode="before")
    @classmethod
    def _names_are_words(cls, value: Any) -> Any:
        """Refuse names with other characters: a dot separates a role from its shadow, and names become directories."""
        for key in value if isinstance(value, dict) else ():
            if str(key).startswith(FURTHER_MODELS) and not re.fullmatch(r"[A-Za-z0-9_-]+", str(key)):
                word = re.sub(r"[^A-Za-z0-9_-]+", "_", str(key))
                raise ValueError(f"{shown(key)}: a model's name has letters, digits, _ and - alone; use {word}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _take_from_all(cls, value: Any) -> Any:
        """Write the settings of ``all`` into the roles that are written; planning fills in the others."""
        if not isinstance(value, dict) or not isinstance(value.get("all"), dict):
            return value
        shared = {name: setting for name, setting in value["all"].items() if name not in _OF_ONE_ROLE}
        return {role: own if role == "all" else _over_all(own, shared) for role, own in value.items()}

    @field_validator("all", mode="before")
    @classmethod
    def _settings_of_all_roles(cls, value: Any) -> Any:
        for name in value if isinstance(value, dict) else ():
            if name in _OF_ONE_ROLE:
                raise ValueError(
                    f"{name} goes with one role, found {shown(value[name])}: write models.{_OF_ONE_ROLE[name]}.{name}"
                )
        return value

    @classmethod
    def _is_known(cls, key: str) -> bool:
        return super()._is_known(key) or key.startswith(FURTHER_MODELS)

    def __iter__(self) -> Generator[tuple[str, Any]]:
        """Yield roles and their models; ``all`` is no role."""
        for role, model in super().__iter__():
            if role != "all":
                yield role, model

    def of(self, role: str) -> ModelSpec | None:
        """Return the model of ``role``; None if the YAML has none."""
        return dict(self).get(role)


class NodeSpec(StrictModel):
    """Machines of one kind."""

    count: int = Field(1, ge=1, description="machines")
    devices: int = Field(ge=1, description="devices in each machine")
    device_class: str = Field("any", alias="class", description="such as A100-80G: device memory and compute figures")
    memory_gb: float | None = Field(
        None, gt=0, description="GB of one device that models and calls may fill; null: what its class leaves"
    )
    link_gb_s: float | None = Field(
        None, gt=0, description="GB/s between two devices of a machine, in one direction; null: that of the class"
    )
    network_gb_s: float | None = Field(
        None, gt=0, description="GB/s from one machine to the others, in one direction; null: that of the class"
    )
    speed: Exact | None = Field(
        None,
        gt=0,
        description="speed of one device, relative to those of the other nodes, by which rows are shared and measured "
        "times are scaled; `flexrlhf doctor` measures it; null: that of the class",
    )


class ClusterSpec(StrictModel):
    """Devices of the run: one number, or nodes with a device class each."""

    devices: int | None = Field(
        None, ge=1, description="number of devices, a rank each; null: those of the nodes, or 1"
    )
    nodes: tuple[NodeSpec, ...] = Field((), description="machines in the order of their ranks; []: one machine")
    memory_gb: float | None = Field(
        None, gt=0, description="GB of one device that models and calls may fill, where its node has no memory_gb"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where each rank has a GPU, else cpu")

    @property
    def num_devices(self) -> int:
        """Number of devices: given, else those of the nodes, else 1."""
        return self.devices or sum(node.count * node.devices for node in self.nodes) or 1

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        total = sum(node.count * node.devices for node in self.nodes)
        if self.nodes and self.devices not in (None, total):
            raise ValueError(f"devices {self.devices} but the nodes hold {total}: remove devices or correct the nodes")
        without = [number for number, node in enumerate(self.nodes) if node.speed is None]
        if 0 < len(without) < len(self.nodes):
            raise ValueError(f"nodes[{without[0]}] has no speed and others have one: give it for all nodes or for none")
        return self


def _ranks(value: Any) -> Any:
    """Read ranks that are written as a text such as ``0-3`` or ``0-1,4-5``."""
    if not isinstance(value, str):
        return value
    spans = [re.fullmatch(r"\s*(\d{1,6})(?:\s*-\s*(\d{1,6}))?\s*", part) for part in value.split(",")]
    ranks = [rank for span in spans if span for rank in range(int(span[1]), int(span[2] or span[1]) + 1)]
    if not all(spans) or not ranks:
        raise ValueError(f"expected ranks such as [0, 1, 2, 3] or 0-3, found {shown(value)}")
    return ranks


def _written_ranks(ranks: tuple[int, ...]) -> list[int] | str:
    """Write ranks so that reading them gives the same: a run of several as a span."""
    is_run = len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks)))
    return f"{ranks[0]}-{ranks[-1]}" if is_run else list(ranks)


Ranks = Annotated[
    tuple[int, ...],
    BeforeValidator(_ranks, json_schema_input_type=tuple[int, ...] | str),
    PlainSerializer(_written_ranks),
]


class PlacementEntry(StrictModel):
    """Ranks of one placed model, in the mapping form."""

    ratio: Exact | None = Field(None, description="share of the devices, in (0, 1]; or ranks")
    ranks: Ranks | None = Field(None, description="the ranks themselves, as a list or as 0-3; or ratio")
    on: str | None = Field(None, description="device class; the ratio then counts devices of this class only")
    row_shares: tuple[Exact, ...] | None = Field(
        None, description="relative share of the rows for each replica; null: equal shares"
    )

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.ratio is None) == (self.ranks is None):
            raise ValueError("give either ratio or ranks")
        if self.ranks is not None and self.on is not None:
            raise ValueError("on goes with a ratio: remove on or ranks")
        if self.ranks is not None and (
            not self.ranks or len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0
        ):
            raise ValueError(f"ranks must be distinct and not negative, found {list(self.ranks)}")
        if self.row_shares is not None and (min(self.row_shares, default=-1) < 0 or sum(self.row_shares) == 0):
            raise ValueError("row_shares must not be negative and must not all be 0")
        return self


def _entry(value: Any) -> Any:
    return value if isinstance(value, dict | PlacementEntry) else {"ratio": value}


Entry = Annotated[PlacementEntry, BeforeValidator(_entry, json_schema_input_type=PlacementEntry | Exact)]


class OperatorPlacement(PlacementEntry):
    """Ranks of one operator, and settings in which it differs from its role; null: those of the role."""

    engine: str | None = Field(None, description="torch, deepspeed or megatron")
    zero: Zero | None = Field(None, description="ZeRO stage")
    shard: Shard | None = Field(None, description="ranks over which ZeRO shards: all, or those of one node")
    tp: int | None = Field(None, ge=1, description="tensor-parallel ranks of a replica")
    pp: int | None = Field(None, ge=1, description="pipeline stages of a replica")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that are given."""
        given = {name: getattr(self, name) for name in ("engine", "zero", "shard", "tp", "pp")}
        return {name: value for name, value in given.items() if value is not None}


OperatorEntry = Annotated[OperatorPlacement, BeforeValidator(_entry, json_schema_input_type=OperatorPlacement | Exact)]
PLACEMENT_SETTINGS = ("train_share", "span_classes")


class PlacementMap(BaseModel):
    """Mapping form of a placement: placed model → ratio, or → ratio, ranks, on, row_shares; or ``operators``.

    ``train_share`` and ``span_classes`` stand next to the models, whose names ``placement/`` checks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: dict[str, Entry]
    operators: dict[str, OperatorEntry] | None = Field(
        None, description="a placement for each operator, in place of one for each model"
    )
    train_share: Exact | None = Field(
        None, description="share of the devices on the training side, with shadows; null: follows from the ratios"
    )
    span_classes: bool = Field(False, description="whether a ratio may take devices of several classes")

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON Schema of the form that a user writes: the models next to the settings."""
        schema = handler.resolve_ref_schema(handler(core))
        schema["additionalProperties"] = schema["properties"].pop("models")["additionalProperties"]
        schema["description"] = plain_text(cls.__doc__)
        schema.pop("required")
        return schema

    @model_validator(mode="before")
    @classmethod
    def _split_settings(cls, value: Any) -> Any:
        """Split a user's mapping into placed models and settings; our own code passes entries as ``models``."""
        if not isinstance(value, dict) or _holds_entries(value.get("models")):
            return value
        settings = {key: value[key] for key in (*PLACEMENT_SETTINGS, "operators") if key in value}
        models = {key: entry for key, entry in value.items() if key not in settings}
        if settings.get("operators") is not None:
            others = [*models, *(["train_share"] if settings.get("train_share") is not None else [])]
            if others:
                raise ValueError(f"operators and {others[0]} exclude each other: remove {', '.join(others)}")
        for key, entry in models.items():
            if isinstance(entry, bool):
                raise ValueError(
                    f"{key}: expected a ratio, found {shown(entry)}{nearest(str(key), PLACEMENT_SETTINGS)}"
                )
        return {"models": models, **settings}


def _holds_entries(models: Any) -> bool:
    return isinstance(models, dict) and bool(models) and all(isinstance(e, PlacementEntry) for e in models.values())


class ScheduleSpec(StrictModel):
    """Order of the instructions. It changes times, never numbers, except for ``lag``: which weights generate."""

    strategy: Literal["co-located", "interleaving", "disaggregated"] | None = Field(
        None, description="follows from the placement; may only confirm it"
    )
    num_chunks: int = Field(1, ge=1, description="parts of a step's rows that pass through the operators separately")
    lag: Literal[0, 1] = Field(0, description="1: shadows generate the next step's batch while this one trains")


class SyncSpec(StrictModel):
    """Transfer of a trained model's weights to its shadow or rollout engine."""

    every: int = Field(1, ge=1, description="steps between two syncs")
    checksum: bool = Field(True, description="compare checksums of the weights on both sides")
    dtype: Literal["bfloat16", "float16"] | None = Field(
        None,
        description="type in which weights are sent to copies of a larger one, which then have rounded weights; null: "
        "that of the copy",
    )
    overlap: Literal["auto"] | bool = Field(
        "auto",
        description="transfer while both sides compute, with memory for all that one sends and the other gets; auto: "
        "with a lag, and on several nodes",
    )
    bucket_mb: float | None = Field(
        None,
        ge=0.001,
        description="MB of a rank's buffers in a transfer, and of weights gathered together for a save; null: 48, on "
        "GPUs of a known class 512, or a hundredth of their memory",
    )

    @property
    def bucket_bytes(self) -> int:
        """Most bytes of buffers; to be saved, a larger tensor is gathered by itself."""
        return int((self.bucket_mb or SMALL_BUCKET_MB) * 1e6)


class ParitySpec(StrictModel):
    """Comparison of the rollout engine with the trainer: log-probs of the same sampled tokens by both.

    The run stops where a difference exceeds its limit. In float32 the largest may be 1e-3 nats and the mean 1e-4; in 16
    bits, where a token of low probability differs by more now and then, one of a thousand may exceed 1.0, and the mean
    be 0.05. A limit that is given takes the place of its default.
    """

    every: int = Field(
        10, ge=1, description="steps between two comparisons; the first is at step 0, with schedule.lag 1 the only one"
    )
    max_difference: float | None = Field(None, gt=0, description="limit of the largest difference (nats)")
    p999_difference: float | None = Field(
        None, gt=0, description="limit of the difference that one token of a thousand exceeds (nats)"
    )
    mean_difference: float | None = Field(None, gt=0, description="limit of the mean difference (nats)")


class RolloutSpec(StrictModel):
    """Engine that generates: transformers with the actor's own weights, or another one with a copy of them.

    vllm: in its own memory; torch: on the ranks of the trained actor, in a layout of its own (a hybrid engine).
    """

    logprobs: Literal["auto", "recompute", "reuse"] = Field(
        "auto",
        description="of the policy that ratios are taken to: recompute: by a forward pass; reuse: as generation has "
        "computed them, in any type of numbers; auto: without a pass of their own where numbers stay the same but for "
        "the rounding of float32",
    )
    engine: Literal["auto", "transformers", "torch", "vllm"] = Field(
        "auto",
        description="auto: vllm on GPUs of known classes that all compute in bfloat16, for the models that it serves, "
        "else transformers, whatever is installed; transformers has none of the settings below, torch those marked so, "
        "vllm all",
    )
    tp: int = Field(1, ge=1, description="tensor-parallel ranks of an engine (torch too)")
    pp: int = Field(1, ge=1, description="pipeline stages of an engine")
    dtype: Dtype | None = Field(None, description="type of weights and passes; null: the actor's (torch too)")
    process: Literal["inline", "child"] = Field(
        "inline", description="child: a process of its own, which decodes while its rank runs other instructions"
    )
    noise: Literal["exact", "engine"] = Field(
        "exact",
        description="sampling noise: exact: samples the same tokens as every other engine; engine: vLLM's generators",
    )
    kv_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens whose keys and values fit in the cache; null: models.actor.generate_tokens (torch too)",
    )
    adapters: Literal["merged", "separate"] = Field(
        "merged",
        description="of an actor with lora: merged: a sync sends the weights that they change, with them added; "
        "separate: it sends the adapters alone, which vLLM adds in every pass, for weights that take long to send",
    )
    prefix_caching: bool = Field(True, description="samples of one prompt share its keys and values")
    cuda_graphs: bool = Field(True, description="decode with captured CUDA graphs")
    sleep: bool = Field(True, description="co-located: free the engine's memory while other models run (torch too)")
    config: dict[str, Any] = Field(default_factory=dict, description="further arguments of vLLM, by their names")
    parity: ParitySpec | None = Field(
        ParitySpec(),
        description="null: the engine is not compared with the trainer (torch too; transformers with sync.dtype)",
    )

    @model_validator(mode="after")
    def _settings_of_the_engine(self) -> Self:
        if surplus := self.surplus(self.engine):
            engines = [name for name, facts in ENGINES.items() if surplus[0] in facts.rollout_settings]
            raise ValueError(
                f"{surplus[0]} goes with engine {' or '.join(engines)}; {self.engine} generates with the settings of "
                f"models.actor: remove {', '.join(surplus)}"
            )
        return self

    @property
    def has_copy(self) -> bool:
        """Whether the engine has a copy of the actor's weights; transformers generates with the weights themselves."""
        return self.engine != "transformers"

    @property
    def is_hybrid(self) -> bool:
        """Whether the engine generates on the ranks that train the actor alone."""
        return facts_of(self.engine).on_trained_ranks

    @property
    def as_written(self) -> Self:
        """Settings of the YAML: engine auto where planning has chosen one."""
        return self if "engine" in self.model_fields_set else self.model_copy(update={"engine": "auto"})

    def surplus(self, engine: str) -> list[str]:
        """Return the settings that are not their defaults and that ``engine`` does not have."""
        plain, fields = type(self).model_construct(), type(self).model_fields
        has = {"auto": tuple(fields), "transformers": ("parity",)}
        allowed = ("engine", "logprobs", *has.get(engine, facts_of(engine).rollout_settings))
        return [name for name in fields if name not in allowed and getattr(self, name) != getattr(plain, name)]


MAX_DEVICES = 16384
"""Most devices of a plan: planning takes half a millisecond for each."""
MAX_PLANNED = 4096
"""Most devices times chunks of a plan with several chunks: planning takes a millisecond for each."""
MAX_CHUNKS = 128
"""Most chunks: planning compares each with every other."""
MAX_ROWS = 1_000_000
"""Most rows of a step: a plan lists which row goes where."""


class Spec(StrictModel):
    """One run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128, description="results go to runs/<name>")
    algorithm: Algorithm
    models: ModelsSpec
    data: DataSpec
    reward: Sources | None = Field(None, description="where scores come from; null: models.reward alone")
    cost: Sources | None = Field(None, description="where costs come from; null: models.cost alone")
    steps: int = Field(100, ge=1, description="training steps, each on one batch of prompts")
    seed: int = Field(0, ge=0, lt=2**63, description="of the data order, of sampling and of random weights")
    cluster: ClusterSpec = ClusterSpec()
    placement: Literal["auto"] | tuple[Exact, ...] | PlacementMap | None = Field(
        None,
        description="null: every model on all devices; auto, or where it is left out: the first choice of "
        "`flexrlhf advise`; a vector such as 1,1,0.5,0.5 of ratios; or ratios, ranks and more by model, or by operator",
        json_schema_extra=vector_schema,
    )
    schedule: ScheduleSpec = ScheduleSpec()
    sync: SyncSpec = SyncSpec()
    rollout: RolloutSpec = RolloutSpec()
    eval: EvalSpec | None = Field(None, description="null: no evaluation")
    save: SaveSpec = SaveSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    guards: GuardsSpec = GuardsSpec()
    samples: SamplesSpec = SamplesSpec()
    loggers: tuple[LoggerSpec, ...] = Field((), description="libraries that receive metrics, samples and timeline")
    debug: DebugSpec = DebugSpec()
    runs: UserPath = Field("runs", description="directory of all runs' results")
    snapshots: dict[str, str] = Field(
        default_factory=dict, description="filled in by planning: directory of the Hub's cache → name@commit"
    )
    timeout_seconds: float = Field(1800.0, ge=1, description="no rank waits longer than this for another")
    timeline_steps: int = Field(1000, ge=1, description="steps that timeline.json keeps, up to the last")

    @model_validator(mode="before")
    @classmethod
    def _fill_in_optimizers(cls, value: Any) -> Any:
        """Fill in the optimizers of a preset (``algorithm.like``) where nothing is written."""
        if not isinstance(value, dict) or not isinstance(value.get("models"), dict):
            return value
        algorithm = with_preset(value.get("algorithm"))
        return value if algorithm is None else {**value, "models": filled_models(value, algorithm)}

    @model_validator(mode="before")
    @classmethod
    def _placement_form(cls, value: Any) -> Any:
        placement = value.get("placement") if isinstance(value, dict) else None
        vector = read_vector(placement) if isinstance(placement, str) else None
        if vector is not None:
            return {**value, "placement": vector}
        if placement != "auto" and not isinstance(placement, list | tuple | dict | PlacementMap | None):
            raise ValueError(
                f"placement: expected a vector such as [1,1,0.5,0.5], a mapping or auto, found {shown(placement)}"
            )
        return value

    @model_validator(mode="after")
    def _loggers_differ(self) -> Self:
        names = [logger.name for logger in self.loggers]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"loggers: {twice[0]} is there twice: remove one of them")
        return self

    @model_validator(mode="after")
    def _chunks_divide_mini_batches(self) -> Self:
        chunks, mini_batches = self.schedule.num_chunks, self.algorithm.num_mini_batches
        if mini_batches % chunks:
            use = either(n for n in range(1, mini_batches + 1) if mini_batches % n == 0)
            raise ValueError(
                f"schedule.num_chunks {chunks} does not divide algorithm.num_mini_batches {mini_batches}: use {use}"
            )
        return self

    @model_validator(mode="after")
    def _can_be_planned(self) -> Self:
        """Refuse sizes whose planning would take minutes or the machine's memory."""
        devices, chunks = self.cluster.num_devices, self.schedule.num_chunks
        if devices > MAX_DEVICES:
            raise ValueError(f"cluster: {devices} devices are more than a plan takes: use at most {MAX_DEVICES}")
        most = max(1, min(MAX_CHUNKS, MAX_PLANNED // devices))
        if chunks > most:
            raise ValueError(
                f"schedule.num_chunks {chunks} on {devices} devices are more than a plan takes: use at most {most}"
            )
        samples = getattr(self.algorithm, "samples_per_prompt", 1)
        rows = getattr(self.algorithm, "num_prompts", self.algorithm.prompts_per_step) * samples
        if rows > MAX_ROWS:
            raise ValueError(
                f"algorithm: {self.algorithm.prompts_per_step} prompts_per_step are {rows} rows a step, more than a "
                f"plan takes: use at most {MAX_ROWS}"
            )
        return self

    @model_validator(mode="after")
    def _responses_can_end(self) -> Self:
        least = getattr(self.algorithm, "min_response_tokens", 0)
        if least > self.data.max_response_tokens:
            raise ValueError(
                f"algorithm.min_response_tokens {least} exceeds data.max_response_tokens "
                f"{self.data.max_response_tokens}: use at most {self.data.max_response_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _punishment_fits(self) -> Self:
        overlong, longest = getattr(self.algorithm, "overlong", None), self.data.max_response_tokens
        if overlong is not None and (overlong.buffer_tokens or 0) > longest:
            raise ValueError(
                f"algorithm.overlong.buffer_tokens {overlong.buffer_tokens} exceeds data.max_response_tokens "
                f"{longest}, so every response would be punished: use at most {longest}"
            )
        return self

    @property
    def directory(self) -> Path:
        """Directory of the run's results."""
        return Path(self.runs) / self.name

    @property
    def lengths(self) -> Lengths:
        """Padded lengths of prompts and responses, and of texts for models with a tokenizer of their own."""
        prompt, response = self.data.max_prompt_tokens, self.data.max_response_tokens
        own = ((role, model) for role, model in self.models if model is not None and model.retokenize)
        texts = tuple((role, model.max_text_tokens or LONGER * (prompt + response)) for role, model in own)
        return Lengths(prompt, response, texts)
