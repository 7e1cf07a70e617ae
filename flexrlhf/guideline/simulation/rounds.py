"""Rows of each round of the list, from the response length of every row: which are generated, how far, and trained.

Without segments a round generates the rows of its batch whole. With segments of T tokens it continues, by at most T
tokens, the rows of its own batch and of the M - 1 batches before it that have not ended; a row ends at M * T tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from flexrlhf.api import Plan
from flexrlhf.guideline.simulation.inputs import TextLengths


class Segment(NamedTuple):
    """Tokens of one response that a round generates; the response had ``start`` tokens before."""

    start: float
    tokens: float


class EndedRow(NamedTuple):
    """Response that a round trains on; ``waited``: rounds since the generation of a token, summed over its tokens."""

    tokens: int
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

    def staleness(self) -> tuple[float, int]:
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
        """Return the segments of ``plan``, in tokens of responses of ``lengths``, those of replies included."""
        rollout, most = plan.spec.rollout, plan.batch.segments
        tokens, sampled = rollout.segment_tokens, 1 - lengths.replies / lengths.mean_response
        whole = None if tokens is None else round(tokens / sampled)
        return cls(whole, most, most == 1 or rollout.groups == "wait")

    def pieces(self, length: int) -> Iterator[Segment]:
        """Yield what a row of ``length`` tokens generates in each round."""
        if self.tokens is None:
            yield Segment(0, length)
            return
        for start in range(0, min(length, self.tokens * self.most), self.tokens):
            yield Segment(start, min(self.tokens, length - start))


def make_rounds(batches: Iterable[Sequence[int]], samples: int, segments: Segments) -> list[Round]:
    """Return the rows of each round in a run of ``batches``; rows that end in later rounds are left out.

    batches:  response length of each row of each batch, the ``samples`` of a prompt behind each other.
    """
    lengths = list(batches)
    rounds = [Round() for _ in lengths]
    for batch, rows in enumerate(lengths):
        for first in range(0, len(rows), samples):
            prompt, ended = first // samples, list[tuple[int, float]]()
            for length in rows[first : first + samples]:
                pieces = list(segments.pieces(length))
                for later, piece in zip(rounds[batch:], pieces, strict=False):
                    later.generated[prompt].append(piece)
                # rounds from each token to the row's last one
                waited = sum(piece.tokens * (len(pieces) - 1 - age) for age, piece in enumerate(pieces))
                ended.append((len(pieces) - 1, waited))
            last = max(age for age, _ in ended)
            for (age, waited), length in zip(ended, rows[first : first + samples], strict=True):
                trained_at = last if segments.are_joined else age
                tokens = min(length, segments.tokens * (age + 1)) if segments.tokens else length
                if batch + trained_at < len(rounds):
                    row = EndedRow(tokens, waited + tokens * (trained_at - age))
                    rounds[batch + trained_at].trained[prompt].append(row)
    return rounds
