"""Supervised fine-tuning and reward-model training in one process, sequence by sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from reference_ppo import Policy, Result, Scorer, Step, Terms, Trainee, aggregate, copy_of, read_examples
from torch import Tensor
from transformers import AutoTokenizer

from flexrlhf.data import Example, step_indices
from flexrlhf.spec import SftSpec, Spec


def run_supervised(spec: Spec) -> Result:
    """One optimizer step per mini-batch of contiguous examples."""
    examples = read_examples(spec, AutoTokenizer.from_pretrained(spec.data.tokenizer))
    role = "actor" if spec.algorithm.name == "sft" else "reward"
    model_spec = getattr(spec.models, role)
    model = Policy(model_spec.path, 1.0) if role == "actor" else Scorer(model_spec.path)
    trainee = Trainee(model.model, model_spec)
    steps = []
    prompts, count = spec.algorithm.prompts_per_step, spec.algorithm.num_mini_batches
    for step in range(spec.steps):
        terms = Terms()
        batch = [examples[i] for i in step_indices(spec.seed, step, prompts, len(examples))]
        for _ in range(spec.algorithm.epochs):
            for i in range(count):
                part = batch[i * prompts // count : (i + 1) * prompts // count]
                loss = _sft_loss(spec, model, part, terms) if role == "actor" else _pair_loss(model, part, terms)
                terms.add(f"{role}_grad_norm", [trainee.update(loss)])
        steps.append(Step({}, terms.metrics()))
    return Result(steps, {role: copy_of(trainee.model)}, {role: trainee.moved()})


def _sft_loss(spec: Spec, model: Policy, examples: Sequence[Example], terms: Terms) -> Tensor:
    """Negative log-likelihood of the answers."""
    assert isinstance(spec.algorithm, SftSpec)
    losses = [-model.logprobs(list(e.prompt), list(e.responses[0]))[0] for e in examples]
    for loss in losses:
        terms.add("nll", loss)
    return aggregate(losses, spec.algorithm.loss_aggregation, spec.data.max_response_tokens)


def _pair_loss(model: Scorer, examples: Sequence[Example], terms: Terms) -> Tensor:
    """-log sigmoid(chosen - rejected), mean over pairs."""
    scores = [[model.score(list(e.prompt), list(response)) for response in e.responses] for e in examples]
    gaps = torch.stack([chosen - rejected for chosen, rejected in scores])
    losses = torch.log1p(torch.exp(-gaps))
    terms.add("pair_loss", losses)
    terms.add("pair_accuracy", (gaps > 0).float())
    return losses.mean()
