"""Processes of environments on other machines than the ranks whose rows they have: server and client.

The first rank of a node serves the processes there, ``flexrlhf serve`` those of a machine without ranks. A request has
the calls of one process, as JSON, and the response their replies; it carries the token of the job, as those for files
do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import Any, Protocol

from flexrlhf.environments.base import EpisodeCall, EpisodeReply
from flexrlhf.environments.episode_process import EpisodeProcess
from flexrlhf.errors import UserError
from flexrlhf.runs.token_server import Refused, TokenHandler, TokenServer
from flexrlhf.user_code.call_failures import CallFailure
from flexrlhf.user_code.deadline import Deadline

GRACE_SECONDS = 30.0
"""Time after the deadline of replies in which a machine ends processes and responds."""
SPARE_CONNECTIONS = 16
MOST_BYTES = 1 << 30
"""Most bytes of a request."""


class ServedProcesses(Protocol):
    """Processes by the paths of requests."""

    def find(self, path: str) -> EpisodeProcess:
        """Return the process of a path. Raises Refused if there is none."""
        ...

    def end(self, path: str) -> None:
        """End the process of a path, if there is one."""
        ...


class FixedProcesses:
    """Processes whose paths are known when their server starts."""

    def __init__(self, processes: Mapping[str, EpisodeProcess]) -> None:
        self._processes = processes

    def find(self, path: str) -> EpisodeProcess:
        """Return the process of a path. Raises Refused if there is none."""
        if path not in self._processes:
            raise Refused(HTTPStatus.NOT_FOUND, "there is no such process")
        return self._processes[path]

    def end(self, path: str) -> None:
        """End the process of a path."""
        self.find(path).close()

    def close(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.close()


class EpisodeServer(TokenServer):
    """Server of the processes that ``processes`` finds by the paths of their requests."""

    def __init__(
        self, host: str, processes: ServedProcesses, token: str, seconds: float, most: int, what: str, port: int = 0
    ) -> None:
        """``most``: processes, which have one connection at a time; others as of ``TokenServer``."""
        super().__init__(host, _CallHandler, token, seconds, 2 * most + SPARE_CONNECTIONS, what, port)
        self.processes = processes


class _CallHandler(TokenHandler):
    """Calls of one process."""

    server: EpisodeServer

    def do_POST(self) -> None:  # noqa: N802 (http.server's name)
        """Return the replies to the calls, and whether the process runs its episodes at once."""
        with self._responding():
            self._verify_token()
            process, body = self.server.processes.find(self.path), self._body()
            calls = [_read_call(each) for each in body["calls"]]
            replies = process.replies(calls, Deadline.after(body["seconds"]))
            found = {"replies": [asdict(each) for each in replies], "is_async": process.is_async}
            self._respond(HTTPStatus.OK, json.dumps(found))

    def do_DELETE(self) -> None:  # noqa: N802
        """End the process."""
        with self._responding():
            self._verify_token()
            self.server.processes.end(self.path)
            self._respond(HTTPStatus.OK, "")

    def do_GET(self) -> None:  # noqa: N802
        """Respond if there is the process of the path, or can be."""
        with self._responding():
            self._verify_token()
            self.server.processes.find(self.path)
            self._respond(HTTPStatus.OK, "")

    def _body(self) -> Any:
        if (length := self._length()) > MOST_BYTES:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"more than {MOST_BYTES} bytes of calls")
        return json.loads(self.rfile.read(length))


@dataclass(eq=False)
class RemoteProcess:
    """Process of another machine that runs episodes.

    setting:     that names the machine, and its name there, such as environment.nodes and node 1
    host, port:  of its server.
    path:        of the process.
    token:       of the job.
    is_async:    whether it runs its episodes at once; known with the first reply.
    """

    setting: tuple[str, str]
    host: str
    port: int
    path: str
    token: str
    is_async: bool = False
    cpu_seconds: float = 0.0

    def replies(self, calls: Sequence[EpisodeCall], deadline: Deadline) -> list[EpisodeReply]:
        """Return one reply a call, in order; each has a failure if the machine does not respond.

        Raises UserError for a row that is not sent to other machines.
        """
        try:
            body = json.dumps({"calls": [asdict(each) for each in calls], "seconds": deadline.left()}).encode()
        except TypeError as error:
            raise UserError(
                f"{self.setting[0]}: a row of the data is not sent to {self.setting[1]}: {error}; remove the column, "
                f"or {self.setting[0]}"
            ) from None
        try:
            found = json.loads(self._request("POST", body, max(0.0, deadline.left()) + GRACE_SECONDS))
        except (OSError, HTTPException) as error:
            reason = str(error) or type(error).__name__
            failure = CallFailure("machine", f"{self.setting[1]} does not reply: {reason}")
            return [EpisodeReply(failure=failure)] * len(calls)
        self.is_async = found["is_async"]
        return [_read_reply(each) for each in found["replies"]]

    def check(self) -> None:
        """Raise UserError unless the machine has the process, or can start it."""
        try:
            self._request("GET", b"", GRACE_SECONDS)
        except (OSError, HTTPException) as error:
            raise UserError(
                f"{self.setting[0]}: {self.setting[1]}: no episodes run there ({error or type(error).__name__}); start "
                f"`flexrlhf serve CONFIG --listen {self.setting[1]}` there, with the config of this run"
            ) from None

    def close(self) -> None:
        """End the process."""
        with suppress(OSError, HTTPException):
            self._request("DELETE", b"", GRACE_SECONDS)

    def _request(self, method: str, body: bytes, seconds: float) -> bytes:
        connection = HTTPConnection(self.host, self.port, timeout=seconds)
        try:
            connection.request(method, self.path, body, {"Authorization": f"Bearer {self.token}"})
            response = connection.getresponse()
            if response.status >= 400:
                raise HTTPException(response.read().decode())
            return response.read()
        finally:
            connection.close()


def _read_call(raw: Mapping[str, Any]) -> EpisodeCall:
    step, row = raw["key"]
    return EpisodeCall(**{**raw, "key": (step, row), "turns": tuple(raw["turns"]), "replied": tuple(raw["replied"])})


def _read_reply(raw: Mapping[str, Any]) -> EpisodeReply:
    messages = tuple((role, text) for role, text in raw["messages"])
    failure = None if raw["failure"] is None else CallFailure(**raw["failure"])
    return EpisodeReply(**{**raw, "messages": messages, "failure": failure})
