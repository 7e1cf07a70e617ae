"""Optimizers, learning-rate schedules and their statistics, on torch and transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
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


def make_scheduler(settings: OptimizerSpec, optimizer: Optimizer, num_updates: int) -> LRScheduler:
    """Return the learning-rate schedule: warm-up from 0, then constant, or down to its end at ``num_updates`` steps.

    The way down is linear or half a cosine, to ``final_ratio`` of the peak, which it reaches after the last update: the
    first update has the peak, if nothing warms up, and the last one is one update before the end.
    """
    scheduler: LambdaLR = get_scheduler(
        _SCHEDULES[settings.schedule],
        optimizer,
        num_warmup_steps=settings.warmup_steps,
        num_training_steps=num_updates,
    )
    if settings.final_ratio:
        scheduler.lr_lambdas = [partial(_raised, settings, factor) for factor in scheduler.lr_lambdas]
    return scheduler


def _raised(settings: OptimizerSpec, factor: Callable[[int], float], update: int) -> float:
    """Return the share of the peak learning rate at an update. ``factor``: the share where the way down ends at 0."""
    if update < settings.warmup_steps:
        return factor(update)
    return settings.final_ratio + (1 - settings.final_ratio) * factor(update)


def optimizer_moments(settings: OptimizerSpec, optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return the optimizer's tensors of ``parameter`` by name; zeros, as before the first update, where it has none."""
    state, names = optimizer.state[parameter], [] if settings.name == "sgd" else ["exp_avg", "exp_avg_sq"]
    for name in names:
        if state.get(name) is None:
            state[name] = torch.zeros_like(parameter)
    if settings.name != "sgd":
        # where the fused kernel makes it
        state.setdefault("step", torch.zeros((), device=parameter.device))
    return {name: state[name] for name in names}


def set_num_updates(optimizer: Optimizer, scheduler: LRScheduler, num_updates: int) -> None:
    """Continue optimizer and learning-rate schedule after ``num_updates`` updates."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = torch.full_like(state["step"], num_updates)
    scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": num_updates, "_step_count": num_updates + 1})
    # closed forms of the number of updates, as transformers makes them
    assert isinstance(scheduler, LambdaLR), "transformers' schedules are such"
    rates = [rate * factor(num_updates) for rate, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


def learning_rate(optimizer: Optimizer) -> Tensor:
    """Learning rate of the next update, float64 (1,)."""
    return torch.tensor([float(optimizer.param_groups[0]["lr"])], dtype=torch.float64)


def update_statistics(rate: Tensor, norm: Tensor, is_scaled: bool, skipped: bool) -> Moments:
    """Statistics of one update: learning rate, gradient norm, and whether it was skipped for an overflow.

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


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Tensors of the optimizer's state on this rank, without step counters."""
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [local(tensor) for tensor in tensors if tensor.ndim]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of ``tensor``, sharing its memory: the shard of a DTensor, else all of it."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
