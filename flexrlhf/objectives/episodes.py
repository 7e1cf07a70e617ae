"""Statistics of episodes, and the end of a run whose environment fails."""

from __future__ import annotations

import torch
from torch import Tensor

from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.engines.base import Batch, Moments, moments
from flexrlhf.errors import RunStopped
from flexrlhf.metrics import EPISODE_FAILURES, FAILED_IN_A_ROW
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.operators.outcomes import EpisodeState

STATES = {
    "episode_ended": "ended",
    "episode_last_turn": "last turn",
    "episode_no_room": "no room",
    **{f"episode_failed_{kind}": EpisodeState.of_failure(kind) for kind in EPISODE_FAILURES},
}
"""Statistic → the state of episodes that it counts."""


def episodes(settings: EnvironmentSpec, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """Return statistics of turns and of tools, in all sequences of an episode, and of how episodes ended.

    Raises RunStopped, on all ranks alike, if ``max_failures`` rows in a row, also of earlier steps, have failed.
    """

    def total(values: Tensor) -> Tensor:
        return values.float().view(-1, batch.sequences).sum(1)

    ends = batch.episodes["episode"]
    has_failed = ends >= EpisodeState.FAILED
    counted = {"turns": moments(total(batch["turns"]), ~has_failed), "episode_failed": moments(has_failed.float())}
    if batch.sequences > 1:
        counted["sequences"] = moments(total(batch["attention_mask"].any(1)), ~has_failed)
    if context.step < 0:
        return {}, counted  # of an evaluation
    in_a_row = torch.tensor(float(_failed_in_a_row(settings, batch.episodes, context)), device=has_failed.device)
    replies = batch["attention_mask"][:, -batch["response_mask"].shape[1] :].float() - batch["response_mask"].float()
    return {}, {
        **counted,
        FAILED_IN_A_ROW: moments(in_a_row),
        "reply_length": moments(total(replies.sum(1)), ~has_failed),
        **{name: moments((ends == EpisodeState.NUMBERS[state]).float()) for name, state in STATES.items()},
        "tool_calls": moments(total(batch["tool_calls"])),
        "failed_tool_calls": moments(total(batch["failed_tool_calls"])),
    }


def _failed_in_a_row(settings: EnvironmentSpec, batch: Batch, context: CombineContext) -> int:
    """Return how many rows have failed in a row, in their order, after this step. Raises RunStopped for too many."""
    failed = set(context.reducer.gather(batch.rows[batch["episode"] >= EpisodeState.FAILED]).tolist())
    rows = sorted(context.reducer.gather(batch.rows).tolist())
    in_a_row = int(context.state.get(FAILED_IN_A_ROW, 0))
    for row in rows:
        in_a_row = in_a_row + 1 if row in failed else 0
        if in_a_row >= settings.max_failures:
            raise RunStopped(
                f"environment {settings.name}: {in_a_row} episodes in a row have failed up to step {context.step}, row "
                f"{row} (environment.max_failures: {settings.max_failures}); the first of each kind is above"
            )
    return in_a_row
