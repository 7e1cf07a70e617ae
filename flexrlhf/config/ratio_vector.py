"""Vector of placement ratios: the one reader of its text, whoever gives it, and its exact numbers."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, PlainSerializer

from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.errors import UserError, shown

RATIO_FORM = "--placement-ratio 1,1,0.5,0.5"
"""A vector in a form that every shell passes on as it is."""
_ENTRY = r"\s*[-+.\w]+(?:/\w+)?\s*"
_PLAIN = re.compile(rf"(?=\s*[-+.\d]){_ENTRY}(?:,{_ENTRY})*")
_LARGE_EXPONENT = re.compile(r"[eE][-+]?[0-9_]{4}")


def read_vector(text: str) -> list[Any] | None:
    """Return the entries of ``[1,1,0.5,1/2]``, or of the same without brackets; None for another text.

    The entries are checked with the spec.
    """
    try:
        vector = read_yaml(f"[{text}]" if _PLAIN.fullmatch(text) else text)
    except yaml.YAMLError:
        return None
    return vector if isinstance(vector, list) else None


def vector_of_option(text: str) -> list[Any]:
    """Return the entries of ``--placement-ratio``. Raises UserError for another text."""
    vector = read_vector(text)
    if vector is None:
        spaces = " in one word, without spaces or in quotes" if re.match(r"\s*[\[\d.]", text) else ""
        raise UserError(f"--placement-ratio {text}: expected a vector such as 1,1,0.5,0.5{spaces}")
    if len(text) == 1 and Path(text).exists():
        raise UserError(
            f"--placement-ratio {text}: the name of a file here, which a shell puts in the place of "
            f"[1,1,0.5,0.5] without quotes; write 1,1,0.5,0.5 or '[1,1,0.5,0.5]', and for a vector of one '[{text}]'"
        )
    return vector


def vector_schema(schema: dict[str, Any]) -> None:
    """Allow in a JSON Schema a vector without brackets."""
    schema["anyOf"].append({"type": "string", "pattern": r"^[-+.\d].*,"})


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
"""A number of the YAML as a fraction: a ratio of a vector or of a mapping, a share, a weight."""
