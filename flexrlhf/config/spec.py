"""Schema of the YAML: one class for each section, in this file and those next to it, with every default on its field.

All classes are frozen and refuse unknown keys with the nearest valid one. ``spec_file`` reads and writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, StrictBool, ValidationError, model_validator

from flexrlhf.config.algorithms import Algorithm, with_preset
from flexrlhf.config.axes import ParallelDims
from flexrlhf.config.data_settings import DataSpec, EvalSpec, check_positive
from flexrlhf.config.engines import EngineFacts
from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.config.model_settings import Dtype, LoraSpec, ModelSpec, ModelsSpec, ShadowSpec
from flexrlhf.config.number_settings import SettingDifference, differing_settings
from flexrlhf.config.output_settings import CheckpointSpec, DebugSpec, GuardsSpec, PluginLogger, SamplesSpec, SaveSpec
from flexrlhf.config.placement_settings import ClusterSpec, OperatorPlacement, PlacementMap
from flexrlhf.config.presets.filling import filled_models
from flexrlhf.config.ratio_vector import Exact, read_vector, vector_schema
from flexrlhf.config.reward_sources import Sources
from flexrlhf.config.rules import Rule, but
from flexrlhf.config.secrets import check_settings
from flexrlhf.config.spec_problems import first_problem, written_in
from flexrlhf.config.strict_model import StrictModel
from flexrlhf.config.user_paths import UserPath
from flexrlhf.config.written_settings import written_settings
from flexrlhf.config.yaml_io import write_yaml
from flexrlhf.errors import UserError, either, shown
from flexrlhf.operators.columns import LONGER, Lengths

LEAST_BLOCKS = 8
"""Blocks of a small mini-batch: as many as devices of a usual node."""
BLOCK_TOKENS = 16384
"""Padded tokens of a block where a mini-batch has many: enough for passes that are not small."""
_MAX_LAG = 16


class ScheduleSpec(StrictModel):
    """Order of the instructions. It changes times, never numbers, except for ``lag``: which weights generate.

    ``num_blocks`` changes results by their rounding alone.
    """

    strategy: Literal["co-located", "interleaving", "disaggregated"] | None = Field(
        None, description="follows from the placement; may only confirm it"
    )
    num_chunks: int = Field(1, ge=1, description="parts of a step's rows that pass through the operators separately")
    num_blocks: int | None = Field(
        None,
        ge=1,
        description="parts of a mini-batch, each composed into passes by itself; any number of replicas that divides "
        "it computes the same bits; null: the largest divisor of the number of devices up to 8, or up to as many as "
        "have 16384 padded tokens",
    )
    lag: int = Field(
        0,
        ge=0,
        le=_MAX_LAG,
        description="batches that training is behind generation, by shadows or a rollout engine on ranks of its own: "
        "batch b is generated with the weights after sync.every * floor(max(0, b - lag) / sync.every) batches",
    )


class SyncSpec(StrictModel):
    """Transfer of a trained model's weights to its shadow or rollout engine."""

    SMALL_BUCKET_MB: ClassVar[float] = 48.0
    """Size on CPUs and on devices of unknown memory."""

    every: int = Field(1, ge=1, description="steps between two syncs")
    checksum: bool = Field(True, description="compare checksums of the weights on both sides")
    dtype: Literal["bfloat16", "float16"] | None = Field(
        None,
        description="type in which weights are sent to copies of a larger one, which then have rounded weights; null: "
        "that of the copy",
    )
    overlap: Literal["auto"] | StrictBool = Field(
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

    NUM_BUCKETS: ClassVar = 3
    """Buckets that exist at a time: two in flight while a third is packed."""

    @property
    def bucket_bytes(self) -> int:
        """Most bytes of buffers; to be saved, a larger tensor is gathered by itself."""
        return int((self.bucket_mb or self.SMALL_BUCKET_MB) * 1e6)


class ParitySpec(StrictModel):
    """Comparison of the rollout engine with the trainer: log-probs of the same sampled tokens by both.

    The run stops where a difference exceeds its limit. In float32 the largest may be 1e-3 nats and the mean 1e-4; in 16
    bits, where a token of low probability differs by more now and then, one of a thousand may exceed 1.0, and the mean
    be 0.05. A limit that is given takes the place of its default.
    """

    every: int = Field(
        10, ge=1, description="steps between two comparisons; the first is at step 0, with a schedule.lag the only one"
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

    RULES: ClassVar = (
        *(Rule(name, {"segment_tokens": but(None)}) for name in ("max_segments", "groups", "caches", "late_replies")),
        Rule("late_replies", {"order": ("free",)}),
        Rule("max_restarts", {"process": ("child",)}),
    )
    OFFLOADS_GRAPHS: ClassVar = "sleep_mode_offload_cudagraph"
    """Argument of vLLM by which its CUDA graphs leave the device, too, while it sleeps. By itself it keeps them there.
    """
    AXES: ClassVar[tuple[str, ...]] = ("tp", "pp")
    """Axes of parallelism that an engine may have."""
    OF_ALL: ClassVar[tuple[str, ...]] = (
        *("engine", "logprobs", "segment_tokens", "max_segments", "groups", "caches", "order", "late_replies"),
        "special_tokens",
    )
    """Settings that every engine has."""

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
        "inline",
        description="child: a process of its own, which decodes while its rank runs other instructions, and is "
        "replaced when it fails",
    )
    max_restarts: int = Field(
        2,
        ge=0,
        description="times in one step that a child process which ends or does not respond is replaced, with the "
        "weights of the last sync and the same tokens; 0: its end is the run's",
    )
    noise: Literal["exact", "engine"] = Field(
        "exact",
        description="sampling noise: exact: samples the same tokens as every other engine; engine: vLLM's generators",
    )
    kv_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens whose keys and values fit in the cache; null: models.actor.generate_tokens (torch too), or "
        "where that is not written either, of vllm on devices of known memory as many as other models and calls leave "
        "room for, at most all rows of a step",
    )
    adapters: Literal["merged", "separate"] = Field(
        "merged",
        description="of an actor with lora: merged: a sync sends the weights that they change, with them added; "
        "separate: it sends the adapters alone, which vLLM adds in every pass, for weights that take long to send",
    )
    segment_tokens: int | None = Field(
        None,
        ge=1,
        description="most tokens by which a step continues a response; one that has not ended goes on in the next "
        "step, with the weights of that step, and is trained on in the step in which it ends (any engine); null: "
        "responses are generated whole",
    )
    max_segments: int | None = Field(
        None,
        ge=1,
        description="steps after which a response ends as truncated; null: as many as data.max_response_tokens needs, "
        "beyond which more have places that stay empty",
    )
    groups: Literal["wait", "as-ended"] = Field(
        "wait",
        description="of segments: wait: the responses to a prompt are trained on when the last of them has ended; "
        "as-ended: each when it ends, its advantage relative to the responses of its group that have ended by then, so "
        "that a first one alone has none",
    )
    caches: Literal["renewed", "kept"] = Field(
        "renewed",
        description="of rows that segments carry to the next step: renewed: they are read again, with its weights; "
        "kept: they go on with the keys and values that they have, of the weights that read each token, but in the "
        "first batch behind a checkpoint of checkpoint.every, which reads all rows again (transformers and torch)",
    )
    order: Literal["planned", "free"] = Field(
        "planned",
        description="of turns with an environment (any engine): planned: the replies to a turn are awaited together, "
        "so that a run repeats to the last bit; free: each row goes on when its reply is there, with the same tokens "
        "but for ties, since rounding depends on which rows are decoded together",
    )
    late_replies: Literal["await", "carry"] = Field(
        "await",
        description="of segments with order: free: await: a step's generation ends when all replies are there; carry: "
        "when nothing is left to decode but rows whose reply is late, which the next step goes on with; the run "
        "records them, so that it repeats when it is resumed",
    )
    special_tokens: Literal["keep", "skip"] = Field(
        "keep",
        description="in the text of responses that scores, stop strings and samples.jsonl have (any engine): keep: all "
        "special tokens, such as <think>, but padding, beginning and end of a text; skip: none, as in TRL and verl",
    )
    cuda_graphs: bool = Field(True, description="decode with captured CUDA graphs")
    sleep: bool = Field(True, description="co-located: free the engine's memory while other models run (torch too)")
    config: dict[str, Any] = Field(default_factory=dict, description="further arguments of vLLM, by their names")
    parity: ParitySpec | None = Field(
        ParitySpec(),
        description="null: the engine is not compared with the trainer (torch too; transformers with sync.dtype)",
    )

    @property
    def dims(self) -> ParallelDims:
        """Degree of each axis."""
        return ParallelDims.of_settings(self)

    def with_dims(self, dims: ParallelDims) -> Self:
        """Return the settings with other degrees."""
        return self.model_copy(update={name: getattr(dims, name) for name in self.AXES})

    @model_validator(mode="after")
    def _settings_of_the_engine(self) -> Self:
        if surplus := self.surplus(self.engine):
            engines = [facts.name for facts in EngineFacts.all_engines() if surplus[0] in facts.rollout_settings]
            raise ValueError(
                f"{surplus[0]} goes with engine {' or '.join(engines)}; {self.engine} generates with the settings of "
                f"models.actor: remove {', '.join(surplus)}"
            )
        return self

    @property
    def has_own_parity(self) -> bool:
        """Whether the comparison with the trainer is not the default one."""
        return self.parity != ParitySpec()

    @property
    def carries_late(self) -> bool:
        """Whether rows whose reply is late go on in the next step."""
        return self.late_replies == "carry"

    @property
    def has_copy(self) -> bool:
        """Whether the engine has a copy of the actor's weights; transformers generates with the weights themselves."""
        return self.engine != "transformers"

    @property
    def facts(self) -> EngineFacts:
        """Facts of its engine."""
        return EngineFacts.of(self.engine)

    @property
    def is_hybrid(self) -> bool:
        """Whether the engine generates on the ranks that train the actor alone."""
        return self.facts.on_trained_ranks

    @property
    def as_written(self) -> Self:
        """Settings of the YAML: engine auto where planning has chosen one."""
        return self if "engine" in self.model_fields_set else self.model_copy(update={"engine": "auto"})

    def surplus(self, engine: str) -> list[str]:
        """Return the settings that are not their defaults and that ``engine`` does not have."""
        plain, fields = type(self).model_construct(), type(self).model_fields
        has = {"auto": tuple(fields), "transformers": ("parity",)}
        allowed = (*self.OF_ALL, *has.get(engine, EngineFacts.of(engine).rollout_settings))
        return [name for name in fields if name not in allowed and getattr(self, name) != getattr(plain, name)]

    def own_adapters(self, model: ModelSpec) -> LoraSpec | None:
        """Return the adapters that the engine stores next to the weights of ``model``; None: none, or it merges
        them."""
        return model.lora if self.adapters == "separate" else None

    @property
    def offloads_graphs(self) -> bool:
        """Whether CUDA graphs of vLLM are in host memory while it sleeps, unless ``config`` has it otherwise."""
        is_asleep = self.sleep and self.process == "inline"
        return is_asleep and self.cuda_graphs and bool(self.config.get(self.OFFLOADS_GRAPHS, True))


class Spec(StrictModel):
    """One run."""

    MAX_LAG: ClassVar[int] = _MAX_LAG
    """Largest lag: systems that report one keep to 8 or fewer, and every batch in flight takes memory."""
    MAX_DEVICES: ClassVar[int] = 16384
    """Most devices of a plan: planning takes half a millisecond for each."""
    MAX_PLANNED: ClassVar[int] = 4096
    """Most devices times chunks of a plan with several chunks: planning takes a millisecond for each."""
    MAX_CHUNKS: ClassVar[int] = 128
    """Most chunks: planning compares each with every other."""
    MAX_ROWS: ClassVar[int] = 1_000_000
    """Most rows of a step: a plan lists which row goes where."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128, description="results go to runs/<name>")
    algorithm: Algorithm
    models: ModelsSpec
    data: DataSpec
    reward: Sources | None = Field(None, description="where scores come from; null: models.reward alone")
    cost: Sources | None = Field(None, description="where costs come from; null: models.cost alone")
    environment: EnvironmentSpec | None = Field(None, description="null: a response is one turn, without replies")
    steps: int = Field(100, ge=1, le=10**9, description="training steps, each on one batch of prompts")
    epochs: Annotated[Exact, AfterValidator(check_positive)] | None = Field(
        None,
        description="instead of steps: passes over the rows of the data, from which planning computes steps; the last "
        "step is filled up from the next pass",
    )
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
    loggers: tuple[PluginLogger, ...] = Field((), description="libraries that receive metrics, samples and timeline")
    debug: DebugSpec = DebugSpec()
    runs: UserPath = Field("runs", description="directory of all runs' results")
    timeout_seconds: float = Field(1800.0, ge=1, description="no rank waits longer than this for another")
    _hub_names: Mapping[str, str] = PrivateAttr(default_factory=dict)

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

    @model_validator(mode="before")
    @classmethod
    def _secrets_are_variables(cls, value: Any) -> Any:
        check_settings(value)
        return value

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> Self:
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError(
                f"steps {self.steps} and epochs {float(self.epochs):g} exclude each other: remove one, such as by "
                f"--set epochs=null"
            )
        return self

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
        if devices > self.MAX_DEVICES:
            raise ValueError(f"cluster: {devices} devices are more than a plan takes: use at most {self.MAX_DEVICES}")
        most = max(1, min(self.MAX_CHUNKS, self.MAX_PLANNED // devices))
        if chunks > most:
            raise ValueError(
                f"schedule.num_chunks {chunks} on {devices} devices are more than a plan takes: use at most {most}"
            )
        algorithm, segments = self.algorithm, self.num_segments
        rows = algorithm.num_prompts * algorithm.samples_per_prompt * self.num_sequences
        if rows * segments > self.MAX_ROWS:
            several = f" in {segments} segments each" if segments > 1 else ""
            raise ValueError(
                f"algorithm: {algorithm.prompts_per_step} prompts_per_step are {rows} rows a step{several}, more than "
                f"a plan takes: {self._fewer_rows(rows * segments)}"
            )
        return self

    def _fewer_rows(self, rows: int) -> str:
        """Return the nearest value that can be planned of the setting that multiplies ``rows`` the most."""
        algorithm, rollout = self.algorithm, self.rollout
        of_segments = "max_segments" if rollout.max_segments is not None else "segment_tokens"
        factors = {
            "algorithm.prompts_per_step": algorithm.prompts_per_step,
            "algorithm.samples_per_prompt": algorithm.samples_per_prompt,
            "algorithm.dynamic_sampling.rounds": algorithm.attempts,
            f"rollout.{of_segments}": self.num_segments,
            "environment.sequences": self.num_sequences,
        }
        key, number = max(factors.items(), key=lambda item: item[1])
        most = self.MAX_ROWS * number // rows
        if most < 2:
            return f"lower {' and '.join(name for name, each in factors.items() if each > 1)}"
        if of_segments in key and rollout.max_segments is None:
            return f"use at least {-(-self.data.max_response_tokens // most)} {key}"
        return f"use at most {most} {key}"

    @model_validator(mode="after")
    def _responses_can_end(self) -> Self:
        least = self.algorithm.min_response_tokens
        if least > self.data.max_response_tokens:
            raise ValueError(
                f"algorithm.min_response_tokens {least} exceeds data.max_response_tokens "
                f"{self.data.max_response_tokens}: use at most {self.data.max_response_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _some_tokens_are_fresh(self) -> Self:
        importance, lag = self.algorithm.importance, self.schedule.lag
        limit = None if importance is None else importance.max_staleness
        if limit is not None and limit < lag:
            raise ValueError(
                f"algorithm.importance.max_staleness {limit} is below schedule.lag {lag}, so no token would be trained "
                f"on from step {lag} on: use at least {lag}, or schedule.lag {limit}"
            )
        return self

    @model_validator(mode="after")
    def _punishment_fits(self) -> Self:
        overlong, longest = self.algorithm.overlong, self.data.max_response_tokens
        if overlong is not None and (overlong.buffer_tokens or 0) > longest:
            raise ValueError(
                f"algorithm.overlong.buffer_tokens {overlong.buffer_tokens} exceeds data.max_response_tokens "
                f"{longest}, so every response would be punished: use at most {longest}"
            )
        return self

    def with_prompts(self, prompts: int) -> Self:
        """Return this spec with so many prompts a step."""
        algorithm = self.algorithm.model_copy(update={"prompts_per_step": prompts})
        return self.model_copy(update={"algorithm": algorithm})

    @classmethod
    def parse(cls, raw: dict[str, Any], origin: str = "config", applied: Sequence[tuple[str, str]] = ()) -> Self:
        """Validate a mapping. Raises UserError with one sentence for the deepest problem.

        origin:   the file, for it.
        applied:  overrides as they were written, each with its setting, for a problem of that setting.
        """
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            problem = first_problem(error, cls)
            raise UserError(f"{written_in(problem, applied) or origin}: {problem}") from None

    def dump(self, short: bool = False) -> str:
        """Return the resolved YAML: loading and planning it gives the same spec. ``short``: without settings that are
        the default."""
        return write_yaml(self.written(short))

    def written(self, short: bool = False) -> dict[str, Any]:
        """Return the mapping of ``dump``, which is also that of a JSON."""
        return written_settings(self, short)

    def differences(self, other: Spec) -> tuple[SettingDifference, ...]:
        """Return the settings that numbers depend on and that differ, in the order of the YAML.

        The specs are resolved (``Plan.spec``, or the ``config.yaml`` of a run), so that models that follow from others
        are filled in.
        """
        return differing_settings(self, other)

    def type_changes(self, later: Spec) -> Iterator[tuple[str, str, str]]:
        """Yield key and both values of each type of weights and passes that differs: results differ by their
        rounding."""
        for role, model in later.models:
            before = self.models.of(role)
            if model is not None and before is not None:
                for key, was, now in (("", before, model), (".shadow", before.of_shadow, model.of_shadow)):
                    if was.dtype != now.dtype:
                        yield f"models.{role}{key}.dtype", was.dtype, now.dtype
        if self.sync.dtype != later.sync.dtype:
            yield "sync.dtype", str(self.sync.dtype), str(later.sync.dtype)

    def with_defaults(self, *sections: str) -> Self:
        """Return this spec with the defaults of these sections."""
        return self.model_copy(update={name: type(self).model_fields[name].default for name in sections})

    def with_models(self, models: Mapping[str, ModelSpec | None]) -> Self:
        """Return this spec with other settings of ``models``, by role; they are not validated."""
        return self.model_copy(update={"models": self.models.model_copy(update=models)})

    def with_settings(self, changes: Mapping[str, Any]) -> Self:
        """Return this spec with other values of settings, which are not validated.

        changes:  key in the YAML → value; ``...``: the setting is left open, as if it were not written.
        """
        found = self
        for setting, value in changes.items():
            found = _with_setting(found, setting.split("."), value)
        return found

    def with_paths(self, change: Callable[[str, str], str], hub_names: Mapping[str, str]) -> Self:
        """Return this spec with other paths of models and of the tokenizer.

        change:     returns the new path, of a setting and its path.
        hub_names:  as of the property, once all paths are changed.
        """
        models = {
            role: model and model.model_copy(update={"path": model.path and change(f"models.{role}.path", model.path)})
            for role, model in self.models
        }
        tokenizer = self.data.tokenizer and change("data.tokenizer", self.data.tokenizer)
        data = self.data.model_copy(update={"tokenizer": tokenizer})
        changed = self.with_models(models).model_copy(update={"data": data})
        changed._hub_names = hub_names
        return changed

    @property
    def hub_names(self) -> Mapping[str, str]:
        """Name on the Hub with its commit, by the directory of the cache that planning has put in its place."""
        return self._hub_names

    @property
    def as_written(self) -> Self:
        """The spec with names on the Hub, and their commits, in the place of directories of the cache."""
        names = self._hub_names
        return self.with_paths(lambda _, path: names.get(path, path), {}) if names else self

    @property
    def directory(self) -> Path:
        """Directory of the run's results."""
        return Path(self.runs) / self.name

    @property
    def operators(self) -> Mapping[str, OperatorPlacement]:
        """Placements of operators by name; none where models are placed."""
        return (self.placement.operators if isinstance(self.placement, PlacementMap) else None) or {}

    @property
    def most_stale(self) -> int:
        """Most batches that are trained on between the weights that sample a token and the step that trains on it."""
        return self.schedule.lag + self.sync.every - 1 + self.num_segments - 1

    @property
    def recomputes_next_to_generation(self) -> bool:
        """Whether a pass of its own computes ``logprobs`` on the copy that generates, as only transformers can."""
        return self.rollout.logprobs == "recompute" and self.algorithm.importance is None

    @property
    def num_segments(self) -> int:
        """Steps over which a response may be generated; 1: responses are generated whole."""
        tokens, longest = self.rollout.segment_tokens, self.data.max_response_tokens
        if tokens is None:
            return 1
        return self.rollout.max_segments or -(-longest // tokens)

    @property
    def num_sequences(self) -> int:
        """Rows of a response: of an episode as many as its program may begin conversations."""
        return 1 if self.environment is None else self.environment.sequences

    @property
    def num_blocks(self) -> int:
        """Blocks of a mini-batch (``placement/layout.py``): a function of the batch and the number of devices alone."""
        algorithm, devices = self.algorithm, self.cluster.num_devices
        if self.schedule.num_blocks is not None:
            return self.schedule.num_blocks
        rows = algorithm.num_prompts * algorithm.samples_per_prompt // algorithm.num_mini_batches
        most = max(LEAST_BLOCKS, rows * self.lengths.total // BLOCK_TOKENS)
        return max(blocks for blocks in range(1, min(most, devices) + 1) if devices % blocks == 0)

    @property
    def lengths(self) -> Lengths:
        """Padded lengths of prompts and responses, and of texts for models with a tokenizer of their own."""
        prompt, response = self.data.max_prompt_tokens, self.data.max_response_tokens
        own = ((role, model) for role, model in self.models if model is not None and model.retokenize)
        texts = tuple((role, model.max_text_tokens or LONGER * (prompt + response)) for role, model in own)
        return Lengths(prompt, response, texts)

    @property
    def syncs_overlap(self) -> bool:
        """Whether the syncs of shadows overlap what comes next, between ranks that they do not have in common."""
        if self.sync.overlap == "auto":
            return self.schedule.lag > 0 or self.cluster.num_nodes > 1
        return self.sync.overlap

    def with_device(self, device: str) -> Spec:
        """Return the spec with ``cluster.device`` set to cpu or cuda, for ranks that must not choose by themselves."""
        return self.model_copy(update={"cluster": self.cluster.model_copy(update={"device": device})})

    @property
    def padded_row(self) -> int:
        """Tokens of the longest prompt and response, in whole blocks of an engine's own cache."""
        width = self.data.max_prompt_tokens + self.data.max_response_tokens
        block = self.rollout.facts.cache_block
        return -(-width // block) * block if block else width


def _with_setting(section: Any, path: Sequence[str], value: Any) -> Any:
    name, *rest = path
    if isinstance(section, Mapping):
        return {**section, name: _with_setting(section[name], rest, value)}
    if rest:
        inner = dict(section)[name] if name != "shadow" else dict(section)[name] or ShadowSpec()
        return section.model_copy(update={name: _with_setting(inner, rest, value)})
    if value is not ...:
        return section.model_copy(update={name: value})
    kept = section.model_fields_set - {name}
    return type(section).model_construct(kept, **{each: getattr(section, each) for each in kept})
