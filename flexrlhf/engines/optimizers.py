"""Optimizers, learning-rate schedules and their statistics, on torch and transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from flexrlhf.config.model_settings import OptimizerSpec
from flexrlhf.engines.base import Moments, moments

_SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def make_optimizer(settings: OptimizerSpec, parameters: Sequence[Tensor]) -> Optimizer:
    """Return the optimizer of ``settings`` over ``parameters``; of Adam torch's fused kernel, under every placement."""
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.name == "sgd":
        return SGD(parameters, lr=rate, weight_decay=decay)
    kind = AdamW if settings.name == "adamw" else Adam
    return kind(parameters, lr=rate, betas=settings.betas, eps=settings.eps, weight_decay=decay, fused=True)


class ScheduledOptimizer:
    """Optimizer of trained parameters, and its learning-rate schedule.

    optimizer:  of torch.
    """

    def __init__(self, settings: OptimizerSpec, optimizer: Optimizer, num_updates: int) -> None:
        """Begin the schedule: warm-up from 0, then constant, or down to its end at ``num_updates`` steps.

        The way down is linear or half a cosine, to ``final_ratio`` of the peak, which it reaches after the last update:
        the first update has the peak, if nothing warms up, and the last one is one update before the end.
        """
        self.optimizer, self._settings = optimizer, settings
        # closed forms of the number of updates, as transformers makes them
        self._scheduler: LambdaLR = get_scheduler(
            _SCHEDULES[settings.schedule],
            optimizer,
            num_warmup_steps=settings.warmup_steps,
            num_training_steps=num_updates,
        )
        if settings.final_ratio:
            self._scheduler.lr_lambdas = [partial(_raised, settings, each) for each in self._scheduler.lr_lambdas]

    @classmethod
    def of(cls, settings: OptimizerSpec, parameters: Sequence[Tensor], num_updates: int) -> ScheduledOptimizer:
        """Return the optimizer of ``settings`` over ``parameters``."""
        return cls(settings, make_optimizer(settings, parameters), num_updates)

    @property
    def learning_rate(self) -> Tensor:
        """Learning rate of the next update, float64 (1,)."""
        return torch.tensor([float(self.optimizer.param_groups[0]["lr"])], dtype=torch.float64)

    @property
    def num_updates(self) -> int:
        """Number of updates so far."""
        return int(self._scheduler.last_epoch)

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = torch.full_like(state["step"], number)
        scheduler = self._scheduler
        scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": number, "_step_count": number + 1})
        rates = [rate * factor(number) for rate, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = rates

    def end_update(self) -> None:
        """Go on to the learning rate of the next update."""
        self._scheduler.step()

    def moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the optimizer's tensors of ``parameter`` by name; zeros, as before the first update, where it has
        none."""
        is_sgd = self._settings.name == "sgd"
        state, names = self.optimizer.state[parameter], [] if is_sgd else ["exp_avg", "exp_avg_sq"]
        for name in names:
            if state.get(name) is None:
                state[name] = torch.zeros_like(parameter)
        if not is_sgd:
            # where the fused kernel makes it
            state.setdefault("step", torch.zeros((), device=parameter.device))
        return {name: state[name] for name in names}

    def tensors(self) -> list[Tensor]:
        """Tensors of the optimizer's state on this rank, without step counters."""
        states = self.optimizer.state.values()
        tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return [local(tensor) for tensor in tensors if tensor.ndim]

    @staticmethod
    def statistics(rate: Tensor, norm: Tensor, is_scaled: bool, skipped: bool) -> Moments:
        """Return the statistics of one update: learning rate, gradient norm, and whether an overflow has skipped it.

        rate:      learning rate (1,).
        norm:      global norm of the gradient before clipping; not reported for a skipped update.
        is_scaled: whether the run has a loss scale (float16); only then updates can be skipped.
        """
        statistics = {"learning_rate": moments(rate.to(norm.device)), "grad_norm": moments(norm.float().reshape(1))}
        if skipped:
            statistics["grad_norm"].zero_()
        if is_scaled:
            statistics["skipped"] = moments(torch.tensor([float(skipped)], device=norm.device))
        return statistics


def _raised(settings: OptimizerSpec, factor: Callable[[int], float], update: int) -> float:
    """Return the share of the peak learning rate at an update. ``factor``: the share where the way down ends at 0."""
    if update < settings.warmup_steps:
        return factor(update)
    return settings.final_ratio + (1 - settings.final_ratio) * factor(update)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of ``tensor``, sharing its memory: the shard of a DTensor, else all of it."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
