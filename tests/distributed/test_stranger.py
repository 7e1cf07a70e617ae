"""A stranger on the network of a job, without its secret: reads, writes and connections (docs/machines.md)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import pytest
import yaml
from cases import Case, make_assets
from commands import read_until

from benchmarks.two_hosts import Link, can_link, linked_hosts
from flexrlhf.config.job_secret import JobSecret

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(200),
    pytest.mark.skipif(not can_link(), reason="needs the right to make network namespaces"),
]
PORT = 29500
READER = """
import sys, datetime, json, torch.distributed as dist
store = dist.TCPStore(sys.argv[1], int(sys.argv[2]), None, False, datetime.timedelta(seconds=10))
print(json.dumps({key: store.get(key).decode("latin-1") for key in store.list_keys()}))
"""
"""Prints all keys and values of a job's store, which has no authentication."""
REACHER = """
import sys, socket, json
found = []
for address, port in json.loads(sys.argv[1]):
    try:
        socket.create_connection((address, port), 2).close()
        found.append([address, port])
    except OSError:
        pass
print(json.dumps(found))
"""
"""Prints the addresses and ports to which a connection can be made."""
WRITER = """
import sys, json, http.client
host, port, tokens = json.loads(sys.argv[1])
found = []
for token in tokens:
    for method, path in (("GET", "/0/config.yaml"), ("PUT", "/0/actor.writing/evil.json"), ("DELETE", "/0/")):
        connection = http.client.HTTPConnection(host, port, timeout=10)
        connection.request(method, path, b"{}", {"Authorization": f"Bearer {token}".encode("latin-1")})
        found.append(connection.getresponse().status)
print(json.dumps(sorted(set(found))))
"""
"""Prints how the file server responds to requests with guessed tokens."""


def play(host: str, script: str, *arguments: str) -> object:
    """Return the JSON that a script prints in the namespace of a host, without the secret."""
    environment = {name: value for name, value in os.environ.items() if name != JobSecret.VARIABLE}
    command = ["ip", "netns", "exec", host, sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    return json.loads(done.stdout)


def listening(host: str) -> set[tuple[str, int]]:
    """Address and port of each TCP socket that listens in the namespace of a host."""
    command = ["ip", "netns", "exec", host, "ss", "-lntH"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = (line.split()[3].rpartition(":") for line in lines)
    return {(address, int(port)) for address, _, port in found}


@pytest.fixture
def link() -> Iterator[Link]:
    with linked_hosts() as hosts:
        yield hosts


@pytest.fixture
def outsider(link: Link) -> Iterator[str]:
    """A host on another network of the first host."""
    name, number = f"c{os.getpid()}", os.getpid() % 250
    first = link.hosts[0]
    try:
        for words in (
            f"netns add {name}",
            f"link add public netns {first} type veth peer name public netns {name}",
            f"-n {first} addr add 10.78.{number}.1/24 dev public",
            f"-n {name} addr add 10.78.{number}.2/24 dev public",
            f"-n {first} link set public up",
            f"-n {name} link set public up",
        ):
            subprocess.run(["ip", *words.split()], check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)


def test_a_stranger_without_the_secret(
    link: Link, outsider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines with directories of their own, whose store and files are at an address of their common network."""
    secret = token_hex()
    monkeypatch.setenv(JobSecret.VARIABLE, secret)
    raw = yaml.safe_load(make_assets(tmp_path / "assets").spec(Case("two", "halves", 2)).dump())
    raw |= {"name": "endless", "steps": 100_000, "timeout_seconds": 30, "runs": "runs"}
    (tmp_path / "endless.yaml").write_text(yaml.safe_dump(raw))
    places = [tmp_path / host for host in link.hosts]
    for place in places:
        place.mkdir()
    endpoint = ["--rdzv-endpoint", f"{link.addresses[0]}:{PORT}"]
    first = link.start(0, ["run", str(tmp_path / "endless.yaml"), "--nnodes", "2", *endpoint], places[0])
    second = link.start(1, ["join", *endpoint], places[1])
    try:
        seen = read_until(first, "step 3/")
        # everything listens on the network of the job, and no packet from another one reaches it
        sockets = {number: listening(link.hosts[number]) for number in (0, 1)}
        assert len(sockets[0]) > 2 and (link.addresses[0], PORT) in sockets[0]
        for number, found in sockets.items():
            assert {address for address, _ in found} == {link.addresses[number]}, found
        public = [[f"10.78.{os.getpid() % 250}.1", port] for _, port in sockets[0]]
        assert play(outsider, REACHER, json.dumps(public)) == []
        # on it the store can be read, but the secret is not there, nor anything that opens the files
        values = play(link.hosts[1], READER, link.addresses[0], str(PORT))
        assert isinstance(values, dict) and secret not in json.dumps(values) and secret not in seen
        key = next(name for name in values if name.endswith("files/server"))
        server = json.loads(values[key].partition("\n")[2])
        texts = {
            part for value in values.values() for part in value.split("\n") if len(part) < 200 and part.isprintable()
        }
        tokens = sorted({"", "guess", secret[:-1], server["nonce"], *texts})
        assert play(link.hosts[1], WRITER, json.dumps([server["host"], server["port"], tokens])) == [403]
        read_until(first, "step ")
    finally:
        os.kill(first.pid, signal.SIGINT)
        outputs = [launcher.communicate(timeout=60)[0] for launcher in (first, second)]
    assert not any("Traceback" in output for output in outputs), outputs
    assert not list(places[0].rglob("*evil*")) and (places[0] / "runs" / "endless" / "config.yaml").is_file()
