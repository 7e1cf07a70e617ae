"""Order in which all pairs of members meet: rounds of disjoint pairs, so that pairs of one round do not wait for
another."""

from __future__ import annotations

Pair = tuple[int, int]


def rounds_of_pairs(number: int) -> list[list[Pair]]:
    """Return rounds in which each of ``number`` members meets every other once, each at most once a round.

    The circle method of tournaments: one member stays in place, the others turn.
    """
    circle: list[int | None] = list(range(number))
    if number % 2:
        circle.append(None)
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [pairs for pairs in rounds if pairs]


def partner_of(member: int, pairs: list[Pair]) -> int | None:
    """Return whom ``member`` meets in a round; None where it meets no one."""
    return next((a if b == member else b for a, b in pairs if member in (a, b)), None)
