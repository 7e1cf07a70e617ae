"""Gradients of a mini-batch on this rank, and the optimizer step from them.

Both are the same for whole, sharded and tensor-parallel parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.config.model_settings import OptimizerSpec
from flexrlhf.engines.base import Moments
from flexrlhf.engines.model_ranks import ExpertRanks
from flexrlhf.engines.non_finite import NonFiniteStep
from flexrlhf.engines.optimizers import (
    ScheduledOptimizer,
    local,
)
from flexrlhf.weights.shards import GRADIENT_BUCKET_BYTES, make_buckets

CPU_GRADIENT_BUCKET_BYTES = 25_000_000
"""Bytes of gradients in one collective on CPUs: DistributedDataParallel's default.

Gloo adds up the parts of a buffer in different orders of the ranks, so with three ranks or more the last bits of a sum
depend on the size there.
"""


@dataclass(frozen=True)
class TrainedParameter:
    """One trained parameter of this rank and its gradient.

    parameter:   the float32 tensor that the optimizer updates.
    is_tp_shard: whether tensor-parallel ranks have different parts of it.
    is_partial:  whether the gradients of tensor-parallel ranks are summands of one gradient.
    has_experts: whether expert-parallel ranks have different parts of it.
    """

    parameter: Tensor
    is_tp_shard: bool = False
    is_partial: bool = False
    has_experts: bool = False

    @property
    def gradient(self) -> Tensor:
        """Part of the gradient on this rank; zeros where no row reached the parameter."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        return local(self.parameter.grad)


@dataclass(frozen=True)
class Gradients:
    """All gradients of one model on this rank.

    trained: the trained parameters, in the same order on all ranks.
    summed:  ranks whose gradients are summands: data-parallel and context-parallel ones.
    tp:      tensor-parallel group.
    copies:  ranks of ``summed`` that store the same part of each parameter; FSDP2 has summed over the others already.
             None: this rank alone.
    experts: ranks with other experts, and those with the same, over which gradients of experts are summed instead of
             ``copies``; None: as others.
    """

    trained: Sequence[TrainedParameter]
    summed: RankGroup
    tp: RankGroup
    copies: RankGroup | None
    experts: ExpertRanks | None = None

    def reduce(self) -> Tensor:
        """Sum over all ranks that computed summands; return the global norm (), the same on all of them.

        No sum is awaited by the host, whose next wait is for the norm.
        """
        if self.copies is not None:
            self._sum_buckets([item.gradient for item in self.trained if not self._is_apart(item)], self.copies)
        if self.experts is not None:
            self._sum_buckets([item.gradient for item in self.trained if self._is_apart(item)], self.experts.same)
        self._sum_buckets([item.gradient for item in self.trained if item.is_partial], self.tp)
        return self._norm()

    def _is_apart(self, item: TrainedParameter) -> bool:
        """Whether a gradient is summed over ranks with the same experts alone."""
        return self.experts is not None and item.has_experts

    def scale(self, factor: Tensor | float) -> None:
        """Multiply all gradients, in place."""
        for item in self.trained:
            item.gradient.mul_(factor)

    def num_bytes(self) -> int:
        """Bytes of all gradients on this rank."""
        return sum(item.gradient.nbytes for item in self.trained)

    def clear(self) -> None:
        """Free all gradients."""
        for item in self.trained:
            item.parameter.grad = None

    @staticmethod
    def _sum_buckets(gradients: Sequence[Tensor], ranks: RankGroup) -> None:
        """Sum ``gradients`` over ``ranks``, in place, bucket by bucket."""
        if ranks.group is None or not gradients:
            return
        most = CPU_GRADIENT_BUCKET_BYTES if gradients[0].device.type == "cpu" else GRADIENT_BUCKET_BYTES
        for bucket in make_buckets([gradient.nbytes for gradient in gradients], most):
            members = [gradients[index] for index in bucket]
            total = ranks.sum_in_order(torch.cat([member.reshape(-1) for member in members]))
            for member, part in zip(members, total.split([member.numel() for member in members]), strict=True):
                member.copy_(part.view_as(member))

    def _norm(self) -> Tensor:
        """Global norm (), in which every element counts once, whatever ranks it is sharded over."""
        apart = [item for item in self.trained if self._is_apart(item)]
        total = self._over_tp([item for item in self.trained if not self._is_apart(item)])
        if self.experts is not None:
            total += self.experts.parts.sum_in_order(self._over_tp(apart))
        copies = 1 if self.copies is None else len(self.copies.ranks)
        if copies < len(self.summed.ranks):
            # over all ranks, which so get the same bits
            total = self.summed.sum_in_order(total) / copies
        return total.sqrt().float()

    def _over_tp(self, trained: Sequence[TrainedParameter]) -> Tensor:
        """Return the sum of squares () of gradients on all tensor-parallel ranks."""
        split, replicated = (
            self._square_sum([item.gradient for item in trained if item.is_tp_shard == is_split])
            for is_split in (True, False)
        )
        return self.tp.sum_in_order(split) + replicated

    def _square_sum(self, gradients: Sequence[Tensor]) -> Tensor:
        norms = [torch.linalg.vector_norm(gradient).double() ** 2 for gradient in gradients]
        like = self.trained[0].gradient
        return torch.stack(norms).sum() if norms else like.new_zeros((), dtype=torch.float64)


class Update:
    """Optimizer, learning-rate schedule and loss scale of the parameters of ``gradients``.

    settings:     of the optimizer.
    gradients:    the trained parameters and their gradients.
    num_updates:  optimizer steps of the run.
    is_scaled:    whether the loss is scaled (float16).
    changed:      called after every update of the parameters.
    await_device: called before the host reads the norm of the gradients.
    """

    def __init__(
        self,
        settings: OptimizerSpec,
        gradients: Gradients,
        num_updates: int,
        is_scaled: bool,
        changed: Callable[[], None],
        await_device: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._gradients = gradients
        self._optimizer = ScheduledOptimizer.of(settings, [item.parameter for item in gradients.trained], num_updates)
        self._scale = LossScale(is_scaled)
        self._changed, self._await_device = changed, await_device
        self.gradient_bytes = 0

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss that backward starts from."""
        return loss * self._scale.factor

    @torch.no_grad()
    def step(self) -> Moments:
        """Reduce and clip the gradients, update the parameters; return the statistics of the update.

        For a gradient that no loss scale makes finite, it changes no parameter and raises NonFiniteStep.
        """
        if self._scale.is_enabled:
            self._gradients.scale(1 / self._scale.factor)
        norm = self._gradients.reduce()
        self.gradient_bytes = self._gradients.num_bytes()
        rate = self._optimizer.learning_rate
        self._await_device()
        try:
            allowed = self._scale.allows(norm)
        except FloatingPointError:
            self._gradients.clear()
            raise NonFiniteStep(self._optimizer.statistics(rate, norm, is_scaled=True, skipped=True)) from None
        if allowed:
            self._apply(norm)
        self._gradients.clear()
        return self._optimizer.statistics(rate, norm, self._scale.is_enabled, skipped=not allowed)

    def _apply(self, norm: Tensor) -> None:
        if self._settings.max_grad_norm is not None:
            self._gradients.scale((self._settings.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        self._optimizer.optimizer.step()
        self._optimizer.end_update()
        self._changed()

    def moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the optimizer's tensors of a parameter on this rank, by name."""
        return self._optimizer.moments(parameter)

    @property
    def numbers(self) -> dict[str, float]:
        """Numbers of the training state (``TrainingState``)."""
        scale = self._scale
        updates = float(self._optimizer.num_updates)
        return {"updates": updates, "loss_scale": scale.factor, "good_steps": float(scale.good_steps)}

    def load_numbers(self, numbers: Mapping[str, float]) -> None:
        """Set the numbers of the training state."""
        self._optimizer.num_updates = int(numbers["updates"])
        if self._scale.is_enabled:
            self._scale.factor, self._scale.good_steps = numbers["loss_scale"], int(numbers["good_steps"])

    def state(self) -> list[Tensor]:
        """Tensors of the optimizer's state on this rank."""
        return self._optimizer.tensors()


class LossScale:
    """Factor of the loss that keeps float16 gradients from underflow (Micikevicius et al. 2018, section 3.2).

    It is halved when a gradient overflows, and doubled after ``GROWTH_INTERVAL`` steps without one. Disabled it is 1.
    """

    GROWTH_INTERVAL = 2000

    def __init__(self, enabled: bool) -> None:
        self.factor = 2.0**16 if enabled else 1.0
        self.is_enabled = enabled
        self.good_steps = 0

    def allows(self, norm: Tensor) -> bool:
        """Return whether the update with a gradient of this norm () may be made, and adapt the factor.

        Raises FloatingPointError when no smaller factor can help.
        """
        if torch.isfinite(norm):
            self.good_steps += 1
            if self.is_enabled and self.good_steps % self.GROWTH_INTERVAL == 0:
                self.factor *= 2
            return True
        if not self.is_enabled or self.factor <= 1:
            raise FloatingPointError("the gradient is not finite; the weights were left as they were")
        self.factor, self.good_steps = self.factor / 2, 0
        return False
