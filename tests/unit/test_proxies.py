"""Proxies that the environment names: unusable ones are one sentence, and near addresses have none."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from reward_server import RewardServer

from flexrlhf.config.proxies import Address, call_directly
from flexrlhf.config.reward_sources import ServiceSource
from flexrlhf.data.hub import HubName
from flexrlhf.errors import UserError
from flexrlhf.rewards.base import Sample
from flexrlhf.rewards.checks import SourceChecks
from flexrlhf.rewards.services import HttpService
from flexrlhf.user_code.call_failures import WarnOnce
from flexrlhf.user_code.deadline import Deadline

REMOTE = "http://scores.invalid/score"
DEAD = "http://127.0.0.1:9"
VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        for each in (name, name.upper()):
            # set first, so that what a test sets itself is removed, too
            monkeypatch.setenv(each, "")
            monkeypatch.delenv(each)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    yield


UNUSABLE = [
    ("HTTPS_PROXY", "http//proxy:3128", "HTTPS_PROXY: expected the address of a proxy, such as http://proxy:3128"),
    ("HTTPS_PROXY", "http://", "expected the address of a proxy"),
    ("HTTPS_PROXY", "http://pro xy:3128", "expected the address of a proxy"),
    ("ALL_PROXY", "http://[::1", "expected the address of a proxy"),
    ("https_proxy", "foo://proxy", "https_proxy: expected http:// or socks5:// in front of a proxy, found 'foo://"),
    ("ALL_PROXY", "socks://proxy:1080", "expected http:// or socks5:// in front of a proxy"),
    ("ALL_PROXY", "socks4://proxy:1080", "expected http:// or socks5:// in front of a proxy"),
    ("HTTP_PROXY", "http://me:s3cret@proxy:99999", "no such port, use 1 to 65535, found 'http://***@proxy:99999'"),
    (
        "ALL_PROXY",
        "socks5h://proxy",
        "needs the package socksio, .*; pip install 'flexrlhf[socks]'",
    ),
    ("HF_ENDPOINT", "hf-mirror.com", "expected an address with https:// in front, .*; write https://hf-mirror.com"),
    ("HF_ENDPOINT", "hf-mirror.com/api", "expected an address with https://"),
    ("HF_ENDPOINT", "https://hub:99999", "expected an address with https://"),
    ("HF_ENDPOINT", "https://me:s3cret@", "found 'https://***@'"),
    ("HF_ENDPOINT", "", "HF_ENDPOINT: empty; unset it"),
]


@pytest.mark.parametrize(("variable", "value", "sentence"), UNUSABLE)
def test_an_unusable_proxy_or_address_of_the_hub_is_a_sentence(
    variable: str, value: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("flexrlhf.config.proxies.find_spec", lambda name: None)
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=sentence.replace("[", r"\[").replace("***", r"\*\*\*")) as error:
        HubName("acme/tiny").download("model", "models.actor.path")
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "ALL_PROXY"])
def test_a_service_that_needs_an_unusable_proxy_is_refused_before_a_run(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "foo://proxy")
    SourceChecks([ServiceSource(url="http://127.0.0.1/score")]).check()
    with pytest.raises(UserError, match=f"{variable}: expected http:// or socks5://"):
        SourceChecks([ServiceSource(url=REMOTE)]).check()


def test_certificates_that_cannot_be_read_are_named_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ca.pem")
    with pytest.raises(UserError, match="SSL_CERT_FILE: /nowhere/ca.pem cannot be read"):
        SourceChecks([ServiceSource(url=REMOTE)]).check()


@pytest.mark.parametrize("proxy", [DEAD, "socks5://127.0.0.1:9", "foo://proxy"])
def test_near_services_are_called_without_a_proxy(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with RewardServer() as server:
        for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]"):
            source = ServiceSource(url=server.url.replace("127.0.0.1", host), retries=0, timeout_seconds=5.0)
            assert HttpService(source, WarnOnce("reward.url")).score([Sample("", "xx", 1, {})], Deadline.after(9)) == [
                2
            ]


def test_a_proxy_that_fails_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://me:s3cret@127.0.0.1:9")
    service = HttpService(ServiceSource(url=REMOTE, retries=0), WarnOnce("reward.url"))
    assert service.score([Sample("", "x", 1, {})], Deadline.after(9)) == [None]
    printed = capsys.readouterr().err
    assert "through the proxy of HTTP_PROXY http://***@127.0.0.1:9; NO_PROXY=scores.invalid does without" in printed
    assert "s3cret" not in printed


@pytest.mark.parametrize(
    ("url", "exempt", "is_direct"),
    [
        (REMOTE, "", False),
        (REMOTE, "*", True),
        (REMOTE, "other, .invalid", True),
        (REMOTE, "cores.invalid", False),
        ("http://scores.invalid:80/", "scores.invalid:80", True),
        ("http://scores.invalid:81/", "scores.invalid:80", False),
        ("http://10.1.2.3/", "10.0.0.0/8", True),
        ("http://11.1.2.3/", "10.0.0.0/8", False),
        (f"http://{socket.gethostname()}/", "", True),
        ("http://0.0.0.0:8000/", "", True),
    ],
)
def test_addresses_that_have_a_proxy(url: str, exempt: str, is_direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "proxy:3128")
    monkeypatch.setenv("NO_PROXY", exempt)
    found = Address(url).proxy()
    assert found is None if is_direct else found is not None and found.url == "http://proxy:3128"


def test_libraries_and_children_call_near_addresses_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", DEAD)
    monkeypatch.setenv("no_proxy", "elsewhere")
    call_directly(["node-2"])
    call_directly()
    with RewardServer() as server:
        assert httpx.post(server.url, json={"query": ["xx"]}).json() == {"rewards": [2]}
        code = f'import urllib.request as r; print(r.urlopen({server.url!r}, b\'{{"query": ["xx"]}}\').read())'
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert '{"rewards": [2]}' in child.stdout, child.stderr
    assert Address("http://node-2/").proxy() is None and Address("http://elsewhere/").proxy() is None
    assert Address("http://node-3/").proxy() is not None
