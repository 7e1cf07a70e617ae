"""Arguments of a run that are given next to its YAML, in Python or on the command line, as settings (Fig. 5)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from flexrlhf.config.yaml_io import read_yaml

RATIO_FORM = "--placement-ratio 1,1,0.5,0.5"
"""A vector in a form that every shell passes on as it is."""
_ENTRY = r"\s*[-+.\w]+(?:/\w+)?\s*"
_PLAIN = re.compile(rf"(?=\s*[-+.\d]){_ENTRY}(?:,{_ENTRY})*")


def read_vector(text: str) -> list[Any] | None:
    """Return the entries of ``[1,1,0.5,1/2]``, or of the same without brackets; None for another text.

    The entries are checked with the spec.
    """
    try:
        vector = read_yaml(f"[{text}]" if _PLAIN.fullmatch(text) else text)
    except yaml.YAMLError:
        return None
    return vector if isinstance(vector, list) else None


def argument_settings(
    paths: Mapping[str, str | Path | None],
    placement_ratio: Sequence[float] | str | None = None,
    devices: int | None = None,
) -> Iterator[str]:
    """Yield the arguments as ``KEY=VALUE``, whose values are read as YAML; JSON is YAML. ``paths``: models by role."""
    for role, path in paths.items():
        if path is not None:
            yield f"models.{role}.init=null"
            yield f"models.{role}.path={json.dumps(str(path))}"
    if placement_ratio is not None:
        vector = placement_ratio if isinstance(placement_ratio, str) else json.dumps(list(placement_ratio))
        yield f"placement={vector}"
    if devices is not None:
        yield f"cluster.devices={devices}"
