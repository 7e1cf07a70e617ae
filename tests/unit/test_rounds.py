"""Rows of each round, with segments and without: a case by hand, and what is true of all."""

from __future__ import annotations

from random import Random

import pytest

from flexrlhf.guideline.simulation.rounds import EndedRow, Round, SampledTurn, Segment, Segments, make_rounds


def test_segments_by_hand() -> None:
    """Two batches of one prompt with two samples, of 2 and 5 tokens and of 1 and 3, in segments of 2 tokens."""
    rounds = make_rounds([[2, 5], [1, 3], [1, 1], [1, 1]], 2, Segments(2, 3))
    assert [dict(each.generated) for each in rounds[:3]] == [
        {0: [Segment(0, 2), Segment(0, 2, goes_on=True)]},
        {0: [Segment(2, 2, goes_on=True), Segment(0, 1), Segment(0, 2, goes_on=True)]},
        {0: [Segment(4, 1), Segment(2, 1), Segment(0, 1), Segment(0, 1)]},
    ]
    # the short sample waits two rounds for the long one, whose first tokens are two rounds older than its last
    assert [dict(each.trained) for each in rounds[:2]] == [{}, {}]
    assert rounds[2].trained[0] == [
        EndedRow(2, 4),
        EndedRow(5, 6),
        EndedRow(1, 1),
        EndedRow(3, 2),
        *[EndedRow(1, 0)] * 2,
    ]
    assert rounds[2].staleness() == (13, 13)
    apart = make_rounds([[2, 5], [1, 3], [1, 1], [1, 1]], 2, Segments(2, 3, are_joined=False))
    assert [each.num_trained for each in apart] == [1, 1, 4, 2]


def test_an_episode_is_cut_after_sampled_tokens() -> None:
    """Also inside of a turn, whose reply a later round awaits; another one ends with the most segments."""
    turns = SampledTurn(5, 2, 0.1), SampledTurn(4, 3, 0.9), SampledTurn(1, 0, 0.5)
    first, second = Segments(7, 3).pieces(turns)
    assert first == Segment(0, 9, (turns[0], SampledTurn(2)), goes_on=True)
    assert second == Segment(9, 6, (SampledTurn(2, 3, 0.9), turns[2]))
    # a reply behind a cut is read in the next round
    assert [piece.unread for piece in Segments(5, 3).pieces(turns)] == [1, 2]
    assert list(Segments(3, 2).pieces(turns))[1] == Segment(3, 5, (SampledTurn(2, 2, 0.1), SampledTurn(1)))
    assert list(Segments().pieces(turns)) == [Segment(0, 15, turns)]
    (whole,) = make_rounds([[turns]], 1, Segments())
    assert whole.trained[0] == [EndedRow(15, 0)]


def test_a_row_ends_after_the_most_segments() -> None:
    (first, second, _) = make_rounds([[9], [1], [1]], 1, Segments(2, most=2))
    assert (first.num_trained, second.trained[0]) == (0, [EndedRow(4, 2), EndedRow(1, 0)])


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_no_row_is_lost_and_none_is_older_than_its_bound(seed: int, joined: bool) -> None:
    random = Random(seed)
    samples, tokens, most = random.choice((1, 3)), random.randint(1, 9), random.choice((20, 1, 2, 4))
    batches = [[random.randint(1, 20) for _ in range(2 * samples)] for _ in range(12)]
    segments, bound = Segments(tokens, most, joined), min(most, -(-20 // tokens))
    # batches without rows, in which the last ones end
    rounds = make_rounds([*batches, *[[]] * bound], samples, segments)
    rows = [row for each in rounds for rows in each.trained.values() for row in rows]
    cut = [min(length, tokens * bound) for batch in batches for length in batch]
    assert sorted(row.tokens for row in rows) == sorted(cut)
    assert sum(piece.tokens for each in rounds for rows in each.generated.values() for piece in rows) == sum(cut)
    assert all(piece.tokens <= tokens for each in rounds for rows in each.generated.values() for piece in rows)
    assert all(row.waited <= row.tokens * (bound - 1) for row in rows)


def test_segments_as_long_as_the_longest_response_are_none() -> None:
    batches = [[3, 7], [7, 1]]
    assert make_rounds(batches, 2, Segments(7)) == make_rounds(batches, 2, Segments())
    assert make_rounds([[2]], 1, Segments()) == [Round({0: [Segment(0, 2)]}, {0: [EndedRow(2, 0)]})]
