"""Settings that all algorithms have, and those that generate: how responses are sampled and corrected for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from flexrlhf.config.presets.filling import PEERS, Like, filled_algorithm
from flexrlhf.config.presets.table import Peer, PeerTrainer
from flexrlhf.config.strict_model import StrictModel
from flexrlhf.config.user_paths import UserPath
from flexrlhf.operators.graph import Graph

if TYPE_CHECKING:
    from flexrlhf.config.algorithms.policy_sections import KlSpec, LagrangeSpec, OverlongSpec, PtxSpec

LossAggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


class AlgorithmSpec(StrictModel):
    """Settings of every algorithm: the size of a step and of its mini-batches.

    It declares all that the package reads of an algorithm, whatever it is. Algorithms extend ``PolicySpec``, which has
    settings for it, or ``SupervisedSpec``, which has constants.
    """

    SAMPLES: ClassVar[bool]
    """Whether it trains on responses that it samples, not on those of the data set."""
    if TYPE_CHECKING:
        # no attributes, so that a class without them fails; and no fields, since not all have them in the YAML

        @property
        def name(self) -> str:
            """Name in the YAML."""

        @property
        def temperature(self) -> float:
            """Temperature of the sampling distribution, and of the log-probs."""

        @property
        def top_p(self) -> float:
            """Total probability of the most likely tokens that are sampled from."""

        @property
        def top_k(self) -> int:
            """Number of most likely tokens that are sampled from; 0: all."""

        @property
        def min_response_tokens(self) -> int:
            """Number of tokens before which there is no end token."""

        @property
        def stop(self) -> tuple[str, ...]:
            """Strings that end a response."""

        @property
        def importance(self) -> ImportanceSpec | None:
            """Correction for responses of another policy."""

        @property
        def kl(self) -> KlSpec | None:
            """Penalty that keeps the policy near a reference model."""

        @property
        def overlong(self) -> OverlongSpec | None:
            """Punishment of long responses."""

        @property
        def ptx(self) -> PtxSpec | None:
            """Pretraining loss in addition to the policy's."""

        @property
        def freeze_actor_steps(self) -> int:
            """Number of steps at the start in which the actor is not trained."""

    like: Like | None = Field(
        None, description="engine or paper whose trainer's defaults stand where nothing is written"
    )
    graph: UserPath | None = Field(
        None,
        description="path/to/file.py:function, module:function or an entry point of flexrlhf.graphs: takes these "
        "settings, returns the graph of operators that replaces the algorithm's",
    )
    loop: UserPath | None = Field(
        None,
        description="path/to/file.py:function or module:function: takes the trainer of a rank, calls its "
        "generate_experience and train_rlhf for each of its batches; null: that and nothing else",
    )
    protocols: dict[str, UserPath] = Field(
        default_factory=dict,
        description="operator: path/to/file.py:function or module:function, which takes the ranks of each replica and "
        "a range of prompts and returns the prompts of each replica; or a protocol of HybridFlow, such as dp_proto",
    )
    settings: dict[str, Any] = Field(
        default_factory=dict, description="of a graph or loop of one's own, for its functions to read"
    )
    prompts_per_step: int = Field(32, ge=1, description="prompts of one training step, over all replicas")
    samples_per_prompt: int = Field(1, ge=1, description="responses to each prompt")
    num_mini_batches: int = Field(1, ge=1, description="optimizer steps per epoch of one step")
    epochs: int = Field(1, ge=1, description="passes over the rows of one step")

    @property
    def num_prompts(self) -> int:
        """Number of prompts whose rows one step trains on."""
        return self.prompts_per_step

    @property
    def attempts(self) -> int:
        """Most times that a step takes prompts from the data, by dynamic sampling."""
        return 1

    @property
    def is_cut(self) -> bool:
        """Whether responses are sampled from a part of the policy's distribution, so that their log-probs differ."""
        return self.top_p < 1 or self.top_k > 0 or self.min_response_tokens > 0

    @property
    def reports_kl(self) -> bool:
        """Whether the training pass can report the KL to the reference: of the same responses, in every step."""
        return False

    @property
    def lagrange_multiplier(self) -> LagrangeSpec | None:
        """Multiplier that follows from the costs of the step before."""
        return None

    @property
    def group_columns(self) -> tuple[str, ...]:
        """Columns by which advantages compare a response with its group's responses of earlier steps, where each is
        trained on when it ends."""
        return ()

    @property
    def why_whole_groups(self) -> str:
        """The reason why all responses to a prompt must be trained on together; empty if they need not."""
        return ""

    def why_no(self, role: str) -> str:
        """Return the setting that leaves ``role`` out, in words; empty for none."""
        return ""

    def written(self, short: bool) -> dict[str, Any]:
        """Return the section of a YAML that gives these settings. ``short``: without defaults."""
        # a default that differs from the preset must be written
        raw = self.model_dump(mode="json", by_alias=True, exclude_defaults=short and self.like is None)
        return {"name": self.name, **raw}

    def step_graph(self) -> Graph:
        """Return the operators of a step, each role with a model of its own: the package's, whatever ``graph`` is."""
        raise NotImplementedError

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, value: Any) -> Any:
        return cls.with_preset(value) if isinstance(value, dict) else value

    @classmethod
    def with_preset(cls, written: dict[str, Any]) -> dict[str, Any]:
        """Return the ``written`` settings over the preset ``like``, as yet unvalidated."""
        like = written.get("like")
        if not isinstance(like, str) or like not in PEERS:
            return written
        return filled_algorithm(written, {name: field.default for name, field in cls.model_fields.items()})

    @property
    def peer(self) -> Peer | None:
        """The engine or paper of ``like``."""
        return None if self.like is None else PEERS[self.like]

    def peer_values(self, trainer: PeerTrainer, steps: int) -> dict[str, Any]:
        """Return the settings of a peer's trainer by their dotted keys; numbers that follow from others, for a run of
        ``steps`` with these settings."""
        sizes = self.prompts_per_step, self.samples_per_prompt, steps, self.num_mini_batches * self.epochs
        return {cell.key: cell.resolved(*sizes) for cell in trainer.cells}

    @model_validator(mode="after")
    def _settings_of_a_graph(self) -> Self:
        if self.settings and self.graph is None and self.loop is None:
            raise ValueError(f"settings {', '.join(self.settings)} go with a graph or loop of one's own: give graph")
        return self

    @model_validator(mode="after")
    def _mini_batches_have_rows(self) -> Self:
        if self.num_mini_batches > self.prompts_per_step:
            raise ValueError(
                f"num_mini_batches {self.num_mini_batches} exceeds prompts_per_step {self.prompts_per_step}: "
                f"use at most {self.prompts_per_step}"
            )
        return self


def _as_list(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


_Text = Annotated[str, Field(min_length=1)]
StopStrings = Annotated[tuple[_Text, ...], BeforeValidator(_as_list, json_schema_input_type=_Text | tuple[_Text, ...])]


class RejectionSpec(StrictModel):
    """Rejection of tokens or responses that the trained policy would have sampled much more or less often.

    What has a ratio pi_old / pi_rollout outside the bounds is left out of the actor's loss (verl's ``rollout_rs``:
    token_k1, seq_sum_k1, seq_mean_k1, whose bounds are of the inverse ratio).
    """

    level: Literal["token", "sequence", "geometric"] = Field(
        "sequence",
        description="token: each by its ratio; sequence: a response by the product of its tokens'; geometric: by their "
        "geometric mean",
    )
    lower: float = Field(0.5, gt=0, lt=1, description="smallest ratio that is kept")
    upper: float = Field(2.0, gt=1, description="largest ratio that is kept")
    denominators: Literal["kept", "all"] = Field(
        "kept",
        description="tokens and responses that the loss's means divide by: kept: the ones that are left; all: also the "
        "rejected ones, as in verl's trainer and in OpenRLHF",
    )


class ImportanceSpec(StrictModel):
    """Importance sampling (Ionides 2008; Espeholt et al. 2018): corrects for responses of another policy.

    Ratio = pi_old / pi_rollout of each token, or of the whole response; pi_old: the weights that training of
    the step starts from, pi_rollout: the distribution that the response was sampled from. Weight of a loss:
    truncate: min(ratio, cap). mask: the ratio where it is in [floor, cap], else 0 (IcePop, Ling Team 2025; verl's
    ``rollout_is_threshold: lower_upper``); tokens of weight 0 stay in the loss's denominator. With PPO's ratio to
    pi_old this is decoupled PPO (Hilton et al. 2022; Fu et al. 2025).
    """

    level: Literal["token", "sequence", "none"] = Field(
        "token", description="one weight a token, or one a response; none: weights are 1, which goes with reject"
    )
    outside: Literal["truncate", "mask"] = Field("truncate", description="what becomes of a ratio beyond the bounds")
    cap: float = Field(2.0, ge=1, description="largest weight")
    floor: float | None = Field(
        None, gt=0, le=1, description="smallest weight that is not 0, with outside: mask; null: no such bound"
    )
    reject: RejectionSpec | None = Field(None, description="null: nothing is left out")
    max_staleness: int | None = Field(
        None,
        ge=0,
        description="tokens are left out of the actor's loss and its denominators if more batches than this have been "
        "trained on since the weights that sampled them; null: none",
    )

    @model_validator(mode="after")
    def _floor_of_a_mask(self) -> Self:
        if self.floor is not None and self.outside == "truncate":
            raise ValueError(f"floor {self.floor:g} goes with outside: mask; use that, or remove floor")
        if self.level == "none" and self.reject is None:
            raise ValueError("level: none goes with reject, which leaves out tokens; give reject, or use level: token")
        return self


class SampledSpec(AlgorithmSpec):
    """Settings of algorithms that generate: how responses are sampled, and the correction for another policy's."""

    temperature: float = Field(1.0, gt=0, description="sampling temperature; log-probs are taken at it, too")
    top_p: float = Field(1.0, gt=0, le=1, description="sample from the most likely tokens of this total probability")
    top_k: int = Field(0, ge=0, description="sample from this many most likely tokens; 0: from all")
    min_response_tokens: int = Field(0, ge=0, description="no end token before this many tokens")
    stop: StopStrings = Field(
        (),
        description="strings that end a response, of which they stay a part; searched in its text, which has the "
        "special tokens that rollout.special_tokens keeps",
    )
    importance: ImportanceSpec | None = Field(None, description="null: no importance weights")

    SAMPLES = True

    @model_validator(mode="after")
    def _cuts_are_corrected(self) -> Self:
        if self.is_cut and self.importance is None:
            name, plain = next(
                (name, plain)
                for name, plain in (("top_p", 1), ("top_k", 0), ("min_response_tokens", 0))
                if getattr(self, name) != plain
            )
            raise ValueError(
                f"{name} {getattr(self, name):g} samples from another distribution than the policy's; "
                f"use {plain}, or correct for it with importance: {{}}"
            )
        return self
