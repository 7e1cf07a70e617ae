"""OpenAI's protocol: requests as clients send them, replies as they read them, and clients that misbehave."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection
from typing import Any

import pytest

from flexrlhf.serving.model_calls import CalledFunction, CallRefused, ModelCall, ModelReply
from flexrlhf.serving.openai_replies import reply_message
from flexrlhf.serving.policy_server import PolicyServer
from flexrlhf.serving.sent_replies import same_reply

KEY = "key-of-an-episode"
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Tell it.", "parameters": {"type": "object", "properties": {}}},
}
HELLO = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}


@dataclass
class Porter:
    """Policy that calls the functions it is given, and repeats a text otherwise."""

    calls: list[ModelCall] = field(default_factory=list)
    refusals: list[tuple[str, str]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    def knows(self, key: str) -> bool:
        return key == KEY

    def reply(self, key: str, call: ModelCall) -> ModelReply:
        self.calls.append(call)
        text = call.prompt if call.prompt is not None else call.messages[-1]["content"]
        if text == "wait":
            # as an episode, which has a deadline
            self.released.wait(20)
            raise CallRefused(HTTPStatus.GONE, "the episode has ended", code="episode_ended")
        if text == "end":
            raise CallRefused(HTTPStatus.TOO_MANY_REQUESTS, "the episode has had its turns", code="no_turns")
        if call.tools and call.messages[-1]["role"] != "tool":
            called = CalledFunction("weather", '{"place": "Bern"}')
            return ModelReply("", "where?", (called, called), "tool_calls", 7, 5)
        return ModelReply(f"You said {text}", finish="length" if call.most_tokens == 1 else "stop", tokens=3)

    def refused(self, key: str, sentence: str) -> None:
        self.refusals.append((key, sentence))


@contextmanager
def served(sampling: dict[str, float] | None, **limits: Any) -> Iterator[tuple[PolicyServer, Porter]]:
    porter = Porter()
    server = PolicyServer(porter, "policy", sampling, **limits)
    with server.serving():
        yield server, porter
    porter.released.set()


@pytest.fixture(scope="module")
def of_a_run() -> Iterator[tuple[PolicyServer, Porter]]:
    with served({"temperature": 1.0, "top_p": 1.0, "top_k": 0}) as found:
        yield found


class Client:
    """One connection, which is kept."""

    def __init__(self, server: PolicyServer, key: str = KEY) -> None:
        self.connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
        self.headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def send(self, path: str, content: Any = None, method: str = "POST", **headers: str) -> tuple[int, Any]:
        """Return status and body."""
        body = content if isinstance(content, bytes | None) else json.dumps(content).encode()
        changed = {name.replace("_", "-"): value for name, value in headers.items()}
        self.connection.request(method, path, body, self.headers | changed)
        response = self.connection.getresponse()
        text = response.read().decode()
        if response.headers["Content-Type"] != "application/json":
            return response.status, text
        assert response.status == 200 or response.headers["x-should-retry"] == "false"
        return response.status, json.loads(text)


def changed(**keys: Any) -> dict[str, Any]:
    return HELLO | keys


def test_one_connection_has_models_messages_and_texts(of_a_run: tuple[PolicyServer, Porter]) -> None:
    server, porter = of_a_run
    client = Client(server)
    assert client.send("/v1/models", method="GET")[1]["data"][0]["id"] == "policy"
    assert client.send("/models/policy/", method="GET")[1]["id"] == "policy"
    first = client.connection.sock
    for path in ("/v1/chat/completions", "/chat/completions/"):
        status, found = client.send(path, changed(stop="\n", max_completion_tokens=9, max_tokens=1))
        message = {"role": "assistant", "content": "You said hello"}
        assert status == 200 and found["object"] == "chat.completion" and found["model"] == "policy"
        assert found["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
        assert found["usage"] == {"prompt_tokens": 0, "completion_tokens": 3, "total_tokens": 3}
        assert porter.calls[-1] == ModelCall(({"role": "user", "content": "hello"},), stop=("\n",), most_tokens=1)
    found = client.send("/v1/completions", {"prompt": ["once"], "stop": ["a", "b"]})[1]
    assert found["object"] == "text_completion" and found["choices"][0]["text"] == "You said once"
    assert porter.calls[-1] == ModelCall(prompt="once", stop=("a", "b"))
    assert client.connection.sock is first and first is not None


def test_a_conversation_with_functions_is_read_as_chat_templates_take_it(of_a_run: tuple[PolicyServer, Porter]) -> None:
    server, porter = of_a_run
    client = Client(server)
    strict = WEATHER | {"function": WEATHER["function"] | {"strict": True, "description": None}}
    question = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "Weather?", "name": "guest"},
    ]
    reply = client.send("/v1/chat/completions", changed(messages=question, tools=[strict]))[1]["choices"][0]
    message, call = reply["message"], porter.calls[-1]
    assert reply["finish_reason"] == "tool_calls" and message["content"] is None
    assert [each["function"]["arguments"] for each in message["tool_calls"]] == ['{"place": "Bern"}'] * 2
    assert call.tools == ({"type": "function", "function": {"name": "weather", "parameters": {**PLAIN}}},)
    # as the openai client returns the message with all of its keys
    echoed = message | {"refusal": None, "annotations": None, "audio": None, "function_call": None}
    one, other = (each["id"] for each in message["tool_calls"])
    results = [{"role": "tool", "content": "rain", "tool_call_id": each} for each in (one, other)]
    client.send("/v1/chat/completions", changed(messages=[*question, echoed, *results], tools=[strict]))
    called = ModelReply("", "where?", (CalledFunction("weather", '{"place": "Bern"}'),) * 2)
    expected = [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "Weather?", "name": "guest"},
        reply_message(call, called),
        *results,
    ]
    assert one != other and list(porter.calls[-1].messages) == expected
    assert same_reply(porter.calls[-1].messages[2], called)
    for arguments, repeats in (('{"place":"Bern"}', True), ('{"place": "Basel"}', False), ("{", False)):
        for each in echoed["tool_calls"]:
            each["function"]["arguments"] = arguments
        echoed["reasoning_content"] = None
        client.send("/v1/chat/completions", changed(messages=[*question, echoed, *results], tools=[strict]))
        assert same_reply(porter.calls[-1].messages[2], called) == repeats
    client.send("/v1/chat/completions", changed(tools=[WEATHER], tool_choice="none"))
    assert porter.calls[-1].tools == ()


PLAIN = {"type": "object", "properties": {}}
TAKEN: list[dict[str, Any]] = [
    {"temperature": 1, "top_p": 1.0, "top_k": -1, "n": 1, "logit_bias": {}, "presence_penalty": 0.0, "seed": 7},
    {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": False},
    {"stream_options": {"include_usage": True}, "logprobs": False, "response_format": {"type": "text"}},
    {"temperature": None, "tools": None, "stop": None, "tool_choice": "auto", "model": None, "functions": None},
]
REFUSED: list[tuple[Any, str | None, str]] = [
    ({"temperature": 0.2}, "temperature", "the run samples at 1.0 (algorithm.temperature); leave it out, or set that"),
    ({"temperature": "hot"}, "temperature", "expected a number from 0 to 2, found 'hot'"),
    ({"seed": True}, "seed", "expected a whole number"),
    ({"n": 2}, "n", "n: 2 cannot be had here: a call has one reply; call once for each"),
    ({"tool_choice": "required"}, "tool_choice", "profile={'supports_forced_tool_choice': False}"),
    ({"response_format": {"type": "json_object"}}, "response_format", "leave it out, and reward the form"),
    ({"temprature": 1}, "temprature", "a parameter that is not known here; did you mean temperature?"),
    ({"zzz": 1}, "zzz", "a parameter that is not known here; leave it out"),
    ({"model": "gpt-4o"}, "model", "model: 'gpt-4o' is not served here; it is called 'policy'"),
    ({"messages": []}, "messages", "expected a list of 1 to 10000 objects, found []"),
    ({"messages": [{"role": "guest", "content": ""}]}, "messages[0].role", "expected one of system, user"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "a message of user has a text"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id", "names the call"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0]",
        "expected a part of type text, found 'image_url'",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "b"}}]}]},
        "messages[0].tool_calls[0]",
        "expected an id and a function with name and arguments",
    ),
    ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0]", "expected a tool of type function"),
    ({"stop": ["a"] * 17}, "stop", "expected a text or a list of at most 16"),
    ({"stream": "yes"}, "stream", "expected true or false, found 'yes'"),
    ({"max_tokens": 0}, "max_tokens", "expected a number of tokens from 1, found 0"),
    ({"prompt": "a"}, "messages", "messages go to /v1/chat/completions, a prompt to /v1/completions"),
    (b"{", None, "the request is not JSON: '{'"),
    (b"[1]", None, "expected an object, found [1]"),
    (b'{"a": NaN}', None, "the request is not JSON"),
    (b"\xff", None, "the request is not JSON"),
    (b'{"user": "\\ud800"}', None, "a text has half of a surrogate pair"),
    (b'{"user": ' + b"[" * 100 + b"]" * 100 + b"}", None, "the request has more than 64 levels"),
    (b"[" * 200_000, None, "the request has more than 64 levels"),
]


def test_requests_that_a_policy_cannot_serve_are_refused_by_name_and_counted(
    of_a_run: tuple[PolicyServer, Porter],
) -> None:
    server, porter = of_a_run
    client, path = Client(server), "/v1/chat/completions"
    for keys in TAKEN:
        assert client.send(path, changed(**keys))[0] == 200, keys
    first, before = client.connection.sock, len(porter.refusals)
    for keys, param, sentence in REFUSED:
        status, found = client.send(path, keys if isinstance(keys, bytes) else changed(**keys))
        error = found["error"]
        assert status == (404 if param == "model" else 400) and sentence in error["message"], (keys, error)
        assert error["type"] == "invalid_request_error" and error["param"] == param
        assert error["code"] in (None, "unsupported_value", "unknown_parameter", "model_not_found")
    assert client.connection.sock is first, "a refused request ends no connection"
    assert len(porter.refusals) == before + len(REFUSED) and {key for key, _ in porter.refusals} == {KEY}
    for path, method, status, sentence in (
        ("/v1/responses", "POST", 404, 'with openai-agents set_default_openai_api("chat_completions")'),
        ("/v1/embeddings", "POST", 404, "a policy has no embeddings"),
        ("/v1/elsewhere", "GET", 404, "/v1/models, /v1/chat/completions and /v1/completions are served"),
        ("/v1/chat/completions", "GET", 405, "send a POST"),
        ("/v1/models", "POST", 405, "send a GET"),
        ("/v1/models/gpt-4o", "GET", 404, "it is called 'policy'"),
        ("/v1/models", "DELETE", 400, "Unsupported method"),
    ):
        found = client.send(path, {} if method == "POST" else None, method)
        assert found[0] == status and sentence in found[1]["error"]["message"]
    found = client.send("/v1/chat/completions", HELLO, Content_Type="text/plain")
    assert found[0] == 415 and "expected application/json, found 'text/plain'" in found[1]["error"]["message"]
    before = len(porter.refusals)
    for key in ("another", "", "\xe4"):
        status, found = Client(server, key).send("/v1/chat/completions", HELLO)
        assert status == 401 and found["error"]["code"] == "invalid_api_key"
    # the policy counts its own
    status, found = client.send("/v1/chat/completions", changed(messages=[{"role": "user", "content": "end"}]))
    assert (status, found["error"]["code"]) == (429, "no_turns") and len(porter.refusals) == before


def test_a_served_policy_leaves_sampling_to_its_clients() -> None:
    with served(None) as (server, porter):
        client, own = Client(server), {"temperature": 0.2, "top_p": 0.5, "seed": 3}
        assert client.send("/v1/chat/completions", changed(**own))[0] == 200
        assert porter.calls[-1].sampling == own
        assert client.send("/v1/chat/completions", changed(n=2))[0] == 400
        assert client.send("/v1/chat/completions", changed(top_p=1.5))[0] == 400


def test_the_openai_client_reads_replies_streams_and_errors(of_a_run: tuple[PolicyServer, Porter]) -> None:
    openai = pytest.importorskip("openai")
    server, porter = of_a_run
    address: dict[str, Any] = {"base_url": f"http://127.0.0.1:{server.port}/v1", "api_key": KEY}
    client, hello = openai.OpenAI(**address), HELLO["messages"]
    assert [model.id for model in client.models.list()] == ["policy"]
    chat = client.chat.completions
    assert chat.create(model="policy", messages=hello).choices[0].message.content == "You said hello"
    assert client.completions.create(model="policy", prompt="once").choices[0].text == "You said once"
    message = chat.create(model="policy", messages=hello, tools=[WEATHER]).choices[0].message
    names = [call.function.name for call in message.tool_calls]
    assert names == ["weather", "weather"] and message.reasoning_content == "where?"
    results = [{"role": "tool", "content": "rain", "tool_call_id": call.id} for call in message.tool_calls]
    found = chat.create(model="policy", messages=[*hello, message, *results], tools=[WEATHER])
    assert found.choices[0].message.content == "You said rain" and len(porter.calls[-1].messages) == 4

    options = {"include_usage": True}
    chunks = list(chat.create(model="policy", messages=hello, tools=[WEATHER], stream=True, stream_options=options))
    assert [call.index for call in chunks[0].choices[0].delta.tool_calls] == [0, 1]
    assert chunks[1].choices[0].finish_reason == "tool_calls" and chunks[2].usage.total_tokens == 12
    texts = [chunk.choices[0].text for chunk in client.completions.create(model="policy", prompt="a", stream=True)]
    assert "".join(texts) == "You said a"
    with chat.stream(model="policy", messages=hello) as stream:
        assert stream.get_final_completion().choices[0].message.content == "You said hello"

    with pytest.raises(openai.BadRequestError, match="the run samples at 1.0"):
        chat.create(model="policy", messages=hello, temperature=0.1)
    with pytest.raises(openai.NotFoundError, match="with pydantic-ai use OpenAIChatModel"):
        client.responses.create(model="policy", input="hello")
    with pytest.raises(openai.AuthenticationError, match="not known here"):
        openai.OpenAI(**address | {"api_key": "another"}).models.list()
    before = len(porter.calls)
    with pytest.raises(openai.RateLimitError, match="has had its turns"):
        chat.create(model="policy", messages=[{"role": "user", "content": "end"}])
    assert len(porter.calls) == before + 1, "a refused call is not sent again"

    async def several() -> list[str]:
        async with openai.AsyncOpenAI(**address) as client:
            found = (client.completions.create(model="policy", prompt=str(number)) for number in range(50))
            return [each.choices[0].text for each in await asyncio.gather(*found)]

    assert asyncio.run(several()) == [f"You said {number}" for number in range(50)]


def head(path: str = "/v1/chat/completions", key: str = KEY, **headers: object) -> bytes:
    """Head of a request."""
    lines = {"Host": "here", "Authorization": f"Bearer {key}", "Content-Type": "application/json"} | headers
    return "\r\n".join([f"POST {path} HTTP/1.1", *(f"{name}: {each}" for name, each in lines.items()), "", ""]).encode()


def sized(body: bytes, **headers: object) -> bytes:
    """Request with its length."""
    return head(**{"Content-Length": len(body)} | headers) + body


WAITING = sized(json.dumps(changed(messages=[{"role": "user", "content": "wait"}])).encode())
PLAIN_REQUEST = sized(json.dumps(HELLO).encode())
MISBEHAVING: dict[str, tuple[bytes, bytes]] = {
    "says nothing": (b"", b""),
    "hangs in the first line": (b"POST /v1/ch", b"408"),
    "hangs in the head": (b"POST /v1/chat/completions HTTP/1.1\r\nHost: he", b"408"),
    "hangs before the body": (head(**{"Content-Length": 10}), b"408"),
    "hangs in the body": (head(**{"Content-Length": 10}) + b"{", b"408"),
    "hangs between requests": (PLAIN_REQUEST, b"200"),
    "speaks no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"400"),
    "has a line without end": (b"GET /" + b"a" * 100_000, b"414"),
    "has headers without end": (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200, b"431"),
    "has no length": (head() + b"{}", b"411"),
    "has a wrong length": (head(**{"Content-Length": -5}) + b"{}", b"411"),
    "sends chunks": (head(**{"Transfer-Encoding": "chunked"}) + b"2\r\n{}\r\n0\r\n\r\n", b"411"),
    "announces a giant": (head(**{"Content-Length": 10**12}), b"413"),
    "sends a giant": (sized(b"a" * 3_000_000), b"413"),
    "sends no JSON": (sized(b"{" * 1000), b"400"),
    "sends deep JSON": (sized(b"[" * 500_000), b"400"),
    "sends another content": (sized(b"a=b", **{"Content-Type": "application/x-www-form-urlencoded"}), b"415"),
    "has no key": (head(key="", **{"Content-Length": 2}) + b"{}", b"401"),
    "has a foreign key and a giant": (sized(b"a" * 3_000_000, Authorization="Bearer another"), b"401"),
    "has a foreign key and no body": (head(key="another", **{"Content-Length": 10**9}), b"401"),
    "sends many requests and reads nothing": (PLAIN_REQUEST * 2000, b"200"),
    "sends many wrong requests": (sized(b"{}") * 500, b"400"),
    "speaks HTTP/1.0": (PLAIN_REQUEST.replace(b"HTTP/1.1", b"HTTP/1.0"), b"200"),
    "speaks HTTP/0.9": (b"GET /v1/models\r\n", b"408"),
    "speaks another version": (b"GET /v1/models HTTP/3.0\r\n\r\n", b"400"),
    "has a path without end": (head(path="/v1/" + "a" * 60_000, **{"Content-Length": 2}) + b"{}", b"404"),
}
SECONDS = 0.4


def misbehave(server: PolicyServer, request: bytes) -> bytes:
    """Return all that the server sends before it ends the connection. Raises TimeoutError if it does not."""
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        with suppress(ConnectionError):
            connection.sendall(request)
        received = b""
        while True:
            try:
                block = connection.recv(1 << 16)
            except ConnectionError:
                return received
            if not block:
                return received
            received += block


def drip(server: PolicyServer, request: bytes) -> int:
    """Send single bytes until the server ends the connection; return their number."""
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        connection.setblocking(False)
        for number, byte in enumerate(request):
            try:
                connection.send(bytes([byte]))
                found = connection.recv(1 << 16)
            except BlockingIOError:
                time.sleep(0.02)
            else:
                assert found.startswith(b"HTTP/1.1 408")
                return number
    raise AssertionError("the server received all of it")


def leave(server: PolicyServer) -> None:
    """Call, and be gone before the reply."""
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        connection.sendall(WAITING)
        time.sleep(0.1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def test_thirty_clients_that_misbehave_end_in_time_and_cost_no_other_its_reply() -> None:
    """All at once, while others are served."""
    limits = {"most_bytes": 2_000_000, "head_seconds": SECONDS, "body_seconds": SECONDS, "idle_seconds": SECONDS}
    others = threading.active_count()
    with served({}, **limits) as (server, porter), ThreadPoolExecutor(64) as pool:
        begin = time.monotonic()
        ends = {name: pool.submit(misbehave, server, request) for name, (request, _) in MISBEHAVING.items()}
        dripping = [pool.submit(drip, server, part * 50) for part in (head(), PLAIN_REQUEST)]
        dripping.append(pool.submit(drip, server, head(**{"Content-Length": 5000}) + b"a" * 5000))
        leaving = [pool.submit(leave, server) for _ in range(3)]
        assert len(ends) + len(dripping) + len(leaving) >= 30
        client = Client(server)
        assert [client.send("/v1/chat/completions", HELLO)[0] for _ in range(20)] == [200] * 20
        for name, (_, status) in MISBEHAVING.items():
            found = ends[name].result()
            assert found.split(b" ")[1:2] == ([status] if status else []), (name, found[:200])
            body = found.partition(b"\r\n\r\n")[2]
            assert status in (b"", b"200") or b'{"error": {"message": "' in body, (name, found)
        assert all(1 < each.result() < 1000 for each in dripping)
        for each in leaving:
            each.result()
        assert time.monotonic() - begin < 15
        assert Client(server).send("/v1/models", method="GET")[0] == 200
        # of clients that are gone: their wait ends with the episode
        porter.released.set()
    end = time.monotonic() + 10
    while threading.active_count() > others and time.monotonic() < end:
        time.sleep(0.05)
    assert threading.active_count() <= others


def test_a_server_that_ends_closes_connections_that_wait() -> None:
    with served(None) as (server, porter):
        client = Client(server)
        assert client.send("/v1/models", method="GET")[0] == 200
        with ThreadPoolExecutor() as pool:
            call = changed(messages=[{"role": "user", "content": "wait"}])
            waiting = pool.submit(Client(server).send, "/v1/chat/completions", call)
            while not porter.calls:
                time.sleep(0.01)
            porter.released.set()
            status, found = waiting.result()
            assert (status, found["error"]["code"]) == (410, "episode_ended")
    assert client.connection.sock is not None and client.connection.sock.recv(1) == b""


def test_many_episodes_call_at_once() -> None:
    """200 of one address, each with two connections that are kept."""
    with served({}) as (server, porter), ThreadPoolExecutor(200) as pool:

        def play(number: int) -> list[int]:
            clients = [Client(server), Client(server)]
            return [client.send("/v1/completions", {"prompt": "a"})[0] for _ in range(3) for client in clients]

        assert all(found == [200] * 6 for found in pool.map(play, range(200)))
        assert len(porter.calls) == 1200
