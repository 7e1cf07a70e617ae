"""Losses of trains and mathematics of combines by the name that an operator has: the package's, or a user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor

from flexrlhf.config.algorithms.base import AlgorithmSpec
from flexrlhf.config.code_loading import load_function
from flexrlhf.config.spec import Spec
from flexrlhf.engines.base import Batch, Loss, Moments
from flexrlhf.errors import UserError
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.objectives.parity import naming_tokens
from flexrlhf.objectives.surrogates import staleness
from flexrlhf.operators import named_functions
from flexrlhf.operators.columns import Column
from flexrlhf.operators.graph import Operator, is_own
from flexrlhf.operators.named_functions import NamedFunction
from flexrlhf.user_code.planning_calls import bounded_here


def _loaded(functions: Mapping[str, NamedFunction]) -> dict[str, Callable[..., Any]]:
    modules = {name: import_module(f"{__package__}.{each.module}") for name, each in functions.items()}
    return {name: getattr(modules[name], each.attribute or name) for name, each in functions.items()}


LOSSES: dict[str, Callable[[Any], Loss]] = _loaded(named_functions.LOSSES)
"""Function name → settings of the algorithm → loss."""
Combine = Callable[[Any, Batch, CombineContext], tuple[Columns, Moments]]
"""(settings, rows of this rank, context) → columns that it writes, statistics of this rank's rows."""
COMBINES: dict[str, Combine] = _loaded(named_functions.COMBINES)


def settings_of(function: str, spec: Spec) -> Any:
    """Return the section of the YAML that a combine reads: the algorithm's, unless it has one of its own."""
    named = named_functions.COMBINES.get(function)
    return spec.algorithm if named is None else getattr(spec, named.section)


def make_loss(function: str, algorithm: AlgorithmSpec) -> Loss:
    """Return the loss that a train operator names. Raises UserError if a user's function returns something else."""
    if not is_own(function):
        return LOSSES[function](algorithm)
    loss = _load(function)(algorithm)
    if not isinstance(loss, Loss):
        raise UserError(f"{function} returns {_kind(loss)}, not a flexrlhf.engines.base.Loss")
    return loss


def combine_of(function: str) -> Combine:
    """Return the mathematics of a combine."""
    return _load(function) if is_own(function) else COMBINES[function]


def computed_columns(
    operator: Operator, spec: Spec, batch: Batch, context: CombineContext, decode: Callable[[Sequence[int]], str]
) -> tuple[Columns, Moments]:
    """Return the columns that a combine writes, and its statistics, with the staleness of tokens that it selects.

    ``decode``: tokens to text, for errors. Raises UserError if a user's function returns something else.
    """
    with naming_tokens(decode, context.step):
        computed = combine_of(operator.function)(settings_of(operator.function, spec), batch, context)
    check_returned(operator, computed, batch)
    columns, statistics = computed
    if "policy_version" in batch.columns and columns.keys() & {"loss_mask", "kept_mask"}:
        statistics |= staleness(batch.with_columns(columns), context)
    return columns, statistics


@cache
def _load(reference: str) -> Callable[..., Any]:
    """Load a user's function, once in a process: a run goes on with the code that it began with."""
    with bounded_here(reference):
        return load_function(reference)


def check_returned(operator: Operator, returned: Any, batch: Batch) -> None:
    """Raise UserError if a user's combine does not return the columns that ``operator`` writes, and statistics."""
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
        found, dims = columns[short], 1 if Column.of(name).width == "row" else 2
        if not isinstance(found, Tensor) or found.dim() != dims or len(found) != len(batch):
            shape = _SHAPES.get(Column.of(name).width, "(n, ...)")
            raise UserError(
                f"{operator.function}: column {short!r} is {_kind(found)}, not a tensor {shape} of {len(batch)} rows"
            )


_SHAPES: dict[str, str] = {"row": "(n,)", "prompt": "(n, P)", "response": "(n, R)", "response+1": "(n, R+1)"}


def _kind(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
