"""Routes of rows between layouts, and the primitive that carries them. comm/move.py executes them.

A transfer is the rows of one column that one rank sends to another. The primitive over the union of ranks, first match:

* nothing missing               -> none
* every rank ends with every row, from equal shares -> all_gather
* no rank both sends and receives -> point_to_point
* else                          -> all_to_all with exact splits (an unequal all_gather, too)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from flexrlhf.placement.transfer import Primitive, Transfer

PromptsByRank = dict[int, set[int]]
"""Prompts of one column, by rank."""


def route(column: str, produced: PromptsByRank, available: PromptsByRank, needed: PromptsByRank) -> list[Transfer]:
    """Return transfers that bring each rank of ``needed`` the prompts that it lacks, from ranks that produced them.

    Of several producers (cp, tp and pp ranks of one replica produce the same rows) receivers take turns.
    """
    owners = _owners(produced)
    transfers: list[Transfer] = []
    for turn, destination in enumerate(sorted(needed)):
        parts: dict[int, list[int]] = defaultdict(list)
        lacking, have = needed[destination], available.get(destination, set())
        for prompt in () if lacking <= have else sorted(lacking - have):
            holders = owners[prompt]
            assert holders, f"no rank produced prompt {prompt} of {column}"
            parts[holders[turn % len(holders)]].append(prompt)
        transfers += [Transfer(column, source, destination, tuple(part)) for source, part in sorted(parts.items())]
    return transfers


def _owners(produced: PromptsByRank) -> dict[int, list[int]]:
    """Return the ranks that produced each prompt, in the order of ``produced``."""
    alike: dict[frozenset[int], list[int]] = defaultdict(list)
    for rank, prompts in produced.items():
        alike[frozenset(prompts)].append(rank)
    owners: dict[int, list[int]] = defaultdict(list)
    if sum(map(len, alike)) == len(frozenset().union(*alike)):
        for same, ranks in alike.items():
            owners.update(dict.fromkeys(same, ranks))
        return owners
    for rank, prompts in produced.items():
        for prompt in prompts:
            owners[prompt].append(rank)
    return owners


def primitive_of(transfers: Iterable[Transfer], ranks: tuple[int, ...], ends_with_all: bool) -> Primitive:
    """Return the primitive that carries ``transfers`` among ``ranks``, by the module's rule.

    ``ends_with_all``: whether afterwards every one of ``ranks`` has every row of the columns.
    """
    payloads: dict[int, dict[int, list[tuple[str, tuple[int, ...]]]]] = defaultdict(lambda: defaultdict(list))
    receivers = set()
    for transfer in transfers:
        payloads[transfer.source][transfer.destination].append((transfer.column, transfer.prompts))
        receivers.add(transfer.destination)
    if not payloads:
        return "none"
    if ends_with_all and _is_all_gather(payloads, ranks):
        return "all_gather"
    return "all_to_all" if receivers & set(payloads) else "point_to_point"


def _is_all_gather(payloads: dict[int, dict[int, list[tuple[str, tuple[int, ...]]]]], ranks: tuple[int, ...]) -> bool:
    """Whether every rank sends one and the same payload to every other, all of one size."""
    sizes = set()
    for rank in ranks:
        sent = payloads.get(rank, {})
        if set(sent) != set(ranks) - {rank}:
            return False
        contents = list(sent.values())
        if any(content != contents[0] for content in contents):
            return False
        sizes.add(tuple((column, len(prompts)) for column, prompts in contents[0]))
    return len(sizes) == 1
