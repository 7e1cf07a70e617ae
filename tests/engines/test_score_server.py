"""``flexrlhf serve-reward`` without its process: scores as a run receives them, and requests that are refused."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from small_models import TINY
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig
from typer.testing import CliRunner

from flexrlhf.cli import app
from flexrlhf.config.reward_sources import ServiceSource
from flexrlhf.data.quickstart.corpus import build_tokenizer
from flexrlhf.errors import UserError
from flexrlhf.rewards.base import Sample, Score, StepScores
from flexrlhf.rewards.services import HttpService
from flexrlhf.runs import score_server
from flexrlhf.runs.score_server import ScoreServer
from flexrlhf.runs.served_scores import FunctionScores, ModelScores, ServedScores
from flexrlhf.serving import token_server
from flexrlhf.user_code.call_failures import WarnOnce
from flexrlhf.user_code.deadline import Deadline

FUNCTIONS = Path(__file__).parents[1] / "unit" / "reward_functions.py"
OWN = """
def judged(prompts, responses, label):
    return [len(prompt) + 10 * len(text) + right for prompt, text, right in zip(prompts, responses, label)]


def absent(prompts, responses):
    return [None if text == "b" else float("nan") for text in responses]


def failing(prompts, responses):
    raise ValueError("out of order")
"""
TOKEN = "a secret"
SAMPLES = [Sample("a ", "b", 2, {"label": 0.5}), Sample("", "ccc", 4, {"label": 2})]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("REWARD_SECRET", TOKEN)


@contextmanager
def served(source: ServedScores, token: str | None = None) -> Iterator[str]:
    """Address of a server of ``source``."""
    try:
        server = ScoreServer(source, "127.0.0.1", 0, token, "label")
        with server.serving():
            yield f"http://127.0.0.1:{server.port}/score"
    finally:
        source.close()


def scores_at(url: str, samples: list[Sample], **settings: Any) -> list[Score]:
    """Scores that a run receives."""
    service = ServiceSource(url=url, retries=0, **settings)
    return HttpService(service, WarnOnce("reward.url")).score(samples, Deadline.after(60))


def functions(tmp_path: Path, name: str) -> FunctionScores:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return FunctionScores(f"{file}:{name}", workers=2, seconds=10.0)


@torch.no_grad()
def test_a_model_scores_texts_as_transformers_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each text with bos and the end token; of a long one the last tokens."""
    torch.manual_seed(1)
    words = "one two three four five six"
    build_tokenizer([words], tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    config = LlamaConfig(**TINY, num_labels=1, pad_token_id=tokenizer.pad_token_id, max_position_embeddings=8)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    samples = [Sample("one two ", "three", 2, {}), Sample("", "six", 2, {}), Sample(words, " " + words, 7, {})]
    expected = []
    for sample in samples:
        ids = [*tokenizer(sample.prompt + sample.response).input_ids, tokenizer.eos_token_id][-8:]
        expected.append(model(input_ids=torch.tensor([ids])).logits.item())
    with served(ModelScores(tmp_path, "cpu", 2, None)) as url:
        assert scores_at(url, samples) == pytest.approx(expected, abs=1e-5)
        assert scores_at(url, samples, level="token") == [None] * 3
        refused = httpx.post(url, json={"query": ["one"], "num_tokens": [1]})
    assert refused.status_code == 400 and "a model gives one score a response" in refused.text
    printed = capsys.readouterr().out
    assert "127.0.0.1: 3 responses in " in printed and f" s, mean {sum(expected) / 3:.4g}\n" in printed
    with pytest.raises(UserError, match="--max-tokens 9: the model has 8 positions"):
        ModelScores(tmp_path, "cpu", 2, 9)


def test_a_function_receives_texts_labels_and_steps(tmp_path: Path) -> None:
    with served(functions(tmp_path, "judged")) as url:
        assert scores_at(url, SAMPLES) == [2 + 10 + 0.5, 0 + 30 + 2]
        # without its labels it cannot be called, which is no fault of the request
        failed = httpx.post(url, json={"query": ["a"]})
        assert failed.status_code == 500 and "missing 1 required positional argument: 'label'" in failed.text
    with served(functions(tmp_path, "absent")) as url:
        nothing, nan = scores_at(url, SAMPLES)
        assert nothing is None and isinstance(nan, float) and nan != nan
    with served(FunctionScores(f"{FUNCTIONS}:per_token", 1, 10.0)) as url:
        assert scores_at(url, SAMPLES, level="token") == [[0, 1], [0, 1, 2, 3]]
    with served(FunctionScores(f"{FUNCTIONS}:by_step", 1, 10.0)) as url:
        samples = [Sample("", "ab.c", 4, {})]
        assert scores_at(url, samples, level="step", separator=".") == [StepScores((3, 4), (3.0, 1.0))]


MALFORMED = [
    (b"{", "'{' is not JSON"),
    (b"[]", "expected an object with the key 'query', found []"),
    (b"{}", "query: expected a list of texts, found None"),
    (b'{"query": ["a", 1]}', "query: expected a list of texts, found ['a', 1]"),
    (b'{"query": ["a"], "prompts": []}', "prompts: expected a list of 1 texts, as of query, found []"),
    (b'{"query": ["a"], "prompts": ["b"]}', "query: 'a' does not contain its prompt 'b'"),
    (b'{"query": ["a"], "labels": "x"}', "labels: expected a list of 1, as of query, found 'x'"),
    (b'{"query": ["a"], "num_tokens": [true]}', "num_tokens: expected a list of 1 whole numbers, found [True]"),
    (b'{"query": ["a"], "steps": ["a"]}', "steps: expected a list of 1 lists of texts, found ['a']"),
]


def test_other_requests_are_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    with served(functions(tmp_path, "failing"), TOKEN) as url:
        for body, sentence in MALFORMED:
            found = httpx.post(url, content=body, headers=bearer)
            assert (found.status_code, found.text) == (400, sentence)
        for headers in ({}, {"Authorization": "Bearer another"}):
            found = httpx.post(url, json={"query": []}, headers=headers)
            assert found.status_code == 401 and TOKEN not in found.text
        assert scores_at(url, SAMPLES, headers={"Authorization": "Bearer ${REWARD_SECRET}"}) == [None, None]
        assert httpx.get(url).status_code == 400
        taken = CliRunner().invoke(app, ["serve-reward", f"{tmp_path}/own.py:failing", "--port", url[17:-6]])
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert len(lines) == len(MALFORMED) + 4 and lines[-2].endswith(
        "500: raised ValueError: out of order (own.py, line 11)"
    )
    assert taken.exit_code == 2 and "Address already in use; give others" in taken.stderr
    assert "Traceback" not in printed.err


IN_BODY = b"POST / HTTP/1.1\r\nContent-Length: 99999\r\n\r\n{"


@pytest.mark.parametrize("first", [b"P", IN_BODY], ids=["head", "body"])
def test_slow_bytes_of_one_address_keep_no_other_from_its_scores(
    first: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has half of the connections, each of which is closed though a byte comes in time."""
    monkeypatch.setattr(score_server.ScoreServer, "MOST_CONNECTIONS", 8)
    monkeypatch.setattr(score_server, "RECEIVE_SECONDS", 0.5)
    monkeypatch.setattr(score_server._ScoreHandler, "timeout", 0.5)
    with served(functions(tmp_path, "absent")) as url:
        address, stranger = ("127.0.0.1", int(url.split(":")[2].partition("/")[0])), ("127.0.0.2", 0)
        slow = [socket.create_connection(address, 5, source_address=stranger) for _ in range(12)]
        for connection in slow:
            with suppress(ConnectionError):
                connection.sendall(first)
        assert httpx.post(url, json={"query": ["a"]}).status_code == 200
        begin, open_ones = time.monotonic(), list(slow)
        while open_ones and time.monotonic() < begin + 20:
            time.sleep(0.1)
            open_ones = [connection for connection in open_ones if is_open(connection)]
        assert not open_ones
        ours = httpx.HTTPTransport(local_address="127.0.0.2")
        assert httpx.Client(transport=ours).post(url, json={"query": ["a"]}).status_code == 200
    for connection in slow:
        connection.close()


def is_open(connection: socket.socket) -> bool:
    """Whether the server reads on; sends it a byte."""
    connection.setblocking(False)
    try:
        connection.send(b"a")
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


@pytest.mark.parametrize(
    ("address", "other", "is_one"),
    [
        ("fd00::1", "fd00::ffff:2", True),
        ("fd00::1", "fd00:0:0:1::1", False),
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
    ],
)
def test_connections_of_one_site_are_counted_together(address: str, other: str, is_one: bool) -> None:
    assert (token_server._site(address) == token_server._site(other)) == is_one


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("own.py:judged", "--label", "1 2"), "--label '1 2': expected the name of a parameter, such as label"),
        (("own.py:judged", "--label", "class"), "--label 'class': expected the name of a parameter"),
        (("own.py:judged", "--timeout", "inf"), "--timeout inf: expected a finite number of seconds"),
        (("own.py:gone",), "own.py defines no 'gone'; it has judged, absent, failing"),
        (("gone",), "expected path/to/file.py:name or module:name, found 'gone'"),
        (("own.py:judged", "--batch", "3"), "--batch 3: goes with a model, and own.py:judged is a function; remove it"),
        ((".", "--workers", "3"), "--workers 3: goes with a function, and . is a model; remove it"),
        ((".",), "no tokenizer in it"),
        (("own.py:judged", "--secret", "NOPE"), "--secret NOPE: expected an environment variable"),
        (("own.py:judged", "--secret", "hunter2"), "--secret ***: expected an environment variable"),
        (("broken.py:late",), "broken.py:late: could not be loaded"),
    ],
)
def test_a_server_that_cannot_start_says_why(
    words: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    Path("broken.py").write_text("import gone\n\n\ndef late(prompts, responses):\n    return []\n")
    found = CliRunner().invoke(app, ["serve-reward", *words])
    assert found.exit_code == 2 and sentence in found.stderr and len(found.stderr.splitlines()) == 1
