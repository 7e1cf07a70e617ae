"""Replies of environments to the rows of a replica: called for, encoded, and shared with its other ranks.

The first rank of a replica calls the environments,
since two calls for one episode may differ; the others receive what it publishes in the job's store, so that an
instruction that reads a reply communicates with no rank.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from threading import Event

from flexrlhf.comm.mailbox import Mailbox
from flexrlhf.comm.reduce import RankGroup
from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.environments.base import EpisodeCall, EpisodeReply
from flexrlhf.environments.episodes import Episodes
from flexrlhf.errors import RunStopped, UserError
from flexrlhf.operators.outcomes import EpisodeState
from flexrlhf.runs.episode_log import EpisodeLog
from flexrlhf.serving.model_calls import ModelCall
from flexrlhf.user_code.call_failures import CallFailure, WarnOnce

POLL_SECONDS = 0.01
"""Time between two looks for replies that another rank publishes."""
GRACE_SECONDS = 60.0
"""Time after the deadline of replies in which the first rank of a replica publishes them."""


@dataclass(frozen=True)
class Request:
    """A turn of the policy that awaits its reply, or an episode that begins.

    call:    of the environment.
    encode:  a reply to tokens. Raises UserError.
    room:    response tokens that are left; None of an episode that begins.
    """

    call: EpisodeCall
    encode: Callable[[EpisodeReply], Sequence[int]]
    room: int | None = None


@dataclass(frozen=True)
class RowReply:
    """Reply to one row.

    state:    of its episode afterwards, one of ``EpisodeState``.
    tokens:   that follow the turn, or that are the prompt if there are some.
    reward:   of the turn; NaN if the environment failed.
    tool_calls, failed_tool_calls: of the turn.
    digest:   of the environment's reply.
    most_tokens, stops: of the turn that follows, as a program has called for it; None, (): it has no limits of its own.
    refused_calls: of a program since its reply before.
    reason:   of a failure; empty without one.
    seconds:  that it took; None without a reply.
    """

    state: str
    tokens: tuple[int, ...] = ()
    reward: float = 0.0
    tool_calls: int = 0
    failed_tool_calls: int = 0
    digest: int = 0
    most_tokens: int | None = None
    stops: tuple[str, ...] = ()
    refused_calls: int = 0
    reason: str = ""
    seconds: float | None = None


@dataclass(frozen=True)
class Received:
    """Replies to some rows.

    rows:   as each row receives its own.
    calls:  of environments, with the replies that the log has to keep.
    """

    rows: list[RowReply]
    calls: Sequence[tuple[EpisodeCall, EpisodeReply]] = ()


class ReplySource:
    """Replies to the rows of this rank."""

    def __init__(
        self,
        settings: EnvironmentSpec,
        episodes: Episodes | None,
        log: EpisodeLog | None,
        mailbox: Mailbox,
        seconds: float,
        most: int = 1,
    ) -> None:
        """
        episodes:  None: they are replayed, so that no environment is called.
        log:       replies since the last checkpoint; None: the run writes none.
        mailbox:   for the replies of replicas with several ranks.
        seconds:   limit of all replies to one turn.
        most:      calls that are awaited at the same time.
        """
        self._settings, self._episodes, self.log = settings, episodes, log
        self._mailbox, self._seconds = mailbox, seconds
        self._threads = ThreadPoolExecutor(most, "environment")
        self._warn = WarnOnce("environment")
        self._counts, self._is_closed = Counter[str](), Event()

    def submit(self, requests: Sequence[Request], model: str, replica: RankGroup) -> Future[Received]:
        """Begin to call for replies; all ranks of a ``replica`` of ``model`` submit the same requests."""
        if self._episodes is None or not requests:
            done = Future[Received]()
            done.set_result(Received([RowReply("going on" if each.room is None else "ended") for each in requests]))
            return done
        if replica.group is None:
            return self._threads.submit(self._called, self._episodes, requests)
        name = f"{model}/{replica.ranks[0]}"
        key = f"{name}/{self._counts[name]}"
        self._counts[name] += 1
        if replica.is_first:
            return self._threads.submit(self._published, self._episodes, requests, key)
        return self._threads.submit(self._received, key, len(replica.ranks) - 1)

    def receive(self, replies: Future[Received], step: int) -> list[RowReply]:
        """Return replies that are there, which ``step`` receives."""
        received = replies.result()
        if self.log is not None:
            self.log.add(step, received.calls)
        return received.rows

    def close(self) -> None:
        """End the processes of the environments."""
        self._is_closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._episodes is not None:
            self._episodes.close()

    def _published(self, episodes: Episodes, requests: Sequence[Request], key: str) -> Received:
        replies = self._called(episodes, requests)
        self._mailbox.publish(key, [asdict(each) for each in replies.rows])
        return replies

    def _received(self, key: str, readers: int) -> Received:
        """Return the replies that the first rank of the replica publishes; the last of ``readers`` removes them."""
        # waiting in the store would keep this rank's other uses of it waiting
        end = time.monotonic() + 2 * self._seconds + GRACE_SECONDS
        while not self._mailbox.has([key]):
            if self._is_closed.wait(POLL_SECONDS) or time.monotonic() > end:
                raise RunStopped(
                    f"environment {self._settings.name}: the replica's first rank has published no replies"
                )
        lists = ("tokens", "stops")
        found = [{**each, **{name: tuple(each[name]) for name in lists}} for each in self._mailbox.read(key)]
        replies = [RowReply(**each) for each in found]
        self._mailbox.clear([key], readers)
        return Received(replies)

    def _called(self, episodes: Episodes, requests: Sequence[Request]) -> Received:
        """Return the replies of environments; episodes that end here for want of room have the rest of their reward."""
        called = [each.call for each in requests]
        given = self._replies(episodes, called)
        replies = [self._row_reply(*each) for each in zip(requests, given, strict=True)]
        cut = [
            index for index, each in enumerate(replies) if each.state == "no room" and not requests[index].call.is_last
        ]
        calls = [
            replace(call, replied=(*call.replied, replies[index].digest), is_ended=True)
            for index, call in ((index, requests[index].call) for index in cut)
        ]
        # programs whose calls cannot be read have failed; a further conversation costs its call alone
        failed = [
            replace(each.call, replied=(*each.call.replied, reply.digest), reason=reply.reason, is_failed=True)
            for each, reply in zip(requests, replies, strict=True)
            if reply.reason and self._settings.api is not None and (each.room is not None or not each.call.sequence)
        ]
        if failed:
            episodes.replies(failed, self._seconds)
        rest = self._replies(episodes, calls)
        for index, last in zip(cut, rest, strict=True):
            self._warn(last.failure)
            whole = replace(replies[index], reward=replies[index].reward + last.reward)
            replies[index] = whole if last.failure is None else _failed(whole, last.failure)
        return Received(replies, list(zip([*called, *calls], [*given, *rest], strict=True)))

    def _replies(self, episodes: Episodes, calls: Sequence[EpisodeCall]) -> list[EpisodeReply]:
        """Return one reply a call: of the log, or of its environment."""
        found = [None if self.log is None else self.log.find(call) for call in calls]
        due = [call for call, reply in zip(calls, found, strict=True) if reply is None]
        given = iter(episodes.replies(due, self._seconds) if due else ())
        return [next(given) if reply is None else reply for reply in found]

    def _row_reply(self, request: Request, reply: EpisodeReply) -> RowReply:
        """Return a reply as its row receives it."""
        call, room = request.call, request.room
        seconds = None if reply.failure is not None else reply.seconds
        counts = reply.tool_calls, reply.failed_tool_calls, reply.digest
        made = RowReply("going on", (), reply.reward, *counts, refused_calls=reply.refused_calls, seconds=seconds)
        self._warn(reply.failure)
        if reply.failure is not None:
            return _failed(made, reply.failure)
        if room is not None and (reply.is_done or room == 0 or call.is_last):
            return replace(made, state="ended" if reply.is_done else "no room" if room == 0 else "last turn")
        if room is None and not reply.messages and not reply.call:
            return made
        if reply.call:
            called = ModelCall.read(reply.call)
            made = replace(made, most_tokens=called.most_tokens, stops=called.stop)
        try:
            tokens = tuple(request.encode(reply))
        except UserError as error:
            step, row = call.key
            where = f"turn {call.number}" if call.number else "reset"
            failure = CallFailure("tokens", f"{self._settings.name}: step {step}, row {row}, {where}: {error}")
            self._warn(failure)
            return replace(_failed(made, failure), reason=str(error))
        has_room = room is None or len(tokens) < room
        return replace(made, tokens=tokens) if has_room else replace(made, state="no room")


def _failed(reply: RowReply, failure: CallFailure) -> RowReply:
    return replace(reply, state=EpisodeState.of_failure(failure.kind), reward=math.nan)
