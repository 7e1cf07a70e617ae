"""What functions of a user's file may return: each thing that they may not is one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flexrlhf.config.algorithms.grpo import GrpoSpec
from flexrlhf.engines.base import Batch, moments
from flexrlhf.errors import UserError
from flexrlhf.objectives.functions import check_returned, combine_of, make_loss
from flexrlhf.operators.graph import Operator

OPERATOR = Operator("advantages", "combine", "actor", ("scores",), ("loss_mask", "advantages"), "own.py:compared")
BATCH = Batch({"scores": torch.zeros(3)}, torch.arange(3), 1)
COLUMNS = {"loss_mask": torch.ones(3, 2), "advantages": torch.ones(3, 2)}


def test_what_it_should_return_passes() -> None:
    check_returned(OPERATOR, (COLUMNS, {"reward": moments(torch.ones(3))}), BATCH)


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (COLUMNS, r"returns a dict, not \(columns, statistics\)"),
        (({"loss_mask": COLUMNS["loss_mask"]}, {}), "returns no column 'advantages', which advantages writes"),
        (
            (COLUMNS | {"advantages": torch.ones(3)}, {}),
            r"column 'advantages' is a tensor \(3,\), not a tensor \(n, R\)",
        ),
        ((COLUMNS | {"advantages": torch.ones(2, 2)}, {}), r"a tensor \(2, 2\), not a tensor \(n, R\) of 3 rows"),
        ((COLUMNS, {"reward": 1.0}), r"statistic 'reward' is a float, not flexrlhf.engines.base.moments"),
    ],
)
def test_what_it_should_not_return_is_named(returned: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=rf"^own\.py:compared.*{sentence}"):
        check_returned(OPERATOR, returned, BATCH)


def test_a_loss_is_a_loss(tmp_path: Path) -> None:
    file = tmp_path / "losses.py"
    file.write_text("def number(spec):\n    return 1.0\n\n\ndef combine(spec, batch, context):\n    return 2\n")
    with pytest.raises(UserError, match=r"number returns a float, not a flexrlhf\.engines\.base\.Loss"):
        make_loss(f"{file}:number", GrpoSpec())
    assert make_loss("policy_loss", GrpoSpec()).quantity == "logprobs"
    combine: Any = combine_of(f"{file}:combine")
    assert combine(None, None, None) == 2
