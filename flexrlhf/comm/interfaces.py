"""Network interface by which a host is reached. torch takes the one of the machine's own name, often the loopback."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915
"""Constant of <linux/sockios.h>: the IPv4 address of an interface."""


def interface_to(address: str) -> str | None:
    """Return the interface whose IPv4 address packets to ``address`` leave from; None where there is none."""
    if ":" in address:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # sends nothing
            probe.connect((address, 9))
        except OSError:
            return None
        own = probe.getsockname()[0]
        names = [name for _, name in socket.if_nameindex()]
        return next((name for name in names if _address_of(probe, name) == own), None)


def address_of(interface: str) -> str | None:
    """Return the IPv4 address of an interface; None where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return _address_of(probe, interface)


def _address_of(probe: socket.socket, interface: str) -> str | None:
    try:
        found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except OSError:
        return None
    return socket.inet_ntoa(found[20:24])
