"""The engine contract. An engine computes one placed model on this rank; it is told its replicas and knows no other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.operators.columns import Column, Lengths, Quantity
from flexrlhf.placement.placed import PlacedModel

Moments = dict[str, Tensor]
"""Statistic name → float64 (3,): weight, weighted sum, weighted sum of squares. They add up over rows and ranks."""


@dataclass(frozen=True)
class Batch:
    """Rows of this rank. ``rows`` int64 (n,): their global numbers; samples of one prompt are neighbours."""

    columns: Mapping[str, Tensor]
    rows: Tensor
    samples_per_prompt: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, column: str) -> Tensor:
        return self.columns[column]

    @property
    def mask(self) -> Tensor:
        """(n, R): the response tokens that count for a loss. Answers that count for nothing have none."""
        return self.columns["loss_mask"] if "loss_mask" in self.columns else self.columns["response_mask"]

    def select(self, part: slice) -> Batch:
        columns = {name: tensor[part] for name, tensor in self.columns.items()}
        return Batch(columns, self.rows[part], self.samples_per_prompt)


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn. Noise is a function of (seed, step, row, position), never of a process's state.

    ``temperature`` 0: greedy. The distribution that is drawn from: logits / temperature, without end tokens before
    ``min_tokens``, of that the ``top_k`` likeliest (0: all), of these the likeliest that make up ``top_p``.
    An answer ends with an end token, or with the first token after which its text (``decode`` of its tokens) contains
    one of ``stop``.
    """

    seed: int
    step: int
    temperature: float
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None


@dataclass(frozen=True)
class Outputs:
    """What a model computed: (n, R) log-probs or token scores, (n, R+1) values or (n,) scores.

    Of a policy also its entropy (n, R), and of one that shares its trunk with a critic the values (n, R+1).
    """

    quantity: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True)
class Totals:
    """Response tokens, sequences and prompts of the whole mini-batch over all replicas, known before backward."""

    tokens: float
    sequences: float
    prompts: float


EntropyUse = Literal["none", "value", "gradient"]
LossFunction = Callable[[Outputs, Batch, Totals], tuple[Tensor, Moments]]


@dataclass(frozen=True)
class Loss:
    """``function`` returns this part's contribution: contributions of all parts and ranks add up to the loss.

    ``statistics``: the names that it reports, so that a rank without rows reports the same ones. ``entropy``: whether
    it reads the policy's entropy, as a value or also for its gradient (which costs rows x R x vocabulary of memory).
    ``with_values``: whether it reads the values of a trunk with both heads. ``temperature``: of softmax(logits / T);
    None: that of sampling.
    """

    quantity: Quantity
    function: LossFunction
    statistics: tuple[str, ...]
    entropy: EntropyUse = "none"
    with_values: bool = False
    temperature: float | None = None


@dataclass(frozen=True)
class EngineContext:
    """All that an engine is told: the placed model, and where and with whom it computes.

    ``replicas``: the ranks that hold the same part of the model for other rows; ``tp``: those that hold the other parts
    for the same rows; ``alone``: the group of this rank by itself, where the engine's library wants one.
    ``num_updates``: optimizer steps of the whole run. ``kv_bytes``: of the keys and values that a rollout engine keeps
    on this rank. ``store``: of this placed model alone, for an engine whose library makes process groups by itself; no
    wait of theirs is longer than ``timeout_seconds``.
    """

    placed: PlacedModel
    lengths: Lengths
    temperature: float
    seed: int
    num_updates: int
    dp: RankGroup
    tp: RankGroup
    alone: dist.ProcessGroup | None
    device: torch.device
    kv_bytes: int
    store: dist.Store
    timeout_seconds: float = 1800.0


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes of tensors on this rank, counted wherever they lie. ``gradients``: at the last optimizer step.

    ``host``: those that lie in host memory.
    """

    weights: int
    gradients: int
    optimizer: int
    host: int = 0


class Engine(Protocol):
    """One placed model on this rank. Batches may be empty; all ranks of the model make the calls that communicate."""

    config: Any
    """The Hugging Face config of the model."""

    num_requests: int
    """Answers that this engine has drawn since it was made."""

    def generate(self, batch: Batch, sampling: Sampling, ahead: Sequence[Batch] = ()) -> dict[str, Tensor]:
        """Read prompts, prompt_mask; return tokens, attention_mask, response_mask, finished, rollout_logprobs.

        ``finished`` tells the finish reason: 1 at an end token or a stop string, 0 at the largest length.
        ``rollout_logprobs`` (n, R): of the tokens under the distribution that they were drawn from, 0 outside the
        answer. ``ahead``: batches that the next calls will ask for, in order and with the same ``sampling``: an engine
        may begin with them.
        """
        ...

    def forward(self, batch: Batch, columns: Sequence[Column], adapters: bool = True) -> dict[str, Tensor]:
        """Compute ``columns``, by name, for every row in one pass over the model, without gradients.

        ``adapters`` False: by the base weights alone.
        """
        ...

    def train(self, parts: Sequence[tuple[Batch, Loss]]) -> Moments:
        """One optimizer step on the sum of the losses, each of its own mini-batch; moments of this rank's rows."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """The live parameters under Hugging Face (and peft) names: of each what this rank holds, in any shape.

        Of a trained model the float32 master weights where the engine has them.
        """
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite what this rank holds of the named parameters. No collective."""
        ...

    def memory_usage(self) -> MemoryUsage: ...

    def offload(self) -> None:
        """Free the device's memory: weights and optimizer state wait in host memory."""
        ...

    def reload(self) -> None:
        """Take back what ``offload`` put away."""
        ...

    def close(self) -> None: ...


def moments(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """(weight, weighted sum, weighted sum of squares) of ``values``, float64."""
    values = values.detach().double()
    weights = torch.ones_like(values) if weights is None else weights.double()
    return torch.stack([weights.sum(), (weights * values).sum(), (weights * values * values).sum()])


def add_moments(total: Moments, part: Moments) -> None:
    for name, value in part.items():
        total[name] = total[name] + value if name in total else value
