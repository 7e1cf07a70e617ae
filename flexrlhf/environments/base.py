"""Input and output of an environment. Worker processes load this: the standard library alone.

An environment is a class with ``reset`` and ``step``, plain or ``async``; one object runs one episode:

    class Guess:
        def reset(self, row, seed):              # row: the columns of the prompt's row
            self.number = seed % 10
            return "guess a digit"               # a text, or messages; "" adds nothing to the prompt
        def step(self, reply):                   # the text of the policy's turn
            right = reply.strip() == str(self.number)
            return Turn("right" if right else "wrong", reward=float(right), is_done=right)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any, Protocol, Self

from flexrlhf.user_code.call_failures import CallFailure

Messages = str | Sequence[Mapping[str, Any]]
"""A text, or messages with role and content."""


@dataclass(frozen=True)
class Turn:
    """Reply of an environment to one turn of the policy.

    messages:  a text, or messages with role and content
    reward:    of the turn
    is_done:   whether the episode has ended
    """

    messages: Messages = ""
    reward: float = 0.0
    is_done: bool = False


class Environment(Protocol):
    """One episode. Methods may be ``async``.

    Two more are called if there are any: ``truncate() -> float`` for the reward of an episode that ends after its last
    turn, or for want of room, without the environment; ``close`` at the end of any.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> Messages: ...

    def step(self, reply: str) -> Turn: ...


def is_stale(key: tuple[int, int], step: int, steps: int) -> bool:
    """Return whether no call of an episode, which may have turns in so many ``steps``, follows in ``step``."""
    return key[0] < step - steps


@dataclass(frozen=True)
class ProgramTurn:
    """A turn of the policy that a program called for: as JSON the text of a turn of an ``EpisodeCall``.

    text:           without its end token
    is_ended:       by an end token or a stop string, not by a limit
    is_thinking:    whether the prompt ends inside of a thought
    prompt_tokens, tokens: before the turn, and its own
    """

    text: str
    is_ended: bool = True
    is_thinking: bool = False
    prompt_tokens: int = 0
    tokens: int = 0

    @property
    def as_json(self) -> str:
        """The turn as a text, which ``read`` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the turn of a text."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class SequenceRecord:
    """Turns of one sequence so far, and digests of the replies, the one of its beginning first."""

    turns: tuple[str, ...] = ()
    replied: tuple[int, ...] = ()


@dataclass(frozen=True)
class EpisodeCall:
    """One call of an episode: its reset, or the reply to its last turn.

    A process that does not have the episode replays it from its reset, so that it may move or be resumed.

    key:       (step, row)
    row:       columns of the prompt's row
    seed:      of the episode, a function of (seed, step, prompt)
    turns:     texts of the policy's turns so far; empty: the reset
    is_last:   whether no turn follows, so that the episode is closed
    replied:   digests of the earlier replies, the one of reset first: a replay must repeat them
    is_ended:  whether the episode ends here, after the reply to its last turn, for want of room for another
    reason:    why its program can have no turn; with ``is_failed`` the episode has failed by it
    siblings:  turns and replies of all sequences of the episode of a program
    sequence:  number of this one among them
    """

    key: tuple[int, int]
    row: Mapping[str, Any]
    seed: int
    turns: tuple[str, ...] = ()
    is_last: bool = False
    replied: tuple[int, ...] = ()
    is_ended: bool = False
    reason: str = ""
    is_failed: bool = False
    siblings: tuple[SequenceRecord, ...] = ()
    sequence: int = 0

    @property
    def episode(self) -> tuple[int, int]:
        """Key of the episode's first sequence."""
        return self.key[0], self.key[1] - self.sequence

    def ends_with(self, reply: EpisodeReply) -> bool:
        """Whether no call of the episode follows after its ``reply``."""
        return self.is_last or self.is_ended or reply.is_done or reply.failure is not None

    @property
    def number(self) -> int:
        """Number of the call in its episode; 0 is the reset."""
        return len(self.turns) + self.is_ended


@dataclass(frozen=True)
class EpisodeReply:
    """Reply to one call.

    messages:   (role, content) of the environment's messages; role "" for a text that is no chat
    reward:     of the turn
    is_done:    whether the episode has ended
    tool_calls: calls of tools in the turn
    failed_tool_calls: calls that could not be parsed, named no tool, had wrong arguments, or whose tool raised
    seconds:    that the environment took
    failure:    why there is no reply, and the episode is left out
    call:       next call of a program, a ``ModelCall`` with the messages that follow the turns before; "": none
    refused_calls: that the program has made since the reply before and could not have
    """

    messages: tuple[tuple[str, str], ...] = ()
    reward: float = 0.0
    is_done: bool = False
    tool_calls: int = 0
    failed_tool_calls: int = 0
    seconds: float = 0.0
    failure: CallFailure | None = field(default=None)
    call: str = ""
    refused_calls: int = 0

    @property
    def digest(self) -> int:
        """Digest, in 32 bits with a sign, of all that an episode depends on; never 0, which stands for no reply."""
        said = self.call or self.messages
        found = blake2b(repr((said, self.reward)).encode(), digest_size=4).digest()
        return int.from_bytes(found, "little", signed=True) or 1
