"""Guard of the numbers that operators compute on this rank: log-probs, values, losses and gradients must be finite."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.comm.world import World
from flexrlhf.config.spec import Spec
from flexrlhf.engines.base import Loss, Moments, moments
from flexrlhf.engines.non_finite import NonFinite, NonFiniteStep, first_in_columns
from flexrlhf.errors import RunStopped

GRACE_SECONDS = 2.0
"""Wait of a rank that found such a number for what the other ranks of the model find in the same pass."""


class RareWarnings:
    """Writer of lines to stderr, of each kind once in so many steps."""

    INTERVAL_STEPS = 20

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def __call__(self, kind: str, step: int, text: str) -> None:
        """Write ``text``, unless there was a line of this kind in the last steps."""
        if step >= self._next.get(kind, step):
            self._next[kind] = step + self.INTERVAL_STEPS
            print(f"flexrlhf: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class FiniteGuard:
    """Rule of what follows from numbers that are not finite.

    policy: stop the run, or skip the optimizer steps that they spoil.
    store:  where ranks publish what they found.
    rank:   this rank.
    warn:   reports what is skipped.
    """

    policy: Literal["stop", "skip"]
    store: dist.Store
    rank: int
    warn: RareWarnings = field(default_factory=RareWarnings)

    def check_columns(
        self, where: str, step: int, columns: Mapping[str, Tensor], rows: Tensor, ranks: RankGroup
    ) -> None:
        """Raise RunStopped for a number in ``columns`` (n, ...) that is not finite; with ``skip`` report it.

        where: step, operator and model, in words.
        rows:  int64 (n,), numbers of the rows.
        ranks: data-parallel group of the model; those that found such a number name the first row of all.
        """
        first = first_in_columns(columns, rows)
        if first is None:
            return
        if self.policy == "skip":
            self.warn(first.what, step, f"{where}: NaN or infinity in {first.text}; no update will follow from it")
            return
        first = self._over_ranks(where, first, ranks.ranks)
        raise RunStopped(
            f"{where}: NaN or infinity in {first.text}; guards.non_finite: skip would go on without the "
            f"optimizer steps that it spoils"
        )

    def _over_ranks(self, where: str, own: NonFinite, ranks: Sequence[int]) -> NonFinite:
        """Return the first row of those that ``ranks`` found. No rank waits where all is well, so this one waits a
        little for the others."""
        keys = [f"{where}/{rank}" for rank in ranks]
        self.store.set(f"{where}/{self.rank}", json.dumps(asdict(own)))
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and not self.store.check(keys):
            time.sleep(0.05)
        found = [NonFinite(**json.loads(self.store.get(key))) for key in keys if self.store.check([key])]
        return min(found, key=lambda each: each.row)

    def left_out(self, where: str, step: int, error: NonFiniteStep, losses: Sequence[Loss], reports: bool) -> Moments:
        """Return the statistics of an optimizer step that was left out; with ``stop`` raise RunStopped.

        where:   step, operator, model and mini-batch, in words.
        losses:  those of the step, whose statistics count for nothing.
        reports: whether this rank reports it.
        """
        cause = "though every loss is" if error.first is None else f"first in {error.first.text}"
        text = f"{where}: the loss or its gradient is not finite, {cause}"
        if self.policy == "stop":
            raise RunStopped(
                f"{text}; the weights were left as they were; guards.non_finite: skip would go on without this "
                f"optimizer step"
            )
        if reports:
            self.warn(where.partition(", ")[2], step, f"{text}; this optimizer step is left out")
        nothing = torch.zeros_like(error.statistics["grad_norm"])
        return {name: nothing for loss in losses for name in loss.statistics} | error.statistics

    def counted(self, statistics: Moments) -> Moments:
        """Return the statistics of an optimizer step with whether it was skipped, where steps may be."""
        if self.policy == "stop" or "skipped" in statistics:
            return statistics
        norm = statistics["grad_norm"]
        return statistics | {"skipped": moments(torch.zeros(1, device=norm.device))}


def make_finite_guard(spec: Spec, world: World) -> FiniteGuard:
    """Return the guard of a run on this rank."""
    return FiniteGuard(spec.guards.non_finite, dist.PrefixStore(f"finite/{spec.name}", world.store), world.rank)
