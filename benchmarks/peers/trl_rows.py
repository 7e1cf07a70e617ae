"""TRL's GRPO loss next to this project's: truncated responses, and the entropy bonus."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.comparison import LENGTH, ROWS, SAMPLES, Row, Sample, apart, context, make_sample, with_gradient
from flexrlhf.config.algorithms.grpo import GrpoSpec
from flexrlhf.engines.base import Outputs, Totals
from flexrlhf.objectives.group_advantages import group_advantages
from flexrlhf.objectives.losses import policy_loss

LOSSES = {
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "grpo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
"""``loss_type`` → ``loss_aggregation``."""
BONUS = 0.1
"""Factor of the entropy bonus."""


def rows() -> Iterator[Row]:
    """Yield the comparisons."""
    sample = make_sample(7)
    finished = torch.ones(ROWS)
    finished[::5] = 0
    spec = GrpoSpec(truncation="mask-loss", scale="none", kl=None, samples_per_prompt=SAMPLES)
    batch = sample.batch(finished=finished.to(torch.uint8))
    columns, _ = group_advantages(spec, batch, context(spec))
    grouped = sample.scores.view(-1, SAMPLES)
    theirs = (grouped - grouped.mean(1, keepdim=True)).view(-1, 1) * _kept(sample, finished)
    yield Row("advantages with `mask_truncated_completions`, from its lines", apart(columns["advantages"], theirs))
    for name in LOSSES:
        for level in ("token", "sequence"):
            yield _loss(sample, finished, name, level)


def _kept(sample: Sample, finished: Tensor) -> Tensor:
    return sample.mask.double() * finished[:, None]


def _loss(sample: Sample, finished: Tensor, name: str, level: str) -> Row:
    """Compare ``_compute_loss``, of a trainer that is its settings alone."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    mask, advantages = _kept(sample, finished), sample.advantages[:, 0]
    entropy = sample.values[:, :-1].abs()
    spec = GrpoSpec.model_validate(
        {
            "loss_aggregation": LOSSES[name],
            "ratio": level,
            "truncation": "mask-loss",
            "entropy_coefficient": BONUS,
            "entropy_aggregation": "token-mean",
            "kl": None,
            "samples_per_prompt": SAMPLES,
        }
    )
    batch = sample.batch(
        loss_mask=mask.to(torch.uint8), advantages=advantages[:, None].expand(ROWS, LENGTH), logprobs=sample.logprobs
    )
    totals = Totals(float(mask.sum()), float((mask.sum(1) > 0).sum()), ROWS / SAMPLES)
    function = policy_loss(spec).function
    ours = with_gradient(lambda new: function(Outputs(new, entropy + 0.1 * new), batch, totals)[0], sample.new_logprobs)
    inputs = {
        **{key: torch.zeros(ROWS, 1, dtype=torch.int64) for key in ("prompt_ids", "prompt_mask")},
        "completion_ids": torch.zeros(ROWS, LENGTH, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": sample.logprobs,
        "num_items_in_batch": mask.sum(),
    }

    def theirs(new: Tensor) -> Tensor:
        trainer = _trainer(name, level, (new, entropy + 0.1 * new, None))
        loss: Tensor = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
        return loss

    difference = apart(ours, with_gradient(theirs, sample.new_logprobs))
    return Row(f"`_compute_loss`, {name}, {level}, with a bonus and truncated responses, with gradient", difference)


def _trainer(name: str, level: str, outputs: tuple[Tensor, Tensor, None]) -> Any:
    """Return the attributes of a trainer that the loss reads. ``outputs``: log-probs and entropies of its model."""
    accelerator = SimpleNamespace(
        gather=lambda value: value, reduce=lambda value, reduction: value, num_processes=1, sync_gradients=True
    )
    return SimpleNamespace(
        model=SimpleNamespace(training=True),
        _get_per_token_logps_and_entropies=lambda *_, **__: outputs,
        loss_type=name,
        importance_sampling_level=level,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.2,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=LENGTH,
        entropy_coef=BONUS,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=True,
        aux_loss_enabled=False,
        accelerator=accelerator,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
