"""Algorithms that train on responses of the data set: SFT, reward models, and DPO, SimPO, ORPO and KTO on pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from flexrlhf.config.algorithms.base import AlgorithmSpec, LossAggregation
from flexrlhf.operators.columns import TEXT, Column, Qualifier
from flexrlhf.operators.graph import DIVERSITY, GENERATE, Graph, Operator

READ = (*TEXT, "loss_mask")
LOGPROBS = Operator("logprobs", "forward", "actor", TEXT, ("logprobs",))
REF_LOGPROBS = Operator("ref_logprobs", "forward", "ref", TEXT, ("ref_logprobs",))
ACCURACY = Operator(
    "accuracy", "combine", "actor", ("logprobs", "ref_logprobs", "loss_mask"), function="preference_accuracy"
)
PLAIN_ACCURACY = replace(ACCURACY, reads=("logprobs", "loss_mask"))
"""Of an algorithm without a reference."""


class SupervisedSpec(AlgorithmSpec):
    """Algorithms that train on responses of the data set, at the policy's own distribution."""

    SAMPLES = False
    temperature: ClassVar[float] = 1.0
    top_p: ClassVar[float] = 1.0
    top_k: ClassVar[int] = 0
    min_response_tokens: ClassVar[int] = 0
    stop: ClassVar[tuple[str, ...]] = ()
    importance: ClassVar[None] = None
    kl: ClassVar[None] = None
    overlong: ClassVar[None] = None
    ptx: ClassVar[None] = None
    freeze_actor_steps: ClassVar[int] = 0


class SftSpec(SupervisedSpec):
    """Supervised fine-tuning: the negative log-likelihood of the responses."""

    name: Literal["sft"] = "sft"
    samples_per_prompt: Literal[1] = 1
    loss_aggregation: LossAggregation = Field("token-mean", description="from the losses of tokens to that of a batch")

    def step_graph(self) -> Graph:
        train = Operator("train_actor", "train", "actor", READ, function="likelihood_loss", barrier=self.epochs > 1)
        return Graph(
            operators=(train,),
            roles=("actor",),
            data="responses",
            inputs=("prompts", "prompt_mask", *READ),
            evaluation=(
                LOGPROBS,
                Operator("perplexity", "combine", "actor", ("logprobs", "loss_mask"), function="likelihood"),
                GENERATE.next_to_data,
                DIVERSITY.next_to_data,
            ),
        )


class RewardSpec(SupervisedSpec):
    """Reward model on preference pairs (Ouyang et al. 2022, eq. 1). A pair is one prompt with two samples."""

    name: Literal["reward"] = "reward"
    samples_per_prompt: Literal[2] = 2

    def step_graph(self) -> Graph:
        inputs = (*TEXT, "response_mask")
        train = Operator("train_reward", "train", "reward", inputs, function="pair_loss", quantities=("scores",))
        scores = Operator("scores", "forward", "reward", TEXT, ("scores",))
        accuracy = Operator("accuracy", "combine", "reward", ("scores",), function="pair_accuracy")
        return Graph(
            operators=(replace(train, barrier=self.epochs > 1),),
            roles=("reward",),
            data="pairs",
            inputs=inputs,
            evaluation=(scores, accuracy),
        )


class PreferenceSpec(SupervisedSpec):
    """Settings of algorithms that train a policy on preference pairs. A pair is one prompt with two samples."""

    samples_per_prompt: Literal[2] = 2
    beta: float = Field(
        0.1,
        gt=0,
        description="factor of the implicit rewards; simpo: of the mean log-probs; orpo: of the odds-ratio loss, "
        "lambda of the paper",
    )
    HAS_REFERENCE: ClassVar[bool] = True
    """Whether implicit rewards are log-ratios to a reference model; else they are of log-probs."""

    @property
    def averages_tokens(self) -> bool:
        """Whether the implicit reward of a response is a mean over its tokens, not a sum."""
        return not self.HAS_REFERENCE


class DpoSpec(PreferenceSpec):
    """Direct preference optimization (Rafailov et al. 2023, eq. 7) on pairs. A pair is one prompt with two samples.

    With h = log-ratio (policy to reference) of the chosen response less that of the rejected one:
    sigmoid: -log sigmoid(beta h), with ``label_smoothing`` e (cDPO, Mitchell 2023)
    -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h).
    robust: (-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e) (rDPO, Chowdhury et al. 2024).
    ipo: (h - 1 / (2 beta))^2 (Azar et al. 2024, eq. 17).
    """

    name: Literal["dpo"] = "dpo"
    loss: Literal["sigmoid", "robust", "ipo"] = Field("sigmoid", description="function of the log-ratios' difference")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="share of pairs whose labels are wrong; sigmoid and robust only"
    )
    length_normalised: bool = Field(
        False, description="log-ratios are means over tokens, not sums (Lambert et al. 2024, section 5; TRL's ipo)"
    )

    @model_validator(mode="after")
    def _smoothing_goes_with_the_loss(self) -> Self:
        if self.label_smoothing and self.loss == "ipo":
            raise ValueError(f"label_smoothing {self.label_smoothing:g} goes with loss: sigmoid; ipo needs none: use 0")
        if self.loss == "robust" and not self.label_smoothing:
            raise ValueError("loss: robust needs label_smoothing, the share of wrong labels; use 0.1, or loss: sigmoid")
        return self

    @property
    def averages_tokens(self) -> bool:
        return self.length_normalised

    def step_graph(self) -> Graph:
        reads = (*READ, "ref_logprobs")
        train = Operator("train_actor", "train", "actor", reads, function="preference_loss", barrier=self.epochs > 1)
        return Graph(
            operators=(REF_LOGPROBS, train),
            roles=("actor", "ref"),
            data="pairs",
            inputs=READ,
            evaluation=(LOGPROBS, REF_LOGPROBS, ACCURACY),
        )


class SimpoSpec(PreferenceSpec):
    """Simple preference optimization (Meng et al. 2024, eq. 6), without a reference model.

    -log sigmoid(beta (m_chosen - m_rejected) - gamma), with m the mean log-prob of a response's tokens.
    """

    HAS_REFERENCE: ClassVar[bool] = False
    name: Literal["simpo"] = "simpo"
    beta: float = Field(2.0, gt=0)
    gamma: float = Field(1.0, ge=0, description="margin by which the chosen response is to be better")

    def step_graph(self) -> Graph:
        return _without_reference(self, "simpo_loss")


class OrpoSpec(PreferenceSpec):
    """Odds ratio preference optimization (Hong et al. 2024, eqs. 3 to 7), without a reference model.

    Negative log-likelihood of the chosen response - beta log sigmoid(log odds ratio), with
    P = exp(mean log-prob of a response's tokens) and odds = P / (1 - P).
    """

    HAS_REFERENCE: ClassVar[bool] = False
    name: Literal["orpo"] = "orpo"

    def step_graph(self) -> Graph:
        return _without_reference(self, "orpo_loss")


def _without_reference(spec: PreferenceSpec, function: str) -> Graph:
    """Return the graph of an algorithm whose loss reads the policy alone."""
    train = Operator("train_actor", "train", "actor", READ, function=function, barrier=spec.epochs > 1)
    evaluation = (LOGPROBS, PLAIN_ACCURACY)
    return Graph(operators=(train,), roles=("actor",), data="pairs", inputs=READ, evaluation=evaluation)


class KtoSpec(PreferenceSpec):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, eq. 7): each response is desirable or not.

    Of a pair the chosen response is desirable, the rejected one is not. With r = log-ratio (policy to reference) of a
    response: desirable_weight (1 - sigmoid(beta (r - z))), and undesirable_weight (1 - sigmoid(beta (z - r))), mean
    over responses. z = max(0, mean log-ratio of the mini-batch's responses, each to the prompt before its own), under
    the policy that the step starts from.
    """

    name: Literal["kto"] = "kto"
    desirable_weight: float = Field(1.0, gt=0, description="factor of the losses of chosen responses")
    undesirable_weight: float = Field(1.0, gt=0, description="factor of the losses of rejected responses")

    @model_validator(mode="after")
    def _prompts_are_mismatched(self) -> Self:
        if self.prompts_per_step < 2 * self.num_mini_batches:
            raise ValueError(
                f"prompts_per_step {self.prompts_per_step} leaves a mini-batch with one prompt, so its responses have "
                f"no other prompt: use at least {2 * self.num_mini_batches}"
            )
        return self

    def step_graph(self) -> Graph:
        """Return a graph that forwards responses to other prompts, too, for the reference point of the losses."""
        suffix = f".{Qualifier.MISMATCHED}"
        texts = Column.qualified(TEXT, Qualifier.MISMATCHED)
        forwards = tuple(
            replace(
                each,
                name=f"mismatched_{each.name}",
                reads=texts,
                writes=Column.qualified(each.writes, Qualifier.MISMATCHED),
                suffix=suffix,
            )
            for each in (LOGPROBS, REF_LOGPROBS)
        )
        compared = Column.qualified(("logprobs", "ref_logprobs", "loss_mask"), Qualifier.MISMATCHED)
        point = Operator(
            "reference_point",
            "combine",
            "actor",
            compared,
            ("reference_point",),
            function="reference_point",
            suffix=suffix,
        )
        reads = (*READ, "ref_logprobs", "reference_point")
        train = Operator("train_actor", "train", "actor", reads, function="kto_loss", barrier=self.epochs > 1)
        return Graph(
            operators=(REF_LOGPROBS, *forwards, point, train),
            roles=("actor", "ref"),
            data="pairs",
            inputs=(*READ, *texts, f"loss_mask{suffix}"),
            evaluation=(LOGPROBS, REF_LOGPROBS, ACCURACY),
        )
