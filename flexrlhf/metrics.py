"""Metrics of a run, each defined once, from the statistics that operators report.

An operator reports moments (weight, weighted sum, weighted sum of squares) of a statistic. Moments add up over rows,
chunks and ranks, so a metric does not depend on placement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Literal, Self

REPLY_PERCENTS = (50, 90, 99)
"""Percentiles of the times of an environment's replies that a step has."""
Triple = tuple[float, float, float]
"""Weight, weighted sum and weighted sum of squares."""


@dataclass(frozen=True)
class Metric:
    """One metric of a step.

    name:            key in metrics.jsonl
    statistic:       name of the moments that it is computed from
    definition:      what it is, with its unit, for the summary
    over:            name of the moments whose mean it is divided by
    kind:            mean: sum / weight; std: the population standard deviation; sum; max: the largest mean of an
                     operator's report; share: the mean, left out where it is 0; effective_share: effective sample size
                     / number of samples (Kong 1992)
    progress:        whether it is printed while training
    is_problem:      whether it is printed while training where it is not 0
    less_is_better:  whether ``save.best`` keeps the model with the smallest value
    """

    name: str
    statistic: str
    definition: str
    kind: Literal["mean", "std", "sum", "max", "share", "effective_share"] = "mean"
    over: str = ""
    progress: bool = False
    is_problem: bool = False
    less_is_better: bool = False

    def scale(self, statistic: Triple) -> float:
        """Return the scale of its rounding: the root mean square of the values that it is a mean of."""
        weight, total, squares = statistic
        return abs(total) if self.kind == "sum" else math.sqrt(squares / weight)

    def is_better(self, value: float, than: float | None) -> bool:
        """Whether a value is better than ``than``, the best before; NaN never is."""
        if math.isnan(value):
            return False
        return than is None or (value < than if self.less_is_better else value > than)


class DefinedMetrics(tuple[Metric, ...]):
    """All metrics with a definition, in the order of a row."""

    @cached_property
    def times(self) -> tuple[str, ...]:
        """Entries of a row of metrics that no number of the run depends on: they differ each time it runs, or is
        resumed in the middle of what they count."""
        measured = (metric.name for metric in self if metric.name.startswith(("time_", "reply_seconds_")))
        return ("seconds", "samples_per_second", "tokens_per_second", "rollout_restarts", "calls_refused", *measured)

    @property
    def stale_shares(self) -> tuple[str, ...]:
        """Shares of a step's tokens by their staleness, in its order."""
        return tuple(f"staleness_{age}" for age in range(MOST_STALE + 1))

    @cached_property
    def definitions(self) -> Mapping[str, str]:
        """Definitions of all entries of a row of metrics that a user's functions do not report, by name."""
        return {
            "step": "number of the step, from 0; what is printed counts those that are done, from 1",
            "seconds": "time since the row before was written, or since the models were loaded",
            "rollout_engine": "engine that sampled the responses: torch, deepspeed, vllm",
            **{metric.name: metric.definition for metric in self},
        }

    @cached_property
    def _statistics(self) -> frozenset[str]:
        return frozenset(metric.statistic for metric in self)

    @cached_property
    def _maxima(self) -> frozenset[str]:
        return frozenset(metric.statistic for metric in self if metric.kind == "max")

    def named(self, name: str) -> Metric:
        """Return the metric of a name."""
        return next(metric for metric in self if metric.name == name)

    def statistic_name(self, operator: str, name: str) -> str:
        """Return the statistic's name in metrics: with the operator's in front where several operators report it, and
        of a user's function, whose statistics have no definition."""
        full = f"{operator}/{name}"
        return name if full not in self._statistics and name in self._statistics else full

    def add(self, total: dict[str, Triple], part: Mapping[str, Triple]) -> None:
        """Add the moments of ``part`` to those of ``total``; of a maximum the larger ones remain."""
        for name, (weight, first, second) in part.items():
            before = total.get(name, (0.0, 0.0, 0.0))
            if name in self._maxima and weight and before[0]:
                total[name] = max(before, (weight, first, second), key=lambda moments: moments[1] / moments[0])
                continue
            total[name] = (before[0] + weight, before[1] + first, before[2] + second)

    def evaluate(self, statistics: Mapping[str, Triple]) -> dict[str, float]:
        """Return the metrics of a step by name; those without rows are left out.

        A statistic without definition, of a user's function, is its mean.
        """
        row = {}
        for metric in self:
            weight, first, second = statistics.get(metric.statistic, (0.0, 0.0, 0.0))
            of_all = statistics.get(metric.over, (1.0, 1.0, 1.0))
            if weight and of_all[1] and (first or metric.kind != "share"):
                row[metric.name] = _value(metric.kind, weight, first, second) / (of_all[1] / of_all[0])
        own = {name: value for name, value in statistics.items() if name not in self._statistics and value[0]}
        return row | {name: first / weight for name, (weight, first, _) in sorted(own.items())}


def _value(kind: str, weight: float, first: float, second: float) -> float:
    mean = first / weight
    match kind:
        case "std":
            return math.sqrt(max(second / weight - mean * mean, 0.0))
        case "sum":
            return first
        case "effective_share":
            return first * first / (weight * second) if second else 0.0
    return mean


class Outcome(StrEnum):
    """Outcome of a row that is taken from the data: it is trained on, or left out for one reason.

    A member has the reason's definition. Filtered: left out by the algorithm's choice among responses; not counted:
    for any other reason.

    code:  number in the column ``outcome``; 0: to be trained on
    kind:  "filtered", "not counted" or empty
    """

    code: int
    kind: Literal["", "filtered", "not counted"]
    definition: str

    TRAINED = "trained", "", "rows of the step that are trained on"
    ALIKE = "alike", "filtered", "in groups whose scores are all the same, with dynamic_sampling"
    NOT_BEST = "not_best", "filtered", "not the best response of their group (raft)"
    SURPLUS = "surplus", "not counted", "in groups beyond a mini-batch's share, with dynamic_sampling"
    INVALID_SCORE = "invalid_score", "not counted", "the score is NaN or infinite"
    TRUNCATED = "truncated", "not counted", "truncated, with truncation: mask or mask-loss"
    REJECTED = "rejected", "not counted", "importance leaves out all of their tokens, by reject or max_staleness"
    NO_TOKENS = "no_tokens", "not counted", "no token of theirs is to be trained on, by the data or a user's function"
    SKIPPED = "skipped", "not counted", "no optimizer step was made on them, since its gradient was not finite"
    FROZEN = "frozen", "not counted", "the first trained role is not trained yet (freeze_actor_steps)"
    FAILED_EPISODE = "failed_episode", "not counted", "the environment failed"
    LEFT_OUT = "left_out", "not counted", "a program with a session did not train on them"
    UNUSED = "unused", "not counted", "places for sequences that their episode has not, or that are not trained on"

    def __new__(cls, value: str, kind: Literal["", "filtered", "not counted"] = "", definition: str = "") -> Self:
        member = str.__new__(cls, value)
        member._value_, member.code = value, len(cls.__members__)
        member.kind, member.definition = kind, definition
        return member

    @property
    def metric(self) -> Metric:
        """Metric that counts the rows of this outcome."""
        name = f"rows_{self}"
        return Metric(name, name, f"rows {self.kind}: {self.definition}" if self.kind else self.definition, "sum")


SKIPPED = (
    "share of optimizer steps left out: float16 overflowed, or with guards.non_finite: skip any that is not finite"
)

FAILED_IN_A_ROW = "failed_in_a_row"
"""Statistic of an environment's failures, which the next step goes on with."""
EPISODE_FAILURES = {
    "raise": "raised",
    "reply": "returned what is no reply",
    "timeout": "took longer than environment.timeout_seconds",
    "crash": "ended its process",
    "memory": "used up environment.memory_mb",
    "files": "used up environment.open_files",
    "late": "had not replied by the deadline of a turn",
    "replay": "replied otherwise when it was played again",
    "tokens": "replied with what is too long, or is no message of the chat template",
    "load": "could not be loaded, or its process not started",
    "server": "had a server that was not reached, or was lost",
}
"""Kinds of failures of an environment, and their definitions."""
STALENESS = "batches trained on since the weights that sampled a token"
ROUTER_LOSSES = {
    "router_aux_loss": "number of experts * sum over experts of (share of tokens that take it * its mean probability)",
    "router_z_loss": "square of the log-sum-exp of a router's logits, mean over tokens and layers",
}
"""Losses of routers, and their definitions."""
MOST_STALE = 16
"""Staleness from which on the histogram of a step's tokens has one share."""
SHARE_OF_TIME = "share of the time of all ranks since the row before, in"

_DEFINED = (
    Metric("reward_mean", "reward", "score before any shaping, mean over responses", progress=True),
    Metric("reward_std", "reward", "standard deviation of the score over the responses of the step", "std"),
    Metric("score_mean", "shaped_score", "score after the truncation rules, before normalisation, mean over responses"),
    Metric("score_invalid", "score_invalid", "share of responses whose score is NaN or infinite", is_problem=True),
    Metric(
        "score_failed",
        "score_failed",
        "share of responses for which a function or service returned no score",
        is_problem=True,
    ),
    Metric(
        "text_cut",
        "text_cut",
        "share of texts whose beginning is cut off at models.ROLE.max_text_tokens",
        is_problem=True,
    ),
    Metric(
        "kl",
        "kl",
        "logprob - ref_logprob of the policy that sampled a response, sum over tokens, mean over responses (nats)",
        progress=True,
    ),
    Metric(
        "kl_token",
        "kl_token",
        "logprob - ref_logprob of the policy that sampled the response, mean over tokens (nats)",
    ),
    Metric(
        "kl_response_mean",
        "kl_response_mean",
        "estimate by algorithm.kl, mean over a response's tokens, mean over responses; with target_unit: token (nats)",
    ),
    Metric("kl_coefficient", "kl_coefficient", "coefficient of the KL penalty"),
    Metric(
        "response_length",
        "response_length",
        "tokens per response, end token included, mean over responses",
        progress=True,
    ),
    Metric("truncated", "truncated", "share of responses that were truncated at the largest length"),
    Metric(
        "reward_clipped",
        "reward_clipped",
        "share of scores, after the truncation rule, beyond algorithm.reward_clip",
    ),
    Metric("greedy_score", "greedy_score", "score of the greedy responses, which is the baseline"),
    Metric("group_alike", "group_alike", "share of responses in groups whose scores are all the same"),
    Metric(
        "kept_length_ratio",
        "taken_length",
        "tokens per response that dynamic sampling or best-of-group takes / tokens per sampled response",
        over="response_length",
    ),
    Metric("prompts_taken", "prompts_taken", "prompts that dynamic sampling takes from the data in the step", "sum"),
    Metric(
        "prompts_left_out",
        "prompts_left_out",
        "prompts of responses in segments that the step before left out, and a further prompt is taken in place of",
        "sum",
    ),
    Metric("turns_mean", "turns", "turns of the policy in an episode", progress=True),
    Metric("sequences_mean", "sequences", "sequences of an episode, with environment.sequences"),
    Metric("reply_length_mean", "reply_length", "tokens of the environment's replies in an episode"),
    Metric("episode_ended", "episode_ended", "share of episodes that the environment has ended"),
    Metric("episode_last_turn", "episode_last_turn", "share of episodes that had all their turns and were not ended"),
    Metric("episode_no_room", "episode_no_room", "share of episodes without room for another turn"),
    Metric("episode_failed", "episode_failed", "share of episodes whose environment failed", is_problem=True),
    *(
        Metric(
            f"episode_failed_{name}",
            f"episode_failed_{name}",
            f"share of episodes whose environment {text}",
            "share",
            is_problem=True,
        )
        for name, text in EPISODE_FAILURES.items()
    ),
    Metric("episodes_failed_in_a_row", FAILED_IN_A_ROW, "episodes that have failed in a row by the end of the step"),
    Metric("reply_seconds_mean", "reply_seconds", "time of an environment's reply to a turn, mean over replies"),
    *(
        Metric(
            f"reply_seconds_p{each}", f"reply_seconds_p{each}", f"time that {each} % of the step's replies take at most"
        )
        for each in REPLY_PERCENTS
    ),
    Metric("reply_seconds_max", "reply_seconds_longest", "time of the longest reply of the step"),
    Metric(
        "reply_seconds_waited",
        "reply_wait",
        "time for which ranks had nothing to decode and awaited replies, sum over ranks",
        "sum",
    ),
    Metric(
        "calls_refused",
        "refused_calls",
        "calls of a program (environment.api) that the policy could not reply to, sum over episodes",
        "sum",
    ),
    Metric("tool_calls", "tool_calls", "calls of tools in an episode"),
    Metric("tool_calls_failed", "failed_tool_calls", "share of calls that failed", over="tool_calls"),
    *(outcome.metric for outcome in Outcome),
    Metric("rows_in_flight", "rows_in_flight", "rows generated and not due for training yet, after the step", "sum"),
    Metric("response_steps", "response_steps", "steps per response that counts, with supervision: process"),
    Metric("cost_mean", "cost", "cost, mean over responses", progress=True),
    Metric("lagrange", "lagrange", "Lagrange multiplier of the limit on the cost"),
    Metric("advantage_mean", "advantage", "advantage before whitening, mean over tokens"),
    Metric("advantage_std", "advantage", "standard deviation of the advantage before whitening, over tokens", "std"),
    Metric("return_mean", "return", "advantage + value, mean over tokens"),
    Metric("value_mean", "value", "critic's value before the update, mean over tokens"),
    Metric("policy_loss", "policy_loss", "clipped surrogate, mean over tokens and optimizer steps", progress=True),
    Metric(
        "ratio_clipped",
        "ratio_clipped",
        "share of tokens where the clipped ratio sets the loss; cispo: where it is clipped",
    ),
    Metric("update_kl", "update_kl", "k3 estimate of KL(old || new) within the step, mean over tokens (nats)"),
    Metric("entropy", "entropy", "entropy of softmax(logits / T), mean over tokens (nats)"),
    Metric("value_loss", "value_loss", "half the clipped squared error, mean over tokens", progress=True),
    Metric(
        "cost_value_loss",
        "train_cost_critic/value_loss",
        "half the clipped squared error of the cost critic, mean over tokens",
    ),
    Metric(
        "cost_value_clipped",
        "train_cost_critic/value_clipped",
        "share of tokens where the cost critic's clipped value sets the loss",
    ),
    Metric("value_clipped", "value_clipped", "share of tokens where the clipped value sets the loss"),
    Metric(
        "actor_grad_norm",
        "train_actor/grad_norm",
        "global gradient norm before clipping, mean over optimizer steps",
    ),
    Metric(
        "critic_grad_norm",
        "train_critic/grad_norm",
        "global gradient norm before clipping, mean over optimizer steps",
    ),
    Metric(
        "cost_critic_grad_norm",
        "train_cost_critic/grad_norm",
        "global gradient norm before clipping, mean over optimizer steps",
    ),
    Metric(
        "reward_grad_norm",
        "train_reward/grad_norm",
        "global gradient norm before clipping, mean over optimizer steps",
    ),
    Metric("actor_learning_rate", "train_actor/learning_rate", "learning rate, mean over optimizer steps"),
    Metric("critic_learning_rate", "train_critic/learning_rate", "learning rate, mean over optimizer steps"),
    Metric("cost_critic_learning_rate", "train_cost_critic/learning_rate", "learning rate, mean over optimizer steps"),
    Metric("reward_learning_rate", "train_reward/learning_rate", "learning rate, mean over optimizer steps"),
    Metric("actor_skipped", "train_actor/skipped", SKIPPED, is_problem=True),
    Metric("critic_skipped", "train_critic/skipped", SKIPPED, is_problem=True),
    Metric("cost_critic_skipped", "train_cost_critic/skipped", SKIPPED, is_problem=True),
    Metric("reward_skipped", "train_reward/skipped", SKIPPED, is_problem=True),
    Metric(
        "importance_weight",
        "importance_weight",
        "min(pi_old / pi_rollout, cap), with outside: mask 0 beyond the bounds, mean over tokens or responses",
    ),
    Metric(
        "importance_clipped", "importance_clipped", "share of ratios above cap, with outside: mask also below floor"
    ),
    Metric(
        "behaviour_kl",
        "behaviour_kl",
        "k3 estimate of KL(rollout || old): of the policy that sampled from the one that training starts from, mean "
        "over tokens (nats)",
    ),
    Metric("importance_rejected", "importance_rejected", "share of tokens that importance.reject leaves out"),
    Metric(
        "covariance",
        "covariance",
        "(log-prob - its mean) * (advantage - its mean), means over a mini-batch, mean over tokens",
    ),
    Metric("covariance_selected", "covariance_selected", "share of tokens that are selected by their covariance"),
    Metric(
        "effective_sample_size",
        "importance_weight",
        "square of the sum of importance weights / sum of their squares / their number",
        "effective_share",
    ),
    Metric(
        "parity_mean",
        "parity_mean",
        "absolute difference of the rollout engine's and the trainer's log-probs, mean over tokens (nats)",
    ),
    Metric("parity_p999", "parity_p999", "what one of a thousand of these differences exceeds (nats)"),
    Metric("parity_max", "parity_max", "largest absolute difference of these log-probs (nats)"),
    *(
        Metric(
            f"{role}_expert_load_max",
            f"train_{role}/expert_load_max",
            "tokens of the fullest expert of any layer / tokens of an expert in the mean, mean over optimizer steps",
        )
        for role in ("actor", "critic", "reward")
    ),
    *(
        Metric(f"{role}_{name}", f"train_{role}/{name}", f"{text}, before its coefficient, mean over optimizer steps")
        for name, text in ROUTER_LOSSES.items()
        for role in ("actor", "critic", "reward")
    ),
    Metric(
        "router_mismatch",
        "router_mismatch",
        "share of tokens and layers for which the actor's routers in training, before a replay, choose other experts "
        "than generation did",
    ),
    Metric("staleness_mean", "staleness", f"{STALENESS}, mean over the tokens that the step trains on"),
    Metric("staleness_max", "staleness_max", f"{STALENESS}, largest of these tokens", "max"),
    *(
        Metric(f"staleness_{n}", f"staleness_{n}", f"share of these tokens whose staleness is {n}", "share")
        for n in range(MOST_STALE)
    ),
    Metric(
        f"staleness_{MOST_STALE}",
        f"staleness_{MOST_STALE}",
        f"share of these tokens whose staleness is at least {MOST_STALE}",
        "share",
    ),
    Metric("staleness_dropped", "staleness_dropped", "share of tokens that importance.max_staleness leaves out"),
    Metric("rollout_requests", "rollout_requests", "responses that the rollout engines report for the step", "sum"),
    Metric(
        "late_replies",
        "late_replies",
        "rows that the next step goes on with since their reply is late (rollout.late_replies: carry)",
        "sum",
    ),
    Metric(
        "rollout_restarts",
        "rollout_restarts",
        "child processes of rollout engines that ended or did not respond, and were replaced",
        "sum",
        is_problem=True,
    ),
    Metric("ptx_nll", "ptx_nll", "negative log-likelihood of the pretraining texts, mean over tokens (nats)"),
    Metric("nll", "nll", "negative log-likelihood of the responses, mean over tokens (nats)", progress=True),
    Metric("pair_loss", "pair_loss", "-log sigmoid(chosen - rejected), mean over pairs", progress=True),
    Metric(
        "pair_accuracy",
        "pair_correct",
        "share of training pairs whose chosen response has the higher score or implicit reward",
        progress=True,
    ),
    Metric("preference_loss", "preference_loss", "loss of DPO, SimPO, ORPO or KTO, mean over pairs", progress=True),
    Metric("preference_margin", "preference_margin", "chosen_reward - rejected_reward, mean over pairs"),
    Metric(
        "chosen_reward",
        "chosen_reward",
        "implicit reward of chosen responses, mean over pairs: beta * log(policy / reference), sum over tokens (with "
        "length_normalised mean); simpo, orpo: beta * mean log-prob of the tokens",
    ),
    Metric("rejected_reward", "rejected_reward", "implicit reward of rejected responses, mean over pairs"),
    Metric("chosen_logprob", "chosen_logprob", "log-prob of chosen responses, sum over tokens, mean over pairs (nats)"),
    Metric(
        "rejected_logprob",
        "rejected_logprob",
        "log-prob of rejected responses, sum over tokens, mean over pairs (nats)",
    ),
    Metric(
        "odds_ratio_loss",
        "odds_ratio_loss",
        "-log sigmoid(log odds of chosen - log odds of rejected responses), mean over pairs",
    ),
    Metric(
        "chosen_nll",
        "chosen_nll",
        "negative log-likelihood of chosen responses, mean over tokens, then pairs (nats)",
    ),
    Metric(
        "reference_point",
        "reference_point",
        "KTO's reference point: log(policy / reference) of responses to other prompts, sum over tokens, mean over a "
        "mini-batch, at least 0 (nats)",
    ),
    Metric("eval_preference_margin", "eval_preference_margin", "preference_margin on the evaluation set"),
    Metric("eval_nll", "eval_nll", "nll on the evaluation set", progress=True, less_is_better=True),
    Metric(
        "eval_accuracy",
        "eval_accuracy",
        "share of evaluation pairs whose chosen response has the higher score or implicit reward",
        progress=True,
    ),
    Metric(
        "eval_distinct_2",
        "eval_distinct_2",
        "different bigrams / bigrams of the responses to evaluation prompts",
        progress=True,
    ),
    Metric("eval_response_length", "eval_response_length", "tokens per response to evaluation prompts"),
    Metric("eval_reward_mean", "eval_reward", "score, mean over responses to evaluation prompts", progress=True),
    Metric("eval_reward_std", "eval_reward", "standard deviation of this score", "std"),
    Metric(
        "eval_pass_at_1",
        "eval_pass_at_1",
        "share of responses to evaluation prompts with a score of at least eval.pass_score",
    ),
    Metric("eval_pass_at_k", "eval_pass_at_k", "share of evaluation prompts with such a response among eval.pass_at"),
    Metric("eval_turns_mean", "eval_turns", "turns of the policy in an episode of an evaluation prompt"),
    Metric("eval_sequences_mean", "eval_sequences", "sequences of such an episode, with environment.sequences"),
    Metric("eval_episode_failed", "eval_episode_failed", "share of these episodes whose environment failed"),
    Metric(
        "eval_truncated",
        "eval_truncated",
        "share of responses to evaluation prompts that were truncated at the largest length",
        less_is_better=True,
    ),
    Metric(
        "eval_score_invalid",
        "eval_score_invalid",
        "share of responses to evaluation prompts whose score is NaN or infinite",
        less_is_better=True,
    ),
    Metric(
        "eval_score_failed",
        "eval_score_failed",
        "share of responses to evaluation prompts for which a function or service returned no score",
    ),
    Metric(
        "eval_text_cut",
        "eval_text_cut",
        "share of texts of the evaluation set whose beginning is cut off at models.ROLE.max_text_tokens",
    ),
    Metric("samples_per_second", "samples_per_second", "rows of the step (responses, pairs or texts) / seconds"),
    Metric(
        "tokens_per_second",
        "tokens_per_second",
        "response tokens of the step / seconds; sft: tokens trained on; without either left out",
    ),
    Metric("time_generate", "time_generate", f"{SHARE_OF_TIME} generation, replies of environments included"),
    Metric("time_forward", "time_forward", f"{SHARE_OF_TIME} forward passes of models: log-probs, values, scores"),
    Metric("time_score", "time_score", f"{SHARE_OF_TIME} reward functions, services and rules"),
    Metric("time_train", "time_train", f"{SHARE_OF_TIME} training: forward, backward, gradients, optimizer"),
    Metric("time_move", "time_move", f"{SHARE_OF_TIME} starting moves of rows; what is waited for is time_wait"),
    Metric("time_sync", "time_sync", f"{SHARE_OF_TIME} sending and storing weights of copies"),
    Metric("time_wait", "time_wait", f"{SHARE_OF_TIME} waiting: for rows of other ranks, and between instructions"),
    Metric(
        "time_other",
        "time_other",
        f"{SHARE_OF_TIME} everything else: advantages, evaluations, checkpoints, models that are saved or offloaded",
    ),
)
METRICS = DefinedMetrics(_DEFINED)


MOST_ENDS = 3
"""Steps at either end of a run whose mean is shown."""


@dataclass(frozen=True)
class Ends:
    """A metric at the beginning and at the end of a run.

    steps:        whose mean either is
    first, last:  the means
    """

    steps: int
    first: float
    last: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return the means of the first and the last of ``values``, at most half of them each."""
        few = max(1, min(MOST_ENDS, len(values) // 2))
        return cls(few, sum(values[:few]) / few, sum(values[-few:]) / few)

    @property
    def title(self) -> str:
        """Name of what is compared."""
        return f"first {self.steps} -> last {self.steps} steps" if self.steps > 1 else "first -> last step"
