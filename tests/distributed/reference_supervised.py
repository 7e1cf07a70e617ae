"""Training on the data set's responses, in one process, sequence by sequence: SFT, reward models, preferences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from chat_rows import written_by_assistant
from reference_losses import aggregate
from reference_models import Policy, Scorer, Trainee, saved
from reference_outcomes import counted
from reference_preferences import Compared, Pair, loss_of_pair, reward_of, size_of
from reference_responses import Result, Step, padded, read_examples
from reference_sampling import TIE, describe_responses
from reference_terms import Terms
from torch import Tensor
from transformers import AutoTokenizer

from flexrlhf.config.algorithms.supervised import DpoSpec, KtoSpec, PreferenceSpec, SftSpec
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
        self.has_ref = isinstance(spec.algorithm, DpoSpec | KtoSpec)
        self.trainee = Trainee(self.role, self.model.model, spec)

    def run(self) -> Result:
        steps = [self._step(step) for step in range(self.spec.steps)]
        return Result(steps, {self.role: saved(self.trainee.model)}, {self.role: self.trainee.moved()})

    def _step(self, step: int) -> Step:
        terms, algorithm = Terms(), self.spec.algorithm
        prompts, count = algorithm.prompts_per_step, algorithm.num_mini_batches
        batch = [self.examples[i] for i in step_indices(self.spec.seed, step, prompts, len(self.examples))]
        parts = [batch[i * prompts // count : (i + 1) * prompts // count] for i in range(count)]
        columns = self._columns(batch)
        points = [0.0] * count
        if isinstance(algorithm, KtoSpec):
            points = self._mismatch(parts, columns, terms)
        for _ in range(algorithm.epochs):
            for part, point in zip(parts, points, strict=True):
                self.trainee.update(self._loss(part, point, terms), terms)
        self._evaluate(terms)
        is_scored = algorithm.name == "reward"
        samples = range(algorithm.samples_per_prompt)
        trained = [is_scored or bool(self._written(example, sample)) for example in batch for sample in samples]
        rows = counted(["trained" if each else "no_tokens" for each in trained], in_flight=0)
        return Step(columns, terms.metrics() | rows)

    def _columns(self, batch: Sequence[Example]) -> dict[str, Tensor]:
        """Columns of the step before it trains."""
        if not self.has_ref:
            return {}
        found = [self._ref_logprobs(e, sample).tolist() for e in batch for sample in (0, 1)]
        return {"ref_logprobs": padded(found, self.spec.data.max_response_tokens, 0.0)}

    @torch.no_grad()
    def _mismatch(self, parts: list[list[Example]], columns: dict[str, Tensor], terms: Terms) -> list[float]:
        """Reference points of KTO, one per mini-batch: responses follow the next row's prompt, cyclically."""
        points: list[float] = []
        found: dict[str, list[list[float]]] = {"logprobs.mismatched": [], "ref_logprobs.mismatched": []}
        for part in parts:
            log_ratios, sizes = list[float](), list[float]()
            for example, before in zip(part, [*part[-1:], *part[:-1]], strict=True):
                turned = replace(example, responses=before.responses)
                for sample in (0, 1):
                    own, ref = self._logprobs(turned, sample), self._ref_logprobs(turned, sample)
                    written = self._written(before, sample)
                    log_ratios.append(float((own - ref)[written].sum()))
                    sizes.append(float(own.abs().sum()))
                    found["logprobs.mismatched"].append(own.tolist())
                    found["ref_logprobs.mismatched"].append(ref.tolist())
            points.append(max(0.0, sum(log_ratios) / len(log_ratios)))
            terms.add("reference_point", points[-1:] * len(sizes), sizes)
        columns |= {name: padded(each, self.spec.data.max_response_tokens, 0.0) for name, each in found.items()}
        rows = [point for part, point in zip(parts, points, strict=True) for _ in range(2 * len(part))]
        columns["reference_point"] = torch.tensor(rows)
        return points

    def _loss(self, examples: Sequence[Example], point: float, terms: Terms) -> Tensor:
        match self.spec.algorithm:
            case PreferenceSpec():
                return self._preference_loss(self.spec.algorithm, examples, point, terms)
            case SftSpec():
                return self._likelihood_loss(self.spec.algorithm, examples, terms)
        return self._pair_loss(examples, terms)

    def _likelihood_loss(self, sft: SftSpec, examples: Sequence[Example], terms: Terms) -> Tensor:
        """Negative log-likelihood of the responses, in chats of the assistant's tokens."""
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

    def _preference_loss(self, spec: PreferenceSpec, examples: Sequence[Example], point: float, terms: Terms) -> Tensor:
        pairs = [self._pair(example) for example in examples]
        losses = torch.stack([loss_of_pair(spec, pair, point, terms) for pair in pairs])
        terms.add("preference_loss", losses)
        margins = self._describe(spec, pairs, terms)
        self._count(margins, "pair_accuracy", terms)
        return losses.mean()

    def _describe(self, spec: PreferenceSpec, pairs: list[Pair], terms: Terms) -> Tensor:
        """Implicit rewards and log-probs of both responses. Returns the margins of the rewards."""
        rewards = [[reward_of(spec, response) for response in pair] for pair in pairs]
        sizes = [[size_of(spec, response) for response in pair] for pair in pairs]
        for sample, name in enumerate(("chosen", "rejected")):
            own = [pair[sample] for pair in pairs]
            terms.add(f"{name}_reward", torch.stack([each[sample] for each in rewards]), [s[sample] for s in sizes])
            terms.add(f"{name}_logprob", torch.stack([each.logprobs.sum() for each in own]))
        margins = torch.stack([chosen - rejected for chosen, rejected in rewards])
        terms.add("preference_margin", margins, [sum(size) for size in sizes])
        return margins

    def _count(self, gaps: Tensor, name: str, terms: Terms) -> None:
        """The sign of gaps near 0 is decided by rounding, and their metric is left out; one setting has adapters at
        0."""
        if gaps.abs().min() > TIE:
            terms.add(name, (gaps > 0).float())
        else:
            terms.leave_out(name)

    def _pair(self, example: Example) -> Pair:
        """Log-probs of both responses' trained tokens, by the policy and the reference, if there is one."""
        compared = []
        for sample in (0, 1):
            written = self._written(example, sample)
            refs = self._ref_logprobs(example, sample)[written] if self.has_ref else None
            compared.append(Compared(self._logprobs(example, sample)[written], refs))
        return compared[0], compared[1]

    def _written(self, example: Example, sample: int) -> list[int]:
        """Places of a response that are trained on."""
        response = example.responses[sample]
        if self.spec.data.chat_template is None:
            return list(range(len(response)))
        written = written_by_assistant(self.tokenizer, example.prompt, response)
        return [place for place, is_written in enumerate(written) if is_written]

    def _trained_logprobs(self, example: Example) -> Tensor:
        return self._logprobs(example, 0)[self._written(example, 0)]

    def _logprobs(self, example: Example, sample: int) -> Tensor:
        assert isinstance(self.model, Policy)
        return self.model.logprobs(list(example.prompt), list(example.responses[sample]))[0]

    @torch.no_grad()
    def _ref_logprobs(self, example: Example, sample: int) -> Tensor:
        """Log-probs by ref's own weights, or by the actor's without its adapters."""
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
            case PreferenceSpec():
                pairs = [self._pair(example) for example in examples]
                margins = self._describe(spec.algorithm, pairs, own := Terms())
                terms.take(own, "preference_margin", "eval_preference_margin")
                self._count(margins, "eval_accuracy", terms)
            case SftSpec():
                for example in examples:
                    terms.add("eval_nll", -self._trained_logprobs(example))
                assert isinstance(self.model, Policy)
                describe_responses(spec, self.model, self.tokenizer, terms)
            case _:
                scores = [self._scores(example) for example in examples]
                terms.add("eval_accuracy", [float(chosen > rejected) for chosen, rejected in scores])
