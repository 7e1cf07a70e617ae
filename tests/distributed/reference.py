"""Textbook versions of the algorithms that generate, in one process, which every placement must reproduce.

No KV cache, unless rows keep theirs: responses are sampled token by token, each time from all tokens before. Whatever
is computed of a response is computed of it alone: no padding, no batches.
Only the definition of a run comes from the package: its spec, the order of its data and the noise of its sampling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch
from reference_advantages import are_alike, estimate_advantages, groups_of
from reference_episodes import EpisodeSampler, add_rewards, keep_sampled
from reference_experience import describe, first_controls, is_scored, next_controls, shape_scores
from reference_losses import policy_loss, pretraining_loss, shared_loss, value_loss
from reference_models import Policy, Scorer, Trainee, Weights, copy_of, saved
from reference_outcomes import outcome_column, row_metrics
from reference_responses import Response, Result, Step, pad_columns, read_examples
from reference_sampling import Sampled, Sampler, describe_responses
from reference_scores import Judge
from reference_surrogates import reject, select
from reference_terms import Metric, Terms
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache

from flexrlhf.config.algorithms.grpo import GroupSpec
from flexrlhf.config.algorithms.policy import PolicySpec
from flexrlhf.config.algorithms.ppo import AcShareSpec, SafeRlhfSpec
from flexrlhf.config.algorithms.reinforce import RemaxSpec
from flexrlhf.config.placement_settings import PlacementMap
from flexrlhf.config.spec import Spec
from flexrlhf.data.examples import Example
from flexrlhf.data.order import step_indices
from flexrlhf.weights.stored_model import StoredModel

CRITICS = {"ppo": ("critic",), "safe-rlhf": ("critic", "cost_critic")}
"""Further models that are trained, by algorithm."""
Forced = dict[str, Tensor]
"""The columns ``tokens`` (rows, P + R) of sampled and greedy responses in a step."""


def _shadowed(placement: object) -> set[str]:
    """Return the roles that infer with shadows, where operators are placed."""
    entries = placement.operators if isinstance(placement, PlacementMap) else None
    names = {name for name, entry in (entries or {}).items() if entry.shadow}
    return {role for role, operator in (("actor", "generate"), ("critic", "values")) if operator in names}


def _received_replies(spec: Spec) -> dict[tuple[int, str, int], int]:
    """Return the replies that a run's rows have received at the end of each step, as it has recorded them: by step,
    column of the tokens and row."""
    found = {}
    for path in (spec.directory / "columns").glob("step*.safetensors"):
        step, parts = int(path.name.removeprefix("step").partition("-")[0]), load_file(path)
        for suffix in [name.removeprefix("turns") for name in parts if name.partition(".")[0] == "turns"]:
            counts = parts[f"turns{suffix}"] + (parts[f"replied{suffix}"][:, 0] != 0)
            rows, k = zip(parts["rows"].tolist(), counts, strict=True), spec.num_sequences
            found |= {(step, f"tokens{suffix}", row // k): int(number) for row, number in rows if row % k == 0}
    return found


class Reference:
    """One run. ``forced``: tokens of every step to take instead of the sampled ones, at ties only.

    ``before``: (n, k) of a run that goes on with step n, under its own lag, from one of lag k.
    """

    def __init__(
        self, spec: Spec, forced: Sequence[Forced] | None = None, before: tuple[int, int] | None = None
    ) -> None:
        assert isinstance(spec.algorithm, PolicySpec)
        self.spec, self.policy, self.forced, self.before = spec, spec.algorithm, forced, before
        self.actor, self.critics = self._models()
        # models that generate and compute log-probs and values: copies of the trained ones, as old as the rule says
        self.old_actor, self.old_critics = self._models()
        models = {"actor": self.actor, **self.critics}
        first = {"actor": self.policy.freeze_actor_steps}
        self.trainees = {role: Trainee(role, model.model, spec, first.get(role, 0)) for role, model in models.items()}
        ref, actor, temperature = spec.models.ref, spec.models.actor, self.policy.temperature
        if ref is not None and ref.share is not None and actor is not None and StoredModel(actor.path).has_adapters:
            ref = actor
        self.ref = Policy(ref, spec.seed, temperature) if ref is not None and ref.share is None else None
        self.versions = [self._weights()]
        self.tokenizer: Any = AutoTokenizer.from_pretrained(spec.data.tokenizer)
        has_source = spec.reward is not None or spec.models.reward is not None
        self.judges = [Judge(spec, "reward", self.tokenizer)] if has_source else []
        if isinstance(self.policy, SafeRlhfSpec):
            self.judges.append(Judge(spec, "cost", self.tokenizer))
        self.sampler, self.greedy_sampler = (Sampler(spec, self.tokenizer, each) for each in (temperature, 0.0))
        self.episodes, self.greedy_episodes = (
            None if spec.environment is None else EpisodeSampler(spec, each)
            for each in (self.sampler, self.greedy_sampler)
        )
        self.examples = read_examples(spec, self.tokenizer, spec.data.path)
        self.pretraining = self._pretraining_rows()
        self.controls = first_controls(self.policy)
        self.taken = 0
        # groups left out in place of which dynamic sampling has taken no prompt yet, and rows that each step has taken
        self.lacking, self.left_out, self.rows_taken = 0, 0, list[int]()
        # responses to a prompt by the step that took it and its number there, if they are generated in segments
        self.under_way: dict[tuple[int, int], list[Response]] = {}
        # replies that rows have at the end of a step, and how many are late
        self.received, self.late = _received_replies(spec) if spec.rollout.carries_late else {}, 0

    def run(self) -> Result:
        steps = [self._step(step) for step in range(self.spec.steps)]
        if self.policy.attempts > 1:
            for step, lagging in enumerate(steps):
                later = sum(self.rows_taken[step + 1 : step + 1 + self.spec.schedule.lag])
                lagging.metrics["rows_in_flight"] = Metric(later + lagging.carried, 1.0)
        weights = {role: saved(trainee.model) for role, trainee in self.trainees.items()}
        return Result(steps, weights, {role: trainee.moved() for role, trainee in self.trainees.items()})

    def _models(self) -> tuple[Policy, dict[str, Scorer]]:
        models, seed = self.spec.models, self.spec.seed
        has_values = isinstance(self.policy, AcShareSpec)
        actor = Policy(models.actor, seed, self.policy.temperature, has_values)  # type: ignore[arg-type]
        roles = CRITICS.get(self.policy.name, ())  # type: ignore[attr-defined]
        return actor, {role: Scorer(getattr(models, role), seed) for role in roles}

    def _pretraining_rows(self) -> list[Example]:
        ptx = self.policy.ptx
        return read_examples(self.spec, self.tokenizer, ptx.path, "responses", ptx.form) if ptx is not None else []

    def _weights(self) -> dict[str, Weights]:
        return {role: copy_of(trainee.model) for role, trainee in self.trainees.items()}

    def version(self, step: int) -> int:
        """Number of batches that the weights have been trained on when they generate batch ``step``."""
        every, lag, least = self.spec.sync.every, self.spec.schedule.lag, 0
        if self.before is not None:
            next_step, earlier = self.before
            if step < next_step + earlier:
                lag = earlier
            else:
                # weights of the first step are there when the run goes on
                least = next_step
        return every * (max(least, step - lag) // every)

    def _generated(self, step: int) -> int:
        """Number of batches that are generated when batch ``step`` is trained on."""
        lag, most = self.spec.schedule.lag, 0
        if self.before is not None:
            next_step, earlier = self.before
            lag, most = (earlier, 0) if step < next_step else (lag, next_step + earlier)
        return min(max(step + 1 + lag, most), self.spec.steps)

    def _step(self, step: int) -> Step:
        for role, model in {"actor": self.old_actor, **self.old_critics}.items():
            # a role without a copy for inference computes with the weights that training starts from
            version = self.version(step) if self._is_apart(role) else step
            model.model.load_state_dict(self.versions[version][role], strict=False)
        terms = Terms()
        left_out = self.left_out
        responses = self._experience(step)
        self.places = [response.place for response in responses]
        ruled = shape_scores(self.spec, responses, self.controls, terms)
        if isinstance(self.policy, RemaxSpec):
            greedy = [response.greedy for response in responses if response.greedy is not None]
            shape_scores(self.spec, greedy, self.controls, Terms())
        estimate_advantages(self.policy, responses, self.controls, self._mini_batches(), terms)
        reject(self.spec, step, responses, terms)
        select(self.spec, step, responses, self._mini_batches(), terms)
        describe(self.spec, responses, self.controls, terms)
        self._train(step, responses, terms)
        self.controls = next_controls(self.policy, self.controls, responses, ruled)
        self.versions.append(self._weights())
        for responses_to_prompt in self._evaluated(step, terms):
            self._score_evaluation(responses_to_prompt, terms)
        sampled = sum(1 if response.greedy is None else 2 for response in responses)
        if self.episodes is not None:
            # each turn is one
            both = [each for response in responses for each in (response, response.greedy) if each is not None]
            sampled = sum(len(response.episode.ends) for response in both if response.episode)
        if self.spec.rollout.segment_tokens is not None:
            sampled = self.requests
        carried = sum(not response.is_whole for group in self.under_way.values() for response in group)
        in_flight = (self._generated(step) - step - 1) * self.policy.num_prompts * self.policy.samples_per_prompt
        rows = row_metrics(self.spec, step, responses, in_flight + carried)
        metrics = terms.metrics() | {"rollout_requests": Metric(sampled, 1.0)} | rows
        if self.spec.rollout.carries_late:
            metrics["late_replies"] = Metric(self.late, 1.0)
        if self.policy.attempts > 1:
            metrics["prompts_taken"] = Metric(self.rows_taken[step] // self.policy.samples_per_prompt, 1.0)
            if self.spec.rollout.segment_tokens is not None:
                metrics["prompts_left_out"] = Metric(left_out, 1.0)
        if not responses:
            return Step({}, metrics, [], [], carried)
        columns = pad_columns(self.spec, responses, self.tokenizer.pad_token_id)
        columns["outcome"] = outcome_column(self.policy, responses)
        is_whole = self.spec.rollout.segment_tokens is None and self.policy.attempts == 1
        if self.policy.attempts > 1:
            columns["data_position"] = torch.tensor([response.position for response in responses])
        return Step(columns, metrics, responses, None if is_whole else self.places, carried)

    def _evaluated(self, step: int, terms: Terms) -> list[list[Response]]:
        if self.spec.eval is None or (step + 1) % (self.spec.eval.every or self.spec.steps):
            return []
        play = None if self.episodes is None else partial(EpisodeSampler, self.spec)
        return describe_responses(self.spec, self.actor, self.tokenizer, terms, play)

    def _score_evaluation(self, responses: list[Response], terms: Terms) -> None:
        """Scores of the responses to one evaluation prompt, and whether of k of them one is right."""
        settings = self.spec.eval
        assert settings is not None
        for response in responses:
            for judge in self.judges[:1]:
                judge.judge(response)
            if response.episode is not None:
                add_rewards(response)
                has_failed = response.episode.outcome == "failed"
                terms.add("eval_turns_mean", [] if has_failed else [float(len(response.episode.ends))])
                terms.add("eval_episode_failed", [float(has_failed)])
            score = response.scores["reward"]
            terms.add("eval_score_invalid", [float(not math.isfinite(score))])
            terms.add("eval_score_failed", [float(failed) for failed in response.has_failed.values()])
            terms.add("eval_text_cut", [float(cut) for cut in response.is_cut.values()])
            terms.add("eval_truncated", [float(not response.finished)])
            if math.isfinite(score):
                terms.add("eval_reward_mean", [score])
        right = [response.scores["reward"] >= settings.pass_score for response in responses]
        for name, k in (("eval_pass_at_1", 1), ("eval_pass_at_k", settings.pass_at or len(responses))):
            chosen = list(combinations(right, k))
            terms.add(name, [sum(map(any, chosen)) / len(chosen)])

    def _mini_batches(self) -> list[range]:
        """Rows of the contiguous prompts of every mini-batch, of sizes that differ by at most one."""
        if self.spec.rollout.segment_tokens is not None or self.policy.attempts > 1:
            return self._whole_in_mini_batches()
        policy = self.policy
        prompts, count, samples = policy.num_prompts, policy.num_mini_batches, policy.samples_per_prompt
        return [range(i * prompts // count * samples, (i + 1) * prompts // count * samples) for i in range(count)]

    def _whole_in_mini_batches(self) -> list[range]:
        """The same of the prompts that a step takes, of which each has places for all its segments or all attempts."""
        policy, first = self.policy, 0
        prompts, count = policy.num_prompts // policy.attempts, policy.num_mini_batches
        found = []
        for index in range(count):
            stop = (index + 1) * prompts // count * self.segments * policy.attempts * policy.samples_per_prompt
            last = first + sum(place < stop for place in self.places[first:])
            found.append(range(first, last))
            first = last
        return found

    def _attempted(self, step: int) -> list[Response]:
        """DAPO, section 3.2: while a mini-batch has fewer groups that differ than its share, it takes the next prompts
        of the data, as many as its share."""
        policy, found = self.policy, list[Response]()
        prompts, count = policy.num_prompts // policy.attempts, policy.num_mini_batches
        parts = [range(i * prompts // count, (i + 1) * prompts // count) for i in range(count)]
        for attempt in range(policy.attempts):
            for part in parts:
                keys = [(number, earlier) for number in part for earlier in range(attempt)]
                groups = [[r for r in found if (r.number, r.attempt) == key] for key in keys]
                scores = [[r.scores["reward"] for r in group if is_scored(policy, r)] for group in groups]
                if attempt and sum(not are_alike(each) for each in scores) >= len(part):
                    continue
                rows = dict[int, Response]()
                for number in part:
                    example = self.examples[step_indices(self.spec.seed, self.taken, 1, len(self.examples))[0]]
                    for sample in range(policy.samples_per_prompt):
                        row = (number * policy.attempts + attempt) * policy.samples_per_prompt + sample
                        rows[row] = Response.empty(example, self.taken)
                        rows[row].place, rows[row].number, rows[row].attempt = row, number, attempt
                    self.taken += 1
                self._sample(step, rows)
                for response in rows.values():
                    self._look_at(response)
                found += rows.values()
        self.rows_taken.append(len(found))
        return sorted(found, key=lambda response: response.place)

    @torch.no_grad()
    def _experience(self, step: int) -> list[Response]:
        if self.policy.attempts > 1 and self.spec.rollout.segment_tokens is None:
            return self._attempted(step)
        if self.policy.attempts > 1:
            self._replace(step)
            responses = self._continued(step)
            for response in responses:
                self._look_at(response)
            groups = groups_of(responses, self.policy.samples_per_prompt)
            scores = [[r.scores["reward"] for r in group if is_scored(self.policy, r)] for group in groups]
            self.left_out = sum(map(are_alike, scores))
            self.lacking += self.left_out
            return responses
        indices = step_indices(self.spec.seed, step, self.policy.num_prompts, len(self.examples))
        rows = [self.examples[i] for i in indices for _ in range(self.policy.samples_per_prompt)]
        if self.spec.rollout.segment_tokens is None:
            responses = [self._empty(example) for example in rows]
            self._sample(step, dict(enumerate(responses)))
        else:
            self._begin(step, dict(enumerate(rows[:: self.policy.samples_per_prompt])))
            responses = self._continued(step)
        for place, response in enumerate(responses):
            if self.spec.rollout.segment_tokens is None:
                response.place = place
            self._look_at(response)
        return responses

    def _sample(self, step: int, rows: dict[int, Response]) -> None:
        """Whole responses, by their rows, and greedy ones next to them."""
        self._extend(self.sampler, self.episodes, "tokens", step, rows)
        if greedy := {row: response.greedy for row, response in rows.items() if response.greedy is not None}:
            self._extend(self.greedy_sampler, self.greedy_episodes, "tokens.greedy", step, greedy)

    def _extend(
        self, sampler: Sampler, episodes: EpisodeSampler | None, column: str, step: int, rows: dict[int, Response]
    ) -> None:
        forced = {row: self._forced(step, column, row) for row in rows}
        if episodes is None:
            sampler.extend(self.old_actor, [Sampled(rows[row], step, row, forced[row]) for row in rows])
        else:
            for row, response in rows.items():
                episodes.play(self.old_actor, response, step, row, forced[row])
        for response in rows.values():
            response.versions = [self.version(step)] * len(response.tokens)
            self._record_experts(response)

    def _record_experts(self, response: Response) -> None:
        """Keep the experts that the sampling weights choose for a text, if log-probs and training take them; of tokens
        that were read in steps before, those that were chosen then."""
        if not self.actor.routers.replays or not response.tokens:
            return
        text, read = response.prompt + response.text, response.num_read
        found = self.old_actor.routers.experts(self.old_actor.model, text)
        if read:
            found = [torch.cat([old[:read], new[read:]]) for old, new in zip(response.experts, found, strict=True)]
        # the last token that is sampled is read by no call
        response.experts, response.num_read = found, len(response.prompt) + response.positions[-1]
        for routers in (self.old_actor.routers, self.actor.routers):
            routers.of_texts[tuple(text)] = found

    def _forced(self, step: int, column: str, place: int) -> Tensor | None:
        return None if self.forced is None else self.forced[step][column][place, self.spec.data.max_prompt_tokens :]

    def _is_apart(self, role: str) -> bool:
        """Whether inference with ``role`` has a copy on other ranks, if generation has."""
        placement = self.spec.placement
        names = placement.models if isinstance(placement, PlacementMap) else {}
        copied = {name.partition(".")[0] for name in names if "." in name} | _shadowed(placement)
        return not copied or role in copied

    @property
    def _has_engine_apart(self) -> bool:
        """Whether a rollout engine is on other ranks than the trained actor."""
        placement, roles = self.spec.placement, [role for role, model in self.spec.models if model is not None]
        if isinstance(placement, PlacementMap) and placement.operators is not None:
            return self.spec.rollout.engine == "vllm" and self.spec.rollout.logprobs == "reuse"
        entries = placement.models if isinstance(placement, PlacementMap) else placement or ()
        return self.spec.rollout.engine == "vllm" and len(entries) > len(roles)

    @property
    def segments(self) -> int:
        """Steps over which a response may be generated."""
        rollout, longest = self.spec.rollout, self.spec.data.max_response_tokens
        needed = math.ceil(longest / (rollout.segment_tokens or longest))
        return rollout.max_segments or needed

    def _begin(self, step: int, examples: dict[int, Example], position: int = 0) -> None:
        """Responses to further prompts, by their number in the step; ``position``: of the first in the data."""
        for index, (number, example) in enumerate(examples.items()):
            samples = range(self.policy.samples_per_prompt)
            self.under_way[step, number] = [self._empty(example, position + index) for _ in samples]

    def _empty(self, example: Example, position: int = 0) -> Response:
        """A response before its first token, with the greedy one next to it if that is its baseline."""
        response = Response.empty(example, position)
        if isinstance(self.policy, RemaxSpec):
            response.greedy = Response.empty(example)
        return response

    def _replace(self, step: int) -> None:
        """The next prompts of the data: a step's share, and one for each group that was left out, as far as there are
        places; they lie as far apart as they can."""
        places = self.policy.num_prompts
        wanted = self.policy.prompts_per_step + self.lacking
        number = min(wanted, places)
        indices = [step_indices(self.spec.seed, self.taken + each, 1, len(self.examples))[0] for each in range(number)]
        numbers = [math.floor(each * places / number) for each in range(number)]
        self._begin(step, {n: self.examples[i] for n, i in zip(numbers, indices, strict=True)}, self.taken)
        self.taken, self.lacking = self.taken + number, wanted - number
        self.rows_taken.append(number * self.policy.samples_per_prompt)

    def _continued(self, step: int) -> list[Response]:
        """The responses that are whole after a further segment of each that has not ended, by their places."""
        samples, most = self.policy.samples_per_prompt, self.spec.rollout.segment_tokens
        assert most is not None
        whole, sampled, greedy = [], list[Sampled](), list[Sampled]()
        every, behind = self.spec.checkpoint.every, step - self.spec.schedule.lag
        if every is not None and behind > 0 and behind % every == 0:
            # a run that goes on from the checkpoint after as many steps has no keys and values
            for each in (each for group in self.under_way.values() for r in group for each in (r, r.greedy) if each):
                each.cache = DynamicCache()
        for (of_step, number), group in self.under_way.items():
            for sample, response in enumerate(group):
                response.place = (number * self.segments + of_step % self.segments) * samples + sample
                for each, found, column in ((response, sampled, "tokens"), (response.greedy, greedy, "tokens.greedy")):
                    if each is not None and not self._has_ended(each):
                        forced = self._forced(step, column, response.place)
                        found.append(Sampled(each, of_step, number * samples + sample, forced))
        if self.episodes is None or self.greedy_episodes is None:
            self.sampler.extend(self.old_actor, sampled, most)
            self.greedy_sampler.extend(self.old_actor, greedy, most)
            self.requests = len(sampled) + len(greedy)
        else:
            self.requests = self.late = 0
            players = (self.episodes, sampled, "tokens"), (self.greedy_episodes, greedy, "tokens.greedy")
            for player, found, column in players:
                for each in found:
                    age, prompt = step - each.step, each.row // samples * self.segments + each.step % self.segments
                    received = self.received.get((step, column, prompt * samples + each.row % samples))
                    # a row that was late has more left
                    further = (age + 1) * most - len(each.response.tokens) if self.spec.rollout.carries_late else most
                    self.requests += player.play(
                        *(self.old_actor, each.response, each.step, each.row, each.forced, max(most, further)),
                        is_last=age == self.segments - 1,
                        received=received,
                    )
                    episode = each.response.episode
                    self.late += episode is None or episode.awaits
        for each in sampled:
            self._record_experts(each.response)
        for (of_step, number), group in list(self.under_way.items()):
            for response in group:
                response.versions += [self.version(step)] * (len(response.tokens) - len(response.versions))
            is_last = step - of_step == self.segments - 1
            both = [[each for each in (r, r.greedy) if each is not None] for r in group]
            ended = [r for r, pair in zip(group, both, strict=True) if is_last or all(map(self._has_ended, pair))]
            if self.spec.rollout.groups == "as-ended":
                for response in ended:
                    response.siblings = group
                    whole += [] if response.is_whole else [response]
                    response.is_whole = True
            if len(ended) == len(group):
                whole += [] if self.spec.rollout.groups == "as-ended" else group
                del self.under_way[of_step, number]
        return sorted(whole, key=lambda response: response.place)

    def _has_ended(self, response: Response) -> bool:
        if response.episode is not None:
            return response.episode.outcome != "going on"
        if self.episodes is not None:
            return False
        return response.finished or len(response.tokens) == self.sampler.longest

    def _look_at(self, response: Response) -> None:
        """Scores of a sampled response by models and other sources."""
        text = response.prompt, response.text
        # the correction for stale weights begins with the weights at the start of training
        policy = self.old_actor if self.policy.importance is None else self.actor
        response.logprobs = response.of_sampled(policy.logprobs(*text)[0]).tolist()
        if self._has_engine_apart and self.policy.importance is None:
            # nothing but the engine has the weights that sampled: its own log-probs serve, of every segment's weights
            response.logprobs = response.rollout_logprobs
        if self.policy.kl is not None:
            response.ref_logprobs = self._ref_logprobs(*text)
        response.values = {role: critic.everywhere(*text).tolist() for role, critic in self.old_critics.items()}
        if isinstance(self.policy, AcShareSpec):
            # one pass over one trunk computes both, unless an engine that only generates has computed the log-probs
            is_separate = self.spec.rollout.engine in ("torch", "vllm")
            response.values = {"actor": (self.actor if is_separate else policy).everywhere(*text).tolist()}
        if response.episode is not None:
            keep_sampled(response)
        for judge in self.judges:
            for each in (response, response.greedy):
                if each is not None:
                    judge.judge(each)
        for each in (response, response.greedy):
            if each is not None and each.episode is not None:
                add_rewards(each, getattr(self.spec.algorithm, "supervision", "outcome") == "process")

    def _ref_logprobs(self, prompt: list[int], response: list[int]) -> list[float]:
        """Log-probs by ref, by the actor as training began with its adapters, or by the actor without these."""
        if self.ref is not None:
            return self.ref.logprobs(prompt, response)[0].tolist()
        with self.actor.model.disable_adapter():
            return self.actor.logprobs(prompt, response)[0].tolist()

    def _train(self, step: int, responses: list[Response], terms: Terms) -> None:
        """Actor, then critics: each ``epochs`` times over the mini-batches."""
        for role, trainee in self.trainees.items():
            if step < trainee.first_step:
                continue
            for _ in range(self.policy.epochs):
                for number, rows in enumerate(self._mini_batches()):
                    if not rows:
                        continue
                    routers = self.actor.routers if role == "actor" else self.critics[role].routers
                    of_rows = [responses[row] for row in rows]
                    loss, settings = self._loss(role, step, number, of_rows, terms), self.spec.models.of(role)
                    assert settings is not None
                    trainee.update(loss + routers.loss(role, settings, terms), terms)
                    routers.balance(settings.router_bias_update_rate)
                    terms.add(f"{role}_expert_load_max", routers.fullest())

    def _loss(self, role: str, step: int, mini_batch: int, responses: list[Response], terms: Terms) -> Tensor:
        trained = [response for response in responses if response.is_trained]
        if role != "actor":
            return value_loss(self.spec, role, self.critics[role], trained, terms)
        loss = shared_loss if isinstance(self.policy, AcShareSpec) else policy_loss
        further = 0.0
        if self.pretraining:
            further = pretraining_loss(self.policy, self.actor, self._pretraining_of(step, mini_batch), terms)
        found = loss(self.spec, self.actor, trained, terms)
        if isinstance(self.policy, GroupSpec) and self.policy.counts_truncated:
            # a mean over all responses, of which some have no tokens; but for groups that are left out
            groups = (
                groups_of(responses, self.policy.samples_per_prompt) if self.policy.dynamic_sampling else [responses]
            )
            counted = [group for group in groups if any(r.is_trained or r.reason == "truncated" for r in group)]
            found = found * len(trained) / max(sum(map(len, counted)), 1)
        return found + further

    def _pretraining_of(self, step: int, mini_batch: int) -> list[Example]:
        """Pretraining rows of a mini-batch, in their own order: as many as it takes responses from the data."""
        policy, prompts = self.policy, self.policy.num_prompts // self.policy.attempts
        indices = step_indices(self.spec.seed, step, prompts * policy.samples_per_prompt, len(self.pretraining))
        first, last = (each * prompts // policy.num_mini_batches for each in (mini_batch, mini_batch + 1))
        rows = range(first * policy.samples_per_prompt, last * policy.samples_per_prompt)
        return [self.pretraining[indices[row]] for row in rows]
