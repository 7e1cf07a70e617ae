"""From scores to rewards in the reference: what counts, what is said about answers cut off, the penalty for leaving
the reference policy, and the numbers that one step hands to the next."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from reference_answers import Answer
from reference_terms import Terms

from flexrlhf.config.algorithms import KlSpec, PolicySpec, SafeRlhfSpec, TruncationPenalty
from flexrlhf.config.spec import Spec


@dataclass
class Controls:
    """``coefficient``: of the KL penalty; ``multiplier``: of the bound on the cost; ``seen``: shaped scores so far."""

    coefficient: float
    multiplier: float
    seen: list[float] = field(default_factory=list)


def first_controls(policy: PolicySpec) -> Controls:
    multiplier = policy.lagrange.initial if isinstance(policy, SafeRlhfSpec) else 0.0
    return Controls(0.0 if policy.kl is None else policy.kl.coefficient, multiplier)


def next_controls(policy: PolicySpec, before: Controls, answers: list[Answer], ruled: list[float]) -> Controls:
    """``ruled``: the scores of the step that count, before they are normalised."""
    return Controls(
        adapted(policy, before.coefficient, answers),
        ascended(policy, before.multiplier, answers),
        before.seen + ruled,
    )


def adapted(policy: PolicySpec, coefficient: float, answers: list[Answer]) -> float:
    """Ziegler et al. 2019: a controller proportional to the error, which is cut at 20 %."""
    counting = [answer for answer in answers if answer.counts]
    if policy.kl is None or policy.kl.target is None or not counting:
        return coefficient
    measured = sum(sum(log_ratios_to_ref(policy, answer)) for answer in counting) / len(counting)
    error = max(-0.2, min(0.2, measured / policy.kl.target - 1))
    return coefficient * (1 + error * len(counting) / policy.kl.horizon)


def ascended(policy: PolicySpec, multiplier: float, answers: list[Answer]) -> float:
    """Dai et al. 2024, eq. 12: a step of log lambda along the mean cost over its limit, times lambda."""
    if not isinstance(policy, SafeRlhfSpec):
        return multiplier
    costs = [answer.scores["cost"] for answer in answers if math.isfinite(answer.scores["cost"])]
    excess = sum(costs) / len(costs) - policy.lagrange.limit
    risen = multiplier * math.exp(policy.lagrange.learning_rate * multiplier * excess)
    return min(risen, policy.lagrange.maximum)


def shape_scores(spec: Spec, answers: list[Answer], controls: Controls, terms: Terms) -> list[float]:
    """Fill in which answers count, and shaped scores. Returns the scores behind the rules, before normalisation."""
    policy = spec.algorithm
    assert isinstance(policy, PolicySpec)
    # where a value stands for the rest of an answer that was cut off, its score is not asked
    valued = policy.truncation == "bootstrap"
    scored = [answer for answer in answers if is_scored(policy, answer) and (answer.finished or not valued)]
    ruled = [ruled_score(spec, answer) for answer in scored]
    for answer in answers:
        is_cost_known = math.isfinite(answer.scores.get("cost", 0.0))
        is_greedy_scored = answer.greedy is None or is_scored(policy, answer.greedy)
        answer.counts = is_scored(policy, answer) and is_cost_known and is_greedy_scored
        # what its tokens score by themselves stays
        answer.shaped = sum(answer.token_scores.get("reward", []))
    for answer, score in zip(scored, ruled, strict=True):
        answer.shaped = normalised(policy, score, ruled, controls)
        if policy.reward_clip is not None:
            terms.add("reward_clipped", [float(abs(answer.shaped) > policy.reward_clip)])
            answer.shaped = max(-policy.reward_clip, min(policy.reward_clip, answer.shaped))
    terms.add("score_mean", ruled)
    return ruled


def is_scored(policy: PolicySpec, answer: Answer) -> bool:
    """A score that is no finite number teaches nothing; an answer that was cut off may be left out."""
    return math.isfinite(answer.scores["reward"]) and (answer.finished or policy.truncation != "mask")


def ruled_score(spec: Spec, answer: Answer) -> float:
    """After what is said about answers that are cut off, or nearly."""
    policy, score = spec.algorithm, answer.scores["reward"]
    assert isinstance(policy, PolicySpec)
    if not answer.finished and isinstance(policy.truncation, TruncationPenalty):
        score -= policy.truncation.penalty
    if policy.overlong is not None:
        # DAPO, eq. 13
        longest = spec.data.max_response_tokens
        buffer = policy.overlong.buffer_tokens or max(1, longest // 5)
        over = max(0, len(answer.tokens) - longest + buffer) / buffer
        score -= policy.overlong.penalty * over
    return score


def normalised(policy: PolicySpec, score: float, of_step: list[float], controls: Controls) -> float:
    """By mean and deviation (Bessel's correction) of the step, or of all steps before it once there are two scores."""
    others = {"none": [], "batch": of_step, "running": controls.seen}[policy.normalise_scores]
    if len(others) < (1 if policy.normalise_scores == "batch" else 2):
        return score
    mean, deviation = mean_and_deviation(others)
    if policy.normalise_scores == "running" and deviation == 0:
        deviation = 1.0
    return (score - mean) / (deviation + 1e-8)


def mean_and_deviation(numbers: list[float]) -> tuple[float, float]:
    """With Bessel's correction; that of equal numbers is 0."""
    if min(numbers) == max(numbers):
        return numbers[0], 0.0
    mean = sum(numbers) / len(numbers)
    return mean, math.sqrt(sum((x - mean) ** 2 for x in numbers) / max(len(numbers) - 1, 1))


def rewards_of(policy: PolicySpec, answer: Answer, controls: Controls) -> list[float]:
    """Of every token: its own score where it has one, all else of the answer's on the last, less the KL penalty."""
    rewards = on_tokens(answer, "reward", answer.shaped)
    return [reward - cost for reward, cost in zip(rewards, penalties(policy, answer, controls), strict=True)]


def on_tokens(answer: Answer, section: str, total: float) -> list[float]:
    tokens = list(answer.token_scores.get(section, [0.0] * len(answer.tokens)))
    tokens[-1] += total - sum(tokens)
    return tokens


def drawn_by(policy: PolicySpec, answer: Answer) -> list[float]:
    """Log-probs of the policy that drew the answer, as far as it is told from the one that is trained."""
    return answer.logprobs if policy.importance is None else answer.rollout_logprobs


def log_ratios_to_ref(policy: PolicySpec, answer: Answer) -> list[float]:
    return [drawn - ref for drawn, ref in zip(drawn_by(policy, answer), answer.ref_logprobs, strict=True)]


def penalties(policy: PolicySpec, answer: Answer, controls: Controls) -> list[float]:
    """Of every token in its reward."""
    if policy.kl is None or policy.kl.place == "loss":
        return [0.0] * len(answer.tokens)
    return [controls.coefficient * kl_estimate(policy.kl, x) for x in log_ratios_to_ref(policy, answer)]


def kl_estimate(kl: KlSpec, log_ratio: float) -> float:
    """Schulman 2020, of log policy - log ref."""
    x = log_ratio if kl.clamp is None else max(-kl.clamp, min(kl.clamp, log_ratio))
    return {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[kl.estimator]


def describe(spec: Spec, answers: list[Answer], controls: Controls, terms: Terms) -> None:
    """What metrics say of the answers of a step and their scores."""
    policy = spec.algorithm
    assert isinstance(policy, PolicySpec)
    for answer in answers:
        score = answer.scores["reward"]
        terms.add("score_invalid", [float(not math.isfinite(score))])
        if math.isfinite(score):
            terms.add("reward_mean", [score])
        if math.isfinite(answer.scores.get("cost", math.nan)):
            terms.add("cost_mean", [answer.scores["cost"]])
        for each in (answer, answer.greedy):
            terms.add("score_failed", [float(failed) for failed in each.has_failed.values()] if each else [])
        if answer.greedy is not None and math.isfinite(answer.greedy.scores["reward"]):
            terms.add("greedy_score", [answer.greedy.scores["reward"]])
        terms.add("not_counted", [float(not answer.counts)])
        terms.add("response_length", [len(answer.tokens)])
        terms.add("truncated", [float(not answer.finished)])
        if policy.kl is not None:
            terms.add("kl_coefficient", [controls.coefficient])
        if policy.kl is not None and answer.counts:
            log_ratios, sizes = log_ratios_to_ref(policy, answer), list(map(abs, drawn_by(policy, answer)))
            terms.add("kl", [sum(log_ratios)], [sum(sizes)])
            terms.add("kl_token", log_ratios, sizes)
    if isinstance(policy, SafeRlhfSpec):
        terms.add("lagrange", [controls.multiplier])
