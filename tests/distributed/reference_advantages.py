"""The advantages of the reference's responses, algorithm by algorithm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from reference_experience import Controls, mean_and_deviation, on_tokens, penalties, rewards_of
from reference_responses import Response
from reference_terms import Terms

from flexrlhf.config.algorithms.grpo import GroupSpec, RaftSpec
from flexrlhf.config.algorithms.policy import PolicySpec
from flexrlhf.config.algorithms.ppo import PpoSpec, SafeRlhfSpec
from flexrlhf.config.algorithms.reinforce import ReinforceSpec, RemaxSpec, ReturnsSpec


def estimate_advantages(
    policy: PolicySpec, responses: list[Response], controls: Controls, mini_batches: Sequence[range], terms: Terms
) -> None:
    """Fill in advantages, and returns if critics learn from them."""
    match policy:
        case SafeRlhfSpec():
            for response in responses:
                safe(policy, response, controls)
        case PpoSpec():
            for response in responses:
                with_critic(policy, response, controls)
        case GroupSpec():
            grouped(policy, responses, controls, mini_batches, terms)
        case RaftSpec():
            best_taken(policy, responses, controls, terms)
        case ReturnsSpec():
            with_baseline(policy, responses, controls, terms)
    trained = [response for response in responses if response.is_trained]
    for response in trained:
        terms.add("advantage_mean", response.advantages)
        # values of the reward's critic
        for returns in list(response.returns.values())[:1]:
            terms.add("return_mean", returns)
        for values in list(response.values.values())[:1]:
            terms.add("value_mean", values[:-1])
    whiten(policy, responses, mini_batches)


def with_critic(ppo: PpoSpec, response: Response, controls: Controls) -> None:
    (critic,) = response.values
    final = response.values[critic][-1] if ends_in_value(ppo, response) else 0.0
    advantages, returns = gae(ppo, rewards_of(ppo, response, controls), response.values[critic], final)
    response.advantages, response.returns = advantages, {critic: returns}


def ends_in_value(ppo: PpoSpec, response: Response) -> bool:
    """Whether the critic's value replaces the score of a truncated response."""
    return ppo.truncation == "bootstrap" and not response.finished


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


def safe(spec: SafeRlhfSpec, response: Response, controls: Controls) -> None:
    """Dai et al. 2024, section 3.3. Leaving the reference lowers the reward and raises the cost by as much."""
    costs = on_tokens(response, "cost", response.scores["cost"])
    costs = [cost + penalty for cost, penalty in zip(costs, penalties(spec, response, controls), strict=True)]
    final = response.values["critic"][-1] if ends_in_value(spec, response) else 0.0
    gained, returns = gae(spec, rewards_of(spec, response, controls), response.values["critic"], final)
    # costs have all scores, cut off or not
    spent, cost_returns = gae(spec, costs, response.values["cost_critic"], 0.0)
    m = controls.multiplier
    response.advantages = [(gain - m * loss) / (1 + m) for gain, loss in zip(gained, spent, strict=True)]
    response.returns = {"critic": returns, "cost_critic": cost_returns}


def groups_of(responses: list[Response], size: int) -> list[list[Response]]:
    """The responses to each prompt."""
    return [responses[start : start + size] for start in range(0, len(responses), size)]


def are_alike(scores: list[float]) -> bool:
    """Whether all scores are equal; true for one or none."""
    return len(set(scores)) <= 1


def grouped(
    spec: GroupSpec, responses: list[Response], controls: Controls, mini_batches: Sequence[range], terms: Terms
) -> None:
    """Every token has its response's advantage over the other counted responses to the same prompt."""
    if any(response.siblings for response in responses):
        grouped_as_ended(spec, responses, controls, terms)
    else:
        grouped_whole(spec, responses, controls, terms)
    if spec.dynamic_sampling is not None:
        for rows in mini_batches:
            leave_out(spec, responses, rows)
    for response in responses:
        is_out = not response.is_taken and spec.counts_truncated
        if spec.truncation == "mask-loss" and not response.finished and not is_out:
            response.is_taken, response.reason = False, "truncated"


def grouped_whole(spec: GroupSpec, responses: list[Response], controls: Controls, terms: Terms) -> None:
    """The same over groups that are there as a whole."""
    groups = groups_of(responses, spec.samples_per_prompt)
    for group in groups:
        counting = [response for response in group if response.counts]
        totals = [sum(rewards_of(spec, response, controls)) for response in counting]
        for response, advantage in zip(counting, compared(spec, totals), strict=True):
            response.advantages = [advantage - cost for cost in costs_to_come(spec, response, controls)]
        if spec.supervision == "process":
            by_steps(spec, counting, controls, terms)
        alike = are_alike([response.scores["reward"] for response in counting])
        terms.add("group_alike", [float(alike)] * len(counting))


def grouped_as_ended(spec: GroupSpec, responses: list[Response], controls: Controls, terms: Terms) -> None:
    """The same over the responses that have ended by now."""
    counting = [response for response in responses if response.counts]
    for response in counting:
        response.total = sum(rewards_of(spec, response, controls))
        response.step_rewards = steps_of(rewards_of(spec, response, controls), response.step_ends)
    for response in counting:
        known = [each for each in response.siblings if each.total is not None]
        totals = [each.total for each in known]
        (advantage,) = (a for each, a in zip(known, compared(spec, totals), strict=True) if each is response)
        response.advantages = [advantage - cost for cost in costs_to_come(spec, response, controls)]
        terms.add("group_alike", [float(are_alike(totals))])
        if spec.supervision == "process":
            terms.add("response_steps", [float(len(response.step_rewards))])
            normalise_steps(spec, [response], [each.step_rewards for each in known])


def by_steps(spec: GroupSpec, group: list[Response], controls: Controls, terms: Terms) -> None:
    """Shao et al. 2024, section 4.1.3: normalised over all steps of the group; a token has the sum of steps that end at
    or after it."""
    for response in group:
        response.step_rewards = steps_of(rewards_of(spec, response, controls), response.step_ends)
    terms.add("response_steps", [float(len(response.step_rewards)) for response in group])
    normalise_steps(spec, group, [response.step_rewards for response in group])


def normalise_steps(spec: GroupSpec, responses: list[Response], known: list[dict[int, float]]) -> None:
    """Over the steps that are known of their group."""
    flat = [reward for each in known for reward in each.values()]
    mean, deviation = mean_and_deviation(flat) if flat else (0.0, 0.0)
    scale = deviation + 1e-6 if spec.scale == "group" else 1.0
    for response in responses:
        response.advantages = [
            sum((reward - mean) / scale for end, reward in response.step_rewards.items() if end >= token)
            for token in range(len(response.tokens))
        ]


def steps_of(rewards: list[float], ends: list[int]) -> dict[int, float]:
    """The reward of every step by its end; all other rewards belong to the last step."""
    places = [token for token, is_end in enumerate(ends) if is_end] or [len(rewards) - 1]
    found = {place: rewards[place] for place in places}
    found[places[-1]] += sum(reward for token, reward in enumerate(rewards) if token not in found)
    return found


def costs_to_come(spec: GroupSpec, response: Response, controls: Controls) -> list[float]:
    """Sum of the KL penalties from every token to the last, if they are separate from the scores."""
    if spec.kl is None or spec.kl.place != "advantages":
        return [0.0] * len(response.tokens)
    return list(accumulate(reversed(penalties(spec, response, controls))))[::-1]


def compared(spec: GroupSpec, totals: list[float]) -> list[float]:
    """Shao et al. 2024, section 4.1.2; with the others as baseline: Ahmadian et al. 2024, eq. 9."""
    if are_alike(totals):
        return [0.0] * len(totals)
    mean, deviation = mean_and_deviation(totals)
    if spec.baseline == "mean":
        over = [total - mean for total in totals]
    else:
        over = [total - (sum(totals) - total) / (len(totals) - 1) for total in totals]
    # a score equals the mean of its group up to rounding, whose sign would decide which tokens are clipped
    over = [x if abs(x) > 1e-9 else 0.0 for x in over]
    return [x / (deviation + 1e-6) for x in over] if spec.scale == "group" else over


def leave_out(spec: GroupSpec, responses: list[Response], rows: range) -> None:
    """DAPO, section 3.2: groups of one score teach nothing; of the others in a mini-batch the first are taken, in the
    order in which they were sampled, as many as its first attempt has."""
    groups = groups_of([responses[row] for row in rows], spec.samples_per_prompt)
    left = sum(group[0].attempt == 0 for group in groups)
    for group in sorted(groups, key=lambda group: (group[0].attempt, group[0].number)):
        alike = are_alike([response.scores["reward"] for response in group if response.counts])
        is_taken = left > 0 and not alike
        left -= is_taken
        for response in group:
            response.is_taken, response.reason = is_taken, "alike" if alike else "surplus"


def best_taken(spec: RaftSpec, responses: list[Response], controls: Controls, terms: Terms) -> None:
    """Dong et al. 2023: of each group the response with the highest reward, the first of several."""
    for group in groups_of(responses, spec.samples_per_prompt):
        totals = [sum(rewards_of(spec, response, controls)) if response.counts else -math.inf for response in group]
        for number, response in enumerate(group):
            response.is_taken, response.reason = number == totals.index(max(totals)), "not_best"
            response.advantages = [float(response.is_taken and response.counts)] * len(response.tokens)


def with_baseline(spec: ReturnsSpec, responses: list[Response], controls: Controls, terms: Terms) -> None:
    """The rewards that follow a token, less one value of its response."""
    baselines = baselines_of(spec, responses)
    for response, baseline in zip(responses, baselines, strict=True):
        follows, returns = 0.0, list[float]()
        for reward in reversed(_followed(spec, response, controls)):
            follows = reward + spec.gamma * follows
            returns.insert(0, follows)
        # expected of the last token, and so by the one t tokens before it gamma^t of that
        ages = range(len(returns) - 1, -1, -1)
        response.advantages = [x - spec.gamma**age * baseline for x, age in zip(returns, ages, strict=True)]
        if response.is_trained:
            terms.add("return_mean", returns)


def _followed(spec: ReturnsSpec, response: Response, controls: Controls) -> list[float]:
    """Rewards of the tokens; compared with whole responses, a response has its score on the last token."""
    if isinstance(spec, ReinforceSpec) and spec.baseline == "group" and response.tokens:
        scores = [*[0.0] * (len(response.tokens) - 1), response.shaped]
        return [score - cost for score, cost in zip(scores, penalties(spec, response, controls), strict=True)]
    return rewards_of(spec, response, controls)


def baselines_of(spec: ReturnsSpec, responses: list[Response]) -> list[float]:
    if isinstance(spec, RemaxSpec):
        # Li et al. 2023, eq. 5
        return [response.greedy.shaped for response in responses if response.greedy is not None]
    if isinstance(spec, ReinforceSpec) and spec.baseline == "group":
        for response in responses:
            response.total = response.shaped if response.counts else None
        groups = groups_of(responses, spec.samples_per_prompt)
        if any(response.siblings for response in responses):
            # those that have ended by now
            groups = [response.siblings for response in responses]
        known = [[each.total for each in group if each.total is not None] for group in groups]
        means = [sum(scores) / max(len(scores), 1) for scores in known]
        return [mean for mean in means for _ in range(len(responses) // len(groups))]
    return [0.0] * len(responses)


def whiten(policy: PolicySpec, responses: list[Response], mini_batches: Sequence[range]) -> None:
    """Mean 0 and variance 1 (Bessel's correction) over the tokens of the step, or of each mini-batch."""
    parts = {"none": [], "batch": [range(len(responses))], "mini_batch": mini_batches}
    for rows in parts[getattr(policy, "whiten", "none")]:
        trained = [responses[row] for row in rows if responses[row].is_trained]
        tokens = [x for response in trained for x in response.advantages]
        if not tokens:
            continue
        mean = sum(tokens) / len(tokens)
        variance = sum((x - mean) ** 2 for x in tokens) / max(len(tokens) - 1, 1)
        for response in trained:
            response.advantages = [(x - mean) / math.sqrt(variance + 1e-8) for x in response.advantages]
