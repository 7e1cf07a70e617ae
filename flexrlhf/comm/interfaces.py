"""Network interface of a job: the one by which its machines reach each other.

torch takes the one of the machine's own name, which is often the loopback.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables by which gloo and NCCL take an interface; those that the user has set stay."""
LOOPBACK = "lo"
_SIOCGIFADDR = 0x8915
"""Constant of <linux/sockios.h>: the IPv4 address of an interface."""


def use_interface(name: str | None) -> None:
    """Let the process groups of this process, which are made later, use an interface. None: the libraries' choice."""
    for variable in VARIABLES if name is not None else ():
        os.environ.setdefault(variable, str(name))


def job_interface(addresses: Sequence[str], store_address: str) -> str | None:
    """Return the interface to the other machines of a job; the loopback where there is none.

    ``addresses``: by which the ranks reach the address of the job's store, each as ``route_to`` returns it.
    """
    others = [address for address in dict.fromkeys((*addresses, store_address)) if not is_local(address)]
    return interface_to(others[0]) if others else LOOPBACK


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
    """Return the address of this machine that packets to ``address`` leave from; None where there is no route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # sends nothing
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def interface_to(address: str) -> str | None:
    """Return the interface whose IPv4 address packets to ``address`` leave from; None where there is none."""
    own = None if ":" in address else route_to(address)
    return next((name for _, name in socket.if_nameindex() if own is not None and address_of(name) == own), None)


def address_of(interface: str) -> str | None:
    """Return the IPv4 address of an interface; None where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(found[20:24])
