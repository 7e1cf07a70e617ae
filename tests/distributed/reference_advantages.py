"""The advantages of the reference's answers, algorithm by algorithm."""

from __future__ import annotations

import math
from collections.abc import Sequence

from reference_answers import Answer
from reference_experience import Controls, mean_and_deviation, on_tokens, penalties, rewards_of
from reference_terms import Terms

from flexrlhf.config.algorithms import (
    GroupSpec,
    PolicySpec,
    PpoSpec,
    RaftSpec,
    ReinforceSpec,
    RemaxSpec,
    ReturnsSpec,
    SafeRlhfSpec,
)


def estimate_advantages(
    policy: PolicySpec, answers: list[Answer], controls: Controls, mini_batches: Sequence[range], terms: Terms
) -> None:
    """Fill in advantages, and returns where critics learn from them."""
    match policy:
        case SafeRlhfSpec():
            for answer in answers:
                safe(policy, answer, controls)
        case PpoSpec():
            for answer in answers:
                with_critic(policy, answer, controls)
        case GroupSpec():
            grouped(policy, answers, controls, mini_batches, terms)
        case RaftSpec():
            best_taken(policy, answers, controls, terms)
        case ReturnsSpec():
            with_baseline(policy, answers, controls, terms)
    trained = [answer for answer in answers if answer.is_trained]
    for answer in trained:
        terms.add("advantage_mean", answer.advantages)
        # those of the reward's critic
        for returns in list(answer.returns.values())[:1]:
            terms.add("return_mean", returns)
        for values in list(answer.values.values())[:1]:
            terms.add("value_mean", values[:-1])
    whiten(policy, answers, mini_batches)


def with_critic(ppo: PpoSpec, answer: Answer, controls: Controls) -> None:
    (critic,) = answer.values
    final = answer.values[critic][-1] if ends_in_value(ppo, answer) else 0.0
    advantages, returns = gae(ppo, rewards_of(ppo, answer, controls), answer.values[critic], final)
    answer.advantages, answer.returns = advantages, {critic: returns}


def ends_in_value(ppo: PpoSpec, answer: Answer) -> bool:
    """Whether the critic's word stands for what a cut-off answer would have scored."""
    return ppo.truncation == "bootstrap" and not answer.finished


def gae(ppo: PpoSpec, rewards: list[float], values: list[float], final: float) -> tuple[list[float], list[float]]:
    """Generalized advantage estimation from the last token to the first: advantages and returns."""
    next_value, next_advantage, advantages, returns = final, 0.0, list[float](), list[float]()
    for reward, value in zip(reversed(rewards), reversed(values[:-1]), strict=True):
        delta = reward + ppo.gamma * next_value - value
        next_advantage = delta + ppo.gamma * ppo.gae_lambda * next_advantage
        next_value = value
        advantages.insert(0, next_advantage)
        returns.insert(0, next_advantage + value)
    return advantages, returns


def safe(spec: SafeRlhfSpec, answer: Answer, controls: Controls) -> None:
    """Dai et al. 2024, section 3.3. Leaving the reference lowers the reward and raises the cost by as much."""
    costs = on_tokens(answer, "cost", answer.scores["cost"])
    costs = [cost + penalty for cost, penalty in zip(costs, penalties(spec, answer, controls), strict=True)]
    final = answer.values["critic"][-1] if ends_in_value(spec, answer) else 0.0
    gained, returns = gae(spec, rewards_of(spec, answer, controls), answer.values["critic"], final)
    # of costs all is told, cut off or not
    spent, cost_returns = gae(spec, costs, answer.values["cost_critic"], 0.0)
    m = controls.multiplier
    answer.advantages = [(gain - m * loss) / (1 + m) for gain, loss in zip(gained, spent, strict=True)]
    answer.returns = {"critic": returns, "cost_critic": cost_returns}


def groups_of(answers: list[Answer], size: int) -> list[list[Answer]]:
    """The answers to each prompt."""
    return [answers[start : start + size] for start in range(0, len(answers), size)]


def are_alike(numbers: list[float]) -> bool:
    """Also of one alone, and of none."""
    return len(set(numbers)) <= 1


def grouped(
    spec: GroupSpec, answers: list[Answer], controls: Controls, mini_batches: Sequence[range], terms: Terms
) -> None:
    """Every token has the advantage of its answer over the others to the same prompt, of those that count."""
    groups = groups_of(answers, spec.samples_per_prompt)
    for group in groups:
        counting = [answer for answer in group if answer.counts]
        totals = [sum(rewards_of(spec, answer, controls)) for answer in counting]
        for answer, advantage in zip(counting, compared(spec, totals), strict=True):
            answer.advantages = [advantage] * len(answer.tokens)
        alike = are_alike([answer.scores["reward"] for answer in counting])
        terms.add("group_alike", [float(alike)] * len(counting))
    if spec.dynamic_sampling is not None:
        for rows in mini_batches:
            leave_out(spec, answers, rows)
        terms.add("group_taken", [float(answer.is_taken) for answer in answers])


def compared(spec: GroupSpec, totals: list[float]) -> list[float]:
    """Shao et al. 2024, section 4.1.2; with the others as baseline: Ahmadian et al. 2024, eq. 9."""
    if are_alike(totals):
        return [0.0] * len(totals)
    mean, deviation = mean_and_deviation(totals)
    if spec.baseline == "mean":
        over = [total - mean for total in totals]
    else:
        over = [total - (sum(totals) - total) / (len(totals) - 1) for total in totals]
    return [x / (deviation + 1e-6) for x in over] if spec.scale == "group" else over


def leave_out(spec: GroupSpec, answers: list[Answer], rows: range) -> None:
    """DAPO, section 3.2: groups of one score teach nothing; of the others in a mini-batch the first are taken.

    Prompts i * rounds to (i + 1) * rounds - 1 of a step stand for one group that is trained on, so those of a
    mini-batch for as many as end in it.
    """
    assert spec.dynamic_sampling is not None
    rounds, samples = spec.dynamic_sampling.rounds, spec.samples_per_prompt
    left = rows.stop // samples // rounds - rows.start // samples // rounds
    for group in groups_of([answers[row] for row in rows], samples):
        is_taken = left > 0 and not are_alike([answer.scores["reward"] for answer in group if answer.counts])
        left -= is_taken
        for answer in group:
            answer.is_taken = is_taken


def best_taken(spec: RaftSpec, answers: list[Answer], controls: Controls, terms: Terms) -> None:
    """Dong et al. 2023: of each group the answer with the highest reward, the first of several."""
    for group in groups_of(answers, spec.samples_per_prompt):
        totals = [sum(rewards_of(spec, answer, controls)) if answer.counts else -math.inf for answer in group]
        for number, answer in enumerate(group):
            answer.is_taken = number == totals.index(max(totals))
            answer.advantages = [float(answer.is_taken and answer.counts)] * len(answer.tokens)
    terms.add("group_taken", [float(answer.is_taken) for answer in answers])


def with_baseline(spec: ReturnsSpec, answers: list[Answer], controls: Controls, terms: Terms) -> None:
    """The rewards that follow a token, less one number of its answer."""
    baselines = baselines_of(spec, answers)
    for answer, baseline in zip(answers, baselines, strict=True):
        follows, returns = 0.0, list[float]()
        for reward in reversed(rewards_of(spec, answer, controls)):
            follows = reward + spec.gamma * follows
            returns.insert(0, follows)
        # expected of the last token, and so by the one t tokens before it gamma^t of that
        ages = range(len(returns) - 1, -1, -1)
        answer.advantages = [x - spec.gamma**age * baseline for x, age in zip(returns, ages, strict=True)]
        if answer.is_trained:
            terms.add("return_mean", returns)


def baselines_of(spec: ReturnsSpec, answers: list[Answer]) -> list[float]:
    if isinstance(spec, RemaxSpec):
        # Li et al. 2023, eq. 5
        return [answer.greedy.shaped for answer in answers if answer.greedy is not None]
    if isinstance(spec, ReinforceSpec) and spec.baseline == "group":
        means = []
        for group in groups_of(answers, spec.samples_per_prompt):
            scores = [answer.shaped for answer in group if answer.counts]
            means += [sum(scores) / max(len(scores), 1)] * len(group)
        return means
    return [0.0] * len(answers)


def whiten(policy: PolicySpec, answers: list[Answer], mini_batches: Sequence[range]) -> None:
    """Mean 0 and variance 1 (Bessel's correction) over the tokens of the step, or of each mini-batch."""
    parts = {"none": [], "batch": [range(len(answers))], "mini_batch": mini_batches}
    for rows in parts[getattr(policy, "whiten", "none")]:
        trained = [answers[row] for row in rows if answers[row].is_trained]
        tokens = [x for answer in trained for x in answer.advantages]
        if not tokens:
            continue
        mean = sum(tokens) / len(tokens)
        variance = sum((x - mean) ** 2 for x in tokens) / max(len(tokens) - 1, 1)
        for answer in trained:
            answer.advantages = [(x - mean) / math.sqrt(variance + 1e-8) for x in answer.advantages]
