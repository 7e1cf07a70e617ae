"""Secrets: a YAML names environment variables, whose values are read where a request is sent.

So no secret is in the spec, and in nothing that is written or printed from it. Of texts that others have written, such
as job files of other systems, secrets are recognised by the names of their settings and by their own form.
"""

from __future__ import annotations

import json
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
_TOKEN = re.compile(
    r"(?<![\w-])(?:sk-[\w-]{16,}|hf_[A-Za-z0-9]{16,}|gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[a-z]-[\w-]{10,}|A[KS]IA[A-Z0-9]{12,}|AIza[\w-]{20,}|nvapi-[\w-]{16,}|gsk_\w{16,}|r8_\w{16,}|wandb_v1_\w{16,}"
    r"|eyJ[\w-]{10,}\.[\w.-]+)"
)
"""Keys of services by their form."""
_IN_TEXT = (
    (_TOKEN, "***"),
    # user and password of an address, with few slashes or none before them, and with blanks and slashes in them
    (re.compile(rf"(?<!\w)(\w++:/++)(?!{_NAMED})(?:\S*|[^\s/@:}}'\"]*:(?:(?!://)[^\n@])*)@"), r"\1***@"),
    (re.compile(rf"(?<![\w.+-])(?!{_NAMED})[\w.+-]++:(?!/)[^\s@:]+@(?=[\w\[])"), "***@"),
    # keys in the query of an address
    (re.compile(rf"([?&][\w-]*(?:{_SECRET_NAME.pattern})[\w-]*=)[^&\s'\"]+", re.IGNORECASE), r"\1***"),
    # headers as an option or a mapping of one line has them
    (re.compile(r"(\bheaders?['\"]?\s*[:=]\s*)(?:\{[^}\n]*\}?|'[^'\n]*'?|\"[^\"\n]*\"?)"), r"\1***"),
    (re.compile(r"(\bheaders\.[\w-]+=)[^\n]*?(?=: |$)"), r"\1***"),
)
"""Places of secrets in a text, and what is shown in their stead."""
HIDDEN = "***"
"""In the place of a secret."""
LEAST_DIGITS = 4
"""Digits of a number that may be a password."""
_ALONE = re.compile(
    r"pass(w|phrase)\w*|pwd|secrets?|credentials?|authorization|auth|cookie|bearer|webhook|dsn|pat|"
    r"(api|wandb|access|private|openai)key|(hf|hub|api|auth|access|wandb|git\w*)token"
)
"""Last words of names whose values are secrets."""
_OWNER = re.compile(
    r"access|account|anthropic|api|auth|aws|azure|bot|client|comet|dashscope|deepseek|encryption|gemini|git\w*|google|hf|"
    r"hub|huggingface|judge|license|login|master|mistral|modelscope|neptune|ngc|nvidia|open(ai|router)|personal|private|"
    r"push|refresh|registry|secret|service|session|signing|ssh|storage|subscription|swanlab|together|user|wandb|write"
)
"""Words in front of ``key`` and ``token`` that make them secrets."""
_OF_TEXTS = re.compile(
    r"act|add|begin|bos|call|cls|end|eo[st]|first|generation|image|last|loss|mask|max|min|new|next|num|pad|per|prompt|"
    r"response|reward|sep|special|start|step|stop|text|think|tool|unk|video|audio|vocab"
)
"""Words in front of ``token`` that make it one of a vocabulary."""
_HEX = re.compile(r"(?<![\w/])[0-9a-f]{40}(?![\w/])")
"""A key of Weights & Biases, which has the form of a commit; parts of paths are no keys."""
_AUTHORIZED = re.compile(r"\b(Bearer|bearer|Basic)\s+[\w.~+/=-]{6,}")
_PAIR = re.compile(
    r"(?<![\w.-])(?:([A-Za-z][\w.-]*+)(\\?[\"']?\s*(?:[!=]=|[:=])\s*\\?[\"']?)([^\s\"'\\,;&}\]]+)"
    r"|(--?[A-Za-z][\w.-]*+)(\s+)([^\s\"'-]\S*))"
)
"""A name with its value, as assignments, mappings, queries and options have them."""


def check_header(name: str, value: str) -> None:
    """Raise ValueError for a header that looks like a secret and names no environment variable."""
    if (_SECRET_NAME.search(name) or _SECRET_VALUE.match(value)) and not _REFERENCE.search(value):
        raise ValueError(
            f"headers.{name}: a secret would be written to config.yaml; put it into an environment variable and give "
            f"its name, such as ${{REWARD_TOKEN}}"
        )


def check_url(url: str) -> None:
    """Raise ValueError for an address with a user, a password or a key that is no environment variable."""
    if secrets_in(url):
        raise ValueError(
            "url: a password or key in an address would be written to config.yaml; put it into an environment "
            "variable and give its name, such as http://user:${REWARD_PASSWORD}@host/score"
        )


def secrets_in(url: str) -> list[str]:
    """Return the users, passwords and keys of an address that are no environment variables."""
    try:
        parts = urlsplit(url)
    except ValueError:
        # rewards/checks.py has the message
        parts = SplitResult("", url.partition("://")[2], "", "", "")
    user = parts.netloc.rpartition("@")[0]
    keys = [value for key, value in parse_qsl(parts.query) if _SECRET_NAME.search(key)]
    secrets = [user.partition(":")[2] or user, *keys]
    return [each for each in secrets if each and not re.fullmatch(f"(?:{_REFERENCE.pattern})+", each)]


_FREE = re.compile(r"environment\.(options|path)|algorithm\.settings|rollout\.config|models\.\w+\.config")
"""Settings whose values other code reads, or other programs: any of them may be a secret."""
_ADDRESS = re.compile(r"\w+://[^\s,]+")


def check_settings(setting: Any, key: str = "", name: str = "", is_free: bool = False) -> None:
    """Raise ValueError for a secret in a setting, or below it, that is no environment variable.

    It is recognised by the name of its setting, in an address, or by its own form.

    key:      of the setting, with dots
    name:     of the innermost mapping's key
    is_free:  whether it is read by other code
    """
    if isinstance(setting, dict):
        for own, each in setting.items():
            below = f"{key}.{own}" if key else str(own)
            check_settings(each, below, str(own), is_free or _FREE.fullmatch(below) is not None)
    elif isinstance(setting, list | tuple):
        for number, each in enumerate(setting):
            check_settings(each, f"{key}.{number}", name, is_free)
    elif _is_literal(setting, name, is_free):
        raise ValueError(
            f"{key}: a secret would be written to config.yaml; put it into an environment variable and give its name, "
            f"such as ${{API_KEY}}"
        )


def _is_literal(value: Any, name: str, is_free: bool) -> bool:
    """Whether a value is a secret itself, rather than the name of a variable."""
    text = str(value)
    if isinstance(value, str) and any(_TOKEN.fullmatch(word) for word in text.split()):
        return True
    if not is_free or isinstance(value, bool) or value is None:
        return False
    if isinstance(value, str) and any(map(secrets_in, _ADDRESS.findall(text))):
        return True
    is_counted = not isinstance(value, str) and len(text) < LEAST_DIGITS
    # a variable without braces is not read
    is_switch = isinstance(value, str) and _names_nothing(value) and "$" not in value
    is_named = name.lower() != "key" and is_secret_name(name)
    return is_named and not (is_counted or is_switch or _REFERENCE.search(text))


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


def expanded_setting(setting: Any, key: str) -> Any:
    """Return a setting of any form with the values of the variables that it names. Raises UserError as ``expanded``."""
    if isinstance(setting, dict):
        return {name: expanded_setting(each, f"{key}.{name}") for name, each in setting.items()}
    if isinstance(setting, list | tuple):
        return [expanded_setting(each, f"{key}.{number}") for number, each in enumerate(setting)]
    return expanded(setting, key) if isinstance(setting, str) else setting


def has_references(setting: Any) -> bool:
    """Whether a setting of any form names variables."""
    return _REFERENCE.search(json.dumps(setting, default=str)) is not None


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


def shown_override(override: str) -> str:
    """Return ``key=value`` of a command line as messages may show it."""
    return str(without_secrets(_without_pairs(override)))


def is_secret_name(name: str) -> bool:
    """Whether the value of a setting, an option or a variable of this name is a secret."""
    words = re.split(r"[^a-z]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
    words = [word for word in words if word and word != "id"]
    before, last = ([""] * 2 + words)[-2:]
    if last == "wandb" and before == "use":  # OpenRLHF's option takes the key
        return True
    if last == "key":
        return not before or _OWNER.fullmatch(before) is not None
    if last in ("token", "tokens"):
        is_owned = _OWNER.fullmatch(before) is not None
        return is_owned or (last == "token" and _OF_TEXTS.fullmatch(before) is None)
    return _ALONE.fullmatch(last) is not None


def hidden(value: Any, name: str = "") -> Any:
    """Return a value that others have written as it may be shown: without what is a secret by its name or its form.

    name:  its setting's, if it has one.
    """
    if isinstance(value, list | tuple):
        return [hidden(each, name) for each in value]
    if isinstance(value, dict):
        return {hidden(key): hidden(each, str(key)) for key, each in value.items()}
    if is_secret_name(name) and not _names_nothing(value):
        return HIDDEN
    if not isinstance(value, str):
        return value
    is_commit = re.search(r"revision|commit|sha|hash", name, re.IGNORECASE) is not None
    text = _AUTHORIZED.sub(rf"\1 {HIDDEN}", _TOKEN.sub(HIDDEN, value))
    text = text if is_commit else _HEX.sub(HIDDEN, text)
    return without_secrets(_without_pairs(text))


def _names_nothing(value: Any) -> bool:
    """Whether a value is no secret under any name: a number that counts, a switch, a variable."""
    if not isinstance(value, str):
        return True
    is_variable = re.fullmatch(r"\$\{?\w+\}?|\0[\w.]+\0", value) is not None
    return is_variable or value.lower() in ("", "true", "false", "yes", "no", "none", "null", "on", "off", "0", "1")


def _without_pairs(text: str) -> str:
    """Return a text without the values of names of secrets."""
    parts, place = [], 0
    while (match := _PAIR.search(text, place)) is not None:
        name, sign, value = match.groups()[:3] if match[1] else match.groups()[3:]
        is_prose = name in ("key", "token", "secret") and sign == ": "
        shows = is_prose or not is_secret_name(name) or _names_nothing(value)
        # a value that is shown may itself be a name with a value
        end = match.end() - len(value) if shows else match.end()
        parts.append(text[place:end] if shows else text[place : match.start()] + name + sign + HIDDEN)
        place = end
    return "".join([*parts, text[place:]])


def _value(match: re.Match[str], key: str) -> str:
    value = os.environ.get(match[1])
    if value is None:
        raise UserError(f"{key}: the environment has no {match[1]}; export it where the run is started, on every node")
    return value
