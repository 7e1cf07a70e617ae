"""Episodes on a machine without ranks: ``flexrlhf serve CONFIG`` there, and its client on the ranks of a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from http import HTTPStatus

from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.config.job_secret import MAKE, VARIABLE, derived_token, job_secret
from flexrlhf.environments.episode_process import EpisodeProcess, make_process
from flexrlhf.environments.sources import check_package
from flexrlhf.errors import UserError
from flexrlhf.placement.hosts import split_endpoint
from flexrlhf.runs.token_server import Refused
from flexrlhf.trainer.episode_server import EpisodeServer, RemoteProcess

OF_EPISODES = ("path", "tools", "options", "tool_format", "timeout_seconds", "memory_mb", "open_files")
"""Settings that both sides must have alike."""
IDLE_SECONDS = 60.0
"""Longest silence of a connection with the token."""
_NONCE = "episodes"


class ServiceProcesses:
    """Processes of the runs that call this machine, which start with their first call.

    A path is ``/DIGEST/RUN/RANK/ATTEMPT/NUMBER``: of the environment, and a process of a rank in an attempt of a run.
    A further attempt ends the processes of the one before, which may have been killed.
    """

    def __init__(self, settings: EnvironmentSpec, most: int) -> None:
        """``most``: processes at the same time."""
        self._settings, self._digest, self._most = settings, _digest(settings), most
        self._processes: dict[tuple[str, str], EpisodeProcess] = {}
        """By run, rank and attempt, and by number."""
        self._lock = threading.Lock()

    def find(self, path: str) -> EpisodeProcess:
        """Return the process of a path, a new one if there is none. Raises Refused for another environment."""
        digest, _, place = path.removeprefix("/").partition("/")
        attempt, _, number = place.rpartition("/")
        if digest != self._digest:
            raise Refused(HTTPStatus.CONFLICT, "its config has another environment, or other limits of it")
        with self._lock:
            rank = attempt.rpartition("/")[0]
            for key in [each for each in self._processes if each[0] != attempt and each[0].rpartition("/")[0] == rank]:
                # it may have a call under way, whose rank was killed
                threading.Thread(target=self._processes.pop(key).close, daemon=True).start()
            if (attempt, number) not in self._processes:
                if len(self._processes) >= self._most:
                    raise Refused(HTTPStatus.CONFLICT, f"all of its {self._most} processes are in use")
                self._processes[attempt, number] = make_process(self._settings)
            return self._processes[attempt, number]

    def end(self, path: str) -> None:
        """End the process of a path, if there is one."""
        attempt, _, number = path.removeprefix(f"/{self._digest}/").rpartition("/")
        with self._lock:
            process = self._processes.pop((attempt, number), None)
        if process is not None:
            process.close()

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            for process in self._processes.values():
                process.close()
            self._processes.clear()


@contextmanager
def serving_episodes(settings: EnvironmentSpec, endpoint: str, most: int) -> Iterator[None]:
    """Run episodes of ``settings`` for ranks of other machines while the body runs.

    ``endpoint``: HOST:PORT of this machine. ``most``: processes. Raises UserError without a secret, or a free port.
    """
    found = split_endpoint(endpoint)
    if found is None:
        raise UserError(f"--listen {endpoint}: expected HOST:PORT of this machine, such as cpu-1:29600")
    if not job_secret():
        raise UserError(f"{VARIABLE}: missing; the run and this machine recognise each other by it; {MAKE}")
    check_package(settings.path)
    processes = ServiceProcesses(settings, most)
    try:
        server = EpisodeServer(
            found[0], processes, derived_token(_NONCE), IDLE_SECONDS, most, "episodes of other machines", found[1]
        )
    except OSError as error:
        raise UserError(f"--listen {endpoint}: {error.strerror or error}") from None
    with server.serving():
        try:
            yield
        finally:
            processes.close()


def serve_forever(settings: EnvironmentSpec, endpoint: str, most: int) -> None:
    """Run episodes until a signal ends this process."""
    with serving_episodes(settings, endpoint, most):
        print(f"up to {most} processes of {settings.name} at {endpoint}; Ctrl-C ends them", flush=True)
        while True:
            time.sleep(3600)


def service_process(settings: EnvironmentSpec, endpoint: str, place: str) -> RemoteProcess:
    """Return a process on the machine at ``endpoint``. ``place``: run, rank, attempt and number, of this process alone.

    Raises UserError without a secret.
    """
    if not job_secret():
        raise UserError(f"{VARIABLE}: missing; environment.hosts has episodes run on other machines; {MAKE}")
    found = split_endpoint(endpoint)
    assert found is not None, "planning has checked the form"
    path = f"/{_digest(settings)}/{place}"
    return RemoteProcess(("environment.hosts", endpoint), *found, path, derived_token(_NONCE))


def _digest(settings: EnvironmentSpec) -> str:
    """Return a digest of what both sides must have alike."""
    return blake2b(settings.model_dump_json(include=set(OF_EPISODES)).encode(), digest_size=8).hexdigest()
