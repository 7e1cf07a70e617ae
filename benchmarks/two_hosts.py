"""Two hosts on this machine: network namespaces with a link between them, each with its own host name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAM = ("-m", "flexrlhf")
NO_ONE = "02:00:00:00:00:99"
"""Hardware address of no host: packets to it are lost without a word."""


@dataclass(frozen=True)
class Link:
    """Two hosts and the link between them.

    hosts:      names of the hosts, their namespaces and their interfaces
    addresses:  their IPv4 addresses
    """

    hosts: tuple[str, str]
    addresses: tuple[str, str]

    def command(self, number: int, arguments: list[str], program: Sequence[str] = PROGRAM) -> list[str]:
        """Command line of ``flexrlhf`` on host ``number``."""
        command = f'hostname {self.hosts[number]}; exec "$@"'
        namespace = ["ip", "netns", "exec", self.hosts[number], "unshare", "--uts", "sh", "-c", command, "sh"]
        return [*namespace, sys.executable, *program, *arguments]

    def start(
        self,
        number: int,
        arguments: list[str],
        directory: Path,
        program: Sequence[str] = PROGRAM,
        environment: Mapping[str, str] = os.environ,
    ) -> subprocess.Popen[str]:
        """``flexrlhf``, or another ``program``, on host ``number``, with one thread per rank."""
        return subprocess.Popen(
            self.command(number, arguments, program),
            cwd=directory,
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def limit(self, mbit_s: float) -> None:
        """Limit both directions to so many megabits per second. A queue of 50 ms is a router's, not a disk's; it has
        room for 50 kB, and a burst is 10 ms, at least two packets."""
        burst, queue = int(min(256, max(4, 10 * mbit_s / 8)) * 1024), max(50, round(400 / mbit_s))
        for host in self.hosts:
            rate = ["rate", f"{mbit_s}mbit", "burst", f"{burst}b", "latency", f"{queue}ms"]
            subprocess.run(["tc", "-n", host, "qdisc", "replace", "dev", host, "root", "tbf", *rate], check=True)

    def sent_bytes(self, number: int) -> int:
        """Return the bytes that host ``number`` has sent over the link, as its interface counts them."""
        shown = ["ip", "-json", "-statistics", "-n", self.hosts[number], "link", "show", self.hosts[number]]
        found = json.loads(subprocess.run(shown, check=True, capture_output=True, text=True).stdout)
        return int(found[0]["stats64"]["tx"]["bytes"])

    def lose_packets(self) -> None:
        """Let every packet be lost, without an error on either side."""
        for own, other in ((0, 1), (1, 0)):
            neighbour = ["neigh", "replace", self.addresses[other], "lladdr", NO_ONE, "dev", self.hosts[own]]
            _ip("-n", self.hosts[own], *neighbour, "nud", "permanent")

    def set(self, state: str) -> None:
        """Set the link ``up`` or ``down``."""
        _ip("-n", self.hosts[0], "link", "set", self.hosts[0], state)


def can_link() -> bool:
    """Whether this user may make network namespaces."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return False
    name = f"try{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        _ip("netns", "del", name)
    return made


NAMES = Path("/etc/netns")
"""Files that ``ip netns exec`` mounts over /etc's."""


@contextmanager
def linked_hosts() -> Iterator[Link]:
    """Two hosts, removed at the end. The name of each is its loopback address at home, as Debian writes it."""
    number = os.getpid() % 250
    link = Link((f"a{os.getpid()}", f"b{os.getpid()}"), (f"10.77.{number}.1", f"10.77.{number}.2"))
    first, second = link.hosts
    try:
        for host in link.hosts:
            _ip("netns", "add", host)
        _ip("link", "add", first, "netns", first, "type", "veth", "peer", "name", second, "netns", second)
        for host, address in zip(link.hosts, link.addresses, strict=True):
            _ip("-n", host, "addr", "add", f"{address}/24", "dev", host)
            for interface in ("lo", host):
                _ip("-n", host, "link", "set", interface, "up")
        for own, other in ((0, 1), (1, 0)):
            _write_names({"localhost": "127.0.0.1", link.hosts[own]: "127.0.1.1"}, link, own, other)
        yield link
    finally:
        for host in link.hosts:
            subprocess.run(["ip", "netns", "del", host], check=False)
            shutil.rmtree(NAMES / host, ignore_errors=True)


def _write_names(names: dict[str, str], link: Link, own: int, other: int) -> None:
    """Write the names that host ``own`` resolves: its own ones and the other host's."""
    directory = NAMES / link.hosts[own]
    directory.mkdir(parents=True)
    found = {**names, link.hosts[other]: link.addresses[other]}
    (directory / "hosts").write_text("".join(f"{address} {name}\n" for name, address in found.items()))


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
