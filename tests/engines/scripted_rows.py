"""Source of rows with turns, whose replies a script gives: which tokens, and after how many questions for due rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flexrlhf.engines.base import Batch, Sampling

Delay = Callable[[int, int], int]
"""Row and turn → questions for due rows until its reply is there."""


@dataclass
class RowTurns:
    """Response of one row so far.

    due:     the question from which its next turn may begin; None: it has none.
    experts: column of the last turn, if they are recorded.
    """

    tokens: list[int]
    logprobs: list[float]
    sampled: list[int]
    turn: int
    due: int | None
    experts: Tensor | None = None


class ScriptedRows:
    """Rows of ``batch``, each with ``turns`` turns of at most ``limit(row, turn)`` tokens and a reply after each, of
    ``reply(row, turn)`` tokens."""

    def __init__(
        self,
        batch: Batch,
        sampling: Sampling,
        longest: int,
        turns: int,
        delay: Delay,
        limit: Callable[[int, int], int],
        reply: Callable[[int, int], int] = lambda row, turn: (row + turn) % 4,
    ) -> None:
        self.most_rows, self._batch, self._longest = len(batch), batch, longest
        self._turns, self._delay, self._limit, self._step = turns, delay, limit, sampling.step
        self._reply = reply
        self._question = 0
        self.batches: list[int] = []
        """Rows of each batch."""
        self.places = {row: place for place, row in enumerate(batch.rows.tolist())}
        self.rows = {row: RowTurns([], [], [], 0, delay(row, 0)) for row in self.places}
        self.out: set[int] = set()

    def due(self, wait: bool) -> Batch | None:
        assert not (wait and self.out), "an engine with rows does not wait for others"
        waiting = {row: state.due for row, state in self.rows.items() if state.due is not None}
        if not waiting and not self.out:
            return None
        self._question += 1
        if wait:
            self._question = max(self._question, min(waiting.values()))
        # the latest first, so that rows come in no order of theirs
        rows = sorted((row for row, due in waiting.items() if due <= self._question), key=lambda row: -waiting[row])
        for row in rows:
            self.rows[row].due = None
        self.out |= set(rows)
        self.batches.append(len(rows))
        return self._continued(rows)

    def receive(self, batch: Batch, columns: Mapping[str, Tensor]) -> None:
        for place, row in enumerate(batch.rows.tolist()):
            self.out.remove(row)
            state, length = self.rows[row], int(columns["response_mask"][place].sum())
            first = len(state.tokens)
            assert 0 < length - first <= self._limit(row, state.turn)
            response = columns["tokens"][place, -self._longest :][:length].tolist()
            assert response[:first] == state.tokens and not columns["rollout_logprobs"][place, :first].any()
            state.tokens = response
            state.logprobs += columns["rollout_logprobs"][place, first:length].tolist()
            state.sampled += [1] * (length - first)
            state.turn += 1
            state.experts = columns["experts"][place] if "experts" in columns else None
            reply = [4 + (row + 3 * state.turn + number) % 20 for number in range(self._reply(row, state.turn))]
            if state.turn < self._turns and len(response) + len(reply) < self._longest:
                state.tokens += reply
                state.logprobs += [0.0] * len(reply)
                state.sampled += [0] * len(reply)
                state.due = self._question + self._delay(row, state.turn)

    def _continued(self, rows: list[int]) -> Batch:
        places, states = (
            torch.tensor([self.places[row] for row in rows], dtype=torch.int64),
            [self.rows[r] for r in rows],
        )
        responses = torch.zeros(len(rows), self._longest, dtype=torch.int32)
        mask = torch.zeros(responses.shape, dtype=torch.uint8)
        for place, state in enumerate(states):
            responses[place, : len(state.tokens)] = torch.tensor(state.tokens, dtype=torch.int32)
            mask[place, : len(state.tokens)] = 1
        limits = [self._limit(row, state.turn) for row, state in zip(rows, states, strict=True)]
        return self._batch.select(places).with_columns(
            {
                "responses": responses,
                "response_mask": mask,
                "noise_step": torch.full((len(rows),), self._step),
                "searched_from": mask.sum(1),
                "most_tokens": torch.tensor(limits, dtype=torch.int64),
            }
        )

    def columns(self) -> dict[str, Tensor]:
        """Tokens, which of them are sampled, log-probs, and experts if recorded, in the order of the rows' numbers."""
        states = [self.rows[row] for row in sorted(self.rows)]
        made = {"tokens": torch.zeros(len(states), self._longest), "sampled": torch.zeros(len(states), self._longest)}
        made["logprobs"] = torch.zeros(len(states), self._longest)
        for name, values in made.items():
            for place, state in enumerate(states):
                of_row = getattr(state, name)
                values[place, : len(of_row)] = torch.tensor(of_row)
        experts = [state.experts for state in states if state.experts is not None]
        return made | ({"experts": torch.stack(experts)} if experts else {})


def random_delays(seed: int, longest: int) -> Delay:
    """Return delays of up to ``longest`` questions, in another order for each seed."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, longest + 1, (97, 7), generator=generator).tolist()
    return lambda row, turn: values[row % 97][turn % 7]
