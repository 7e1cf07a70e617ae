"""Episodes of the reference: turns of the policy token by token, each followed by the reply of the environment.

The environment is called directly, in the process of the test.
"""

from __future__ import annotations

import json
import math
from hashlib import blake2b

import torch
from reference_models import Policy
from reference_responses import CRITICS, Episode, Response
from reference_sampling import Sampler
from reference_scores import function_of
from torch import Tensor

from flexrlhf.config.spec import Spec


def seed_of(spec: Spec, step: int, row: int) -> int:
    """By definition of a run: all samples of a prompt begin alike."""
    prompt = row // ((spec.eval.samples_per_prompt if step < 0 and spec.eval else None) or samples_of(spec))
    digest = blake2b(f"{spec.seed} {step} {prompt}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") // 2


def digest_of(text: str, reward: float) -> int:
    """By definition: of the messages and the reward, in 32 bits with a sign."""
    messages = (("", text),) if text else ()
    found = int.from_bytes(blake2b(repr((messages, reward)).encode(), digest_size=4).digest(), "little")
    return found - 2**32 * (found >= 2**31)


def digest_of_call(prompt: str) -> int:
    """By definition: of the call of a program, as JSON, and no reward."""
    found = blake2b(repr((json.dumps({"prompt": prompt}), 0.0)).encode(), digest_size=4).digest()
    return int.from_bytes(found, "little", signed=True)


def spaced(text: str) -> str:
    """Words behind others."""
    return text and " " + text


def samples_of(spec: Spec) -> int:
    return getattr(spec.algorithm, "samples_per_prompt", 1)


class EpisodeSampler:
    """Player of episodes."""

    def __init__(self, spec: Spec, sampler: Sampler) -> None:
        assert spec.environment is not None and spec.environment.path is not None
        self.spec, self.settings, self.sampler = spec, spec.environment, sampler
        found = function_of(spec.environment.path)
        self.game, self.is_program = getattr(found, "game", found), hasattr(found, "game")

    @torch.no_grad()
    def play(
        self,
        policy: Policy,
        response: Response,
        step: int,
        row: int,
        forced: Tensor | None = None,
        most: int | None = None,
        is_last: bool = True,
        received: int | None = None,
    ) -> int:
        """Go on with an episode, until it ends or has ``most`` further tokens; an episode that has had its last ones
        ends for want of room. Returns how often the policy was called. ``forced`` (R,): tokens to take at ties.
        ``received``: replies, that to its reset included, after which the next one is late."""
        if response.episode is None:
            if received == 0:
                return 0
            self._begin(response, step, row)
        left, calls, episode = most or self.sampler.longest, 0, response.episode
        assert episode is not None
        while episode.outcome == "going on" and (left > 0 or episode.awaits):
            is_cut = False
            if not episode.awaits:
                before = len(response.tokens)
                self._sample(policy, response, step, row, forced, left)
                left, calls = left - len(response.tokens) + before, calls + 1
                is_cut = is_last and left == 0
                longest = self.settings.turn_tokens or self.sampler.longest
                is_full = len(episode.turn) == longest or len(episode.text) == self.sampler.longest
                episode.awaits = response.finished or is_full or is_cut
            if episode.awaits and len(episode.digests) == received:
                break
            if episode.awaits:
                self._reply(response, 0 if is_cut else self.sampler.longest - len(episode.text))
                episode.awaits = False
        return calls

    def _begin(self, response: Response, step: int, row: int) -> None:
        assert response.example is not None
        response.episode = Episode(game=self.game())
        try:
            said = response.episode.game.reset(response.example.columns, seed_of(self.spec, step, row))
        except RuntimeError:
            response.episode.outcome = "failed"
            response.episode.digests.append(digest_of("", 0.0))
            return
        text = response.example.columns["prompt"] + spaced(said)
        response.episode.digests.append(digest_of_call(text) if self.is_program else digest_of(said, 0.0))
        response.prompt = response.prompt + self._ids(said)

    def _sample(
        self, policy: Policy, response: Response, step: int, row: int, forced: Tensor | None, left: int
    ) -> None:
        """Up to ``left`` tokens of a turn of the policy."""
        sampler, episode = self.sampler, response.episode
        assert episode is not None
        turn, response.finished = episode.turn, False
        longest = min(self.settings.turn_tokens or sampler.longest, len(turn) + left)
        while len(turn) < longest and len(episode.text) < sampler.longest and not response.finished:
            position = len(episode.text)
            scores = sampler.scores(sampler.next_logits(policy, [response])[0], position)
            perturbed = sampler.perturbed(scores, step, row, position)
            token, margin = sampler._choose(perturbed, step, row, position, forced)
            turn.append(token)
            episode.text.append(token)
            episode.positions.append(position)
            response.tokens.append(token)
            response.margins.append(margin)
            response.rollout_logprobs.append(float(scores.log_softmax(0)[token]))
            response.finished = sampler.finishes(turn)

    def _reply(self, response: Response, room: int) -> None:
        """The reply to a turn that has ended, behind which there is ``room``."""
        episode, turn = response.episode, response.episode.turn if response.episode else []
        assert episode is not None
        episode.ends.append(len(response.tokens) - 1)
        said = self.sampler.tokenizer.decode(turn[:-1] if turn[-1] in self.sampler.ends else turn)
        episode.turn, is_last = [], len(episode.ends) == self.settings.max_turns
        try:
            reply = episode.game.step(said)
        except RuntimeError:
            episode.rewards.append(math.nan)
            episode.outcome, response.finished = "failed", False
            episode.digests.append(digest_of("", 0.0))
            return
        ids = self._ids(reply.messages)
        has_room = room > 0 and (is_last or len(ids) < room)
        is_over, total = reply.is_done or not has_room or is_last, sum(episode.returned) + reply.reward
        if self.is_program:
            # a program returns the sum at its end
            episode.returned.append(reply.reward)
            goes_on = not is_over or (room > 0 and not is_last and not reply.is_done)
            episode.rewards.append(total if is_over else 0.0)
            episode.digests.append(digest_of_call(spaced(reply.messages)) if goes_on else digest_of("", total))
        else:
            episode.rewards.append(reply.reward)
            episode.digests.append(digest_of(reply.messages, reply.reward))
        if reply.is_done:
            episode.outcome, response.finished = "ended", True
        elif room == 0 or (not is_last and len(ids) >= room):
            episode.outcome, response.finished = "no room", False
        elif is_last:
            episode.outcome = "last turn"
        else:
            episode.text += ids
            response.margins += [math.inf] * len(ids)

    def _ids(self, text: str) -> list[int]:
        return self.sampler.tokenizer.encode(text, add_special_tokens=False)


def keep_sampled(response: Response) -> None:
    """Reduce log-probs and values of all tokens to the sampled ones; of values there is one after the last of these."""
    episode, places = response.episode, response.positions
    assert episode is not None
    episode.everywhere = {"ref_logprobs": response.ref_logprobs}
    response.ref_logprobs = [response.ref_logprobs[place] for place in places] if response.ref_logprobs else []
    for role, values in response.values.items():
        episode.everywhere[f"values{CRITICS[role]}"] = values
        response.values[role] = [values[place] for place in [*places, places[-1] + 1 if places else 0]]


def add_rewards(response: Response, compares_steps: bool = False) -> None:
    """Each turn's on its last token, in addition to scores of the response. ``compares_steps``: a turn is a step."""
    episode = response.episode
    assert episode is not None
    if compares_steps:
        response.step_ends = [int(place in set(episode.ends)) for place in range(len(response.tokens))]
    rewards = [0.0] * len(response.tokens)
    for end, reward in zip(episode.ends, episode.rewards, strict=True):
        rewards[end] = reward
    total = sum(rewards) if rewards else math.nan
    response.by_source["token_scores.environment"] = rewards
    by_model, tokens = response.scores.get("reward", 0.0), list(rewards)
    if tokens:
        tokens[-1] += by_model
    response.scores["reward"], response.token_scores["reward"] = total + by_model, tokens
