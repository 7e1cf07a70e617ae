"""Proxies of HTTP that the environment names, such as HTTPS_PROXY, and the addresses that are called without one.

Loopback, this machine and the other machines of a job never have a proxy. Worker processes load this: the standard
library alone.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Self
from urllib.parse import SplitResult, urlsplit

from flexrlhf.config.secrets import expanded_url, has_port, without_secrets
from flexrlhf.errors import UserError

EXTRA = "flexrlhf[socks]"
SCHEMES = ("http", "https", "socks5", "socks5h")
"""Kinds of proxies that libraries of HTTP can use."""
_KINDS = ("http", "https", "all")
"""Kinds of requests that have a variable of their own."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1", "127.0.0.0/8")
_OUTSIDE = "192.0.2.1"
"""Address of no machine, which has the route of any other one."""


@dataclass(frozen=True)
class Proxy:
    """A proxy that can be used.

    variable:  of the environment that names it
    url:       its address, with a scheme
    """

    variable: str
    url: str

    def __str__(self) -> str:
        """Return its name for a message, without its password."""
        return f"{self.variable} {without_secrets(self.url)}"


@dataclass(frozen=True)
class Address:
    """Address of a service.

    url:  with the values of the variables that it names
    """

    url: str

    @classmethod
    def expanded(cls, url: str, key: str) -> Self:
        """Return an address that may name variables. ``key``: its place. Raises UserError for one that is not set."""
        return cls(expanded_url(url, key))

    @property
    def has_port(self) -> bool:
        """Whether its port can exist."""
        return has_port(self.url)

    def proxy(self) -> Proxy | None:
        """Return the proxy of requests to it; None: they are sent directly. Raises UserError for an unusable one."""
        parts = urlsplit(self.url)
        if not parts.hostname or is_near(parts.hostname) or _is_exempt(parts, _exempt()):
            return None
        return next(filter(None, map(_proxy, (parts.scheme, "all"))), None)

    def unreachable(self) -> str:
        """Return the end of a message about a connection to it that failed: the proxy that it has, if it has one."""
        proxy = self.proxy()
        host = urlsplit(self.url).hostname
        return "" if proxy is None else f", through the proxy of {proxy}; NO_PROXY={host} does without it"


def is_address(text: str) -> bool:
    """Whether ``text`` is the address of a service over HTTP, or begins with one."""
    return text.startswith(("http://", "https://"))


def check_proxies() -> None:
    """Raise UserError for any proxy of the environment that cannot be used: some libraries open all of them."""
    for kind in () if "*" in _exempt() else _KINDS:
        _proxy(kind)


def check_certificates() -> None:
    """Raise UserError for certificates that the environment names and that cannot be read."""
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        path = os.environ.get(name)
        if path and not os.access(path, os.R_OK):
            raise UserError(f"{name}: {path} cannot be read; unset it, or name the certificates of this machine")


def is_near(host: str) -> bool:
    """Whether ``host`` is loopback or this machine, by its address or its name."""
    found = _address(host)
    if found is not None:
        return found.is_loopback or found.is_unspecified or _is_own(str(found))
    own, host = socket.gethostname().lower(), host.lower()
    if host in ("localhost", own) or host.endswith(".localhost"):
        return True
    # a longer or shorter form of the name
    return host.partition(".")[0] == own.partition(".")[0] and _is_own(host)


def call_directly(hosts: Iterable[str] = ()) -> None:
    """Let libraries of this process and its children call loopback, this machine and ``hosts`` without a proxy."""
    exempt = _exempt()
    if "*" in exempt or not any(os.environ.get(_variable(kind)) for kind in _KINDS):
        return
    near = [*exempt, *_LOOPBACK, socket.gethostname(), _own_address(), *hosts]
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(dict.fromkeys(filter(None, near)))


def _proxy(kind: str) -> Proxy | None:
    """Return the proxy of requests of a kind, if one is set. Raises UserError for one that cannot be used."""
    variable = _variable(kind)
    value = os.environ.get(variable)
    if not value:
        return None
    url = value if "://" in value else f"http://{value}"
    shown, scheme = repr(without_secrets(value)), url.partition("://")[0].lower()
    if scheme not in SCHEMES:
        raise UserError(f"{variable}: expected http:// or socks5:// in front of a proxy, found {shown}")
    if ("://" not in value and "/" in value.rstrip("/")) or not _has_host(url):
        raise UserError(f"{variable}: expected the address of a proxy, such as http://proxy:3128, found {shown}")
    if not has_port(url):
        raise UserError(f"{variable}: no such port, use 1 to 65535, found {shown}")
    if scheme.startswith("socks") and find_spec("socksio") is None:
        raise UserError(
            f"{variable}: a SOCKS proxy needs the package socksio, which is not installed; pip install '{EXTRA}', or "
            f"unset {variable}"
        )
    return Proxy(variable, url)


def _variable(kind: str) -> str:
    """Return the name of a variable: in small letters where that is set, as libraries read them."""
    return name if (name := f"{kind}_proxy") in os.environ else name.upper()


def _has_host(url: str) -> bool:
    with suppress(ValueError):
        return re.fullmatch(r"[\w.:%-]+", urlsplit(url).hostname or "", re.ASCII) is not None
    return False


def _exempt() -> list[str]:
    """Return the entries of NO_PROXY."""
    return [each.strip().lower() for each in os.environ.get(_variable("no"), "").split(",")]


def _is_exempt(parts: SplitResult, exempt: Sequence[str]) -> bool:
    """Whether NO_PROXY names the host of an address, by its name, a domain or a network."""
    host, found, port = parts.hostname or "", _address(parts.hostname or ""), ""
    with suppress(ValueError):
        port = f":{parts.port}"
    for each in filter(None, exempt):
        name = each.removesuffix(port).lstrip(".")
        if each == "*" or host == name or host.endswith(f".{name}"):
            return True
        with suppress(ValueError):
            if found is not None and "/" in each and found in ip_network(each, strict=False):
                return True
    return False


def _address(host: str) -> IPv4Address | IPv6Address | None:
    """Return ``host`` as an address, of IPv4 where it is one in the form of IPv6; None for a name."""
    try:
        found = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return found if isinstance(found, IPv4Address) else found.ipv4_mapped or found


@cache
def _is_own(host: str) -> bool:
    """Whether this machine could listen on an address, or on that of a name."""
    with suppress(OSError, UnicodeError):
        family, kind, number, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.bind(place)
            return True
    return False


def _own_address() -> str:
    """Return this machine's address in its network; empty without one. Nothing is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((_OUTSIDE, 1))
        return str(probe.getsockname()[0])
    return ""
