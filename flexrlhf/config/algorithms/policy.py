"""Algorithms that train on sampled responses with a clipped policy gradient: their common settings and operators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from flexrlhf.config.algorithms.base import LossAggregation, SampledSpec
from flexrlhf.config.algorithms.policy_sections import CovarianceSpec, KlSpec, OverlongSpec, PtxSpec, Truncation
from flexrlhf.operators.columns import TEXT, Column, Qualifier, Quantity
from flexrlhf.operators.graph import DIVERSITY, GENERATE, Graph, Operator, after
from flexrlhf.operators.named_functions import COMBINES

SCORES = Operator("scores", "forward", "reward", TEXT, ("scores",))
EVALUATION_SCORES = Operator(
    "held_out_scores", "combine", "actor", ("scores", "response_mask", "finished"), function="held_out_scores"
)


class PolicySpec(SampledSpec):
    """Settings of algorithms that train on sampled responses with a clipped policy gradient."""

    kl: KlSpec | None = Field(KlSpec(), description="null: no penalty, and no reference model is placed")
    clip_low: float = Field(0.2, gt=0, lt=1, description="the ratio is clipped to at least 1 - clip_low")
    clip_high: float = Field(0.2, gt=0, description="the ratio is clipped to at most 1 + clip_high")
    dual_clip: float | None = Field(
        None, gt=1, description="largest ratio where the advantage is negative; null: no limit"
    )
    surrogate: Literal["clip", "cispo", "clip-cov", "kl-cov"] = Field(
        "clip",
        description="clip: PPO's; cispo: clipped weights of log-probs; clip-cov: clip, without the loss of some tokens "
        "of high covariance; kl-cov: no clip, a penalty on the tokens of highest covariance",
    )
    ratio: Literal["token", "sequence", "sequence-token"] = Field(
        "token",
        description="sequence: one ratio of the whole response (GSPO); sequence-token: its value, with the gradient of "
        "each token's own (GSPO-token)",
    )
    covariance: CovarianceSpec = Field(CovarianceSpec(), description="of surrogate: clip-cov and kl-cov")
    entropy_coefficient: float = Field(0.0, ge=0, description="factor of the entropy bonus in the loss")
    entropy_aggregation: Literal["loss", "token-mean"] = Field(
        "loss",
        description="loss: the bonus is aggregated as the loss, as in verl; token-mean: a mean over tokens, as in TRL",
    )
    loss_aggregation: LossAggregation = Field("token-mean", description="from the losses of tokens to that of a batch")
    reward_clip: float | None = Field(
        None, gt=0, description="scores are clipped to [-reward_clip, reward_clip]; null: not clipped"
    )
    normalise_scores: Literal["none", "running", "batch"] = Field(
        "none", description="to mean 0, deviation 1: running: of the steps before; batch: of the step's responses"
    )
    invalid_scores: Literal["mask", "stop"] = Field(
        "mask", description="NaN and infinite scores: mask: the response is left out; stop: the run ends"
    )
    truncation: Truncation = Field(
        "none",
        description="responses without end token: none: scored as they are; bootstrap: the critic's value is added; "
        "mask: left out; mask-loss: out of the loss alone, as in TRL: they count in a group's baseline and deviation, "
        "and as responses; {penalty: p}: score - p",
    )
    overlong: OverlongSpec | None = Field(None, description="null: no punishment of long responses")
    freeze_actor_steps: int = Field(0, ge=0, description="steps at the start in which the actor is not trained")
    ptx: PtxSpec | None = Field(None, description="null: no pretraining loss")

    COMPARES_GROUPS: ClassVar[bool] = False
    """Whether scores are compared within a group, for ``kl.place: advantages`` and ``truncation: mask-loss``."""
    HAS_CRITIC: ClassVar[bool] = False
    """Whether a critic estimates values."""

    @property
    def counts_rejected(self) -> bool:
        """Whether the denominators of the loss count tokens that ``importance.reject`` leaves out."""
        reject = None if self.importance is None else self.importance.reject
        return reject is not None and reject.denominators == "all"

    @property
    def reports_kl(self) -> bool:
        in_loss = self.kl is not None and self.kl.place == "loss"
        return in_loss and self.importance is None and not self.freeze_actor_steps

    def why_no(self, role: str) -> str:
        if role != "ref" or self.kl is not None:
            return ""
        reason = "" if self.like is None else f" with like: {self.like}"
        return f"algorithm.kl is null{reason}, so nothing uses a reference model; give algorithm.kl, or remove it here"

    def written(self, short: bool) -> dict[str, Any]:
        raw = super().written(short)
        if self.kl is not None and "kl" in raw:
            # a part of a penalty is read over the algorithm's own, whose settings are not those of every penalty
            raw["kl"] = self.kl.model_dump(mode="json")
        return raw

    @classmethod
    def with_preset(cls, written: dict[str, Any]) -> dict[str, Any]:
        """Return the ``written`` settings over the preset; the algorithm's own penalty completes a part of one."""
        value = super().with_preset(written)
        default, penalty = cls.model_fields["kl"].default, value.get("kl")
        if isinstance(default, KlSpec) and isinstance(penalty, dict):
            return {**value, "kl": default.completing(penalty)}
        return value

    @model_validator(mode="after")
    def _penalty_has_a_place(self) -> Self:
        if self.kl is not None and self.kl.place == "advantages" and not self.COMPARES_GROUPS:
            raise ValueError(
                "kl.place advantages goes with scores that are compared within a group (grpo, rloo, gspo); use reward"
            )
        return self

    @model_validator(mode="after")
    def _bootstrap_has_values(self) -> Self:
        if self.truncation == "bootstrap" and not self.HAS_CRITIC:
            raise ValueError("truncation: bootstrap needs the values of a critic; use none, mask or a penalty")
        if self.truncation == "mask-loss" and not self.COMPARES_GROUPS:
            raise ValueError(
                "truncation: mask-loss goes with scores that are compared within a group (grpo, rloo, gspo); use mask"
            )
        return self

    @model_validator(mode="after")
    def _surrogate_of_tokens(self) -> Self:
        if self.surrogate != "clip":
            if self.ratio != "token":
                raise ValueError(f"surrogate: {self.surrogate} takes ratios of tokens; use ratio: token")
            if self.dual_clip is not None and self.surrogate != "clip-cov":
                raise ValueError(f"dual_clip {self.dual_clip:g} bounds a clipped loss; use null, or surrogate: clip")
        return self

    @model_validator(mode="after")
    def _coefficient_keeps_its_sign(self) -> Self:
        responses = self.num_prompts * self.samples_per_prompt
        if self.kl is not None and self.kl.target is not None and responses >= 5 * self.kl.horizon:
            raise ValueError(
                f"kl.horizon {self.kl.horizon} is too short for the {responses} responses of a step, which could turn "
                f"the coefficient negative: use at least {responses // 5 + 1}"
            )
        return self


def sampled_and_scored(spec: PolicySpec, forwarded: tuple[str, ...] = ("logprobs",)) -> tuple[Operator, ...]:
    """Return the operators up to the scores: generate, log-probs of actor and (with a KL penalty) reference, scores.

    ``forwarded``: columns that the actor's forward over the responses writes.
    """
    logprobs = Operator("logprobs", "forward", "actor", TEXT, forwarded)
    ref_logprobs = Operator("ref_logprobs", "forward", "ref", TEXT, ("ref_logprobs",))
    return (GENERATE, logprobs, *([ref_logprobs] if spec.kl is not None else []), SCORES)


def reference(spec: PolicySpec) -> tuple[str, ...]:
    """Return the role of the reference model; nothing without a KL penalty."""
    return () if spec.kl is None else ("ref",)


def advantages(
    spec: PolicySpec,
    function: str,
    further: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
    barrier: bool = False,
) -> Operator:
    """Return the combine from scores to advantages by ``function``. ``further``: columns that it reads in addition."""
    penalised = ("logprobs", "ref_logprobs") if spec.kl is not None else ()
    return Operator(
        "advantages",
        "combine",
        "actor",
        (*penalised, "scores", *further, "response_mask", "finished"),
        ("loss_mask", "advantages", *writes, *(["outcome"] if function in COMBINES else [])),
        function=function,
        barrier=barrier or spec.normalise_scores == "batch",
        is_controlled=True,
    )


def train_actor(
    spec: PolicySpec,
    function: str = "policy_loss",
    further: tuple[str, ...] = (),
    quantities: tuple[Quantity, ...] = ("logprobs",),
) -> Operator:
    """Return the training of the actor by the loss ``function``. ``further``: columns that it reads in addition."""
    penalised = ("ref_logprobs",) if spec.kl is not None and spec.kl.place == "loss" else ()
    return Operator(
        "train_actor",
        "train",
        "actor",
        (*TEXT, "loss_mask", "logprobs", *penalised, "advantages", *further),
        function=function,
        quantities=quantities,
        barrier=spec.epochs > 1,
        first_step=spec.freeze_actor_steps,
    )


def train_critic(spec: PolicySpec, role: str = "critic", suffix: str = "") -> Operator:
    """Return the training of a critic. ``suffix``: stands behind the names of its columns of values and returns."""
    return Operator(
        f"train_{role}",
        "train",
        role,
        (*TEXT, "loss_mask", f"values{suffix}", f"returns{suffix}"),
        function="value_loss",
        quantities=("values",),
        barrier=spec.epochs > 1,
        suffix=suffix,
    )


def _with_selection(spec: PolicySpec, operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """Return ``operators`` with the selection of tokens by their covariance between advantages and training."""
    if spec.surrogate not in ("clip-cov", "kl-cov"):
        return operators
    read, written = ("logprobs", "advantages", "loss_mask"), ("selected_tokens",)
    selection = Operator("covariance", "combine", "actor", read, written, function="covariant_tokens")
    operators = tuple(
        replace(each, reads=(*each.reads, *written)) if each.name == "train_actor" else each for each in operators
    )
    return after(operators, "advantages", selection)


def _with_outcome(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """Return ``operators``; the training of the actor, which accounts for rows, reads why some are left out."""
    if not any("outcome" in each.writes for each in operators):
        return operators
    return tuple(
        replace(each, reads=(*each.reads, "outcome")) if each.name == "train_actor" else each for each in operators
    )


def policy_graph(spec: PolicySpec, operators: tuple[Operator, ...], roles: tuple[str, ...]) -> Graph:
    """Return a graph that generates responses to the prompts of the data set, with its evaluation."""
    inputs: tuple[str, ...] = ("prompts", "prompt_mask")
    operators = _with_outcome(_with_selection(spec, operators))
    if spec.ptx is not None:
        texts = Column.qualified((*TEXT, "loss_mask"), Qualifier.PTX)
        inputs += texts
        operators = tuple(
            replace(each, reads=(*each.reads, *texts), extra_loss=Qualifier.PTX) if each.name == "train_actor" else each
            for each in operators
        )
    return Graph(
        operators=operators,
        roles=roles,
        data="prompts",
        inputs=inputs,
        evaluation=(GENERATE, DIVERSITY, SCORES, EVALUATION_SCORES),
        can_shadow=True,
    )
