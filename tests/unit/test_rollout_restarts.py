"""Restarts of rollout processes: their limit, the memory that is planned for them, and where they are shown."""

from __future__ import annotations

import pytest
from small_runs import plan_of

from flexrlhf.display.plain_lines import problems_text
from flexrlhf.display.summary_text import format_summary
from flexrlhf.engines.vllm.restarts import Restarts, RolloutProcessError
from flexrlhf.plan.plan_text import format_plan

SIX, VLLM = [0.5] * 6, "rollout.engine=vllm"


def test_restarts_are_limited_in_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    restarts, error = Restarts(2, rank=3), RolloutProcessError("it ended")
    for step in (0, 1):
        for number in (1, 2):
            restarts.begin(step)
            restarts.add(error)
            line = f"flexrlhf: rank 3: it ended; restart {number} of 2 with the weights of the last sync\n"
            assert capsys.readouterr().err == line
    with pytest.raises(RolloutProcessError) as beyond:
        restarts.add(error)
    assert str(beyond.value) == "it ended, after 2 restarts in the same step (rollout.max_restarts)"
    with pytest.raises(RolloutProcessError, match="^it ended$"):
        Restarts(0, rank=3).add(error)


def test_the_plan_has_host_memory_to_restart_from() -> None:
    child = (SIX, 4, VLLM, "rollout.process=child")
    planned, without, inline = plan_of(*child), plan_of(*child, "rollout.max_restarts=0"), plan_of(SIX, 4, VLLM)
    for rank in planned.placement["actor.rollout"].ranks:
        state = planned.memories[rank].states["actor.rollout"]
        assert state is not None and state.for_restart == state.weights > 0
        bytes_of = [each.memories[rank].loaded_host_bytes for each in (planned, without, inline)]
        assert bytes_of[0] - state.weights == bytes_of[1] == bytes_of[2]
        assert planned.memories[rank].peak_bytes == without.memories[rank].peak_bytes
    assert " to restart actor.rollout" in format_plan(planned)
    assert " to restart " not in format_plan(without)


def test_restarts_are_shown() -> None:
    rows = [{"step": step, "seconds": 1.0, "rollout_restarts": float(step % 2 * step)} for step in range(4)]
    assert problems_text(rows[1]) == "rollout_restarts 1" and not problems_text(rows[0])
    lines = format_summary("first", "runs/first", rows, []).splitlines()
    assert "  4 restarts of rollout processes, in steps 1,3" in lines
    assert not any("restart" in line for line in format_summary("first", "runs/first", rows[:1], []).splitlines())
