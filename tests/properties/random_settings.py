"""Random values of every setting within the limits of the schema, so that new settings are tested at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from random import Random
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from flexrlhf.config.ratio_vector import Exact
from flexrlhf.config.strict_model import StrictModel

Raw = dict[str, Any]
Examples = Mapping[str, tuple[Any, ...]]
"""Valid values by ``Class.field``, for strings and for values that follow from other settings."""
SPAN = 6
"""Random numbers without an upper limit are at most so far above the lower one."""


APART: tuple[Any, ...] = ("apart",)
"""In the place of examples of a setting that is drawn elsewhere, by numbers of its own: the others stay the same."""


def random_settings(rng: Random, kind: type[StrictModel], examples: Examples, share: float) -> Raw:
    """Random settings of a section as in a YAML, each with probability ``share``; required ones always."""
    settings: Raw = {}
    for name, field in kind.model_fields.items():
        key = f"{kind.__name__}.{name}"
        if examples.get(key) is APART:
            continue
        if not field.is_required() and rng.random() >= share:
            continue
        if key in examples:
            if examples[key]:
                settings[field.alias or name] = rng.choice(examples[key])
        else:
            settings[field.alias or name] = _value(rng, key, field.annotation, field.metadata, examples, share)
    return settings


def _value(rng: Random, key: str, kind: Any, limits: list[Any], examples: Examples, share: float) -> Any:
    """A random value of a type; ``key``: the setting, for messages. A section inside a section has more settings."""
    if kind == Exact:
        return _fraction(rng)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _value(rng, key, arguments[0], [*limits, *_limits(kind)], examples, share)
    if origin in (Union, UnionType):
        return _value(rng, key, rng.choice(arguments), limits, examples, share)
    if origin is Literal:
        return rng.choice(arguments)
    if origin is tuple:
        kinds = [arguments[0]] * rng.randint(1, 3) if arguments[-1] is Ellipsis else arguments
        return [_value(rng, key, each, [], examples, share) for each in kinds]
    if kind is NoneType:
        return None
    if kind is bool:
        return rng.random() < 0.5
    if kind in (int, float):
        return _number(rng, kind, limits)
    if isinstance(kind, type) and issubclass(kind, StrictModel):
        return random_settings(rng, kind, examples, max(share, 0.4))
    raise AssertionError(f"{key}: no random value of {kind}; give examples")


def _limits(kind: Any) -> Iterator[Any]:
    for each in kind.__metadata__:
        yield from each.metadata if isinstance(each, FieldInfo) else [each]


def _number(rng: Random, kind: type, limits: list[Any]) -> float:
    lows = [each.ge for each in limits if isinstance(each, Ge)] + [each.gt for each in limits if isinstance(each, Gt)]
    tops = [each.le for each in limits if isinstance(each, Le)] + [each.lt for each in limits if isinstance(each, Lt)]
    low = max(lows, default=-SPAN / 2)
    span = min([top - low for top in tops] + [SPAN])
    if kind is int:
        return int(low) + rng.randint(0, int(span))
    return float(low) + span * rng.choice((0.25, 1e-3, 3e-7, 1 / 3, rng.random()))


def _fraction(rng: Random) -> Any:
    return rng.choice((1, 0.5, 0.375, "1/3", str(Fraction(rng.randint(1, 7), 7)), rng.random()))
