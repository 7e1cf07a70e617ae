"""Key-value store of a job, and the network interface by which its machines reach each other.

The store has no authentication, so a server listens where the job needs it and nowhere else. Nothing here unpickles
values of the store. Lines on stderr name who is awaited.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import IPv6Address, ip_address
from pathlib import Path

import torch.distributed as dist

from flexrlhf.errors import RunStopped, UserError, some_of
from flexrlhf.placement.hosts import HostPort

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables by which gloo and NCCL take an interface; the user's own settings stay."""
_SIOCGIFADDR = 0x8915
"""Constant of <linux/sockios.h>: the IPv4 address of an interface."""


def use_job_interface(addresses: Sequence[str], store_address: str) -> None:
    """Let the process groups that are made later use the interface to the other machines of a job, or the loopback.

    torch takes the interface of the machine's own name, which is often the loopback. ``addresses``: by which the ranks
    reach the address of the job's store, each as ``route_to`` returns it.
    """
    others = [address for address in dict.fromkeys((*addresses, store_address)) if not is_local(address)]
    name = interface_to(others[0]) if others else "lo"
    if name is not None:
        for variable in INTERFACES:
            os.environ.setdefault(variable, name)


def is_local(address: str) -> bool:
    """Return whether a numeric address is one of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def route_to(address: str) -> str | None:
    """Return the address of this machine that packets to ``address`` leave from; None if there is no route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # sends nothing
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def interface_to(address: str) -> str | None:
    """Return the interface whose address packets to ``address`` leave from; None if there is none."""
    own = route_to(address)
    if own is not None and ":" in own:
        return _ipv6_interfaces().get(IPv6Address(own.partition("%")[0]))
    return next((name for _, name in socket.if_nameindex() if own is not None and address_of(name) == own), None)


def _ipv6_interfaces() -> dict[IPv6Address, str]:
    """Return the interface of each IPv6 address of this machine."""
    table = Path("/proc/net/if_inet6")
    rows = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
    return {IPv6Address(bytes.fromhex(row[0])): row[5] for row in rows}


def address_of(interface: str) -> str | None:
    """Return the IPv4 address of an interface; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(found[20:24])


def own_address(name: str) -> str:
    """Return the address where gloo listens: of the interface in its variable, else of ``name``, of this machine."""
    interface = os.environ.get(INTERFACES[0], "").partition(",")[0]
    if interface and (found := address_of(interface)) is not None:
        return found
    for address, own in _ipv6_interfaces().items():
        if own == interface and not address.is_link_local:
            return str(address)
    try:
        return socket.gethostbyname(name)
    except socket.gaierror:
        return "127.0.0.1"


NOTICE_SECONDS = 5.0
"""Time of waiting after which a line names who is awaited, and between two such lines."""
_ATTEMPT_SECONDS = 2.0
"""Longest attempt to connect."""


@dataclass(frozen=True)
class Endpoint:
    """Address of a job's store.

    setting:  option or variables that named it, for errors.
    host:     name or address of the host that serves it.
    port:     0 for any free one, on the host that serves it.
    """

    setting: str
    host: str
    port: int

    def __str__(self) -> str:
        return str(HostPort(self.host, self.port))

    @property
    def address(self) -> str:
        """Numeric address of the host; an IPv4 one if it has both. Raises UserError if it has none."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except socket.gaierror:
            raise UserError(f"{self.setting} {self}: no address is found for {self.host}") from None
        return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])

    def serve(self, several_hosts: bool, timeout_seconds: float) -> dist.TCPStore:
        """Return a store that listens on this address alone.

        ``several_hosts``: the name of this machine may be another address elsewhere; one that resolves to the loopback
        address here, or to none of this machine's, is served on all addresses. Raises UserError if it cannot listen.
        """
        address = self.address
        is_name = self.host not in ("localhost", address)
        everywhere = several_hosts and ((is_name and ip_address(address).is_loopback) or not is_local(address))
        listener = _listen("" if everywhere else address, self)
        port = listener.getsockname()[1]
        timeout = timedelta(seconds=timeout_seconds)
        return dist.TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
        )

    def connect(self, timeout_seconds: float, notice: Notice) -> dist.TCPStore:
        """Return a client of the store here. Raises RunStopped when none is reached in time."""
        while (problem := _try_connect(self)) is not None:
            notice.update(problem)
            if notice.seconds > timeout_seconds:
                raise RunStopped(f"{notice.what}: {problem} for {timeout_seconds:g} s")
            time.sleep(0.2)
        timeout = timedelta(seconds=timeout_seconds)
        return dist.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=timeout)

    @property
    def is_served(self) -> bool:
        """Whether something listens here now."""
        return _try_connect(self) is None


@dataclass
class Notice:
    """Lines on stderr about the waiting of a start, at most one in NOTICE_SECONDS.

    what:    what is waited for.
    prints:  whether this process prints them; of the ranks of a machine one does.
    """

    what: str
    prints: bool = True
    _began: float = field(default_factory=time.monotonic)
    _last: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Time since the start of the wait."""
        return time.monotonic() - self._began

    def update(self, detail: str) -> None:
        """Print ``what`` and ``detail`` if the last line is long enough ago."""
        if self.prints and time.monotonic() - self._last >= NOTICE_SECONDS:
            self._last = time.monotonic()
            print(f"flexrlhf: {self.what}: {detail} ({self.seconds:.0f} s)", file=sys.stderr, flush=True)


def second_connection(store: dist.Store) -> dist.Store:
    """Return a client of the same store for another thread: a call that waits occupies its connection."""
    clone: dist.Store = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
    return clone


def await_keys(
    store: dist.Store,
    keys: Mapping[str, str],
    timeout_seconds: float,
    notice: Notice,
    check: Callable[[], object] = bool,
) -> None:
    """Wait until all ``keys`` are set, with a line every few seconds. ``keys``: key → who sets it.

    ``check``: is called about every second, and raises what ends the wait. Raises RunStopped with who is missing and
    who has arrived.
    """
    while not _all_set(store, list(keys)):
        check()
        missing = [who for key, who in keys.items() if not store.check([key])]
        if not missing:
            return
        arrived = [who for who in keys.values() if who not in missing]
        detail = f"missing {some_of(missing)}; arrived: {some_of(arrived) or 'none'}"
        notice.update(detail)
        if notice.seconds > timeout_seconds:
            raise RunStopped(f"{notice.what}: {detail}; gave up after {timeout_seconds:g} s")


def _all_set(store: dist.Store, keys: list[str]) -> bool:
    """Return whether all ``keys`` are set within a second."""
    began = time.monotonic()
    while not store.check(keys):
        if time.monotonic() - began > 1:
            return False
        time.sleep(0.05)
    return True


def _try_connect(endpoint: Endpoint) -> str | None:
    """Return why no connection to ``endpoint`` can be made now; None if one can."""
    try:
        with socket.create_connection((endpoint.host, endpoint.port), timeout=_ATTEMPT_SECONDS):
            return None
    except socket.gaierror:
        return f"no address is found for {endpoint.host}"
    except TimeoutError:
        return f"{endpoint} does not respond"
    except OSError as error:
        return f"{endpoint}: {(error.strerror or str(error)).lower()}"


def _listen(address: str, endpoint: Endpoint) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, endpoint.port), family=family, backlog=2048)
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise UserError(f"{endpoint.setting} {endpoint}: this machine cannot listen there ({reason})") from None
