"""Environments of Gymnasium whose observations and actions can be written as text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from flexrlhf.api import Turn

ACTION = r"-?\d+(?:\.\d+)?|\[[^\[\]]*\]"
"""Default of an action in a reply: a number or a list of numbers; the last one counts."""
MARKED = re.compile("\x1b\\[[0-9;]*m(.*?)\x1b\\[0m", re.DOTALL)
"""Text that a terminal would show in another colour."""


class GymnasiumText:
    """One episode of ``gymnasium:ID``.

    An observation is the text that ``render_mode: ansi`` renders, with colours as brackets, a text as it is, or JSON.
    The action is the reply if actions are texts, else JSON in it. A reply without an action has a message about it.

    name:      id of the environment
    action:    regular expression that finds actions in a reply; a group is the action itself
    options:   arguments of ``gymnasium.make``
    """

    library, extra = "gymnasium", "gymnasium"

    def __init__(self, name: str, action: str = ACTION, **options: Any) -> None:
        import gymnasium

        self._environment = gymnasium.make(name, **options)
        self._spaces = gymnasium.spaces
        self._action = re.compile(action, re.DOTALL)

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """Begin; the column ``options`` of the row, if any, is that of Gymnasium's reset."""
        observation, _ = self._environment.reset(seed=seed % 2**31, options=row.get("options"))
        return self._text(observation)

    def step(self, reply: str) -> Turn:
        """Take the action of a reply."""
        space = self._environment.action_space
        try:
            action = reply if isinstance(space, self._spaces.Text) else self._parsed(reply)
            is_valid = space.contains(action)
        except (ValueError, TypeError, IndexError):
            is_valid = False
        if not is_valid:
            return Turn(f"no action of {space}")
        observation, reward, is_terminated, is_truncated, _ = self._environment.step(action)
        return Turn(self._text(observation), float(reward), bool(is_terminated or is_truncated))

    def close(self) -> None:
        """End the environment."""
        self._environment.close()

    def _parsed(self, reply: str) -> Any:
        """Return the last action in a reply, as its space has it. Raises ValueError without one."""
        found = [match[match.lastindex or 0] for match in self._action.finditer(reply)]
        value = json.loads(found[-1] if found else "")
        if isinstance(self._environment.action_space, self._spaces.Discrete) and not isinstance(value, int):
            raise ValueError("no integer")
        (action,) = self._environment.action_space.from_jsonable([value])
        return action

    def _text(self, observation: Any) -> str:
        if self._environment.render_mode == "ansi":
            return MARKED.sub(r"[\1]", str(self._environment.render()))
        return observation if isinstance(observation, str) else json.dumps(observation, default=_plain)


def _plain(value: Any) -> Any:
    """Return a value of numpy as JSON has it, another one as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
