"""Processes in which episodes run: how many each rank and node has, in the plan and in its picture."""

from __future__ import annotations

from small_runs import plan_of

from flexrlhf.plan.plan_text import format_plan
from flexrlhf.report.placement_picture import placement_picture

GAME, TWO = "environment={path: game.py:Game}", "cluster={nodes: [{count: 2, devices: 2}]}"
ALL = {"actor": 1, "critic": 1, "ref": 1, "reward": 1}


def test_ranks_that_generate_share_the_processes() -> None:
    """They run on the node of their rank, each with one at least, and are printed and drawn."""
    plan = plan_of(ALL, 4, GAME, TWO, "environment.processes=6")
    assert plan.processes.by_rank() == {0: 1, 1: 2, 2: 1, 3: 2} and plan.processes.by_node() == {0: 3, 1: 3}
    assert "  environment   3 processes on each of nodes 0-1\n" in format_plan(plan)
    (trace,) = placement_picture(plan, "placement").figure.data
    assert trace.y[-1] == "environment" and list(trace.text[-1]) == ["3 proc."] * 4
    part = plan_of({**ALL, "actor": {"ranks": [2, 3]}}, 4, GAME, TWO, "environment.processes=1")
    assert part.processes.by_rank() == {2: 1, 3: 1} and part.processes.by_node() == {1: 2}
    assert "  environment   2 processes on node 1\n" in format_plan(part)
    (trace,) = placement_picture(part, "placement").figure.data
    assert list(trace.text[-1]) == ["", "", "2 proc.", "2 proc."]


def test_the_time_of_all_replies_to_a_turn_is_planned() -> None:
    """In half of the run's timeout: the limit of a reply may be longer than its part, its assumed time may not."""
    few = plan_of(None, 2, GAME, "environment.processes=2", "timeout_seconds=60", "environment.seconds=9")
    assert "all replies to a turn may take 30 s: 7.5 s each of the 4 of a process\n" in format_plan(few)
    assert "warning: 4 replies of 9 s, one after the other, would take longer; use 4 processes, un" in format_plan(few)
    assert "warning" not in format_plan(plan_of(None, 2, GAME, "timeout_seconds=60", "environment.seconds=9"))


def test_greedy_episodes_have_processes_where_they_are_generated() -> None:
    """On the trained copy, which generates them next to the shadow that samples."""
    plan = plan_of([0.5] * 4, 2, "algorithm={name: remax, prompts_per_step: 4}", GAME)
    generating = [each for each in plan.graph.operators if each.has_replies]
    assert {rank for each in generating for rank in plan.placement.layout_of(each).ranks} == {0, 1}
    assert plan.processes.by_rank().keys() == {0, 1}
