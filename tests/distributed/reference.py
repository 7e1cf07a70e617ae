"""Algorithms that draw their answers, in one process, as the textbooks have them: what every placement must reproduce.

No padding, no KV cache, no batching: every answer is sampled token by token and computed as a sequence of its own. From
the package come only the definition of a run: its spec, the order of its data and the noise of its sampling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch
from reference_advantages import estimate_advantages
from reference_answers import Answer, Result, Step, pad_columns, read_examples
from reference_drawing import Drawing, describe_answers
from reference_experience import describe, first_controls, next_controls, shape_scores
from reference_losses import policy_loss, shared_loss, text_loss, value_loss
from reference_models import Policy, Scorer, Trainee, Weights, copy_of, saved
from reference_scores import Judge
from reference_terms import Metric, Terms
from torch import Tensor
from transformers import AutoTokenizer

from flexrlhf.config.algorithms import AcShareSpec, PolicySpec, RemaxSpec, SafeRlhfSpec
from flexrlhf.config.spec import Spec
from flexrlhf.data.examples import Example
from flexrlhf.data.order import step_indices

CRITICS = {"ppo": ("critic",), "safe-rlhf": ("critic", "cost_critic")}
"""Models of their own that are trained beside the actor, by algorithm."""
Forced = dict[str, Tensor]
"""Of a step: the columns ``tokens`` (rows, P + R) of drawn and greedy answers."""


class Reference:
    """One run. ``forced``: tokens of every step to take instead of the drawn ones, at ties only."""

    def __init__(self, spec: Spec, forced: Sequence[Forced] | None = None) -> None:
        assert isinstance(spec.algorithm, PolicySpec)
        self.spec, self.policy, self.forced = spec, spec.algorithm, forced
        self.actor, self.critics = self._models()
        # what generates and computes log-probs and values: copies of the trained ones, as old as the rule says
        self.old_actor, self.old_critics = self._models()
        models = {"actor": self.actor, **self.critics}
        first = {"actor": self.policy.freeze_actor_steps}
        self.trainees = {role: Trainee(role, model.model, spec, first.get(role, 0)) for role, model in models.items()}
        ref, temperature = spec.models.ref, self.policy.temperature
        self.ref = Policy(ref, spec.seed, temperature) if ref is not None and ref.share is None else None
        self.versions = [self._weights()]
        self.tokenizer: Any = AutoTokenizer.from_pretrained(spec.data.tokenizer)
        self.judges = [Judge(spec, "reward", self.tokenizer)]
        if isinstance(self.policy, SafeRlhfSpec):
            self.judges.append(Judge(spec, "cost", self.tokenizer))
        self.drawing = Drawing(spec, self.tokenizer, temperature)
        self.examples = read_examples(spec, self.tokenizer, spec.data.path)
        self.texts = self._further_texts()
        self.controls = first_controls(self.policy)

    def run(self) -> Result:
        steps = [self._step(step) for step in range(self.spec.steps)]
        weights = {role: saved(trainee.model) for role, trainee in self.trainees.items()}
        return Result(steps, weights, {role: trainee.moved() for role, trainee in self.trainees.items()})

    def _models(self) -> tuple[Policy, dict[str, Scorer]]:
        models, seed = self.spec.models, self.spec.seed
        has_values = isinstance(self.policy, AcShareSpec)
        actor = Policy(models.actor, seed, self.policy.temperature, has_values)  # type: ignore[arg-type]
        roles = CRITICS.get(self.policy.name, ())  # type: ignore[attr-defined]
        return actor, {role: Scorer(getattr(models, role), seed) for role in roles}

    def _further_texts(self) -> list[Example]:
        ptx = self.policy.ptx
        return read_examples(self.spec, self.tokenizer, ptx.path, "responses", ptx.form) if ptx is not None else []

    def _weights(self) -> dict[str, Weights]:
        return {role: copy_of(trainee.model) for role, trainee in self.trainees.items()}

    def version(self, step: int) -> int:
        """How many batches the weights have seen that generate batch ``step``: every k, and lag behind."""
        every = self.spec.sync.every
        return every * (max(0, step - self.spec.schedule.lag) // every)

    def _step(self, step: int) -> Step:
        weights = self.versions[self.version(step)]
        for role, model in {"actor": self.old_actor, **self.old_critics}.items():
            model.model.load_state_dict(weights[role], strict=False)
        terms = Terms()
        answers = self._experience(step)
        terms.add("policy_lag", [float(step - answer.version) for answer in answers])
        ruled = shape_scores(self.spec, answers, self.controls, terms)
        if isinstance(self.policy, RemaxSpec):
            greedy = [answer.greedy for answer in answers if answer.greedy is not None]
            shape_scores(self.spec, greedy, self.controls, Terms())
        estimate_advantages(self.policy, answers, self.controls, self._mini_batches(), terms)
        describe(self.spec, answers, self.controls, terms)
        self._train(step, answers, terms)
        self.controls = next_controls(self.policy, self.controls, answers, ruled)
        self.versions.append(self._weights())
        for answers_to_prompt in describe_answers(self.spec, self.actor, self.tokenizer, terms):
            self._score_held_out(answers_to_prompt, terms)
        drawn = sum(1 if answer.greedy is None else 2 for answer in answers)
        metrics = terms.metrics() | {"rollout_requests": Metric(drawn, 1.0)}
        return Step(pad_columns(self.spec, answers, self.tokenizer.pad_token_id), metrics, answers)

    def _score_held_out(self, answers: list[Answer], terms: Terms) -> None:
        """What the answers to one held-out prompt score, and whether of k of them one is right."""
        settings = self.spec.eval
        assert settings is not None
        for answer in answers:
            self.judges[0].judge(answer)
            score = answer.scores["reward"]
            terms.add("eval_score_invalid", [float(not math.isfinite(score))])
            terms.add("eval_score_failed", [float(failed) for failed in answer.has_failed.values()])
            terms.add("eval_truncated", [float(not answer.finished)])
            if math.isfinite(score):
                terms.add("eval_reward_mean", [score])
        right = [answer.scores["reward"] >= settings.pass_score for answer in answers]
        for name, k in (("eval_pass_at_1", 1), ("eval_pass_at_k", settings.pass_at or len(answers))):
            chosen = list(combinations(right, k))
            terms.add(name, [sum(map(any, chosen)) / len(chosen)])

    def _mini_batches(self) -> list[range]:
        """Rows of the contiguous prompts of every mini-batch, of sizes that differ by at most one."""
        policy = self.policy
        prompts, count, samples = policy.num_prompts, policy.num_mini_batches, policy.samples_per_prompt
        return [range(i * prompts // count * samples, (i + 1) * prompts // count * samples) for i in range(count)]

    @torch.no_grad()
    def _experience(self, step: int) -> list[Answer]:
        indices = step_indices(self.spec.seed, step, self.policy.num_prompts, len(self.examples))
        rows = [self.examples[i] for i in indices for _ in range(self.policy.samples_per_prompt)]
        answers = [self._drawn(step, row, example) for row, example in enumerate(rows)]
        for answer in answers:
            self._look_at(answer)
        return answers

    def _drawn(self, step: int, row: int, example: Example) -> Answer:
        answer = self._answer(self.drawing, "tokens", step, row, example)
        if isinstance(self.policy, RemaxSpec):
            greedy = Drawing(self.spec, self.tokenizer, 0.0)
            answer.greedy = self._answer(greedy, "tokens.greedy", step, row, example)
        return answer

    def _answer(self, drawing: Drawing, column: str, step: int, row: int, example: Example) -> Answer:
        width = self.spec.data.max_prompt_tokens
        forced = None if self.forced is None else self.forced[step][column][row, width:]
        answer = drawing.answer(self.old_actor, list(example.prompt), step, row, forced)
        answer.version, answer.example = self.version(step), example
        return answer

    def _look_at(self, answer: Answer) -> None:
        """What models and other sources say of a drawn answer."""
        text = answer.prompt, answer.tokens
        # what corrects for stale weights begins with those that training now starts from
        policy = self.old_actor if self.policy.importance is None else self.actor
        answer.logprobs = policy.logprobs(*text)[0].tolist()
        if self.policy.kl is not None:
            answer.ref_logprobs = self._ref_logprobs(*text)
        answer.values = {role: critic.everywhere(*text).tolist() for role, critic in self.old_critics.items()}
        if isinstance(self.policy, AcShareSpec):
            # one pass over one trunk tells both, unless an engine that generates alone has told the log-probs
            is_separate = self.spec.rollout.engine != "transformers"
            answer.values = {"actor": (self.actor if is_separate else policy).everywhere(*text).tolist()}
        for judge in self.judges:
            for each in (answer, answer.greedy):
                if each is not None:
                    judge.judge(each)

    def _ref_logprobs(self, prompt: list[int], answer: list[int]) -> list[float]:
        """By ref's own weights, or by the actor's without its adapters."""
        if self.ref is not None:
            return self.ref.logprobs(prompt, answer)[0].tolist()
        with self.actor.model.disable_adapter():
            return self.actor.logprobs(prompt, answer)[0].tolist()

    def _train(self, step: int, answers: list[Answer], terms: Terms) -> None:
        """Actor, then critics: each ``epochs`` times over the mini-batches."""
        for role, trainee in self.trainees.items():
            if step < trainee.first_step:
                continue
            for _ in range(self.policy.epochs):
                for rows in self._mini_batches():
                    trained = [answers[row] for row in rows if answers[row].is_trained]
                    trainee.update(self._loss(role, step, rows, trained, terms), terms)

    def _loss(self, role: str, step: int, rows: range, answers: list[Answer], terms: Terms) -> Tensor:
        if role != "actor":
            return value_loss(self.spec, role, self.critics[role], answers, terms)
        loss = shared_loss if isinstance(self.policy, AcShareSpec) else policy_loss
        beside = text_loss(self.policy, self.actor, self._texts_of(step, rows), terms) if self.texts else 0.0
        return loss(self.spec, self.actor, answers, terms) + beside

    def _texts_of(self, step: int, rows: range) -> list[Example]:
        """As many texts as answers, in an order of their own."""
        num_rows = self.policy.num_prompts * self.policy.samples_per_prompt
        indices = step_indices(self.spec.seed, step, num_rows, len(self.texts))
        return [self.texts[indices[row]] for row in rows]
