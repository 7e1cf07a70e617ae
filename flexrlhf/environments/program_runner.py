"""Process in which the programs of episodes run (``environment.api``), by an interpreter of their own.

    PYTHON program_runner.py ORDERS OUTCOMES

ORDERS and OUTCOMES are the numbers of two pipes of JSON lines; the first order has the arguments of ``Runner``, which
reports how the program could be loaded. The interpreter needs neither flexrlhf nor its
libraries: of the package this loads modules that need the standard library alone.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from inspect import isasyncgenfunction, isawaitable, iscoroutinefunction, isgeneratorfunction, signature
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # the directory of the package has other modules, which might be of another version than this interpreter's
    _ROOT = Path(__file__).resolve().parents[1]
    _SPEC = importlib.util.spec_from_file_location(
        "flexrlhf", _ROOT / "__init__.py", submodule_search_locations=[str(_ROOT)]
    )
    assert _SPEC is not None and _SPEC.loader is not None, "a file has a loader"
    sys.modules["flexrlhf"] = importlib.util.module_from_spec(_SPEC)
    _SPEC.loader.exec_module(sys.modules["flexrlhf"])

from flexrlhf.config.code_loading import load_function
from flexrlhf.environments.process_limits import ProcessLimits, limit_process
from flexrlhf.environments.turn_checks import read_reward
from flexrlhf.user_code.call_failures import BadReply, CallFailure, Caught

STACK_BYTES = 2 << 20
"""Stack of the thread of an episode: there may be hundreds, and ``environment.memory_mb`` counts them."""


@dataclass(frozen=True)
class Api:
    """The policy as a model of OpenAI's API, for one episode.

    base_url:  of the API, with ``/v1``
    api_key:   of the episode
    model:     its name
    seed:      of the episode, a function of the run's seed, the step and the prompt
    """

    base_url: str
    api_key: str
    model: str
    seed: int


class Runner:
    """Episodes of this process: of an ``async`` program on one event loop, of another one in a thread each."""

    def __init__(
        self, outcomes: int, reference: str, options: dict[str, Any], memory_mb: int | None, open_files: int
    ) -> None:
        """Load the program ``reference``, and report why it cannot be called with ``options``, if so."""
        limit_process(ProcessLimits(memory_mb, open_files))
        self._options = options
        self._outcomes, self._lock = os.fdopen(outcomes, "w", encoding="utf-8"), threading.Lock()
        self._loop, self._under_way = asyncio.new_event_loop(), dict[str, Future[Any]]()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        threading.stack_size(STACK_BYTES)
        with Caught("raise", "raised") as loading:
            self._program = load_function(reference)
            _check_called(self._program, options)
        self._report({"key": ""}, loading.failure)

    def begin(self, order: dict[str, Any]) -> None:
        """Begin an episode."""
        key, row = order["key"], order["row"]
        api = Api(order["base_url"], key, order["model"], order["seed"])
        if iscoroutinefunction(self._program):
            self._under_way[key] = self._on_loop(self._episode(key, self._program(row, api, **self._options)))
        else:
            threading.Thread(target=self._in_thread, args=(key, row, api), daemon=True).start()

    def end(self, key: str) -> None:
        """Cancel an episode that is under way; one in a thread ends with its next call of the policy."""
        if (future := self._under_way.pop(key, None)) is not None:
            future.cancel()

    def _in_thread(self, key: str, row: dict[str, Any], api: Api) -> None:
        reward: float | None = None
        with Caught("raise", "raised") as caught:
            value = self._program(row, api, **self._options)
            if isawaitable(value):
                self._under_way[key] = self._on_loop(_awaited(value))
                value = self._under_way[key].result()
            reward = read_reward(value)
        self._report({"key": key, "reward": reward}, caught.failure)

    async def _episode(self, key: str, program: Coroutine[Any, Any, Any]) -> None:
        reward: float | None = None
        with Caught("raise", "raised") as caught:
            reward = read_reward(await program)
        self._report({"key": key, "reward": reward}, caught.failure)

    def _on_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _report(self, outcome: dict[str, Any], failure: CallFailure | None) -> None:
        self._under_way.pop(outcome["key"], None)
        failed = {} if failure is None else {"kind": failure.kind, "text": failure.text}
        with self._lock:
            self._outcomes.write(json.dumps({**outcome, **failed}) + "\n")
            self._outcomes.flush()


async def _awaited(value: Any) -> Any:
    return await value


def _check_called(program: Any, options: dict[str, Any]) -> None:
    """Raise BadReply for a program that could not be called."""
    if (
        not callable(program)
        or isinstance(program, type)
        or isasyncgenfunction(program)
        or isgeneratorfunction(program)
    ):
        raise BadReply(f"{program!r:.60} is no function run(row, api)")
    try:
        found = signature(program)
    except (ValueError, TypeError):
        return
    try:
        found.bind(None, None, **options)
    except TypeError as error:
        raise BadReply(f"{error}: it is called with (row, api) and environment.options, and takes {found}") from None


def main(orders: str, outcomes: str) -> None:
    """Run episodes until the orders end."""
    with os.fdopen(int(orders), encoding="utf-8") as lines:
        runner = Runner(int(outcomes), **json.loads(lines.readline()))
        for line in lines:
            order = json.loads(line)
            if "row" in order:
                runner.begin(order)
            else:
                runner.end(order["key"])
    # threads of programs may go on
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
