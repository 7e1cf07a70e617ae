"""Base of every section of the YAML, and exact fractions."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import cache
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetJsonSchemaHandler,
    PlainSerializer,
    model_validator,
)
from pydantic_core import CoreSchema

from flexrlhf.config.descriptions import meaning, plain_text
from flexrlhf.errors import nearest, shown

_LARGE_EXPONENT = re.compile(r"[eE][-+]?[0-9_]{4}")


class StrictModel(BaseModel):
    """One mapping of the YAML, as a frozen pydantic model that refuses unknown keys and names the nearest valid one."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for key in value:
                if not cls._is_known(str(key)):
                    hint = nearest(str(key), cls._keys()) or f"; known: {', '.join(sorted(cls._keys()))}"
                    raise ValueError(f"unknown key {key!r}{hint}")
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON Schema of this mapping, in which every setting has a description."""
        schema = handler.resolve_ref_schema(handler(core))
        schema["description"] = plain_text(cls.__doc__)
        for name, field in cls.model_fields.items():
            described = schema.get("properties", {}).get(field.alias or name, {})
            if text := meaning(cls, name):
                described.setdefault("description", text)
        return schema

    @classmethod
    @cache
    def _keys(cls) -> frozenset[str]:
        return frozenset(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    def _is_known(cls, key: str) -> bool:
        return key in cls._keys()


def _exact(value: Any) -> Any:
    """Read 0.375 as 3/8, not as the nearest binary float; ``"1/3"`` is valid, too."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | Fraction):
        raise ValueError(f"expected a number such as 0.5 or '1/3', found {shown(value)}")
    text = str(value)
    try:
        # Fraction computes all digits of 1e999999999
        if _LARGE_EXPONENT.search(text):
            raise ValueError
        exact = Fraction(text)
        float(exact)
        return exact
    except (ValueError, ArithmeticError):
        raise ValueError(f"expected a number such as 0.5 or '1/3', found {shown(value)}") from None


def _written(value: Fraction) -> float | int | str:
    """Write a fraction so that reading it gives the same fraction back."""
    if value.denominator == 1:
        return int(value)
    return float(value) if Fraction(str(float(value))) == value else str(value)


Exact = Annotated[Fraction, BeforeValidator(_exact, json_schema_input_type=float | str), PlainSerializer(_written)]
