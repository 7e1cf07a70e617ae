"""Replies of environments that ranks of a replica share: one calls, the others receive what it publishes."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from small_runs import plan_of
from torch import distributed as dist
from transformers import AutoTokenizer

from flexrlhf.comm.mailbox import Mailbox
from flexrlhf.comm.world import World
from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.data.chat import ChatFormat
from flexrlhf.data.quickstart.corpus import build_tokenizer
from flexrlhf.data.turn_tokens import TurnTokens
from flexrlhf.environments.base import EpisodeCall, EpisodeReply
from flexrlhf.environments.episodes import Episodes
from flexrlhf.errors import RunStopped
from flexrlhf.trainer.episode_replies import Received, ReplySource, Request
from flexrlhf.trainer.episode_turns import make_environment_caller

FILE = Path(__file__).with_name("example_environments.py")
TURNS: list[tuple[tuple[str, ...], int | None]] = [((), None), (("x",), 9), (("x", "y"), 1)]
"""Turns of the policy so far, and the room that is left."""


@dataclass
class Replica:
    """A rank of a replica of two, whose group no reply communicates in."""

    is_first: bool
    ranks: tuple[int, ...] = (4, 5)
    group: object = "tp"


def encode(reply: EpisodeReply) -> list[int]:
    return [len(content) for _, content in reply.messages]


def requests(turns: tuple[str, ...], room: int | None) -> list[Request]:
    return [Request(EpisodeCall((1, row), {}, 0, turns), encode, room) for row in range(3)]


def test_ranks_of_a_replica_receive_the_replies_that_the_first_one_has() -> None:
    """Also of an environment that would reply otherwise to another call; in any order, and none of them stays."""
    settings, store = EnvironmentSpec(path=f"{FILE}:Secret", processes=2), dist.HashStore()
    mailbox = Mailbox(World(0, 2, store, torch.device("cpu"), "gloo"), "environments", 30.0)
    first, other = (
        ReplySource(settings, Episodes(settings, 2 - rank), None, mailbox, 30.0, most=2) for rank in range(2)
    )
    try:
        later = [other.submit(requests(turns, room), "actor", Replica(False)) for turns, room in TURNS]
        for expected, (turns, room) in zip(later, TURNS, strict=True):
            found = first.submit(requests(turns, room), "actor", Replica(True)).result().rows
            assert expected.result().rows == found
        assert [reply.state for reply in found] == ["no room"] * 3 and found[0].reward == 0.5
        assert store.num_keys() == 0
        # a replica of one rank needs no store
        alone = first.submit(requests((), None), "actor", Replica(True, group=None)).result().rows
        assert [reply.state for reply in alone] == ["going on"] * 3 and store.num_keys() == 0
    finally:
        first.close()
    waiting = other.submit(requests((), None), "actor", Replica(False))
    while not waiting.running():
        time.sleep(0.01)
    other.close()
    with pytest.raises(RunStopped, match="the replica's first rank has published no replies"):
        waiting.result()


def test_sampled_and_greedy_rows_await_replies_at_the_same_time(tmp_path: Path) -> None:
    """Replies to all rows of one generate may be late when all rows of the other one call for theirs."""
    plan = plan_of(
        *(None, 1, "algorithm={name: remax, prompts_per_step: 4}"),
        f"environment={{path: '{FILE}:Sleeper', processes: 1, tool_format: auto}}",
        "rollout={order: free, segment_tokens: 4, late_replies: carry}",
    )
    world = World(0, 1, dist.HashStore(), torch.device("cpu"), "gloo")
    build_tokenizer(["yes"], tmp_path)
    template = Path(__file__).parents[1] / "fixtures/chat_templates/qwen2_5.jinja"
    tokens = TurnTokens(AutoTokenizer.from_pretrained(tmp_path), ChatFormat(template=template.read_text()))
    caller = make_environment_caller(plan, world, tokens, str, None)
    assert caller is not None and plan.batch.num_rows == 8
    assert caller.settings.tool_format == "hermes"

    def submitted(row: int, seconds: str) -> Future[Received]:
        request = Request(EpisodeCall((0, row), {}, 0, (seconds,)), encode, 9)
        return caller.source.submit([request], "actor", Replica(True, group=None))

    try:
        # the first reply says that episodes run at once
        assert submitted(0, "0").result().rows[0].state == "going on"
        calls = [submitted(row, "1000") for row in range(1, 1 + 2 * plan.batch.num_rows)]
        deadline = time.monotonic() + 10
        while not all(each.running() for each in calls):
            assert time.monotonic() < deadline, "some await a thread"
            time.sleep(0.01)
    finally:
        caller.close()
