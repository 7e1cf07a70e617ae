"""Episodes: turns of the policy, calls of the environments of a rank's rows, and the columns that replies change."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flexrlhf.comm.mailbox import Mailbox
from flexrlhf.comm.world import World
from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.data.examples import Example
from flexrlhf.data.turn_tokens import TurnTokens
from flexrlhf.engines.base import Batch, Sampling
from flexrlhf.environments.base import EpisodeCall, EpisodeReply, ProgramTurn, SequenceRecord, is_stale
from flexrlhf.environments.call_forms import ends_in_thought
from flexrlhf.environments.episode_process import Key
from flexrlhf.environments.episodes import Episodes
from flexrlhf.environments.tool_schemas import EnvironmentTools
from flexrlhf.objectives.context import Columns
from flexrlhf.operators.columns import Column
from flexrlhf.operators.outcomes import EpisodeState
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.episode_log import EpisodeLog
from flexrlhf.runs.recorded_columns import RecordedColumns
from flexrlhf.runs.run_files import RunFiles
from flexrlhf.serving.model_calls import ModelCall
from flexrlhf.trainer.episode_replies import Received, ReplySource, Request, RowReply
from flexrlhf.trainer.execution import OperatorRun
from flexrlhf.trainer.open_rows import TOOL_CALLS, OpenRows, TurnLimit, parts_of
from flexrlhf.trainer.reply_times import ReplyTimes

AddReplies = Callable[[Tensor, Sequence[RowReply]], None]
"""Function that adds replies to the rows at some places."""
LATE_SHARE = 0.05
"""Share of the time since the first token of a generate that a rank waits with nothing to decode: replies that are not
there then are late."""
_LONGEST_MARK = 16
"""Tokens at the end of a prompt that may open a thought."""
OF_LATE = (
    *("tokens", "attention_mask", "response_mask", "finished"),
    *("episode", "turns", Column.TURN_ENDS, Column.REPLIED),
)
"""Columns of a generate by which a reply is late at its end."""


class EnvironmentCaller:
    """Caller of the environments of this rank's rows."""

    def __init__(
        self,
        settings: EnvironmentSpec,
        source: ReplySource,
        tokens: TurnTokens,
        decode: Callable[..., str],
        times: ReplyTimes,
        carries_late: bool = False,
        late_replies_of: RecordedColumns | None = None,
    ) -> None:
        """
        decode:  tokens to text, special tokens included.
        times:   of replies, for the metrics.
        carries_late: whether the next step goes on with rows whose reply is late.
        late_replies_of: another run, whose rows were late where this run's are to be; None: none.
        """
        self.settings, self.source, self.tokens, self.times = settings, source, tokens, times
        self.carries_late, self.late_replies_of, self._decode = carries_late, late_replies_of, decode
        self.late: dict[Key, Future[Received]] = {}
        """Replies to rows that an earlier step has carried on."""
        self.limits: dict[Key, TurnLimits] = {}
        """Limits of the turns under way that programs have called for."""

    @property
    def log(self) -> EpisodeLog | None:
        """Replies since the last checkpoint; None: the run writes none."""
        return self.source.log

    def play(self, run: OperatorRun, rows: OpenRows, sampling: Sampling) -> int | None:
        """Have ``rows`` sample and receive replies, until each has ended or has its tokens of this step.

        Returns how many go on in the next step since their reply is late; None: each reply is awaited.
        """
        carries = self.carries_late and bool(run.operator.carries)
        # a program may leave out rows whose reply is late
        step, steps = sampling.step, rows.shape.segments
        self.late = {key: replies for key, replies in self.late.items() if not is_stale(key, step, steps)}
        self.limits = {key: limits for key, limits in self.limits.items() if not is_stale(key, step, steps)}
        episodes = _Episodes(self, run, rows, sampling, carries)
        run.model.engine.advance(episodes, sampling)
        episodes.close()
        if run.model.replica.is_first:
            self.times.add_wait(step, episodes.waited)
        if not carries:
            return None
        if self.log is not None:
            self.log.add_cut(step, episodes.late_after)
        return int(episodes.is_late.sum())

    def turn(self, tokens: Sequence[int], before: Sequence[int], sampling: Sampling) -> str:
        """Return a turn as its environment receives it: the text without its end token, or a ``ProgramTurn``.

        before:  all tokens before the turn, those of the prompt included.
        """
        has_end = bool(tokens) and tokens[-1] in sampling.eos_token_ids
        text = self._decode(tokens[:-1] if has_end else tokens)
        if self.settings.api is None:
            return text
        is_ended = has_end or any(stop in text for stop in sampling.stop)
        is_thinking = ends_in_thought(self._decode(before[-_LONGEST_MARK:]), self.settings.tool_format)
        return ProgramTurn(text, is_ended, is_thinking, len(before), len(tokens)).as_json

    def prompt(self, example: Example, reply: EpisodeReply) -> Sequence[int]:
        """Return the prompt of a row: of the data with the messages of the reset behind it, or the call of a program.

        Raises UserError for one that cannot be read, or is too long.
        """
        if not reply.call:
            return self.tokens.prompt(example, reply.messages)
        call = ModelCall.read(reply.call)
        if call.prompt is not None:
            return self.tokens.text_prompt(call.prompt)
        return self.tokens.of_tools(call.tools).chat_prompt(call.messages)

    def reply(self, example: Example, end: int | None, reply: EpisodeReply) -> Sequence[int]:
        """Return the tokens between a turn, whose end token is ``end`` if it has one, and the next one.

        Raises UserError as ``prompt``.
        """
        is_ended = end is not None
        if not reply.call:
            return self.tokens.reply(reply.messages, is_ended=is_ended, is_chat=bool(example.turns), end=end)
        call = ModelCall.read(reply.call)
        if call.prompt is not None:
            return self.tokens.reply((("", call.prompt),), is_ended=is_ended, is_chat=False)
        return self.tokens.of_tools(call.tools).chat_reply(call.messages, is_ended, end)

    def close(self) -> None:
        """End the processes of the environments."""
        self.source.close()


class TurnLimits(NamedTuple):
    """Limits of a turn: its tokens, None if the call has no such limit, and stop strings."""

    tokens: int | None
    stops: tuple[str, ...]


class _Episodes:
    """Episodes of the rows of one generate, turn by turn: a source of rows for ``Engine.advance``."""

    def __init__(
        self, caller: EnvironmentCaller, run: OperatorRun, rows: OpenRows, sampling: Sampling, carries_late: bool
    ) -> None:
        """Begin those that the step takes, and call again for the replies that were late."""
        self._caller, self._run, self._rows, self._sampling = caller, run, rows, sampling
        self._samples, self.most_rows = rows.batch.samples_per_prompt, len(rows.batch)
        # rows of an episode, of which a program may use further ones
        self._sequences = rows.shape.sequences if caller.settings.api is not None else 1
        self._taken = list(zip(rows.steps.tolist(), rows.taken.tolist(), strict=True))
        self._turn_tokens = self._limits_of_turns()
        self._place_of = {taken: place for place, taken in enumerate(self._taken)}
        self._examples = run.examples_of(rows.batch)
        # whether ranks compute passes without each other, so that each may have its own number of rounds
        self._is_alone = run.model.replica.group is None and not run.model.placed.in_lockstep
        # rows that an engine samples from, or that await a reply
        self._is_busy = torch.zeros_like(rows.exists)
        # rows that go on in the next step since their reply is late, and rows whose reply is awaited by record
        self.is_late, self._is_expected = torch.zeros_like(rows.exists), torch.zeros_like(rows.exists)
        self._carries_late, self._takes = carries_late, bool(rows.is_new.any())
        self._recorded = self._late_by_record() if carries_late else {}
        self.waited = 0.0
        """Time for which this rank had nothing to decode."""
        # when this rank began to decode, and how long it had waited until then
        self._first: tuple[float, float] | None = None
        self._requests: list[tuple[int, Request]] = []
        self._awaited: dict[Future[Received], tuple[Tensor, AddReplies]] = {}
        # calls for the next conversation of each episode, by the place of its row
        self._further: dict[Future[Received], int] = {}
        # texts of the policy's turns, and digests of the replies, that of the reset first
        self._turns: list[list[str]] = [[] for _ in self._taken]
        self._replied: list[list[int]] = [[] for _ in self._taken]
        begun = (rows.exists & rows.has_begun).nonzero().squeeze(1).tolist()
        for place in begun:
            self._turns[place], self._replied[place] = self._earlier(place)
        self._noise = [row // rows.shape.sequences for _, row in self._taken]
        awaiting = rows.awaits_reply(self._turn_tokens)
        new = (awaiting & ~rows.has_begun).nonzero().squeeze(1).tolist()
        self._submit([(place, Request(self._call(place), self._encode_prompt(place))) for place in new], self._begin)
        # limits of turns that were called for before this process began
        is_known = caller.settings.api is None
        unknown = [] if is_known else [each for each in begun if self._key(each) not in caller.limits]
        self._submit([(each, self._repeated(each)) for each in unknown if not awaiting[each]], self._learn)
        self._call_for((awaiting & rows.has_begun).nonzero().squeeze(1))
        for place in new:
            self._await_further(place)

    def due(self, wait: bool) -> Batch | None:
        """Return the rows that have a turn, None if none has. In the planned order all rows have ended theirs, and
        the environments have replied to all of them."""
        is_free = self._run.operator.is_free
        if is_free or wait:
            self._submit(self._requests, self._add)
            self._requests = []
            self._receive_replies(FIRST_COMPLETED if is_free else ALL_COMPLETED, waits=not is_free)
        places = self._places
        while is_free and wait and not len(places) and self._awaited:
            if self._patience == 0.0:
                self._carry()
                break
            self._receive_replies(FIRST_COMPLETED, waits=True)
            places = self._places
        if self._first is None and len(places):
            self._first = time.monotonic(), self.waited
        batch = self._rows.continued(places, self._turn_tokens)
        if self._caller.settings.api is not None:
            limits = [self._caller.limits[self._key(place)] for place in places.tolist()]
            batch = replace(batch, stops=tuple(each.stops for each in limits))
        if self._sequences > 1:
            batch = batch.with_columns(
                {"noise_row": places.new_tensor([self._noise[each] for each in places.tolist()])}
            )
        if not (len(places) or self._is_busy.any() if self._is_alone else self._run.has_rows(batch)):
            return None
        self._is_busy[places] = True
        return batch

    def close(self) -> None:
        """Order further conversations of an episode by how they begin: ones that begin at once come in any order."""
        rows, k = self._rows, self._sequences
        if k == 1:
            return
        places = range(len(self._taken))
        order = sorted(places, key=lambda at: (at // k, at % k > 0, not rows.exists[at], self._noise[at]))
        index = rows.taken.new_tensor(order)
        rows.exists[:] = rows.exists[index]
        for values in rows.state.values():
            values[:] = values[index]

    def receive(self, batch: Batch, columns: Mapping[str, Tensor]) -> None:
        """Add ``columns`` that an engine has generated of ``batch``, and call for replies to turns that have ended."""
        rows = self._rows
        keys = zip(batch["noise_step"].tolist(), batch.rows.tolist(), strict=True)
        places = torch.tensor([self._place_of[key] for key in keys], dtype=torch.int64, device=batch.rows.device)
        self._is_busy[places] = False
        rows.add(places, columns, self._run.model.version)
        is_over = rows.has_whole_turn(self._turn_tokens) | self._is_cut
        self._call_for(places[is_over[places]])

    @property
    def late_after(self) -> dict[Key, int | None]:
        """Rows at the end, by episode, with the turn whose reply is awaited; None: of the last turn."""
        found = self._rows.late_after(self._turn_tokens)
        return {self._key(place): number for place, number in found.items()}

    @property
    def _is_cut(self) -> Tensor:
        """Rows bool (n,) that have no token left."""
        return self._rows.has_last_segment & (self._rows.left == 0)

    @property
    def _places(self) -> Tensor:
        places = self._rows.open_places
        return places[~self._is_busy[places] & ~self.is_late[places]]

    @property
    def _patience(self) -> float | None:
        """Time for which this rank still awaits replies with nothing to decode; None: until one is there.

        A rank that has taken rows awaits the first reply: no generate ends before it has begun.
        """
        if not self._carries_late or (self._first is None and self._takes):
            return None
        awaited = torch.cat([places for places, _ in self._awaited.values()])
        if (self._rows.has_last_segment | self._is_expected)[awaited].any():
            return None
        if self._first is None:
            return 0.0
        begun, before = self._first
        return max(0.0, LATE_SHARE * (time.monotonic() - begun) - (self.waited - before))

    def _carry(self) -> None:
        """Leave the replies that are awaited to the next step."""
        for replies, (places, _) in self._awaited.items():
            self._put_off(int(places), replies)
        self._awaited = {}

    def _put_off(self, place: int, replies: Future[Received]) -> None:
        self._is_busy[place], self.is_late[place] = False, True
        self._caller.late[self._key(place)] = replies

    def _call_for(self, places: Tensor) -> None:
        """Prepare the calls for replies to rows whose turns have ended."""
        rows = self._rows
        lengths = rows.context.sum(1)
        room = (rows.context.shape[1] - lengths).masked_fill(self._is_cut, 0)
        found = (values[places].tolist() for values in (rows.turn_starts, lengths, room))
        calls = zip(places.tolist(), *found, strict=True)
        self._requests += [(place, self._request(place, *each)) for place, *each in calls]
        self._is_busy[places] = True

    def _submit(self, calls: Sequence[tuple[int, Request]], then: AddReplies) -> None:
        """Call for the replies to rows, all together or of each row by itself; ``then`` receives them."""
        is_free, model = self._run.operator.is_free, self._run.model
        size, rows = 1 if is_free else max(1, len(calls)), self._rows.batch.rows
        for first in range(0, len(calls), size):
            places, requests = zip(*calls[first : first + size], strict=True)
            replies = self._caller.late.pop(requests[0].call.key, None)
            if replies is None:
                replies = self._caller.source.submit(requests, model.placed.name, model.replica)
            if self._is_late_by_record(places[0], requests[0].call):
                self._put_off(places[0], replies)
                continue
            self._awaited[replies] = rows.new_tensor(places), then
            self._is_busy[self._awaited[replies][0]] = True

    def _is_late_by_record(self, place: int, call: EpisodeCall) -> bool:
        """Whether the step has ended without the reply to the ``call`` of a row before; else, if it has ended before,
        the reply is awaited. The row may get further than it did then, but is in no later step than its last one."""
        if place not in self._recorded:
            return False
        self._is_expected[place] = True
        return call.number == self._recorded[place] and not self._rows.has_last_segment[place]

    def _late_by_record(self) -> dict[int, int | None]:
        """Return the late rows of this step as they were when it was executed before."""
        caller, step, rows, suffix = self._caller, self._sampling.step, self._rows, self._run.operator.suffix
        if caller.late_replies_of is None or not self._taken:
            cut = {} if caller.log is None else caller.log.cut(step)
            keys = map(self._key, range(len(self._taken)))
            return {place: cut[key] for place, key in enumerate(keys) if key in cut}
        names = [f"{name}{suffix}" for name in OF_LATE]
        found = caller.late_replies_of.rows_of(names, step, rows.batch.rows.tolist())
        state = {name.removesuffix(suffix): values.to(rows.exists.device) for name, values in found.items()}
        return replace(rows, state=Columns(state)).late_after(self._turn_tokens)

    def _receive_replies(self, condition: str, waits: bool) -> None:
        """Receive the replies that are there. ``waits``: until ``condition`` of ``concurrent.futures.wait`` holds."""
        begun = time.monotonic()
        done = wait_for([*self._awaited, *self._further], self._patience if waits else 0, condition).done
        self.waited += (time.monotonic() - begun) * waits
        for replies in [each for each in self._awaited if each in done]:
            places, then = self._awaited.pop(replies)
            self._is_busy[places] = False
            received = self._caller.source.receive(replies, self._sampling.step)
            self._learn(places, received)
            if then != self._learn:
                then(places, received)
                for place, reply in zip(places.tolist(), received, strict=True):
                    self._replied[place].append(reply.digest)

        for replies in [each for each in self._further if each in done]:
            self._open(self._further.pop(replies), *self._caller.source.receive(replies, self._sampling.step))

    def _await_further(self, first: int) -> None:
        """Call for the next conversation of the episode whose first row is at ``first``, if there is a row for it."""
        places = range(first + 1, first + self._sequences)
        place = next((place for place in places if not (self._rows.exists[place] or self._replied[place])), None)
        if place is not None:
            self._submit_further(place, Request(self._call(place), self._encode_prompt(place)))

    def _submit_further(self, place: int, request: Request) -> None:
        model = self._run.model
        self._further[self._caller.source.submit([request], model.placed.name, model.replica)] = place

    def _open(self, place: int, reply: RowReply) -> None:
        """Begin a further conversation of an episode; nothing if it has ended."""
        self._replied[place].append(reply.digest)
        if reply.tokens:
            self._rows.exists[place] = True
            places = self._rows.taken.new_tensor([place])
            self._learn(places, [reply])
            self._begin(places, [reply])
        elif reply.reason:
            # its program has an error in place of a turn
            call = replace(self._call(place), replied=(reply.digest,), is_ended=True, reason=reply.reason)
            self._submit_further(place, Request(call, lambda _: (), room=0))
        else:
            return
        self._await_further(place - place % self._sequences)

    def _noise_row(self, place: int) -> int:
        """Return the number of a row in its noise: of the conversations of a program it follows from what they begin
        with, since those that are begun at once come in any order."""
        own = self._taken[place][1] // self._rows.shape.sequences
        if self._sequences == 1:
            return own
        prompt, earlier = self._texts_of(place)[0], range(place - place % self._sequences, place)
        number = sum(bool(self._rows.exists[each]) and self._texts_of(each)[0] == prompt for each in earlier)
        digest = hashlib.blake2b(repr((prompt, number)).encode(), digest_size=4).digest()
        return own + (int.from_bytes(digest, "little") >> 1 << 32)

    def _learn(self, places: Tensor, replies: Sequence[RowReply]) -> None:
        """Store the limits of the turns that follow."""
        caller, step = self._caller, self._sampling.step
        if self._run.model.replica.is_first:
            caller.times.add_refused(step, sum(each.refused_calls for each in replies))
        if caller.settings.api is not None:
            assert isinstance(self._turn_tokens, Tensor), "turns of programs have limits of their own"
            for place, reply in zip(places.tolist(), replies, strict=True):
                caller.limits[self._key(place)] = TurnLimits(reply.most_tokens, reply.stops)
                self._turn_tokens[place] = self._limit_of(place)

    def _limits_of_turns(self) -> TurnLimit:
        """Return the most tokens of the turns of rows."""
        if self._caller.settings.api is None:
            return self._caller.settings.turn_tokens
        return self._rows.batch.rows.new_tensor([self._limit_of(place) for place in range(len(self._taken))])

    def _limit_of(self, place: int) -> int:
        """Return the most tokens of the turn of a program's row."""
        called = self._caller.limits.get(self._key(place))
        limits = (self._caller.settings.turn_tokens, None if called is None else called.tokens)
        return min([self._rows.context.shape[1], *(each for each in limits if each is not None)])

    def _repeated(self, place: int) -> Request:
        """Return the request for the last reply that a row has received."""
        made = self._call(place)
        turns, replied = tuple(self._turns[place]), tuple(self._replied[place])
        call = replace(made, turns=turns, replied=replied)
        return Request(call, self._encode_prompt(place)) if not turns else Request(call, lambda _: (), room=1)

    def _encode_prompt(self, place: int) -> Callable[[EpisodeReply], Sequence[int]]:
        return partial(self._caller.prompt, self._examples[place])

    def _begin(self, places: Tensor, replies: Sequence[RowReply]) -> None:
        """Begin the episodes of rows by the replies to their resets."""
        rows = self._rows
        for place, reply in zip(places.tolist(), replies, strict=True):
            state, width = rows.state, rows.prompt
            if reply.tokens:
                state["tokens"][place, :width], state["attention_mask"][place, :width] = self._sampling.pad_token_id, 0
                state["tokens"][place, width - len(reply.tokens) : width] = torch.tensor(reply.tokens)
                state["attention_mask"][place, width - len(reply.tokens) : width] = 1
            self._noise[place] = self._noise_row(place)
            state["episode"][place] = EpisodeState.NUMBERS[reply.state]
            if state["episode"][place] >= EpisodeState.FAILED:
                # there is no turn whose reward it would be
                state[Column.REWARDS][place, 0] = torch.nan
            if Column.REPLIED in state:
                state[Column.REPLIED][place, 0] = reply.digest

    def _add(self, places: Tensor, replies: Sequence[RowReply]) -> None:
        """Add the replies to the last turns of rows."""
        if self._run.model.replica.is_first:
            self._caller.times.add(self._sampling.step, [each.seconds for each in replies if each.seconds is not None])
        columns = _columns(replies, self._rows.context.shape[1])
        self._rows.add_replies(places, {name: values.to(places.device) for name, values in columns.items()})

    def _request(self, place: int, start: int, length: int, room: int) -> Request:
        """Return the request for the reply to a row's turn, from ``start`` to ``length``, with ``room`` behind it."""
        caller, example, sampling = self._caller, self._examples[place], self._sampling
        prompt, response = self._texts_of(place)
        turn, turns = response[start:length], self._turns[place]
        turns.append(caller.turn(turn, [*prompt, *response[:start]], sampling))
        is_last = len(turns) == caller.settings.max_turns or room == 0
        call = replace(self._call(place), turns=tuple(turns), is_last=is_last, replied=tuple(self._replied[place]))
        end = turn[-1] if turn[-1] in sampling.eos_token_ids else None
        return Request(call, partial(caller.reply, example, end), room)

    def _texts_of(self, place: int) -> tuple[list[int], list[int]]:
        """Return the tokens of the prompt of a row, and all places of its response."""
        state, width = self._rows.state, self._rows.prompt
        tokens, length = state["tokens"][place].tolist(), int(state["attention_mask"][place, :width].sum())
        return tokens[width - length : width], tokens[width:]

    def _earlier(self, place: int) -> tuple[list[str], list[int]]:
        """Return the turns that a row has had in steps before, and the digests of its reset and the replies to them."""
        names = ("response_mask", Column.TURN_ENDS, Column.REPLIED)
        sampled, ends, digests = (self._rows.state[name][place].cpu() for name in names)
        (prompt, response), count = self._texts_of(place), int(self._rows.context[place].sum())
        turns = [part for is_sampled, part in parts_of(sampled, ends, count) if is_sampled and ends[part.stop - 1]]
        parts = [(response[part.start : part.stop], [*prompt, *response[: part.start]]) for part in turns]
        texts = [self._caller.turn(*part, self._sampling) for part in parts]
        return texts, digests[[0, *(part.stop for part in turns)]].tolist()

    def _call(self, place: int) -> EpisodeCall:
        """Return the call that begins the episode of a row."""
        step, row = self._taken[place]
        seed, number = _seed(self._sampling.seed, step, row // self._samples), place % self._sequences
        siblings = range(place - number, place - number + self._sequences)
        records = [SequenceRecord(tuple(self._turns[each]), tuple(self._replied[each])) for each in siblings]
        call = EpisodeCall(self._key(place), self._examples[place].columns, seed)
        return call if self._sequences == 1 else replace(call, sequence=number, siblings=tuple(records))

    def _key(self, place: int) -> Key:
        step, row = self._taken[place]
        # greedy episodes have the numbers behind all others
        return step, row + self._rows.shape.num_rows * self._run.operator.is_greedy


def _columns(replies: Sequence[RowReply], longest: int) -> Columns:
    """Return the replies to k rows as tensors: tokens (k, R); length, reward, state, tool calls, digest (k,)."""
    tokens = torch.zeros(len(replies), longest, dtype=torch.int64)
    names = ("length", "reward", "end", *TOOL_CALLS, "digest")
    numbers = {name: torch.zeros(len(replies), dtype=torch.float64) for name in names}
    for place, reply in enumerate(replies):
        tokens[place, : len(reply.tokens)] = torch.tensor(reply.tokens, dtype=torch.int64)
        made = reply.reward, EpisodeState.NUMBERS[reply.state], reply.tool_calls, reply.failed_tool_calls, reply.digest
        for column, value in zip(numbers.values(), (len(reply.tokens), *made), strict=True):
            column[place] = value
    return {"tokens": tokens, **numbers}


def _seed(seed: int, step: int, prompt: int) -> int:
    """Return the seed of the episodes of a prompt's samples, which begin alike."""
    text = f"{seed} {step} {prompt}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1


def open_log(plan: Plan, files: RunFiles, world: World, first_step: int) -> EpisodeLog | None:
    """Return the replies in steps from ``first_step`` on; None if the run has none. All ranks call this."""
    spec = plan.spec
    if spec.environment is None or spec.checkpoint.every is None or spec.debug.replay is not None:
        return None
    return EpisodeLog(spec.directory, files.received_replies(plan, world), world.rank, files.append, first_step)


def make_environment_caller(
    plan: Plan,
    world: World,
    tokens: TurnTokens | None,
    decode: Callable[..., str],
    log: EpisodeLog | None,
) -> EnvironmentCaller | None:
    """Return the caller of the environments of this rank's rows; None if the run has no episodes, or none there.

    tokens:  None: the run has no environment.
    log:     None: the run writes none.
    """
    spec, settings = plan.spec, plan.spec.environment
    most = plan.processes.most_calls(world.rank)
    if settings is None or tokens is None or most == 0:
        return None
    settings = EnvironmentTools(settings).with_known_form(tokens)
    is_replayed, count = spec.debug.replay is not None, plan.processes.by_rank().get(world.rank, 0)
    episodes = None if is_replayed else Episodes(settings, count, plan.batch.segments, plan.sampled_from)
    mailbox = Mailbox(world, f"environments/{spec.name}", spec.timeout_seconds)
    source = ReplySource(settings, episodes, log, mailbox, spec.timeout_seconds / 2, most)
    late_replies_of = None if spec.debug.late_replies_of is None else RecordedColumns(Path(spec.debug.late_replies_of))
    times, carries = ReplyTimes(plan, world), spec.rollout.carries_late
    return EnvironmentCaller(settings, source, tokens, decode, times, carries, late_replies_of)
