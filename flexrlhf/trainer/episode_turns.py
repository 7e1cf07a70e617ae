"""Turns of episodes: calls of the environments of a rank's rows, and the columns that their replies change.

Replies are awaited when a column that they change is first read, so that ranks go on with other rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from flexrlhf.comm.mailbox import Mailbox
from flexrlhf.comm.rows import RowStore
from flexrlhf.comm.world import World
from flexrlhf.data.turn_tokens import TurnTokens
from flexrlhf.engines.base import Batch, Sampling
from flexrlhf.environments.base import EpisodeCall
from flexrlhf.environments.episodes import Episodes
from flexrlhf.objectives.context import Columns
from flexrlhf.operators.columns import Lengths, Qualifier
from flexrlhf.operators.outcomes import EPISODE_STATES
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.episode_log import EpisodeLog
from flexrlhf.runs.run_files import RunFiles
from flexrlhf.trainer.episode_replies import ReplySource, Request, RowReply
from flexrlhf.trainer.episode_rows import BEGUN, PROMPT, TOOL_CALLS, after_replies, rows_before_turn
from flexrlhf.trainer.execution import OperatorRun
from flexrlhf.trainer.reply_times import ReplyTimes


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
        self, source: ReplySource, tokens: TurnTokens, decode: Callable[..., str], lengths: Lengths, times: ReplyTimes
    ) -> None:
        """
        decode:  tokens to text, special tokens included.
        times:   of replies, for the metrics.
        """
        self._source, self._tokens, self._decode = source, tokens, decode
        self._lengths, self._times = lengths, times
        self._histories: dict[tuple[int, int], _History] = {}

    @property
    def log(self) -> EpisodeLog | None:
        """Replies since the last checkpoint; None: the run writes none."""
        return self._source.log

    def reset(self, run: OperatorRun, batch: Batch, store: RowStore, sampling: Sampling) -> None:
        """Begin the episodes of ``batch``; its prompts are put once the environments have replied."""
        examples, rows = run.examples_of(batch), run.rows
        self._histories = {key: each for key, each in self._histories.items() if key[0] == sampling.step}
        self._histories |= {(sampling.step, row): _History() for row in rows}
        samples = run.shape.samples_per_prompt
        requests = [
            Request(
                EpisodeCall((sampling.step, row), example.columns, _seed(sampling, row // samples)),
                partial(self._tokens.prompt, example),
            )
            for row, example in zip(rows, examples, strict=True)
        ]

        def put(replies: Sequence[RowReply]) -> None:
            prompts, mask = batch["prompts"].cpu().clone(), batch["prompt_mask"].cpu().clone()
            for place, reply in enumerate(replies):
                if reply.tokens:
                    prompts[place], mask[place] = sampling.pad_token_id, 0
                    prompts[place, -len(reply.tokens) :] = torch.tensor(reply.tokens, dtype=torch.int32)
                    mask[place, -len(reply.tokens) :] = 1
            begun = torch.tensor([EPISODE_STATES[reply.state] for reply in replies]).to(mask)
            for name, values in zip((*PROMPT, BEGUN), (prompts, mask, begun), strict=True):
                store.put(name, rows, values.to(store.device))

        self._call(run, requests, store, put)

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
        rows = run.rows
        before = rows_before_turn(run, store, self._lengths, sampling.pad_token_id)
        made = {name: store.get(f"{name}.{Qualifier.TURN}", rows) for name in self._written(run)}
        context = made["attention_mask"][:, -self._lengths.response :]
        sampled = (context.bool() & ~before.context.bool())[before.places]
        requests = self._requests(run, before.places, made, sampled, sampling)

        def put(replies: Sequence[RowReply]) -> None:
            found = {name: values.to(store.device) for name, values in self._columns(replies).items()}
            columns = after_replies(before, made, found, sampled)
            then(columns)
            for name in run.operator.writes:
                store.put(name, rows, columns[name])

        self._call(run, requests, store, put)

    def close(self) -> None:
        """End the processes of the environments."""
        self._source.close()

    def _call(
        self, run: OperatorRun, requests: Sequence[Request], store: RowStore, put: Callable[[Sequence[RowReply]], None]
    ) -> None:
        """Call for the replies to ``requests``, which are ``put`` when a column of ``run`` is first read."""
        replica = run.model.replica
        future = self._source.submit(requests, run.model.placed.name, replica)

        def arrive() -> None:
            replies = future.result()
            for request, reply in zip(requests, replies, strict=True):
                self._histories[request.call.key].replied.append(reply.digest)
            if requests and requests[0].call.turns and replica.is_first:
                step = requests[0].call.key[0]
                self._times.add(step, [each.seconds for each in replies if each.seconds is not None])
            put(replies)

        store.expect({name: run.rows for name in run.operator.writes}, arrive)

    def _requests(
        self, run: OperatorRun, places: Tensor, made: Columns, sampled: Tensor, sampling: Sampling
    ) -> list[Request]:
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
            end = ids[-1] if ids and ids[-1] in sampling.eos_token_ids else None
            encode = partial(self._tokens.reply, is_ended=end is not None, is_chat=bool(example.turns), end=end)
            requests.append(Request(call, encode, room))
        return requests

    def _written(self, run: OperatorRun) -> tuple[str, ...]:
        return tuple(
            name.removesuffix(f".{Qualifier.TURN}")
            for name in run.operator.reads
            if name.endswith(f".{Qualifier.TURN}")
        )

    def _text(self, tokens: list[int], sampling: Sampling) -> str:
        """Return the text of a turn, without its end token."""
        if tokens and tokens[-1] in sampling.eos_token_ids:
            tokens = tokens[:-1]
        return self._decode(tokens)

    def _columns(self, replies: Sequence[RowReply]) -> Columns:
        """Return the replies of k rows as numbers: tokens (k, R), how many, reward, state, and calls of tools (k,)."""
        count = len(replies)
        tokens = torch.zeros(count, self._lengths.response, dtype=torch.int64)
        numbers = {name: torch.zeros(count, dtype=torch.float64) for name in ("length", "reward", "end", *TOOL_CALLS)}
        for place, reply in enumerate(replies):
            tokens[place, : len(reply.tokens)] = torch.tensor(reply.tokens, dtype=torch.int64)
            made = reply.reward, EPISODE_STATES[reply.state], reply.tool_calls, reply.failed_tool_calls
            for column, value in zip(numbers.values(), (len(reply.tokens), *made), strict=True):
                column[place] = value
        return {"tokens": tokens, **numbers}


def _seed(sampling: Sampling, prompt: int) -> int:
    """Return the seed of the episodes of a prompt's samples, which begin alike."""
    text = f"{sampling.seed} {sampling.step} {prompt}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1


def open_log(plan: Plan, files: RunFiles, world: World, first_step: int) -> EpisodeLog | None:
    """Return the replies to steps from ``first_step`` on; None if the run has none. All ranks call this."""
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
    interacting = [each for each in plan.graph.operators if each.kind == "interact"]
    if settings is None or tokens is None or not interacting:
        return None
    rank = world.rank
    layout = plan.placement.copy_for(interacting[0]).layout
    # evaluations run on the trained copy
    layout = layout if rank in layout.places else plan.placement[interacting[0].role].layout
    if rank not in layout.places:
        return None
    is_replayed, count = spec.debug.replay is not None, plan.processes.by_rank().get(rank, 0)
    episodes = None if is_replayed else Episodes(settings, count, plan.batch.num_chunks)
    mailbox = Mailbox(world, f"environments/{spec.name}", spec.timeout_seconds)
    source = ReplySource(settings, episodes, log, mailbox, spec.timeout_seconds / 2, plan.batch.num_chunks)
    return EnvironmentCaller(source, tokens, decode, plan.lengths, ReplyTimes(plan, world))
