"""Environments by the setting ``path``. Worker processes load this: the standard library, and the package named."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from flexrlhf.config.code_loading import load_function
from flexrlhf.config.plugins import SHIPPED, load_plugin
from flexrlhf.config.proxies import Address, is_address
from flexrlhf.config.secrets import expanded_setting, expanded_url
from flexrlhf.errors import UserError

if TYPE_CHECKING:
    from flexrlhf.config.environment_settings import EnvironmentSpec


SERVED = "openenv"
"""Prefix of environments that servers run; a program's is the address itself."""


def package_of(path: str) -> tuple[str, str] | None:
    """Return prefix and name of a package's environment; None for a class of the user's."""
    prefix, _, name = path.partition(":")
    return (prefix, name) if prefix in SHIPPED["environments"] else None


def addresses_of(path: str | None) -> list[str]:
    """Return the addresses of the servers of an environment, as written; none of one that runs on this machine."""
    prefix, name = package_of(path or "") or ("", path or "")
    return [each.strip() for each in name.split(",")] if prefix == SERVED or is_address(name) else []


def is_installed(prefix: str) -> bool:
    """Return whether the library of a package's environment is installed. Raises UserError as ``load_plugin``."""
    library: str = load_plugin("environments", prefix).library
    return find_spec(library.partition(".")[0]) is not None


def program_of(settings: EnvironmentSpec) -> tuple[str, dict[str, Any]]:
    """Return the program that plays the episodes, ``path/to/file.py:name`` or ``module:name``, and its arguments.

    A package's is in the file of its class, so that an interpreter without flexrlhf loads it.
    """
    assert settings.path is not None, "a program has a place"
    found = package_of(settings.path)
    if found is None:
        return settings.path, settings.options
    kind = load_plugin("environments", found[0])
    return f"{sys.modules[kind.__module__].__file__}:{kind.program}", {**settings.options, "name": found[1]}


def check_environment(settings: EnvironmentSpec) -> None:
    """Raise UserError for an environment whose package, variables or server this machine lacks."""
    if settings.python is None:
        check_package(settings.path)
    check_variables(settings)


def check_package(path: str | None) -> None:
    """Raise UserError for an environment of a package that is not installed."""
    found = None if path is None else package_of(path)
    if found is not None and not is_installed(found[0]):
        kind = load_plugin("environments", found[0])
        other = ", or name an interpreter that has it in environment.python" if hasattr(kind, "program") else ""
        raise UserError(
            f"environment.path: {path} needs the package {kind.library.partition('.')[0]}, which is not installed; "
            f"pip install 'flexrlhf[{kind.extra}]'{other}"
        )


def check_variables(settings: EnvironmentSpec) -> None:
    """Raise UserError for an environment variable that this machine lacks, and a server that it could not call."""
    expanded_setting(settings.options, "environment.options")
    for each in addresses_of(settings.path):
        address = Address.expanded(each, "environment.path")
        if not (address.has_port and urlsplit(address.url).hostname):
            raise UserError(
                f"environment.path: expected an address such as {'' if settings.api else SERVED + ':'}"
                f"http://localhost:8000, or several with commas between, found {settings.path!r}"
            )
        address.proxy()


def load_environment(path: str) -> tuple[type, Callable[..., Any]]:
    """Return the class of ``path``, and a function that makes an object, which runs one episode; its first argument is
    the address of a server if servers run it.

    Raises TypeError for another thing than a class.
    """
    if found := package_of(path):
        prefix, name = found
        kind = load_plugin("environments", prefix)
        # now, as loading may take longer than a turn
        importlib.import_module(kind.library)
        return kind, kind if prefix == SERVED else partial(kind, expanded_url(name, "environment.path"))
    kind = load_function(path)
    if not isinstance(kind, type) or not callable(getattr(kind, "reset", None)):
        other = f"a {type(kind).__name__}" if callable(kind) else f"{kind!r:.60}"
        other = "a class without reset" if isinstance(kind, type) else other
        raise TypeError(f"{path} is {other}, not a class with reset and step")
    return kind, kind
