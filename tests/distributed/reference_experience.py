"""Rewards from scores in the reference: which responses count, rules for truncated ones, the penalty for leaving the
reference policy, and the values that one step passes to the next."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from reference_responses import Episode, Response
from reference_terms import Terms

from flexrlhf.config.algorithms.policy import PolicySpec
from flexrlhf.config.algorithms.policy_sections import KlSpec, TruncationPenalty
from flexrlhf.config.algorithms.ppo import SafeRlhfSpec
from flexrlhf.config.spec import Spec


@dataclass
class Controls:
    """``coefficient``: of the KL penalty; ``multiplier``: of the bound on the cost; ``seen``: shaped scores so far;
    ``failed``: episodes that have failed in a row."""

    coefficient: float
    multiplier: float
    seen: list[float] = field(default_factory=list)
    failed: int = 0


def first_controls(policy: PolicySpec) -> Controls:
    multiplier = policy.lagrange.initial if isinstance(policy, SafeRlhfSpec) else 0.0
    return Controls(0.0 if policy.kl is None else policy.kl.coefficient, multiplier)


def next_controls(policy: PolicySpec, before: Controls, responses: list[Response], ruled: list[float]) -> Controls:
    """``ruled``: the scores of the step that count, before they are normalised."""
    return Controls(
        adapted(policy, before.coefficient, responses),
        ascended(policy, before.multiplier, responses),
        before.seen + ruled,
        failed_in_a_row(before.failed, responses),
    )


def failed_in_a_row(before: int, responses: list[Response]) -> int:
    for response in responses:
        has_failed = response.episode is not None and response.episode.outcome == "failed"
        before = before + 1 if has_failed else 0
    return before


def adapted(policy: PolicySpec, coefficient: float, responses: list[Response]) -> float:
    """Ziegler et al. 2019: a controller proportional to the error, which is cut at 20 %."""
    counting = [response for response in responses if response.counts]
    if policy.kl is None or policy.kl.target is None or not counting:
        return coefficient
    if policy.kl.target_unit == "token":
        measured = sum(mean_estimate(policy.kl, policy, response) for response in counting) / len(counting)
    else:
        measured = sum(sum(log_ratios_to_ref(policy, response)) for response in counting) / len(counting)
    error = max(-0.2, min(0.2, measured / policy.kl.target - 1))
    return coefficient * (1 + error * len(counting) / policy.kl.horizon)


def ascended(policy: PolicySpec, multiplier: float, responses: list[Response]) -> float:
    """Dai et al. 2024, eq. 12: a step of log lambda along the mean cost over its limit, times lambda."""
    if not isinstance(policy, SafeRlhfSpec):
        return multiplier
    costs = [response.scores["cost"] for response in responses if math.isfinite(response.scores["cost"])]
    excess = sum(costs) / len(costs) - policy.lagrange.limit
    risen = multiplier * math.exp(policy.lagrange.learning_rate * multiplier * excess)
    return risen if policy.lagrange.maximum is None else min(risen, policy.lagrange.maximum)


def shape_scores(spec: Spec, responses: list[Response], controls: Controls, terms: Terms) -> list[float]:
    """Fill in which responses count, and shaped scores. Returns the scores after the rules, before normalisation."""
    policy = spec.algorithm
    assert isinstance(policy, PolicySpec)
    # if a value replaces the rest of a truncated response, its score is not used
    valued = policy.truncation == "bootstrap"
    scored = [response for response in responses if is_scored(policy, response) and (response.finished or not valued)]
    ruled = [ruled_score(spec, response) for response in scored]
    for response in responses:
        is_cost_known = math.isfinite(response.scores.get("cost", 0.0))
        is_greedy_scored = response.greedy is None or is_scored(policy, response.greedy)
        response.counts = is_scored(policy, response) and is_cost_known and is_greedy_scored
        # scores of its single tokens stay
        response.shaped = sum(response.token_scores.get("reward", []))
    for response, score in zip(scored, ruled, strict=True):
        response.shaped = normalised(policy, score, ruled, controls)
        if policy.reward_clip is not None:
            terms.add("reward_clipped", [float(abs(response.shaped) > policy.reward_clip)])
            response.shaped = max(-policy.reward_clip, min(policy.reward_clip, response.shaped))
    terms.add("score_mean", ruled)
    return ruled


def is_scored(policy: PolicySpec, response: Response) -> bool:
    """A score that is no finite number teaches nothing; a response that was cut off may be left out."""
    return math.isfinite(response.scores["reward"]) and (response.finished or policy.truncation != "mask")


def ruled_score(spec: Spec, response: Response) -> float:
    """Score after the rules for responses that are truncated, or nearly."""
    policy, score = spec.algorithm, response.scores["reward"]
    assert isinstance(policy, PolicySpec)
    if not response.finished and isinstance(policy.truncation, TruncationPenalty):
        score -= policy.truncation.penalty
    if policy.overlong is not None:
        # DAPO, eq. 13
        longest = spec.data.max_response_tokens
        buffer = policy.overlong.buffer_tokens or max(1, longest // 5)
        over = max(0, len(response.tokens) - longest + buffer) / buffer
        score -= policy.overlong.penalty * over
    return score


def normalised(policy: PolicySpec, score: float, of_step: list[float], controls: Controls) -> float:
    """Scores normalised by mean and deviation (Bessel's correction) of the step, or of all earlier steps once there are
    two scores."""
    others = {"none": [], "batch": of_step, "running": controls.seen}[policy.normalise_scores]
    if len(others) < (1 if policy.normalise_scores == "batch" else 2):
        return score
    mean, deviation = mean_and_deviation(others)
    if policy.normalise_scores == "running" and deviation == 0:
        deviation = 1.0
    return (score - mean) / (deviation + 1e-8)


def mean_and_deviation(values: list[float]) -> tuple[float, float]:
    """Mean, and deviation with Bessel's correction; the deviation of equal values is 0."""
    if min(values) == max(values):
        return values[0], 0.0
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((x - mean) ** 2 for x in values) / max(len(values) - 1, 1))


def rewards_of(policy: PolicySpec, response: Response, controls: Controls) -> list[float]:
    """Rewards of the tokens: their own scores if they have any, the response's on the last, less the KL penalty."""
    rewards = on_tokens(response, "reward", response.shaped)
    if policy.kl is not None and policy.kl.place == "advantages":
        return rewards
    return [reward - cost for reward, cost in zip(rewards, penalties(policy, response, controls), strict=True)]


def on_tokens(response: Response, section: str, total: float) -> list[float]:
    tokens = list(response.token_scores.get(section, [0.0] * len(response.tokens)))
    if tokens:
        tokens[-1] += total - sum(tokens)
    return tokens


def sampled_by(policy: PolicySpec, response: Response) -> list[float]:
    """Log-probs of the policy that sampled the response, if they differ from the trained policy's."""
    return response.logprobs if policy.importance is None else response.rollout_logprobs


def log_ratios_to_ref(policy: PolicySpec, response: Response) -> list[float]:
    return [sampled - ref for sampled, ref in zip(sampled_by(policy, response), response.ref_logprobs, strict=True)]


def penalties(policy: PolicySpec, response: Response, controls: Controls) -> list[float]:
    """Penalty of every token in its reward, or in its advantage."""
    if policy.kl is None or policy.kl.place == "loss":
        return [0.0] * len(response.tokens)
    return [controls.coefficient * kl_estimate(policy.kl, x) for x in log_ratios_to_ref(policy, response)]


def kl_estimate(kl: KlSpec, log_ratio: float) -> float:
    """Schulman 2020, of log policy - log ref."""
    x = log_ratio if kl.clamp is None else max(-kl.clamp, min(kl.clamp, log_ratio))
    estimate = {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[kl.estimator]
    return estimate if kl.value_clamp is None else max(-kl.value_clamp, min(kl.value_clamp, estimate))


def mean_estimate(kl: KlSpec, policy: PolicySpec, response: Response) -> float:
    """Over the tokens of a response."""
    estimates = [kl_estimate(kl, x) for x in log_ratios_to_ref(policy, response)]
    return sum(estimates) / len(estimates)


def describe_episode(episode: Episode, terms: Terms) -> None:
    has_failed = episode.outcome == "failed"
    terms.add("turns_mean", [] if has_failed else [float(len(episode.ends))])
    terms.add("reply_length_mean", [] if has_failed else [float(len(episode.text) - len(episode.positions))])
    for outcome in ("ended", "last turn", "no room"):
        terms.add(f"episode_{outcome.replace(' ', '_')}", [float(episode.outcome == outcome)])
    for name in ("episode_failed", "episode_failed_raise"):
        terms.add(name, [float(has_failed)])
    terms.add("tool_calls", [0.0])


def describe(spec: Spec, responses: list[Response], controls: Controls, terms: Terms) -> None:
    """Metrics of a step's responses and their scores."""
    policy = spec.algorithm
    assert isinstance(policy, PolicySpec)
    for response in responses:
        score, episode = response.scores["reward"], response.episode
        has_failed = episode is not None and episode.outcome == "failed"
        terms.add("score_invalid", [float(not math.isfinite(score) and not has_failed)])
        if math.isfinite(score):
            terms.add("reward_mean", [score])
        if episode is not None:
            describe_episode(episode, terms)
        if math.isfinite(response.scores.get("cost", math.nan)):
            terms.add("cost_mean", [response.scores["cost"]])
        for each in (response, response.greedy):
            terms.add("text_cut", [float(cut) for cut in each.is_cut.values()] if each else [])
            terms.add("score_failed", [float(failed) for failed in each.has_failed.values()] if each else [])
        if response.greedy is not None and math.isfinite(response.greedy.scores["reward"]):
            terms.add("greedy_score", [response.greedy.scores["reward"]])
        terms.add("response_length", [len(response.tokens)])
        terms.add("truncated", [float(not response.finished)])
        if policy.kl is not None:
            terms.add("kl_coefficient", [controls.coefficient])
        if policy.kl is not None and response.counts:
            log_ratios, sizes = log_ratios_to_ref(policy, response), list(map(abs, sampled_by(policy, response)))
            terms.add("kl", [sum(log_ratios)], [sum(sizes)])
            terms.add("kl_token", log_ratios, sizes)
            if policy.kl.target is not None and policy.kl.target_unit == "token":
                size = sum(sizes) / len(sizes)
                terms.add("kl_response_mean", [mean_estimate(policy.kl, policy, response)], [size])
    if spec.environment is not None:
        terms.add("episodes_failed_in_a_row", [float(failed_in_a_row(controls.failed, responses))])
    if not any(terms.values("episode_failed")):
        terms.leave_out("episode_failed_raise")
    if isinstance(policy, SafeRlhfSpec):
        terms.add("lagrange", [controls.multiplier])
