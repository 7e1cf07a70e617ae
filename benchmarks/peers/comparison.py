"""Random inputs of both sides, and their differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexrlhf.config.algorithms.policy import PolicySpec
from flexrlhf.engines.base import Batch, Totals
from flexrlhf.objectives.context import CombineContext
from flexrlhf.trainer.controllers import first_state

ROWS, LENGTH, SAMPLES = 24, 11, 4
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Row:
    """One comparison.

    function:    the peer's, with its settings
    difference:  largest difference, over the larger of 1 and the largest number
    named:       why it is not 0; then ``left`` is the difference without that
    left:        None if nothing is named
    """

    function: str
    difference: float
    named: str = ""
    left: float | None = None

    @property
    def is_explained(self) -> bool:
        """Whether nothing is left but rounding."""
        return (self.difference if self.left is None else self.left) <= TOLERANCE


class Alone:
    """Collectives of a single rank."""

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, vector: Tensor) -> Tensor:
        return vector


@dataclass(frozen=True)
class Sample:
    """Random responses and outputs of models for them, float64 (ROWS, LENGTH) unless noted.

    mask:      int64; ``gaps``: with tokens in between that do not count
    scores:    (ROWS,), a multiple of 1/8, which is exact in float32
    greedy:    (ROWS,), likewise
    values:    (ROWS, LENGTH + 1)
    """

    mask: Tensor
    logprobs: Tensor
    new_logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor
    values: Tensor
    new_values: Tensor
    returns: Tensor
    scores: Tensor
    greedy: Tensor

    @property
    def counts(self) -> Totals:
        """Return the counts of a mini-batch of all rows."""
        return Totals(int(self.mask.sum()), ROWS, ROWS // SAMPLES)

    def batch(self, samples: int = SAMPLES, **columns: Tensor) -> Batch:
        """Return the columns as a batch of this project's; ``columns``: further ones."""
        mask = self.mask.to(torch.uint8)
        own = {
            "response_mask": mask,
            "loss_mask": mask,
            "finished": torch.ones(ROWS, dtype=torch.uint8),
            "scores": self.scores.float(),
            "logprobs": self.logprobs,
            "ref_logprobs": self.ref_logprobs,
            "advantages": self.advantages,
            "values": self.values,
            "returns": self.returns,
        }
        return Batch({**own, **columns}, torch.arange(ROWS), samples)


def make_sample(seed: int, gaps: bool = False) -> Sample:
    """Return random inputs."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    if gaps:
        mask = mask * (torch.rand(ROWS, LENGTH, generator=generator) < 0.7)
        mask[:, 0] = 1
    logprobs = -noise(ROWS, LENGTH).abs() - 0.1
    eighths = torch.randint(-24, 25, (2, ROWS), generator=generator) / 8
    return Sample(
        mask=mask,
        logprobs=logprobs,
        new_logprobs=logprobs + noise(ROWS, LENGTH, scale=0.4),
        ref_logprobs=logprobs + noise(ROWS, LENGTH, scale=0.7),
        advantages=noise(ROWS, LENGTH),
        values=noise(ROWS, LENGTH + 1),
        new_values=noise(ROWS, LENGTH + 1),
        returns=noise(ROWS, LENGTH),
        scores=eighths[0].double(),
        greedy=eighths[1].double(),
    )


def context(spec: PolicySpec, **state: float) -> CombineContext:
    """Return the context of one mini-batch on one rank; ``state``: changes to the first step's state."""
    return CombineContext([slice(0, ROWS)], Alone(), first_state(spec) | state)


def apart(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, over the larger of 1 and the largest number."""
    size = max(1.0, float(theirs.abs().max()))
    return float((ours.double() - theirs.double()).abs().max()) / size


def with_gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Return loss and its gradient at ``at``, in one vector."""
    point = at.clone().requires_grad_()
    value = loss(point)
    (slope,) = torch.autograd.grad(value, point)
    return torch.cat([value.detach().reshape(1), slope.reshape(-1)])


def print_rows(title: str, rows: Sequence[Row]) -> None:
    """Print a Markdown table of comparisons."""
    print(f"\n### {title}\n\n| function | largest difference | explanation |\n|---|---|---|")
    for row in rows:
        named = f"{row.named}; without it {row.left:.0e}" if row.left is not None else row.named
        mark = "" if row.is_explained else " **not explained**"
        print(f"| {row.function} | {row.difference:.0e}{mark} | {named} |")
