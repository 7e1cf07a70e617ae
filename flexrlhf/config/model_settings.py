"""Settings of the models: weights, engine, optimizer, adapters, and a shadow's own."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from operator import attrgetter
from os.path import realpath
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from flexrlhf.config.axes import AXES, ParallelDims
from flexrlhf.config.engines import EngineFacts
from flexrlhf.config.model_names import FoundModel
from flexrlhf.config.rules import YES, Rule
from flexrlhf.config.strict_model import StrictModel, optional_fields
from flexrlhf.config.user_paths import UserPath
from flexrlhf.errors import UserError, shown


def _pair(value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"expected two numbers such as [0.9, 0.95], found {shown(value)}")
    return value


Beta = Annotated[float, Field(ge=0, lt=1, strict=True)]


class OptimizerSpec(StrictModel):
    """Optimizer, its learning-rate schedule over the optimizer steps, and the clipping of the global gradient norm."""

    name: Literal["adamw", "adam", "sgd"] = Field("adamw", description="adamw: Loshchilov & Hutter 2019")
    learning_rate: float = Field(
        1e-6, ge=0, description="peak learning rate, after the warm-up; a critic's is 9e-6 unless it is written"
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="learning rate after the warm-up; linear and cosine: down to final_ratio of its peak",
    )
    final_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="end of linear and cosine, which they reach after the last optimizer step: learning rate over the "
        "peak; the last step itself is one step before it, as in transformers",
    )
    warmup_steps: int = Field(0, ge=0, description="optimizer steps in which the learning rate rises linearly from 0")
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(_pair)] = Field((0.9, 0.95), description="of adamw and adam")
    eps: float = Field(1e-8, gt=0, description="of adamw and adam")
    weight_decay: float = Field(0.0, ge=0, description="of adamw: decoupled from the gradient")
    max_grad_norm: float | None = Field(
        1.0, gt=0, description="gradients are scaled down to this global norm; null: not clipped"
    )

    @property
    def num_moments(self) -> int:
        """Float32 moments of each parameter: two of AdamW and Adam, none of SGD."""
        return 0 if self.name == "sgd" else 2


class LoraSpec(StrictModel):
    """Low-rank adapters on frozen weights (Hu et al. 2022), by peft: h = Wx + alpha / rank * BAx."""

    rank: int = Field(8, ge=1, le=2**16, description="rows of A and columns of B")
    alpha: int = Field(16, ge=1, description="scale of the adapters, over rank")
    targets: tuple[str, ...] | None = Field(
        None,
        description="linear layers with adapters, by the last part of their names; null: every linear layer, and in "
        "models with experts those of attention, next to which gate_up_proj and down_proj name the experts' weights",
    )

    @property
    def scale(self) -> float:
        """Factor of B A (Hu et al. 2022, sec. 4.1)."""
        return self.alpha / self.rank

    VLLM_RANKS: ClassVar = (1, 8, 16, 32, 64, 128, 256, 320, 512)
    """Ranks of adapters that vLLM 0.32 has memory for."""

    @field_validator("targets")
    @classmethod
    def _once(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        twice = next((name for name in value or () if (value or ()).count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice} is there twice: remove one of them")
        return value

    new: bool | None = Field(
        None,
        description="true: adapters in the model's path are merged into its weights, and new ones are trained; false: "
        "those are trained on, with their rank, alpha and targets; null: false where no other ones are written",
    )

    def rank_in_vllm(self, role: str) -> int:
        """Return the rank of the adapters that vLLM has memory for; rows and columns above ``rank`` stay 0.

        Raises UserError for a rank that it has not.
        """
        most = self.VLLM_RANKS[-1]
        if self.rank > most:
            raise UserError(
                f"models.{role}.lora.rank: vLLM adds adapters of rank {most} at most, found {self.rank}; use {most}, "
                f"or rollout.adapters: merged"
            )
        return next(rank for rank in self.VLLM_RANKS if rank >= self.rank)


Dtype = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number in memory, whatever the dtype of the file."""
SavedDtype = Literal["auto", "float32", "bfloat16", "float16"]
Zero = Literal[0, 1, 2, 3]
Shard = Literal["all", "node"]
ContextParallel = Literal["auto", "ulysses", "ring"]
RouterReplay = Literal["none", "compare", "rollout"]
Head = Literal["causal", "scalar", "both"]
"""Outputs of a model: logits over the vocabulary, one number for each token, or both on one trunk."""


def _named_config(value: Any) -> Any:
    """Return the config of a model's name or file; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return FoundModel.find(value, "init").config
    except UserError as error:
        raise ValueError(str(error).removeprefix("init ")) from None


ModelConfig = Annotated[dict[str, Any], BeforeValidator(_named_config, json_schema_input_type=dict[str, Any] | str)]


_degrees = attrgetter(*ParallelDims._fields)
_CROSSING = tuple((axis.name, key, value) for axis in AXES for key, value in axis.crosses_with)
"""Axis, and a setting with the value with which its ranks need not share a node."""


class ModelSpec(StrictModel):
    """One role: its weights, the engine that runs it and how it is trained."""

    RULES: ClassVar = (Rule("max_text_tokens", {"retokenize": YES}),)
    OF_ROUTERS: ClassVar[tuple[str, ...]] = ("router_aux_loss_coef", "router_z_loss_coef", "router_bias_update_rate")
    """Settings of training the routers of a model with experts."""
    SMALL_LOGITS_MB: ClassVar[float] = 64.0
    """Size on CPUs and on devices of unknown memory."""
    OF_TRAINING: ClassVar[tuple[str, ...]] = (
        *("optimizer", "lora", "activation_checkpointing", "offload_activations", "offload_optimizer", "shadow"),
        *OF_ROUTERS,
    )
    """Settings of ``models.all`` that a role which is not trained does not take."""
    OF_ONE_ENGINE: ClassVar[dict[str, int]] = {axis.name: 1 for axis in AXES if not axis.is_shared}
    """Degrees of a copy that another engine computes, unless its own settings differ."""
    PASS_SETTINGS: ClassVar[tuple[str, ...]] = ("micro_batch_tokens", "pack_texts", "share_prompts", "tiled_mlp")
    """Settings by which passes are composed; of a reference that has none, the actor's."""

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
    share: Literal["actor"] | None = Field(
        None,
        description="ref: the actor's base weights, without its adapters, or with the ones that it started from",
    )
    engine: str = Field("torch", description="torch, deepspeed, megatron, or a plug-in")
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
    cp: int = Field(
        1, ge=1, description="context-parallel ranks of a replica, each with a part of the tokens of every row (torch)"
    )
    ep: int = Field(
        1,
        ge=1,
        description="expert-parallel ranks: replicas that each store a part of the experts of every layer, and send "
        "tokens to each other (torch)",
    )
    router_replay: RouterReplay = Field(
        "none",
        description="of an actor with experts: rollout: log-probs and training use the experts that generation chose "
        "for a token (R3); compare: they are recorded, to report how often training chooses others (torch)",
    )
    router_aux_loss_coef: float = Field(
        0.0,
        ge=0,
        description="of the auxiliary loss that balances the experts of a mini-batch (Switch Transformer; Fedus et al. "
        "2021), which a pass without gradients counts first; 0: none",
    )
    router_z_loss_coef: float = Field(
        0.0, ge=0, description="of the loss that keeps routers' logits small (ST-MoE; Zoph et al. 2022); 0: none"
    )
    router_bias_update_rate: float = Field(
        0.0,
        ge=0,
        description="by which an optimizer step moves the biases of routers, up for experts with fewer tokens than the "
        "mean (Loss-Free Balancing; Wang et al. 2024); 0: they stay as they are (DeepSeek-V3, GLM-4.5)",
    )
    context_parallel: ContextParallel = Field(
        "auto",
        description="attention over context-parallel ranks: ulysses exchanges tokens for heads, in ring keys and "
        "values travel, also between nodes; auto: ulysses where cp x tp divides the heads",
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
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"] = Field(
        "auto",
        description="auto: by the lengths of texts, without a mask, in Llama, Mistral, Qwen2 and Qwen3, else sdpa; "
        "sdpa, eager: under a mask; flash_attention_2: on GPUs in 16 bits; flex_attention: on GPUs, one text in a row",
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
    cuda_graphs: bool = Field(
        False,
        description="generation by the engine torch replays its passes as CUDA graphs, on GPUs, with whole weights on "
        "each rank, in Llama, Mistral, Qwen2 and Qwen3",
    )
    generate_tokens: int = Field(65536, ge=1, description="padded tokens of the rows decoded together")
    logits_mb: float | None = Field(
        None,
        gt=0,
        description="MB of float32 logits that exist at a time while log-probs are computed; null: 64, on GPUs of a "
        "known class 512, or a hundredth of their memory",
    )
    activation_checkpointing: bool = Field(False, description="recompute a layer's activations in the backward pass")
    offload_activations: bool = Field(
        False, description="keep the inputs of checkpointed layers in host memory until the backward pass"
    )
    tiled_mlp: bool = Field(
        False,
        description="compute MLPs in tiles of as many tokens as there are hidden features, in the backward pass again "
        "(ALST; Bekman et al. 2025)",
    )
    offload_optimizer: bool = Field(False, description="keep the optimizer's state in host memory")
    offload_parameters: bool = Field(False, description="keep ZeRO-3 shards in host memory between passes")
    config: dict[str, Any] = Field(default_factory=dict, description="further settings of DeepSpeed, by their names")
    shadow: ShadowSpec | None = Field(None, description="settings in which this role's shadow differs")

    def earlier(self, pending: Mapping[Path, ModelSpec]) -> ModelSpec | None:
        """Return the model of an earlier run of the command that is to write this one's directory.

        pending:  directories that earlier runs are to write, and the models in them.
        """
        return None if self.path is None else pending.get(Path(realpath(self.path)))

    def origin(self, pending: Mapping[Path, ModelSpec]) -> ModelSpec:
        """Return the model that this one starts from, through earlier runs of the command."""
        earlier = self.earlier(pending)
        return self if earlier is None else earlier.origin(pending)

    @property
    def facts(self) -> EngineFacts:
        """Facts of its engine."""
        return EngineFacts.of(self.engine)

    @property
    def dims(self) -> ParallelDims:
        """Degree of each axis."""
        return ParallelDims(*_degrees(self))

    @property
    def crossing_axes(self) -> tuple[str, ...]:
        """Axes whose ranks, by its settings, need not share a node."""
        return tuple(name for name, key, value in _CROSSING if getattr(self, key) == value)

    @property
    def item_bytes(self) -> int:
        """Bytes of one number of its dtype."""
        return DTYPE_BYTES[self.dtype]

    @property
    def shares_in_passes(self) -> bool:
        """Whether packed samples share one copy of their prompt; never with ``retokenize``, which encodes prompt and
        response as one text."""
        return self.share_prompts and not self.retokenize

    @property
    def has_replay(self) -> bool:
        """Whether the experts that generation chose are recorded."""
        return self.router_replay != "none"

    @property
    def logits_at_a_time(self) -> int:
        """Logits, in float32, that ``logits_mb`` has room for."""
        return int((self.logits_mb or self.SMALL_LOGITS_MB) * 1e6 / 4)

    def is_ring(self, heads: int) -> bool:
        """Whether keys and values travel around the context-parallel ranks of a model with so many query heads."""
        return self.context_parallel == "ring" or (self.context_parallel == "auto" and heads % (self.cp * self.tp) != 0)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.path is not None and self.init is not None:
            raise ValueError("path and init exclude each other: remove one")
        return self

    @model_validator(mode="after")
    def _shared_weights_have_no_settings(self) -> Self:
        if self.share is None:
            return self
        plain = type(self).model_construct()
        others = [name for name in type(self).model_fields if getattr(self, name) != getattr(plain, name)]
        if others != ["share"]:
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

        Of another engine it has one pipeline stage and context-parallel rank and is sharded over all ranks, unless its
        own settings differ.
        """
        dropped: dict[str, Any] = {"shadow": None, "offload_optimizer": False, "offload_activations": False}
        is_other = own.get("engine", self.engine) != self.engine
        if is_other:
            dropped |= {"config": {}, "tiled_mlp": False, "shard": own.get("shard", "all")}
            dropped |= {name: own.get(name, degree) for name, degree in self.OF_ONE_ENGINE.items()}
        if is_other or own.get("zero", self.zero) != 3:
            dropped["offload_parameters"] = False
        return self.model_copy(update={**own, **dropped})

    @property
    def goes_on_adapters(self) -> bool:
        """Whether a model with these settings, which are resolved, goes on training the adapters in its path."""
        return self.lora is not None and self.lora.new is False


LAYOUT_SETTINGS = ("engine", "zero", "shard", *ParallelDims._fields)
"""Settings by which a model lies on its ranks."""
_OfShadow: Any = optional_fields(ModelSpec, *LAYOUT_SETTINGS, "dtype", "micro_batch_tokens", "generate_tokens")


class ShadowSpec(_OfShadow, StrictModel):  # type: ignore[misc]
    """Settings in which a role's shadow differs from its trained copy; null: the trained copy's setting.

    It has no gradients: ZeRO shards its weights at stage 3, and nothing at the others.
    """


ModelSpec.model_rebuild()  # its shadow is of this class


_OF_ONE_ROLE = {
    **dict.fromkeys(("path", "init", "router_replay"), "actor"),
    "share": "ref",
    **dict.fromkeys(("retokenize", "max_text_tokens"), "reward"),
}
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


_FURTHER = ("reward_", "cost_", "critic_", "ref_")


def _named_models(schema: dict[str, Any]) -> None:
    """Allow in a JSON Schema the further models whose names begin as they must, and no others."""
    schema["patternProperties"] = {f"^({'|'.join(_FURTHER)})": schema["additionalProperties"]}
    schema["additionalProperties"] = False


class ModelsSpec(StrictModel):
    """Models by role. ref defaults to the actor's path, critic to the reward's, cost_critic to the cost's.

    Settings of ``all`` hold for every role that does not have them itself, those of training for trained roles alone.
    Further reward and cost models have names of their own (``reward_...``, ``cost_...``), to which a source of
    ``reward`` or ``cost`` refers; a graph of one's own may have any (``critic_...``, ``ref_...``, too).
    """

    FURTHER: ClassVar[tuple[str, ...]] = _FURTHER
    """Prefixes of further models, whose names a user chooses."""

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
            if str(key).startswith(_FURTHER) and not re.fullmatch(r"[A-Za-z0-9_-]+", str(key)):
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
        return super()._is_known(key) or key.startswith(_FURTHER)

    def __iter__(self) -> Generator[tuple[str, Any]]:
        """Yield roles and their models; ``all`` is no role."""
        for role, model in super().__iter__():
            if role != "all":
                yield role, model

    def of(self, role: str) -> ModelSpec | None:
        """Return the model of ``role``; None if the YAML has none."""
        return None if role == "all" else vars(self).get(role, (self.model_extra or {}).get(role))
