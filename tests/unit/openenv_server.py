"""A server of OpenEnv for test_environments.py: an environment that repeats what it hears, three times."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State
from openenv.core.env_server.http_server import create_fastapi_app


class Word(Action):
    message: str


class Heard(Observation):
    text: str


class Echo(Environment[Word, Heard, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Heard:
        self.heard = [f"seed {seed} {options.get('greeting')}"]
        return Heard(text=self.heard[0])

    def step(self, action: Word, timeout_s: float | None = None, **options: Any) -> Heard:
        self.heard.append(action.message)
        return Heard(text=" ".join(self.heard), reward=len(self.heard) / 2, done=len(self.heard) == 3)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Echo, Word, Heard, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
