"""Machines of the processes that play episodes: the entry of the placement, the plan, and processes on other ones."""

from __future__ import annotations

import re
import socket
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from small_runs import plan_of, spec_of

from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.config.spec_file import dump_spec, load_spec
from flexrlhf.environments.base import EpisodeCall, EpisodeReply
from flexrlhf.environments.episode_process import make_process
from flexrlhf.environments.episodes import Episodes
from flexrlhf.errors import UserError
from flexrlhf.plan.environment_places import processes_by_machine, processes_by_rank
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.report.placement_picture import placement_picture
from flexrlhf.trainer.episode_server import EpisodeServer, FixedProcesses, RemoteProcess
from flexrlhf.trainer.episode_service import service_process, serving_episodes
from flexrlhf.user_code.deadline import Deadline

FILE = Path(__file__).with_name("example_environments.py")
GAME, TWO = "environment={path: game.py:Game}", "cluster={nodes: [{count: 2, devices: 2}]}"
ALL = {"actor": 1, "critic": 1, "ref": 1, "reward": 1}


def test_an_entry_of_the_placement_places_the_environment(tmp_path: Path) -> None:
    """In equal parts, next to the ranks whose rows are played if these are there; it is printed and drawn."""
    plan = plan_of({**ALL, "environment": {"processes": 6, "nodes": "0-1"}}, 4, GAME, TWO)
    assert plan.spec.environment == EnvironmentSpec(path="game.py:Game", processes=6, nodes=(0, 1))
    assert processes_by_rank(plan) == {0: (0,), 1: (0, 0), 2: (1,), 3: (1, 1)}
    assert "  environment   3 processes on each of nodes 0-1\n" in format_plan(plan)
    (trace,) = placement_picture(plan, "placement").figure.data
    assert trace.y[-1] == "environment" and list(trace.text[-1]) == ["3 proc."] * 4
    (tmp_path / "again.yaml").write_text(dump_spec(plan.spec))
    assert load_spec(tmp_path / "again.yaml") == plan.spec
    # apart from the ranks that generate: a generating replica has one process at least
    apart = plan_of({**ALL, "actor": {"ranks": [0, 1]}, "environment": {"processes": 1, "nodes": [1]}}, 4, GAME, TWO)
    assert processes_by_rank(apart) == {0: (1,), 1: (1,)} and processes_by_machine(apart) == {1: 2}
    # on a node and on a machine without ranks, which has a column of its own
    entry = {"processes": 4, "nodes": [1], "hosts": ["cpu-1:29600"]}
    plan = plan_of({**ALL, "actor": {"ranks": [0]}, "environment": entry}, 4, GAME, TWO)
    assert processes_by_rank(plan) == {0: (1, 1, "cpu-1:29600", "cpu-1:29600")}
    assert "  environment   2 processes on each of node 1, cpu-1:29600\n" in format_plan(plan)
    (trace,) = placement_picture(plan, "placement").figure.data
    assert list(trace.text[-1]) == ["", "", "2 proc.", "2 proc.", "2 proc."]
    assert spec_of({"environment": {"processes": 9}}, 2, GAME).placement is None


@pytest.mark.parametrize(
    ("entry", "overrides", "sentence"),
    [
        ({"nodes": [0, 2]}, (), "environment.nodes: no machine 2; the cluster has 0-1"),
        ({"hosts": ["cpu-1"]}, (), "environment.hosts: 'cpu-1': expected HOST:PORT, such as cpu-1:29600"),
        ({"hosts": ["a:1", "a:1"]}, (), "hosts must be distinct, found a:1, a:1"),
        ({"nodes": [0, 0]}, (), "nodes must be distinct, found [0, 0]"),
        ({"processes": 1, "nodes": [0, 1]}, (), "2 machines for 1 processes; use fewer, or processes"),
        ({"ratio": 1}, (), 'placement.environment: expected processes, nodes, hosts, found {"ratio": 1}'),
        ({}, ("environment=null",), "placement.environment: the run has no environment; add the section environment"),
        (
            {"processes": 2},
            ("environment.processes=3",),
            "placement.environment.processes is 2 and environment.processes is 3: remove one of them",
        ),
    ],
)
def test_places_that_do_not_exist_are_refused(entry: object, overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        plan_of({**ALL, "environment": entry}, 4, GAME, TWO, *overrides)


def test_a_machine_without_ranks_runs_episodes_of_this_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A further attempt of a run ends the processes of the one before; without a secret nothing runs."""
    monkeypatch.setenv("FLEXRLHF_TOKEN", "s" * 32)
    settings, endpoint = EnvironmentSpec(path=f"{FILE}:Process"), f"127.0.0.1:{free_port()}"
    other = settings.model_copy(update={"timeout_seconds": 5.0})

    def process_of(place: str, settings: EnvironmentSpec = settings) -> RemoteProcess:
        return service_process(settings, endpoint, place)

    def replies(place: str) -> str:
        (reply,) = process_of(place).replies([EpisodeCall((0, 0), {}, 0)], Deadline.after(60))
        assert reply.failure is None, reply.failure
        return reply.messages[0][1]

    with pytest.raises(UserError, match="no episodes run there .*refused.*; start `flexrlhf serve CONFIG --listen 127"):
        process_of("a/0/x/0").check()
    with serving_episodes(settings, endpoint, 2):
        with pytest.raises(UserError, match="its config has another environment, or other limits of it"):
            process_of("a/0/x/0", other).check()
        first, second = replies("a/0/x/0"), replies("a/0/x/1")
        assert replies("a/0/x/0") == first != second
        with pytest.raises(UserError, match="all of its 2 processes are in use"):
            process_of("b/0/x/0").check()
        assert replies("a/0/y/0") not in (first, second)
        process_of("a/0/y/0").close()
        process_of("b/0/x/0").check()
        with (
            pytest.raises(UserError, match="--listen .*: Address already in use"),
            serving_episodes(other, endpoint, 1),
        ):
            pass
    monkeypatch.delenv("FLEXRLHF_TOKEN")
    with pytest.raises(UserError, match="FLEXRLHF_TOKEN: missing"), serving_episodes(settings, endpoint, 1):
        pass


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_time_of_all_replies_to_a_turn_is_planned() -> None:
    """In half of the run's timeout: the limit of a reply may be longer than its part, its assumed time may not."""
    few = plan_of(None, 2, GAME, "environment.processes=2", "timeout_seconds=60", "environment.seconds=9")
    assert "all replies to a turn may take 30 s: 7.5 s each of the 4 of a process\n" in format_plan(few)
    assert "warning: 4 replies of 9 s, one after the other, would take longer; use 4 processes, un" in format_plan(few)
    assert "warning" not in format_plan(plan_of(None, 2, GAME, "timeout_seconds=60", "environment.seconds=9"))


def test_a_machine_without_devices_is_refused() -> None:
    with pytest.raises(UserError, match="expected at least 1, found 0: every node has ranks; a machine without"):
        plan_of(None, 2, "cluster={nodes: [{devices: 2}, {devices: 0}]}")


def test_processes_of_another_machine_reply_as_own_ones() -> None:
    """A machine that does not reply, or a job with another secret, costs the episodes."""
    settings = EnvironmentSpec(path=f"{FILE}:Guess")
    server = EpisodeServer("127.0.0.1", FixedProcesses({"/3/0": make_process(settings)}), "secret", 5.0, 1, "node 1")
    remote = RemoteProcess(("environment.nodes", "node 1 at 127.0.0.1"), "127.0.0.1", server.port, "/3/0", "secret")
    here, there = Episodes(settings, 1), Episodes(settings, 0, [remote])
    row = {"greeting": "hallö", "list": [1, None, 2.5]}
    calls = [[EpisodeCall((4, place), row, place, turns)] for place in (5, 6) for turns in ((), ("4",), ("4", "6"))]

    def played(episodes: Episodes) -> list[EpisodeReply]:
        replies = [episodes.replies(each, Deadline.after(60))[0] for each in calls]
        return [replace(each, seconds=0.0) for each in replies]

    with server.serving():
        try:
            expected, found = played(here), played(there)
            assert found == expected and [each.is_done for each in found] == [False] * 5 + [True]
            assert not any(each.failure for each in found)
            (refused,) = replace(remote, token="guess").replies(calls[0], Deadline.after(5))
            assert refused.failure is not None and "the request is of another job" in refused.failure.text
            with pytest.raises(UserError, match="not sent to node 1 at .*: Object of type date is not JSON ser"):
                remote.replies([EpisodeCall((0, 0), {"day": date(2026, 1, 1)}, 0)], Deadline.after(5))
        finally:
            here.close()
            there.close()
    (lost,) = remote.replies(calls[0], Deadline.after(5))
    assert lost.failure is not None and lost.failure.kind == "machine"
    assert lost.failure.text.startswith("node 1 at 127.0.0.1 does not reply: ")
