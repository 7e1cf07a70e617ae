"""YAML as people mean it: by the rules of YAML 1.2 where PyYAML keeps those of 1.1.

``on`` is a word (a placement key of ours) and not true; ``1e-6`` is a number and not a text.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_BOOL = re.compile(r"^(true|True|TRUE|false|False|FALSE)$")
_FLOAT = re.compile(
    r"^([-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
)


class _Loader(yaml.SafeLoader):
    """Reads plain data only, like the loader that it derives from."""


class _Dumper(yaml.SafeDumper):
    """Quotes what the loader would not read back as a text."""


for _kind in (_Loader, _Dumper):
    _kind.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("bool", "float")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _kind.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfF"))
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def read_yaml(text: str) -> Any:
    """The data of one document. Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)  # noqa: S506 (derives from SafeLoader)


def write_yaml(data: Any) -> str:
    """A document that ``read_yaml`` reads back as the same data."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False)
