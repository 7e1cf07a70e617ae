"""Rows of each round of the list, from the response length of every row: which are generated, how far, and trained.

Without segments a round generates the rows of its batch whole. With segments of T tokens it continues, by at most T
tokens, the rows of its own batch and of the M - 1 batches before it that have not ended; a row ends at M * T tokens.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Self

from flexrlhf.api import Plan
from flexrlhf.guideline.simulation.inputs import TextLengths


class SampledTurn(NamedTuple):
    """Turn of a simulated episode.

    sampled:  its tokens
    reply:    tokens of the reply to it
    share:    share of all replies that take less time than this one; None: the row does not await it in the same round
    """

    sampled: float
    reply: float = 0.0
    share: float | None = None


class Segment(NamedTuple):
    """Tokens of one response that a round generates.

    start:    tokens of the response before
    tokens:   of the round, replies included
    turns:    of an episode whose turns are known
    unread:   last ones of the tokens before that no pass has read yet
    goes_on:  whether the row has another round
    """

    start: float
    tokens: float
    turns: tuple[SampledTurn, ...] = ()
    unread: float = 1.0
    goes_on: bool = False


RowText = int | tuple[SampledTurn, ...]
"""Tokens of a response, or the turns of an episode."""


class EndedRow(NamedTuple):
    """Response that a round trains on; ``waited``: rounds since the generation of a token, summed over its tokens."""

    tokens: float
    waited: float


Prompt = int
"""Position of a prompt in the batch that it came with, which has a place in the layouts of all models."""


@dataclass(frozen=True)
class Round:
    """Rows of one round.

    generated:  pieces of responses, by prompt.
    trained:    responses of the batch that is complete with this round, by prompt.
    """

    generated: Mapping[Prompt, list[Segment]] = field(default_factory=lambda: defaultdict(list))
    trained: Mapping[Prompt, list[EndedRow]] = field(default_factory=lambda: defaultdict(list))

    @property
    def num_trained(self) -> int:
        """Number of responses that are trained."""
        return sum(map(len, self.trained.values()))

    def staleness(self) -> tuple[float, float]:
        """Return rounds between generation and the end of the batch, summed over trained tokens; and their number."""
        rows = [row for rows in self.trained.values() for row in rows]
        return sum(row.waited for row in rows), sum(row.tokens for row in rows)


@dataclass(frozen=True)
class Segments:
    """Segments of generation.

    tokens:      most tokens of a row in a round; None: all of them.
    most:        most rounds of a row.
    are_joined:  whether the samples of a prompt are trained together, in the round in which the last one ends.
    """

    tokens: int | None = None
    most: int = 1
    are_joined: bool = True

    @classmethod
    def of(cls, plan: Plan, lengths: TextLengths) -> Self:
        """Return the segments of ``plan``, in tokens of responses of ``lengths``, those of replies included; of
        episodes whose turns are known in sampled tokens."""
        rollout, most = plan.spec.rollout, plan.batch.segments
        tokens, sampled = rollout.segment_tokens, 1 - lengths.replies / lengths.mean_response
        whole = tokens if tokens is None or lengths.episodes else round(tokens / sampled)
        return cls(whole, most, most == 1 or rollout.groups == "wait")

    def pieces(self, text: RowText) -> Iterator[Segment]:
        """Yield what a row generates in each round."""
        if isinstance(text, tuple):
            yield from self._pieces_of(text)
        elif self.tokens is None:
            yield Segment(0, text)
        else:
            for start in range(0, min(text, self.tokens * self.most), self.tokens):
                yield Segment(start, min(self.tokens, text - start), goes_on=start + self.tokens < text)

    def _pieces_of(self, turns: Sequence[SampledTurn]) -> Iterator[Segment]:
        """Yield the pieces of an episode; a cut may be inside of a turn."""
        most = inf if self.tokens is None else self.tokens
        left, start, unread = deque(turns), 0.0, 1.0
        for number in range(self.most):
            room, own = most, list[SampledTurn]()
            while left and room > 0:
                turn = left.popleft()
                if turn.sampled > room:
                    left.appendleft(turn._replace(sampled=turn.sampled - room))
                    turn = SampledTurn(room)
                room -= turn.sampled
                own.append(turn)
            tokens = sum(turn.sampled + turn.reply for turn in own)
            yield Segment(start, tokens, tuple(own), unread, bool(left) and number + 1 < self.most)
            start, unread = start + tokens, max(1.0, own[-1].reply)
            if not left:
                return


def make_rounds(batches: Iterable[Sequence[RowText]], samples: int, segments: Segments) -> list[Round]:
    """Return the rows of each round in a run of ``batches``; rows that end in later rounds are left out.

    batches:  text of each row of each batch, the ``samples`` of a prompt behind each other.
    """
    texts = list(batches)
    rounds = [Round() for _ in texts]
    for batch, rows in enumerate(texts):
        for first in range(0, len(rows), samples):
            prompt, ended = first // samples, list[tuple[int, float, float]]()
            for text in rows[first : first + samples]:
                pieces = list(segments.pieces(text))
                for later, piece in zip(rounds[batch:], pieces, strict=False):
                    later.generated[prompt].append(piece)
                # rounds from each token to the row's last one
                waited = sum(piece.tokens * (len(pieces) - 1 - age) for age, piece in enumerate(pieces))
                ended.append((len(pieces) - 1, waited, sum(piece.tokens for piece in pieces)))
            last = max(age for age, *_ in ended)
            for age, waited, tokens in ended:
                trained_at = last if segments.are_joined else age
                if batch + trained_at < len(rounds):
                    row = EndedRow(tokens, waited + tokens * (trained_at - age))
                    rounds[batch + trained_at].trained[prompt].append(row)
    return rounds
