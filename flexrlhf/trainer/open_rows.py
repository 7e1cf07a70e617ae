"""Rows that a generate has under way: what the step before has left of them, what a call of the engine and a reply of
an environment add, and what a step trains on.

A response is all that follows the prompt: tokens that the policy has sampled (``response_mask``), and replies, which
``attention_mask`` has, too. A prompt keeps its place until a step trains on it, so that one rank goes on with it.
Sampling noise is that of the step and row in which a row was taken, so a segment's border changes no token unless the
weights change there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flexrlhf.comm.rows import RowStore
from flexrlhf.engines.base import Batch
from flexrlhf.objectives.context import Columns, EarlierScores
from flexrlhf.operators.columns import Column, Lengths
from flexrlhf.operators.outcomes import EpisodeState
from flexrlhf.placement.layout import BatchShape
from flexrlhf.trainer.execution import OperatorRun

LOGPROBS = ("rollout_logprobs", "logprobs")
"""Log-probs of generation; without a pass of the trained model they serve as the policy's as well."""
TOOL_CALLS = ("tool_calls", "failed_tool_calls")
GOING = EpisodeState.NUMBERS["going on"]
TurnLimit = Tensor | int | None
"""Tokens of a turn, of each row int64 (n,) or of all; None: no limit."""


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
class OpenRows:
    """Rows of one rank in a generate, n of the step's batch.

    batch:   all of them.
    shape:   of the step.
    step:    that has them.
    steps:   int64 (n,), the steps that took them.
    taken:   int64 (n,), the rows as these steps took them.
    exists:  bool (n,), rows of prompts that are under way.
    state:   columns so far, zeros of rows that do not exist.
    left:    int64 (n,), tokens that each may still sample in this step.
    """

    batch: Batch
    shape: BatchShape
    step: int
    steps: Tensor
    taken: Tensor
    exists: Tensor
    state: Columns
    left: Tensor

    @classmethod
    def begin(
        cls,
        run: OperatorRun,
        batch: Batch,
        step: int,
        lengths: Lengths,
        pad_token_id: int,
        before: RowStore | None = None,
        most_tokens: int | None = None,
        catches_up: bool = False,
    ) -> OpenRows:
        """Return the rows of ``batch`` at the start of ``step``.

        before:       rows of the step before, of which ``run`` carries some; None: there are none.
        most_tokens:  that a row samples in a step; None: to its end.
        catches_up:   whether a row also samples the tokens that it had left in the steps before.
        """
        shape, rows = run.shape, batch.rows
        steps, taken = shape.as_taken(rows, step)
        state = _carried(run, batch, steps < step, before, lengths)
        # without dynamic sampling every step takes as many prompts as there are places
        is_taken = batch.columns.get(Column.POSITION, torch.zeros_like(rows)) >= 0
        is_new = (steps == step) & is_taken
        is_new &= ~batch.is_further
        exists = is_new
        if Column.PRESENT in state:
            # an episode that failed before its first turn may wait for others of its prompt
            has_text = state["response_mask"].bool().any(1) | state["attention_mask"].bool().any(1)
            exists = is_new | (has_text & (state[Column.PRESENT] == 0))
        # a further sequence begins with a prompt of its own
        texts = torch.cat([batch["prompt_mask"], state["response_mask"]], 1) * ~batch.is_further[:, None]
        state["attention_mask"] = texts.where((state["attention_mask"].sum(1) == 0)[:, None], state["attention_mask"])
        padding = batch["prompts"].new_full((len(batch), lengths.response), pad_token_id)
        begun = torch.cat([batch["prompts"], padding], 1)
        state["tokens"] = begun.where(is_new[:, None], state["tokens"])
        left = torch.full_like(rows, lengths.response if most_tokens is None else most_tokens)
        if most_tokens is not None and catches_up:
            left = left.maximum((step - steps + 1) * most_tokens - state["response_mask"].sum(1))
        return cls(batch, shape, step, steps, taken, exists, state, left)

    @property
    def prompt(self) -> int:
        """Number of prompt positions."""
        return self.state["tokens"].shape[1] - self.state["response_mask"].shape[1]

    @property
    def context(self) -> Tensor:
        """Response tokens uint8 (n, R) so far, those of replies included."""
        return self.state["attention_mask"][:, self.prompt :]

    @property
    def is_new(self) -> Tensor:
        """Rows bool (n,) that this step has taken."""
        return self.exists & (self.steps == self.step)

    @property
    def has_last_segment(self) -> Tensor:
        """Rows bool (n,) that the step trains on, however far they are."""
        return self.steps == self.step - self.shape.segments + 1

    @property
    def has_ended(self) -> Tensor:
        """Rows bool (n,) that no token follows."""
        return _have_ended(self.context, self.state["finished"], self.state.get("episode"))

    @property
    def open_places(self) -> Tensor:
        """Places int64 (k,) of the rows that may sample on in this step."""
        return (self.exists & ~self.has_ended & (self.left > 0)).nonzero().squeeze(1)

    @property
    def turn_starts(self) -> Tensor:
        """Response tokens int64 (n,) before the turn under way."""
        if Column.TURN_ENDS not in self.state:
            return torch.zeros_like(self.steps)
        is_behind = (self.context > self.state["response_mask"]) | (self.state[Column.TURN_ENDS] > 0)
        return ((torch.arange(is_behind.shape[1], device=is_behind.device) + 1) * is_behind).amax(1)

    def has_whole_turn(self, turn_tokens: TurnLimit) -> Tensor:
        """Rows bool (n,) whose last turn is whole, and has no reply: by an end token or a stop string, or since it has
        all its ``turn_tokens``, or the row has no room left."""
        lengths, starts = self.context.sum(1), self.turn_starts
        is_whole = (self.state["finished"] == 1) | (lengths == self.context.shape[1])
        if turn_tokens is not None:
            is_whole |= lengths - starts == turn_tokens
        return is_whole & (lengths > starts)

    @property
    def has_begun(self) -> Tensor:
        """Episodes bool (n,) that have the reply to their reset."""
        return self.state[Column.REPLIED][:, 0] != 0 if Column.REPLIED in self.state else ~self.is_new

    def awaits_reply(self, turn_tokens: TurnLimit) -> Tensor:
        """Episodes bool (n,) whose reset, or whole last turn, has no reply. ``turn_tokens``: of a turn."""
        return self.exists & ~self.has_ended & (~self.has_begun | self.has_whole_turn(turn_tokens))

    def late_after(self, turn_tokens: TurnLimit) -> dict[int, int | None]:
        """Return the episodes at the end of the step, by place: how many replies, that to its reset included, one has
        that awaits the next one; None: it awaits none."""
        numbers = (self.state["turns"] + self.has_begun).where(self.awaits_reply(turn_tokens), -1).tolist()
        places = self.exists.nonzero().squeeze(1).tolist()
        return {place: None if numbers[place] < 0 else numbers[place] for place in places}

    def continued(self, places: Tensor, turn_tokens: TurnLimit = None) -> Batch:
        """Return the rows at ``places``, for an engine, with their response so far. ``turn_tokens``: of a turn."""
        width, starts = self.prompt, self.turn_starts[places]
        texts, masks = self.state["tokens"][places], self.state["attention_mask"][places]
        limits = self.left[places]
        if turn_tokens is not None:
            own = turn_tokens[places] if isinstance(turn_tokens, Tensor) else turn_tokens
            limits = limits.minimum(starts + own - masks[:, width:].sum(1))
        columns = {
            "prompts": texts[:, :width],
            "prompt_mask": masks[:, :width],
            "responses": texts[:, width:],
            "response_mask": masks[:, width:],
            "noise_step": self.steps[places],
            "noise_row": self.taken[places] // self.shape.sequences,
            "most_tokens": limits,
            # stop strings end a turn
            "searched_from": starts,
        }
        return Batch(columns, self.taken[places], self.batch.samples_per_prompt, tokens=self.batch.tokens)

    def add(self, places: Tensor, generated: Mapping[str, Tensor], version: int) -> None:
        """Add what an engine has ``generated`` of the rows at ``places``. ``version``: of the weights."""
        state, width = self.state, self.prompt
        is_new = (generated["response_mask"] > 0) & (self.context[places] == 0)
        if Column.EXPERTS in state:
            state[Column.EXPERTS][places] = self._experts(places, generated[Column.EXPERTS])
        state["response_mask"][places] |= is_new.to(torch.uint8)
        state["attention_mask"][places, width:] = generated["response_mask"]
        for name in ("tokens", "finished"):
            state[name][places] = generated[name]
        if "policy_version" in state:
            state["policy_version"][places] += is_new.int() * version
        for name in LOGPROBS:
            if name in state:
                state[name][places] += generated["rollout_logprobs"] * is_new
        self.left[places] -= is_new.sum(1)

    def add_replies(self, places: Tensor, found: Mapping[str, Tensor]) -> None:
        """Add the replies of environments to the turns that the rows at ``places`` end with.

        found: tokens (k, R); their number, the reward, the state of the episode, calls of tools, and the digest (k,).
        """
        state, width = self.state, self.prompt
        masks = self.context[places]
        ends = masks.sum(1)
        index = torch.arange(masks.shape[1], device=masks.device) - ends[:, None]
        is_reply = (index >= 0) & (index < found["length"][:, None])
        replies = found["tokens"].gather(1, index.clamp(min=0)).to(state["tokens"].dtype)
        state["tokens"][places, width:] = replies.where(is_reply, state["tokens"][places, width:])
        state["attention_mask"][places, width:] = masks | is_reply.to(masks.dtype)
        episode = state["episode"][places] = found["end"].to(torch.uint8)
        # cut for want of room, or of an environment
        is_cut = (episode == EpisodeState.NUMBERS["no room"]) | (episode >= EpisodeState.FAILED)
        finished = state["finished"][places].masked_fill(is_cut, 0)
        # the environment's end is one, however the turn before it ended
        state["finished"][places] = finished.masked_fill(episode == EpisodeState.NUMBERS["ended"], 1)
        state["turns"][places] += 1
        for name in TOOL_CALLS:
            state[name][places] += found[name].to(torch.int32)
        state[Column.TURN_ENDS][places, ends - 1] = 1
        state[Column.REWARDS][places, ends - 1] += found["reward"].float()
        if Column.REPLIED in state:
            state[Column.REPLIED][places, ends] = found["digest"].to(torch.int32)

    def _experts(self, places: Tensor, found: Tensor) -> Tensor:
        """Return the experts (k, ...) of the rows at ``places``: of tokens that a call has read before, as it chose
        them. A call reads all tokens before the last one that it samples."""
        masks, earlier = self.state["response_mask"][places], self.state[Column.EXPERTS][places]
        numbers = torch.arange(1, masks.shape[1] + 1, device=masks.device)
        last = (numbers * masks).amax(1)
        ends = (self.prompt + last - 1).where(last > 0, 0)
        size = earlier.shape[1] // self.state["tokens"].shape[1]
        was_read = torch.arange(self.state["tokens"].shape[1], device=masks.device) < ends[:, None]
        return earlier.where(was_read.repeat_interleave(size, 1), found)

    def columns(self, trains_further: bool = True) -> Columns:
        """Return the columns of all rows at the end of the step, with ``present``: rows that have ended, or had their
        last segment; where rows are not trained on by themselves, all responses to a prompt at once, in any case all
        sequences of an episode. ``trains_further``: whether its further ones are trained on, else they are left out.
        """
        exists, k = self.exists, self.shape.sequences
        is_whole = ~exists | self.has_ended | self.has_last_segment
        present = _present(exists[::k] & is_whole.view(-1, k).all(1), self.shape)
        if "episode" in self.state:
            assert not (exists & present.bool() & ~self.has_ended).any(), "an episode that goes on is trained on"
        if not trains_further:
            exists = exists & ~(self.batch.is_further & present.bool())
        # a row that is trained on is not carried, so its place is empty in the next step
        columns = {
            name: values.where(exists.view(-1, *[1] * (values.dim() - 1)), torch.zeros_like(values))
            for name, values in self.state.items()
        }
        return {**columns, Column.PRESENT: present}


def whole_responses(run: OperatorRun, batch: Batch, step: int) -> Columns:
    """Return ``present`` (n,) of the rows of ``batch``, of which several operators have generated a response each."""
    shape = run.shape
    suffixes = [name.removeprefix("finished") for name in run.operator.reads if Column.plain(name) == "finished"]
    ends = [
        _have_ended(batch[f"response_mask{s}"], batch[f"finished{s}"], batch.columns.get(f"episode{s}"))
        for s in suffixes
    ]
    is_last = shape.as_taken(batch.rows, step)[0] == step - shape.segments + 1
    # places without a prompt have no text
    is_whole = batch["attention_mask"].bool().any(1) & (torch.stack(ends).all(0) | is_last)
    return {Column.PRESENT: _present(is_whole[:: shape.sequences], shape)}


def _have_ended(mask: Tensor, finished: Tensor, episode: Tensor | None) -> Tensor:
    """Return bool (n,): responses that no token follows, with tokens ``mask`` (n, R); None: they are no episodes."""
    return (finished == 1) | mask.bool().all(1) if episode is None else episode != GOING


def _present(is_whole: Tensor, shape: BatchShape) -> Tensor:
    """Return uint8 (n,): rows that are trained on. ``is_whole``: of the first row of each response, bool."""
    responses = shape.unit_rows // shape.sequences
    return is_whole.view(-1, responses).all(1).repeat_interleave(shape.unit_rows).to(torch.uint8)


def _carried(run: OperatorRun, batch: Batch, continues: Tensor, before: RowStore | None, lengths: Lengths) -> Columns:
    """Return the columns (n, ...) that ``run`` writes or carries, named without its suffix: carried ones of rows bool
    (n,) that it ``continues`` as the step ``before`` has left them, zeros of others."""
    columns, empty, suffix = Columns(), RowStore(lengths, batch.rows.device), run.operator.suffix
    earlier = batch.rows[continues].tolist()
    for name in dict.fromkeys((*run.operator.writes, *run.operator.carries, LOGPROBS[0])):
        own = name.removesuffix(suffix)
        columns[own] = empty.absent(name, len(batch))
        if before is not None and earlier and name in run.operator.carries:
            columns[own][continues] = before.get(name, earlier)
    return columns


def places_in(run: OperatorRun, batch: Batch) -> Tensor:
    """Return the places of the rows of ``batch`` among all rows of ``run``, int64 (n,)."""
    place = {row: index for index, row in enumerate(run.rows)}
    return torch.tensor([place[row] for row in batch.rows.tolist()], dtype=torch.int64, device=batch.rows.device)


def carried_columns(run: OperatorRun, step: int, before: RowStore | None, empty: RowStore) -> Columns:
    """Return the columns (n, ...) that ``run`` carries, of all its rows that steps before have taken, as the step
    ``before`` has them; ``empty`` ones of others."""
    places = [place for place, row in enumerate(run.rows) if run.shape.as_taken(row, step)[0] < step]
    columns = Columns()
    for name in run.operator.carries:
        columns[name] = empty.absent(name, len(run.rows))
        if before is not None and places:
            columns[name][places] = before.get(name, [run.rows[place] for place in places])
    return columns


def earlier_scores(run: OperatorRun, batch: Batch, carried: Columns) -> EarlierScores:
    """Return the groups of the responses of ``batch``, with columns ``carried`` (n, ...) of all rows of ``run`` as far
    as they ended in steps before."""
    k = run.shape.sequences
    samples, places = run.shape.samples_per_prompt // k, places_in(run, batch.episodes) // k
    groups, index = (places // samples).unique(return_inverse=True)
    columns = {name: each[::k].unflatten(0, (-1, samples))[groups] for name, each in carried.items()}
    return EarlierScores(columns, index * samples + places % samples)
