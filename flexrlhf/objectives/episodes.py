"""Statistics of episodes, and the end of a run whose environment fails."""

from __future__ import annotations

from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.engines.base import Batch, Moments, moments
from flexrlhf.errors import RunStopped
from flexrlhf.metrics import EPISODE_FAILURES
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.operators.outcomes import EPISODE_STATES, FAILED, failed_state

STATES = {
    "episode_ended": "ended",
    "episode_last_turn": "last turn",
    "episode_no_room": "no room",
    **{f"episode_failed_{kind}": failed_state(kind) for kind in EPISODE_FAILURES},
}
"""Statistic → the state of episodes that it counts."""


def episodes(settings: EnvironmentSpec, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """Return statistics of turns, of tools and of how episodes ended.

    Raises RunStopped, on all ranks alike, if ``max_failures`` rows in a row, or all of a step, have failed.
    """
    has_failed = batch["episode"] >= FAILED
    counted = {"turns": moments(batch["turns"].float(), ~has_failed), "episode_failed": moments(has_failed.float())}
    if context.step < 0:
        return {}, counted  # of an evaluation
    _check(settings, batch, context)
    replies = batch["attention_mask"][:, -batch["response_mask"].shape[1] :].float() - batch["response_mask"].float()
    return {}, {
        **counted,
        "reply_length": moments(replies.sum(1), ~has_failed),
        **{name: moments((batch["episode"] == EPISODE_STATES[state]).float()) for name, state in STATES.items()},
        "tool_calls": moments(batch["tool_calls"].float()),
        "failed_tool_calls": moments(batch["failed_tool_calls"].float()),
    }


def _check(settings: EnvironmentSpec, batch: Batch, context: CombineContext) -> None:
    """Raise RunStopped if too many rows in a row have failed, in the order of the step's rows."""
    failed = set(context.reducer.gather(batch.rows[batch["episode"] >= FAILED]).tolist())
    rows = sorted(context.reducer.gather(batch.rows).tolist())
    most = min(settings.max_failures, len(rows))
    in_a_row = 0
    for row in rows:
        in_a_row = in_a_row + 1 if row in failed else 0
        if in_a_row >= most:
            raise RunStopped(
                f"environment {settings.name}: {in_a_row} episodes in a row have failed in step {context.step}, up to "
                f"row {row} (environment.max_failures: {settings.max_failures}); the first of each kind is above"
            )
