"""Replies of environments that ranks of a replica share: one calls, the others receive what it publishes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from flexrlhf.comm.mailbox import Mailbox
from flexrlhf.comm.world import World
from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.data.turn_tokens import Replies
from flexrlhf.environments.base import EpisodeCall
from flexrlhf.environments.episodes import Episodes
from flexrlhf.errors import RunStopped
from flexrlhf.trainer.episode_replies import ReplySource, Request

FILE = Path(__file__).with_name("example_environments.py")
TURNS: list[tuple[tuple[str, ...], int | None]] = [((), None), (("x",), 9), (("x", "y"), 1)]
"""Turns of the policy so far, and the room that is left."""


@dataclass
class Replica:
    """A rank of a replica of two, whose group no reply communicates in."""

    is_first: bool
    ranks: tuple[int, ...] = (4, 5)
    group: object = "tp"


def encode(messages: Replies) -> list[int]:
    return [len(content) for _, content in messages]


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
