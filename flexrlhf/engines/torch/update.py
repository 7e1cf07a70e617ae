"""One optimizer step from accumulated gradients, the same for replicas, shards and tensor-parallel parts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flexrlhf.config.spec import OptimizerSpec
from flexrlhf.engines.base import Moments
from flexrlhf.engines.optimizers import learning_rate, make_optimizer, make_scheduler, state_tensors, update_statistics
from flexrlhf.engines.torch.gradients import Gradients, LossScale


class Update:
    """Optimizer, learning rate and loss scale over the parameters of ``gradients``. ``changed``: called after each."""

    def __init__(
        self,
        settings: OptimizerSpec,
        gradients: Gradients,
        num_updates: int,
        is_scaled: bool,
        changed: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._gradients = gradients
        self._optimizer = make_optimizer(settings, [item.parameter for item in gradients.trained])
        self._scheduler = make_scheduler(settings, self._optimizer, num_updates)
        self._scale = LossScale(is_scaled)
        self._changed = changed
        self.gradient_bytes = 0

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self._scale.factor

    @torch.no_grad()
    def step(self) -> Moments:
        """Sum, clip, update; the norm is that before clipping. Raises FloatingPointError and changes nothing."""
        self._gradients.scale(1 / self._scale.factor)
        norm = self._gradients.reduce()
        self.gradient_bytes = self._gradients.num_bytes()
        rate = learning_rate(self._optimizer)
        allowed = self._scale.allows(norm)
        if allowed:
            self._apply(norm)
        self._gradients.clear()
        return update_statistics(rate, norm, self._scale.is_enabled, skipped=not allowed)

    def _apply(self, norm: Tensor) -> None:
        if self._settings.max_grad_norm is not None:
            self._gradients.scale((self._settings.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        self._optimizer.step()
        self._scheduler.step()
        self._changed()

    def state(self) -> list[Tensor]:
        return state_tensors(self._optimizer)
