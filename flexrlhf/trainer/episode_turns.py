"""Calls of the environments of a rank's rows.

Replies are awaited when a column that they change is first read, so that ranks go on with other rows. The first rank of
a replica calls the environments, since two calls for one episode may differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from flexrlhf.comm.rows import RowStore
from flexrlhf.comm.world import World
from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.data.turn_tokens import TurnTokens
from flexrlhf.engines.base import Batch, Sampling
from flexrlhf.environments.base import EpisodeCall, EpisodeReply
from flexrlhf.environments.episodes import Episodes
from flexrlhf.errors import UserError
from flexrlhf.objectives.context import Columns
from flexrlhf.operators.columns import TURN, Lengths
from flexrlhf.operators.outcomes import EPISODE_STATES, FAILED, failed_state
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.episode_log import EpisodeLog
from flexrlhf.runs.run_files import RunFiles
from flexrlhf.trainer.episode_rows import BEGUN, GOING, PROMPT, TOOL_CALLS, after_replies, rows_before_turn
from flexrlhf.trainer.execution import OperatorRun
from flexrlhf.trainer.reply_times import ReplyTimes
from flexrlhf.user_code.call_failures import CallFailure, WarnOnce
from flexrlhf.user_code.deadline import Deadline


@dataclass(frozen=True)
class _Request:
    """A turn of the policy that awaits its reply.

    call:      of the environment.
    room:      response tokens that are left.
    has_end:   whether its last token is an end token; behind a stop string there is none.
    is_chat:   whether its row is a chat.
    """

    call: EpisodeCall
    room: int
    has_end: bool
    is_chat: bool


@dataclass
class _History:
    """An episode so far.

    turns:    texts of the policy.
    replied:  digests of the replies, that of the reset first.
    """

    turns: list[str] = field(default_factory=list)
    replied: list[str] = field(default_factory=list)


class EnvironmentCaller:
    """Caller of the environments of this rank's rows."""

    def __init__(
        self,
        settings: EnvironmentSpec,
        episodes: Episodes | None,
        tokens: TurnTokens,
        decode: Callable[..., str],
        lengths: Lengths,
        seconds: float,
        log: EpisodeLog | None,
        chunks: int,
        times: ReplyTimes,
    ) -> None:
        """
        episodes:  None: they are replayed, so that no environment is called.
        decode:    tokens to text, special tokens included.
        seconds:   limit of all replies to one turn.
        log:       replies since the last checkpoint; None: the run writes none.
        chunks:    of a step, whose replies are awaited at the same time.
        times:     of replies, for the metrics.
        """
        self._settings, self._episodes, self._tokens, self._decode = settings, episodes, tokens, decode
        self.log, self._times = log, times
        self._lengths, self._seconds = lengths, seconds
        self._threads = ThreadPoolExecutor(max(2, chunks), "environment")
        self._histories: dict[tuple[int, int], _History] = {}
        self._warn = WarnOnce("environment")

    def reset(self, run: OperatorRun, batch: Batch, store: RowStore, sampling: Sampling) -> None:
        """Begin the episodes of ``batch``; its prompts are put once the environments have replied."""
        examples, rows, replica = run.examples_of(batch), run.rows, run.model.replica
        self._histories = {key: each for key, each in self._histories.items() if key[0] == sampling.step}
        self._histories |= {(sampling.step, row): _History() for row in rows}
        samples = run.shape.samples_per_prompt
        calls = [
            EpisodeCall((sampling.step, row), example.columns, _seed(sampling, row // samples))
            for row, example in zip(rows, examples, strict=True)
        ]
        future = self._submit(calls, run)

        def arrive() -> None:
            replies = self._result(future, calls)
            prompts, mask = batch["prompts"].cpu().clone(), batch["prompt_mask"].cpu().clone()
            begun = torch.full((len(rows),), GOING)
            for place, (reply, example) in enumerate(zip(replies, examples, strict=True)):
                ids: Sequence[int] = ()
                failure = reply.failure
                if failure is None and reply.messages:
                    ids, failure = self._encoded(partial(self._tokens.prompt, example, reply.messages), calls[place])
                if failure is not None:
                    begun[place] = EPISODE_STATES[failed_state(failure.kind)]
                if ids:
                    prompts[place], mask[place] = sampling.pad_token_id, 0
                    prompts[place, -len(ids) :] = torch.tensor(ids, dtype=torch.int32)
                    mask[place, -len(ids) :] = 1
            columns = dict(zip((*PROMPT, BEGUN), (prompts, mask, begun.to(mask)), strict=True))
            for name, values in columns.items():
                shared = replica.sum(values.to(store.device).int() * replica.is_first)
                store.put(name, rows, shared.to(values.dtype))

        self._expect(run, store, arrive)

    def step(
        self,
        run: OperatorRun,
        store: RowStore,
        sampling: Sampling,
        then: Callable[[Columns], None] = lambda columns: None,
    ) -> None:
        """Call for replies to the last turn of each row; their columns are put once the environments have replied.

        ``then``: receives the columns before they are put.
        """
        rows, replica = run.rows, run.model.replica
        before = rows_before_turn(run, store, self._lengths, sampling.pad_token_id)
        made = {name: store.get(f"{name}.{TURN}", rows) for name in self._written(run)}
        context = made["attention_mask"][:, -self._lengths.response :]
        sampled = (context.bool() & ~before.context.bool())[before.places]
        requests = self._requests(run, before.places, made, sampled, sampling)
        future = self._submit([each.call for each in requests], run)

        def arrive() -> None:
            replies = self._result(future, [each.call for each in requests])
            numbers = self._reply_columns(replies, requests, calls_end=replica.is_first)
            found = {name: replica.sum(values.to(store.device) * replica.is_first) for name, values in numbers.items()}
            columns = after_replies(before, made, found, sampled)
            then(columns)
            for name in run.operator.writes:
                store.put(name, rows, columns[name])

        self._expect(run, store, arrive)

    def _expect(self, run: OperatorRun, store: RowStore, arrive: Callable[[], None]) -> None:
        """Have the columns of ``run`` put when one is first read.

        Ranks of a replica share them by a sum, and read the last ones at different places: moves and files are of one.
        """
        if run.model.replica.group is not None and not run.goes_on:
            arrive()
        else:
            store.expect({name: run.rows for name in run.operator.writes}, arrive)

    def _requests(
        self, run: OperatorRun, places: Tensor, made: Columns, sampled: Tensor, sampling: Sampling
    ) -> list[_Request]:
        """Return the turns of the rows at ``places``, whose tokens are ``sampled`` (k, R)."""
        width = self._lengths.response
        responses, lengths = made["tokens"][places, -width:].cpu(), made["attention_mask"][places, -width:].sum(1)
        requests = []
        for place, tokens, mask, length in zip(
            places.tolist(), responses, sampled.cpu(), lengths.tolist(), strict=True
        ):
            row = run.rows[place]
            prompt, key = row // run.shape.samples_per_prompt, (sampling.step, row)
            example, room = run.examples[prompt], width - length
            history, ids = self._histories[key], tokens[mask].tolist()
            history.turns.append(self._text(ids, sampling))
            assert len(history.turns) == run.turn + 1, f"{key}: a turn is missing"
            is_last = run.turn + 1 == run.operator.turns or room == 0
            so_far = tuple(history.turns), is_last, tuple(history.replied)
            call = EpisodeCall(key, example.columns, _seed(sampling, prompt), *so_far)
            has_end = bool(ids) and ids[-1] in sampling.eos_token_ids
            requests.append(_Request(call, room, has_end, bool(example.turns)))
        return requests

    def close(self) -> None:
        """End the processes of the environments."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._episodes is not None:
            self._episodes.close()

    def _written(self, run: OperatorRun) -> tuple[str, ...]:
        return tuple(name.removesuffix(f".{TURN}") for name in run.operator.reads if name.endswith(f".{TURN}"))

    def _submit(self, calls: Sequence[EpisodeCall], run: OperatorRun) -> Future[list[EpisodeReply]] | None:
        if self._episodes is None or not run.model.replica.is_first or not calls:
            return None
        return self._threads.submit(self._replies, self._episodes, calls)

    def _replies(self, episodes: Episodes, calls: Sequence[EpisodeCall]) -> list[EpisodeReply]:
        """Return one reply a call: of the log, or of its environment."""
        found = [None if self.log is None else self.log.find(call) for call in calls]
        due = [call for call, reply in zip(calls, found, strict=True) if reply is None]
        given = iter(episodes.replies(due, Deadline.after(self._seconds)) if due else ())
        replies = [next(given) if reply is None else reply for reply in found]
        if self.log is not None:
            fresh = [
                each for each, earlier in zip(zip(calls, replies, strict=True), found, strict=True) if earlier is None
            ]
            self.log.add(fresh)
        return replies

    def _result(self, future: Future[list[EpisodeReply]] | None, calls: Sequence[EpisodeCall]) -> list[EpisodeReply]:
        """Return the replies to ``calls``: empty ones on ranks that call no environment, or where all do none."""
        if future is None:
            return [EpisodeReply(is_done=self._episodes is None)] * len(calls)
        replies = future.result()
        if calls[0].turns:
            self._times.add(calls[0].key[0], [each.seconds for each in replies if each.failure is None])
        for call, reply in zip(calls, replies, strict=True):
            self._warn(reply.failure)
            self._histories[call.key].replied.append(reply.digest)
        return replies

    def _encoded(
        self, encode: Callable[[], Sequence[int]], call: EpisodeCall
    ) -> tuple[Sequence[int], CallFailure | None]:
        """Return the tokens of a reply, or why it has none, which costs its episode."""
        try:
            return encode(), None
        except UserError as error:
            step, row = call.key
            where = f"turn {call.number}" if call.number else "reset"
            failure = CallFailure("tokens", f"{self._settings.name}: step {step}, row {row}, {where}: {error}")
            self._warn(failure)
            return (), failure

    def _text(self, tokens: list[int], sampling: Sampling) -> str:
        """Return the text of a turn, without its end token."""
        if tokens and tokens[-1] in sampling.eos_token_ids:
            tokens = tokens[:-1]
        return self._decode(tokens)

    def _reply_columns(self, replies: Sequence[EpisodeReply], requests: Sequence[_Request], calls_end: bool) -> Columns:
        """Return the replies of k rows as numbers: tokens (k, R), their number, reward, end, and calls of tools (k,).

        ``calls_end``: whether environments receive the end of episodes without room for another turn.
        """
        ends = [self._end(reply, turn) for reply, turn in zip(replies, requests, strict=True)]
        replies = self._truncated(replies, requests, ends) if calls_end else replies
        count = len(replies)
        tokens = torch.zeros(count, self._lengths.response, dtype=torch.int64)
        numbers = {name: torch.zeros(count, dtype=torch.float64) for name in ("length", "reward", "end", *TOOL_CALLS)}
        for place, (reply, (end, ids)) in enumerate(zip(replies, ends, strict=True)):
            end = end if reply.failure is None else failed_state(reply.failure.kind)
            tokens[place, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
            reward = float("nan") if EPISODE_STATES[end] >= FAILED else reply.reward
            found = (len(ids), reward, EPISODE_STATES[end], reply.tool_calls, reply.failed_tool_calls)
            for column, value in zip(numbers.values(), found, strict=True):
                column[place] = value
        return {"tokens": tokens, **numbers}

    def _truncated(
        self,
        replies: Sequence[EpisodeReply],
        requests: Sequence[_Request],
        ends: Sequence[tuple[str, Sequence[int]]],
    ) -> list[EpisodeReply]:
        """Return ``replies`` with the rest of the reward of episodes that end here for want of room."""
        full = list(replies)
        cut = [index for index, (end, _) in enumerate(ends) if end == "no room" and not requests[index].call.is_last]
        if self._episodes is None or not cut:
            return full
        calls = [
            replace(each, replied=tuple(self._histories[each.key].replied), is_ended=True)
            for each in (requests[index].call for index in cut)
        ]
        for index, last in zip(cut, self._replies(self._episodes, calls), strict=True):
            self._warn(last.failure)
            full[index] = replace(full[index], reward=full[index].reward + last.reward, failure=last.failure)
        return full

    def _end(self, reply: EpisodeReply, turn: _Request) -> tuple[str, Sequence[int]]:
        """Return how an episode stands after a reply, and the reply's tokens if a turn follows it."""
        if reply.failure is not None:
            return failed_state(reply.failure.kind), ()
        if reply.is_done:
            return "ended", ()
        if turn.room == 0:
            return "no room", ()
        if turn.call.is_last:
            return "last turn", ()
        encode = partial(self._tokens.reply, reply.messages, turn.has_end, turn.is_chat)
        ids, failure = self._encoded(encode, turn.call)
        if failure is not None:
            return failed_state(failure.kind), ()
        return ("going on", ids) if len(ids) < turn.room else ("no room", ())


def _seed(sampling: Sampling, prompt: int) -> int:
    """Return the seed of the episodes of a prompt's samples, which begin alike."""
    text = f"{sampling.seed} {sampling.step} {prompt}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1


def open_log(plan: Plan, files: RunFiles, world: World) -> EpisodeLog | None:
    """Return the replies since the last checkpoint; None if the run has none. All ranks call this."""
    spec = plan.spec
    if spec.environment is None or spec.checkpoint.every is None or spec.debug.replay is not None:
        return None
    return EpisodeLog(spec.directory, files.received_replies(plan, world), world.rank, files.append)


def make_environment_caller(
    plan: Plan,
    world: World,
    tokens: TurnTokens | None,
    decode: Callable[..., str],
    episodes: Episodes | None,
    log: EpisodeLog | None,
) -> EnvironmentCaller | None:
    """Return the caller of the environments of this rank's rows; None if the run has no episodes, or none there.

    tokens:    None: the run has no environment.
    episodes:  None: they are replayed.
    log:       None: the run writes none.
    """
    spec, settings = plan.spec, plan.spec.environment
    interacting = [each for each in plan.graph.operators if each.kind == "interact"]
    if settings is None or tokens is None or not interacting:
        return None
    rank = world.rank
    layout = plan.placement.copy_for(interacting[0]).layout
    # evaluations run on the trained copy
    layout = layout if rank in layout.places else plan.placement[interacting[0].role].layout
    if rank not in layout.places:
        return None
    chunks = plan.batch.num_chunks
    seconds, times = spec.timeout_seconds / 2, ReplyTimes(plan, world)
    return EnvironmentCaller(settings, episodes, tokens, decode, plan.lengths, seconds, log, chunks, times)
