"""Secrets of reward services: a YAML names environment variables, whose values are read where a request is sent.

So no secret is in the spec, and in nothing that is written or printed from it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import SplitResult, parse_qsl, quote, urlsplit

from flexrlhf.errors import UserError

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_SECRET_NAME = re.compile(
    r"auth|cookie|token|secret|passw|credential|signature|(api|access|private)[-_]?key", re.IGNORECASE
)
_SECRET_VALUE = re.compile(r"\s*(bearer|basic|token)\s", re.IGNORECASE)
_NAMED = rf"[\w.+-]*:?(?:{_REFERENCE.pattern.replace('(', '(?:')})+@"
"""User of an address whose password is an environment variable."""
_IN_TEXT = (
    # user and password of an address, with few slashes or none before them, and with blanks and slashes in them
    (re.compile(rf"(?<!\w)(\w++:/++)(?!{_NAMED})(?:\S*|[^\s/@:}}'\"]*:(?:(?!://)[^\n@])*)@"), r"\1***@"),
    (re.compile(rf"(?<!\w)(?!{_NAMED})[\w.+-]+:(?!/)[^\s@:]+@(?=[\w\[])"), "***@"),
    # keys in the query of an address
    (re.compile(rf"([?&][\w-]*(?:{_SECRET_NAME.pattern})[\w-]*=)[^&\s'\"]+", re.IGNORECASE), r"\1***"),
    # headers as an option or a mapping of one line has them
    (re.compile(r"(\bheaders?['\"]?\s*[:=]\s*)(?:\{[^}\n]*\}?|'[^'\n]*'?|\"[^\"\n]*\"?)"), r"\1***"),
    (re.compile(r"(\bheaders\.[\w-]+=)[^\n]*?(?=: |$)"), r"\1***"),
)
"""Places of secrets in a text, and what is shown in their stead."""


def check_header(name: str, value: str) -> None:
    """Raise ValueError for a header that looks like a secret and names no environment variable."""
    if (_SECRET_NAME.search(name) or _SECRET_VALUE.match(value)) and not _REFERENCE.search(value):
        raise ValueError(
            f"headers.{name}: a secret would be written to config.yaml; put it into an environment variable and give "
            f"its name, such as ${{REWARD_TOKEN}}"
        )


def check_url(url: str) -> None:
    """Raise ValueError for an address with a user, a password or a key that is no environment variable."""
    try:
        parts = urlsplit(url)
    except ValueError:
        # rewards/checks.py has the message
        parts = SplitResult("", url.partition("://")[2], "", "", "")
    user = parts.netloc.rpartition("@")[0]
    keys = [value for key, value in parse_qsl(parts.query) if _SECRET_NAME.search(key)]
    for secret in [user.partition(":")[2] or user, *keys]:
        if secret and not re.fullmatch(f"(?:{_REFERENCE.pattern})+", secret):
            raise ValueError(
                "url: a password or key in an address would be written to config.yaml; put it into an environment "
                "variable and give its name, such as http://user:${REWARD_PASSWORD}@host/score"
            )


def has_port(address: str) -> bool:
    """Whether the port of an address can exist: 1 to 65535, or the port of its scheme."""
    try:
        return urlsplit(address).port != 0
    except ValueError:
        return False


def expanded(text: str, key: str) -> str:
    """Return ``text`` with the values of the variables that it names. ``key``: its place, for the message.

    Raises UserError for a variable that is not set.
    """
    return _REFERENCE.sub(lambda match: _value(match, key), text)


def expanded_url(url: str, key: str) -> str:
    """Return an address with the values of the variables that it names, escaped as parts of an address."""
    return _REFERENCE.sub(lambda match: quote(_value(match, key), safe=":"), url)


def masked(text: str, templates: Iterable[str]) -> str:
    """Return ``text`` with the values of the variables that ``templates`` name replaced by ``${NAME}``."""
    for name in {match[1] for template in templates for match in _REFERENCE.finditer(template)}:
        value = os.environ.get(name)
        for form in {value, quote(value, safe=":")} if value else ():
            text = text.replace(form, f"${{{name}}}")
    return text


def without_secrets(setting: Any) -> Any:
    """Return a setting as messages may show it: without users and keys of addresses, and without values of headers."""
    if isinstance(setting, str):
        for place, stead in _IN_TEXT:
            setting = place.sub(stead, setting)
        return setting
    if isinstance(setting, list | tuple):
        return [without_secrets(each) for each in setting]
    if isinstance(setting, dict):
        pairs = setting.items()
        return {without_secrets(key): "***" if key == "headers" else without_secrets(each) for key, each in pairs}
    return setting


def _value(match: re.Match[str], key: str) -> str:
    value = os.environ.get(match[1])
    if value is None:
        raise UserError(f"{key}: the environment has no {match[1]}; export it where the run is started, on every node")
    return value
