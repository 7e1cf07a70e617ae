"""Losses and gradients of one update from job files and presets, against values that other engines computed.

The values are in ``tests/fixtures/peer_values.json``, written where the engines' packages are, by
``python -m benchmarks.peers.values PEERS --record``.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from benchmarks.peers import areal_updates, openrlhf_updates, trl_updates, verl_updates
from benchmarks.peers.comparison import TOLERANCE
from benchmarks.peers.updates import Job, digest, digests_apart, effects, make_inputs, settings_of_job, update_of
from benchmarks.peers.values import RECORDED
from flexrlhf.errors import UserError

MODULES = {"trl": trl_updates, "verl": verl_updates, "openrlhf": openrlhf_updates, "areal": areal_updates}
JOBS = [(package, job) for package, module in MODULES.items() for job in module.jobs()]


@cache
def recorded() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(RECORDED.read_text())
    return values


@pytest.mark.parametrize(("package", "job"), JOBS, ids=[f"{package}: {job.about}" for package, job in JOBS])
def test_a_job_has_the_values_that_its_engine_computes(package: str, job: Job) -> None:
    """Losses and gradients are equal, or the report of the translation says that they are not."""
    theirs = recorded()[package]["jobs"][job.name]
    try:
        spec, report = settings_of_job(job)
    except UserError:
        assert job.says
        return
    if job.says:
        assert job.says in effects(report)
        return
    ours = digest(job, update_of(spec, make_inputs(job, MODULES[package].scale_of(job))))
    assert digests_apart(ours, theirs) <= TOLERANCE


def test_every_job_is_recorded_and_no_other_is() -> None:
    names = {package: {job.name for of, job in JOBS if of == package} for package in MODULES}
    assert {package: set(values["jobs"]) for package, values in recorded().items()} == names


def test_values_tell_settings_apart() -> None:
    """Most jobs of a package have values of their own; the others say the same in other words."""
    for package, values in recorded().items():
        digests = [json.dumps(each) for each in values["jobs"].values()]
        assert len(set(digests)) > 0.6 * len(digests), package
