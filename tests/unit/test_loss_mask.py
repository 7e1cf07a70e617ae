"""The mask of what is trained on in responses of the data set."""

from __future__ import annotations

from dataclasses import replace

from flexrlhf.data.examples import Example
from flexrlhf.operators.columns import Lengths
from flexrlhf.plan.run_data import RunData
from flexrlhf.trainer.step_rows import input_columns


def test_columns_have_the_mask_of_what_is_trained_on() -> None:
    """Of plain text all tokens; attention and ``response_mask`` have no gaps."""
    chat = Example((7,), ((3, 4, 5),), (True,), trained=((True, False, True),))
    text = Example((7, 8), ((3, 4),), (False,))
    columns = input_columns([chat, text], [0, 1], 1, Lengths(2, 4), pad_token_id=0)
    assert columns["loss_mask"].tolist() == [[1, 0, 1, 0], [1, 1, 0, 0]]
    assert columns["response_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert columns["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]


def test_a_mask_is_part_of_the_digest_of_the_data() -> None:
    """Whoever goes on from a checkpoint with another mask trains on other data."""
    example = Example((7,), ((3, 4),), (True,))
    digests = {
        RunData([replace(example, trained=trained)], [], [], "", (1,), 0).digest
        for trained in ((), ((True, False),), ((False, True),))
    }
    assert len(digests) == 3
