"""Rows of episodes: responses that turns of the policy continue, and replies of environments between them.

A response is all that follows the prompt: tokens that the policy has sampled (``response_mask``), and replies, which
``attention_mask`` has, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flexrlhf.comm.rows import RowStore
from flexrlhf.engines.base import Batch
from flexrlhf.objectives.context import Columns
from flexrlhf.operators.columns import Column, Lengths, Qualifier, qualified
from flexrlhf.operators.outcomes import EPISODE_STATES, FAILED
from flexrlhf.trainer.execution import OperatorRun

TOOL_CALLS = ("tool_calls", "failed_tool_calls")
LOGPROBS = ("rollout_logprobs", "logprobs")
GOING = EPISODE_STATES["going on"]
PROMPT = qualified(("prompts", "prompt_mask"), Qualifier.OPENED)
BEGUN = f"episode.{Qualifier.OPENED}"
"""Column of whether an episode's environment has begun it."""


def parts_of(sampled: Tensor, ends: Tensor, count: int) -> Iterator[tuple[bool, range]]:
    """Yield the turns and the replies of a response, in order: whether its tokens are sampled, and their places.

    sampled:  (R,), on the host.
    ends:     (R,), last tokens of turns.
    count:    tokens of the response, those of replies included.
    """
    start = 0
    for place in range(1, count + 1):
        if place == count or sampled[place] != sampled[place - 1] or ends[place - 1]:
            yield bool(sampled[start]), range(start, place)
            start = place


@dataclass(frozen=True)
class TurnRows:
    """Rows of one rank before a turn of the policy; n rows of the step's batch, k of which have one.

    state:      columns as the turn before left them.
    prompts:    prompt columns as the episodes began.
    places:     int64 (k,), rows whose episode goes on.
    """

    state: Columns
    prompts: Columns
    places: Tensor

    @property
    def context(self) -> Tensor:
        """Response tokens (n, R) so far, those of replies included."""
        return self.state["attention_mask"][:, self.prompts["prompt_mask"].shape[1] :]

    def continued(self, batch: Batch) -> Batch:
        """Return the rows that have a turn, for an engine, with their response so far."""
        mask = self.context[self.places]
        columns = {
            **{name: values[self.places] for name, values in self.prompts.items()},
            "responses": self.state["tokens"][self.places, -mask.shape[1] :],
            "response_mask": mask,
            # stop strings end a turn
            "searched_from": mask.sum(1),
        }
        return Batch(columns, batch.rows[self.places], batch.samples_per_prompt, tokens=batch.tokens)

    def unchanged(self) -> Columns:
        """Return the columns of a turn that no row has."""
        return dict(self.state)

    def columns(self, generated: Columns, version: int) -> Columns:
        """Return the columns of all rows after their turn. ``generated``: of the rows that had one."""
        made, context = dict(self.state), self.context.clone()
        context[self.places] = generated["response_mask"]
        is_new = (context > 0) & (self.context == 0)
        made["attention_mask"] = torch.cat([self.prompts["prompt_mask"], context], 1)
        made["response_mask"] = self.state["response_mask"] | is_new.to(torch.uint8)
        for name in ("tokens", "finished"):
            made[name] = self.state[name].index_copy(0, self.places, generated[name])
        made["policy_version"] = self.state["policy_version"] + is_new.int() * version
        new = torch.zeros(context.shape, device=context.device)
        new[self.places] = generated["rollout_logprobs"] * is_new[self.places]
        # without a pass of the trained model, an engine's log-probs serve as the policy's
        for name in LOGPROBS:
            made[name] = self.state.get(name, 0) + new
        return made


def rows_before_turn(run: OperatorRun, store: RowStore, lengths: Lengths, pad_token_id: int) -> TurnRows:
    """Return the rows of ``run``, a generate or an interact, as the turn before has left them."""
    rows = run.rows
    prompts = {name.removesuffix(f".{Qualifier.OPENED}"): store.get(name, rows) for name in PROMPT}
    if run.turn:
        state = {name: store.get(name, rows) for name in run.operator.continues}
    else:
        empty = RowStore(lengths, store.device)
        none = {name: empty.get(name, ()) for name in run.operator.continues}
        state = {name: values.new_zeros(len(rows), *values.shape[1:]) for name, values in none.items()}
        padding = prompts["prompts"].new_full((len(rows), lengths.response), pad_token_id)
        state["tokens"] = torch.cat([prompts["prompts"], padding], 1)
        state["attention_mask"] = torch.cat([prompts["prompt_mask"], torch.zeros_like(padding, dtype=torch.uint8)], 1)
        state["episode"] = store.get(BEGUN, rows)
        # there is no turn whose reward it would be
        state[Column.REWARDS][state["episode"] >= FAILED, 0] = torch.nan
    return TurnRows(state, prompts, (state["episode"] == GOING).nonzero().squeeze(1))


def after_replies(before: TurnRows, made: Columns, found: Columns, sampled: Tensor) -> Columns:
    """Return the columns of all rows after the replies to a turn.

    made:     columns after the policy's turn.
    found:    of the k rows that have replies.
    sampled:  bool (k, R), tokens of their turn.
    """
    places, device = before.places, made["tokens"].device
    columns = {**before.state, **made}
    context = made["attention_mask"][:, before.prompts["prompt_mask"].shape[1] :].clone()
    tokens = made["tokens"].clone()
    first, numbers = context[places].sum(1)[:, None], torch.arange(context.shape[1], device=device)
    index = numbers - first
    is_reply = (index >= 0) & (index < found["length"][:, None])
    replies = found["tokens"].gather(1, index.clamp(min=0)).to(tokens.dtype)
    response = tokens[places, -context.shape[1] :]
    tokens[places, -context.shape[1] :] = replies.where(is_reply, response)
    context[places] |= is_reply.to(context.dtype)
    columns["tokens"] = tokens
    columns["attention_mask"] = torch.cat([before.prompts["prompt_mask"], context], 1)
    columns["episode"] = before.state["episode"].index_copy(0, places, found["end"].to(torch.uint8))
    # cut for want of room, or of an environment
    is_cut = (columns["episode"] == EPISODE_STATES["no room"]) | (columns["episode"] >= FAILED)
    # the environment's end is one, however the turn before it ended
    has_ended = columns["episode"] == EPISODE_STATES["ended"]
    columns["finished"] = made["finished"].masked_fill(is_cut, 0).masked_fill(has_ended, 1)
    columns["turns"] = before.state["turns"].index_add(0, places, torch.ones_like(places, dtype=torch.int32))
    for name in TOOL_CALLS:
        columns[name] = before.state[name].index_add(0, places, found[name].to(torch.int32))
    rewards, ends = before.state[Column.REWARDS].clone(), before.state[Column.TURN_ENDS].clone()
    last = (numbers * sampled).argmax(1)
    ends[places, last] = 1
    columns[Column.TURN_ENDS] = ends
    rewards[places, last] += found["reward"].float()
    columns[Column.REWARDS] = rewards
    return columns
