"""Sockets of processes, read from /proc."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path

from commands import children_of

LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""


def descendants(pid: int) -> list[int]:
    """A process and all that it has started, which still run."""
    try:
        return [pid, *(each for child in children_of(pid) for each in descendants(child))]
    except FileNotFoundError:
        return []


def listening_addresses(pids: Iterable[int]) -> set[str]:
    """Addresses that TCP sockets of the processes listen on."""
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {_address(line[1]) for line in lines if line[3] == LISTENS and line[9] in inodes}


def _socket_inodes(pid: int) -> set[str]:
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return {found[1] for link in links if (found := re.fullmatch(r"socket:\[(\d+)\]", link))}


def _address(field: str) -> str:
    """``0100007F:1F90`` as 127.0.0.1: words of four bytes, lowest byte first."""
    digits = field.partition(":")[0]
    raw = b"".join(bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8))
    address = ip_address(raw)
    return str(getattr(address, "ipv4_mapped", None) or address)
