"""Ranks of several runs, some with a planted bug: runs whose name is in ``BUGS``.

``python -m planted ORDERS STOP DIRECTORIES``: as flexrlhf/launch/rank.py, but for the bugs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from flexrlhf.comm.move import RowPacking
from flexrlhf.comm.reduce import RankGroup
from flexrlhf.engines import experts
from flexrlhf.engines.base import Totals
from flexrlhf.launch import worker
from flexrlhf.objectives import advantages
from flexrlhf.runs.resume import RunOrder
from flexrlhf.trainer import run_operator
from flexrlhf.trainer.rank_runs import RankRuns
from flexrlhf.trainer.weight_syncs import WeightSyncs

Planted = AbstractContextManager[Any]


def whitening_per_rank() -> Planted:
    """Advantages are whitened with the mean and deviation of the rank's own rows."""

    class Alone:
        def sum(self, sums: torch.Tensor) -> torch.Tensor:
            return sums

    whiten = advantages.whiten
    return patch.object(advantages, "whiten", lambda values, mask, segments, _: whiten(values, mask, segments, Alone()))


def denominator_per_rank() -> Planted:
    """Losses are divided by the tokens of the rank's own rows."""

    def totals(batch: Any, _: RankGroup) -> Totals:
        mask = batch.mask.double()
        return Totals(float(mask.sum()), float((mask.sum(1) > 0).sum()), len(batch) / batch.samples_per_prompt)

    return patch.object(Totals, "of", totals)


def sync_skipped() -> Planted:
    """The actor's weights do not reach its shadow after step 0, though their version does."""
    run = WeightSyncs.run

    def skipping(syncs: WeightSyncs, sync: Any, step: int) -> int:
        if step > 0 or sync.source != "actor":
            return run(syncs, sync, step)
        copy = syncs._models.get(sync.destination)
        if copy is not None:
            copy.version = step + 1
        return 0

    return patch.object(WeightSyncs, "run", skipping)


def rows_swapped() -> Planted:
    """The first two scores of a move arrive in each other's place."""
    unpack = RowPacking.unpack

    def swapping(packing: RowPacking, buffer: Any, transfers: Any, rows: Any) -> None:
        swapped = [
            replace(each, prompts=(each.prompts[1], each.prompts[0], *each.prompts[2:]))
            if each.column == "scores" and len(each.prompts) > 1
            else each
            for each in transfers
        ]
        unpack(packing, buffer, swapped, rows)

    return patch.object(RowPacking, "unpack", swapping)


def another_token() -> Planted:
    """The second token of row 3 of step 1 is another than was sampled."""
    generate = run_operator._generate

    def changing(run: Any, store: Any, context: Any, ahead: Any, before: Any) -> Any:
        columns, statistics = generate(run, store, context, ahead, before)
        rows = run.batch(store, context.device).rows if context.sampling.step == 1 else ()
        for index in (index for index, row in enumerate(rows) if row == 3):
            place = columns["tokens"].shape[1] - columns["response_mask"].shape[1] + 1
            columns["tokens"][index, place] = 5 if columns["tokens"][index, place] != 5 else 6
        return columns, statistics

    return patch.object(run_operator, "_generate", changing)


def experts_swapped() -> Planted:
    """Tokens of the first expert of each rank are computed by the second one, and the other way round."""
    own = experts._own_experts

    def swapping(module: Any, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return own(module, rows, torch.where(chosen < 2, 1 - chosen, chosen))

    return patch.object(experts, "_own_experts", swapping)


BUGS: dict[str, Callable[[], Planted]] = {
    "whitening-per-rank": whitening_per_rank,
    "denominator-per-rank": denominator_per_rank,
    "sync-skipped": sync_skipped,
    "rows-swapped": rows_swapped,
    "another-token": another_token,
    "another-token-replayed": another_token,
    "experts-swapped": experts_swapped,
}


def main(orders_file: str, stop_file: str, directories: str) -> None:
    """Execute the orders in a file, each with the bug that its name states."""
    execute = RankRuns.execute

    def with_bug(runs: RankRuns, order: RunOrder, *arguments: Any) -> int:
        with BUGS.get(order.spec.name, nullcontext)():
            return execute(runs, order, *arguments)

    with patch.object(RankRuns, "execute", with_bug):
        worker.main(orders_file, stop_file, directories)


if __name__ == "__main__":
    main(*sys.argv[1:])
