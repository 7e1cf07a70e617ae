"""What trains on responses of the data set, in one process, sequence by sequence: SFT, reward models, DPO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from chat_rows import written_by_assistant
from reference_losses import aggregate
from reference_models import Policy, Scorer, Trainee, saved
from reference_responses import Result, Step, padded, read_examples
from reference_sampling import TIE, describe_responses
from reference_terms import Terms
from torch import Tensor
from transformers import AutoTokenizer

from flexrlhf.config.algorithms import DpoSpec, SftSpec
from flexrlhf.config.spec import Spec
from flexrlhf.data.examples import Example
from flexrlhf.data.order import step_indices


class Supervised:
    """One run: an optimizer step per mini-batch of contiguous examples."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.role = spec, "reward" if spec.algorithm.name == "reward" else "actor"
        self.tokenizer: Any = AutoTokenizer.from_pretrained(spec.data.tokenizer)
        self.examples = read_examples(spec, self.tokenizer, spec.data.path)
        settings = getattr(spec.models, self.role)
        self.model = Scorer(settings, spec.seed) if self.role == "reward" else Policy(settings, spec.seed, 1.0)
        ref = spec.models.ref
        self.ref = Policy(ref, spec.seed, 1.0) if ref is not None and ref.share is None else None
        self.trainee = Trainee(self.role, self.model.model, spec)

    def run(self) -> Result:
        steps = [self._step(step) for step in range(self.spec.steps)]
        return Result(steps, {self.role: saved(self.trainee.model)}, {self.role: self.trainee.moved()})

    def _step(self, step: int) -> Step:
        terms, algorithm = Terms(), self.spec.algorithm
        prompts, count = algorithm.prompts_per_step, algorithm.num_mini_batches
        batch = [self.examples[i] for i in step_indices(self.spec.seed, step, prompts, len(self.examples))]
        columns = self._columns(batch)
        for _ in range(algorithm.epochs):
            for i in range(count):
                part = batch[i * prompts // count : (i + 1) * prompts // count]
                self.trainee.update(self._loss(part, terms), terms)
        self._evaluate(terms)
        return Step(columns, terms.metrics())

    def _columns(self, batch: Sequence[Example]) -> dict[str, Tensor]:
        """What the step computes before it trains."""
        if not isinstance(self.spec.algorithm, DpoSpec):
            return {}
        found = [self._ref_logprobs(e, sample).tolist() for e in batch for sample in (0, 1)]
        return {"ref_logprobs": padded(found, self.spec.data.max_response_tokens, 0.0)}

    def _loss(self, examples: Sequence[Example], terms: Terms) -> Tensor:
        match self.spec.algorithm:
            case DpoSpec():
                return self._preference_loss(self.spec.algorithm, examples, terms)
            case SftSpec():
                return self._likelihood_loss(self.spec.algorithm, examples, terms)
        return self._pair_loss(examples, terms)

    def _likelihood_loss(self, sft: SftSpec, examples: Sequence[Example], terms: Terms) -> Tensor:
        """Negative log-likelihood of the responses, of chats of what the assistant has written."""
        losses = [-self._trained_logprobs(example) for example in examples]
        for loss in losses:
            terms.add("nll", loss)
        return aggregate(losses, sft.loss_aggregation, self.spec.data.max_response_tokens)

    def _pair_loss(self, examples: Sequence[Example], terms: Terms) -> Tensor:
        """-log sigmoid(chosen - rejected), mean over pairs."""
        gaps = torch.stack([chosen - rejected for chosen, rejected in map(self._scores, examples)])
        losses = torch.log1p(torch.exp(-gaps))
        terms.add("pair_loss", losses)
        terms.add("pair_accuracy", (gaps > 0).float())
        return losses.mean()

    def _preference_loss(self, dpo: DpoSpec, examples: Sequence[Example], terms: Terms) -> Tensor:
        """DPO, eq. 7, with labels that are wrong for a share of the pairs; IPO, eq. 17."""
        gaps = torch.stack([self._gap(example) for example in examples])
        sizes = [self._size(example) for example in examples]
        smoothing = dpo.label_smoothing
        if dpo.loss == "ipo":
            losses = (gaps - 0.5 / dpo.beta).square()
        else:
            right = torch.sigmoid(dpo.beta * gaps)
            losses = -((1 - smoothing) * right.log() + smoothing * (1 - right).log())
        terms.add("preference_loss", losses)
        terms.add("preference_margin", dpo.beta * gaps, [dpo.beta * size for size in sizes])
        self._count(gaps, "pair_accuracy", terms)
        return losses.mean()

    def _count(self, gaps: Tensor, name: str, terms: Terms) -> None:
        """Of gaps near 0 rounding decides the sign, and their metric is left out; one has adapters that start at 0."""
        if gaps.abs().min() > TIE:
            terms.add(name, (gaps > 0).float())
        else:
            terms.leave_out(name)

    def _gap(self, example: Example) -> Tensor:
        """log-ratio to the reference of the chosen response less that of the rejected one."""
        log_ratios = [self._logprobs(example, sample) - self._ref_logprobs(example, sample) for sample in (0, 1)]
        chosen, rejected = (ratio[self._written(example, sample)].sum() for sample, ratio in enumerate(log_ratios))
        return chosen - rejected

    def _written(self, example: Example, sample: int) -> list[int]:
        """Places of a response that are trained on."""
        response = example.responses[sample]
        if self.spec.data.chat_template is None:
            return list(range(len(response)))
        written = written_by_assistant(self.tokenizer, example.prompt, response)
        return [place for place, is_written in enumerate(written) if is_written]

    def _trained_logprobs(self, example: Example) -> Tensor:
        return self._logprobs(example, 0)[self._written(example, 0)]

    @torch.no_grad()
    def _size(self, example: Example) -> float:
        """What the log-ratios are differences of."""
        return sum(float(self._ref_logprobs(example, sample).abs().sum()) for sample in (0, 1))

    def _logprobs(self, example: Example, sample: int) -> Tensor:
        assert isinstance(self.model, Policy)
        return self.model.logprobs(list(example.prompt), list(example.responses[sample]))[0]

    @torch.no_grad()
    def _ref_logprobs(self, example: Example, sample: int) -> Tensor:
        """By ref's own weights, or by the actor's without its adapters."""
        text = list(example.prompt), list(example.responses[sample])
        if self.ref is not None:
            return self.ref.logprobs(*text)[0]
        with self.model.model.disable_adapter():
            return self._logprobs(example, sample)

    def _scores(self, example: Example) -> list[Tensor]:
        assert isinstance(self.model, Scorer)
        return [self.model.score(list(example.prompt), list(response)) for response in example.responses]

    @torch.no_grad()
    def _evaluate(self, terms: Terms) -> None:
        """The model's metrics of the evaluation rows, if there are any."""
        spec = self.spec
        if spec.eval is None:
            return
        examples = read_examples(spec, self.tokenizer, spec.eval.path)
        match spec.algorithm:
            case DpoSpec():
                gaps = torch.stack([self._gap(example) for example in examples])
                sizes = [spec.algorithm.beta * self._size(example) for example in examples]
                terms.add("eval_preference_margin", spec.algorithm.beta * gaps, sizes)
                self._count(gaps, "eval_accuracy", terms)
            case SftSpec():
                for example in examples:
                    terms.add("eval_nll", -self._trained_logprobs(example))
                assert isinstance(self.model, Policy)
                describe_responses(spec, self.model, self.tokenizer, terms)
            case _:
                scores = [self._scores(example) for example in examples]
                terms.add("eval_accuracy", [float(chosen > rejected) for chosen, rejected in scores])
