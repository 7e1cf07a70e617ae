"""Rule: a Move states exactly the needs of its transfers. Written from the rule, not from the code that plans Moves."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import chain, product

from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Eval, Move, Run
from flexrlhf.strategies.schedule import Schedule


def check_moves(plan: Plan) -> None:
    """Check that a Move has exactly the ranks, columns and primitive of its transfers; so in evaluations."""
    for evaluation in (x for x in plan.schedule.instructions if isinstance(x, Eval)):
        schedule = Schedule(evaluation.instructions, 0)
        check_moves(replace(plan, schedule=schedule, batch=evaluation.batch))
    for move in plan.schedule.instructions:
        if isinstance(move, Move):
            taking_part = set(chain.from_iterable((t.source, t.destination) for t in move.transfers))
            assert taking_part == set(move.ranks), f"{move.label} names {move.ranks}, but joins {sorted(taking_part)}"
            assert {t.column for t in move.transfers} == set(move.columns), f"{move.label}: a column without transfer"
            assert all(t.source != t.destination and t.prompts for t in move.transfers), f"{move.label}: empty transfer"
            cells = Counter((t.column, t.destination, prompt) for t in move.transfers for prompt in t.prompts)
            assert max(cells.values()) == 1, f"{move.label} sends {cells.most_common(1)} more than once"
            assert move.primitive == primitive_needed(plan, move), (
                f"{move.label} says {move.primitive}: {move.transfers}"
            )


def primitive_needed(plan: Plan, move: Move) -> str:
    """The primitive by design.md's rule, from the rows that each pair of ranks exchanges."""
    if not move.transfers:
        return "none"
    sent = {
        (source, destination): {
            (t.column, t.prompts) for t in move.transfers if (t.source, t.destination) == (source, destination)
        }
        for source in move.ranks
        for destination in move.ranks
        if source != destination
    }
    to_all = all(sent[a, b] == sent[a, c] != set() for a, b in sent for c in move.ranks if c != a)
    sizes = {tuple(sorted((column, len(prompts)) for column, prompts in parcel)) for parcel in sent.values()}
    if to_all and len(sizes) == 1 and all_rows_everywhere(plan, move):
        return "all_gather"
    sources, destinations = {t.source for t in move.transfers}, {t.destination for t in move.transfers}
    return "all_to_all" if sources & destinations else "point_to_point"


def all_rows_everywhere(plan: Plan, move: Move) -> bool:
    """Whether every rank of ``move`` has all prompts of its columns afterwards: own, received before, received now."""
    instructions = plan.schedule.instructions
    mini_batches = plan.batch.mini_batches if move.chunk is None else plan.batch.chunk(move.chunk)
    needed = {(c, prompt) for c in move.columns for m in mini_batches for prompt in plan.batch.prompts(m)}
    present: dict[int, set[tuple[str, int]]] = defaultdict(set)
    for run in (x for x in instructions if isinstance(x, Run)):
        for rank in run.ranks:
            prompts = plan.batch.prompts_on(run.layout, rank, run.mini_batches, run.attempt)
            present[rank].update(product(run.operator.writes, prompts))
    for earlier in (x for x in instructions[: instructions.index(move) + 1] if isinstance(x, Move)):
        for transfer in earlier.transfers:
            present[transfer.destination].update(product([transfer.column], transfer.prompts))
    return all(needed <= present[rank] for rank in move.ranks)
