"""Messages between ranks through the job's store, and who removes them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from flexrlhf.comm.deadlines import DeadlineError
from flexrlhf.comm.mailbox import Mailbox
from flexrlhf.comm.world import World


@pytest.fixture
def mailboxes() -> list[Mailbox]:
    """Mailboxes of three ranks of one job."""
    store = dist.HashStore()
    worlds = [World(rank, 3, store, torch.device("cpu"), "gloo") for rank in range(3)]
    return [Mailbox(world, "run", 0.2) for world in worlds]


def test_the_last_reader_removes_messages_and_no_one_before(mailboxes: list[Mailbox]) -> None:
    mailboxes[0].publish("a", {"loss": 0.5})
    mailboxes[0].publish("b", [1, None])
    for number, mailbox in enumerate(mailboxes):
        assert mailbox.gather({"a": "rank 0", "b": "rank 0"}, "both") == [{"loss": 0.5}, [1, None]]
        assert mailbox.clear(["a", "b"], readers=3) == (number == 2)
    assert mailboxes[0].store.num_keys() == 0


def test_the_only_reader_removes_a_message_at_once(mailboxes: list[Mailbox]) -> None:
    assert not mailboxes[1].has(["a"])
    mailboxes[0].publish("a", "text")
    assert mailboxes[1].has(["a"]) and mailboxes[1].receive("a", "rank 0", "a text") == "text"
    assert mailboxes[1].clear(["a"]) and mailboxes[0].store.num_keys() == 0


def test_a_message_that_does_not_come_is_named_with_its_publisher(mailboxes: list[Mailbox]) -> None:
    mailboxes[0].publish("a", 1)
    sentence = "rank 2 at both: the deadline of 0.2 s passed, waiting for rank 1; arrived: rank 0"
    with pytest.raises(DeadlineError, match=f"^{sentence}$"):
        mailboxes[2].gather({"a": "rank 0", "b": "rank 1"}, "both")
