"""Scores of an HTTP service: the request's form, and that each way in which it fails ends as the table says."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from reward_server import Reply, Request, RewardServer, lengths, rewards

from flexrlhf.config.reward_sources import ServiceSource
from flexrlhf.rewards import services
from flexrlhf.rewards.base import Sample, Score
from flexrlhf.rewards.scorer import Scorer
from flexrlhf.rewards.services import HttpService
from flexrlhf.user_code.call_failures import CallFailure, WarnOnce
from flexrlhf.user_code.deadline import Deadline

Behaviour = Callable[[Request], Reply]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine's proxy would be http for the services of these tests; and a small limit of a reply."""
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(services, "MOST_BYTES", 10**6)
    yield


def samples(count: int, **columns: Any) -> list[Sample]:
    """Responses of 1, 2, 3 ... letters."""
    return [Sample("", "x" * (index + 1), 2, columns) for index in range(count)]


def source(*urls: str, **settings: Any) -> ServiceSource:
    defaults = {"timeout_seconds": 10.0, "deadline_seconds": 20.0, "retries": 2, "batch_size": 2}
    return ServiceSource(url=urls, **defaults | settings)


def service(*urls: str, **settings: Any) -> HttpService:
    return HttpService(source(*urls, **settings), WarnOnce(f"reward.url {', '.join(urls)}"), first_pause=0.01)


def entries(behaviour: Behaviour, count: int = 2, **settings: Any) -> tuple[list[Score], list[Request]]:
    with RewardServer(behaviour) as server:
        found = service(server.url, **settings).score(samples(count), Deadline.after(60))
        return found, server.requests


# --- requests and replies


def test_the_request_has_the_form_of_openrlhf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "x")
    http = [Sample("1+1=", "2", 2, {"label": "two", "other": 1}), Sample("ä\ud800", "3", 2, {})]
    with RewardServer() as server:
        assert service(server.url, headers={"Authorization": "Bearer ${REWARD_TOKEN}"}).score(
            http, Deadline.after(60)
        ) == [5, 3]
        (request,) = server.requests
    assert request.body == {"query": ["1+1=2", "ä\ud8003"], "prompts": ["1+1=", "ä\ud800"], "labels": ["two", None]}
    assert request.headers["Content-Type"] == "application/json"
    assert request.headers["Authorization"] == "Bearer x"


def test_the_labels_are_the_column_that_is_named() -> None:
    with RewardServer() as server:
        service(server.url, label="answer").score(
            [Sample("", "x", 1, {"answer": [1, math.nan], "label": 2})], Deadline.after(60)
        )
        (label,) = server.requests[0].body["labels"]
        assert label == pytest.approx([1, math.nan], nan_ok=True)
        service(server.url, label="missing").score([Sample("", "x", 1, {"answer": 1})], Deadline.after(60))
        assert server.requests[1].body["labels"] == [None]


@pytest.mark.parametrize(
    "body", ['{"rewards": [1, 2.5]}', '{"scores": [1, 2.5]}', "[1, 2.5]", '{"rewards": [1, 2.5], "scores": [3, 4]}']
)
def test_replies_of_several_forms_are_taken(body: str) -> None:
    assert entries(lambda _: Reply(body))[0] == [1, 2.5]


def test_scores_of_tokens() -> None:
    """The service receives how many."""
    found, requests = entries(lambda _: rewards([[1, 2], [3]]), level="token")
    assert found == [[1, 2], None]
    assert [request.body["num_tokens"] for request in requests] == [[2, 2]]


def test_answers_keep_their_order_over_batches() -> None:
    def later_ones_first(request: Request) -> Reply:
        return Reply(lengths(request).body, pause=0.2 / len(request.body["query"][0]))

    found, requests = entries(later_ones_first, count=7)
    assert found == [1, 2, 3, 4, 5, 6, 7]
    assert sorted(len(request.body["query"]) for request in requests) == [1, 2, 2, 2]


def test_batches_go_to_the_services_in_turn_from_step_to_step() -> None:
    with RewardServer() as first, RewardServer() as second:
        http = service(first.url, second.url)
        http.score(samples(6), Deadline.after(60))
        assert (len(first.requests), len(second.requests)) == (2, 1)
        http.score(samples(6), Deadline.after(60))
        assert (len(first.requests), len(second.requests)) == (3, 3)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_requests_at_a_time_than_allowed(concurrency: int) -> None:
    with RewardServer(lambda request: Reply(lengths(request).body, pause=0.05)) as server:
        assert service(server.url, concurrency=concurrency).score(samples(16), Deadline.after(60)) == list(range(1, 17))
        assert server.most_at_once == concurrency


# --- faults


FAULTS: dict[str, tuple[Reply, str]] = {
    "status 500": (Reply("no", status=500), "status 500"),
    "status 404": (Reply("no", status=404), "status 404"),
    "slow": (rewards([1, 2], pause=1.5), "no reply within 1 s"),
    "dripping": (rewards([1, 2], drip=0.1), "no reply within 1 s"),
    "dropped": (rewards([1, 2], drops=True), "RemoteProtocolError"),
    "not JSON": (Reply("<html>"), "returned '<html>', which is not JSON"),
    "deep": (Reply("[" * 200_000), "which is not JSON"),
    "odd codec": (Reply("<html>", header=("Content-Type", "text/html; charset=uu")), "returned '<html>', which is not"),
    "odd cookie": (Reply("no", status=500, header=("Set-Cookie", "\xff=1")), "status 500"),
    "long": (Reply(" " * (10**6 + 1)), "returned more than 1 MB"),
    "no text": (Reply(b"\xff\xfe"), "which is not JSON"),
    "too few": (rewards([1]), "returned 1 scores for 2 responses"),
    "too many": (rewards([1, 2, 3]), "returned 3 scores for 2 responses"),
    "texts": (rewards(["1", "2"]), "returned '1' instead of a number"),
    "one number": (rewards(1.5), "returned 1.5 instead of a list of scores"),
    "another key": (Reply('{"error": "busy"}'), "returned {'error': 'busy'} instead of a list of scores"),
    "null": (Reply("null"), "returned None instead of a list of scores"),
}


def limit_of(fault: str) -> dict[str, float]:
    """A short one only where the test waits for it; a good reply needs less on a busy machine too."""
    return {"timeout_seconds": 1.0} if fault in ("slow", "dripping") else {}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_costs_nothing(fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, requests = entries(
        lambda request: FAULTS[fault][0] if request.number < 2 else lengths(request), **limit_of(fault)
    )
    assert found == [1, 2]
    assert len(requests) == 3
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_stays_costs_the_batch_and_is_reported_once(
    fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reply, words = FAULTS[fault]
    with RewardServer(lambda request: reply if request.body["query"][0] != "xxx" else lengths(request)) as server:
        http = service(server.url, retries=1, **limit_of(fault))
        for _ in range(2):
            assert http.score(samples(6), Deadline.after(60)) == [None, None, 3, 4, None, None]
        assert len(server.requests) == 2 * (2 + 1 + 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"flexrlhf: reward.url {server.url}: ") and words in line


def test_nan_and_null_are_no_reason_for_a_retry() -> None:
    body = '{"rewards": [NaN, null, Infinity, 1]}'
    found, requests = entries(lambda _: Reply(body), count=4, batch_size=4)
    assert found == pytest.approx([math.nan, None, math.inf, 1], nan_ok=True)
    assert len(requests) == 1


def test_a_retry_goes_to_the_next_service() -> None:
    with RewardServer(lambda _: Reply(status=503)) as broken, RewardServer() as good:
        http = service(broken.url, good.url, retries=1)
        assert http.score(samples(8), Deadline.after(60)) == list(range(1, 9))
        assert (len(broken.requests), len(good.requests)) == (2, 4)


def test_pauses_grow() -> None:
    """Up to 0.1, 0.2, 0.4 ... seconds at random; nine of up to 0.1 would be over within the deadline."""
    with RewardServer(lambda _: Reply(status=500)) as server:
        http = HttpService(source(server.url, retries=9, deadline_seconds=2), WarnOnce("reward.url"), first_pause=0.1)
        assert http.score(samples(1), Deadline.after(60)) == [None]
        assert 1 < len(server.requests) < 10


def test_the_deadline_of_a_batch_ends_its_retries(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    found, requests = entries(lambda _: Reply(status=500, pause=0.2), retries=1000, deadline_seconds=2)
    assert found == [None, None]
    assert time.monotonic() - start < 10
    assert 2 <= len(requests) <= 10
    assert "no scores within 2 s; last status 500" in capsys.readouterr().err


def test_the_deadline_of_a_step_names_the_last_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """A service that is down is named where all its retries together are too late."""
    with RewardServer(lambda _: Reply(status=500)) as server:
        found = Scorer([source(server.url, retries=1000)], "reward", 3).score(samples(2))
    assert found.failed == 2
    line = capsys.readouterr().err
    assert line.startswith(f"flexrlhf: reward.url {server.url}: not all scores within 3 s")
    assert "; last status 500; further ones" in line


def test_batches_that_the_step_has_no_time_for_have_no_score(capsys: pytest.CaptureFixture[str]) -> None:
    """Requests that wait for their turn, too."""

    def slow_later(request: Request) -> Reply:
        return Reply(lengths(request).body, pause=3.0 if request.number else 0.0)

    with RewardServer(slow_later) as server:
        scorer = Scorer([source(server.url, concurrency=1)], "reward", 2)
        start = time.monotonic()
        found = scorer.score(samples(20))
        assert time.monotonic() - start < 15
        assert found.totals[:2] == [1, 2] and found.failed == 18
        assert len(server.requests) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"flexrlhf: reward.url {server.url}: not all scores within 2 s, half of the run's timeout_seconds"
    )


def test_a_service_that_times_out_again_and_again_is_left_alone_for_the_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with RewardServer(lambda _: Reply(pause=0.4)) as server:
        http = service(server.url, timeout_seconds=0.1, retries=0, concurrency=1)
        for count in (3, 6):
            assert http.score(samples(20), Deadline.after(60)) == [None] * 20
            assert len(server.requests) == count
    assert capsys.readouterr().err.count("3 timeouts in a row; the step's other batches are not sent") == 1


def test_a_service_that_dies_halfway_costs_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    with RewardServer() as server:
        http = service(server.url)
        assert http.score(samples(4), Deadline.after(60)) == [1, 2, 3, 4]
        server.die()
        start = time.monotonic()
        assert http.score(samples(4), Deadline.after(60)) == [None] * 4
    assert time.monotonic() - start < 5
    assert "ConnectError" in capsys.readouterr().err


def test_the_scorer_calls_several_services(capsys: pytest.CaptureFixture[str]) -> None:
    def half(request: Request) -> Reply:
        return rewards([None if text == "x" else 10 for text in request.body["query"]])

    with RewardServer(half) as server:
        scorer = Scorer([source(server.url, weight=0.5), source(server.url, weight=-1.0)], "cost", 60)
        found = scorer.score(samples(3))
        scorer.close()
    assert found.totals == pytest.approx([math.nan, -5, -5], nan_ok=True)
    assert found.failed == 1
    assert f"flexrlhf: cost.url {server.url}: returned no score for a response" in capsys.readouterr().err


def test_each_kind_of_failure_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    warn = WarnOnce("reward.url")
    one, two, three = CallFailure("a", "one"), CallFailure("a", "two"), CallFailure("b", "three")
    for failure in (one, None, two, three):
        warn(failure)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[2].partition(";")[0] for line in lines] == ["one", "three"]
