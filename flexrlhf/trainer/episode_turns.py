"""Episodes: turns of the policy, calls of the environments of a rank's rows, and the columns that replies change."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flexrlhf.comm.mailbox import Mailbox
from flexrlhf.comm.world import World
from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.data.turn_tokens import TurnTokens
from flexrlhf.engines.base import Batch, Sampling
from flexrlhf.environments.base import EpisodeCall
from flexrlhf.environments.episodes import Episodes
from flexrlhf.objectives.context import Columns
from flexrlhf.operators.columns import Column
from flexrlhf.operators.outcomes import EPISODE_STATES, FAILED
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.episode_log import EpisodeLog
from flexrlhf.runs.run_files import RunFiles
from flexrlhf.trainer.episode_replies import ReplySource, Request, RowReply
from flexrlhf.trainer.execution import OperatorRun
from flexrlhf.trainer.open_rows import TOOL_CALLS, OpenRows, parts_of
from flexrlhf.trainer.reply_times import ReplyTimes


class EnvironmentCaller:
    """Caller of the environments of this rank's rows."""

    def __init__(
        self,
        settings: EnvironmentSpec,
        source: ReplySource,
        tokens: TurnTokens,
        decode: Callable[..., str],
        times: ReplyTimes,
    ) -> None:
        """
        decode:  tokens to text, special tokens included.
        times:   of replies, for the metrics.
        """
        self.settings, self.source, self.tokens, self.times = settings, source, tokens, times
        self._decode = decode

    @property
    def log(self) -> EpisodeLog | None:
        """Replies since the last checkpoint; None: the run writes none."""
        return self.source.log

    def play(self, run: OperatorRun, rows: OpenRows, sampling: Sampling) -> None:
        """Have ``rows`` sample and receive replies, until each has ended or has its tokens of this step."""
        episodes = _Episodes(self, run, rows, sampling)
        while (batch := episodes.due()) is not None:
            episodes.receive(run.model.engine.generate(batch, sampling))

    def text(self, tokens: Sequence[int], sampling: Sampling) -> str:
        """Return the text of a turn, without its end token."""
        if tokens and tokens[-1] in sampling.eos_token_ids:
            tokens = tokens[:-1]
        return self._decode(tokens)

    def close(self) -> None:
        """End the processes of the environments."""
        self.source.close()


class _Episodes:
    """Episodes of the rows of one generate, turn by turn."""

    def __init__(self, caller: EnvironmentCaller, run: OperatorRun, rows: OpenRows, sampling: Sampling) -> None:
        """Begin those that the step takes."""
        self._caller, self._run, self._rows, self._sampling = caller, run, rows, sampling
        self._samples = rows.batch.samples_per_prompt
        self._keys = list(zip(rows.steps.tolist(), rows.taken.tolist(), strict=True))
        self._examples = run.examples_of(rows.batch)
        self._places = rows.batch.rows[:0]
        # texts of the policy's turns, and digests of the replies, that of the reset first
        self._turns = [self._earlier_turns(place) for place in range(len(rows.batch))]
        self._replied = [self._earlier_replies(place) for place in range(len(rows.batch))]
        self._reset()

    def due(self) -> Batch | None:
        """Return the rows that have a turn; None if those of no data-parallel rank have one."""
        self._places = self._rows.open_places
        batch = self._rows.continued(self._places, self._caller.settings.turn_tokens)
        return batch if self._run.has_rows(batch) else None

    def receive(self, generated: Mapping[str, Tensor]) -> None:
        """Add what an engine has ``generated`` of the rows that were due, and the replies to turns that have ended."""
        rows, places = self._rows, self._places
        rows.add(places, generated, self._run.model.version)
        lengths, longest = rows.context.sum(1), self._caller.settings.turn_tokens
        is_over = (rows.state["finished"] == 1) | (lengths == rows.context.shape[1])
        is_over |= rows.has_last_segment & (rows.left == 0)
        if longest is not None:
            is_over |= lengths - rows.turn_starts == longest
        self._reply(places[is_over[places]])

    def _reset(self) -> None:
        rows = self._rows
        new = rows.is_new.nonzero().squeeze(1).tolist()
        encode = self._caller.tokens.prompt
        replies = self._replies(
            new, [Request(self._call(place), partial(encode, self._examples[place])) for place in new]
        )
        for place, reply in zip(new, replies, strict=True):
            state, width = rows.state, rows.prompt
            if reply.tokens:
                state["tokens"][place, :width], state["attention_mask"][place, :width] = self._sampling.pad_token_id, 0
                state["tokens"][place, width - len(reply.tokens) : width] = torch.tensor(reply.tokens)
                state["attention_mask"][place, width - len(reply.tokens) : width] = 1
            state["episode"][place] = EPISODE_STATES[reply.state]
            if state["episode"][place] >= FAILED:
                # there is no turn whose reward it would be
                state[Column.REWARDS][place, 0] = torch.nan
            if Column.REPLIED in state:
                state[Column.REPLIED][place, 0] = reply.digest

    def _reply(self, places: Tensor) -> None:
        """Add the replies to the last turns of the rows at ``places``."""
        rows = self._rows
        room = (rows.context.shape[1] - rows.context.sum(1)).masked_fill(rows.has_last_segment & (rows.left == 0), 0)
        found = (values[places].tolist() for values in (rows.turn_starts, rows.context.sum(1), room))
        requests = [self._request(*each) for each in zip(places.tolist(), *found, strict=True)]
        replies = self._replies(places.tolist(), requests)
        if self._run.model.replica.is_first:
            self._caller.times.add(self._sampling.step, [each.seconds for each in replies if each.seconds is not None])
        columns = _columns(replies, rows.context.shape[1])
        rows.add_replies(places, {name: values.to(places.device) for name, values in columns.items()})

    def _replies(self, places: Sequence[int], requests: Sequence[Request]) -> Sequence[RowReply]:
        model = self._run.model
        step = self._sampling.step
        replies = self._caller.source.submit(requests, model.placed.name, model.replica, step).result()
        for place, reply in zip(places, replies, strict=True):
            self._replied[place].append(reply.digest)
        return replies

    def _request(self, place: int, start: int, length: int, room: int) -> Request:
        """Return the request for the reply to a row's turn, from ``start`` to ``length``, with ``room`` behind it."""
        caller, example, sampling = self._caller, self._examples[place], self._sampling
        turn = self._rows.state["tokens"][place, self._rows.prompt :][start:length].tolist()
        turns = self._turns[place]
        turns.append(caller.text(turn, sampling))
        is_last = len(turns) == caller.settings.max_turns or room == 0
        call = replace(self._call(place), turns=tuple(turns), is_last=is_last, replied=tuple(self._replied[place]))
        end = turn[-1] if turn[-1] in sampling.eos_token_ids else None
        encode = partial(caller.tokens.reply, is_ended=end is not None, is_chat=bool(example.turns), end=end)
        return Request(call, encode, room)

    def _earlier_turns(self, place: int) -> list[str]:
        """Return the turns that a row has had in steps before."""
        state, width = self._rows.state, self._rows.prompt
        if not state["turns"][place]:
            return []
        ends, count = state[Column.TURN_ENDS][place], int(self._rows.context[place].sum())
        parts = [places for sampled, places in parts_of(state["response_mask"][place], ends, count) if sampled]
        tokens = state["tokens"][place, width:].tolist()
        return [
            self._caller.text(tokens[part.start : part.stop], self._sampling) for part in parts if ends[part.stop - 1]
        ]

    def _earlier_replies(self, place: int) -> list[int]:
        """Return the digests of the replies that a row has had in steps before."""
        rows = self._rows
        if Column.REPLIED not in rows.state or not rows.exists[place] or rows.is_new[place]:
            return []
        ends = rows.state[Column.TURN_ENDS][place].nonzero().squeeze(1) + 1
        digests = rows.state[Column.REPLIED][place]
        return [int(digests[0]), *digests[ends].tolist()]

    def _call(self, place: int) -> EpisodeCall:
        """Return the call that begins the episode of a row."""
        key = self._keys[place]
        seed = _seed(self._sampling.seed, key[0], key[1] // self._samples)
        return EpisodeCall(key, self._examples[place].columns, seed)


def _columns(replies: Sequence[RowReply], longest: int) -> Columns:
    """Return the replies to k rows as tensors: tokens (k, R); length, reward, state, tool calls, digest (k,)."""
    tokens = torch.zeros(len(replies), longest, dtype=torch.int64)
    names = ("length", "reward", "end", *TOOL_CALLS, "digest")
    numbers = {name: torch.zeros(len(replies), dtype=torch.float64) for name in names}
    for place, reply in enumerate(replies):
        tokens[place, : len(reply.tokens)] = torch.tensor(reply.tokens, dtype=torch.int64)
        made = reply.reward, EPISODE_STATES[reply.state], reply.tool_calls, reply.failed_tool_calls, reply.digest
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
    playing = [each for each in plan.graph.operators if each.has_replies]
    if settings is None or tokens is None or not playing:
        return None
    rank = world.rank
    layout = plan.placement.copy_for(playing[0]).layout
    # evaluations run on the trained copy
    layout = layout if rank in layout.places else plan.placement[playing[0].role].layout
    if rank not in layout.places:
        return None
    is_replayed, count = spec.debug.replay is not None, plan.processes.by_rank().get(rank, 0)
    episodes = None if is_replayed else Episodes(settings, count, plan.batch.segments)
    mailbox = Mailbox(world, f"environments/{spec.name}", spec.timeout_seconds)
    source = ReplySource(settings, episodes, log, mailbox, spec.timeout_seconds / 2)
    return EnvironmentCaller(settings, source, tokens, decode, ReplyTimes(plan, world))
