"""Losses and combines by the name that an operator has: the package's, or those of a user's file."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from flexrlhf.config.algorithms import AlgorithmSpec
from flexrlhf.config.user_code.loading import load_function
from flexrlhf.engines.base import Batch, Loss
from flexrlhf.errors import UserError
from flexrlhf.objectives.context import Columns
from flexrlhf.objectives.functions import COMBINES, LOSSES, Combine
from flexrlhf.operators.columns import Width, column_of
from flexrlhf.operators.graph import Operator
from flexrlhf.operators.own_graph import is_own


def make_loss(function: str, algorithm: AlgorithmSpec) -> Loss:
    """Return the loss that a train operator names. Raises UserError where a user's function returns something else."""
    if not is_own(function):
        return LOSSES[function](algorithm)
    loss = _load(function)(algorithm)
    if not isinstance(loss, Loss):
        raise UserError(f"{function} returns {_kind(loss)}, not a flexrlhf.engines.base.Loss")
    return loss


def combine_of(function: str) -> Combine:
    """Return the mathematics of a combine."""
    return _load(function) if is_own(function) else COMBINES[function]


@cache
def _load(reference: str) -> Callable[..., Any]:
    """Load a user's function, once in a process: a run goes on with the code that it began with."""
    return load_function(reference)


def check_returned(operator: Operator, returned: Any, batch: Batch) -> None:
    """Raise UserError where a user's combine does not return the columns that ``operator`` writes, and statistics."""
    if not is_own(operator.function):
        return
    if not isinstance(returned, tuple) or len(returned) != 2 or not all(isinstance(part, dict) for part in returned):
        raise UserError(f"{operator.function} returns {_kind(returned)}, not (columns, statistics), two mappings")
    columns, statistics = returned
    _check_columns(operator, columns, batch)
    for name, value in statistics.items():
        if not isinstance(value, Tensor) or value.shape != (3,):
            raise UserError(
                f"{operator.function}: statistic {name!r} is {_kind(value)}, not flexrlhf.engines.base.moments(values)"
            )


def _check_columns(operator: Operator, columns: Columns, batch: Batch) -> None:
    for name in operator.writes:
        short = name.removesuffix(operator.suffix)
        if short not in columns:
            raise UserError(f"{operator.function} returns no column {short!r}, which {operator.name} writes")
        found, dims = columns[short], 1 if column_of(name).width == "row" else 2
        if not isinstance(found, Tensor) or found.dim() != dims or len(found) != len(batch):
            shape = _SHAPES.get(column_of(name).width, "(n, ...)")
            raise UserError(
                f"{operator.function}: column {short!r} is {_kind(found)}, not a tensor {shape} of {len(batch)} rows"
            )


_SHAPES: dict[Width, str] = {"row": "(n,)", "prompt": "(n, P)", "response": "(n, R)", "response+1": "(n, R+1)"}


def _kind(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
