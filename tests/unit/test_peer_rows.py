"""`python -m benchmarks.peers --rows N`: numbers that do not fit are refused with those that do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers.__main__ import check_rows
from benchmarks.peers.speed.flexrlhf_steps import spec_of
from benchmarks.peers.speed.workloads import RANKS, PeerJob, PeerWorkload, workloads
from flexrlhf.config.spec import Spec

PPO, GRPO = ([one for one in workloads() if one.algorithm == name] for name in ("ppo", "grpo"))


def test_rows_of_the_workloads_fit() -> None:
    check_rows(workloads())


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (12, "--rows 12: ppo fixed-3M needs a multiple of 8, for 4 mini-batches on 2 ranks; use 8 or 16"),
        (0, "--rows 0: ppo fixed-3M needs a multiple of 8, for 4 mini-batches on 2 ranks; use 8"),
        (-3, "--rows -3: ppo fixed-3M needs a multiple of 8, for 4 mini-batches on 2 ranks; use 8"),
    ],
)
def test_ppo_needs_equal_mini_batches_on_all_ranks(rows: int, sentence: str) -> None:
    with pytest.raises(SystemExit) as caught:
        check_rows([replace(one, rows=rows) for one in PPO])
    assert str(caught.value) == sentence


def test_grpo_needs_whole_groups() -> None:
    """48 would do for PPO; the numbers that are named do for both."""
    with pytest.raises(SystemExit) as caught:
        check_rows([replace(one, rows=48) for one in (*PPO, *GRPO)])
    assert str(caught.value) == (
        "--rows 48: grpo fixed-3M needs a multiple of 32, for 2 mini-batches on 2 ranks with whole groups of 8 samples;"
        " use 32 or 64"
    )


@pytest.mark.parametrize("workload", workloads(), ids=lambda one: one.label)
def test_accepted_numbers_are_valid_settings(workload: PeerWorkload) -> None:
    """A rank's rows of a mini-batch, which is TRL's batch, are whole groups; the spec is valid here."""
    accepted = [rows for rows in range(97) if _is_accepted(replace(workload, rows=rows))]
    assert accepted[:2] == [workload.least_rows, 2 * workload.least_rows]
    for rows in accepted:
        batch = rows / RANKS / workload.mini_batches
        assert batch % workload.samples == 0
        Spec.parse(spec_of(PeerJob(replace(workload, rows=rows), Path("files"), 2), "test"))


def _is_accepted(workload: PeerWorkload) -> bool:
    try:
        check_rows([workload])
    except SystemExit:
        return False
    return True
