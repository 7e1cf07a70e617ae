"""The YAML schema: what a user may write, with every default on its field.

All classes are frozen and refuse unknown keys, naming the nearest known one. ``spec_file`` reads and writes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from flexrlhf.config.algorithms import Algorithm
from flexrlhf.config.reward_sources import Sources
from flexrlhf.config.strict_model import Exact, StrictModel
from flexrlhf.errors import either, nearest, shown


def _pair(value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"expected two numbers such as [0.9, 0.95], found {shown(value)}")
    return value


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSpec(StrictModel):
    """The update rule, its learning rate over the optimizer steps, and the clipping of the global gradient norm."""

    name: Literal["adamw", "adam", "sgd"] = Field("adamw", description="AdamW: Loshchilov & Hutter 2019")
    learning_rate: float = Field(1e-6, ge=0, description="its highest value")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after warm-up; to 0 at the end")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps in which the learning rate rises; 0 at the first")
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(_pair)] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1, description="of sgd")
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float | None = Field(1.0, gt=0, description="None: the gradient is not clipped")

    @model_validator(mode="after")
    def _momentum_is_of_sgd(self) -> Self:
        if self.momentum and self.name != "sgd":
            raise ValueError(f"momentum {self.momentum:g} goes with sgd; {self.name} has betas")
        return self


class LoraSpec(StrictModel):
    """Low-rank adapters beside frozen weights (Hu et al. 2022), by peft: h = Wx + alpha / rank * BAx."""

    rank: int = Field(8, ge=1)
    alpha: int = Field(16, ge=1)
    targets: tuple[str, ...] | None = Field(None, description="last names of modules; None: every linear layer")


Dtype = Literal["float32", "bfloat16", "float16"]
Zero = Literal[0, 1, 2, 3]
CallKind = Literal["generate", "forward", "train"]
"""What a model computes in one call."""
Head = Literal["causal", "scalar", "both"]
"""What a model ends in: the vocabulary, one number for every token, or both of them on one trunk."""


class ShadowSpec(StrictModel):
    """Where a shadow computes in another way than the trained copy; what is left out is that copy's."""

    engine: str | None = None
    zero: Zero | None = None
    tp: int | None = Field(None, ge=1)
    dtype: Dtype | None = None
    micro_batch_tokens: int | None = Field(None, ge=1)
    generate_tokens: int | None = Field(None, ge=1)


class ModelSpec(StrictModel):
    """The weights of one role, how they are computed with and how they are trained."""

    path: str | None = Field(None, description="Hugging Face model directory; default: see ModelsSpec")
    init: dict[str, Any] | None = Field(None, description="a Hugging Face config, to start from random weights")
    share: Literal["actor"] | None = Field(None, description="ref: the actor's base weights, without its adapters")
    engine: str = "torch"
    zero: Zero = Field(
        0, description="ZeRO stage (Rajbhandari et al. 2020): 1 optimizer, 2 gradients, 3 weights sharded"
    )
    tp: int = Field(1, ge=1, description="tensor-parallel ranks of a replica")
    cp: int = Field(1, ge=1, description="context-parallel ranks of a replica")
    dtype: Dtype = Field("float32", description="of weights and passes; a trained model keeps float32 master weights")
    lora: LoraSpec | None = None
    optimizer: OptimizerSpec = OptimizerSpec()
    micro_batch_tokens: int = Field(8192, ge=1, description="padded tokens of one forward or backward pass")
    generate_tokens: int = Field(65536, ge=1, description="padded tokens of the rows decoded together")
    logits_mb: float = Field(64.0, gt=0, description="float32 logits that exist at a time while log-probs are computed")
    activation_checkpointing: bool = Field(False, description="recompute a layer's activations in the backward pass")
    offload_optimizer: bool = Field(False, description="keep the optimizer's state in host memory")
    offload_parameters: bool = Field(False, description="keep ZeRO-3 shards in host memory between passes")
    config: dict[str, Any] = Field(default_factory=dict, description="further settings of DeepSpeed, as it names them")
    shadow: ShadowSpec | None = Field(None, description="where a placement's shadow computes in another way")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.path is not None and self.init is not None:
            raise ValueError("path and init exclude each other: remove one")
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
        """The settings of this role's shadow: without what is for training, or for another engine's library."""
        own = {key: value for key, value in (self.shadow or ()) if value is not None}
        dropped: dict[str, Any] = {"shadow": None, "offload_optimizer": False}
        is_other = own.get("engine", self.engine) != self.engine
        if is_other:
            dropped["config"] = {}
        if is_other or own.get("zero", self.zero) != 3:
            dropped["offload_parameters"] = False
        return self.model_copy(update={**own, **dropped})


FURTHER_MODELS = ("reward_", "cost_")
"""How the names of reward and cost models begin that a user adds."""


class ModelsSpec(StrictModel):
    """Models by role. ref defaults to the actor's path, critic to the reward's, cost_critic to the cost's.

    Further reward and cost models have names of their own (``reward_...``, ``cost_...``), which a source of ``reward``
    or ``cost`` says.
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, ModelSpec] = Field(init=False)

    actor: ModelSpec | None = None
    critic: ModelSpec | None = None
    cost_critic: ModelSpec | None = None
    ref: ModelSpec | None = None
    reward: ModelSpec | None = None
    cost: ModelSpec | None = None

    @classmethod
    def _is_known(cls, key: str) -> bool:
        return super()._is_known(key) or key.startswith(FURTHER_MODELS)

    def of(self, role: str) -> ModelSpec | None:
        """The model of ``role``; None where the YAML does not give it."""
        return dict(self).get(role)


class NodeSpec(StrictModel):
    """``count`` equal machines."""

    count: int = Field(1, ge=1)
    devices: int = Field(ge=1, description="devices in each machine")
    device_class: str = Field("any", alias="class")
    memory_gb: float | None = Field(None, gt=0, description="of one device; default: that of its class")
    link_gb_s: float | None = Field(None, gt=0, description="between two devices of a node, GB/s in one direction")
    network_gb_s: float | None = Field(None, gt=0, description="of one node to the others, GB/s in one direction")


class ClusterSpec(StrictModel):
    """The devices, as one number or as nodes with a device class each."""

    devices: int | None = Field(None, ge=1)
    nodes: tuple[NodeSpec, ...] = ()
    memory_gb: float | None = Field(None, gt=0, description="of one device, where no node says otherwise")
    device: Literal["auto", "cpu", "cuda"] = "auto"

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        total = sum(node.count * node.devices for node in self.nodes)
        if self.nodes and self.devices not in (None, total):
            raise ValueError(f"devices {self.devices} but the nodes hold {total}: remove devices or correct the nodes")
        return self


class PlacementEntry(StrictModel):
    """Where one placed model sits, in the mapping form."""

    ratio: Exact | None = None
    ranks: tuple[int, ...] | None = None
    on: str | None = Field(None, description="device class; the ratio then counts devices of this class only")
    row_shares: tuple[Exact, ...] | None = Field(None, description="relative share of the rows per replica")

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.ratio is None) == (self.ranks is None):
            raise ValueError("give either ratio or ranks")
        if self.ranks is not None and self.on is not None:
            raise ValueError("on goes with a ratio: remove it beside ranks")
        if self.ranks is not None and (
            not self.ranks or len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0
        ):
            raise ValueError(f"ranks must be distinct and not negative, found {list(self.ranks)}")
        if self.row_shares is not None and (min(self.row_shares, default=-1) < 0 or sum(self.row_shares) == 0):
            raise ValueError("row_shares must not be negative and must not all be 0")
        return self


def _entry(value: Any) -> Any:
    return value if isinstance(value, dict | PlacementEntry) else {"ratio": value}


PLACEMENT_SETTINGS = ("train_share", "span_classes")


class PlacementMap(BaseModel):
    """The mapping form: placed model → ratio, or → ratio, ranks, on, row_shares. placement/ checks the names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: dict[str, Annotated[PlacementEntry, BeforeValidator(_entry)]]
    train_share: Exact | None = None
    span_classes: bool = False

    @model_validator(mode="before")
    @classmethod
    def _split_settings(cls, value: Any) -> Any:
        """A user names placed models beside the settings; our own code gives their entries, as ``models``."""
        if not isinstance(value, dict) or _holds_entries(value.get("models")):
            return value
        settings = {key: value[key] for key in PLACEMENT_SETTINGS if key in value}
        models = {key: entry for key, entry in value.items() if key not in settings}
        for key, entry in models.items():
            if isinstance(entry, bool):
                raise ValueError(
                    f"{key}: expected a ratio, found {shown(entry)}{nearest(str(key), PLACEMENT_SETTINGS)}"
                )
        return {"models": models, **settings}


def _holds_entries(models: Any) -> bool:
    return isinstance(models, dict) and bool(models) and all(isinstance(e, PlacementEntry) for e in models.values())


class ScheduleSpec(StrictModel):
    """When instructions run. Changes times, never numbers (lag changes the policy version, by its stated rule)."""

    strategy: Literal["co-located", "interleaving", "disaggregated"] | None = Field(
        None, description="follows from the placement; may only confirm it"
    )
    num_chunks: int = Field(1, ge=1)
    lag: Literal[0, 1] = 0


class SyncSpec(StrictModel):
    """Weights of a trained model → its shadow."""

    every: int = Field(1, ge=1, description="steps between two syncs")
    checksum: bool = True
    snapshot: bool = Field(False, description="copy the weights first, so that training goes on while they travel")
    bucket_mb: float = Field(16.0, ge=0.001, description="of weights that travel together")


class DataSpec(StrictModel):
    """Prompts, answers or preference pairs, and the widths that they are padded to."""

    path: str
    form: Literal["auto", "prompt", "pairs", "instruction", "question", "text"] = "auto"
    tokenizer: str | None = Field(None, description="directory; default: that of the first model")
    max_prompt_tokens: int = Field(128, ge=1)
    max_response_tokens: int = Field(128, ge=1)
    long_prompts: Literal["error", "drop"] = "error"


class EvalSpec(StrictModel):
    """Held-out rows, looked at every ``every`` steps and after the last.

    pass@k: the share of prompts of which at least one of k answers is right (Chen et al. 2021).
    """

    path: str
    every: int | None = Field(None, ge=1, description="None: after the last step only")
    temperature: float | None = Field(None, ge=0, description="of its answers; None: the algorithm's; 0: greedy")
    samples_per_prompt: int | None = Field(None, ge=1, description="None: the algorithm's; 1 where all are greedy")
    pass_score: float = Field(1.0, description="an answer with at least this score is right")
    pass_at: int | None = Field(None, ge=1, description="k of pass@k; None: as many as a prompt has samples")

    def num_samples(self, of_training: int) -> int:
        """Answers to a held-out prompt; greedy ones are all the same."""
        return self.samples_per_prompt or (1 if self.temperature == 0 else of_training)


class ParitySpec(StrictModel):
    """The gate between the rollout engine and the trainer: both tell the log-probs of the same sampled tokens.

    The run stops where the largest or the mean difference (nats) exceeds its limit; None: 1e-3 and 1e-4 in float32,
    1.0 and 0.05 in 16 bits.
    """

    every: int = Field(
        10, ge=1, description="steps between two comparisons; the first is at step 0, with schedule.lag 1 the only one"
    )
    max_difference: float | None = Field(None, gt=0)
    mean_difference: float | None = Field(None, gt=0)


class RolloutSpec(StrictModel):
    """What generates: transformers on the actor's own weights, or a vLLM engine with a copy of them."""

    engine: Literal["transformers", "vllm"] = "transformers"
    tp: int = Field(1, ge=1, description="tensor-parallel ranks of an engine")
    pp: int = Field(1, ge=1, description="pipeline stages of an engine")
    dtype: Dtype | None = Field(None, description="None: the actor's")
    process: Literal["inline", "child"] = Field(
        "inline", description="child: an own process, which decodes while its rank does other instructions"
    )
    noise: Literal["exact", "engine"] = Field(
        "exact",
        description="exact: the tokens of every other engine; engine: vLLM's own generators, one a request",
    )
    kv_tokens: int | None = Field(
        None, ge=1, description="tokens whose keys and values fit at a time; None: models.actor.generate_tokens"
    )
    prefix_caching: bool = True
    cuda_graphs: bool = True
    sleep: bool = Field(True, description="co-located: its memory is free while other models work")
    config: dict[str, Any] = Field(default_factory=dict, description="further arguments of vLLM, as it names them")
    parity: ParitySpec | None = Field(ParitySpec(), description="None: the engine is not compared with the trainer")

    @model_validator(mode="after")
    def _settings_of_vllm(self) -> Self:
        plain = type(self).model_construct()
        set_ones = [name for name in type(self).model_fields if getattr(self, name) != getattr(plain, name)]
        if self.engine == "transformers" and set_ones:
            raise ValueError(
                f"{set_ones[0]} goes with engine vllm; transformers generates with the actor as models.actor says: "
                f"remove {', '.join(set_ones)}"
            )
        return self


class SaveSpec(StrictModel):
    """When trained models are written: to ``runs/<name>/<role>``, the best ones to ``runs/<name>/<role>-best``."""

    every: int | None = Field(None, ge=1, description="None: after the last step only")
    best: str | None = Field(
        None, description="a metric of the evaluations: models that are better than all before are kept; None: none"
    )


class DebugSpec(StrictModel):
    """For tests and for finding out where two runs part."""

    record_columns: bool = Field(False, description="write every column of every step to runs/<name>/columns")
    run_delay_seconds: float = Field(0.0, ge=0, description="sleep this long in every Run, to make overlap visible")


class Spec(StrictModel):
    """One run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="results go to runs/<name>")
    algorithm: Algorithm
    models: ModelsSpec
    data: DataSpec
    reward: Sources | None = Field(None, description="where scores come from; None: models.reward alone")
    cost: Sources | None = Field(None, description="where costs come from; None: models.cost alone")
    steps: int = Field(100, ge=1)
    seed: int = Field(0, ge=0, lt=2**63)
    cluster: ClusterSpec = ClusterSpec()
    placement: Literal["auto"] | tuple[Exact, ...] | PlacementMap | None = Field(
        None, description="None: every model on all devices; auto: what `flexrlhf advise` says"
    )
    schedule: ScheduleSpec = ScheduleSpec()
    sync: SyncSpec = SyncSpec()
    rollout: RolloutSpec = RolloutSpec()
    eval: EvalSpec | None = None
    save: SaveSpec = SaveSpec()
    debug: DebugSpec = DebugSpec()
    runs: str = "runs"
    timeout_seconds: float = Field(1800.0, ge=1, description="no rank waits longer than this for another")
    timeline_steps: int = Field(1000, ge=1, description="timeline.json keeps the last so many steps")

    @model_validator(mode="before")
    @classmethod
    def _placement_form(cls, value: Any) -> Any:
        placement = value.get("placement") if isinstance(value, dict) else None
        if placement != "auto" and not isinstance(placement, list | tuple | dict | PlacementMap | None):
            raise ValueError(
                f"placement: expected a vector such as [1,1,0.5,0.5], a mapping or auto, found {shown(placement)}"
            )
        return value

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
    def _answers_can_end(self) -> Self:
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
                f"{longest}, so every answer would be punished: use at most {longest}"
            )
        return self

    @property
    def directory(self) -> Path:
        return Path(self.runs) / self.name
